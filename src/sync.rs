//! What the protocols are made of that `tests/loom` explores: std's types here, loom's in its place there.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
pub(crate) use std::thread::{ThreadId, current as current_thread};
pub(crate) use std::time::Instant;

/// What a mutex guards, also after a panic elsewhere: every change under these locks is whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
