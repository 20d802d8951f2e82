//! Makes guest RAM and recycled hugepages zero before a VMM hands them on.

#[cfg(not(target_os = "linux"))]
compile_error!("vm-zeroing speaks to the Linux kernel (memfd, madvise, mbind, sysfs) and serves Linux only");

mod clear;
mod error;
mod extent;
mod frames;
mod guest;
mod job;
mod pool;
mod service;
mod sys;
mod topology;

pub use clear::{CpuDescription, Method, Vendor};
pub use error::{BuildError, FrameError, JobError, MethodError, RequestError, TopologyError};
pub use frames::{FrameCounts, FrameTable, PageFrame, PageState, SectionState, Span};
pub use guest::{Intent, Quiesced, Strategy, Verify, ZeroRequest};
pub use job::{Cause, Job, Outcome, Progress, RangeReport, Report};
pub use service::{ZeroingService, ZeroingServiceBuilder};
pub use sys::HostRange;
pub use topology::{Node, NodeId, NodeKind, Topology};
