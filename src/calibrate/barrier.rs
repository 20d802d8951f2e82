//! Where measuring threads meet, without sleeping: waking would cost more than a reading takes.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Looks before the CPU is offered to others: threads may share one.
const LOOKS: u32 = 1 << 10;

/// A meeting point for `parties` threads, again and again.
#[derive(Debug)]
pub(super) struct Barrier {
    parties: usize,
    /// Arrivals of all turns so far.
    arrived: AtomicUsize,
}

impl Barrier {
    pub(super) fn new(parties: usize) -> Self {
        Self { parties, arrived: AtomicUsize::new(0) }
    }

    /// Waits until all have arrived for their `turn`, counted from 1. What they did before is seen after it.
    pub(super) fn wait(&self, turn: usize) {
        // Nobody arrives for the next turn before all have for this one, so the sum says it all.
        let mut arrived = self.arrived.fetch_add(1, Ordering::AcqRel) + 1;
        let mut looks = 0;
        while arrived < turn * self.parties {
            if looks < LOOKS {
                std::hint::spin_loop();
                looks += 1;
            } else {
                std::thread::yield_now();
            }
            arrived = self.arrived.load(Ordering::Acquire);
        }
    }
}
