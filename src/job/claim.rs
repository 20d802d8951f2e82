//! A chunk on its way through one worker's hands: claimed, prepared, confirmed, performed, settled. What
//! that proves is argued in `course`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::core::{JobCore, Notes};
use super::course::StopReason;
use super::meter::Meter;
use super::report::WorkerShare;
use super::work::{Hand, Piece, Prepared, Work};
use super::{Cause, Outcome};
use crate::clear::Method;
use crate::extent::Extent;
use crate::topology::NodeId;

/// Chunks shorter than this that wait for nothing are metered by the clock: asking the kernel for CPU time, twice,
/// takes as long as clearing so many bytes.
const METERED_FROM: u64 = 64 << 10;

/// A chunk in the hands of one worker. Dropped without being settled (a panic), it fails the job.
#[derive(Debug)]
pub(crate) struct Claim {
    core: Arc<JobCore>,
    work: Option<Arc<dyn Work>>,
    extent: Extent,
    hand: Hand,
    /// `None`: what it costs is what it takes.
    meter: Option<Meter>,
    /// What it took to prepare and perform.
    took: Duration,
    open: bool,
}

impl Claim {
    /// A claim that `core` has written into its books.
    pub(super) fn new(core: Arc<JobCore>, work: Arc<dyn Work>, extent: Extent, hand: Hand) -> Self {
        Self { core, work: Some(work), extent, hand, meter: None, took: Duration::ZERO, open: true }
    }

    pub(crate) fn prepare(&mut self) -> Result<Prepared, Cause> {
        self.meter = Some(Meter::of(self.hand));
        self.timed(|claim| {
            claim.work.as_ref().map_or(Ok(Prepared::default()), |work| work.prepare(claim.extent))
        })
    }

    /// As [`prepare`](Self::prepare), unless that might take long.
    pub(crate) fn prepare_at_once(&mut self) -> Option<Result<Prepared, Cause>> {
        self.meter = (self.extent.len >= METERED_FROM).then(|| Meter::of(self.hand));
        self.timed(|claim| {
            let work = claim.work.as_ref();
            work.map_or(Some(Ok(Prepared::default())), |work| work.prepare_at_once(claim.extent))
        })
    }

    /// Whether a shorter piece of the chunk might fare better.
    pub(crate) fn may_be_narrowed(&self, cause: &Cause) -> bool {
        self.work.as_ref().is_some_and(|work| work.may_be_narrowed(self.extent, cause))
    }

    /// May the worker store? Asked after `prepare`, which may have taken long.
    pub(crate) fn confirm(&self) -> bool {
        self.core.confirm(self.hand.worker)
    }

    /// Does the work, after `confirm` said yes.
    pub(crate) fn perform(&mut self, prepared: &Prepared) -> Result<Vec<Piece>, Cause> {
        self.timed(|claim| {
            let work = claim.work.as_ref();
            work.map_or(Ok(Vec::new()), |work| work.perform(claim.extent, prepared))
        })
    }

    /// What it took so far to prepare and perform, without what others take with the books of the job.
    pub(crate) fn took(&self) -> Duration {
        self.took
    }

    fn timed<T>(&mut self, work: impl FnOnce(&Self) -> T) -> T {
        let begun = Instant::now();
        let answer = work(self);
        self.took += begun.elapsed();
        answer
    }

    /// Puts the claim back: the chunk will be claimed again, here or elsewhere; or not at all, where the job
    /// is stopping.
    pub(crate) fn hand_back(mut self) {
        self.close(None, |_| {});
    }

    /// Writes the outcomes into the books; a byte that no piece names is `Untouched`. `node`: where what is
    /// present lies, if that is known.
    pub(crate) fn settle(mut self, pieces: Vec<Piece>, node: Option<NodeId>) {
        let local = node.zip(self.hand.node).map(|(node, home)| node == home);
        self.close(Some(node), |notes| {
            for Piece { extent, outcome, method, present } in pieces {
                match local.filter(|_| present) {
                    Some(true) => notes.local_bytes += extent.len,
                    Some(false) => notes.remote_bytes += extent.len,
                    None => {}
                }
                if let Some(method) = method {
                    let place = Method::ALL.iter().position(|known| *known == method);
                    if let Some(bytes) = place.and_then(|place| notes.by_method.get_mut(place)) {
                        *bytes += extent.len;
                    }
                }
                notes.outcomes.record(extent, outcome);
            }
        });
    }

    /// Writes into the books that the chunk could not be had.
    pub(crate) fn fail(mut self, cause: Cause) {
        self.fail_by(cause);
    }

    fn fail_by(&mut self, cause: Cause) {
        let extent = self.extent;
        let stop = self.core.ends_on(&cause);
        let core = Arc::clone(&self.core);
        if stop {
            // While this claim is open, so that the stop does not end the job before the cause is told.
            core.stop(StopReason::Failed);
        }
        self.close(Some(None), |notes| {
            notes.first_failure.get_or_insert_with(|| (extent, cause.clone()));
            notes.outcomes.record(extent, Outcome::Failed(cause));
        });
    }

    /// Lets go of the memory, then of the claim. `finished`: the bytes are dealt with, and lie there; then
    /// `write` sees the notes, unless the job has ended meanwhile.
    fn close(&mut self, finished: Option<Option<NodeId>>, write: impl FnOnce(&mut Notes)) {
        self.open = false;
        // Before anybody can learn of the end, so that no finished job keeps guest memory alive.
        self.work = None;
        let spent = self.meter.as_ref().map_or(self.took, Meter::spent);
        let core = Arc::clone(&self.core);
        core.close(self.hand.worker, finished.is_some(), |notes| {
            let share = notes.shares.entry(self.hand.worker).or_insert_with(|| WorkerShare::of(self.hand));
            share.cpu_time += spent;
            if let Some(node) = finished {
                core.advance(self.extent.len, node.or(self.hand.node));
                share.bytes += self.extent.len;
                share.chunks += 1;
                notes.steals += u64::from(self.hand.stolen);
                write(notes);
            }
        });
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.open {
            self.fail_by(Cause::Panicked);
        }
    }
}
