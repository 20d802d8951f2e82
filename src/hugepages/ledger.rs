//! The ledger: what state every page is in, and who holds every slab.
//!
//! Page states are the truth, kept in the frame table. A slab's `Holder` says who may ask for which
//! transition of its pages; it changes only under the lock, together with them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::lease::LeaseId;
use super::slab::Slab;
use crate::frames::{FrameError, FrameTable, PageState};
use crate::sys::Reservation;
use crate::topology::NodeId;

/// Who holds a slab.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Holder {
    /// Nobody, and every page is `Zero`: can be lent.
    Zero,
    /// Nobody, and some page is `Stale`: to be zeroed.
    Stale,
    /// A job that zeroes it.
    Zeroing,
    /// A lease.
    Lent(LeaseId),
    /// A lease that was dropped without being recycled: somebody may still write to it.
    Parked(LeaseId),
    /// Nobody, for good: a page of it is bad.
    Quarantined,
}

/// What a node's bytes are, in whole slabs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct PoolUsage {
    /// Can be lent now.
    pub zero_bytes: u64,
    /// Stale, and no job zeroes them (a job was cut short): see [`HugepagePool::zero_stale`](crate::HugepagePool::zero_stale).
    pub stale_bytes: u64,
    /// Being zeroed.
    pub zeroing_bytes: u64,
    /// Lent.
    pub leased_bytes: u64,
    /// Of leases dropped without being recycled: see [`HugepagePool::reclaim`](crate::HugepagePool::reclaim).
    pub parked_bytes: u64,
    /// Out of use, for a bad page.
    pub quarantined_bytes: u64,
}

#[derive(Debug)]
pub(super) struct Ledger {
    pub(super) slabs: Vec<Slab>,
    pub(super) frames: Arc<FrameTable>,
    holders: Mutex<Holders>,
}

#[derive(Debug)]
pub(super) struct Holders {
    /// One entry a slab.
    of_slab: Vec<Holder>,
    /// The addresses of ended leases, without memory, kept from being used again.
    pub(super) kept_addresses: BTreeMap<LeaseId, Vec<Reservation>>,
}

impl Ledger {
    /// A ledger of new slabs. All of their pages are `Stale` until a job has proved better.
    pub(super) fn new(slabs: Vec<Slab>, frames: Arc<FrameTable>) -> Self {
        let holders = Holders { of_slab: vec![Holder::Stale; slabs.len()], kept_addresses: BTreeMap::new() };
        Self { slabs, frames, holders: Mutex::new(holders) }
    }

    pub(super) fn holders(&self) -> MutexGuard<'_, Holders> {
        self.holders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn slab(&self, index: usize) -> Option<&Slab> {
        self.slabs.get(index)
    }

    /// Lends the first `Zero` slabs on `nodes`, in their order, that hold `bytes` together. `Ok(None)` if
    /// there are too few; then nothing has changed.
    pub(super) fn lend(
        &self,
        lease: LeaseId,
        bytes: u64,
        nodes: &[NodeId],
    ) -> Result<Option<Vec<usize>>, FrameError> {
        let mut holders = self.holders();
        let mut chosen = Vec::new();
        let mut held = 0;
        for node in nodes {
            for (index, slab) in self.slabs.iter().enumerate() {
                if held < bytes && slab.node == *node && holders.of(index) == Some(Holder::Zero) {
                    held += slab.bytes;
                    chosen.push(index);
                }
            }
        }
        if held < bytes {
            return Ok(None);
        }
        for (done, &index) in chosen.iter().enumerate() {
            if let Err(error) =
                self.frames.transition(self.pages(index), PageState::Zero, PageState::Leased, None)
            {
                // The holder said `Zero` and a page does not: a bug, and nothing is handed on.
                holders.set(index, Holder::Quarantined);
                chosen
                    .iter()
                    .take(done)
                    .for_each(|&taken| self.make_stale(&mut holders, taken, Holder::Stale));
                return Err(error);
            }
        }
        chosen.iter().for_each(|&index| holders.set(index, Holder::Lent(lease)));
        Ok(Some(chosen))
    }

