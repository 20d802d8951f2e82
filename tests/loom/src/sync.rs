//! What the library takes from its own `sync`, made of loom's primitives.
//!
//! Of std's promises no more is kept than std makes: a clock orders no memory, and neither does a notification
//! beyond what the mutex does (see [`Condvar`]).

use std::cell::Cell;
use std::collections::VecDeque;
use std::ops::{Add, Deref, DerefMut};
use std::sync::LockResult;
use std::time::Duration;

use loom::sync::atomic::AtomicU64;
use loom::thread::{self, Thread};

pub(crate) use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
pub(crate) use loom::thread::ThreadId;
pub(crate) use std::sync::PoisonError;

pub(crate) fn current_thread() -> Thread {
    thread::current()
}

loom::lazy_static! {
    /// Nanoseconds. Only waiting makes it go on.
    static ref CLOCK: AtomicU64 = AtomicU64::new(0);
}

loom::thread_local! {
    /// Whether the thread has waited for a time.
    static WAITED: Cell<bool> = Cell::new(false);
}

/// Called by each model before it has threads: what is made later would order their memory.
pub(crate) fn begin() {
    CLOCK.load(Ordering::Relaxed);
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Instant(u64);

impl Instant {
    pub(crate) fn now() -> Self {
        Self(CLOCK.load(Ordering::Relaxed))
    }

    pub(crate) fn saturating_duration_since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    fn add(self, time: Duration) -> Self {
        Self(self.0 + time.as_nanos() as u64)
    }
}

#[derive(Debug, Default)]
pub(crate) struct Mutex<T> {
    inner: loom::sync::Mutex<T>,
}

/// Knows its mutex, which loom's does not tell.
#[derive(Debug)]
pub(crate) struct MutexGuard<'m, T> {
    mutex: &'m Mutex<T>,
    inner: loom::sync::MutexGuard<'m, T>,
}

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { inner: loom::sync::Mutex::new(value) }
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    MutexGuard { mutex, inner: mutex.inner.lock().unwrap_or_else(PoisonError::into_inner) }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

/// Who waits at a condition variable.
#[derive(Debug)]
struct Waiter {
    thread: Thread,
    /// It comes back by itself, and looks whether it is still in the list.
    timed: bool,
}

/// A condition variable that can time out, as loom's cannot.
///
/// Who waits for a time goes on and finds either that somebody took it from the list, or that its time is over:
/// which of them comes first is loom's choice, and it may be the notification that others need. From the second
/// time on it lets others go first, so that one who waits again and again does not keep all others from going on.
///
/// The list is under a mutex, which orders no more than the caller's mutex does: who waits enters the list while
/// it holds that one, and who notifies does so right after it has held it.
#[derive(Debug, Default)]
pub(crate) struct Condvar {
    waiters: loom::sync::Mutex<VecDeque<Waiter>>,
}

impl Condvar {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    fn waiters(&self) -> loom::sync::MutexGuard<'_, VecDeque<Waiter>> {
        self.waiters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn wait<'m, T>(&self, guard: MutexGuard<'m, T>) -> LockResult<MutexGuard<'m, T>> {
        let mutex = guard.mutex;
        self.waiters().push_back(Waiter { thread: thread::current(), timed: false });
        // Nothing comes between these two: neither is a point at which loom switches.
        drop(guard);
        thread::park();
        Ok(lock(mutex))
    }

    pub(crate) fn wait_timeout<'m, T>(
        &self,
        guard: MutexGuard<'m, T>,
        time: Duration,
    ) -> LockResult<(MutexGuard<'m, T>, ())> {
        let (mutex, me) = (guard.mutex, thread::current().id());
        let until = Instant::now() + time;
        self.waiters().push_back(Waiter { thread: thread::current(), timed: true });
        drop(guard);
        if WAITED.with(|waited| waited.replace(true)) {
            thread::yield_now();
        }
        let mut waiters = self.waiters();
        let own = waiters.iter().position(|waiter| waiter.thread.id() == me);
        if let Some(own) = own {
            waiters.remove(own);
        }
        drop(waiters);
        if own.is_some() {
            CLOCK.fetch_max(until.0, Ordering::Relaxed);
        }
        Ok((lock(mutex), ()))
    }

    pub(crate) fn notify_one(&self) {
        let next = self.waiters().pop_front();
        next.into_iter().for_each(Waiter::wake);
    }

    pub(crate) fn notify_all(&self) {
        let all = std::mem::take(&mut *self.waiters());
        all.into_iter().for_each(Waiter::wake);
    }
}

impl Waiter {
    fn wake(self) {
        if !self.timed {
            self.thread.unpark();
        }
    }
}

/// Published by a release, read by an acquire.
#[derive(Debug)]
pub(crate) struct OnceLock<T> {
    is_set: AtomicBool,
    /// Loom need not know: it is there before the flag.
    value: std::sync::OnceLock<T>,
}

impl<T> OnceLock<T> {
    pub(crate) fn new() -> Self {
        Self { is_set: AtomicBool::new(false), value: std::sync::OnceLock::new() }
    }

    pub(crate) fn get(&self) -> Option<&T> {
        if self.is_set.load(Ordering::Acquire) { self.value.get() } else { None }
    }

    pub(crate) fn set(&self, value: T) -> Result<(), T> {
        self.value.set(value)?;
        self.is_set.store(true, Ordering::Release);
        Ok(())
    }
}
