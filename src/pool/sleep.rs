//! Parking idle workers without losing a task. The same file runs under `loom` (`tests/loom`).
//!
//! # Why no task is slept through
//!
//! A worker goes to sleep in the order: count itself idle, (fence), look at the queues once more, wait for
//! a permit. Whoever adds a task: push, (fence), read the number of idle workers, and if there is one, turn
//! one of them into a permit under the lock, and notify.
//! The two fences are sequentially consistent, so one of them comes first. If the adder's does, the worker's
//! look at the queues sees the task. If the worker's does, the adder sees it idle, and issues a permit that
//! it will find before it waits, or that ends its waiting.
//!
//! A worker that is woken is not idle any more from that moment on, so the next task wakes somebody else,
//! here or on another node, and not the same worker again: it may be held up for long by what it takes.
//! And a worker that finds a task by its look although a permit was issued for it passes the wake on, since
//! the task that the permit was issued for may be another one. So does a worker that leaves, since somebody
//! stands in for it: the task that it was woken for is still there.
//!
//! A permit is anybody's, also of a worker that goes to sleep while the one that was woken has not got up yet. So
//! whoever has something to say to everybody (that some are to leave, that the pool closes) does not issue
//! permits but counts a call: each worker remembers the count of when it counted itself idle, and does not sleep
//! on when it is another. What was said before it counted itself idle it sees by its look, as it does a task.

use crate::sync::{AtomicUsize, Condvar, Instant, Mutex, Ordering, PoisonError, fence, lock};

/// The idle workers of one node.
#[derive(Debug, Default)]
pub(crate) struct Dormitory {
    /// `Beds::idle`, to be read without the lock.
    idle: AtomicUsize,
    beds: Mutex<Beds>,
    bell: Condvar,
}

#[derive(Debug, Default)]
struct Beds {
    /// Workers that are going to sleep or asleep, and that nobody has woken yet.
    idle: usize,
    /// Workers that were woken and have not got up yet.
    permits: usize,
    /// How often everybody was woken: whoever went to bed before the last time gets up.
    calls: usize,
}

/// How a worker came out of the dormitory.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Rested<T> {
    /// Somebody woke it, or it slept long enough.
    Woken,
    /// It found something before it slept; `owes_a_wake` if somebody had woken it all the same.
    Found { what: T, owes_a_wake: bool },
}

/// A worker from its first task to its leave.
pub(crate) trait Shift {
    type Task;

    fn is_to_leave(&self) -> bool;

    /// Takes a task from wherever there is one for it. If there is none: when something may be found that waits
    /// for its time.
    fn find(&self) -> Result<Self::Task, Option<Instant>>;

    /// Where it sleeps.
    fn dormitory(&self) -> Option<&Dormitory>;

    /// Wakes somebody else for what it was woken for.
    fn pass_wake_on(&self);

    fn execute(&self, task: Self::Task);

    /// Works, and sleeps while there is nothing to do, until it is to leave.
    fn work(&self) {
        while !self.is_to_leave() {
            if let Some(task) = self.find().ok().or_else(|| self.rest()) {
                self.execute(task);
            }
        }
        // What it was woken for last it may have left where it is.
        self.pass_wake_on();
    }

    fn rest(&self) -> Option<Self::Task> {
        let rested = self.dormitory()?.sleep_unless(|| {
            // `Ok` keeps the worker up; an empty answer of one that leaves ends the loop of `work`.
            if self.is_to_leave() { Ok(None) } else { self.find().map(Some) }
        });
        let Rested::Found { what, owes_a_wake } = rested else { return None };
        if owes_a_wake {
            self.pass_wake_on();
        }
        what
    }
}

impl Dormitory {
    /// Wakes one idle worker, if there is one. Called after a task was pushed.
    pub(crate) fn wake_one(&self) -> bool {
        fence(Ordering::SeqCst);
        if self.idle.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let mut beds = lock(&self.beds);
        if beds.idle == 0 {
            return false;
        }
        self.change(&mut beds, |beds| {
            beds.idle -= 1;
            beds.permits += 1;
        });
        self.bell.notify_one();
        true
    }

    /// Wakes everybody, to see that the pool closes, that some of them are to leave, or that the rate is another.
    pub(crate) fn wake_all(&self) {
        lock(&self.beds).calls += 1;
        self.bell.notify_all();
    }

    /// Sleeps until woken, unless `look` finds something; no longer than the time it names instead, if any.
    pub(crate) fn sleep_unless<T>(&self, look: impl FnOnce() -> Result<T, Option<Instant>>) -> Rested<T> {
        let called = {
            let mut beds = lock(&self.beds);
            self.change(&mut beds, |beds| beds.idle += 1);
            beds.calls
        };
        fence(Ordering::SeqCst);
        let found = look();
        let mut beds = lock(&self.beds);
        match found {
            Ok(what) => {
                // Whoever is asleep beside it keeps what is left of the two numbers.
                let owes_a_wake = beds.idle == 0;
                self.change(&mut beds, |beds| {
                    let count = if owes_a_wake { &mut beds.permits } else { &mut beds.idle };
                    *count = count.saturating_sub(1);
                });
                Rested::Found { what, owes_a_wake }
            }
            Err(until) => loop {
                if beds.permits > 0 {
                    beds.permits -= 1;
                    return Rested::Woken;
                }
                let left = until.map(|until| until.saturating_duration_since(Instant::now()));
                if beds.calls != called || left.is_some_and(|left| left.is_zero()) {
                    // Nobody woke this one, so it is among those who are idle.
                    self.change(&mut beds, |beds| beds.idle = beds.idle.saturating_sub(1));
                    return Rested::Woken;
                }
                beds = match left {
                    None => self.bell.wait(beds).unwrap_or_else(PoisonError::into_inner),
                    Some(left) => {
                        self.bell.wait_timeout(beds, left).unwrap_or_else(PoisonError::into_inner).0
                    }
                };
            },
        }
    }

