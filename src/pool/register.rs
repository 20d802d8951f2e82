//! The jobs that may not be over yet, and the moment from which on there are no new ones. The same file runs under
//! `loom` (`tests/loom`).
//!
//! # Why every job ends when the pool closes
//!
//! A job is entered before its first task is queued, and closing takes the same lock. So a job comes too late and
//! is refused, or `close` returns it: then it is stopped, and nothing of it can be claimed from there on.
//! - Where no worker holds any of it, the stop itself ends it, whatever lies in queues or is put there later.
//! - Else each of those workers ends it by its last `close`; a worker that does not come back is overridden by
//!   who waits (see `job::course`), for which the pool waits for each job with a time limit.
//!
//! # Why every worker leaves
//!
//! The flag is set before everybody is woken, under each dormitory's lock. A worker that counts itself idle
//! before that is woken, and one that does so later has the flag before its eyes when it looks once more, since it
//! took the same lock. Nobody has to wake the others on leaving: the last one leaves as the first did.
//! What is left in its deque it queues; once the workers are joined, or given up, the queues are emptied. A task
//! that comes later than that keeps a job's books, not its memory: the end took that away.

use std::sync::{Arc, Weak};

use crate::sync::{AtomicBool, Mutex, Ordering, lock};

#[derive(Debug)]
pub(crate) struct Register<J> {
    known: Mutex<Known<J>>,
    closed: AtomicBool,
}

#[derive(Debug)]
struct Known<J> {
    jobs: Vec<Weak<J>>,
    /// How many there may be before those that are gone are struck out.
    tidy_at: usize,
}

impl<J> Default for Register<J> {
    fn default() -> Self {
        Self { known: Mutex::new(Known { jobs: Vec::new(), tidy_at: 0 }), closed: AtomicBool::new(false) }
    }
}

impl<J> Register<J> {
    /// Whether it is closed. Not a promise that `enter` will succeed.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Enters a job; `false` if it is closed.
    pub(crate) fn enter(&self, job: &Arc<J>) -> bool {
        let mut known = lock(&self.known);
        if self.is_closed() {
            return false;
        }
        if known.jobs.len() >= known.tidy_at {
            known.jobs.retain(|job| job.strong_count() > 0);
            known.tidy_at = 2 * known.jobs.len() + 16;
        }
        known.jobs.push(Arc::downgrade(job));
        true
    }

    /// Closes it: the jobs that were entered and are not gone. `None` if it was closed before.
    pub(crate) fn close(&self) -> Option<Vec<Arc<J>>> {
        let known = lock(&self.known);
        if self.is_closed() {
            return None;
        }
        self.closed.store(true, Ordering::Release);
        Some(known.jobs.iter().filter_map(Weak::upgrade).collect())
    }
}
