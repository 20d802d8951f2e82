//! Park against submit: no task is slept through, whoever is held up by what it took.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use loom::sync::mpsc;
use loom::thread::{self, JoinHandle};

use super::quiet::Quiet;
use super::sleep::{Dormitory, Shift};
use crate::sync::{AtomicBool, AtomicUsize, Instant, Ordering};

/// A queue in which a task is not there, there, or taken. It orders nothing that a real one might not.
#[derive(Debug)]
pub(crate) struct Tasks([AtomicUsize; 2]);

const THERE: usize = 1;
const TAKEN: usize = 2;

impl Tasks {
    pub(crate) fn new() -> Self {
        Self([AtomicUsize::new(0), AtomicUsize::new(0)])
    }

    pub(crate) fn push(&self, task: usize) {
        self.0[task].store(THERE, Ordering::Release);
    }

    pub(crate) fn take(&self, task: usize) -> bool {
        let (slot, done) = (&self.0[task], Ordering::AcqRel);
        slot.load(Ordering::Acquire) == THERE
            && slot.compare_exchange(THERE, TAKEN, done, Ordering::Relaxed).is_ok()
    }
}

/// Two nodes of a pool, with their tasks in one queue, each in a lane of its own.
#[derive(Debug)]
struct Nodes {
    tasks: Tasks,
    arrivals: [AtomicUsize; 2],
    dormitories: [Dormitory; 2],
    /// The last task may not be begun before that.
    open: Instant,
}

impl Nodes {
    fn new(open: Duration) -> Arc<Self> {
        let open = Instant::now() + open;
        let arrivals = [AtomicUsize::new(0), AtomicUsize::new(0)];
        let dormitories = [Dormitory::default(), Dormitory::default()];
        Arc::new(Self { tasks: Tasks::new(), arrivals, dormitories, open })
    }

    /// The way of a task that is near to the first node.
    fn submit(&self, task: usize) {
        self.queue(task);
        self.wake_near(0);
    }

    fn queue(&self, task: usize) {
        self.tasks.push(task);
        // Looked at by workers that remember.
        self.arrivals[task].fetch_add(1, Ordering::Release);
    }

    fn wake_near(&self, node: usize) {
        let _ = self.dormitories[node].wake_one() || self.dormitories[1 - node].wake_one();
    }
}

/// A worker that is held up for ever by the first task it takes.
struct Worker {
    nodes: Arc<Nodes>,
    home: usize,
    /// What it remembers of the lanes, where the model has so many steps to spare.
    quiet: Option<[Cell<Quiet>; 2]>,
    took: Cell<bool>,
    to_leave: Arc<AtomicBool>,
    /// Hears of each task that was begun.
    begun: Option<mpsc::Sender<usize>>,
}

impl Worker {
    fn at(nodes: &Arc<Nodes>, home: usize) -> Self {
        let nodes = Arc::clone(nodes);
        Self { nodes, home, quiet: None, took: Cell::new(false), to_leave: Arc::new(AtomicBool::new(false)), begun: None }
    }

    /// The loop of a worker without its leave.
    fn take_one(self) {
        while !self.took.get() {
            if let Some(task) = self.find().ok().or_else(|| self.rest()) {
                self.execute(task);
            }
        }
    }
}

impl Shift for Worker {
    type Task = usize;

    fn is_to_leave(&self) -> bool {
        self.to_leave.load(Ordering::Acquire)
    }

    fn find(&self) -> Result<usize, Option<Instant>> {
        for lane in 0..2 {
            if lane == 1 && Instant::now() < self.nodes.open {
                return Err(Some(self.nodes.open));
            }
            let mut look = || self.nodes.tasks.take(lane).then_some(lane);
            let found = match &self.quiet {
                Some(remembered) => {
                    let mut quiet = remembered[lane].get();
                    let arrivals = || self.nodes.arrivals[lane].load(Ordering::Acquire) as u64;
                    let found = quiet.look(arrivals, look);
                    remembered[lane].set(quiet);
                    found
                }
                None => look(),
            };
            if let Some(task) = found {
                return Ok(task);
            }
        }
        Err(None)
    }

    fn dormitory(&self) -> Option<&Dormitory> {
        self.nodes.dormitories.get(self.home)
    }

    fn pass_wake_on(&self) {
        self.nodes.wake_near(self.home);
    }

    fn execute(&self, task: usize) {
        self.took.set(true);
        if let Some(begun) = &self.begun {
            begun.send(task).unwrap();
        }
    }
}

/// One worker, one task: the two fences.
pub fn one_worker_and_one_task() {
    let nodes = Nodes::new(Duration::ZERO);
    let worker = Worker::at(&nodes, 0);
    let worker = thread::spawn(move || worker.take_one());
    nodes.submit(0);
    worker.join().unwrap();
}

