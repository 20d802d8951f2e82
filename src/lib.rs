//! Makes guest RAM and recycled hugepages zero before a VMM hands them on.
//!
//! For VMMs that keep memory across virtual machines: hugepage pools, VMM reuse, resets. Workers pinned to
//! their NUMA node clear it while the VMM's event loop goes on, and a ledger knows of every page whether it is
//! proved zero. What is not proved is *stale*: it may hold another guest's bytes, and is never lent.
//!
//! You do not need this crate where each VM gets fresh memory from the kernel and gives it back at its end:
//! the kernel zeroes every page it hands out. All that is left then is making memory present at boot, in
//! parallel ([`Intent::Boot`]).
//!
//! # The tour
//!
//! - [`ZeroingService`]: the pinned workers. One a process, built before guest memory exists.
//!   [`zero`](ZeroingService::zero) takes any `vm-memory` address space, [`submit`](ZeroingService::submit) a
//!   [`ZeroRequest`]: ranges, deadline, verification, or [`HostRange`]s of a VMM with its own memory types.
//! - [`Job`]: the handle of what was submitted: wait, cancel, progress, a descriptor for `epoll`. It ends in a
//!   [`Report`] that says of every range what became of it ([`Outcome`]), or in a [`JobError`] that carries one.
//! - [`HugepagePool`]: memory that stays with the host, in sealed memory files. It lends zero pages only.
//! - [`LeasedMemory`]: guest memory that carries its lease, a `vm-memory` backend. It ends with
//!   [`recycle`](LeasedMemory::recycle): its addresses turn into nothing, its pages are stale until a job has
//!   zeroed them.
//! - [`Quiesced`]: the statement that nobody else can write any more, without which zeroing proves nothing.
//!   With the feature `kvm`, `KvmSlots` turns KVM's share of it into a fact.
//!
//! ```
//! use std::sync::Arc;
//! use vm_zeroing::vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
//! use vm_zeroing::{Intent, ZeroingService};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let service = ZeroingService::builder().build()?;
//! let memory = Arc::new(GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 4 << 20)])?);
//! memory.write_obj(0x5ec2e7_u64, GuestAddress(4096))?;
//!
//! let job = service.zero(&memory, Intent::Teardown)?; // returns at once
//! let report = job.wait()?; // or epoll on `job.completion_fd()`
//! assert_eq!(report.zero_bytes(), 4 << 20); // the page that was used, and what never was
//! assert_eq!(memory.read_obj::<u64>(GuestAddress(4096))?, 0);
//! # Ok(())
//! # }
//! ```
//!
//! # Floors
//!
//! System calls and owned mappings are at the bottom; then clearing instructions and topology; splitting;
//! workers and jobs; guest memory; the page-frame table ([`FrameTable`]); pools; the service on top. `unsafe` is
//! confined to the system calls and the instructions, and guest memory is never a Rust reference.
//!
//! The library installs no signal handler, prints nothing, changes no affinity but its workers', and has no
//! switch that skips zeroing. It logs through `tracing`. Linux only; outside x86-64 there is one method,
//! [`Method::Portable`], and it is untested.
//!
//! # Features
//!
//! - `kvm` (default): `KvmSlots`, guest memory registered with a KVM VM.
//! - `serde`: `Serialize` for reports and what they are made of; calibrations can be saved and read back.
//!
//! # Where to read on
//!
//! In the repository: `docs/trust.md` argues why a page may be called zero and lists what is not erased;
//! `docs/integration.md` says where the calls go and what each error asks for, `docs/syscalls.md` which system
//! calls are made;
//! `docs/architecture.md` is the house on one page; `examples/mini_vmm` shows the whole life on KVM.

#[cfg(not(target_os = "linux"))]
compile_error!("vm-zeroing speaks to the Linux kernel (memfd, madvise, mbind, sysfs) and serves Linux only");

mod calibrate;
mod clear;
mod error;
mod extent;
mod frames;
mod guest;
mod hugepages;
mod job;
mod pool;
mod service;
mod sync;
mod sys;
mod topology;

pub use clear::{
    Calibration, Choice, Clearer, Concurrency, CpuDescription, Measured, Method, Reason, Reuse, Scaling,
    Vendor,
};
#[cfg(feature = "kvm")]
pub use error::SlotError;
pub use error::{BuildError, CalibrationError, JobError, MethodError, RequestError, TopologyError};
pub use frames::{FrameCounts, FrameError, FrameTable, PageFrame, PageState, SectionState, Span};
pub use guest::{Intent, Quiesced, Strategy, Verify, ZeroRequest};
#[cfg(feature = "kvm")]
pub use guest::{KvmQuiesced, KvmSlots, TeardownFailure};
pub use hugepages::{
    HugepagePool, HugepagePoolBuilder, LayoutError, Lease, LeaseError, LeaseId, LeasedMemory, LeasedRegion,
    NodePolicy, PageSize, PoolError, PoolFrames, PoolUsage, RecycleError, RecycleFailure,
};
pub use job::{Cause, Job, NodeProgress, Outcome, Priority, Progress, RangeReport, Report, WorkerShare};
pub use pool::{Locality, ThreadInfo, ThreadKind};
pub use service::{ZeroingService, ZeroingServiceBuilder};
pub use sys::HostRange;
#[cfg(feature = "kvm")]
pub use sys::KeepsMapped;
pub use topology::{Node, NodeId, NodeKind, Topology};

#[cfg(feature = "kvm")]
/// The crate whose `VmFd` and `VcpuFd` [`KvmSlots`] takes.
pub use kvm_ioctls;
/// The crate whose memory types appear in this one's signatures.
pub use vm_memory;

#[doc = include_str!("../README.md")]
#[cfg(doctest)]
struct ReadmeDoctests;

#[doc = include_str!("../docs/integration.md")]
#[cfg(all(doctest, feature = "kvm"))]
struct IntegrationDoctests;
