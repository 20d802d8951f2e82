//! The course of a job: claims, the end, and those who wait for it. Generic over what is written down meanwhile
//! and over what comes of it, so that the same file runs under `loom` (`tests/loom`).
//!
//! # Why nothing is stored after the end, and nothing is published before the stores
//!
//! Claims are taken, confirmed and closed under the lock of the books, and so is the end (see `tally` for the
//! rules):
//! - a worker stores only between a granted `confirm` and `close`, and while one does the job is not ended, not
//!   even over a worker's head. So no store follows the end;
//! - a worker calls `close` after its fence, on the core that stored; `close` then takes the lock. Whoever ends
//!   the job takes the same lock later, so it sees every worker's stores, and publishes through `done` and
//!   `released` (release), which waiters read (acquire). So the stores of all workers happen before a waiter
//!   sees the end, and before the eventfd becomes readable.
//!
//! # Why the end comes once, and nobody waits for ever
//!
//! - The tally ends once, under the lock; who ended it runs `end` to its last line, and nobody else does.
//! - Each `close` and each `stop` looks whether the end is due, under the lock it changed the tally by. So the
//!   end is never due without somebody who is about to see to it, except where a worker does not come back: then
//!   whoever waits, and the warden where there is one, ends the job by `tend`.
//! - Who waits looks at `released`, and at what there is to tend to, under one lock that it lets go of by waiting.
//!   `end` stores `released`, takes the lock, and notifies if anybody is counted as waiting then: either its lock
//!   comes first, and the look finds `released`, or the look does, and the notification finds somebody who
//!   waits. It is the same with `stop`, which notifies so that whoever waits learns of a time to `tend` at.

use std::time::Duration;

use super::tally::{Held, Tally};
use crate::extent::Extent;
use crate::sync::{
    AtomicBool, Condvar, Instant, Mutex, MutexGuard, OnceLock, Ordering, PoisonError, ThreadId,
    current_thread, lock,
};

/// How long a stopping job waits for workers that have not come back from a page fault.
const STALL_GRACE: Duration = Duration::from_millis(500);

/// Why a job stops before its bytes are done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopReason {
    Cancelled,
    DeadlinePassed,
    ServiceClosed,
    /// A failure that ends the job: shortage while booting, a panic.
    Failed,
}

/// The job whose course it is: `N` is written down meanwhile, `R` comes of it.
pub(super) trait Subject<N, R> {
    /// Draws up the result, and tells who must know before those who wait. `held`: chunks in the hands of workers
    /// that did not come back.
    fn conclude(&self, notes: &mut N, stopped: Option<StopReason>, held: &[Held]) -> R;

    /// Lets go of everything the job held. The result is there, and waiters do not return before this does.
    fn let_go(&self, notes: N);

    /// Makes the end known to who does not wait in `wait_until`.
    fn tell(&self, held: &[Held]);

    /// Has `tend` called at that time or later, if there is anybody to do that.
    fn be_looked_at(&self, when: Instant);
}

#[derive(Debug)]
struct Books<N> {
    tally: Tally,
    notes: N,
    stopped: Option<(StopReason, Instant)>,
    /// Threads that sleep in `wait_until`: where there are none, the end spares itself a system call.
    waiting: usize,
}

/// What there is to do for a job whose workers do not see to it.
enum Look {
    Nothing,
    Again(Instant),
    DeadlinePassed,
    EndOverHeads,
}

/// See the module's text for the protocol.
#[derive(Debug)]
pub(super) struct Course<N, R> {
    deadline: Option<Instant>,
    /// The job is stopping or over: no extent of it is worth splitting.
    idle: AtomicBool,
    books: Mutex<Books<N>>,
    changed: Condvar,
    /// How it ended: from here on no worker touches the memory.
    done: OnceLock<R>,
    /// The thread that lets go of the memory.
    releaser: OnceLock<ThreadId>,
    /// The memory has been let go as well: waiters return.
    released: AtomicBool,
}

impl<N: Default, R: Clone> Course<N, R> {
    /// The course of a job over `total` bytes.
    pub(super) fn new(total: u64, deadline: Option<Instant>, notes: N) -> Self {
        Self {
            deadline,
            idle: AtomicBool::new(false),
            books: Mutex::new(Books { tally: Tally::new(total), notes, stopped: None, waiting: 0 }),
            changed: Condvar::new(),
            done: OnceLock::new(),
            releaser: OnceLock::new(),
            released: AtomicBool::new(false),
        }
    }

    /// Ends a job without bytes; has others looked at when their time is over.
    pub(super) fn begin(&self, job: &impl Subject<N, R>) {
        if !self.end_if_due(job, lock(&self.books))
            && let Some(deadline) = self.deadline
        {
            job.be_looked_at(deadline);
        }
    }

    /// How it ended, once the memory is let go as well; that memory's destructor is told before.
    pub(super) fn result(&self) -> Option<&R> {
        let releases = || self.releaser.get() == Some(&current_thread().id());
        self.done.get().filter(|_| self.released.load(Ordering::Acquire) || releases())
    }

    /// Whether an extent of this job is still worth splitting.
    pub(super) fn is_running(&self) -> bool {
        !self.idle.load(Ordering::Acquire)
    }

    /// Asks the job to stop. The first reason counts; after the end it changes nothing. Ends it at once where
    /// no worker holds any of it.
    pub(super) fn stop(&self, job: &impl Subject<N, R>, reason: StopReason) {
        self.stop_under(job, lock(&self.books), reason);
    }

