//! Cancel against completion: one end, the right one, and no store after it.

use std::sync::Arc;

use loom::sync::mpsc;
use loom::thread;

use super::course::StopReason;
use super::guest::{Chunk, Job};

/// A worker with its only chunk, somebody who cancels, and somebody who waits and whose patience ends: the worker
/// stores before the end or is refused.
pub fn cancel_against_the_last_chunk() {
    let job = Job::new(1);
    let other = Arc::clone(&job);
    let worker = thread::spawn(move || other.work_on(0));
    let other = Arc::clone(&job);
    let cancel = thread::spawn(move || other.stop(StopReason::Cancelled));
    let ended = job.wait();
    job.check(&ended);
    worker.join().unwrap();
    cancel.join().unwrap();
    assert!(!job.claim(0), "nothing begins after the end");
}

/// The same with another chunk that is never begun: the end is the cancel's.
pub fn cancel_in_the_middle() {
    let job = Job::new(2);
    let other = Arc::clone(&job);
    let worker = thread::spawn(move || other.work_on(0));
    let other = Arc::clone(&job);
    let cancel = thread::spawn(move || {
        other.stop(StopReason::Cancelled);
        other.stop(StopReason::ServiceClosed);
    });
    let ended = job.wait();
    assert_eq!(ended.stopped, Some(StopReason::Cancelled), "the first reason counts");
    job.check(&ended);
    worker.join().unwrap();
    cancel.join().unwrap();
}

/// A worker that comes back from making its chunk ready when the job is over, and not before. Nobody but who waits
/// can end the job.
pub fn a_worker_that_does_not_come_back() {
    let job = Job::new(1);
    let (handler, fault) = mpsc::channel();
    assert!(job.claim(0));
    let other = Arc::clone(&job);
    let worker = thread::spawn(move || {
        fault.recv().unwrap();
        other.perform(0, Chunk::store);
    });
    let other = Arc::clone(&job);
    let cancel = thread::spawn(move || other.stop(StopReason::Cancelled));
    let ended = job.wait();
    assert_eq!(ended.in_flight, [0]);
    job.check(&ended);
    handler.send(()).unwrap();
    worker.join().unwrap();
    cancel.join().unwrap();
}
