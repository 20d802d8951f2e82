//! Floor 3: workers pinned to their nodes, queues, stealing, parking.
//!
//! Each node with CPUs has a queue (a `crossbeam` injector) and workers with a deque each. A region
//! enters as one task on the queue of the node its memory policy names; whoever takes a task splits it
//! lazily (see `extent`), works on the near chunk, and offers the rest from its deque.

mod machine;
mod sleep;
mod worker;

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam::deque::{Injector, Steal, Stealer, Worker as Deque};

use crate::error::{BuildError, RequestError};
use crate::extent::Extent;
use crate::job::{JobCore, StopReason, Terms, Work, WorkRegion, lock};
use crate::sys::{allowed_cpus, block_asynchronous_signals, pin_current_thread, use_normal_policy};
use crate::topology::{NodeId, Topology};
use machine::{Place, Plan};
use sleep::Dormitory;
use worker::Worker;

/// The run a worker clears between two looks at cancel, deadline and priority, in bytes: about 0.2 ms at
/// 20 GB/s, 1 ms at 4 GB/s.
pub(crate) const CHUNK: u64 = 4 << 20;

/// Foreground and background.
const LANES: usize = 2;

/// How long a closing pool waits for workers before it reports and detaches those that are stuck in a page fault.
const CLOSE_GRACE: Duration = Duration::from_secs(2);

/// Said outright, or std would ask the environment. The deepest a worker goes is a page-by-page search for
/// a bad page and the memory object's own code.
const WORKER_STACK: usize = 512 << 10;

/// An extent on its way to a worker.
#[derive(Debug)]
struct Task {
    job: Arc<JobCore>,
    extent: Extent,
    /// The node it is thought to lie on.
    believed: Option<NodeId>,
}

/// What the workers share.
#[derive(Debug)]
struct Shared {
    plan: Plan,
    injectors: Vec<[Injector<Task>; LANES]>,
    stealers: Vec<[Stealer<Task>; LANES]>,
    dormitories: Vec<Dormitory>,
    closing: AtomicBool,
}

impl Shared {
    /// Queues a task at a place and wakes somebody for it.
    fn send(&self, place: Place, task: Task) {
        if let Some(injector) =
            self.injectors.get(place).and_then(|lanes| lanes.get(task.job.lane() as usize))
        {
            injector.push(task);
            self.wake_near(place);
        }
    }

    /// Wakes the nearest sleeper, if anybody sleeps.
    fn wake_near(&self, place: Place) {
        let near = self.plan.neighbours(place).iter().filter_map(|place| self.dormitories.get(*place));
        for dormitory in near {
            if dormitory.wake_one() {
                return;
            }
        }
    }
}

/// The worker threads and the jobs they were given.
#[derive(Debug)]
pub(crate) struct Pool {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Disconnected when the last worker has left.
    leaving: Mutex<mpsc::Receiver<()>>,
    jobs: Mutex<Vec<Weak<JobCore>>>,
    /// Regions without a policy node start at the places in turn.
    turn: AtomicUsize,
    /// The process the workers live in.
    process: u32,
}

impl Pool {
    /// Starts the workers; returns when each of them is pinned and running.
    pub(crate) fn start(topology: &Topology, per_node: usize) -> Result<Self, BuildError> {
        if per_node == 0 {
            return Err(BuildError::NoWorkers { asked: per_node });
        }
        let plan = Plan::new(topology, per_node);
        let asked = plan.workers().len();
        let deques: Vec<[Deque<Task>; LANES]> =
            (0..asked).map(|_| [Deque::new_lifo(), Deque::new_lifo()]).collect();
        let places = plan.homes().len();
        let shared = Arc::new(Shared {
            injectors: (0..places).map(|_| [Injector::new(), Injector::new()]).collect(),
            stealers: deques.iter().map(|lanes| [lanes[0].stealer(), lanes[1].stealer()]).collect(),
            dormitories: (0..places).map(|_| Dormitory::default()).collect(),
            closing: AtomicBool::new(false),
            plan,
        });
        let (alive, leaving) = mpsc::channel();
        let pool = Self {
            shared: Arc::clone(&shared),
            threads: Mutex::default(),
            leaving: Mutex::new(leaving),
            jobs: Mutex::default(),
            turn: AtomicUsize::new(0),
            process: std::process::id(),
        };
        let (ready, running) = mpsc::channel();
        let mut refused = None;
        for (index, deques) in deques.into_iter().enumerate() {
            let home = *shared.plan.workers().get(index).unwrap_or(&0);
            let node = *shared.plan.homes().get(home).unwrap_or(&NodeId(0));
            let cpus = topology.cpus_serving(node).to_vec();
            let worker = Worker { shared: Arc::clone(&shared), index, home, deques };
            let (ready, alive) = (ready.clone(), alive.clone());
            let name = format!("vmz-n{}-w{index}", node.0);
            let spawned = thread::Builder::new()
                .name(name.chars().take(15).collect())
                .stack_size(WORKER_STACK)
                .spawn(move || {
                    settle_in(&cpus, node);
                    let _ = ready.send(());
                    drop(ready);
                    worker.run();
                    drop(alive);
                });
            match spawned {
                Ok(thread) => lock(&pool.threads).push(thread),
                Err(error) => {
                    refused = Some(error);
                    break;
                }
            }
        }
        drop((ready, alive));
        let started = running.iter().count();
        match refused {
            Some(source) if started == 0 => Err(BuildError::Spawn { asked, source }),
            Some(error) => {
                tracing::warn!(asked, started, %error, "the host refused more worker threads; going on with fewer");
                Ok(pool)
            }
            None => Ok(pool),
        }
    }

