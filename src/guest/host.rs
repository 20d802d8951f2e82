//! Raw host ranges as a source of bytes.

use super::clearing::{Numa, Source, SourceRegion};
use crate::extent::Extent;
use crate::job::{Cause, WorkRegion};
use crate::sys::{Chunk, HostRange, page_size};

/// Host ranges, kept alive by the job until it is over.
#[derive(Debug)]
pub(crate) struct HostSource {
    ranges: Vec<HostRange>,
}

impl HostSource {
    pub(crate) fn plan(ranges: Vec<HostRange>, numa: &Numa) -> (Self, Vec<SourceRegion>) {
        let ranges: Vec<HostRange> = ranges.into_iter().filter(|range| !range.is_empty()).collect();
        let regions = ranges
            .iter()
            .map(|range| {
                let node = range.chunk(0, 1).and_then(|first| numa.policy_of(&first));
                let work = WorkRegion { address: range.base(), len: range.len(), node, page: page_size() };
                SourceRegion { work, file: None, in_memory: false }
            })
            .collect();
        (Self { ranges }, regions)
    }
}

impl Source for HostSource {
    fn with_chunk(&self, extent: Extent, visit: &mut dyn FnMut(&Chunk<'_>)) -> Result<(), Cause> {
        let range = self.ranges.get(extent.region as usize);
        let chunk =
            range.and_then(|range| range.chunk(extent.start, extent.len)).ok_or(Cause::NoHostAddress)?;
        visit(&chunk);
        Ok(())
    }
}
