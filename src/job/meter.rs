//! What a chunk costs the thread that has it, from when it is prepared, without costing much itself.

use std::cell::Cell;
use std::time::{Duration, Instant};

use super::work::Hand;
use crate::sys::thread_cpu_time;

/// What a worker may do between two chunks, such as finding the second, for it to count as spent on that.
const A_MOMENT: Duration = Duration::from_micros(20);

thread_local! {
    /// The thread's CPU time when it was last asked for, and when that was.
    static LAST: Cell<Option<(Duration, Instant)>> = const { Cell::new(None) };
}

/// From this CPU time of the thread on.
#[derive(Debug)]
pub(super) struct Meter(Duration);

impl Meter {
    /// A worker that had another chunk a moment ago does not ask the kernel again.
    pub(super) fn of(hand: Hand) -> Self {
        let last = LAST.take().filter(|(_, when)| hand.worker != Hand::CALLER && when.elapsed() < A_MOMENT);
        Self(last.map_or_else(thread_cpu_time, |(cpu_time, _)| cpu_time))
    }

    pub(super) fn spent(&self) -> Duration {
        let now = thread_cpu_time();
        LAST.set(Some((now, Instant::now())));
        now.saturating_sub(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORKER: Hand = Hand { worker: 0, node: None, stolen: false };
    const CALLER: Hand = Hand { worker: Hand::CALLER, ..WORKER };

    /// A worker's next chunk begins where its last one ended, if that was a moment ago; a caller's never.
    #[test]
    fn where_a_chunk_begins() {
        let mark = |ago| LAST.set(Some((Duration::from_nanos(7), Instant::now() - ago)));
        // Unless this thread was held up for so long just then.
        assert!((0..100).any(|_| {
            mark(Duration::ZERO);
            Meter::of(WORKER).0 == Duration::from_nanos(7)
        }));
        mark(A_MOMENT);
        assert!(Meter::of(WORKER).0 > Duration::from_nanos(7));
        mark(Duration::ZERO);
        assert!(Meter::of(CALLER).0 > Duration::from_nanos(7));
    }
}
