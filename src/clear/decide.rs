//! From readings to choices. Pure: whoever measures has the clock.

use std::time::Duration;

use super::calibration::{Calibration, Choice, Measured, Reason, Scaling};
use super::cpu::CpuDescription;
use super::method::Method;
use super::plan::{Concurrency, Reuse, Situation};

/// Methods this close to the fastest count as equally fast.
const AS_FAST: f64 = 0.98;

/// One reading is no measurement: something else may have run.
const LEAST_READINGS: usize = 2;

/// A worker count this close to the fastest one is enough.
const ENOUGH: f64 = 0.97;

/// Among equally fast methods, the earlier one. Those that leave the caches alone first, of them the one with
/// the fewest instructions a line and the narrowest registers; the ones nobody should run without a gain last.
const GENTLEST: [Method; 9] = [
    Method::Clzero,
    Method::Avx2,
    Method::Sse2,
    Method::Movnti,
    Method::Avx512,
    Method::Movdir64b,
    Method::RepStosb,
    Method::RepStosq,
    Method::Portable,
];

/// What was read of one method in one size class.
#[derive(Debug, Clone)]
pub(crate) struct Readings {
    pub(crate) situation: Situation,
    /// The length in bytes.
    pub(crate) size_class: u64,
    pub(crate) method: Method,
    /// 10⁹ bytes a second, a reading each.
    pub(crate) gb_per_s: Vec<f64>,
}

/// Why a size class has no readings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shortfall {
    Time,
    Memory,
    Threads,
}

/// Everything that was measured.
#[derive(Debug, Clone)]
pub(crate) struct Measurement {
    pub(crate) cpu: CpuDescription,
    pub(crate) page_bytes: u64,
    /// What `Concurrency::All` means; where it is one, that is as `Concurrency::One`.
    pub(crate) workers: usize,
    /// How many workers a node were asked for, more than there may be CPUs here.
    pub(crate) asked: usize,
    pub(crate) budget: Duration,
    pub(crate) spent: Duration,
    /// The size classes, ascending.
    pub(crate) classes: Vec<u64>,
    pub(crate) readings: Vec<Readings>,
    /// Readings of so many workers on cold memory.
    pub(crate) scaling: Vec<(usize, Vec<f64>)>,
    /// Why a class has no readings; the time was up where nothing is said.
    pub(crate) shortfalls: Vec<(Situation, u64, Shortfall)>,
}

impl Measurement {
    /// The size classes for a CPU: from 4 KiB by fours to 64 MiB, and to twice the last cache where that is
    /// more, 1 GiB at most. A cache that is not shown, or shown as nothing, adds none.
    pub(crate) fn classes(cpu: &CpuDescription) -> Vec<u64> {
        let beyond = cpu.llc_bytes.unwrap_or(0).saturating_mul(2).clamp(64 << 20, 1 << 30);
        let mut classes: Vec<u64> = (0..8).map(|step| 4096 << (2 * step)).collect();
        classes.extend(Some(beyond.next_power_of_two()).filter(|beyond| *beyond > 64 << 20));
        classes
    }

    /// The methods worth measuring: ordinary stores only where the zeroes are to stay in the caches.
    pub(crate) fn candidates(reuse: Reuse) -> impl Iterator<Item = Method> {
        Method::ALL.into_iter().filter(move |method| reuse == Reuse::Cold || !method.is_non_temporal())
    }

    /// What follows from it.
    pub(crate) fn decide(self) -> Calibration {
        let choices = Situation::ALL
            .into_iter()
            .flat_map(|situation| self.classes.iter().map(move |class| (situation, *class)))
            .map(|(situation, class)| self.choose(situation, class))
            .collect();
        let scaling: Vec<Scaling> = self
            .scaling
            .iter()
            .filter_map(|(workers, rates)| Some(Scaling { workers: *workers, gb_per_s: typical(rates)? }))
            .collect();
        let fastest = scaling.iter().map(|scaling| scaling.gb_per_s).fold(0.0, f64::max);
        let enough = scaling.iter().filter(|scaling| scaling.gb_per_s >= ENOUGH * fastest);
        let enough = enough.map(|scaling| scaling.workers).min();
        // Where even the last worker gained, more of them might; another machine has the CPUs for them.
        let limit = enough.filter(|enough| scaling.iter().any(|scaling| scaling.workers > *enough));
        let workers_per_node = limit.unwrap_or(self.asked).max(1);
        Calibration {
            choices,
            scaling,
            workers_per_node,
            cpu: self.cpu,
            page_bytes: self.page_bytes,
            workers: self.workers.max(1),
            budget: self.budget,
            spent: self.spent,
        }
    }

