//! Floor 7: calibration runs. What is measured is turned into choices by `clear`, which has no clock.
//!
//! Threads are started for the run on one node, pinned as workers are, each with memory of its own. One of them
//! leads: it asks the [`Schedule`] for the next round until the time is up, and has the others take part in
//! rounds of several threads. Before each reading the memory is made cold or hot, and is not zero.

mod barrier;
mod crew;
mod order;
mod ring;
mod room;
mod schedule;
#[cfg(test)]
mod tests;

use std::num::NonZero;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::clear::{
    Calibration, Clearer, Concurrency, CpuDescription, Measurement, Method, Shortfall, Situation,
};
use crate::sys::page_size;
use crate::topology::{NodeId, Topology};
use crew::Terms;
use ring::{Patience, SMALLEST};
use schedule::Schedule;

/// Of the budget, the part for making memory present: one in so many, and twice that where the kernel is slow.
const PRESENT: u32 = 4;

/// Bytes of memory for each thread and second of the budget: there is no time to measure longer runs than that.
const BYTES_PER_SECOND: f64 = 1e9;

/// What starting and ending the threads takes. Less time than that is none.
const CEREMONY: Duration = Duration::from_micros(500);

/// Measures the methods of `cpu` on one node of `topology`, with `workers` threads at most, within `budget`.
pub(crate) fn calibrate(
    cpu: CpuDescription,
    topology: &Topology,
    workers: NonZero<usize>,
    budget: Duration,
) -> Calibration {
    let start = Instant::now();
    let classes = Measurement::classes(&cpu);
    let (node, cpus) = home(topology);
    let threads = workers.min(NonZero::new(cpus.len()).unwrap_or(NonZero::<usize>::MIN));
    let offered = |method| Some((method, Clearer::only(method, &cpu).ok()?));
    let room = room::room(Path::new("/")) / threads.get() as u64;
    let (ring, short_of) = ring_bytes(&classes, room, budget);
    let terms = Terms {
        node,
        cpus,
        threads,
        clearers: Method::ALL.into_iter().filter_map(offered).collect(),
        ring,
        short_of,
        home: (topology.nodes().len() > 1).then_some(node.0),
        // A budget beyond what the clock can say is no limit: a year is none either.
        patience: Patience {
            until: later(start, budget / PRESENT),
            at_the_latest: later(start, budget / PRESENT * 2),
        },
        deadline: later(start, budget.saturating_sub(CEREMONY)),
    };
    let mut measurement = Measurement {
        page_bytes: page_size(),
        workers: threads.get(),
        asked: workers.get(),
        readings: Vec::new(),
        scaling: Vec::new(),
        shortfalls: Vec::new(),
        classes,
        cpu,
        budget,
        spent: Duration::ZERO,
    };
    if budget > CEREMONY {
        measure(&terms, &mut measurement);
    }
    measurement.spent = start.elapsed();
    let calibration = measurement.decide();
    tracing::debug!(spent = ?calibration.spent(), workers = calibration.workers(), page_bytes = calibration.page_bytes(), "calibrated");
    calibration
}

/// Adds what the threads found.
fn measure(terms: &Terms<'_>, measurement: &mut Measurement) {
    let classes = measurement.classes.clone();
    let short = |concurrency: Concurrency, from: u64, shortfall| {
        let situations =
            Situation::ALL.into_iter().filter(move |situation| situation.concurrency == concurrency);
        let classes = classes.clone().into_iter().filter(move |class| *class > from);
        situations.flat_map(move |situation| classes.clone().map(move |class| (situation, class, shortfall)))
    };
    if terms.ring < SMALLEST {
        for &concurrency in Concurrency::ALL {
            measurement.shortfalls.extend(short(concurrency, 0, Shortfall::Memory));
        }
        return;
    }
    let methods: Vec<Method> = terms.clearers.iter().map(|(method, _)| *method).collect();
    let found = terms.with_crew(|mut crew| {
        let longest = crew.rings.map(|ring| ring.map_or(0, |ring| ring.len));
        let mut schedule = Schedule::new(&classes, &methods, crew.threads(), longest);
        crew.measure(&mut schedule);
        (schedule, crew.threads(), crew.rings)
    });
    let Some((schedule, threads, rings)) = found else { return };
    measurement.readings = schedule.readings();
    measurement.scaling = schedule.scaling();
    for (concurrency, ring) in Concurrency::ALL.iter().copied().zip(rings) {
        let (longest, why) = ring.map_or_else(|why| (0, Some(why)), |ring| (ring.len, ring.shortfall));
        measurement.shortfalls.extend(short(concurrency, longest, why.unwrap_or(terms.short_of)));
        if let Ok(ring) = ring {
            measurement.page_bytes = ring.page_bytes;
        }
    }
    match threads {
        1 if measurement.workers > 1 => {
            measurement.shortfalls.retain(|(situation, ..)| situation.concurrency == Concurrency::One);
            measurement.shortfalls.extend(short(Concurrency::All, 0, Shortfall::Threads));
        }
        _ => measurement.workers = threads,
    }
}

/// The node that is measured: the first whose memory and CPUs a service would use.
fn home(topology: &Topology) -> (NodeId, &[u32]) {
    let with_cpus = |id: &NodeId| topology.node(*id).is_some_and(|node| !node.allowed_cpus().is_empty());
    let nodes = topology.default_memory_nodes();
    let node = nodes.iter().copied().find(with_cpus).or(nodes.first().copied()).unwrap_or(NodeId(0));
    (node, topology.cpus_serving(node))
}

/// What each thread should have: as much as the longest class, which is more than twice the last cache, as far as
/// there can be time for it and `room`. And what it is short of, if it is shorter.
fn ring_bytes(classes: &[u64], room: u64, budget: Duration) -> (u64, Shortfall) {
    let longest = classes.last().copied().unwrap_or(SMALLEST);
    let in_time = (budget.as_secs_f64() * BYTES_PER_SECOND) as u64;
    let wanted = longest.min(in_time).next_multiple_of(SMALLEST);
    match room / SMALLEST * SMALLEST {
        room if room < wanted => (room, Shortfall::Memory),
        _ => (wanted, Shortfall::Time),
    }
}

fn later(start: Instant, by: Duration) -> Instant {
    const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
    start.checked_add(by.min(YEAR)).unwrap_or(start)
}
