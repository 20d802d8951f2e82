//! Floor 7: calibration runs. What is measured is turned into choices by `clear`, which has no clock.
//!
//! Threads are started for the run on one node, pinned as workers are, each with memory of its own. One of them
//! leads: it asks the [`Schedule`] for the next round until the time is up, and has the others take part in
//! rounds of several threads. Before each reading its memory is made cold or hot, and is never zero.

mod barrier;
mod order;
mod ring;
mod room;
mod schedule;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use crate::clear::{
    Calibration, Clearer, Concurrency, CpuDescription, Measurement, Method, Shortfall, Situation,
};
use crate::pool::{STACK, settle_in};
use crate::topology::{NodeId, Topology};
use barrier::Barrier;
use order::{Order, Span};
use ring::{Ring, SMALLEST};
use schedule::{Round, Schedule};

/// Of the budget, the part for making memory present: one in so many.
const PRESENT: u32 = 4;

/// What the kernel can make present at most, in bytes a second: more is not even mapped.
const FASTEST_PRESENT: f64 = 32e9;

/// What starting and ending the threads takes.
const CEREMONY: Duration = Duration::from_micros(300);

/// Measures the methods of `cpu` on one node of `topology`, with `workers` threads at most, within `budget`.
pub(crate) fn calibrate(
    cpu: CpuDescription,
    topology: &Topology,
    workers: usize,
    budget: Duration,
) -> Calibration {
    let start = Instant::now();
    let (node, cpus) = home(topology);
    let wanted = workers.min(cpus.len()).max(1);
    let (methods, clearers) = Method::ALL
        .into_iter()
        .filter_map(|method| Some((method, Clearer::only(method, &cpu).ok()?)))
        .unzip::<_, _, Vec<_>, Vec<_>>();
    let plan = Run {
        classes: Measurement::classes(&cpu),
        methods,
        clearers,
        populate_until: start + budget / PRESENT,
        deadline: start + budget.saturating_sub(CEREMONY),
        ring: ring_size(&cpu, wanted, budget),
    };
    let found = if budget <= CEREMONY || plan.ring < SMALLEST {
        let shortfall = if budget <= CEREMONY { Shortfall::Time } else { Shortfall::Memory };
        Found { threads: wanted, ..Found::nothing(shortfall) }
    } else {
        // A thread for each CPU: one on each. Fewer than CPUs: the scheduler knows which of them share a core.
        let settle = |index: usize| match cpus.get(index..=index) {
            Some(own) if wanted == cpus.len() => settle_in(own, Some(node)),
            _ => settle_in(cpus, Some(node)),
        };
        plan.with_threads(wanted, &settle)
    };
    let shortfalls = plan.shortfalls(&found, wanted);
    let calibration = Measurement {
        page_bytes: found.page_bytes,
        workers: if found.threads < 2 { wanted } else { found.threads },
        asked: workers,
        classes: plan.classes,
        readings: found.readings,
        scaling: found.scaling,
        shortfalls,
        cpu,
        budget,
        spent: start.elapsed(),
    }
    .decide();
    tracing::debug!(spent = ?calibration.spent(), threads = calibration.workers(), page_bytes = calibration.page_bytes(), "calibrated");
    calibration
}

/// The node that is measured: the first whose memory and CPUs a service would use.
fn home(topology: &Topology) -> (NodeId, &[u32]) {
    let with_cpus = |id: &NodeId| topology.node(*id).is_some_and(|node| !node.allowed_cpus().is_empty());
    let nodes = topology.default_memory_nodes();
    let node = nodes.iter().copied().find(with_cpus).or(nodes.first().copied()).unwrap_or(NodeId(0));
    (node, topology.cpus_serving(node))
}

/// What each of so many threads should have: the longest class, which is more than twice the last cache. Less
/// where memory is short.
fn ring_size(cpu: &CpuDescription, threads: usize, budget: Duration) -> u64 {
    let longest = Measurement::classes(cpu).last().copied().unwrap_or(SMALLEST);
    let in_time = (budget / PRESENT).as_secs_f64() * FASTEST_PRESENT;
    let share = room::room(Path::new("/")) / threads as u64;
    let in_time = (in_time as u64).next_multiple_of(SMALLEST);
    longest.min(in_time).min(share / SMALLEST * SMALLEST)
}

