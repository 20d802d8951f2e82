//! Floor 0: system calls, owned mappings, and the pointers that clearing writes through.
//!
//! Beside `clear/` the only floor that may name `unsafe`: everything it hands up is safe to call.
#![allow(unsafe_code)]

mod affinity;
mod chunk;
mod host_range;
#[cfg(feature = "kvm")]
mod kvm;
mod mapping;
mod memfd;
mod notify;
mod numa;
mod populate;
mod present;
mod process;
mod thread;

pub(crate) use affinity::{Bounds, allowed_cpus, current_cpu, pin_current_thread};
pub(crate) use chunk::Chunk;
pub use host_range::HostRange;
#[cfg(feature = "kvm")]
pub use kvm::KeepsMapped;
#[cfg(feature = "kvm")]
pub(crate) use kvm::{Slot, SlotTable};
pub(crate) use mapping::{Reservation, ScratchMapping, SharedMapping};
pub(crate) use memfd::{
    FileKind, file_holes, file_kind, kernel_is_at_least, known_file_kind, reopen, sealed_memfd,
};
pub(crate) use notify::CompletionFd;
pub(crate) use numa::{bind_to_node, node_of, policy_node};
pub(crate) use populate::{kernel_populates, populate};
pub(crate) use present::{Presence, Survey};
pub(crate) use process::process_id;
pub(crate) use thread::{
    block_asynchronous_signals, has_low_policy, minor_faults, thread_cpu_time, thread_id, use_normal_policy,
};

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

/// The size of a base page in bytes.
pub(crate) fn page_size() -> u64 {
    /// 0: not asked yet. No cell that a thread could be filling while another one forks.
    static ANSWER: AtomicU64 = AtomicU64::new(0);
    match ANSWER.load(Ordering::Relaxed) {
        0 => {
            // SAFETY: sysconf reads a constant of the running kernel and touches no memory of ours.
            let answer = u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096);
            ANSWER.store(answer, Ordering::Relaxed);
            answer
        }
        answer => answer,
    }
}

/// The error number of the last failed call on this thread.
fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}
