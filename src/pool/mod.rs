//! Floor 3: workers pinned to their nodes, queues, stealing, parking.
//!
//! Each node with CPUs has a queue (a `crossbeam` injector) and workers with a deque each. A region
//! enters as one task on the queue of the node its memory policy names; whoever takes a task splits it
//! lazily (see `extent`), works on the near chunk, and offers the rest from its deque. What is decided
//! thereby is decided in `machine`.

mod crew;
mod machine;
mod register;
mod seats;
mod shared;
mod sleep;
mod staff;
#[cfg(test)]
mod tests;
mod watchdog;
mod worker;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam::deque::Worker as Deque;

use crate::error::{BuildError, RequestError};
use crate::extent::Extent;
use crate::job::{JobCore, Priority, StopReason, Surroundings, Terms, Unseen, Warden, Work, WorkRegion};
use crate::sync::lock;
use crate::sys::{has_low_policy, process_id};
use crate::topology::{NodeId, Topology};
use crew::Post;
pub(crate) use crew::{Crew, OnThreadStart, STACK, settle_in};
pub use crew::{ThreadInfo, ThreadKind};
pub use machine::Locality;
use machine::Plan;
use seats::Seats;
use shared::Shared;
use staff::{Bench, Duty, Roster, Staff, Standing, duty};
use watchdog::Watchdog;
use worker::{Caller, Deques};

/// The run a worker clears between two looks at cancel, deadline and priority, in bytes, unless that takes more
/// than a millisecond.
pub(crate) const CHUNK: u64 = 4 << 20;

/// One for each priority.
const LANES: usize = Priority::ALL.len();

/// How long a closing pool waits for workers before it reports and detaches those that are stuck in a page fault.
const CLOSE_GRACE: Duration = Duration::from_secs(2);

/// An extent on its way to a worker.
#[derive(Debug)]
struct Task {
    job: Arc<JobCore>,
    extent: Extent,
    /// The node it is thought to lie on.
    believed: Option<NodeId>,
    /// Whether a worker took it, or what it was a part of, from another one.
    stolen: bool,
}

/// How a pool is to be.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) workers_per_node: usize,
    pub(crate) locality: Locality,
    /// The longest chunk, in bytes.
    pub(crate) chunk: u64,
    /// Bytes a second for background work.
    pub(crate) background_rate: Option<u64>,
    /// Jobs of so many bytes are done by the thread that submits them, where that waits for nobody.
    pub(crate) small: u64,
    pub(crate) crew: Crew,
}

/// The worker threads and the jobs they were given.
#[derive(Debug)]
pub(crate) struct Pool {
    shared: Arc<Shared>,
    threads: Roster,
    workers: usize,
    watchdog: Option<Arc<Watchdog>>,
    /// Disconnected when the last thread has left.
    leaving: Mutex<mpsc::Receiver<()>>,
    /// Regions without a policy node start at the places in turn.
    turn: AtomicUsize,
    surroundings: Surroundings,
    chunk: u64,
    small: u64,
    /// The process the workers live in.
    process: u32,
}

impl Pool {
    /// Starts the workers; returns when each of them is pinned and running. A host that starts fewer than wanted
    /// gets fewer, down to none: then every job is done by the thread that submits it.
    pub(crate) fn start(topology: &Topology, settings: Settings) -> Result<Self, BuildError> {
        let Settings { workers_per_node, locality, chunk, background_rate, small, crew } = settings;
        let wanted = Plan::wanted(topology, workers_per_node);
        let posts = wanted.iter().enumerate().map(|(number, node)| Post::worker(number, *node, topology));
        let (recruits, refused) = crew.start::<Duty>(posts, duty)?;
        if let Some(error) = refused {
            let (asked, started) = (wanted.len(), recruits.len());
            tracing::warn!(asked, started, %error, "the host refused more worker threads; going on with fewer");
        }
        let homes: Vec<NodeId> = wanted.into_iter().take(recruits.len()).collect();
        let workers = homes.len();
        // Each number twice: the second is for whoever stands in for a worker that is stuck.
        let plan = Plan::new(topology, &homes, locality).with_stand_ins();
        let deques: Vec<Deques> =
            (0..2 * workers).map(|_| std::array::from_fn(|_| Deque::new_lifo())).collect();
        let stealers = deques.iter().map(|lanes| std::array::from_fn(|lane| lanes[lane].stealer())).collect();
        let shared = Arc::new(Shared::new(plan, stealers, Seats::new(topology), background_rate));
        let bench = Bench::new(Mutex::new(deques.into_iter().map(Standing::Free).collect()));
        let (alive, leaving) = mpsc::channel();
        let threads = Roster::default();
        let staff = Staff { shared: Arc::clone(&shared), bench, threads: Arc::clone(&threads), chunk, alive };
        recruits.into_iter().enumerate().for_each(|(number, recruit)| staff.engage(recruit, number));
        let nodes = topology.nodes().iter().map(|node| node.id()).collect();
        let mut pool = Self {
            shared,
            threads,
            workers,
            watchdog: None,
            leaving: Mutex::new(leaving),
            turn: AtomicUsize::new(0),
            surroundings: Surroundings { nodes, warden: None, unseen: Unseen::default() },
            chunk,
            small,
            process: process_id(),
        };
        if workers > 0 {
            // An error drops the pool, and so ends its workers.
            pool.watchdog = staff.set_watchdog(&crew, topology)?;
            pool.surroundings.warden =
                pool.watchdog.as_ref().map(|watchdog| Arc::clone(watchdog) as Arc<dyn Warden>);
        }
        Ok(pool)
    }

