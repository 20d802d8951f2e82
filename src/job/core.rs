//! A job as the workers see it: claims, the books, and how it ends.
//!
//! # Why nothing is stored after the end, and nothing is published before the stores
//!
//! Claims are taken, confirmed and closed under the lock of the books, and so is the end (see `tally` for the
//! rules):
//! - a worker stores only between a granted `confirm` and `close`, and while one does the job is not ended, not
//!   even over a worker's head. So no store follows the end;
//! - `perform` returns after the fence, on the core that stored; `close` then takes the lock. Whoever ends the
//!   job takes the same lock later, so it sees every worker's stores, and publishes through `done` (release),
//!   which waiters read (acquire). So the stores of all workers happen before a waiter sees the end, and
//!   before the eventfd becomes readable.

use std::collections::BTreeMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use super::claim::Claim;
use super::report::{NodeProgress, WorkerShare};
use super::tally::Tally;
use super::work::{Hand, Work, WorkRegion};
use super::{Cause, Outcome, Outcomes, Progress, RangeReport, Report};
use crate::clear::Method;
use crate::error::JobError;
use crate::extent::Extent;
use crate::sys::CompletionFd;
use crate::topology::NodeId;

/// How long a stopping job waits for workers that have not come back from a page fault.
const STALL_GRACE: Duration = Duration::from_millis(500);

/// Which jobs go first. Looked at again after every chunk of every worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Priority {
    /// A guest waits for it: the default of [`Intent::Boot`](crate::Intent::Boot).
    Urgent = 0,
    /// The default of [`Intent::Teardown`](crate::Intent::Teardown).
    Normal = 1,
    /// When nothing else is to be done, and within the background rate: the default of
    /// [`Intent::Background`](crate::Intent::Background).
    Background = 2,
}

impl Priority {
    /// All of them, the first first.
    pub const ALL: [Priority; 3] = [Priority::Urgent, Priority::Normal, Priority::Background];
}

/// Why a job stops before its bytes are done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopReason {
    Cancelled,
    DeadlinePassed,
    ServiceClosed,
    /// A failure that ends the job: shortage while booting, a panic.
    Failed,
}

/// What a job has to tell so far.
#[derive(Debug, Default)]
pub(super) struct Notes {
    pub(super) outcomes: Outcomes,
    pub(super) first_failure: Option<(Extent, Cause)>,
    pub(super) local_bytes: u64,
    pub(super) remote_bytes: u64,
    pub(super) by_method: BTreeMap<Method, u64>,
    pub(super) shares: BTreeMap<u32, WorkerShare>,
    pub(super) steals: u64,
}

#[derive(Debug)]
pub(super) struct Books {
    pub(super) tally: Tally,
    pub(super) notes: Notes,
    stopped: Option<(StopReason, Instant)>,
    /// Given up at the end, so that a handle to a finished job keeps no guest memory alive.
    work: Option<Arc<dyn Work>>,
}

/// How a job is to be run, apart from what it works on.
#[derive(Debug, Clone)]
pub(crate) struct Terms {
    pub(crate) priority: Priority,
    pub(crate) deadline: Option<Instant>,
    /// Whether shortage of pages ends the job (boot) or only its range (teardown).
    pub(crate) stop_on_shortage: bool,
}

/// Where a job's memory and workers are, and who looks after it when nobody waits.
#[derive(Debug, Clone, Default)]
pub(crate) struct Surroundings {
    /// The nodes of the machine, ascending.
    pub(crate) nodes: Arc<[NodeId]>,
    pub(crate) warden: Option<Arc<dyn Warden>>,
    /// A job was done by the thread that submitted it, and nobody has asked for its end yet: more that come now
    /// are a burst.
    pub(crate) unseen: Arc<AtomicBool>,
}

/// Looks after jobs whose workers may be stuck.
pub(crate) trait Warden: Send + Sync + std::fmt::Debug {
    /// Calls [`JobCore::tend`] at that time or later.
    fn look_at(&self, job: Weak<JobCore>, when: Instant);

    /// These workers held something when their job ended without them.
    fn left_behind(&self, workers: &[u32]);
}

