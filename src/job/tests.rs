//! The protocol of claims, driven step by step where threads would meet each step only by chance.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::claim::Claim;
use super::core::{JobCore, Priority, Surroundings, Terms};
use super::course::StopReason;
use super::{Cause, Hand, Outcome, Outcomes, Piece, Prepared, Work, WorkRegion};
use crate::clear::Method;
use crate::error::JobError;
use crate::extent::Extent;
use crate::topology::NodeId;

/// Work that does nothing, and looks at its job when it is told of the end.
#[derive(Debug, Default)]
struct Idle {
    finished: AtomicUsize,
    job: std::sync::OnceLock<Weak<JobCore>>,
}

impl Work for Idle {
    fn prepare(&self, _: Extent) -> Result<Prepared, Cause> {
        Ok(Prepared::default())
    }

    fn perform(&self, chunk: Extent, _: &Prepared) -> Result<Vec<Piece>, Cause> {
        Ok(vec![erased(chunk)])
    }

    fn finish(&self, _: &[WorkRegion], _: &Outcomes) {
        let job = self.job.get().and_then(Weak::upgrade);
        assert!(job.is_none_or(|job| job.result().is_none()), "told before anybody who waits");
        self.finished.fetch_add(1, Ordering::SeqCst);
    }
}

const PAGE: u64 = 4096;

const HAND: Hand = Hand { worker: 3, node: Some(NodeId(1)), stolen: false };
const OTHER: Hand = Hand { worker: 4, ..HAND };
const THIRD: Hand = Hand { worker: 5, ..HAND };

fn erased(extent: Extent) -> Piece {
    Piece::erased(extent, Some(Method::Portable))
}

fn chunk(number: u64) -> Extent {
    Extent { region: 0, start: number * PAGE, len: PAGE }
}

fn job(chunks: u64, deadline: Option<Instant>) -> (Arc<JobCore>, Arc<Idle>) {
    let work = Arc::new(Idle::default());
    let region = WorkRegion { address: 0x10_0000, len: chunks * PAGE, node: None, page: PAGE };
    let terms = Terms { priority: Priority::Normal, deadline, stop_on_shortage: true };
    let core = JobCore::new(Arc::clone(&work) as Arc<dyn Work>, vec![region], terms, Surroundings::default());
    work.job.set(Arc::downgrade(&core)).unwrap();
    (core, work)
}

fn done(mut claim: Claim) {
    assert!(claim.confirm());
    let prepared = claim.prepare().unwrap();
    let pieces = claim.perform(&prepared).unwrap();
    claim.settle(pieces, Some(NodeId(1)));
}

fn outcomes(result: &Result<Arc<super::Report>, JobError>) -> Vec<(u64, u64, Outcome)> {
    let report = match result {
        Ok(report) => report,
        Err(error) => error.report().unwrap(),
    };
    let page = |bytes| bytes / PAGE;
    report
        .ranges
        .iter()
        .map(|range| (page(range.start - 0x10_0000), page(range.len), range.outcome.clone()))
        .collect()
}

#[test]
fn the_last_to_settle_ends_the_job_once() {
    let (job, work) = job(3, None);
    for number in [1, 0] {
        done(job.claim(chunk(number), HAND).unwrap());
        assert!(job.result().is_none() && work.finished.load(Ordering::SeqCst) == 0);
    }
    done(job.claim(chunk(2), HAND).unwrap());
    let result = job.result().unwrap();
    assert_eq!(outcomes(result), [(0, 3, Outcome::Erased)]);
    assert_eq!(result.as_ref().unwrap().node_local_bytes, 3 * PAGE);
    assert_eq!(work.finished.load(Ordering::SeqCst), 1);
    assert_eq!(Arc::strong_count(&work), 1, "the job lets go of its work");
    // Nothing can be claimed any more, and stopping changes nothing.
    job.stop(StopReason::Cancelled);
    assert!(job.result().unwrap().is_ok());
}

/// What was claimed before the stop and not confirmed is not stored to.
#[test]
fn no_store_is_allowed_after_a_stop() {
    let (job, _work) = job(3, None);
    let (storing, preparing) = (job.claim(chunk(0), HAND).unwrap(), job.claim(chunk(1), OTHER).unwrap());
    assert!(storing.confirm());
    job.stop(StopReason::Cancelled);
    assert!(!preparing.confirm());
    preparing.hand_back();
    assert!(job.claim(chunk(2), THIRD).is_none(), "nothing is begun any more");
    assert!(job.result().is_none(), "a store is under way");
    storing.settle(vec![erased(chunk(0))], None);
    let result = job.result().unwrap();
    assert!(matches!(result, Err(JobError::Cancelled { .. })));
    assert_eq!(outcomes(result), [(0, 1, Outcome::Erased), (1, 2, Outcome::Untouched)]);
}

/// The job is not ended over the head of a worker that stores, and is over that of one that does not come back.
#[test]
fn a_job_ends_over_stuck_workers_but_not_over_stores() {
    let (job, work) = job(3, None);
    let (storing, stuck) = (job.claim(chunk(0), HAND).unwrap(), job.claim(chunk(2), OTHER).unwrap());
    assert!(storing.confirm());
    job.stop(StopReason::Cancelled);
    assert!(job.claim(chunk(1), THIRD).is_none());
    let patience = Instant::now() + Duration::from_millis(900);
    assert!(job.wait_until(Some(patience)).is_none(), "ended while a worker stored");
    storing.settle(vec![erased(chunk(0))], None);
    let result = job.wait_until(None).unwrap();
    assert!(matches!(result, Err(JobError::Stalled { in_flight_bytes: PAGE, .. })));
    let expected = [(0, 1, Outcome::Erased), (1, 1, Outcome::Untouched), (2, 1, Outcome::InFlight)];
    assert_eq!(outcomes(&result), expected);
    // It comes back: no store, no new end, and the report stays as it was.
    assert!(!stuck.confirm());
    stuck.hand_back();
    assert_eq!(outcomes(job.result().unwrap()), expected);
    assert_eq!((work.finished.load(Ordering::SeqCst), Arc::strong_count(&work)), (1, 1));
}

