//! Makes guest RAM and recycled hugepages zero before a VMM hands them on.

#[cfg(not(target_os = "linux"))]
compile_error!("vm-zeroing speaks to the Linux kernel (memfd, madvise, mbind, sysfs) and serves Linux only");

mod clear;
mod error;
mod extent;
mod frames;
mod guest;
mod hugepages;
mod job;
mod pool;
mod service;
mod sys;
mod topology;

pub use clear::{CpuDescription, Method, Vendor};
#[cfg(feature = "kvm")]
pub use error::SlotError;
pub use error::{BuildError, FrameError, JobError, MethodError, RequestError, TopologyError};
pub use frames::{FrameCounts, FrameTable, PageFrame, PageState, SectionState, Span};
pub use guest::{Intent, Quiesced, Strategy, Verify, ZeroRequest};
#[cfg(feature = "kvm")]
pub use guest::{KvmQuiesced, KvmSlots, TeardownFailure};
pub use hugepages::{
    HugepagePool, HugepagePoolBuilder, LayoutError, Lease, LeaseError, LeaseId, LeasedMemory, LeasedRegion,
    NodePolicy, PageSize, PoolError, PoolFrames, PoolUsage, RecycleError, RecycleFailure,
};
pub use job::{Cause, Job, Outcome, Progress, RangeReport, Report};
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
