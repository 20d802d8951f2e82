//! Makes guest RAM and recycled hugepages zero before a VMM hands them on.

#[cfg(not(target_os = "linux"))]
compile_error!("vm-zeroing speaks to the Linux kernel (memfd, madvise, mbind, sysfs) and serves Linux only");

mod clear;
mod error;
mod frames;
mod sys;
mod topology;

pub use clear::{CpuDescription, Method, Vendor};
pub use error::{MethodError, TopologyError};
pub use topology::{Node, NodeId, NodeKind, Topology};
