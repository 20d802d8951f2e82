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
