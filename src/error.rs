//! The errors: each carries what was asked, what was found and what to do about it.

use std::path::PathBuf;

use crate::clear::Method;

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
