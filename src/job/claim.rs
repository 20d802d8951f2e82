//! A chunk on its way through one worker's hands: claimed, prepared, confirmed, performed, settled. What
//! that proves is argued in `core`.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::core::{Books, JobCore, Phase, StopReason, lock};
use super::work::{Piece, Prepared, Work};
use super::{Cause, Outcome};
use crate::extent::Extent;
use crate::topology::NodeId;

/// A chunk in the hands of one worker. Dropped without being settled (a panic), it fails the job.
#[derive(Debug)]
pub(crate) struct Claim {
    core: Arc<JobCore>,
    work: Option<Arc<dyn Work>>,
    extent: Extent,
    open: bool,
}

impl Claim {
    /// A claim that `core` has written into its books.
    pub(super) fn new(core: Arc<JobCore>, work: Arc<dyn Work>, extent: Extent) -> Self {
        Self { core, work: Some(work), extent, open: true }
    }

    pub(crate) fn prepare(&self) -> Result<Prepared, Cause> {
        self.work.as_ref().map_or(Ok(Prepared::default()), |work| work.prepare(self.extent))
    }

    /// Whether a shorter piece of the chunk might fare better.
    pub(crate) fn may_be_narrowed(&self, cause: &Cause) -> bool {
        self.work.as_ref().is_some_and(|work| work.may_be_narrowed(self.extent, cause))
    }

    /// May the worker store? Asked after `prepare`, which may have taken long.
    pub(crate) fn confirm(&self) -> bool {
        let mut books = lock(&self.core.books);
        if books.ended || self.core.stop_reason().is_some() {
            return false;
        }
        let extent = self.extent;
        if let Some(claim) = books.claims.iter_mut().find(|(held, _)| *held == extent) {
            claim.1 = Phase::Storing;
        }
        true
    }

    /// Does the work, after `confirm` said yes.
    pub(crate) fn perform(&self, prepared: &Prepared) -> Result<Vec<Piece>, Cause> {
        self.work.as_ref().map_or(Ok(Vec::new()), |work| work.perform(self.extent, prepared))
    }

    /// Puts the claim back: the chunk will be claimed again, here or elsewhere.
    pub(crate) fn hand_back(mut self) {
        self.close(|_| {});
    }

    /// Gives the chunk up untouched: the job is stopping.
    pub(crate) fn abandon(mut self) {
        let (core, bytes) = (Arc::clone(&self.core), self.extent.len);
        self.close(|_| {});
        core.give_up(bytes);
    }

    /// Writes the outcomes into the books; a byte that no piece names is `Untouched`. `local`: whether the
    /// worker sits on the node of what is present.
    pub(crate) fn settle(mut self, pieces: Vec<Piece>, local: Option<bool>) {
        let extent = self.extent;
        self.close(|books| {
            for Piece { extent, outcome, method, present } in pieces {
                match local.filter(|_| present) {
                    Some(true) => books.local_bytes += extent.len,
                    Some(false) => books.remote_bytes += extent.len,
                    None => {}
                }
                if let Some(method) = method {
                    *books.by_method.entry(method).or_default() += extent.len;
                }
                books.outcomes.record(extent, outcome);
            }
        });
        self.core.progress.fetch_add(extent.len, Ordering::Relaxed);
        self.core.give_up(extent.len);
    }

    /// Writes into the books that the chunk could not be had.
    pub(crate) fn fail(mut self, cause: Cause) {
        self.fail_by(cause);
    }

    fn fail_by(&mut self, cause: Cause) {
        let extent = self.extent;
        let core = Arc::clone(&self.core);
        let stop = core.ends_on(&cause);
        self.close(|books| {
            books.first_failure.get_or_insert_with(|| (extent, cause.clone()));
            books.outcomes.record(extent, Outcome::Failed(cause));
        });
        core.progress.fetch_add(extent.len, Ordering::Relaxed);
        if stop {
            core.stop(StopReason::Failed);
        }
        core.give_up(extent.len);
    }

    /// Lets go of the memory, then of the claim; `write` sees the books unless the job has ended meanwhile.
    fn close(&mut self, write: impl FnOnce(&mut Books)) {
        self.open = false;
        // Before anybody can learn of the end, so that no finished job keeps guest memory alive.
        self.work = None;
        let mut books = lock(&self.core.books);
        if !books.ended {
            books.claims.retain(|(held, _)| *held != self.extent);
            write(&mut books);
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.open {
            self.fail_by(Cause::Panicked);
        }
    }
}

/// Whether bytes on `node` are local to a worker of `home`.
pub(crate) fn locality(node: Option<NodeId>, home: NodeId) -> Option<bool> {
    node.map(|node| node == home)
}
