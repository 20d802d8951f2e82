//! Which job of a burst its submitter does itself. The same file runs under `loom` (`tests/loom`).
//!
//! # Why there is one at a time, and again one
//!
//! Who swaps `taken` from false to true has the token, and only a job that has it gives it back, once: by the
//! swap of its own `has`. `taken` stays true until after that swap, so nobody else's token is ever given back.
//! `has` may be looked at while it is still being set: such a look gives nothing back, and the drop does.

use std::sync::Arc;

use crate::sync::{AtomicBool, Ordering};

/// Told to each job of a service: one of them was done by the thread that submitted it, and nobody has asked for
/// its end yet. More that come now are a burst.
#[derive(Debug, Clone, Default)]
pub(crate) struct Unseen {
    taken: Arc<AtomicBool>,
}

/// A job's hold on the token, given back when it is dropped at the latest.
#[derive(Debug)]
pub(super) struct Token {
    unseen: Unseen,
    has: AtomicBool,
}

impl Token {
    pub(super) fn of(unseen: &Unseen) -> Self {
        Self { unseen: unseen.clone(), has: AtomicBool::new(false) }
    }

    /// Takes the token for this job; `false` if another one has it.
    pub(super) fn take(&self) -> bool {
        let free = !self.unseen.taken.swap(true, Ordering::AcqRel);
        self.has.store(free, Ordering::Release);
        free
    }

    /// Somebody has asked for the end, and got it; or nobody can any more.
    pub(super) fn give_back(&self) {
        if self.has.swap(false, Ordering::AcqRel) {
            self.unseen.taken.store(false, Ordering::Release);
        }
    }
}

impl Drop for Token {
    fn drop(&mut self) {
        self.give_back();
    }
}
