//! A job as the workers see it: claims, the books, and how it ends.
//!
//! # Why nothing is stored after the end, and nothing is published before the stores
//!
//! Every chunk is *claimed* (phase `Preparing`), prepared, *confirmed* (phase `Storing`), performed and
//! *settled*. Claims are taken, confirmed and settled under the lock of the books, and so is the end:
//! - a claim is confirmed only while the job has not ended and is not stopping, and the job is ended
//!   over a worker's head (`wait_until`) only when no claim is `Storing`. So no store follows the end;
//! - `perform` returns after the fence, on the core that stored. `settle` then subtracts the chunk from
//!   `left` with `AcqRel`; whoever brings `left` to zero has therefore acquired every worker's
//!   subtraction, and publishes through `done` (release), which waiters read (acquire). So the stores
//!   of all workers happen before a waiter sees the end, and before the eventfd becomes readable.

use std::collections::BTreeMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use super::claim::Claim;
use super::work::{Work, WorkRegion};
use super::{Cause, Outcome, Outcomes, Progress, RangeReport, Report};
use crate::clear::Method;
use crate::error::JobError;
use crate::extent::Extent;
use crate::sys::CompletionFd;

/// How long a stopping job waits for workers that have not come back from a page fault.
const STALL_GRACE: Duration = Duration::from_millis(500);

/// Which jobs go first. Looked at again after every chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Lane {
    Foreground = 0,
    Background = 1,
}

/// Why a job stops before its bytes are done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum StopReason {
    Cancelled = 1,
    DeadlinePassed = 2,
    ServiceClosed = 3,
    /// A failure that ends the job: shortage while booting, a panic.
    Failed = 4,
}

impl StopReason {
    fn from_u8(value: u8) -> Option<Self> {
        [Self::Cancelled, Self::DeadlinePassed, Self::ServiceClosed, Self::Failed]
            .into_iter()
            .find(|reason| *reason as u8 == value)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Preparing,
    Storing,
}

#[derive(Debug, Default)]
pub(super) struct Books {
    pub(super) outcomes: Outcomes,
    pub(super) claims: Vec<(Extent, Phase)>,
    pub(super) ended: bool,
    pub(super) stopped_at: Option<Instant>,
    pub(super) first_failure: Option<(Extent, Cause)>,
    pub(super) local_bytes: u64,
    pub(super) remote_bytes: u64,
    pub(super) by_method: BTreeMap<Method, u64>,
}

/// How a job is to be run, apart from what it works on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms {
    pub(crate) lane: Lane,
    pub(crate) deadline: Option<Instant>,
    /// Whether shortage of pages ends the job (boot) or only its range (teardown).
    pub(crate) stop_on_shortage: bool,
}

/// A job as the workers see it. See the module's text for the protocol.
#[derive(Debug)]
pub(crate) struct JobCore {
    regions: Vec<WorkRegion>,
    terms: Terms,
    started: Instant,
    total: u64,
    /// Bytes that nobody has finished with.
    left: AtomicU64,
    pub(super) progress: AtomicU64,
    stop: AtomicU8,
    pub(super) books: Mutex<Books>,
    changed: Condvar,
    /// Given up at the end, so that a handle to a finished job keeps no guest memory alive.
    work: Mutex<Option<Arc<dyn Work>>>,
    /// How it ended: from here on no worker touches the memory.
    done: OnceLock<Result<Arc<Report>, JobError>>,
    /// The thread that lets go of the memory.
    releaser: OnceLock<ThreadId>,
    /// The memory has been let go as well: waiters return.
    released: AtomicBool,
    completion: CompletionFd,
}

impl JobCore {
    /// A job over `regions`; one without bytes is over at once.
    pub(crate) fn new(work: Arc<dyn Work>, regions: Vec<WorkRegion>, terms: Terms) -> io::Result<Arc<Self>> {
        let total = regions.iter().fold(0u64, |sum, region| sum.saturating_add(region.len));
        let core = Arc::new(Self {
            regions,
            terms,
            started: Instant::now(),
            total,
            left: AtomicU64::new(total),
            progress: AtomicU64::new(0),
            stop: AtomicU8::new(0),
            books: Mutex::default(),
            changed: Condvar::new(),
            work: Mutex::new(Some(work)),
            done: OnceLock::new(),
            releaser: OnceLock::new(),
            released: AtomicBool::new(false),
            completion: CompletionFd::new()?,
        });
        if total == 0 {
            core.end(lock(&core.books));
        }
        Ok(core)
    }

