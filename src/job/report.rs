//! The account of a job: what is zero and what is not, exactly; how, how fast, how local.

use std::time::Duration;

use super::Outcome;
use super::work::Hand;
use crate::clear::Method;
use crate::topology::NodeId;

/// What became of one run of bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct RangeReport {
    /// First byte: a guest physical address for guest memory, a host address for
    /// [`HostRange`](crate::HostRange)s, a byte offset into the pool for slabs.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    /// What became of it.
    pub outcome: Outcome,
}

/// The account of a finished job. Its ranges cover every byte that was asked for exactly once, in
/// ascending order within each region; neighbours with the same outcome are one range, across regions too.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Report {
    /// The outcome of every range.
    pub ranges: Vec<RangeReport>,
    /// Bytes asked for.
    pub total_bytes: u64,
    /// Bytes that we overwrote.
    pub erased_bytes: u64,
    /// Bytes that read zero without a store of ours: fresh pages from the kernel, and holes.
    pub reads_zero_bytes: u64,
    /// Bytes handled by a worker of the node they lie on. Holes lie on none.
    pub node_local_bytes: u64,
    /// Bytes handled by a worker of another node.
    pub node_remote_bytes: u64,
    /// The method that overwrote most bytes; `None` if nothing was overwritten.
    pub method: Option<Method>,
    /// From submission to the end.
    pub duration: Duration,
    /// Chunks that were done by others than the worker that was to do them: those of the tasks that a worker took
    /// from another one.
    pub steals: u64,
    /// CPU time of all threads that worked on it.
    pub cpu_time: Duration,
    /// What each thread did of it, by number; the caller's own thread comes last.
    pub workers: Vec<WorkerShare>,
}

/// What one thread did of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct WorkerShare {
    /// The worker's number, as in its name (`vmz-n0-w3` is number 3); `None` for the thread that submitted
    /// the job, which does small jobs itself.
    pub worker: Option<u32>,
    /// The node it is pinned to.
    pub node: Option<NodeId>,
    /// Bytes that it dealt with.
    pub bytes: u64,
    /// In so many chunks.
    pub chunks: u64,
    /// CPU time that it took for them. What the submitting thread does of small jobs counts by the clock where it is
    /// less than 64 KiB: asking the kernel would take longer than clearing that.
    pub cpu_time: Duration,
}

impl WorkerShare {
    pub(super) fn of(hand: Hand) -> Self {
        let worker = Some(hand.worker).filter(|worker| *worker != Hand::CALLER);
        Self { worker, node: hand.node, bytes: 0, chunks: 0, cpu_time: Duration::ZERO }
    }
}

impl Report {
    /// Appends a range, to the last one if it continues it.
    pub(super) fn add(&mut self, range: RangeReport) {
        match self.ranges.last_mut() {
            Some(last)
                if last.start.checked_add(last.len) == Some(range.start) && last.outcome == range.outcome =>
            {
                last.len += range.len;
            }
            _ => self.ranges.push(range),
        }
    }

    /// Bytes that are known to read zero.
    #[must_use]
    pub fn zero_bytes(&self) -> u64 {
        self.erased_bytes + self.reads_zero_bytes
    }

    /// Whether every byte asked for is known to read zero.
    #[must_use]
    pub fn is_all_zero(&self) -> bool {
        self.ranges.iter().all(|range| range.outcome.is_zero())
    }

    /// The share of bytes handled by a worker of their own node, 0.0 to 1.0, among those whose node is
    /// known; 1.0 if none is.
    #[must_use]
    pub fn node_local_share(&self) -> f64 {
        match self.node_local_bytes + self.node_remote_bytes {
            0 => 1.0,
            known => self.node_local_bytes as f64 / known as f64,
        }
    }

    /// Zeroed bytes per second, in units of 10⁹; 0.0 for an empty job.
    #[must_use]
    pub fn gb_per_s(&self) -> f64 {
        match self.duration.as_secs_f64() {
            0.0 => 0.0,
            seconds => self.zero_bytes() as f64 / seconds / 1e9,
        }
    }
}

/// How far a job is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Progress {
    /// Bytes dealt with so far, never decreasing.
    pub done_bytes: u64,
    /// Bytes asked for.
    pub total_bytes: u64,
}

/// How far a job is on one node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct NodeProgress {
    /// The node the bytes lie on; where that cannot be known (holes), the node of the worker.
    pub node: NodeId,
    /// Bytes dealt with so far, never decreasing.
    pub done_bytes: u64,
}