    fn choose(&self, situation: Situation, size_class: u64) -> Choice {
        // All of one are one.
        let read = if self.workers > 1 {
            situation
        } else {
            Situation { concurrency: Concurrency::One, ..situation }
        };
        let of_class = |readings: &&Readings| readings.situation == read && readings.size_class == size_class;
        let mut measured: Vec<Measured> = Self::candidates(situation.reuse)
            .filter_map(|method| {
                let readings = self.readings.iter().filter(of_class).filter(|read| read.method == method);
                let rates: Vec<f64> = readings.flat_map(|read| read.gb_per_s.iter().copied()).collect();
                let readings = rates.iter().filter(|rate| is_speed(**rate)).count();
                Some(Measured { method, gb_per_s: typical(&rates)?, readings })
            })
            .collect();
        measured.sort_by(|a, b| b.gb_per_s.total_cmp(&a.gb_per_s));
        let fastest = measured.first().copied();
        let least = fastest.map_or(0.0, |fastest| AS_FAST * fastest.gb_per_s);
        let as_fast = measured.iter().take_while(|measured| measured.gb_per_s >= least);
        let gentlest = as_fast.min_by_key(|measured| rank(measured.method)).copied();
        let enough = fastest.is_some_and(|fastest| fastest.readings >= LEAST_READINGS);
        let (method, gb_per_s, reason) = match (fastest, gentlest.filter(|_| enough)) {
            (Some(fastest), Some(chosen)) if fastest.method == chosen.method => {
                (chosen.method, Some(chosen.gb_per_s), Reason::Fastest)
            }
            (_, Some(chosen)) => (chosen.method, Some(chosen.gb_per_s), Reason::AsFast),
            (_, None) => {
                let ruled = self.cpu.choose(size_class, situation.reuse);
                let once = measured.iter().find(|measured| measured.method == ruled);
                (ruled, once.map(|once| once.gb_per_s), self.why_not(read, size_class))
            }
        };
        let Situation { reuse, concurrency } = situation;
        let from_bytes = size_class / 2;
        Choice { reuse, concurrency, from_bytes, size_class, method, gb_per_s, reason, measured }
    }

    fn why_not(&self, situation: Situation, size_class: u64) -> Reason {
        let of_class =
            |(of, class, _): &&(Situation, u64, Shortfall)| (*of, *class) == (situation, size_class);
        match self.shortfalls.iter().find(of_class).map(|(.., shortfall)| *shortfall) {
            None | Some(Shortfall::Time) => Reason::TooLittleTime,
            Some(Shortfall::Memory) => Reason::TooLittleMemory,
            Some(Shortfall::Threads) => Reason::TooFewThreads,
        }
    }
}

fn rank(method: Method) -> usize {
    GENTLEST.iter().position(|known| *known == method).unwrap_or(GENTLEST.len())
}

/// The upper quartile to a megabyte a second, so that it looks well where it is saved and is read back as it was.
fn typical(rates: &[f64]) -> Option<f64> {
    upper_quartile(rates).map(|rate| (rate * 1e3).round() / 1e3).filter(|rate| is_speed(*rate))
}

fn is_speed(rate: f64) -> bool {
    rate.is_finite() && rate > 0.0
}

/// The upper quartile: three quarters of the readings are no faster. What disturbs a reading only slows it down, and
/// of a few readings more than one may be disturbed; of many, a single lucky one does not count. `None` of none.
pub(crate) fn upper_quartile(rates: &[f64]) -> Option<f64> {
    let mut sorted: Vec<f64> = rates.iter().copied().filter(|rate| is_speed(*rate)).collect();
    sorted.sort_by(f64::total_cmp);
    sorted.get((3 * sorted.len()).div_ceil(4).checked_sub(1)?).copied()
}
