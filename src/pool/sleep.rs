//! Parking idle workers without losing a task.
//!
//! # Why no task is slept through
//!
//! A worker goes to sleep in the order: count itself as a sleeper, (fence), read the epoch, look at the
//! queues once more, wait while the epoch is what it read. Whoever adds a task: push, (fence), read the
//! number of sleepers, and if there is one, raise the epoch under the lock and notify.
//! The two fences are sequentially consistent, so one of them comes first. If the adder's does, the
//! worker's look at the queues sees the task. If the worker's does, the adder sees a sleeper and raises
//! the epoch: either before the worker read it, and then the raise (under the same lock) and the push
//! before it are visible to the worker's look; or after, and then the worker does not wait on the old epoch.

use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// The idle workers of one node.
#[derive(Debug, Default)]
pub(crate) struct Dormitory {
    sleepers: AtomicUsize,
    epoch: Mutex<u64>,
    bell: Condvar,
}

impl Dormitory {
    /// Wakes one sleeper, if there is one. Called after a task was pushed.
    pub(crate) fn wake_one(&self) -> bool {
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::Relaxed) == 0 {
            return false;
        }
        *self.lock() += 1;
        self.bell.notify_one();
        true
    }

    /// Wakes everybody, to see that the pool closes.
    pub(crate) fn wake_all(&self) {
        *self.lock() += 1;
        self.bell.notify_all();
    }

    /// Sleeps until woken, unless `look` finds something.
    pub(crate) fn sleep_unless<T>(&self, look: impl FnOnce() -> Option<T>) -> Option<T> {
        self.sleepers.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let seen = *self.lock();
        let found = look();
        if found.is_none() {
            let mut epoch = self.lock();
            while *epoch == seen {
                epoch = self.bell.wait(epoch).unwrap_or_else(PoisonError::into_inner);
            }
        }
        self.sleepers.fetch_sub(1, Ordering::Relaxed);
        found
    }

    fn lock(&self) -> MutexGuard<'_, u64> {
        self.epoch.lock().unwrap_or_else(PoisonError::into_inner)
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
        assert_eq!(dormitory.sleep_unless(|| Some(7)), Some(7), "who finds something does not sleep");
        assert!(!dormitory.wake_one(), "nor is counted any more");
        dormitory.wake_all();
    }

    #[test]
    fn a_wake_between_look_and_sleep_is_not_slept_through() {
        let dormitory = Dormitory::default();
        let found = dormitory.sleep_unless(|| {
            // Whoever pushes now finds a sleeper, and this thread is about to wait.
            assert!(dormitory.wake_one());
            None::<()>
        });
        assert_eq!(found, None);
        dormitory.sleep_unless(|| {
            dormitory.wake_all();
            None::<()>
        });
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
                            if closing { Some(false) } else { take(&tasks).map(|()| true) }
                        };
                        if dormitory.sleep_unless(look) == Some(true) {
                            taken.fetch_add(1, Ordering::AcqRel);
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
        assert_eq!(dormitory.sleepers.load(Ordering::Acquire), 0);
    }
}