    /// How many workers were started; none: everything is done by the caller's threads.
    pub(crate) fn workers(&self) -> usize {
        self.workers
    }

    pub(crate) fn threads(&self) -> Vec<ThreadInfo> {
        if self.check_process().is_err() {
            return Vec::new();
        }
        lock(&self.threads)
            .iter()
            .filter(|(_, thread)| !thread.is_finished())
            .map(|(info, _)| *info)
            .collect()
    }

    pub(crate) fn background_rate(&self) -> Option<u64> {
        self.check_process().ok().and_then(|()| self.shared.background_rate())
    }

    /// A forked child does nothing: whoever held the lock in its parent is not there.
    pub(crate) fn set_background_rate(&self, rate: Option<u64>) {
        if self.check_process().is_ok() {
            self.shared.set_background_rate(rate);
        }
    }

    /// Queues one task a region. A job without bytes is over at once, and no worker is woken. A small one is
    /// done here; and every one where there are no workers.
    pub(crate) fn submit(
        &self,
        work: Arc<dyn Work>,
        regions: Vec<WorkRegion>,
        terms: Terms,
    ) -> Result<Arc<JobCore>, RequestError> {
        self.check_process()?;
        let surroundings = self.surroundings.clone();
        let job = JobCore::new(work, regions, terms, surroundings);
        if !self.shared.register.enter(&job) {
            return Err(RequestError::Closed);
        }
        if job.total() == 0 {
            return Ok(job);
        }
        let tasks =
            job.regions().iter().enumerate().filter(|(_, region)| region.len > 0).map(|(index, region)| {
                Task {
                    job: Arc::clone(&job),
                    extent: Extent { region: index as u32, start: 0, len: region.len },
                    believed: region.node,
                    stolen: false,
                }
            });
        if self.workers == 0 || self.is_for_the_caller(&job) {
            let node =
                self.surroundings.nodes.first().copied().filter(|_| self.surroundings.nodes.len() == 1);
            let mut tasks: Vec<Task> = tasks.collect();
            tasks.reverse();
            let left = Caller::work(node, tasks, self.chunk, self.workers > 0);
            if !left.is_empty() {
                job.leave_to_others();
                left.into_iter().rev().for_each(|task| self.send(task));
            }
        } else {
            tasks.for_each(|task| self.send(task));
        }
        Ok(job)
    }

    /// Queues a task where its memory is thought to be.
    fn send(&self, task: Task) {
        let place = match task.believed {
            Some(node) => self.shared.plan.place_for(node),
            None => self.turn.fetch_add(1, Ordering::Relaxed) % self.shared.plan.homes().len().max(1),
        };
        self.shared.send(place, task);
    }

    /// Whether the submitting thread does a job itself, as far as that waits for nobody: a small one takes it
    /// less time than waking a worker. Not the second one of a burst, which the workers share; nor work that is
    /// to keep to a rate or, perhaps, to another node. Nor on a thread of low policy, which would hold the lock of
    /// the address space for as long as it is kept from running.
    fn is_for_the_caller(&self, job: &JobCore) -> bool {
        if job.total() > self.small || job.priority() == Priority::Background {
            return false;
        }
        if self.shared.plan.is_local_only() && self.surroundings.nodes.len() > 1 {
            return false;
        }
        job.may_be_seen_at_once() && !has_low_policy() && job.is_seen_at_once()
    }

    /// The process the workers live in.
    pub(crate) fn process(&self) -> u32 {
        self.process
    }

    /// Whether the workers exist in this process.
    pub(crate) fn check_process(&self) -> Result<(), RequestError> {
        match process_id() {
            own if own == self.process => Ok(()),
            called_in => Err(RequestError::ForkedChild { built_in: self.process, called_in }),
        }
    }

    /// Stops every job and joins the workers. Returns within a bounded time: workers stuck in a page fault
    /// are reported and left alone, and so are jobs whose stores are stuck. Why every job ends: see `register`.
    pub(crate) fn close(&self) {
        if process_id() != self.process {
            // A forked child: these threads are not here, and whoever held a lock in the parent is not either.
            return;
        }
        let Some(jobs) = self.shared.register.close() else { return };
        jobs.iter().for_each(|job| job.stop(StopReason::ServiceClosed));
        self.shared.wake_all();
        if let Some(watchdog) = &self.watchdog {
            watchdog.close();
        }
        let mut threads = std::mem::take(&mut *lock(&self.threads));
        if threads.iter().any(|(_, thread)| thread.thread().id() == thread::current().id()) {
            // One of our threads let go of memory that owned the service: it cannot wait for itself.
            tracing::warn!("the service is dropped by one of its own threads; they end by themselves");
            return self.shared.drain();
        }
        let all_left =
            lock(&self.leaving).recv_timeout(CLOSE_GRACE) == Err(mpsc::RecvTimeoutError::Disconnected);
        while !threads.is_empty() {
            for (_, thread) in threads {
                let name = thread.thread().name().unwrap_or("worker").to_owned();
                if !all_left && !thread.is_finished() {
                    tracing::warn!(
                        thread = name,
                        "a worker is stuck in a page fault; it is left behind and stores nothing after it"
                    );
                } else if thread.join().is_err() {
                    tracing::error!(thread = name, "a thread ended by a panic");
                }
            }
            // A stand-in that the watchdog started just then.
            threads = std::mem::take(&mut *lock(&self.threads));
        }
        self.shared.drain();
        let deadline = Instant::now() + CLOSE_GRACE;
        for job in &jobs {
            // Ends it over the heads of stuck workers, if need be.
            if job.wait_until(Some(deadline)).is_none() {
                tracing::error!("a job's store is stuck in a page fault; the job ends when the fault does");
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.close();
    }
}
