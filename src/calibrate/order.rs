//! What all threads of a reading do at the same time: make memory cold or hot, meet, clear, look at the clock.

use std::time::{Duration, Instant};

use super::barrier::Barrier;
use super::ring::Ring;
use crate::clear::{Clearer, Method, Reuse, Situation, fill};

/// What memory holds before it is cleared: not zero, since some CPUs drop stores that change nothing.
const STALE: [u8; 64] = [0xa5; 64];

/// From making memory cold or hot to the reading: what was stored is still on its way to memory for a while, and
/// would slow the reading down (by a third where it takes 3 µs, seen on Zen 5).
const PAUSE: Duration = Duration::from_micros(8);

/// Readings of several methods one after the other, the same bytes each.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) situation: Situation,
    /// The bytes of one run.
    pub(super) class: u64,
    /// The bytes that each thread clears a reading, in runs of `class`.
    pub(super) bytes: u64,
    /// Which of the clearers, in this order.
    pub(super) clearers: Vec<usize>,
    /// Stopped when the time is up: what is left is not done.
    pub(super) barrier: Barrier,
}

/// From when to when one thread cleared.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span {
    pub(super) start: Instant,
    pub(super) end: Instant,
}

impl Order {
    /// Called by each of its threads with a ring of its own; the one that knows the deadline stops all.
    pub(super) fn carry_out(
        &self,
        clearers: &[(Method, Clearer)],
        ring: &mut Ring,
        deadline: Option<Instant>,
    ) -> Vec<Span> {
        let mut spans = Vec::with_capacity(self.clearers.len());
        let chosen = self.clearers.iter().filter_map(|index| clearers.get(*index));
        // Past the caches, or so that it stays in them.
        let method = match self.situation.reuse {
            Reuse::Cold => Method::Sse2,
            Reuse::Soon => Method::Portable,
        };
        for (turn, (_, clearer)) in (1..).step_by(2).zip(chosen) {
            let window = ring.window(self.bytes);
            if let Some(window) = &window {
                fill(method, window, &STALE);
                let filled = Instant::now();
                while filled.elapsed() < PAUSE {
                    std::hint::spin_loop();
                }
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                self.barrier.stop();
                break;
            }
            if !self.barrier.wait(turn) {
                break;
            }
            let start = Instant::now();
            for run in window.iter().flat_map(|window| {
                (0..self.bytes / self.class).filter_map(|run| window.part(run * self.class, self.class))
            }) {
                clearer.clear_chunk(&run, self.situation);
            }
            spans.push(Span { start, end: Instant::now() });
            // Nobody prepares the next reading while another one still clears.
            self.barrier.wait(turn + 1);
        }
        spans
    }
}
