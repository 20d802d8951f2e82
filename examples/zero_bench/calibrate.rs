//! `zero_bench calibrate`: what the library measures of this machine, and what it makes of it.

use std::fs;
use std::path::Path;

use serde::Serialize;
use vm_zeroing::{Calibration, CalibrationError, Clearer, Concurrency, Reuse, ZeroingService};

use crate::args::{CalibrateArgs, CalibrationArgs};
use crate::output::{look_whether_writable, write};
use crate::{Failure, tables};

/// All that came out.
#[derive(Debug, Clone, Serialize)]
pub struct Calibrate {
    pub calibration: Calibration,
}

/// A calibration that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("cannot read {path}: {source}")]
    Unreadable { path: String, source: std::io::Error },
    #[error("{path} holds no calibration: {source}; save one by calibrate --save")]
    Malformed { path: String, source: serde_json::Error },
    #[error("{path}: {source}")]
    Refused { path: String, source: CalibrationError },
}

/// Loads the calibration that is asked for, or measures one.
pub fn obtain(args: &CalibrationArgs) -> Result<Calibration, Failure> {
    match &args.load {
        Some(path) => load(path, false).map_err(Failure::input),
        None => Ok(ZeroingService::builder().calibrate(args.budget.0)?),
    }
}

/// A calibration from a file; of another CPU model, or with methods that are not here, only by `force`.
pub fn load(path: &Path, force: bool) -> Result<Calibration, LoadError> {
    let name = || path.display().to_string();
    let text = fs::read_to_string(path).map_err(|source| LoadError::Unreadable { path: name(), source })?;
    let calibration: Calibration =
        serde_json::from_str(&text).map_err(|source| LoadError::Malformed { path: name(), source })?;
    match Clearer::calibrated(&calibration) {
        Err(source) if !force => Err(LoadError::Refused { path: name(), source }),
        _ => Ok(calibration),
    }
}

pub fn run(args: &CalibrateArgs) -> Result<Calibrate, Failure> {
    if let Some(path) = &args.save {
        look_whether_writable(path).map_err(Failure::input)?;
    }
    let calibration = match &args.calibration.load {
        Some(path) => load(path, args.force).map_err(Failure::input)?,
        None => obtain(&args.calibration)?,
    };
    if let Some(path) = &args.save {
        write(path, &serde_json::to_string_pretty(&calibration)?)?;
    }
    Ok(Calibrate { calibration })
}

impl Calibrate {
    pub fn show(&self, width: u16) -> String {
        let calibration = &self.calibration;
        let mut text = format!(
            "measured in {:.0} ms on pages of {}; GB/s are 10^9 bytes a second\n{}\nworkers a node that are enough: {}",
            calibration.spent().as_secs_f64() * 1e3,
            crate::sizes::show(calibration.page_bytes()),
            tables::choices_of(calibration, width),
            calibration.workers_per_node()
        );
        let each =
            calibration.scaling().iter().map(|of| format!("{} reach {:.1} GB/s", of.workers, of.gb_per_s));
        let each: Vec<String> = each.collect();
        if !each.is_empty() {
            text += &format!(" ({})", each.join(", "));
        }
        text
    }
}

/// How a table names what a choice is for.
pub fn situation(reuse: Reuse, concurrency: Concurrency, workers: usize) -> String {
    let memory = if reuse == Reuse::Soon { "read soon" } else { "cold" };
    let at_once = if concurrency == Concurrency::One { 1 } else { workers };
    format!("{memory}, {at_once} at once")
}
