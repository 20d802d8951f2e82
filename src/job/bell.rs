//! How the end of a job reaches its descriptor, which is made when it is first asked for. The same file runs under
//! `loom` (`tests/loom`).
//!
//! # Why the descriptor of a job that is over is readable
//!
//! One lock: a descriptor is either hung up before the ringing, which finds it then, or after it, and then whoever
//! hangs it up is told to ring it. It is kept until the ringing even if the last handle goes before, since somebody
//! may have a duplicate of it; the memory may own that handle, too, and goes right before the ringing. It is not
//! kept any longer: what is still queued of a job that is over keeps no descriptor open.

use std::sync::Arc;

use crate::sync::{Mutex, lock};

#[derive(Debug)]
pub(super) struct Bell<F>(Mutex<State<F>>);

#[derive(Debug)]
enum State<F> {
    /// Nobody has asked for it yet.
    Bare,
    Hung(Arc<F>),
    Rung,
}

impl<F> Bell<F> {
    pub(super) fn new() -> Self {
        Self(Mutex::new(State::Bare))
    }

    /// Has this descriptor rung at the end (the first one stays). `false`: that was before, so ring it now.
    pub(super) fn hang(&self, descriptor: &Arc<F>) -> bool {
        let mut state = lock(&self.0);
        if let State::Bare = *state {
            *state = State::Hung(Arc::clone(descriptor));
        }
        matches!(*state, State::Hung(_))
    }

    /// The end has come: what is to be rung.
    pub(super) fn ring(&self) -> Option<Arc<F>> {
        match std::mem::replace(&mut *lock(&self.0), State::Rung) {
            State::Hung(descriptor) => Some(descriptor),
            State::Bare | State::Rung => None,
        }
    }
}
