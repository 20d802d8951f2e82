//! What the pool asks of a kind of work. Clearing guest memory, clearing slabs and initialising the
//! frame table are kinds of work; the pool knows none of them.

use std::fmt;

use super::{Cause, Outcome, Outcomes};
use crate::clear::Method;
use crate::extent::Extent;
use crate::topology::NodeId;

/// One region of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WorkRegion {
    /// The address that reports give its first byte.
    pub(crate) address: u64,
    /// Bytes.
    pub(crate) len: u64,
    /// The node its memory policy names, if it names one.
    pub(crate) node: Option<NodeId>,
    /// The page size in bytes: failures are narrowed down to one page.
    pub(crate) page: u64,
}

/// In whose hands a chunk is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hand {
    /// The worker's number; `CALLER` on a caller's own thread.
    pub(crate) worker: u32,
    /// The node the worker sits on, where that is known.
    pub(crate) node: Option<NodeId>,
    /// Whether it was taken from another worker.
    pub(crate) stolen: bool,
}

impl Hand {
    /// The number of whoever works on a caller's own thread.
    pub(crate) const CALLER: u32 = u32::MAX;
}

/// What a worker found when it made a chunk ready.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Prepared {
    /// The node the chunk's first present page lies on, where that is known.
    pub(crate) node: Option<NodeId>,
    /// Parts of the chunk that are proved to read zero without a store; ascending and disjoint.
    pub(crate) zero: Vec<Extent>,
    /// Those parts were absent and are present now. To whoever looks again they seem used, so the chunk
    /// must stay with this worker.
    pub(crate) made_present: bool,
}

/// What became of a part of a chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) extent: Extent,
    pub(crate) outcome: Outcome,
    /// How it was overwritten, if it was.
    pub(crate) method: Option<Method>,
    /// Whether it has pages, and so lies on a node.
    pub(crate) present: bool,
}

impl Piece {
    pub(crate) fn erased(extent: Extent, method: Option<Method>) -> Self {
        Self { extent, outcome: Outcome::Erased, method, present: true }
    }
}

/// A kind of work on regions of bytes, done chunk by chunk by any worker.
pub(crate) trait Work: Send + Sync + fmt::Debug {
    /// Makes the chunk ready without changing a byte. May take long (a page fault may stall), and the
    /// job may end meanwhile.
    fn prepare(&self, chunk: Extent) -> Result<Prepared, Cause>;

    /// As [`prepare`](Self::prepare), on a caller's thread: `None` where that might wait for anybody, or take long.
    /// "No" costs no more than the detour through a worker.
    fn prepare_at_once(&self, _chunk: Extent) -> Option<Result<Prepared, Cause>> {
        None
    }

    /// The shortest chunk that makes sense, in bytes, if any does: what is made present at once should be dealt
    /// with at once.
    fn least_chunk(&self) -> u64 {
        0
    }

    /// Does the work, and says what became of each byte of the chunk. Called only while the job is running;
    /// the stores are fenced on return.
    fn perform(&self, chunk: Extent, prepared: &Prepared) -> Result<Vec<Piece>, Cause>;

    /// Whether a shorter piece of a chunk that could not be prepared might fare better.
    fn may_be_narrowed(&self, _chunk: Extent, cause: &Cause) -> bool {
        cause.is_of_single_pages()
    }

    /// Told once, before anybody who waits: publishes what the outcomes prove.
    fn finish(&self, _regions: &[WorkRegion], _outcomes: &Outcomes) {}
}