/// A job as the workers see it. See the module's text for the protocol.
#[derive(Debug)]
pub(crate) struct JobCore {
    own: Weak<JobCore>,
    regions: Vec<WorkRegion>,
    terms: Terms,
    surroundings: Surroundings,
    started: Instant,
    total: u64,
    pub(super) progress: AtomicU64,
    /// For each node of the surroundings; none where there is only one.
    by_node: Box<[AtomicU64]>,
    /// The job is stopping or over: no extent of it is worth splitting.
    idle: AtomicBool,
    /// This is the job that `Surroundings::unseen` is about.
    is_unseen: AtomicBool,
    pub(super) books: Mutex<Books>,
    changed: Condvar,
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
    pub(crate) fn new(
        work: Arc<dyn Work>,
        regions: Vec<WorkRegion>,
        terms: Terms,
        surroundings: Surroundings,
    ) -> io::Result<Arc<Self>> {
        let total = regions.iter().fold(0u64, |sum, region| sum.saturating_add(region.len));
        let completion = CompletionFd::new()?;
        let nodes = if surroundings.nodes.len() > 1 { surroundings.nodes.len() } else { 0 };
        let books =
            Books { tally: Tally::new(total), notes: Notes::default(), stopped: None, work: Some(work) };
        let core = Arc::new_cyclic(|own| Self {
            own: Weak::clone(own),
            regions,
            terms,
            surroundings,
            started: Instant::now(),
            total,
            progress: AtomicU64::new(0),
            by_node: (0..nodes).map(|_| AtomicU64::new(0)).collect(),
            idle: AtomicBool::new(false),
            is_unseen: AtomicBool::new(false),
            books: Mutex::new(books),
            changed: Condvar::new(),
            done: OnceLock::new(),
            releaser: OnceLock::new(),
            released: AtomicBool::new(false),
            completion,
        });
        if total == 0 {
            core.end_if_due(lock(&core.books));
        } else if let Some(deadline) = core.terms.deadline {
            core.be_looked_at(deadline);
        }
        Ok(core)
    }

    pub(crate) fn regions(&self) -> &[WorkRegion] {
        &self.regions
    }

    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    pub(crate) fn priority(&self) -> Priority {
        self.terms.priority
    }

    pub(crate) fn completion(&self) -> &CompletionFd {
        &self.completion
    }

    pub(crate) fn progress(&self) -> Progress {
        Progress { done_bytes: self.progress.load(Ordering::Relaxed), total_bytes: self.total }
    }

    pub(crate) fn progress_by_node(&self) -> Vec<NodeProgress> {
        let nodes = self.surroundings.nodes.iter();
        match self.by_node.as_ref() {
            [] => nodes
                .map(|node| NodeProgress { node: *node, done_bytes: self.progress().done_bytes })
                .collect(),
            each => nodes
                .zip(each)
                .map(|(node, done)| NodeProgress { node: *node, done_bytes: done.load(Ordering::Relaxed) })
                .collect(),
        }
    }

    /// Counts bytes that were dealt with, for the node they lie on.
    pub(super) fn advance(&self, bytes: u64, node: Option<NodeId>) {
        let index = node.and_then(|node| self.surroundings.nodes.binary_search(&node).ok());
        if let Some(of_node) = index.and_then(|index| self.by_node.get(index)) {
            of_node.fetch_add(bytes, Ordering::Relaxed);
        }
        self.progress.fetch_add(bytes, Ordering::Relaxed);
    }

    /// How it ended, once the memory is let go as well; that memory's destructor is told before.
    pub(crate) fn result(&self) -> Option<&Result<Arc<Report>, JobError>> {
        let releases = || self.releaser.get() == Some(&thread::current().id());
        self.done.get().filter(|_| self.released.load(Ordering::Acquire) || releases())
    }

    /// Takes the place of the one job that its submitter does itself; `false` if there is one whose end nobody
    /// has asked for.
    pub(crate) fn is_seen_at_once(&self) -> bool {
        let free = !self.surroundings.unseen.swap(true, Ordering::AcqRel);
        self.is_unseen.store(free, Ordering::Release);
        free
    }

    /// Somebody has asked for the end, and got it.
    fn be_seen(&self) {
        if self.is_unseen.swap(false, Ordering::AcqRel) {
            self.surroundings.unseen.store(false, Ordering::Release);
        }
    }

    /// Asks the job to stop. The first reason counts; after the end it changes nothing. Ends it at once where
    /// no worker holds any of it.
    pub(crate) fn stop(&self, reason: StopReason) {
        self.stop_under(lock(&self.books), reason);
    }

    fn stop_under(&self, mut books: MutexGuard<'_, Books>, reason: StopReason) {
        if books.tally.has_ended() || books.stopped.is_some() {
            return;
        }
        let now = Instant::now();
        books.stopped = Some((reason, now));
        books.tally.stop();
        self.idle.store(true, Ordering::Release);
        if !self.end_if_due(books) {
            self.be_looked_at(now + STALL_GRACE);
            self.changed.notify_all();
        }
    }

    fn be_looked_at(&self, when: Instant) {
        if let Some(warden) = &self.surroundings.warden {
            warden.look_at(Weak::clone(&self.own), when);
        }
    }

