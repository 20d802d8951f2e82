//! What is to happen when: events in order of time, and of entry among those of one time.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// Seconds since the job was submitted, or any other finite number that has an order.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mark(pub f64);

impl Eq for Mark {}

impl Ord for Mark {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl PartialOrd for Mark {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Events to come.
#[derive(Debug)]
pub struct Agenda<E> {
    entries: BinaryHeap<Reverse<(Mark, u64, E)>>,
    entered: u64,
}

impl<E: Ord> Agenda<E> {
    pub fn new() -> Self {
        Self { entries: BinaryHeap::new(), entered: 0 }
    }

    pub fn enter(&mut self, at: f64, event: E) {
        self.entries.push(Reverse((Mark(at), self.entered, event)));
        self.entered += 1;
    }

    /// The first event and its time.
    pub fn next(&mut self) -> Option<(f64, E)> {
        self.entries.pop().map(|Reverse((at, _, event))| (at.0, event))
    }
}