/// What all threads of a calibration know.
struct Run {
    classes: Vec<u64>,
    methods: Vec<Method>,
    clearers: Vec<Clearer>,
    populate_until: Instant,
    deadline: Instant,
    ring: u64,
}

/// What was found.
struct Found {
    readings: Vec<crate::clear::Readings>,
    scaling: Vec<(usize, Vec<f64>)>,
    threads: usize,
    page_bytes: u64,
    /// The longest class that one thread, and that all threads had memory for.
    longest: [u64; 2],
    /// Why not longer ones.
    shortfall: [Option<Shortfall>; 2],
}

impl Found {
    fn nothing(shortfall: Shortfall) -> Self {
        Self {
            readings: Vec::new(),
            scaling: Vec::new(),
            threads: 1,
            page_bytes: crate::sys::page_size(),
            longest: [0; 2],
            shortfall: [Some(shortfall); 2],
        }
    }
}

/// A follower as the leader knows it.
struct Follower {
    orders: Sender<Arc<Order>>,
    spans: Receiver<Vec<Span>>,
    ring: Receiver<Result<RingFacts, Shortfall>>,
    begin: Sender<()>,
}

#[derive(Debug, Clone, Copy)]
struct RingFacts {
    len: u64,
    page_bytes: u64,
    shortfall: Option<Shortfall>,
}

impl RingFacts {
    fn of(ring: &Ring) -> Self {
        Self { len: ring.len(), page_bytes: ring.page_bytes, shortfall: ring.shortfall }
    }
}

impl Run {
    /// Starts the threads and measures; on the calling thread if not even one can be started.
    fn with_threads(&self, wanted: usize, settle: &(impl Fn(usize) + Sync)) -> Found {
        thread::scope(|scope| {
            let named =
                |index| thread::Builder::new().name(format!("vmz-measure-{index}")).stack_size(STACK);
            let (hand_over, handed_over) = mpsc::channel::<Vec<Follower>>();
            let leader = named(0).spawn_scoped(scope, move || {
                settle(0);
                self.lead(handed_over.recv().unwrap_or_default())
            });
            let leader = match leader {
                Ok(leader) => leader,
                Err(error) => {
                    tracing::warn!(%error, "the host starts no thread to measure with; measuring on the calling one");
                    return self.lead(Vec::new());
                }
            };
            let (ready, started) = mpsc::channel();
            let mut followers = Vec::new();
            for index in 1..wanted {
                let (orders, ordered) = mpsc::channel::<Arc<Order>>();
                let (report, spans) = mpsc::channel();
                let (tell, ring) = mpsc::channel();
                let (begin, begun) = mpsc::channel();
                let ready = ready.clone();
                let body = move || {
                    settle(index);
                    let _ = ready.send(());
                    drop(ready);
                    if begun.recv().is_err() {
                        return;
                    }
                    match Ring::make(self.ring, self.populate_until) {
                        Ok(mut ring) => {
                            let _ = tell.send(Ok(RingFacts::of(&ring)));
                            for order in ordered {
                                let _ = report.send(order.carry_out(&self.clearers, &mut ring, None));
                            }
                        }
                        Err(shortfall) => {
                            let _ = tell.send(Err(shortfall));
                        }
                    }
                };
                match named(index).spawn_scoped(scope, body) {
                    Ok(_) => followers.push(Follower { orders, spans, ring, begin }),
                    Err(error) => {
                        tracing::warn!(wanted, started = index, %error, "the host refused more threads to measure with; going on with fewer");
                        break;
                    }
                }
            }
            drop(ready);
            // Before anybody populates: a new thread needs the lock that populating holds.
            started.iter().for_each(drop);
            let _ = hand_over.send(followers);
            leader.join().unwrap_or_else(|_| Found::nothing(Shortfall::Threads))
        })
    }

