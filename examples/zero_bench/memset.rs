//! `zero_bench memset`: how fast each method clears, over the length of a call.

use serde::Serialize;
use vm_zeroing::Method;

use crate::args::MemsetArgs;
use crate::contestant::{Crossover, Field, Kind, State, yardstick};
use crate::machine::Machine;
use crate::measure::{Shape, present, reading, take_turns};
use crate::output::look_whether_writable;
use crate::progress::Progress;
use crate::sizes::show;
use crate::stats::Stats;
use crate::{Failure, calibrate, tables};

/// All that came out.
#[derive(Debug, Clone, Serialize)]
pub struct Memset {
    pub state: State,
    pub page_size: String,
    /// Of memory on transparent hugepages: which part the kernel really gave.
    pub huge_share: Option<f64>,
    pub threads: usize,
    pub runs: usize,
    /// What `relative` is relative to.
    pub yardstick: String,
    pub sizes: Vec<AtSize>,
    /// Lengths at which Auto changes its choice.
    pub crossovers: Vec<Crossover>,
}

/// All contestants at one size.
#[derive(Debug, Clone, Serialize)]
pub struct AtSize {
    pub size_bytes: u64,
    /// What each thread clears in a call: the size, or its share of it.
    pub call_bytes: u64,
    /// What all threads clear in a reading.
    pub reading_bytes: u64,
    /// The fastest single method, by its median.
    pub best: String,
    pub lines: Vec<Line>,
}

/// One contestant at one size.
#[derive(Debug, Clone, Serialize)]
pub struct Line {
    pub name: String,
    pub kind: Kind,
    /// The method that stored; for Auto, the one it picked.
    pub method: Option<String>,
    pub non_temporal: Option<bool>,
    pub gb_per_s: Stats,
    /// Times as fast as the yardstick.
    pub relative: f64,
    /// Times as fast as the best single method.
    pub of_best: f64,
}

impl AtSize {
    pub fn line(&self, kind: Kind) -> Option<&Line> {
        self.lines.iter().find(|line| line.kind == kind)
    }
}

/// What a reading clears at least: more than the caches hold, so that cached stores pay for what they evict;
/// but no more than this, because a virtual machine may be shown its host's cache.
fn reading_bytes(machine: &Machine) -> u64 {
    (2 * machine.llc_bytes.unwrap_or(0)).clamp(64 << 20, 256 << 20)
}

pub fn run(args: &MemsetArgs, machine: &Machine) -> Result<Memset, Failure> {
    if let Some(path) = &args.plot {
        look_whether_writable(path).map_err(Failure::input)?;
    }
    let calibration = calibrate::obtain(&args.calibration)?;
    let field = Field::new(&args.methods, &calibration)?;
    let state = if args.hot { State::Hot } else { State::Cold };
    let at_least = args.reading.unwrap_or_else(|| reading_bytes(machine));
    let shape = |size| Shape::new(state, args.threads, size, at_least, machine.l2() / 2);
    let largest = args.sizes.0.iter().map(|size| shape(*size).memory_per_thread()).max().unwrap_or(0);
    let mut memory = present(args.page_size, &machine.cpu_list, args.threads, largest)?;
    let huge_share = args.page_size.huge_share(&memory);

    let contestants = field.contestants(state, 4096, args.threads)?.len();
    let progress = Progress::new(args.sizes.0.len() * contestants * (args.runs + 1));
    let mut sizes = Vec::new();
    for &size in &args.sizes.0 {
        let shape = shape(size);
        let contestants = field.contestants(state, shape.call, args.threads)?;
        let stats = take_turns(contestants.len(), args.runs, |index| {
            let contestant = &contestants[index];
            progress.say(format!("{}, {}", show(size), contestant.name));
            let rate = reading(contestant, shape, &mut memory, &machine.cpu_list);
            progress.advance();
            rate
        })?;
        let of_each = contestants
            .into_iter()
            .zip(stats)
            .map(|(contestant, stats)| (contestant.name, contestant.kind, contestant.method, stats));
        sizes.push(at_size(size, shape, of_each.collect()));
    }
    let ends = args.sizes.0.first().zip(args.sizes.0.last());
    let (from, to) = ends.map_or((0, 0), |(from, to)| (*from, *to));
    Ok(Memset {
        state,
        page_size: args.page_size.to_string(),
        huge_share,
        threads: args.threads,
        runs: args.runs,
        yardstick: yardstick().to_string(),
        sizes,
        crossovers: field.crossovers(state.hint(), args.threads, from, to),
    })
}

/// Compares the contestants of one size with each other.
pub fn at_size(size: u64, shape: Shape, of_each: Vec<(String, Kind, Option<Method>, Stats)>) -> AtSize {
    let singles = || of_each.iter().filter(|(_, kind, ..)| *kind == Kind::Method);
    let best = singles().max_by(|a, b| a.3.median.total_cmp(&b.3.median)).cloned();
    let own = singles().find(|(_, _, method, _)| *method == Some(yardstick())).cloned();
    let against = |stats: &Stats, other: &Option<(String, Kind, Option<Method>, Stats)>| {
        other.as_ref().map_or(0.0, |(.., other)| stats.against(other))
    };
    let lines = of_each
        .iter()
        .map(|(name, kind, method, stats)| Line {
            name: name.clone(),
            kind: *kind,
            method: method.map(|method| method.to_string()),
            non_temporal: method.map(Method::is_non_temporal),
            relative: against(stats, &own),
            of_best: against(stats, &best),
            gb_per_s: stats.clone(),
        })
        .collect();
    AtSize {
        size_bytes: size,
        call_bytes: shape.call,
        reading_bytes: shape.reading(),
        best: best.map_or(String::new(), |(name, ..)| name),
        lines,
    }
}

impl Memset {
    pub fn show(&self, width: u16) -> String {
        let share = self.huge_share.map_or(String::new(), |share| format!(" ({:.0} % of it)", share * 100.0));
        format!(
            "{} memory on {}{share}, threads: {}, runs: {}\n\
             GB/s (10^9 bytes a second): mean ± standard deviation, and times as fast as {}\n{}\n\
             Medians: the best single method and its GB/s; what Auto took, and how much of the best it reached\n{}",
            self.state,
            self.page_size,
            self.threads,
            self.runs,
            self.yardstick,
            tables::rates(self, width),
            tables::choices(self)
        )
    }
}
