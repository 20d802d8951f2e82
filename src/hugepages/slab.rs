//! One slab: a sealed memory file, the pool's own mapping of it, and its run of page frames.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use crate::sys::{SharedMapping, sealed_memfd};
use crate::topology::NodeId;

#[derive(Debug)]
pub(super) struct Slab {
    /// The file; regions of guest memory refer to it.
    pub(super) file: Arc<File>,
    /// The pool's own view, through which it populates and clears. No guest ever has its addresses.
    pub(super) own: SharedMapping,
    pub(super) node: NodeId,
    pub(super) bytes: u64,
    /// Page frame numbers in the ledger.
    pub(super) frames: Range<u64>,
    /// Where its first byte stands in reports: the offset in the pool.
    pub(super) offset: u64,
}

impl Slab {
    /// A slab of `bytes` bytes, a multiple of `page`, that begins at byte `offset` of the pool. For
    /// hugepages this takes the reservation: `ENOMEM` says that the host lacks them.
    pub(super) fn new(
        node: NodeId,
        bytes: u64,
        page: u64,
        hugepage: Option<u64>,
        offset: u64,
    ) -> io::Result<Self> {
        let file = sealed_memfd(c"vm-zeroing-slab", bytes, hugepage)?;
        let own = SharedMapping::new(&file, bytes)?;
        let frames = offset / page..(offset + bytes) / page;
        Ok(Self { file: Arc::new(file), own, node, bytes, frames, offset })
    }
}
