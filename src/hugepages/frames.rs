//! The ledger's pages, to be looked at.

use std::fmt;

use crate::frames::{FrameCounts, FrameError, FrameTable, PageState};
use crate::topology::NodeId;

/// What a pool's ledger says of its pages, numbered from 0 in the order of nodes and slabs.
///
/// To be looked at only: a page becomes [`PageState::Zero`] by a job of the pool and in no other way.
#[derive(Clone, Copy)]
pub struct PoolFrames<'p> {
    table: &'p FrameTable,
}

impl<'p> PoolFrames<'p> {
    pub(super) fn new(table: &'p FrameTable) -> Self {
        Self { table }
    }

    /// The page's state at this moment.
    ///
    /// # Errors
    ///
    /// The pool has no such page.
    pub fn state(self, page: u64) -> Result<PageState, FrameError> {
        self.table.frame(page).map(|frame| frame.state())
    }

    /// The node the page was taken from.
    ///
    /// # Errors
    ///
    /// The pool has no such page.
    pub fn node(self, page: u64) -> Result<NodeId, FrameError> {
        self.table.frame(page).map(|frame| frame.node())
    }

    /// How often the page has come back from a lease, modulo 2³².
    ///
    /// # Errors
    ///
    /// The pool has no such page.
    pub fn generation(self, page: u64) -> Result<u32, FrameError> {
        self.table.frame(page).map(|frame| frame.generation())
    }

    /// How many pages of a node are in each state, `None` if the pool has none there.
    #[must_use]
    pub fn counts(self, node: NodeId) -> Option<FrameCounts> {
        self.table.counts(node)
    }
}

impl fmt::Debug for PoolFrames<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolFrames").finish_non_exhaustive()
    }
}