/// The same by a worker that does not look twice where nothing has come.
pub fn one_worker_that_remembers() {
    let nodes = Nodes::new(Duration::ZERO);
    let worker = Worker { quiet: Some(Default::default()), ..Worker::at(&nodes, 0) };
    let worker = thread::spawn(move || worker.take_one());
    nodes.submit(0);
    worker.join().unwrap();
}

/// And two of them.
pub fn two_workers_that_remember() {
    let nodes = Nodes::new(Duration::ZERO);
    let workers = [0, 0].map(|home| {
        let worker = Worker { quiet: Some(Default::default()), ..Worker::at(&nodes, home) };
        thread::spawn(move || worker.take_one())
    });
    nodes.submit(0);
    nodes.submit(1);
    workers.into_iter().for_each(|worker| worker.join().unwrap());
}

/// Workers at these nodes, each of which takes one task.
fn two_workers(nodes: &Arc<Nodes>, homes: [usize; 2]) -> [JoinHandle<()>; 2] {
    homes.map(|home| {
        let worker = Worker::at(nodes, home);
        thread::spawn(move || worker.take_one())
    })
}

/// Each of two tasks finds a worker, although the other one is held up.
pub fn two_workers_and_two_tasks() {
    let nodes = Nodes::new(Duration::ZERO);
    let workers = two_workers(&nodes, [0, 0]);
    nodes.submit(0);
    nodes.submit(1);
    workers.into_iter().for_each(|worker| worker.join().unwrap());
}

/// The same, submitted by two threads.
pub fn two_submitters() {
    let nodes = Nodes::new(Duration::ZERO);
    let workers = two_workers(&nodes, [0, 0]);
    let other = Arc::clone(&nodes);
    let submitter = thread::spawn(move || other.submit(1));
    nodes.submit(0);
    workers.into_iter().for_each(|worker| worker.join().unwrap());
    submitter.join().unwrap();
}

/// Both tasks are near to one worker, and the other one sleeps elsewhere.
pub fn two_nodes() {
    let nodes = Nodes::new(Duration::ZERO);
    let workers = two_workers(&nodes, [0, 1]);
    nodes.submit(0);
    nodes.submit(1);
    workers.into_iter().for_each(|worker| worker.join().unwrap());
}

/// A task that nobody was woken for, since nobody slept, is found by the worker that is woken for another one.
pub fn a_task_found_instead_of_another() {
    let nodes = Nodes::new(Duration::ZERO);
    // It came when both had looked for the first time, and were not idle yet.
    nodes.queue(0);
    let workers = [0, 1].map(|home| {
        let worker = Worker::at(&nodes, home);
        thread::spawn(move || {
            if let Some(task) = worker.rest() {
                worker.execute(task);
            }
            worker.take_one();
        })
    });
    nodes.submit(1);
    workers.into_iter().for_each(|worker| worker.join().unwrap());
}

/// One of the tasks is background work that has to wait for its time: who naps until then can be woken before.
pub fn a_nap_until_the_rate_allows_it() {
    let nodes = Nodes::new(Duration::from_millis(5));
    let workers = two_workers(&nodes, [0, 1]);
    nodes.submit(1);
    nodes.submit(0);
    workers.into_iter().for_each(|worker| worker.join().unwrap());
}

/// A worker is told to leave while it is asleep, since somebody stands in for it: a task is done by either of them,
/// whoever is woken for it.
pub fn a_worker_that_was_replaced() {
    let nodes = Nodes::new(Duration::ZERO);
    let (begun, task) = mpsc::channel();
    let [replaced, stands_in] =
        [0, 0].map(|home| Worker { begun: Some(begun.clone()), ..Worker::at(&nodes, home) });
    let leave = [&replaced, &stands_in].map(|worker| Arc::clone(&worker.to_leave));
    let workers = [replaced, stands_in].map(|worker| thread::spawn(move || worker.work()));
    leave[0].store(true, Ordering::Release);
    nodes.submit(0);
    assert_eq!(task.recv().unwrap(), 0);
    leave[1].store(true, Ordering::Release);
    nodes.dormitories[0].wake_all();
    workers.into_iter().for_each(|worker| worker.join().unwrap());
}

/// A worker that sleeps is told to leave while the one that stands in for it goes to sleep: the other one does not
/// take the call away.
pub fn a_sleeper_that_is_told_to_leave() {
    let nodes = Nodes::new(Duration::ZERO);
    let workers = [0, 0].map(|home| Worker::at(&nodes, home));
    let leave = [0, 1].map(|worker| Arc::clone(&workers[worker].to_leave));
    let workers = workers.map(|worker| thread::spawn(move || worker.work()));
    for (leave, worker) in leave.into_iter().zip(workers) {
        leave.store(true, Ordering::Release);
        nodes.dormitories[0].wake_all();
        worker.join().unwrap();
    }
}