    fn change(&self, beds: &mut Beds, change: impl FnOnce(&mut Beds)) {
        change(beds);
        self.idle.store(beds.idle, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use super::*;

    /// Takes one of the tasks, if there is one.
    fn take(tasks: &AtomicUsize) -> Option<()> {
        tasks.fetch_update(Ordering::AcqRel, Ordering::Acquire, |left| left.checked_sub(1)).ok().map(drop)
    }

    #[test]
    fn nobody_asleep_is_nobody_woken() {
        let dormitory = Dormitory::default();
        assert!(!dormitory.wake_one());
        let found = dormitory.sleep_unless(|| Ok(7));
        assert_eq!(
            found,
            Rested::Found { what: 7, owes_a_wake: false },
            "who finds something does not sleep"
        );
        assert!(!dormitory.wake_one(), "nor is counted any more");
        dormitory.wake_all();
    }

    #[test]
    fn a_wake_between_look_and_sleep_is_not_slept_through() {
        let dormitory = Dormitory::default();
        let found = dormitory.sleep_unless(|| {
            // Whoever pushes now finds a sleeper, and this thread is about to wait.
            assert!(dormitory.wake_one());
            Err::<(), _>(None)
        });
        assert_eq!(found, Rested::Woken);
        dormitory.sleep_unless(|| {
            dormitory.wake_all();
            Err::<(), _>(None)
        });
    }

    /// Who has slept long enough is not idle any more: no wake is lost on it.
    #[test]
    fn a_nap_ends_by_itself() {
        let dormitory = Dormitory::default();
        let rested = dormitory.sleep_unless(|| Err::<(), _>(Some(Instant::now())));
        assert_eq!(rested, Rested::Woken);
        assert!(!dormitory.wake_one());
        // A wake that comes first counts as one.
        let rested = dormitory.sleep_unless(|| {
            assert!(dormitory.wake_one());
            Err::<(), _>(Some(Instant::now()))
        });
        assert_eq!(rested, Rested::Woken);
        let beds = lock(&dormitory.beds);
        assert_eq!((beds.idle, beds.permits), (0, 0));
    }

    /// The next task wakes somebody else: who was woken once is on his way.
    #[test]
    fn nobody_is_woken_twice() {
        let dormitory = Dormitory::default();
        let found = dormitory.sleep_unless(|| {
            assert!(dormitory.wake_one());
            assert!(!dormitory.wake_one(), "the only one is awake");
            Ok(7)
        });
        assert_eq!(
            found,
            Rested::Found { what: 7, owes_a_wake: true },
            "the wake was for another task, perhaps"
        );
        assert!(!dormitory.wake_one());
    }

    /// One task at a time for many sleepers: each push must be taken, or this never ends.
    #[test]
    fn no_task_is_slept_through() {
        let dormitory = Arc::new(Dormitory::default());
        let (tasks, taken) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let closing = Arc::new(AtomicBool::new(false));
        let workers: Vec<_> = (0..4)
            .map(|_| {
                let (dormitory, tasks) = (Arc::clone(&dormitory), Arc::clone(&tasks));
                let (taken, closing) = (Arc::clone(&taken), Arc::clone(&closing));
                thread::spawn(move || {
                    while !closing.load(Ordering::Acquire) {
                        let look = || {
                            let closing = closing.load(Ordering::Acquire);
                            if closing { Ok(false) } else { take(&tasks).map(|()| true).ok_or(None) }
                        };
                        if let Rested::Found { what: took, owes_a_wake } = dormitory.sleep_unless(look) {
                            if owes_a_wake {
                                dormitory.wake_one();
                            }
                            taken.fetch_add(usize::from(took), Ordering::AcqRel);
                        }
                    }
                })
            })
            .collect();
        let mut pushed = 0;
        for round in 0..20_000 {
            for _ in 0..round % 3 + 1 {
                tasks.fetch_add(1, Ordering::AcqRel);
                dormitory.wake_one();
                pushed += 1;
            }
            // Every other round lets everybody go to bed first.
            while round % 2 == 0 && taken.load(Ordering::Acquire) < pushed {
                thread::yield_now();
            }
        }
        while taken.load(Ordering::Acquire) < pushed {
            thread::yield_now();
        }
        closing.store(true, Ordering::Release);
        dormitory.wake_all();
        workers.into_iter().for_each(|worker| worker.join().unwrap());
        let beds = lock(&dormitory.beds);
        assert_eq!((beds.idle, dormitory.idle.load(Ordering::Acquire)), (0, 0));
    }
}