    /// The end of a lease: the pages of its slabs are stale, and the slabs held as `next` says.
    pub(super) fn end_lease(&self, slabs: &[usize], next: Holder) {
        let mut holders = self.holders();
        slabs.iter().for_each(|&index| self.make_stale(&mut holders, index, next));
    }

    /// Takes every slab that is held as `expected` for zeroing.
    pub(super) fn begin_zeroing(&self, expected: Holder) -> Vec<usize> {
        let mut holders = self.holders();
        let taken: Vec<usize> =
            (0..self.slabs.len()).filter(|index| holders.of(*index) == Some(expected)).collect();
        for &index in &taken {
            self.advance(self.pages(index), PageState::Stale, PageState::Zeroing);
            holders.set(index, Holder::Zeroing);
        }
        taken
    }

    /// The end of zeroing a slab: pages that are still `Zeroing` were not proved zero. Says who holds the slab now.
    pub(super) fn end_zeroing(&self, index: usize) {
        let mut holders = self.holders();
        let pages = self.pages(index);
        self.advance(pages.clone(), PageState::Zeroing, PageState::Stale);
        let mut next = Holder::Zero;
        for page in pages {
            match self.frames.frame(page).map(|frame| frame.state()) {
                Ok(PageState::Zero) => {}
                Ok(PageState::Stale) if next == Holder::Zero => next = Holder::Stale,
                Ok(PageState::Stale) => {}
                _ => next = Holder::Quarantined,
            }
        }
        holders.set(index, next);
    }

    /// Takes those of the pages that are in `from` to `to`; the others are left alone.
    pub(super) fn advance(&self, pages: Range<u64>, from: PageState, to: PageState) {
        if self.frames.transition(pages.clone(), from, to, None).is_ok() {
            return;
        }
        // Mixed states, after a job that was cut short: page by page.
        for page in pages {
            let is_there = self.frames.frame(page).is_ok_and(|frame| frame.state() == from);
            if is_there && let Err(error) = self.frames.transition(page..page + 1, from, to, None) {
                tracing::error!(page, %error, "a page could not be moved on in the ledger");
            }
        }
    }

    /// What the bytes on `nodes` are, at one moment: a slab that changes hands is counted once.
    pub(super) fn usage(&self, nodes: &[NodeId]) -> PoolUsage {
        let holders = self.holders();
        let mut usage = PoolUsage::default();
        for (slab, holder) in self.slabs.iter().zip(&holders.of_slab) {
            if nodes.contains(&slab.node) {
                *match holder {
                    Holder::Zero => &mut usage.zero_bytes,
                    Holder::Stale => &mut usage.stale_bytes,
                    Holder::Zeroing => &mut usage.zeroing_bytes,
                    Holder::Lent(_) => &mut usage.leased_bytes,
                    Holder::Parked(_) => &mut usage.parked_bytes,
                    Holder::Quarantined => &mut usage.quarantined_bytes,
                } += slab.bytes;
            }
        }
        usage
    }

    /// The leases that were dropped without being recycled.
    pub(super) fn parked(&self) -> Vec<LeaseId> {
        let holders = self.holders();
        let parked = holders.of_slab.iter().filter_map(|holder| match holder {
            Holder::Parked(lease) => Some(*lease),
            _ => None,
        });
        let distinct: std::collections::BTreeSet<LeaseId> = parked.collect();
        distinct.into_iter().collect()
    }

    fn pages(&self, index: usize) -> Range<u64> {
        self.slab(index).map_or(0..0, |slab| slab.frames.clone())
    }

    fn make_stale(&self, holders: &mut Holders, index: usize, next: Holder) {
        match self.frames.transition(self.pages(index), PageState::Leased, PageState::Stale, None) {
            Ok(()) => holders.set(index, next),
            Err(error) => {
                tracing::error!(slab = index, %error, "a slab's pages are not what its holder says; it is taken out of use");
                holders.set(index, Holder::Quarantined);
            }
        }
    }
}

impl Holders {
    fn of(&self, slab: usize) -> Option<Holder> {
        self.of_slab.get(slab).copied()
    }

    fn set(&mut self, slab: usize, holder: Holder) {
        if let Some(entry) = self.of_slab.get_mut(slab) {
            *entry = holder;
        }
    }
}
