//! What became of each byte of a job.

use std::collections::BTreeMap;
use std::fmt;

use crate::extent::Extent;

/// What became of a range.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Outcome {
    /// We overwrote it with zeros, and the stores were fenced.
    Erased,
    /// It reads zero without a store of ours: pages that the kernel handed out fresh, or holes, which
    /// have no pages yet. Says nothing about where older bytes went.
    ReadsZero,
    /// Not proved zero, and why.
    Failed(Cause),
    /// A worker that has not come back still held it when the job ended; it will store nothing any more.
    InFlight,
    /// Nobody came to it before the job ended.
    Untouched,
}

impl Outcome {
    /// Whether the range is known to read zero.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        matches!(self, Outcome::Erased | Outcome::ReadsZero)
    }
}

/// Why a range could not be made zero.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Cause {
    /// The host has no page left for it (hugepages, a cgroup limit, memory).
    Shortage {
        /// The kernel's error number.
        errno: i32,
    },
    /// The file behind the mapping is too short: the range has no memory.
    Truncated,
    /// The hardware or a userfaultfd handler poisoned a page of it.
    Poisoned,
    /// Verification found a byte that is not zero: somebody wrote, or the memory is bad.
    NotZero {
        /// Where, in the address space of the report's ranges.
        address: u64,
    },
    /// The memory object gave no host address for it, or fewer bytes than asked.
    NoHostAddress,
    /// The worker panicked over it.
    Panicked,
    /// The kernel refused a call.
    System {
        /// Which call.
        call: &'static str,
        /// The kernel's error number.
        errno: i32,
    },
}

impl Cause {
    /// Whether it can strike single pages, so that a shorter piece of the same range might succeed.
    pub(crate) fn is_of_single_pages(&self) -> bool {
        !matches!(self, Cause::NotZero { .. } | Cause::Panicked)
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let system = |errno: i32| std::io::Error::from_raw_os_error(errno);
        match self {
            Cause::Shortage { errno } => write!(
                f,
                "the host has no page left for it ({}); reserve hugepages or raise the memory or hugetlb cgroup limit",
                system(*errno)
            ),
            Cause::Truncated => f.write_str(
                "the file behind the mapping is shorter than the mapping; seal it against shrinking",
            ),
            Cause::Poisoned => f.write_str("a page of it is poisoned; take it out of use"),
            Cause::NotZero { address } => write!(
                f,
                "the byte at {address:#x} is not zero after clearing; somebody still writes to this memory"
            ),
            Cause::NoHostAddress => f.write_str("the memory object gave no host address for it"),
            Cause::Panicked => {
                f.write_str("a worker panicked over it; this is a bug in vm-zeroing or in the memory object")
            }
            Cause::System { call, errno } => write!(f, "{call} answered: {}", system(*errno)),
        }
    }
}

/// The outcomes of a job by (region, offset): disjoint runs, coalesced as they are recorded.
#[derive(Debug, Default)]
pub(crate) struct Outcomes {
    runs: BTreeMap<(u32, u64), (u64, Outcome)>,
}

impl Outcomes {
    /// Records an extent. Extents of one job never overlap: each is handed to one worker.
    pub(crate) fn record(&mut self, extent: Extent, outcome: Outcome) {
        let (mut start, mut len) = (extent.start, extent.len);
        if len == 0 {
            return;
        }
        let region = extent.region;
        if let Some((&(r, at), (l, o))) = self.runs.range(..(region, start)).next_back()
            && r == region
            && at + *l == start
            && *o == outcome
        {
            (start, len) = (at, *l + len);
        }
        if let Some((l, o)) = self.runs.get(&(region, extent.end()))
            && *o == outcome
        {
            len += *l;
            self.runs.remove(&(region, extent.end()));
        }
        self.runs.insert((region, start), (len, outcome));
    }

    /// Visits every run of a region of `len` bytes in ascending order; what was not recorded is `Untouched`.
    pub(crate) fn visit_region(&self, region: u32, len: u64, mut visit: impl FnMut(Extent, &Outcome)) {
        let mut at = 0;
        let run_of = |from: u64, to: u64| Extent { region, start: from, len: to - from };
        for (&(_, start), (run, outcome)) in self.runs.range((region, 0)..=(region, u64::MAX)) {
            if at < start {
                visit(run_of(at, start), &Outcome::Untouched);
            }
            visit(run_of(start, start + run), outcome);
            at = start + run;
        }
        if at < len {
            visit(run_of(at, len), &Outcome::Untouched);
        }
    }

    /// The same as a list.
    pub(crate) fn of_region(&self, region: u32, len: u64) -> Vec<(Extent, Outcome)> {
        let mut all = Vec::new();
        self.visit_region(region, len, |extent, outcome| all.push((extent, outcome.clone())));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever the order of recording, the runs tell the same as a byte-by-byte table, coalesced.
        #[test]
        fn runs_tell_what_a_table_tells(cells in prop::collection::vec(0u8..3, 1..40), order in any::<u64>()) {
            let outcome = |kind: u8| [Outcome::Erased, Outcome::ReadsZero, Outcome::Untouched][usize::from(kind)].clone();
            let mut outcomes = Outcomes::default();
            let mut visit: Vec<usize> = (0..cells.len()).collect();
            visit.sort_by_key(|&cell| (cell as u64).wrapping_mul(order | 1).rotate_left(17));
            for cell in visit {
                if cells[cell] < 2 {
                    let extent = Extent { region: 3, start: cell as u64 * 10, len: 10 };
                    outcomes.record(extent, outcome(cells[cell]));
                }
            }
            let runs = outcomes.of_region(3, cells.len() as u64 * 10);
            let mut at = 0;
            for (extent, found) in &runs {
                prop_assert_eq!(extent.start, at);
                for byte in extent.start..extent.end() {
                    prop_assert_eq!(found, &outcome(cells[(byte / 10) as usize]));
                }
                at = extent.end();
            }
            prop_assert_eq!(at, cells.len() as u64 * 10);
            prop_assert!(runs.windows(2).all(|pair| pair[0].1 != pair[1].1), "not coalesced");
        }
    }

    #[test]
    fn regions_do_not_mix() {
        let mut outcomes = Outcomes::default();
        outcomes.record(Extent { region: 0, start: 0, len: 8 }, Outcome::Erased);
        outcomes.record(Extent { region: 1, start: 8, len: 8 }, Outcome::Erased);
        assert_eq!(outcomes.of_region(0, 8).len(), 1);
        assert_eq!(outcomes.of_region(1, 16).len(), 2);
    }
}
