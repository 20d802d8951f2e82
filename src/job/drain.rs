//! Waiting for one job of many after the other, without being woken by each.
//!
//! Waking a thread costs the worker that does it several microseconds of a system call and an interrupt to another
//! CPU, and whoever runs there two switches: of 2 MiB jobs a tenth of the throughput. A thread that has waited for a
//! while for jobs that were queued before it began is about to wait for more of them, so it naps first, without
//! having itself woken: for an eighth of that while, and so the last job is told late by an eighth at most.

use std::cell::Cell;
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::sync::lock;

/// The kernel's timers are late by this much, unless the process was told otherwise (`PR_SET_TIMERSLACK`): shorter
/// naps are none.
const SHORTEST: Duration = Duration::from_micros(50);

const LONGEST: Duration = Duration::from_micros(200);

/// A thread's waiting for jobs that were all queued when it began.
#[derive(Debug, Clone, Copy)]
struct Drain {
    began: Instant,
    /// When the last wait ended.
    last: Instant,
}

thread_local! {
    static DRAIN: Cell<Option<Drain>> = const { Cell::new(None) };
}

/// Lets the calling thread wait for a job that was submitted at some time: by `wait`, after a nap if that is due.
/// `until`: no nap beyond it. Who waits in vain polls, and does not nap.
pub(super) fn wait<T>(
    submitted: Instant,
    until: Option<Instant>,
    wait: impl FnOnce() -> Option<T>,
) -> Option<T> {
    let now = Instant::now();
    let began = began(DRAIN.get(), submitted, now);
    if let Some(nap) = nap(began, now, until) {
        let nobody = Mutex::new(());
        // Only the time ends it: nobody else knows it.
        drop(Condvar::new().wait_timeout(lock(&nobody), nap));
    }
    let answer = wait();
    DRAIN.set(answer.as_ref().map(|_| Drain { began, last: Instant::now() }));
    answer
}

/// When this thread began to wait for jobs that were queued by then, and has hardly done anything else since.
fn began(drain: Option<Drain>, submitted: Instant, now: Instant) -> Instant {
    let goes_on =
        |drain: &Drain| submitted < drain.began && now.saturating_duration_since(drain.last) < LONGEST;
    drain.filter(goes_on).map_or(now, |drain| drain.began)
}

fn nap(began: Instant, now: Instant, until: Option<Instant>) -> Option<Duration> {
    let nap = (now.saturating_duration_since(began) / 8).min(LONGEST);
    (nap >= SHORTEST && until.is_none_or(|until| now + nap < until)).then_some(nap)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICROSECOND: Duration = Duration::from_micros(1);

    /// A nap is an eighth of what was waited so far, if that is worth it, and ends before the wait has to.
    #[test]
    fn how_long_a_nap_is() {
        let began = Instant::now();
        let after = |micros: u32| nap(began, began + micros * MICROSECOND, None);
        assert_eq!([after(0), after(399)], [None, None]);
        assert_eq!(after(400), Some(50 * MICROSECOND));
        assert_eq!(after(800), Some(100 * MICROSECOND));
        assert_eq!(after(1_000_000), Some(LONGEST));
        let now = began + 800 * MICROSECOND;
        assert_eq!(nap(began, now, Some(now)), None);
        assert_eq!(nap(began, now, Some(now + 100 * MICROSECOND)), None);
        assert_eq!(nap(began, now, Some(now + 101 * MICROSECOND)), Some(100 * MICROSECOND));
    }

    /// Only who goes on waiting, for what was queued before, naps: not who submits and waits in turn.
    #[test]
    fn what_goes_on() {
        let start = Instant::now();
        let at = |micros: u32| start + micros * MICROSECOND;
        let drain = Some(Drain { began: at(100), last: at(900) });
        assert_eq!(began(None, at(0), at(1000)), at(1000));
        assert_eq!(began(drain, at(99), at(1000)), at(100));
        assert_eq!(began(drain, at(100), at(1000)), at(1000), "submitted since");
        assert_eq!(began(drain, at(99), at(1100)), at(1100), "it did something else since");
    }

    /// The first wait never naps; what a wait answers is passed on, and the next one goes on from it.
    #[test]
    fn waits_in_a_row() {
        let submitted = Instant::now();
        let first = wait(submitted, None, || Some(DRAIN.get()));
        assert!(first.is_some_and(|drain| drain.is_none()));
        let drain = DRAIN.get().unwrap();
        assert!(submitted <= drain.began && drain.began <= drain.last);
        // Unless this thread was held up for so long just then.
        assert!((0..100).any(|_| {
            let before = wait(submitted, None, || DRAIN.get()).unwrap();
            wait(submitted, None, || Some(()));
            DRAIN.get().unwrap().began == before.began
        }));
        assert_eq!(wait(submitted, None, || None::<()>), None);
        assert!(DRAIN.get().is_none(), "who waits in vain begins anew");
    }
}