    /// How many workers run.
    pub(crate) fn workers(&self) -> usize {
        lock(&self.threads).len()
    }

    /// Queues one task a region. A job without bytes is over at once, and no worker is woken.
    pub(crate) fn submit(
        &self,
        work: Arc<dyn Work>,
        regions: Vec<WorkRegion>,
        terms: Terms,
    ) -> Result<Arc<JobCore>, RequestError> {
        self.check_process()?;
        let job = JobCore::new(work, regions, terms).map_err(RequestError::CompletionFd)?;
        {
            // Under the lock that `close` takes, so that a job is either refused or found by it.
            let mut jobs = lock(&self.jobs);
            if self.shared.closing.load(Ordering::Acquire) {
                return Err(RequestError::Closed);
            }
            jobs.retain(|known| known.strong_count() > 0);
            jobs.push(Arc::downgrade(&job));
        }
        for (index, region) in job.regions().iter().enumerate().filter(|(_, region)| region.len > 0) {
            let place = match region.node {
                Some(node) => self.shared.plan.place_for(node),
                None => self.turn.fetch_add(1, Ordering::Relaxed) % self.shared.plan.homes().len().max(1),
            };
            let extent = Extent { region: index as u32, start: 0, len: region.len };
            self.shared.send(place, Task { job: Arc::clone(&job), extent, believed: region.node });
        }
        Ok(job)
    }

    /// Whether the workers exist in this process.
    pub(crate) fn check_process(&self) -> Result<(), RequestError> {
        match std::process::id() {
            own if own == self.process => Ok(()),
            called_in => Err(RequestError::ForkedChild { built_in: self.process, called_in }),
        }
    }

    /// Stops every job and joins the workers. Returns within a bounded time: workers stuck in a page fault
    /// are reported and left alone, and so are jobs whose stores are stuck.
    pub(crate) fn close(&self) {
        if std::process::id() != self.process {
            // A forked child: these threads are not here, and whoever held a lock in the parent is not either.
            return;
        }
        let threads = std::mem::take(&mut *lock(&self.threads));
        let jobs: Vec<Arc<JobCore>> = {
            let jobs = lock(&self.jobs);
            if self.shared.closing.load(Ordering::Acquire) {
                return;
            }
            let jobs: Vec<Arc<JobCore>> = jobs.iter().filter_map(Weak::upgrade).collect();
            // Before the workers may give up what they hold: a job that ends by that knows why.
            jobs.iter().for_each(|job| job.stop(StopReason::ServiceClosed));
            self.shared.closing.store(true, Ordering::Release);
            jobs
        };
        self.shared.dormitories.iter().for_each(Dormitory::wake_all);
        if threads.iter().any(|thread| thread.thread().id() == thread::current().id()) {
            // A worker let go of memory that owned the service: it cannot wait for itself.
            tracing::warn!("the service is dropped by one of its workers; the workers end by themselves");
            return self.drain();
        }
        let all_left =
            lock(&self.leaving).recv_timeout(CLOSE_GRACE) == Err(mpsc::RecvTimeoutError::Disconnected);
        for thread in threads {
            let name = thread.thread().name().unwrap_or("worker").to_owned();
            if !all_left && !thread.is_finished() {
                tracing::warn!(
                    thread = name,
                    "a worker is stuck in a page fault; it is left behind and stores nothing after it"
                );
            } else if thread.join().is_err() {
                tracing::error!(thread = name, "a worker ended by a panic");
            }
        }
        self.drain();
        let deadline = Instant::now() + CLOSE_GRACE;
        for job in &jobs {
            // Ends it over the heads of stuck workers, if need be.
            if job.wait_until(Some(deadline)).is_none() {
                tracing::error!("a job's store is stuck in a page fault; the job ends when the fault does");
            }
        }
    }

    /// Gives up what is still queued, so that its jobs can end.
    fn drain(&self) {
        let queued = self.shared.injectors.iter().flatten().flat_map(|queue| drained(|| queue.steal()));
        let offered = self.shared.stealers.iter().flatten().flat_map(|deque| drained(|| deque.steal()));
        queued.chain(offered).for_each(|task| task.job.give_up(task.extent.len));
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.close();
    }
}

/// Everything that a queue holds.
fn drained(mut steal: impl FnMut() -> Steal<Task>) -> impl Iterator<Item = Task> {
    std::iter::from_fn(move || persist(&mut steal))
}

/// Takes from a queue, again while another thief is in the way.
fn persist(mut steal: impl FnMut() -> Steal<Task>) -> Option<Task> {
    loop {
        match steal() {
            Steal::Success(task) => return Some(task),
            Steal::Empty => return None,
            Steal::Retry => std::hint::spin_loop(),
        }
    }
}

/// Makes the calling thread a worker: on its node's CPUs as far as the process may use them, at normal
/// scheduling policy, deaf to signals that are the VMM's. A refusal is worth a warning, not a failure.
fn settle_in(cpus: &[u32], node: NodeId) {
    block_asynchronous_signals();
    if let Err(error) = use_normal_policy() {
        tracing::warn!(%error, "a worker keeps the low scheduling policy of the thread that built the service");
    }
    // The topology may be the caller's own: narrow what the operator gave us, never widen it.
    let allowed = allowed_cpus().unwrap_or_else(|_| cpus.to_vec());
    let own: Vec<u32> = cpus.iter().copied().filter(|cpu| allowed.contains(cpu)).collect();
    let pinned =
        if own.is_empty() { Err(io::ErrorKind::InvalidInput.into()) } else { pin_current_thread(&own) };
    if let Err(error) = pinned {
        tracing::warn!(%node, ?cpus, %error, "cannot pin a worker to its node; it runs where it may");
    }
}
