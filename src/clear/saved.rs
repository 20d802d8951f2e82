//! A calibration as it is read: believed only as a whole. Which methods this CPU has is looked at where it is used.

use std::collections::BTreeSet;
use std::time::Duration;

use super::calibration::{Calibration, Choice, Scaling};
use super::cpu::CpuDescription;
use super::plan::Situation;
use crate::error::CalibrationError;

/// Longer runs are not measured by anybody.
const LONGEST: u64 = 1 << 40;

#[derive(serde::Deserialize)]
pub(super) struct Saved {
    cpu: CpuDescription,
    page_bytes: u64,
    workers: usize,
    budget: Duration,
    spent: Duration,
    choices: Vec<Choice>,
    scaling: Vec<Scaling>,
    workers_per_node: usize,
}

impl TryFrom<Saved> for Calibration {
    type Error = CalibrationError;

    fn try_from(saved: Saved) -> Result<Self, CalibrationError> {
        let Saved { cpu, page_bytes, workers, budget, spent, choices, scaling, workers_per_node } = saved;
        let read = Self { cpu, page_bytes, workers, budget, spent, choices, scaling, workers_per_node };
        match read.what_is_wrong() {
            None => Ok(read),
            Some(what) => Err(CalibrationError::Malformed { what }),
        }
    }
}

impl Calibration {
    /// The first thing that makes it no calibration.
    pub(super) fn what_is_wrong(&self) -> Option<String> {
        let measured = self.scaling.iter().map(|scaling| scaling.workers);
        if measured.chain([self.workers, self.workers_per_node]).any(|workers| workers == 0) {
            return Some("it names no worker".to_owned());
        }
        if !self.page_bytes.is_power_of_two() {
            return Some(format!("{} bytes are no size of a page", self.page_bytes));
        }
        let choices = || self.choices.iter();
        let rates = choices().flat_map(|choice| {
            choice.gb_per_s.into_iter().chain(choice.measured.iter().map(|measured| measured.gb_per_s))
        });
        let mut rates = rates.chain(self.scaling.iter().map(|scaling| scaling.gb_per_s));
        if let Some(rate) = rates.find(|rate| !rate.is_finite() || *rate <= 0.0) {
            return Some(format!("{rate} is no speed"));
        }
        if let Some(choice) = choices().find(|choice| choice.size_class > LONGEST) {
            return Some(format!("runs of {} bytes were never measured", choice.size_class));
        }
        if let Some(Choice { from_bytes, size_class, .. }) =
            choices().find(|choice| choice.from_bytes > choice.size_class)
        {
            return Some(format!(
                "a choice measured on {size_class} bytes holds from {from_bytes} bytes on only"
            ));
        }
        let twice = |choice: &&Choice| {
            let different: BTreeSet<_> = choice.measured.iter().map(|measured| measured.method).collect();
            different.len() < choice.measured.len()
        };
        if let Some(choice) = choices().find(twice) {
            return Some(format!("a method is listed twice for runs of {} bytes", choice.size_class));
        }
        if !self.scaling.is_sorted_by(|a, b| a.workers < b.workers) {
            return Some("its numbers of workers do not ascend".to_owned());
        }
        Situation::ALL.into_iter().find_map(|situation| {
            let of = || self.choices_for(situation);
            let ascend = of().is_sorted_by(|a, b| a.from_bytes < b.from_bytes && a.size_class < b.size_class);
            match of().next() {
                None => Some(format!("it chooses nothing ({situation:?})")),
                Some(_) if !ascend => {
                    Some(format!("the lengths of its choices do not ascend ({situation:?})"))
                }
                Some(_) => None,
            }
        })
    }
}
