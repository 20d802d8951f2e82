//! What a chunk costs the thread that has it, from when it is prepared, without costing much itself.

use std::cell::Cell;
use std::time::{Duration, Instant};

use super::work::Hand;
use crate::sys::thread_cpu_time;

/// Chunks shorter than this that wait for nothing are metered by the clock: asking the kernel for CPU time, twice,
/// takes as long as clearing so many bytes.
const ASKED_FROM: u64 = 64 << 10;

/// What a worker may do between two chunks, such as finding the second, for it to count as spent on that.
const A_MOMENT: Duration = Duration::from_micros(20);

thread_local! {
    /// The thread's CPU time when it was last asked for, and when that was.
    static LAST: Cell<Option<(Duration, Instant)>> = const { Cell::new(None) };
}

#[derive(Debug)]
pub(super) enum Meter {
    Off,
    /// From this CPU time of the thread on.
    CpuTime(Duration),
    Clock(Instant),
}

impl Meter {
    /// A worker that had another chunk a moment ago does not ask the kernel again.
    pub(super) fn cpu_time(hand: Hand) -> Self {
        let last = LAST.take().filter(|(_, when)| hand.worker != Hand::CALLER && when.elapsed() < A_MOMENT);
        Self::CpuTime(last.map_or_else(thread_cpu_time, |(cpu_time, _)| cpu_time))
    }

    /// For a chunk of so many bytes that is prepared without waiting.
    pub(super) fn at_once(hand: Hand, bytes: u64) -> Self {
        if bytes < ASKED_FROM { Self::Clock(Instant::now()) } else { Self::cpu_time(hand) }
    }

    pub(super) fn spent(&self) -> Duration {
        match self {
            Self::Off => Duration::ZERO,
            Self::CpuTime(since) => {
                let now = thread_cpu_time();
                LAST.set(Some((now, Instant::now())));
                now.saturating_sub(*since)
            }
            Self::Clock(since) => since.elapsed(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORKER: Hand = Hand { worker: 0, node: None, stolen: false };
    const CALLER: Hand = Hand { worker: Hand::CALLER, ..WORKER };

    fn since(meter: Meter) -> Duration {
        match meter {
            Meter::CpuTime(since) => since,
            other => panic!("{other:?}"),
        }
    }

    /// A worker's next chunk begins where its last one ended, if that was a moment ago; a caller's never.
    #[test]
    fn where_a_chunk_begins() {
        let mark = |ago| LAST.set(Some((Duration::from_nanos(7), Instant::now() - ago)));
        // Unless this thread was held up for so long just then.
        assert!((0..100).any(|_| {
            mark(Duration::ZERO);
            since(Meter::cpu_time(WORKER)) == Duration::from_nanos(7)
        }));
        mark(A_MOMENT);
        assert!(since(Meter::cpu_time(WORKER)) > Duration::from_nanos(7));
        mark(Duration::ZERO);
        assert!(since(Meter::cpu_time(CALLER)) > Duration::from_nanos(7));
        assert!(matches!(Meter::at_once(CALLER, ASKED_FROM - 1), Meter::Clock(_)));
        assert!(matches!(Meter::at_once(CALLER, ASKED_FROM), Meter::CpuTime(_)));
    }

    #[test]
    fn what_was_not_prepared_cost_nothing() {
        assert_eq!(Meter::Off.spent(), Duration::ZERO);
    }
}