    fn stop_under(&self, job: &impl Subject<N, R>, mut books: MutexGuard<'_, Books<N>>, reason: StopReason) {
        if books.tally.has_ended() || books.stopped.is_some() {
            return;
        }
        let now = Instant::now();
        books.stopped = Some((reason, now));
        books.tally.stop();
        self.idle.store(true, Ordering::Release);
        if !self.end_if_due(job, books) {
            job.be_looked_at(now + STALL_GRACE);
            self.changed.notify_all();
        }
    }

    /// Claims a chunk for a worker, and what `take` takes with it; `None` if the job is over or stopping. (And if the
    /// worker holds one, which no worker that claims does: see `tally`.)
    pub(super) fn claim<T>(
        &self,
        job: &impl Subject<N, R>,
        extent: Extent,
        worker: u32,
        take: impl FnOnce(&N) -> Option<T>,
    ) -> Option<T> {
        let mut books = lock(&self.books);
        if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            self.stop_under(job, books, StopReason::DeadlinePassed);
            return None;
        }
        let taken = take(&books.notes)?;
        books.tally.claim(extent, worker).then_some(taken)
    }

    /// May the worker store? Asked after preparing, which may have taken long.
    pub(super) fn confirm(&self, worker: u32) -> bool {
        lock(&self.books).tally.confirm(worker)
    }

    /// The worker lets go of what it holds; `finished`: the bytes are dealt with. Calls `write` if the job still
    /// counted on it.
    pub(super) fn close(
        &self,
        job: &impl Subject<N, R>,
        worker: u32,
        finished: bool,
        write: impl FnOnce(&mut N),
    ) {
        let mut books = lock(&self.books);
        if books.tally.close(worker, finished) {
            write(&mut books.notes);
            self.end_if_due(job, books);
        }
    }

    /// Does what is due by now, a passed deadline or an end over the heads of stuck workers; says when there
    /// is something to look at again.
    pub(super) fn tend(&self, job: &impl Subject<N, R>, now: Instant) -> Option<Instant> {
        let books = lock(&self.books);
        match self.look(&books, now) {
            Look::Nothing => None,
            Look::Again(when) => Some(when),
            Look::EndOverHeads => {
                self.end(job, books);
                None
            }
            Look::DeadlinePassed => {
                self.stop_under(job, books, StopReason::DeadlinePassed);
                Some(now + STALL_GRACE)
            }
        }
    }

    fn look(&self, books: &Books<N>, now: Instant) -> Look {
        if books.tally.has_ended() {
            return Look::Nothing;
        }
        match (books.stopped, self.deadline) {
            (Some((_, stopped)), _) if now < stopped + STALL_GRACE => Look::Again(stopped + STALL_GRACE),
            (Some(_), _) if books.tally.may_end_over_heads() => Look::EndOverHeads,
            // A store is under way: it ends within a chunk.
            (Some(_), _) => Look::Again(now + STALL_GRACE / 10),
            (None, Some(deadline)) if now >= deadline => Look::DeadlinePassed,
            (None, Some(deadline)) => Look::Again(deadline),
            (None, None) => Look::Nothing,
        }
    }

    /// Waits for the end and the memory's being let go, until `until` at the latest.
    pub(super) fn wait_until(&self, job: &impl Subject<N, R>, until: Option<Instant>) -> Option<R> {
        loop {
            if let Some(result) = self.result() {
                return Some(result.clone());
            }
            let now = Instant::now();
            // One lock from the look to the wait, so that no end and no stop comes between them unheard.
            let mut books = lock(&self.books);
            if self.result().is_some() {
                continue;
            }
            let next = match self.look(&books, now) {
                Look::Nothing => None,
                Look::Again(when) => Some(when),
                Look::EndOverHeads | Look::DeadlinePassed => {
                    drop(books);
                    // The warden does it as well, where there is one.
                    self.tend(job, now);
                    continue;
                }
            };
            // Whoever only asks now and then has seen to what was due, too.
            if until.is_some_and(|until| now >= until) {
                return None;
            }
            books.waiting += 1;
            books = match [next, until].into_iter().flatten().min() {
                Some(at) => {
                    let timeout = at.saturating_duration_since(now);
                    self.changed.wait_timeout(books, timeout).unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.changed.wait(books).unwrap_or_else(PoisonError::into_inner),
            };
            books.waiting -= 1;
        }
    }

    /// Ends the job if it is due; says whether it is over.
    fn end_if_due(&self, job: &impl Subject<N, R>, books: MutexGuard<'_, Books<N>>) -> bool {
        if books.tally.is_due() {
            self.end(job, books);
            return true;
        }
        books.tally.has_ended()
    }

    /// The end, once: by whoever closed the last claim, or over the heads of stuck workers.
    fn end(&self, job: &impl Subject<N, R>, mut books: MutexGuard<'_, Books<N>>) {
        let Some(held) = books.tally.end() else { return };
        self.idle.store(true, Ordering::Release);
        let (mut notes, stopped) = (std::mem::take(&mut books.notes), books.stopped);
        // Of a fragmented memory the report is long: nobody waits for the books meanwhile.
        drop(books);
        let result = job.conclude(&mut notes, stopped.map(|(reason, _)| reason), &held);
        // `end` runs once, so the cell is empty.
        let _ = self.done.set(result);
        // The memory may own anything, this job's last handle or the service included, and its destructor may
        // wait for the job: it goes after `done` and before `wait` returns to anybody else.
        let _ = self.releaser.set(current_thread().id());
        job.let_go(notes);
        self.released.store(true, Ordering::Release);
        // Whoever looked at `released` under the lock and found nothing is waiting by now.
        let waiting = lock(&self.books).waiting;
        if waiting > 0 {
            self.changed.notify_all();
        }
        job.tell(&held);
    }
}
