//! A job as the workers see it: what is written down meanwhile, and the report of it. How it ends: `course`.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use super::bell::Bell;
use super::claim::Claim;
use super::course::{Course, StopReason, Subject};
use super::drain;
use super::report::{NodeProgress, WorkerShare};
use super::tally::Held;
use super::token::{Token, Unseen};
use super::work::{Hand, Work, WorkRegion};
use super::{Cause, Outcome, Outcomes, Progress, RangeReport, Report};
use crate::clear::Method;
use crate::error::JobError;
use crate::extent::Extent;
use crate::sys::CompletionFd;
use crate::topology::NodeId;

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
    pub const ALL: &'static [Priority] = &[Priority::Urgent, Priority::Normal, Priority::Background];
}

/// What a job has to tell so far.
#[derive(Debug, Default)]
pub(super) struct Notes {
    pub(super) outcomes: Outcomes,
    pub(super) first_failure: Option<(Extent, Cause)>,
    pub(super) local_bytes: u64,
    pub(super) remote_bytes: u64,
    /// Bytes, by the place in `Method::ALL`.
    pub(super) by_method: [u64; Method::ALL.len()],
    pub(super) shares: BTreeMap<u32, WorkerShare>,
    pub(super) steals: u64,
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
    pub(crate) unseen: Unseen,
}

/// Looks after jobs whose workers may be stuck.
pub(crate) trait Warden: Send + Sync + std::fmt::Debug {
    /// Calls [`JobCore::tend`] at that time or later.
    fn look_at(&self, job: Weak<JobCore>, when: Instant);

    /// These workers held something when their job ended without them.
    fn left_behind(&self, workers: &[u32]);
}

/// A job as the workers see it.
#[derive(Debug)]
pub(crate) struct JobCore {
    own: Weak<JobCore>,
    regions: Vec<WorkRegion>,
    terms: Terms,
    surroundings: Surroundings,
    started: Instant,
    total: u64,
    least_chunk: u64,
    pub(super) progress: AtomicU64,
    /// For each node of the surroundings; none where there is only one.
    by_node: Box<[AtomicU64]>,
    token: Token,
    course: Course<Notes, Result<Arc<Report>, JobError>>,
    bell: Bell<CompletionFd>,
}

impl JobCore {
    /// A job over `regions`; one without bytes is over at once.
    pub(crate) fn new(
        work: Arc<dyn Work>,
        regions: Vec<WorkRegion>,
        terms: Terms,
        surroundings: Surroundings,
    ) -> Arc<Self> {
        let total = regions.iter().fold(0u64, |sum, region| sum.saturating_add(region.len));
        let nodes = if surroundings.nodes.len() > 1 { surroundings.nodes.len() } else { 0 };
        let least_chunk = work.least_chunk();
        let notes = Notes { work: Some(work), ..Notes::default() };
        let token = Token::of(&surroundings.unseen);
        let course = Course::new(total, terms.deadline, notes);
        let core = Arc::new_cyclic(|own| Self {
            own: Weak::clone(own),
            regions,
            terms,
            surroundings,
            started: Instant::now(),
            total,
            least_chunk,
            progress: AtomicU64::new(0),
            by_node: (0..nodes).map(|_| AtomicU64::new(0)).collect(),
            token,
            course,
            bell: Bell::new(),
        });
        core.course.begin(core.as_ref());
        core
    }

    pub(crate) fn regions(&self) -> &[WorkRegion] {
        &self.regions
    }

    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// The shortest chunk that makes sense, in bytes.
    pub(crate) fn least_chunk(&self) -> u64 {
        self.least_chunk
    }

    pub(crate) fn priority(&self) -> Priority {
        self.terms.priority
    }

    /// Has the end told by this descriptor, now if it has come.
    pub(crate) fn tell_by(&self, descriptor: &Arc<CompletionFd>) {
        // Who was told by `wait` must not find it silent, although whoever ended the job is still on its way to it.
        // And in a forked child the bell may be locked for ever.
        if self.course.result().is_some() || !self.bell.hang(descriptor) {
            descriptor.signal();
        }
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
        self.course.result()
    }

    /// As [`result`](Self::result), asked by somebody who has the job.
    pub(crate) fn is_over(&self) -> bool {
        self.result().inspect(|_| self.token.give_back()).is_some()
    }

    /// Whether there seems to be no such job.
    pub(crate) fn may_be_seen_at_once(&self) -> bool {
        self.token.is_free()
    }

    /// Takes the place of the one job that its submitter does itself; `false` if there is one whose end nobody
    /// has asked for.
    pub(crate) fn is_seen_at_once(&self) -> bool {
        self.token.take()
    }

    /// The workers do it after all.
    pub(crate) fn leave_to_others(&self) {
        self.token.give_back();
    }

    /// Asks the job to stop. The first reason counts; after the end it changes nothing. Ends it at once where
    /// no worker holds any of it.
    pub(crate) fn stop(&self, reason: StopReason) {
        self.course.stop(self, reason);
    }

