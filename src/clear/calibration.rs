//! What was measured on a machine, and what follows from it: kept, printed, saved, overridden. Pure.

use std::fmt;
use std::ops::RangeBounds;
use std::time::Duration;

use super::cpu::CpuDescription;
use super::method::Method;
use super::plan::{Concurrency, Reuse, Situation};
use crate::error::CalibrationError;

/// Which method clears best on a machine, by length, [`Concurrency`] and [`Reuse`], and how many workers of a
/// node are enough: measured by [`ZeroingServiceBuilder::calibrate`](crate::ZeroingServiceBuilder::calibrate),
/// used by [`ZeroingServiceBuilder::calibration`](crate::ZeroingServiceBuilder::calibration).
///
/// `Display` prints all of it as tables, with reasons. With the feature `serde` it can be saved and read back; what is
/// read is checked as a whole, and it is refused on another CPU model.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(try_from = "super::saved::Saved")
)]
pub struct Calibration {
    pub(super) cpu: CpuDescription,
    pub(super) page_bytes: u64,
    pub(super) workers: usize,
    pub(super) budget: Duration,
    pub(super) spent: Duration,
    pub(super) choices: Vec<Choice>,
    pub(super) scaling: Vec<Scaling>,
    pub(super) workers_per_node: usize,
}

/// The method for runs of at least [`from_bytes`](Self::from_bytes), up to the next choice for the same
/// situation.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Choice {
    /// For memory that will be read then.
    pub reuse: Reuse,
    /// While so many workers clear.
    pub concurrency: Concurrency,
    /// The shortest run it is for, in bytes: half of the size class.
    pub from_bytes: u64,
    /// The length in bytes that was measured.
    pub size_class: u64,
    /// What clears best.
    pub method: Method,
    /// What it writes then, in 10⁹ bytes a second, all workers together; `None` where it was not measured.
    pub gb_per_s: Option<f64>,
    /// Why this one.
    pub reason: Reason,
    /// Everything that was measured for this class, the fastest first.
    pub measured: Vec<Measured>,
}

/// What one method was seen to write.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Measured {
    /// The method.
    pub method: Method,
    /// The upper quartile of its readings, in 10⁹ bytes a second: what disturbs a reading only slows it down.
    pub gb_per_s: f64,
    /// How many readings.
    pub readings: usize,
}

/// What so many workers of one node write together.
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Scaling {
    /// Workers that cleared at the same time.
    pub workers: usize,
    /// The upper quartile of their readings, in 10⁹ bytes a second, all together.
    pub gb_per_s: f64,
}

/// Why a method was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum Reason {
    /// It was the fastest.
    Fastest,
    /// It was as fast as the fastest, within 2 %, and comes before it: non-temporal stores leave the caches to
    /// others, and narrow instructions run on more machines than wide ones.
    AsFast,
    /// Not measured, the time was up: the rule of [`CpuDescription::choose`].
    TooLittleTime,
    /// Not measured, there was too little memory: the rule of [`CpuDescription::choose`].
    TooLittleMemory,
    /// Not measured, the host did not start a second thread: the rule of [`CpuDescription::choose`].
    TooFewThreads,
    /// The caller's word.
    Overridden,
}

impl Calibration {
    /// The CPU it was measured on.
    #[must_use]
    pub fn cpu(&self) -> &CpuDescription {
        &self.cpu
    }

    /// The choices, by reuse, concurrency and length.
    #[must_use]
    pub fn choices(&self) -> &[Choice] {
        &self.choices
    }

    /// The choice for a run of `len` bytes; `None` for runs shorter than the least class, which the rule of
    /// [`CpuDescription::choose`] keeps with ordinary stores.
    #[must_use]
    pub fn choice(&self, len: u64, reuse: Reuse, concurrency: Concurrency) -> Option<&Choice> {
        self.choices_for(Situation { reuse, concurrency })
            .take_while(|choice| choice.from_bytes <= len)
            .last()
    }

    /// What was measured for one worker, two, and so on, of one node.
    #[must_use]
    pub fn scaling(&self) -> &[Scaling] {
        &self.scaling
    }

    /// How many workers of a node are enough: more gained less than 3 %.
    #[must_use]
    pub fn workers_per_node(&self) -> usize {
        self.workers_per_node
    }

    /// The size in bytes of the pages it was measured on.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// How many workers [`Concurrency::All`] stands for.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.workers
    }

    /// How long it took.
    #[must_use]
    pub fn spent(&self) -> Duration {
        self.spent
    }

    /// The same, with another method for the size classes within `lengths` (bytes), whatever was measured.
    ///
    /// Whether this CPU has it is looked at where the calibration is used.
    #[must_use]
    pub fn with_method(mut self, reuse: Reuse, lengths: impl RangeBounds<u64>, method: Method) -> Self {
        let meant = |choice: &&mut Choice| choice.reuse == reuse && lengths.contains(&choice.size_class);
        for choice in self.choices.iter_mut().filter(meant) {
            let measured = choice.measured.iter().find(|measured| measured.method == method);
            choice.gb_per_s = measured.map(|measured| measured.gb_per_s);
            choice.method = method;
            choice.reason = Reason::Overridden;
        }
        self
    }

    /// The same, with another number of workers a node.
    #[must_use]
    pub fn with_workers_per_node(mut self, workers: usize) -> Self {
        self.workers_per_node = workers.max(1);
        self
    }

    pub(super) fn choices_for(&self, situation: Situation) -> impl Iterator<Item = &Choice> + Clone {
        self.choices.iter().filter(move |choice| choice.situation() == situation)
    }

    /// Whether it was measured on a CPU of this model.
    pub(super) fn check_model(&self, here: &CpuDescription) -> Result<(), CalibrationError> {
        let model = |cpu: &CpuDescription| (cpu.vendor, cpu.family, cpu.model);
        if model(&self.cpu) == model(here) {
            return Ok(());
        }
        Err(CalibrationError::OtherCpu { saved: self.cpu.model_name(), here: here.model_name() })
    }
}

impl Reason {
    /// Whether nothing was measured.
    pub(super) fn is_the_rule(self) -> bool {
        matches!(self, Reason::TooLittleTime | Reason::TooLittleMemory | Reason::TooFewThreads)
    }
}

impl Choice {
    pub(super) fn situation(&self) -> Situation {
        Situation { reuse: self.reuse, concurrency: self.concurrency }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Reason::Fastest => "the fastest",
            Reason::AsFast => "as fast, and gentler",
            Reason::TooLittleTime => "by rule: too little time",
            Reason::TooLittleMemory => "by rule: too little memory",
            Reason::TooFewThreads => "by rule: no second thread",
            Reason::Overridden => "the caller's word",
        })
    }
}

impl fmt::Display for Choice {
    /// The reason, with the runners-up: "the fastest (clzero 93.1 GB/s, avx2 92.0, ...)".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.reason)?;
        if self.measured.is_empty() {
            return Ok(());
        }
        f.write_str(" (")?;
        for (rank, measured) in self.measured.iter().enumerate() {
            let (before, after) = if rank == 0 { ("", " GB/s") } else { (", ", "") };
            write!(f, "{before}{} {:.1}{after}", measured.method, measured.gb_per_s)?;
        }
        f.write_str(")")
    }
}
