//! The job that makes slabs zero, and what its outcomes prove to the ledger.

use std::ops::Range;
use std::sync::Arc;

use super::ledger::Ledger;
use crate::extent::Extent;
use crate::frames::PageState;
use crate::guest::{Source, SourceRegion};
use crate::job::{Cause, Outcome, Outcomes, WorkRegion};
use crate::sys::Chunk;

/// Slabs, each a region of the job, through the pool's own mappings.
#[derive(Debug)]
pub(super) struct SlabSource {
    ledger: Arc<Ledger>,
    slabs: Vec<usize>,
    page: u64,
}

impl SlabSource {
    pub(super) fn new(ledger: Arc<Ledger>, slabs: Vec<usize>, page: u64) -> (Self, Vec<SourceRegion>) {
        let regions = slabs
            .iter()
            .filter_map(|&index| ledger.slab(index))
            .map(|slab| {
                let work = WorkRegion { address: slab.offset, len: slab.bytes, node: Some(slab.node), page };
                SourceRegion { work, file: None, in_memory: true }
            })
            .collect();
        (Self { ledger, slabs, page }, regions)
    }
}

impl Source for SlabSource {
    fn with_chunk(&self, extent: Extent, visit: &mut dyn FnMut(&Chunk<'_>)) -> Result<(), Cause> {
        let slab = self.slabs.get(extent.region as usize).and_then(|index| self.ledger.slab(*index));
        let chunk =
            slab.and_then(|slab| slab.own.chunk(extent.start, extent.len)).ok_or(Cause::NoHostAddress)?;
        visit(&chunk);
        Ok(())
    }

    /// A page becomes `Zero` only if every byte of it has a zero outcome; a bad page leaves for good;
    /// everything else, whatever the reason, is `Stale`.
    fn finish(&self, regions: &[WorkRegion], outcomes: &Outcomes) {
        for (region, &index) in self.slabs.iter().enumerate() {
            let (Some(slab), Some(work)) = (self.ledger.slab(index), regions.get(region)) else { continue };
            let frames = |pages: Range<u64>| slab.frames.start + pages.start..slab.frames.start + pages.end;
            let runs = outcomes.of_region(region as u32, work.len);
            for zero in zero_runs(&runs) {
                self.ledger.advance(
                    frames(whole_pages(&zero, self.page)),
                    PageState::Zeroing,
                    PageState::Zero,
                );
            }
            for (extent, outcome) in &runs {
                if matches!(outcome, Outcome::Failed(Cause::Poisoned)) {
                    let touched = extent.start / self.page..extent.end().div_ceil(self.page);
                    for state in [PageState::Zeroing, PageState::Zero] {
                        self.ledger.advance(frames(touched.clone()), state, PageState::Quarantined);
                    }
                }
            }
            self.ledger.end_zeroing(index);
        }
    }
}

/// Byte ranges with a zero outcome, neighbours joined: a page may be half erased and half fresh.
fn zero_runs(runs: &[(Extent, Outcome)]) -> Vec<Range<u64>> {
    let mut zero: Vec<Range<u64>> = Vec::new();
    for (extent, _) in runs.iter().filter(|(_, outcome)| outcome.is_zero()) {
        match zero.last_mut() {
            Some(last) if last.end == extent.start => last.end = extent.end(),
            _ => zero.push(extent.start..extent.end()),
        }
    }
    zero
}

/// The pages that lie wholly in a byte range.
fn whole_pages(bytes: &Range<u64>, page: u64) -> Range<u64> {
    let (first, end) = (bytes.start.div_ceil(page), bytes.end / page);
    first..end.max(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_a_page_proves_nothing() {
        let extent = |start, len| Extent { region: 0, start, len };
        let runs = vec![
            (extent(0, 0x1800), Outcome::Erased),
            (extent(0x1800, 0x800), Outcome::ReadsZero),
            (extent(0x2000, 0x800), Outcome::Untouched),
            (extent(0x2800, 0x1800), Outcome::Erased),
        ];
        let zero = zero_runs(&runs);
        assert_eq!(zero, [0..0x2000, 0x2800..0x4000]);
        assert_eq!(whole_pages(&zero[0], 0x1000), 0..2);
        assert_eq!(whole_pages(&zero[1], 0x1000), 3..4);
        assert_eq!(whole_pages(&(0x100..0x200), 0x1000), 1..1);
    }
}
