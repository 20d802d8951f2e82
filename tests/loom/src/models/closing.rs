//! The last worker out against the service's drop: every job ends, every worker leaves, nobody waits for ever.

use std::sync::Arc;
use std::time::Duration;

use loom::sync::mpsc;
use loom::thread;

use super::course::StopReason;
use super::guest::{Chunk, Job};
use super::parking::Tasks;
use super::register::Register;
use super::sleep::{Dormitory, Shift};
use crate::sync::Instant;

/// A pool whose only job has one chunk.
#[derive(Debug)]
struct Pool {
    register: Register<Job>,
    tasks: Tasks,
    dormitory: Dormitory,
    job: Arc<Job>,
}

impl Pool {
    fn new() -> Arc<Self> {
        let (register, tasks) = (Register::default(), Tasks::new());
        Arc::new(Self { register, tasks, dormitory: Dormitory::default(), job: Job::new(1) })
    }

    /// Whether it was not too late.
    fn submit(&self) -> bool {
        let entered = self.register.enter(&self.job);
        if entered {
            self.tasks.push(0);
            self.dormitory.wake_one();
        }
        entered
    }

    fn close(&self) -> Vec<Arc<Job>> {
        let Some(jobs) = self.register.close() else { return Vec::new() };
        jobs.iter().for_each(|job| job.stop(StopReason::ServiceClosed));
        self.dormitory.wake_all();
        jobs
    }

    /// Starts a worker.
    fn worker(self: &Arc<Self>) -> thread::JoinHandle<()> {
        let worker = Worker(Arc::clone(self));
        thread::spawn(move || worker.work())
    }
}

struct Worker(Arc<Pool>);

impl Shift for Worker {
    type Task = u64;

    fn is_to_leave(&self) -> bool {
        self.0.register.is_closed()
    }

    fn find(&self) -> Result<u64, Option<Instant>> {
        if self.0.tasks.take(0) { Ok(0) } else { Err(None) }
    }

    fn dormitory(&self) -> Option<&Dormitory> {
        Some(&self.0.dormitory)
    }

    fn pass_wake_on(&self) {
        self.0.dormitory.wake_one();
    }

    fn execute(&self, task: u64) {
        self.0.job.work_on(task);
    }
}

/// Somebody submits and waits while the service is dropped.
pub fn submit_against_drop() {
    let pool = Pool::new();
    let worker = pool.worker();
    let other = Arc::clone(&pool);
    let submitter = thread::spawn(move || other.submit().then(|| other.job.wait()));
    pool.close();
    worker.join().unwrap();
    if let Some(ended) = submitter.join().unwrap() {
        pool.job.check(&ended);
        assert!(!ended.erased.is_empty() || ended.stopped == Some(StopReason::ServiceClosed));
    }
    assert!(!pool.submit(), "it is closed");
}

/// Two workers, of which the last one out has the chunk, or nobody.
pub fn the_last_worker_out() {
    let pool = Pool::new();
    let workers = [pool.worker(), pool.worker()];
    assert!(pool.submit());
    let jobs = pool.close();
    workers.into_iter().for_each(|worker| worker.join().unwrap());
    // What the pool does at last: nobody is stuck, so nothing is left to wait for.
    let ended = jobs[0].course.result().expect("every worker has left");
    pool.job.check(ended);
}

/// Dropped twice at once, as its last two owners may.
pub fn dropped_twice() {
    let pool = Pool::new();
    let worker = pool.worker();
    let other = Arc::clone(&pool);
    let second = thread::spawn(move || other.close().len());
    assert!(pool.submit() || pool.register.is_closed());
    let closed = pool.close().len() + second.join().unwrap();
    worker.join().unwrap();
    assert!(closed <= 1, "two of them think that they closed it");
    assert!(closed == 0 || pool.job.course.result().is_some());
}

/// The worker hangs in a page fault: whoever drops the service ends the job over its head.
pub fn drop_against_a_stuck_worker() {
    let pool = Pool::new();
    let (handler, fault) = mpsc::channel();
    assert!(pool.register.enter(&pool.job) && pool.job.claim(0));
    let other = Arc::clone(&pool);
    let worker = thread::spawn(move || {
        fault.recv().unwrap();
        other.job.perform(0, Chunk::store);
    });
    let jobs = pool.close();
    let grace = Instant::now() + Duration::from_secs(2);
    let ended = jobs[0].course.wait_until(&*jobs[0], Some(grace)).expect("it does not store");
    assert_eq!((&*ended.in_flight, ended.stopped), (&[0][..], Some(StopReason::ServiceClosed)));
    pool.job.check(&ended);
    handler.send(()).unwrap();
    worker.join().unwrap();
}
