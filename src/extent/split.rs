//! An extent and how it is cut; ranges and how they are merged.

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