/// A failure that comes in after the end is not in the report either.
#[test]
fn late_failures_are_not_recorded() {
    let (job, _work) = job(1, None);
    let stuck = job.claim(chunk(0), HAND).unwrap();
    job.stop(StopReason::Cancelled);
    let before = job.wait_until(None).unwrap();
    stuck.fail(Cause::Poisoned);
    assert_eq!(job.progress().done_bytes, 0, "nor in the progress");
    assert_eq!(outcomes(job.result().unwrap()), outcomes(&before));
    assert_eq!(outcomes(&before), [(0, 1, Outcome::InFlight)]);
}

#[test]
fn a_claim_that_is_dropped_has_panicked() {
    let (job, _work) = job(2, None);
    drop(job.claim(chunk(1), HAND).unwrap());
    assert!(job.claim(chunk(0), HAND).is_none(), "a panic ends the job");
    let result = job.result().unwrap();
    assert!(matches!(result, Err(JobError::Failed { cause: Cause::Panicked, len: PAGE, .. })));
    assert_eq!(outcomes(result), [(0, 1, Outcome::Untouched), (1, 1, Outcome::Failed(Cause::Panicked))]);
}

/// A chunk may have several outcomes; what has no page is on no node, and what nobody names was not touched.
#[test]
fn a_claim_is_settled_piece_by_piece() {
    let (job, _work) = job(4, None);
    let all = Extent { region: 0, start: 0, len: 4 * PAGE };
    let claim = job.claim(all, HAND).unwrap();
    assert!(claim.confirm());
    let zero = |number, present| {
        let (extent, outcome) = (chunk(number), Outcome::ReadsZero);
        Piece { extent, outcome, method: None, present }
    };
    claim.settle(vec![erased(chunk(0)), zero(1, true), zero(2, false)], Some(NodeId(2)));
    let result = job.result().unwrap();
    let expected = [(0, 1, Outcome::Erased), (1, 2, Outcome::ReadsZero), (3, 1, Outcome::Untouched)];
    assert_eq!(outcomes(result), expected);
    let report = result.as_ref().unwrap_err().report().unwrap();
    assert_eq!((report.erased_bytes, report.reads_zero_bytes), (PAGE, 2 * PAGE));
    assert_eq!((report.node_remote_bytes, report.method), (2 * PAGE, Some(Method::Portable)));
    assert_eq!(job.progress().done_bytes, 4 * PAGE);
}

#[test]
fn a_claim_that_is_handed_back_can_be_claimed_again() {
    let (job, _work) = job(1, None);
    let first = job.claim(chunk(0), HAND).unwrap();
    first.hand_back();
    assert!(job.result().is_none());
    done(job.claim(chunk(0), HAND).unwrap());
    assert!(job.result().unwrap().is_ok());
}

/// Shortage ends a job whose terms say so; poison and truncation never do.
#[test]
fn what_ends_a_job() {
    for (cause, ends) in [
        (Cause::Shortage { errno: libc::ENOMEM }, true),
        (Cause::Panicked, true),
        (Cause::Poisoned, false),
        (Cause::Truncated, false),
        (Cause::NoHostAddress, false),
        (Cause::NotZero { address: 1 }, false),
        (Cause::System { call: "x", errno: 1 }, false),
    ] {
        let (job, _work) = job(2, None);
        assert_eq!(job.ends_on(&cause), ends);
        job.claim(chunk(0), HAND).unwrap().fail(cause.clone());
        match job.claim(chunk(1), HAND) {
            Some(next) => done(next),
            None => assert!(ends, "{cause}"),
        }
        let second = if ends { Outcome::Untouched } else { Outcome::Erased };
        assert_eq!(outcomes(job.result().unwrap()), [(0, 1, Outcome::Failed(cause)), (1, 1, second)]);
    }
}

/// A deadline is seen by whoever looks first: a worker at its next claim, or somebody who waits.
#[test]
fn deadlines_are_seen_by_workers_and_waiters() {
    let (seen_by_worker, _work) = job(1, Some(Instant::now()));
    assert!(seen_by_worker.claim(chunk(0), HAND).is_none());
    assert!(matches!(seen_by_worker.result().unwrap(), Err(JobError::DeadlinePassed { .. })));

    let (seen_by_waiter, _work) = job(1, Some(Instant::now() + Duration::from_millis(5)));
    let held = seen_by_waiter.claim(chunk(0), HAND).unwrap();
    assert!(matches!(seen_by_waiter.wait_until(None).unwrap(), Err(JobError::Stalled { .. })));
    assert!(!held.confirm());
}

/// The first reason to stop is the one that is told.
#[test]
fn the_first_reason_counts() {
    let (job, _work) = job(1, None);
    job.stop(StopReason::ServiceClosed);
    job.stop(StopReason::Cancelled);
    assert!(matches!(job.result().unwrap(), Err(JobError::ServiceClosed { .. })));
}
