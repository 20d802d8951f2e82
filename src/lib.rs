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

pub use clear::{CpuDescription, Method};
pub use error::{FrameError, MethodError, TopologyError};
pub use frames::{FrameCounts, FrameTable, PageFrame, PageState, SectionState, Span};
pub use topology::{Node, NodeId, NodeKind, Topology};