    /// Measures until the time is up.
    fn lead(&self, mut followers: Vec<Follower>) -> Found {
        let threads = 1 + followers.len();
        followers.retain(|follower| follower.begin.send(()).is_ok());
        let began = Instant::now();
        let made = Ring::make(self.ring, self.populate_until);
        let others: Vec<_> = followers.iter().map(|follower| follower.ring.recv()).collect();
        let populating = began.elapsed();
        let mut ring = match made {
            Ok(ring) => ring,
            Err(shortfall) => return Found { threads, ..Found::nothing(shortfall) },
        };
        let own = RingFacts::of(&ring);
        let all = others.iter().try_fold(own, |least, other| match other {
            Ok(Ok(facts)) => Ok(RingFacts {
                len: least.len.min(facts.len),
                page_bytes: least.page_bytes.min(facts.page_bytes),
                shortfall: least.shortfall.or(facts.shortfall),
            }),
            Ok(Err(shortfall)) => Err(*shortfall),
            Err(_) => Err(Shortfall::Threads),
        });
        let (page_bytes, longest, shortfall) = match all {
            Ok(all) => (all.page_bytes, [own.len, all.len], [own.shortfall, all.shortfall]),
            Err(shortfall) => (own.page_bytes, [own.len, 0], [own.shortfall, Some(shortfall)]),
        };
        // Giving the memory back takes time, too.
        let deadline = self.deadline.checked_sub(populating / 8).unwrap_or(self.deadline);
        let mut schedule = Schedule::new(&self.classes, &self.methods, threads, longest);
        while let Some(round) = schedule.next(deadline.saturating_duration_since(Instant::now())) {
            let start = Instant::now();
            let rates = self.measure(&schedule, &round, &followers, &mut ring, deadline);
            schedule.book(&round, start.elapsed(), &rates);
        }
        Found {
            readings: schedule.readings(),
            scaling: schedule.scaling(),
            threads,
            page_bytes,
            longest,
            shortfall,
        }
    }

    /// One reading of each candidate of a round, in 10⁹ bytes a second; fewer if the time was up.
    fn measure(
        &self,
        schedule: &Schedule,
        round: &Round,
        followers: &[Follower],
        ring: &mut Ring,
        deadline: Instant,
    ) -> Vec<f64> {
        let race = schedule.race_of(round);
        let candidates: Vec<_> = schedule.candidates(round).collect();
        let mut rates = Vec::with_capacity(candidates.len());
        for alike in candidates.chunk_by(|a, b| a.threads == b.threads) {
            let threads = alike.first().map_or(1, |candidate| candidate.threads);
            let index_of = |method| self.methods.iter().position(|known| *known == method);
            let order = Arc::new(Order {
                situation: race.situation,
                class: race.class,
                bytes: race.bytes,
                clearers: alike.iter().filter_map(|candidate| index_of(candidate.method)).collect(),
                barrier: Barrier::new(threads),
                stopped: AtomicBool::new(false),
            });
            let taking_part = &followers[..(threads - 1).min(followers.len())];
            for follower in taking_part {
                let _ = follower.orders.send(Arc::clone(&order));
            }
            let own = order.carry_out(&self.clearers, ring, Some(deadline));
            let mut spans = vec![own];
            spans.extend(taking_part.iter().filter_map(|follower| follower.spans.recv().ok()));
            let readings = spans.iter().map(Vec::len).min().unwrap_or(0);
            rates.extend((0..readings).map(|reading| {
                let of_reading = || spans.iter().filter_map(|spans| spans.get(reading));
                let (start, end) =
                    (of_reading().map(|span| span.start).min(), of_reading().map(|span| span.end).max());
                let took = start.zip(end).map_or(Duration::ZERO, |(start, end)| end - start);
                (race.bytes * threads as u64) as f64 / took.as_nanos() as f64
            }));
            if order.stopped.load(Ordering::Relaxed) {
                break;
            }
        }
        rates
    }

    /// Why each class would not have been measured.
    fn shortfalls(&self, found: &Found, wanted: usize) -> Vec<(Situation, u64, Shortfall)> {
        let all = Situation::ALL
            .into_iter()
            .flat_map(|situation| self.classes.iter().map(move |class| (situation, *class)));
        let why = |situation: Situation, class| {
            let index = situation.concurrency as usize;
            match found.shortfall[index] {
                _ if situation.concurrency == Concurrency::All && found.threads < wanted.min(2) => {
                    Shortfall::Threads
                }
                Some(shortfall) if class > found.longest[index] => shortfall,
                _ => Shortfall::Time,
            }
        };
        all.map(|(situation, class)| (situation, class, why(situation, class))).collect()
    }
}
