//! Floor 1: the instructions that clear memory, which CPU has them, and the choice between them (pure).
//!
//! [`Method`] names the ways, [`CpuDescription`] says which of them a CPU has and which one is best for a
//! length. A [`Clearer`] is the proof that what it will run exists on the CPU under us, so clearing a
//! [`Chunk`] (itself the proof that its bytes may be written) is safe.
#![allow(unsafe_code)]

mod cpu;
mod method;
mod offer;
mod portable;
mod rule;
mod run;
#[cfg(test)]
#[cfg(target_arch = "x86_64")]
mod tests;
mod verify;
#[cfg(target_arch = "x86_64")]
mod x86_64;

pub use cpu::{CpuDescription, Vendor};
pub use method::Method;
pub(crate) use verify::first_nonzero;

use crate::error::MethodError;
use crate::sys::Chunk;
use rule::Plan;
use run::{Store, run};

/// The methods that are run, each checked against the CPU under us.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clearer {
    plan: Plan,
}

impl Clearer {
    /// What clears by `wanted`, or by the rule of [`CpuDescription::choose`].
    ///
    /// Both the description and the CPU this runs on must offer a method: a description can narrow what is
    /// used, never widen it.
    pub(crate) fn new(wanted: Option<Method>, cpu: &CpuDescription) -> Result<Self, MethodError> {
        let plan = match wanted {
            None => Plan::auto(cpu, |method| lacks(method, cpu).is_none()),
            Some(asked) => {
                method::refuse_if(asked, |method| lacks(method, cpu))?;
                Plan::only(asked)
            }
        };
        Ok(Self { plan })
    }

    /// The method for a range of `len` bytes.
    pub(crate) fn method_for(&self, len: u64) -> Method {
        self.plan.method_for(len)
    }

    /// Zeroes every byte of the chunk and no other, in ascending order; says how its whole lines were
    /// stored. On return the zeroes are ordered before all later stores of this thread.
    pub(crate) fn clear(&self, chunk: &Chunk<'_>) -> Method {
        let method = self.method_for(chunk.len() as u64);
        // SAFETY: a chunk's bytes may be written while it lives and nobody holds a reference to them; `new`
        // let only methods into the plan that the CPU under us offers.
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
        Store::Bytes(portable::portable)
    }
}
