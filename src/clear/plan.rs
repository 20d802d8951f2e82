//! Which method clears a run of bytes: a table by length, for each situation. Pure.

use std::iter;
use std::ops::Range;

use super::calibration::{Calibration, Choice};
use super::cpu::CpuDescription;
use super::method::Method;
use super::rule;

/// When the zeroes will be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum Reuse {
    /// Not soon, as far as anybody knows: the memory is in no cache, and nothing is gained by leaving it there.
    /// Non-temporal stores may be used; the caches stay with the running guests.
    #[default]
    Cold,
    /// At once, by this CPU or one that shares a cache with it. Ordinary stores only: as much of the memory as
    /// fits stays in the caches. Over memory that does not fit, and over memory that nobody reads, it costs up
    /// to half of the speed.
    Soon,
}

/// How many workers of a node clear at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum Concurrency {
    /// One: a job of a single chunk, or a service with one worker.
    One,
    /// All of them, sharing the memory's bandwidth.
    All,
}

impl Reuse {
    /// Both of them.
    pub const ALL: &'static [Reuse] = &[Reuse::Cold, Reuse::Soon];
}

impl Concurrency {
    /// Both of them.
    pub const ALL: &'static [Concurrency] = &[Concurrency::One, Concurrency::All];
}

/// What a table is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Situation {
    pub(crate) reuse: Reuse,
    pub(crate) concurrency: Concurrency,
}

impl Situation {
    pub(crate) const ALL: [Situation; 4] = [
        Situation { reuse: Reuse::Cold, concurrency: Concurrency::One },
        Situation { reuse: Reuse::Cold, concurrency: Concurrency::All },
        Situation { reuse: Reuse::Soon, concurrency: Concurrency::One },
        Situation { reuse: Reuse::Soon, concurrency: Concurrency::All },
    ];

    fn index(self) -> usize {
        2 * self.reuse as usize + self.concurrency as usize
    }
}

/// From this many bytes on (until the next step), this method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Step {
    from: u64,
    method: Method,
}

/// What a service clears with, by situation and length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plan {
    /// For each situation: ascending, the first from 0, no two neighbours alike.
    tables: [Box<[Step]>; 4],
}

impl Plan {
    /// One method for every length.
    pub(super) fn only(method: Method) -> Self {
        Self::of(|_| vec![(0, method)])
    }

    /// The rule of [`CpuDescription::choose`], among the methods that `offered` lets through.
    pub(super) fn by_rule(cpu: &CpuDescription, offered: impl Fn(Method) -> bool) -> Self {
        Self::of(|situation| rule::steps(cpu, situation.reuse, &offered))
    }

    /// The choices of a calibration; the rule for lengths where it has none, where it says that the rule chose,
    /// and where it chose a method that `offered` holds back.
    pub(super) fn calibrated(
        calibration: &Calibration,
        cpu: &CpuDescription,
        offered: impl Fn(Method) -> bool,
    ) -> Self {
        let rule = Self::by_rule(cpu, &offered);
        Self::of(|situation| {
            let ruled = |lengths: Range<u64>| {
                let start = (lengths.start, rule.method_for(lengths.start, situation));
                let steps = rule.table(situation).iter().map(|step| (step.from, step.method));
                let later = steps.filter(move |(from, _)| lengths.start < *from && *from < lengths.end);
                iter::once(start).chain(later)
            };
            let choices: Vec<&Choice> = calibration.choices_for(situation).collect();
            let shorter = choices.first().map_or(u64::MAX, |choice| choice.from_bytes);
            let mut steps: Vec<_> = ruled(0..shorter).collect();
            for (index, choice) in choices.iter().enumerate() {
                let end = choices.get(index + 1).map_or(u64::MAX, |longer| longer.from_bytes);
                if choice.reason.is_the_rule() || !offered(choice.method) {
                    steps.extend(ruled(choice.from_bytes..end));
                } else {
                    steps.push((choice.from_bytes, choice.method));
                }
            }
            steps
        })
    }

    fn of(steps: impl Fn(Situation) -> Vec<(u64, Method)>) -> Self {
        Self {
            tables: Situation::ALL.map(|situation| {
                let mut table: Vec<Step> =
                    steps(situation).into_iter().map(|(from, method)| Step { from, method }).collect();
                table.dedup_by_key(|step| step.method);
                table.into_boxed_slice()
            }),
        }
    }

    fn table(&self, situation: Situation) -> &[Step] {
        self.tables.get(situation.index()).map_or(&[], |table| table)
    }

    /// The method for a run of `len` bytes.
    pub(super) fn method_for(&self, len: u64, situation: Situation) -> Method {
        // Few steps, the long lengths last: from the end, because that is what most bytes are cleared in.
        let step = self.table(situation).iter().rev().find(|step| step.from <= len);
        step.map_or(Method::Portable, |step| step.method)
    }
}
