//! Which job of a burst its submitter does itself. The same file runs under `loom` (`tests/loom`).
//!
//! # Why there is one at a time, and again one
//!
//! Who changes `taken` to true has the token, and only a job that has it gives it back, once: whoever changes its
//! `has` to false. `taken` stays true until after that, so nobody else's token is ever given back. `has` may be
//! looked at before it is set: such a look gives nothing back, and the drop does.

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

    /// Whether nobody has it, at this moment.
    pub(super) fn is_free(&self) -> bool {
        !self.unseen.taken.load(Ordering::Relaxed)
    }

    /// Takes the token for this job; `false` if another one has it.
    pub(super) fn take(&self) -> bool {
        let free = change(&self.unseen.taken, false, true);
        if free {
            self.has.store(true, Ordering::Release);
        }
        free
    }

    /// Somebody has asked for the end, and got it; or nobody can any more.
    pub(super) fn give_back(&self) {
        if change(&self.has, true, false) {
            self.unseen.taken.store(false, Ordering::Release);
        }
    }
}

/// Whether this is who changed the flag from `from` to `to`.
fn change(flag: &AtomicBool, from: bool, to: bool) -> bool {
    flag.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
}

impl Drop for Token {
    fn drop(&mut self) {
        self.give_back();
    }
}
