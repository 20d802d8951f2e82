//! The errors: each carries what was asked, what was found and what to do about it.

use std::path::PathBuf;
use std::sync::Arc;

use crate::clear::Method;
use crate::job::{Cause, Report};

/// A clearing method was asked for that cannot be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MethodError {
    /// The name is not one of the methods.
    #[error("no clearing method is called {asked:?}; the methods are {known}")]
    Unknown {
        /// What was asked.
        asked: String,
        /// The names there are, separated by commas.
        known: String,
    },
    /// This CPU (or the operating system on it) does not offer the method.
    #[error("{asked} cannot be used: {reason}; this CPU offers {offered}")]
    Unavailable {
        /// The method asked for.
        asked: Method,
        /// What is missing.
        reason: String,
        /// The methods that can be used, separated by commas.
        offered: String,
    },
}

/// A calibration cannot be used here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CalibrationError {
    /// It was measured on another CPU model.
    #[error(
        "the calibration was measured on {saved} and this is {here}; calibrate here, or force it with calibration_of_another_cpu"
    )]
    OtherCpu {
        /// The model it was measured on.
        saved: String,
        /// The model under us.
        here: String,
    },
    /// It chose a method that is not there, though the model is the same: the system or the hypervisor took it away.
    #[error("the calibration chose a method that is not here: {0}; calibrate again")]
    Method(#[from] MethodError),
    /// What was read is no calibration.
    #[error("this is no calibration: {what}; save one again")]
    Malformed {
        /// What is wrong with it.
        what: String,
    },
}

/// The machine's NUMA topology could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// A file that exists could not be read.
    #[error("cannot read {path}: {source}; is sysfs mounted there and readable?")]
    Unreadable {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file holds something that is not what the kernel writes there.
    #[error("{path} holds {found:?} where {expected} was expected")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What was expected.
        expected: &'static str,
        /// What was found (shortened).
        found: String,
    },
    /// The files name no CPU at all.
    #[error("no CPU is described under {root}; are sys and proc mounted there?")]
    NoCpu {
        /// The root folder the topology was read from.
        root: PathBuf,
    },
    /// None of the machine's CPUs is left to work on.
    #[error(
        "none of the CPUs {allowed:?} that may be used is online in the topology read from {root}; widen the affinity or the cpuset"
    )]
    NoAllowedCpu {
        /// The root folder the topology was read from.
        root: PathBuf,
        /// The CPUs that may be used.
        allowed: Vec<u32>,
    },
    /// No node's memory is left to use.
    #[error(
        "none of the nodes {allowed:?} whose memory may be used has memory in the topology read from {root}; widen the cpuset's mems"
    )]
    NoAllowedMemory {
        /// The root folder the topology was read from.
        root: PathBuf,
        /// The nodes whose memory may be used.
        allowed: Vec<u32>,
    },
    /// The system did not say which CPUs this process may use.
    #[error("cannot ask for the process's CPU affinity: {source}; allow sched_getaffinity in the sandbox")]
    Affinity {
        /// What the system said.
        source: std::io::Error,
    },
}

/// A service could not be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The topology could not be read.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// The forced clearing method cannot be used.
    #[error(transparent)]
    Method(#[from] MethodError),
    /// The calibration cannot be used.
    #[error(transparent)]
    Calibration(#[from] CalibrationError),
    /// A chunk of no bytes was asked for.
    #[error("chunks of 0 bytes were asked for; pass the most bytes to clear between two looks at cancel")]
    NoChunk,
    /// What the embedder does at a thread's start failed.
    #[error("on_thread_start failed on thread {thread}: {source}; no thread of the service is left")]
    ThreadStart {
        /// The thread's name.
        thread: String,
        /// What the function said.
        source: std::io::Error,
    },
}

/// A request was refused; nothing was touched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// `start + len` does not fit into 64 bits.
    #[error("the range {start:#x} + {len:#x} wraps round the end of the address space")]
    Overflow {
        /// First byte.
        start: u64,
        /// Length in bytes.
        len: u64,
    },
    /// A host range does not begin and end on page boundaries.
    #[error("the host range {start:#x} + {len:#x} is not aligned to {alignment:#x} bytes; pass whole pages")]
    Misaligned {
        /// First byte.
        start: u64,
        /// Length in bytes.
        len: u64,
        /// What both have to be multiples of.
        alignment: u64,
    },
    /// A part of a host range leaves it.
    #[error("{len} bytes at offset {offset} leave the host range of {range_len} bytes; pass a part of it")]
    OutOfRange {
        /// First byte, from the start of the range.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// Length of the range in bytes.
        range_len: u64,
    },
    /// Part of a range is not guest memory.
    #[error(
        "the range {start:#x} + {len:#x} leaves guest memory at {hole:#x}; pass ranges inside the regions"
    )]
    NotGuestMemory {
        /// First byte asked for.
        start: u64,
        /// Length asked for, in bytes.
        len: u64,
        /// The first address that no region holds.
        hole: u64,
    },
    /// The memory is seen through an IOMMU that is in use, so its addresses are not physical.
    #[error("this memory is an IOMMU view; pass the physical memory behind it")]
    IommuView,
    /// The region has no host address (guest_memfd, a device region).
    #[error(
        "guest memory at {address:#x} has no host address (guest_memfd?); the kernel zeroes such memory itself"
    )]
    NoHostAddress {
        /// Guest physical address.
        address: u64,
    },
    /// The service's workers are gone.
    #[error("the service has been dropped; build another one")]
    Closed,
    /// Called in a child made by `fork`, where the workers do not exist.
    #[error(
        "the service was built in process {built_in} and has no workers in its forked child {called_in}; build a service there"
    )]
    ForkedChild {
        /// The process that built the service.
        built_in: u32,
        /// The calling process.
        called_in: u32,
    },
}

