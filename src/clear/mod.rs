//! Floor 1: the instructions that clear memory, which CPU has them, and the choice between them (pure).
//!
//! [`Method`] names the ways, [`CpuDescription`] says which of them a CPU has and which one is best for a
//! length. A [`Clearer`] is the proof that what it will run exists on the CPU under us, so clearing a
//! [`Chunk`] (itself the proof that its bytes may be written) is safe.
#![allow(unsafe_code)]

mod calibration;
mod cpu;
mod decide;
mod method;
mod offer;
mod pattern;
mod plan;
mod portable;
mod rule;
mod run;
#[cfg(feature = "serde")]
mod saved;
mod table;
#[cfg(test)]
#[cfg(target_arch = "x86_64")]
mod tests;
mod verify;
#[cfg(target_arch = "x86_64")]
mod x86_64;

pub use calibration::{Calibration, Choice, Measured, Reason, Scaling};
pub use cpu::{CpuDescription, Vendor};
pub(crate) use decide::{Measurement, Readings, Shortfall, upper_quartile};
pub use method::Method;
pub(crate) use pattern::{fill, filled_words};
pub(crate) use plan::Situation;
pub use plan::{Concurrency, Reuse};
pub(crate) use verify::first_nonzero;

use crate::error::{CalibrationError, MethodError, RequestError};
use crate::sys::{Chunk, HostRange};
use plan::Plan;
use run::{Store, run};

/// Clears on the calling thread, at once: the bare stores of this library, for memory that needs no job.
///
/// It holds the methods that it will run, each checked against the CPU under us, and the choice between them.
/// Nothing else happens: no page is made present before it is stored to (where the kernel has none to give,
/// the store ends in `SIGBUS`), no bitmap is marked, no ledger is told. What it cleared is zero when it
/// returns, and ordered before whatever this thread stores next.
#[derive(Debug, Clone)]
pub struct Clearer {
    plan: Plan,
}

impl Clearer {
    /// By the rule of [`CpuDescription::choose`] for the CPU under us.
    #[must_use]
    pub fn auto() -> Self {
        Self::by_rule(&CpuDescription::detect())
    }

    /// By one method alone.
    ///
    /// # Errors
    ///
    /// [`MethodError::Unavailable`]: the CPU under us lacks it.
    pub fn with_method(method: Method) -> Result<Self, MethodError> {
        Self::only(method, &CpuDescription::detect())
    }

    /// By what a calibration chose on a CPU of this model.
    ///
    /// # Errors
    ///
    /// [`CalibrationError`]: it was measured on another model, or chose a method that the CPU under us lacks.
    pub fn calibrated(calibration: &Calibration) -> Result<Self, CalibrationError> {
        Self::by_calibration(calibration, &CpuDescription::detect())
    }

    pub(crate) fn by_rule(cpu: &CpuDescription) -> Self {
        Self { plan: Plan::by_rule(cpu, |method| lacks(method, cpu).is_none()) }
    }

    /// Both the description and the CPU this runs on must offer a method: a description can narrow what is
    /// used, never widen it.
    pub(crate) fn only(method: Method, cpu: &CpuDescription) -> Result<Self, MethodError> {
        method::refuse_if(method, |method| lacks(method, cpu))?;
        Ok(Self { plan: Plan::only(method) })
    }

    pub(crate) fn by_calibration(
        calibration: &Calibration,
        cpu: &CpuDescription,
    ) -> Result<Self, CalibrationError> {
        calibration.check_model(cpu)?;
        for choice in calibration.choices() {
            method::refuse_if(choice.method, |method| lacks(method, cpu))?;
        }
        Ok(Self::by_foreign_calibration(calibration, cpu))
    }

    /// Whatever model it was measured on. Where it chose a method that is not there, the rule chooses.
    pub(crate) fn by_foreign_calibration(calibration: &Calibration, cpu: &CpuDescription) -> Self {
        Self { plan: Plan::calibrated(calibration, cpu, |method| lacks(method, cpu).is_none()) }
    }

    /// The method for a run of `len` bytes, cleared by `concurrency` workers at a time.
    #[must_use]
    pub fn method_for(&self, len: u64, reuse: Reuse, concurrency: Concurrency) -> Method {
        self.plan.method_for(len, Situation { reuse, concurrency })
    }

    /// Zeroes the `len` bytes at `offset` of a range, any alignment, and no others; says by which method.
    ///
    /// # Errors
    ///
    /// [`RequestError::OutOfRange`]: they leave the range. Nothing was stored.
    pub fn clear(
        &self,
        range: &HostRange,
        offset: u64,
        len: u64,
        reuse: Reuse,
    ) -> Result<Method, RequestError> {
        let chunk = range.chunk(offset, len);
        let chunk = chunk.ok_or(RequestError::OutOfRange { offset, len, range_len: range.len() })?;
        Ok(self.clear_chunk(&chunk, Situation { reuse, concurrency: Concurrency::One }))
    }

    /// Zeroes every byte of the chunk and no other, in ascending order; says how its whole lines were
    /// stored. On return the zeroes are ordered before all later stores of this thread.
    pub(crate) fn clear_chunk(&self, chunk: &Chunk<'_>, situation: Situation) -> Method {
        let method = self.plan.method_for(chunk.len() as u64, situation);
        // SAFETY: a chunk's bytes may be written while it lives and nobody holds a reference to them; every
        // method of the plan is one that the CPU under us offers.
        unsafe { run(store(method), chunk.ptr(), chunk.len()) };
        method
    }
}

/// What the description or the CPU under us lacks for a method.
fn lacks(method: Method, cpu: &CpuDescription) -> Option<&'static str> {
    cpu.lacks(method).or_else(|| lacks_here(method))
}

/// What the CPU under us lacks for a method.
fn lacks_here(method: Method) -> Option<&'static str> {
    let here = CpuDescription::detect().lacks(method);
    #[cfg(target_arch = "x86_64")]
    let here = here.or_else(|| x86_64::lacks_state(method));
    here
}

/// The kernel of a method. Outside x86-64 there is one.
fn store(method: Method) -> Store {
    #[cfg(target_arch = "x86_64")]
    return x86_64::store(method);
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = method;
        Store::Pattern(portable::lines)
    }
}
