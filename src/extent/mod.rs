//! Floor 2: the arithmetic of splitting. Pure: no threads, no system calls, no allocation.
//!
//! A region enters the pool as one extent, however large. Whoever holds an extent halves it until one
//! chunk is left, keeps the near half and offers the far one, so that memory is cleared in ascending
//! order and a thief takes what its owner would reach last. Cuts fall on multiples of the grain, so
//! that no two workers share a page (or a cache line).

/// A run of bytes of one region: `start .. start + len`, in bytes from the region's start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Extent {
    /// Which region of the job.
    pub region: u32,
    /// First byte, from the start of the region.
    pub start: u64,
    /// Length in bytes; `start + len` does not overflow.
    pub len: u64,
}

impl Extent {
    /// One past the last byte.
    pub fn end(&self) -> u64 {
        self.start + self.len
    }

    /// The near half and, where the extent covers more than one cell of `grain` bytes, the far half.
    ///
    /// The cut lies on a multiple of `grain`. An extent inside one cell comes back whole.
    pub fn halve(self, grain: u64) -> (Extent, Option<Extent>) {
        let grain = grain.max(1);
        if self.len == 0 {
            return (self, None);
        }
        let first_cell = self.start / grain;
        let cells = (self.end() - 1) / grain - first_cell + 1;
        if cells == 1 {
            return (self, None);
        }
        let cut = (first_cell + cells.div_ceil(2)) * grain;
        let near = Extent { len: cut - self.start, ..self };
        let far = Extent { start: cut, len: self.end() - cut, ..self };
        (near, Some(far))
    }

    /// Halves until one cell is left, which is returned; every far half is offered, farthest first.
    pub fn split_to_cell(self, grain: u64, mut offer: impl FnMut(Extent)) -> Extent {
        let mut held = self;
        while let (near, Some(far)) = held.halve(grain) {
            offer(far);
            held = near;
        }
        held
    }

    /// The extent in ascending order, cut into what lies in `parts` (`true`) and what does not. `parts` are
    /// extents of the same region, ascending and disjoint; what lies outside of this extent is left out.
    pub fn pieces(self, parts: &[Extent]) -> impl Iterator<Item = (Extent, bool)> {
        let within = move |at: u64| at.clamp(self.start, self.end());
        let mut at = self.start;
        let ends = parts.iter().map(move |part| (within(part.start), within(part.end())));
        ends.chain([(self.end(), self.end())])
            .flat_map(move |(start, end)| {
                let before = std::mem::replace(&mut at, end);
                [(before, start, false), (start, end, true)]
            })
            .filter(|(start, end, _)| start < end)
            .map(move |(start, end, inside)| (Extent { start, len: end - start, ..self }, inside))
    }
}

/// Sorts byte ranges `(start, len)`, drops the empty ones and merges those that touch or overlap, so
/// that no byte is given to two workers. `None` if a range overflows.
pub fn merge_ranges(mut ranges: Vec<(u64, u64)>) -> Option<Vec<(u64, u64)>> {
    ranges.retain(|&(_, len)| len > 0);
    ranges.sort_unstable();
    let mut merged: Vec<(u64, u64)> = Vec::with_capacity(ranges.len());
    for (start, len) in ranges {
        let end = start.checked_add(len)?;
        match merged.last_mut() {
            Some(last) if start <= last.0 + last.1 => last.1 = last.1.max(end - last.0),
            _ => merged.push((start, len)),
        }
    }
    Some(merged)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Any order of splits covers each byte exactly once, and cuts lie on the grain.
        #[test]
        fn splits_cover_each_byte_once(start in 0u64..1 << 40, len in 1u64..1 << 40, grain_log in 0u32..36) {
            let grain = 1u64 << grain_log;
            prop_assume!(len / grain < 5000);
            let whole = Extent { region: 7, start, len };
            let mut pending = vec![whole];
            let mut cells = Vec::new();
            while let Some(extent) = pending.pop() {
                cells.push(extent.split_to_cell(grain, |far| pending.push(far)));
            }
            let mut at = start;
            for cell in &cells {
                prop_assert_eq!(cell.region, 7);
                prop_assert_eq!(cell.start, at, "ascending without a hole");
                prop_assert!(cell.len > 0 && cell.len <= grain);
                prop_assert!(cell.start == start || cell.start % grain == 0);
                at = cell.end();
            }
            prop_assert_eq!(at, whole.end());
        }

        /// Pieces cover the extent without a gap, and each byte is told whether a part holds it.
        #[test]
        fn pieces_tell_each_byte(start in 0u64..50, len in 0u64..60, cuts in prop::collection::vec(0u64..120, 0..12)) {
            let whole = Extent { region: 7, start, len };
            let mut cuts = cuts;
            cuts.sort_unstable();
            let parts: Vec<Extent> = cuts
                .chunks_exact(2)
                .map(|pair| Extent { region: 7, start: pair[0], len: pair[1] - pair[0] })
                .collect();
            let mut at = start;
            for (piece, inside) in whole.pieces(&parts) {
                prop_assert_eq!((piece.region, piece.start), (7, at));
                prop_assert!(piece.len > 0);
                for byte in piece.start..piece.end() {
                    prop_assert_eq!(parts.iter().any(|part| part.start <= byte && byte < part.end()), inside);
                }
                at = piece.end();
            }
            prop_assert_eq!(at, whole.end());
        }

        #[test]
        fn merged_ranges_hold_the_same_bytes(ranges in prop::collection::vec((0u64..400, 0u64..40), 0..20)) {
            let merged = merge_ranges(ranges.clone()).expect("no overflow here");
            for byte in 0..500 {
                let holds = |all: &[(u64, u64)]| all.iter().filter(|r| r.0 <= byte && byte < r.0 + r.1).count();
                prop_assert_eq!(holds(&merged), usize::from(holds(&ranges) > 0));
            }
        }
    }

    #[test]
    fn ends_of_the_address_space() {
        let top = Extent { region: 0, start: u64::MAX - 4096, len: 4096 };
        let (near, far) = top.halve(1 << 12);
        let far = far.expect("two cells are touched");
        assert_eq!((near.end(), far.end()), (far.start, u64::MAX));
        assert_eq!(top.halve(u64::MAX), (top, None));
        assert_eq!(merge_ranges(vec![(u64::MAX, 2)]), None);
        let empty = Extent { region: 0, start: 5, len: 0 };
        assert_eq!(empty.halve(0), (empty, None));
    }

    #[test]
    fn sixteen_tib_is_split_in_a_few_steps() {
        let mut offered = 0;
        Extent { region: 0, start: 0, len: 16 << 40 }.split_to_cell(4 << 20, |_| offered += 1);
        assert_eq!(offered, 22);
    }
}
