//! Initialising a frame table as work for the pool: node by node, in parallel.

use std::sync::Arc;

use super::FrameTable;
use crate::extent::Extent;
use crate::job::{Cause, Piece, Prepared, Work, WorkRegion};

/// Bytes of descriptors in a section.
const SECTION_BYTES: u64 = FrameTable::SECTION_FRAMES * 8;

/// The sections of a table that are to be initialised: a region for each run of sections of one node, as
/// long as their descriptors.
#[derive(Debug)]
pub(crate) struct Initialisation {
    table: Arc<FrameTable>,
    /// First section of each region.
    starts: Vec<usize>,
}

impl Initialisation {
    pub(crate) fn new(table: &Arc<FrameTable>) -> (Self, Vec<WorkRegion>) {
        let (mut starts, mut regions) = (Vec::new(), Vec::new());
        for (node, sections) in table.section_runs() {
            let (address, len) =
                (sections.start as u64 * SECTION_BYTES, sections.len() as u64 * SECTION_BYTES);
            starts.push(sections.start);
            regions.push(WorkRegion { address, len, node: Some(node), page: SECTION_BYTES });
        }
        (Self { table: Arc::clone(table), starts }, regions)
    }
}

impl Work for Initialisation {
    fn prepare(&self, _chunk: Extent) -> Result<Prepared, Cause> {
        Ok(Prepared::default())
    }

    fn perform(&self, chunk: Extent, _prepared: &Prepared) -> Result<Vec<Piece>, Cause> {
        // Chunks are cut at multiples of a power of two above SECTION_BYTES, so they hold whole sections.
        let first = self.starts.get(chunk.region as usize).copied().unwrap_or(usize::MAX);
        let section = |bytes: u64| first.saturating_add((bytes / SECTION_BYTES) as usize);
        let done = self.table.initialise(section(chunk.start)..section(chunk.end()));
        Ok(done.map(|_| Piece::erased(chunk, None)).into_iter().collect())
    }
}
