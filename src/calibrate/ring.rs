//! The memory that one thread measures on: its own, on its node, on the largest pages that can be had.

use std::time::{Duration, Instant};

use crate::clear::Shortfall;
use crate::sys::{Chunk, ScratchMapping, kernel_populates, minor_faults, node_of, page_size, populate};

const HUGE_2M: u64 = 2 << 20;
const HUGE_1G: u64 = 1 << 30;

/// The smallest ring that is of use, and the step in which one is made present.
pub(super) const SMALLEST: u64 = HUGE_2M;

/// For this much, more time is taken where the kernel is slow: shorter rings are of little use.
const WORTH_WAITING: u64 = 4 << 20;

/// The kernel may clear a page of 1 GiB as slowly as this.
const SLOWEST_1G: Duration = Duration::from_millis(500);

/// Walked in ascending order, round and round.
#[derive(Debug)]
pub(super) struct Ring {
    memory: ScratchMapping,
    /// Where the next window begins.
    next: u64,
    page_bytes: u64,
    /// Why it is shorter than was wanted.
    shortfall: Option<Shortfall>,
}

/// Until when memory may be made present.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    pub(super) until: Instant,
    /// While there is hardly any yet.
    pub(super) at_the_latest: Instant,
}

impl Patience {
    fn lasts(self, present: u64) -> bool {
        present == 0 || Instant::now() < if present < WORTH_WAITING { self.at_the_latest } else { self.until }
    }
}

/// The pages that a mapping was asked on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pages {
    Reserved(u64),
    Transparent,
}

impl Ring {
    /// Maps up to `wanted` bytes and makes present what can be in time, [`SMALLEST`] in any case. Called by
    /// the thread that will use it, so that the kernel takes pages of its node; hugepages of other nodes than
    /// `home`, if that is given, are left alone.
    pub(super) fn make(wanted: u64, home: Option<u32>, patience: Patience) -> Result<Self, Shortfall> {
        let giants = wanted / HUGE_1G;
        let time_for_giants = SLOWEST_1G.saturating_mul(u32::try_from(giants).unwrap_or(u32::MAX));
        let mut kinds = Vec::new();
        // Where populating cannot report that a cgroup is out of hugepages, a touch would raise SIGBUS.
        if kernel_populates() {
            if giants > 0
                && wanted.is_multiple_of(HUGE_1G)
                && Instant::now() + time_for_giants <= patience.until
            {
                kinds.push(Pages::Reserved(HUGE_1G));
            }
            kinds.push(Pages::Reserved(HUGE_2M));
        }
        kinds.push(Pages::Transparent);
        kinds.into_iter().find_map(|pages| Self::on(pages, wanted, home, patience)).ok_or(Shortfall::Memory)
    }

    fn on(pages: Pages, wanted: u64, home: Option<u32>, patience: Patience) -> Option<Self> {
        let mut len = wanted.next_multiple_of(SMALLEST);
        let mut memory = loop {
            let mapped = match pages {
                Pages::Reserved(page) => ScratchMapping::on_hugepages(len, page),
                Pages::Transparent => ScratchMapping::on_transparent_hugepages(len, HUGE_2M),
            };
            match mapped {
                Ok(mapped) => break mapped,
                // Too few hugepages are free: transparent ones are as large. No address space left: less does.
                Err(_) if pages == Pages::Transparent && len > SMALLEST => {
                    len = (len / 2).next_multiple_of(SMALLEST);
                }
                Err(_) => return None,
            }
        };
        let step = match pages {
            Pages::Reserved(page) => page,
            Pages::Transparent => HUGE_2M,
        };
        let (before, mut present, mut refused) = (minor_faults(), 0, false);
        while present < len && patience.lasts(present) {
            refused = populate(&memory.chunk(present, step)?).is_err();
            if refused {
                break;
            }
            present += step;
        }
        if present == 0 {
            return None;
        }
        if let (Pages::Reserved(page), Some(home)) = (pages, home) {
            // The first and the last: the kernel takes those of the node as long as there are some.
            for at in [0, present - page] {
                if node_of(&memory.chunk(at, page)?).is_ok_and(|node| node.is_some_and(|node| node != home)) {
                    return None;
                }
            }
        }
        memory.truncate(present);
        let faults = minor_faults().saturating_sub(before);
        let page_bytes = match pages {
            Pages::Reserved(page) => page,
            // One fault a page; some may have come from elsewhere.
            Pages::Transparent if faults <= 2 * present / HUGE_2M => HUGE_2M,
            Pages::Transparent => page_size(),
        };
        let shortfall = match present {
            _ if present >= wanted => None,
            _ if refused || len < wanted => Some(Shortfall::Memory),
            _ => Some(Shortfall::Time),
        };
        Some(Self { memory, next: 0, page_bytes, shortfall })
    }

    pub(super) fn len(&self) -> u64 {
        self.memory.len()
    }

    /// The size of its pages in bytes.
    pub(super) fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// Why it is shorter than was wanted, if it is.
    pub(super) fn shortfall(&self) -> Option<Shortfall> {
        self.shortfall
    }

    /// The next `len` bytes, from the start again where too few are left; `None` if the ring is shorter.
    pub(super) fn window(&mut self, len: u64) -> Option<Chunk<'_>> {
        if self.memory.len() - self.next < len {
            self.next = 0;
        }
        let start = self.next;
        self.next = (start + len).min(self.memory.len());
        self.memory.chunk(start, len)
    }
}