/// A job ended with bytes that are not proved zero. Every variant that comes from a finished job carries the report.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// It was cancelled.
    #[error("cancelled with {} of {} bytes zero; the rest is stale", report.zero_bytes(), report.total_bytes)]
    Cancelled {
        /// What is zero and what is not.
        report: Arc<Report>,
    },
    /// Its deadline passed.
    #[error("the deadline passed with {} of {} bytes zero; the rest is stale", report.zero_bytes(), report.total_bytes)]
    DeadlinePassed {
        /// What is zero and what is not.
        report: Arc<Report>,
    },
    /// The service was dropped.
    #[error("the service was dropped with {} of {} bytes zero; the rest is stale", report.zero_bytes(), report.total_bytes)]
    ServiceClosed {
        /// What is zero and what is not.
        report: Arc<Report>,
    },
    /// A range failed; this is the first one that did.
    #[error(
        "the range {start:#x} + {len:#x} could not be made zero: {cause}; {} of {} bytes are zero, the rest is stale",
        report.zero_bytes(), report.total_bytes
    )]
    Failed {
        /// First byte of the range, in the address space of the report's ranges.
        start: u64,
        /// Its length in bytes.
        len: u64,
        /// Why.
        cause: Cause,
        /// What is zero and what is not.
        report: Arc<Report>,
    },
    /// It was stopped while workers were stuck in page faults; they will store nothing any more.
    #[error("stopped with {in_flight_bytes} bytes stuck in page faults (a userfaultfd handler that does not answer?); {} of {} bytes are zero", report.zero_bytes(), report.total_bytes)]
    Stalled {
        /// Bytes that stuck workers still hold.
        in_flight_bytes: u64,
        /// What is zero and what is not.
        report: Arc<Report>,
    },
    /// Waited for in a child made by `fork`, where the workers do not exist, and not over before.
    #[error(
        "the job was submitted in process {submitted_in}; its forked child {waited_in} cannot wait for it"
    )]
    ForkedChild {
        /// The process that submitted.
        submitted_in: u32,
        /// The calling process.
        waited_in: u32,
    },
}

impl JobError {
    /// What is zero and what is not, where the job is over.
    #[must_use]
    pub fn report(&self) -> Option<&Arc<Report>> {
        match self {
            JobError::Cancelled { report }
            | JobError::DeadlinePassed { report }
            | JobError::ServiceClosed { report }
            | JobError::Failed { report, .. }
            | JobError::Stalled { report, .. } => Some(report),
            JobError::ForkedChild { .. } => None,
        }
    }
}

/// Guest memory could not be registered with a VM, or not be taken from it.
#[cfg(feature = "kvm")]
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SlotError {
    /// A region has no host address (guest_memfd, a device region).
    #[error("guest memory at {guest:#x} has no host address to make a slot of")]
    NoHostAddress {
        /// Guest physical address.
        guest: u64,
    },
    /// A region is empty or does not begin and end on page boundaries.
    #[error(
        "the region at {guest:#x} (host {host:#x}, {len:#x} bytes) is not made of whole pages; align it to {alignment:#x} bytes"
    )]
    Misaligned {
        /// Guest physical address.
        guest: u64,
        /// Host address.
        host: u64,
        /// Length in bytes.
        len: u64,
        /// What all three have to be multiples of.
        alignment: u64,
    },
    /// Two regions share guest addresses.
    #[error("the regions at {first:#x} and {second:#x} overlap; a guest address can have one slot")]
    Overlap {
        /// Guest physical address of the lower region.
        first: u64,
        /// Guest physical address of the upper region.
        second: u64,
    },
    /// The VM has fewer slots.
    #[error(
        "{needed} slots from number {first} on were asked for, and this KVM has {available}; use fewer, larger regions"
    )]
    NotEnoughSlots {
        /// The first number asked for.
        first: u32,
        /// How many.
        needed: usize,
        /// How many there are, numbered from 0.
        available: u32,
    },
    /// KVM refused a slot.
    #[error(
        "KVM refused slot {slot} (guest {guest:#x}, {len:#x} bytes): {source}; is the number or the address in use?"
    )]
    Refused {
        /// The slot's number.
        slot: u32,
        /// Guest physical address.
        guest: u64,
        /// Length in bytes.
        len: u64,
        /// What KVM said.
        source: std::io::Error,
    },
    /// KVM refused to delete a slot.
    #[error("KVM did not delete slot {slot}: {source}; its memory is still reachable, so close the VM")]
    NotDeleted {
        /// The slot's number.
        slot: u32,
        /// What KVM said.
        source: std::io::Error,
    },
}
