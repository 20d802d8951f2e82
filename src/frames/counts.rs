//! How many frames are in which state, without looking at them.

use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam::utils::CachePadded;

use super::state::PageState;

/// How many frames of a node are in each state. Frames of pending sections are counted too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct FrameCounts {
    /// Frames in [`PageState::Stale`].
    pub stale: u64,
    /// Frames in [`PageState::Zeroing`].
    pub zeroing: u64,
    /// Frames in [`PageState::Zero`].
    pub zero: u64,
    /// Frames in [`PageState::Leased`].
    pub leased: u64,
    /// Frames in [`PageState::Quarantined`].
    pub quarantined: u64,
}

/// A span's frames per state, kept by presets and transitions.
#[derive(Default)]
pub(super) struct Counts(CachePadded<[AtomicU64; PageState::ALL.len()]>);

impl Counts {
    /// `frames` frames go from one state to the other. Called while they can still be seen in `from` only,
    /// so that nobody can take them out of `to` before they were counted in: no count falls below zero.
    pub(super) fn moved(&self, from: PageState, to: PageState, frames: u64) {
        self.0[from as usize].fetch_sub(frames, Ordering::Relaxed);
        self.0[to as usize].fetch_add(frames, Ordering::Relaxed);
    }

    /// All frames of a span nobody has said anything about.
    pub(super) fn all_stale(frames: u64) -> Self {
        let counts = Self::default();
        counts.0[PageState::Stale as usize].store(frames, Ordering::Relaxed);
        counts
    }

    /// The sum over this span and those before it.
    pub(super) fn added_to(&self, sum: FrameCounts) -> FrameCounts {
        let of = |state: PageState| self.0[state as usize].load(Ordering::Relaxed);
        FrameCounts {
            stale: sum.stale + of(PageState::Stale),
            zeroing: sum.zeroing + of(PageState::Zeroing),
            zero: sum.zero + of(PageState::Zero),
            leased: sum.leased + of(PageState::Leased),
            quarantined: sum.quarantined + of(PageState::Quarantined),
        }
    }
}
