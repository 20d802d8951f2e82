//! Where measuring threads meet, without sleeping: waking would cost more than a reading takes.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Looks before the CPU is offered to others: threads may share one.
const LOOKS: u32 = 1 << 10;

/// A meeting point for `parties` threads, again and again, until one of them stops all.
#[derive(Debug)]
pub(super) struct Barrier {
    parties: usize,
    /// Arrivals of all turns so far.
    arrived: AtomicUsize,
    stopped: AtomicBool,
}

impl Barrier {
    pub(super) fn new(parties: usize) -> Self {
        Self { parties, arrived: AtomicUsize::new(0), stopped: AtomicBool::new(false) }
    }

    /// Nobody waits any more. Who stops does not arrive again, so that no turn after the last whole one begins.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
    }

    /// Waits until all have arrived for their `turn`, counted from 1; false if that will not be. What the others did
    /// before is seen after it.
    pub(super) fn wait(&self, turn: usize) -> bool {
        // Nobody arrives for the next turn before all have for this one, so the sum says it all.
        let mut arrived = self.arrived.fetch_add(1, Ordering::AcqRel) + 1;
        let mut looks = 0;
        while arrived < turn * self.parties {
            if self.stopped.load(Ordering::Acquire) {
                return false;
            }
            if looks < LOOKS {
                std::hint::spin_loop();
                looks += 1;
            } else {
                std::thread::yield_now();
            }
            arrived = self.arrived.load(Ordering::Acquire);
        }
        true
    }
}
