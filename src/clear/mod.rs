//! Floor 1: the instructions that clear memory, which CPU has them, and the choice between them (pure).
//!
//! [`Method`] names the ways, [`CpuDescription`] says which of them a CPU has and which one is best for a
//! length. A [`Clearer`] is the proof that what it will run exists on the CPU under us, so clearing a
//! [`Chunk`] (itself the proof that its bytes may be written) is safe.
#![allow(unsafe_code)]

mod cpu;
mod method;
mod portable;
mod rule;
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

/// The unit of a whole line: what `CLZERO` and `MOVDIR64B` write, and what write combining wants whole.
const LINE: usize = 64;

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

/// A function that zeroes `len` bytes at a pointer.
type Kernel = unsafe fn(*mut u8, usize);

/// A kernel and what it can be given.
#[derive(Debug, Clone, Copy)]
enum Store {
    /// Any bytes.
    Bytes(Kernel),
    /// Whole lines only.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "no such kernels"))]
    Lines(Kernel),
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

/// Zeroes `ptr .. ptr + len` in ascending order: the bytes before the first and after the last whole line by
/// ordinary stores, the lines by the kernel.
///
/// # Safety
///
/// Every byte of the range is mapped and writable, no Rust reference to one of them is live, and the CPU
/// under us offers the kernel's instructions.
unsafe fn run(store: Store, ptr: *mut u8, len: usize) {
    match store {
        // SAFETY: passed on.
        Store::Bytes(kernel) => unsafe { kernel(ptr, len) },
        Store::Lines(kernel) => {
            let head = (ptr.addr().wrapping_neg() & (LINE - 1)).min(len);
            let lines = (len - head) & !(LINE - 1);
            let tail = len - head - lines;
            // SAFETY: the three parts lie one after the other in `ptr .. ptr + len`, which the caller
            // vouches for. If `lines` is not 0, `head` < `LINE` bytes lead to a multiple of `LINE`.
            unsafe {
                portable::portable(ptr, head);
                if lines != 0 {
                    kernel(ptr.wrapping_add(head), lines);
                }
                portable::portable(ptr.wrapping_add(head + lines), tail);
            }
        }
    }
}
