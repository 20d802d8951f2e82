//! Publish, complete, wait: a waiter, whichever way it learns of the end, sees every store of every worker.

use std::sync::Arc;

use loom::thread;

use super::guest::{Job, stream};

/// Two workers with a chunk each, and somebody who waits.
pub fn who_waits_sees_all_stores() {
    let job = Job::new(2);
    let other = Arc::clone(&job);
    let worker = thread::spawn(move || other.work_on(1));
    let other = Arc::clone(&job);
    let last = thread::spawn(move || other.work_on(0));
    let ended = job.wait();
    assert_eq!((ended.stopped, ended.erased.len()), (None, 2));
    job.check(&ended);
    worker.join().unwrap();
    last.join().unwrap();
}

/// The stores are non-temporal ones.
pub fn who_waits_sees_non_temporal_stores() {
    let job = Job::new(2);
    let other = Arc::clone(&job);
    let worker = thread::spawn(move || {
        if other.claim(1) {
            other.perform(1, |_| stream(&other, 1));
        }
    });
    if job.claim(0) {
        job.perform(0, |_| stream(&job, 0));
    }
    job.check(&job.wait());
    worker.join().unwrap();
}

/// Nobody waits: the descriptor becomes readable, or somebody asks whether the job is over.
pub fn who_looks_sees_all_stores() {
    let job = Job::new(1);
    let other = Arc::clone(&job);
    let worker = thread::spawn(move || other.work_on(0));
    let descriptor = job.descriptor();
    let readable = descriptor.is_readable();
    let over = job.course.result();
    assert!(!readable || over.is_some(), "readable and not over");
    if let Some(ended) = over {
        job.check(ended);
    }
    worker.join().unwrap();
    assert!(descriptor.is_readable(), "over and not readable");
}

/// Two who wait, before and after: both return.
pub fn everybody_who_waits_returns() {
    let job = Job::new(1);
    let other = Arc::clone(&job);
    let worker = thread::spawn(move || other.work_on(0));
    let other = Arc::clone(&job);
    let waiter = thread::spawn(move || other.wait());
    let (own, others) = (job.wait(), waiter.join().unwrap());
    assert_eq!(own.erased, others.erased);
    job.check(&own);
    worker.join().unwrap();
}