    /// Claims a chunk for a hand; `None` if the job is over or stopping: then nobody need care for it. (And to a hand
    /// that holds one, where somebody would have to; but no such hand claims, see `tally`.)
    pub(crate) fn claim(self: &Arc<Self>, extent: Extent, hand: Hand) -> Option<Claim> {
        let work = self.course.claim(self.as_ref(), extent, hand.worker, |notes| notes.work.clone())?;
        Some(Claim::new(Arc::clone(self), work, extent, hand))
    }

    /// May the worker store?
    pub(super) fn confirm(&self, worker: u32) -> bool {
        self.course.confirm(worker)
    }

    /// The worker lets go; `write` sees the notes, unless the job has ended meanwhile.
    pub(super) fn close(&self, worker: u32, finished: bool, write: impl FnOnce(&mut Notes)) {
        self.course.close(self, worker, finished, write);
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
        self.course.is_running()
    }

    /// Does what is due by now, a passed deadline or an end over the heads of stuck workers; says when there
    /// is something to look at again.
    pub(crate) fn tend(&self, now: Instant) -> Option<Instant> {
        self.course.tend(self, now)
    }

    /// Waits for the end and the memory's being let go, until `until` at the latest.
    pub(crate) fn wait_until(&self, until: Option<Instant>) -> Option<Result<Arc<Report>, JobError>> {
        let ended = match self.result() {
            Some(result) => Some(result.clone()),
            None => drain::wait(self.started, until, || self.course.wait_until(self, until)),
        };
        ended.inspect(|_| self.token.give_back())
    }

    fn address(&self, extent: &Extent) -> u64 {
        self.regions.get(extent.region as usize).map_or(0, |region| region.address) + extent.start
    }

    fn report(&self, notes: &Notes) -> Report {
        let most_used = Method::ALL.into_iter().zip(&notes.by_method).max_by_key(|(_, bytes)| **bytes);
        let did = notes.shares.values().filter(|share| share.chunks > 0);
        let mut workers = Vec::with_capacity(notes.shares.len());
        workers.extend(did);
        let mut report = Report {
            // Most end with one.
            ranges: Vec::with_capacity(1),
            total_bytes: self.total,
            node_local_bytes: notes.local_bytes,
            node_remote_bytes: notes.remote_bytes,
            method: most_used.filter(|(_, bytes)| **bytes > 0).map(|(method, _)| method),
            duration: self.started.elapsed(),
            steals: notes.steals,
            cpu_time: notes.shares.values().map(|share| share.cpu_time).sum(),
            workers,
            ..Report::default()
        };
        for (index, region) in self.regions.iter().enumerate() {
            notes.outcomes.visit_region(index as u32, region.len, |extent, outcome| {
                match outcome {
                    Outcome::Erased => report.erased_bytes += extent.len,
                    Outcome::ReadsZero => report.reads_zero_bytes += extent.len,
                    _ => {}
                }
                let (start, outcome) = (self.address(&extent), outcome.clone());
                report.add(RangeReport { start, len: extent.len, outcome });
            });
        }
        report
    }
}

impl Subject<Notes, Result<Arc<Report>, JobError>> for JobCore {
    fn conclude(
        &self,
        notes: &mut Notes,
        stopped: Option<StopReason>,
        held: &[Held],
    ) -> Result<Arc<Report>, JobError> {
        let in_flight: u64 = held.iter().map(|held| held.extent.len).sum();
        for held in held {
            notes.outcomes.record(held.extent, Outcome::InFlight);
        }
        let report = Arc::new(self.report(notes));
        if let Some(work) = &notes.work {
            work.finish(&self.regions, &notes.outcomes);
        }
        match (&notes.first_failure, stopped) {
            _ if report.is_all_zero() => Ok(report),
            _ if in_flight > 0 => Err(JobError::Stalled { in_flight_bytes: in_flight, report }),
            (Some((extent, cause)), _) => {
                let (start, cause) = (self.address(extent), cause.clone());
                Err(JobError::Failed { start, len: extent.len, cause, report })
            }
            (None, Some(StopReason::DeadlinePassed)) => Err(JobError::DeadlinePassed { report }),
            (None, Some(StopReason::ServiceClosed)) => Err(JobError::ServiceClosed { report }),
            (None, _) => Err(JobError::Cancelled { report }),
        }
    }

    fn let_go(&self, notes: Notes) {
        if catch_unwind(AssertUnwindSafe(|| drop(notes))).is_err() {
            tracing::error!("the destructor of a job's memory panicked");
        }
    }

    fn tell(&self, held: &[Held]) {
        if let Some(descriptor) = self.bell.ring() {
            descriptor.signal();
        }
        // Here and not in `conclude`: a subscriber that panics tears nothing any more.
        let all_zero = self.course.result().is_some_and(Result::is_ok);
        tracing::debug!(bytes = self.total, all_zero, "job over");
        if let (Some(warden), false) = (&self.surroundings.warden, held.is_empty()) {
            let workers: Vec<u32> = held.iter().map(|held| held.worker).collect();
            warden.left_behind(&workers);
        }
    }

    fn be_looked_at(&self, when: Instant) {
        if let Some(warden) = &self.surroundings.warden {
            warden.look_at(Weak::clone(&self.own), when);
        }
    }
}