    /// Claims a chunk for a hand; `None` if the job is over or stopping: then nobody need care for it.
    pub(crate) fn claim(self: &Arc<Self>, extent: Extent, hand: Hand) -> Option<Claim> {
        let mut books = lock(&self.books);
        if self.terms.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            self.stop_under(books, StopReason::DeadlinePassed);
            return None;
        }
        let work = books.work.clone()?;
        if !books.tally.claim(extent, hand.worker) {
            return None;
        }
        drop(books);
        Some(Claim::new(Arc::clone(self), work, extent, hand))
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
        !self.idle.load(Ordering::Acquire)
    }

    /// Does what is due by now, a passed deadline or an end over the heads of stuck workers; says when there
    /// is something to look at again.
    pub(crate) fn tend(&self, now: Instant) -> Option<Instant> {
        let books = lock(&self.books);
        if books.tally.has_ended() {
            return None;
        }
        match (books.stopped, self.terms.deadline) {
            (Some((_, stopped)), _) if now >= stopped + STALL_GRACE => {
                if books.tally.may_end_over_heads() {
                    self.end(books);
                    return None;
                }
                // A store is under way: it ends within a chunk.
                Some(now + STALL_GRACE / 10)
            }
            (Some((_, stopped)), _) => Some(stopped + STALL_GRACE),
            (None, Some(deadline)) if now >= deadline => {
                self.stop_under(books, StopReason::DeadlinePassed);
                Some(now + STALL_GRACE)
            }
            (None, deadline) => deadline,
        }
    }

    /// Waits for the end and the memory's being let go, until `until` at the latest.
    pub(crate) fn wait_until(&self, until: Option<Instant>) -> Option<Result<Arc<Report>, JobError>> {
        loop {
            if let Some(result) = self.result() {
                self.be_seen();
                return Some(result.clone());
            }
            let now = Instant::now();
            if until.is_some_and(|until| now >= until) {
                return None;
            }
            // The warden does it as well, where there is one.
            let next = self.tend(now);
            let books = lock(&self.books);
            if self.result().is_some() {
                continue;
            }
            let wake = [next, until].into_iter().flatten().min();
            match wake {
                Some(at) => {
                    let timeout = at.saturating_duration_since(now);
                    drop(self.changed.wait_timeout(books, timeout).unwrap_or_else(PoisonError::into_inner));
                }
                None => drop(self.changed.wait(books).unwrap_or_else(PoisonError::into_inner)),
            }
        }
    }

    /// Ends the job if it is due; says whether it is over.
    pub(super) fn end_if_due(&self, books: MutexGuard<'_, Books>) -> bool {
        if books.tally.is_due() {
            self.end(books);
            return true;
        }
        books.tally.has_ended()
    }

    /// The end, once: by whoever closed the last claim, or over the heads of stuck workers.
    fn end(&self, mut books: MutexGuard<'_, Books>) {
        let Some(held) = books.tally.end() else { return };
        self.idle.store(true, Ordering::Release);
        let mut notes = std::mem::take(&mut books.notes);
        let (work, stopped) = (books.work.take(), books.stopped);
        drop(books);
        let in_flight: u64 = held.iter().map(|held| held.extent.len).sum();
        for held in &held {
            notes.outcomes.record(held.extent, Outcome::InFlight);
        }
        // Of a fragmented memory the report is long: nobody waits for the books meanwhile.
        let report = Arc::new(self.report(&notes));
        if let Some(work) = &work {
            work.finish(&self.regions, &notes.outcomes);
        }
        let result = match (&notes.first_failure, stopped.map(|(reason, _)| reason)) {
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
        if let (Some(warden), false) = (&self.surroundings.warden, held.is_empty()) {
            let workers: Vec<u32> = held.iter().map(|held| held.worker).collect();
            warden.left_behind(&workers);
        }
    }

    fn address(&self, extent: &Extent) -> u64 {
        self.regions.get(extent.region as usize).map_or(0, |region| region.address) + extent.start
    }

    fn report(&self, notes: &Notes) -> Report {
        let mut report = Report {
            total_bytes: self.total,
            node_local_bytes: notes.local_bytes,
            node_remote_bytes: notes.remote_bytes,
            method: notes.by_method.iter().max_by_key(|(_, bytes)| **bytes).map(|(method, _)| *method),
            duration: self.started.elapsed(),
            steals: notes.steals,
            cpu_time: notes.shares.values().map(|share| share.cpu_time).sum(),
            workers: notes.shares.values().copied().collect(),
            ..Report::default()
        };
        for (index, region) in self.regions.iter().enumerate() {
            for (extent, outcome) in notes.outcomes.of_region(index as u32, region.len) {
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

impl Drop for JobCore {
    fn drop(&mut self) {
        // Nobody can ask any more.
        self.be_seen();
    }
}

/// What a mutex guards, also after a panic elsewhere: every change under these locks is whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