    pub(crate) fn regions(&self) -> &[WorkRegion] {
        &self.regions
    }

    pub(crate) fn lane(&self) -> Lane {
        self.terms.lane
    }

    pub(crate) fn completion(&self) -> &CompletionFd {
        &self.completion
    }

    pub(crate) fn progress(&self) -> Progress {
        Progress { done_bytes: self.progress.load(Ordering::Relaxed), total_bytes: self.total }
    }

    /// How it ended, once the memory is let go as well; that memory's destructor is told before.
    pub(crate) fn result(&self) -> Option<&Result<Arc<Report>, JobError>> {
        let releases = || self.releaser.get() == Some(&thread::current().id());
        self.done.get().filter(|_| self.released.load(Ordering::Acquire) || releases())
    }

    /// Asks the job to stop. The first reason counts; after the end it changes nothing.
    pub(crate) fn stop(&self, reason: StopReason) {
        if self.stop.compare_exchange(0, reason as u8, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            lock(&self.books).stopped_at = Some(Instant::now());
            self.changed.notify_all();
        }
    }

    pub(super) fn stop_reason(&self) -> Option<StopReason> {
        StopReason::from_u8(self.stop.load(Ordering::Acquire))
    }

    /// Claims a chunk for the calling worker; `None` if the job is over or stopping, and then the chunk is given up.
    pub(crate) fn claim(self: &Arc<Self>, extent: Extent) -> Option<Claim> {
        if self.terms.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            self.stop(StopReason::DeadlinePassed);
        }
        let work = lock(&self.work).clone();
        let mut books = lock(&self.books);
        match work {
            Some(work) if !books.ended && self.stop_reason().is_none() => {
                books.claims.push((extent, Phase::Preparing));
                drop(books);
                Some(Claim::new(Arc::clone(self), work, extent))
            }
            _ => {
                drop(books);
                // Before anybody can learn of the end, so that no finished job keeps guest memory alive.
                drop(work);
                self.give_up(extent.len);
                None
            }
        }
    }

    /// Whether a failure with this cause ends the whole job.
    pub(crate) fn ends_on(&self, cause: &Cause) -> bool {
        match cause {
            Cause::Panicked => true,
            Cause::Shortage { .. } => self.terms.stop_on_shortage,
            _ => false,
        }
    }

    /// Whether an extent of this job is still worth splitting.
    pub(crate) fn is_running(&self) -> bool {
        self.stop_reason().is_none() && self.done.get().is_none()
    }

    /// Bytes that will not be worked on any more.
    pub(crate) fn give_up(&self, bytes: u64) {
        if bytes > 0 && self.left.fetch_sub(bytes, Ordering::AcqRel) == bytes {
            self.end(lock(&self.books));
        }
    }

    /// Waits for the end and the memory's being let go, until `until` at the latest. Ends a stopping job over
    /// the heads of workers that are stuck.
    pub(crate) fn wait_until(&self, until: Option<Instant>) -> Option<Result<Arc<Report>, JobError>> {
        loop {
            let mut books = lock(&self.books);
            if let Some(result) = self.result() {
                return Some(result.clone());
            }
            let now = Instant::now();
            if until.is_some_and(|until| now >= until) {
                return None;
            }
            let mut wake = until;
            let mut wake_by = |at: Instant| wake = Some(wake.map_or(at, |earlier| earlier.min(at)));
            match (books.stopped_at, self.terms.deadline) {
                // Somebody is at the end of it already.
                _ if books.ended => {}
                (Some(stopped), _) if now >= stopped + STALL_GRACE => {
                    if books.claims.iter().all(|(_, phase)| *phase == Phase::Preparing) {
                        self.end(books);
                        continue;
                    }
                    // A store is under way: it ends within a chunk.
                    wake_by(now + STALL_GRACE / 10);
                }
                (Some(stopped), _) => wake_by(stopped + STALL_GRACE),
                (None, Some(deadline)) if now >= deadline => {
                    drop(books);
                    self.stop(StopReason::DeadlinePassed);
                    continue;
                }
                (None, Some(deadline)) => wake_by(deadline),
                (None, None) => {}
            }
            books = match wake {
                Some(at) => {
                    let timeout = at.saturating_duration_since(now);
                    self.changed.wait_timeout(books, timeout).unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.changed.wait(books).unwrap_or_else(PoisonError::into_inner),
            };
            drop(books);
        }
    }

    /// The end, once: by whoever brought `left` to zero, or over the head of stuck workers.
    fn end(&self, mut books: MutexGuard<'_, Books>) {
        if std::mem::replace(&mut books.ended, true) {
            return;
        }
        let in_flight: u64 = books.claims.iter().map(|(extent, _)| extent.len).sum();
        for (extent, _) in std::mem::take(&mut books.claims) {
            books.outcomes.record(extent, Outcome::InFlight);
        }
        let ended = std::mem::replace(&mut *books, Books { ended: true, ..Books::default() });
        drop(books);
        // Of a fragmented memory the report is long: nobody waits for the books meanwhile.
        let Books { outcomes, first_failure, .. } = &ended;
        let report = Arc::new(self.report(&ended));

        let work = lock(&self.work).take();
        if let Some(work) = &work {
            work.finish(&self.regions, outcomes);
        }
        let result = match (first_failure, self.stop_reason()) {
            _ if report.is_all_zero() => Ok(report),
            _ if in_flight > 0 => Err(JobError::Stalled { in_flight_bytes: in_flight, report }),
            (Some((extent, cause)), _) => {
                let (start, cause) = (self.address(extent), cause.clone());
                Err(JobError::Failed { start, len: extent.len, cause, report })
            }
            (None, Some(StopReason::DeadlinePassed)) => Err(JobError::DeadlinePassed { report }),
            (None, Some(StopReason::ServiceClosed)) => Err(JobError::ServiceClosed { report }),
            (None, _) => Err(JobError::Cancelled { report }),
        };
        tracing::debug!(bytes = self.total, all_zero = result.is_ok(), "job over");
        // `end` runs once, so the cell is empty.
        let _ = self.done.set(result);
        // The memory may own anything, this job's last handle or the service included, and its destructor may
        // wait for the job or panic: it goes after `done` and before `wait` returns to anybody else.
        let _ = self.releaser.set(thread::current().id());
        if catch_unwind(AssertUnwindSafe(|| drop(work))).is_err() {
            tracing::error!("the destructor of a job's memory panicked");
        }
        self.released.store(true, Ordering::Release);
        // Whoever looked at `released` under the lock and found nothing is waiting by now.
        drop(lock(&self.books));
        self.changed.notify_all();
        self.completion.signal();
    }

    fn address(&self, extent: &Extent) -> u64 {
        self.regions.get(extent.region as usize).map_or(0, |region| region.address) + extent.start
    }

    fn report(&self, books: &Books) -> Report {
        let mut report = Report {
            total_bytes: self.total,
            node_local_bytes: books.local_bytes,
            node_remote_bytes: books.remote_bytes,
            method: books.by_method.iter().max_by_key(|(_, bytes)| **bytes).map(|(method, _)| *method),
            duration: self.started.elapsed(),
            ..Report::default()
        };
        for (index, region) in self.regions.iter().enumerate() {
            for (extent, outcome) in books.outcomes.of_region(index as u32, region.len) {
                match outcome {
                    Outcome::Erased => report.erased_bytes += extent.len,
                    Outcome::ReadsZero => report.reads_zero_bytes += extent.len,
                    _ => {}
                }
                report.add(RangeReport { start: self.address(&extent), len: extent.len, outcome });
            }
        }
        report
    }
}

/// What a mutex guards, also after a panic elsewhere: every change under these locks is whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
