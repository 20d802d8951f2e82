//! Park against submit: no task is slept through, whoever is held up by what it took.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use loom::sync::mpsc;
use loom::thread::{self, JoinHandle};

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

/// Two nodes of a pool, with their tasks in one queue.
#[derive(Debug)]
struct Nodes {
    tasks: Tasks,
    dormitories: [Dormitory; 2],
    /// The last task may not be begun before that.
    open: Instant,
}

impl Nodes {
    fn new(open: Duration) -> Arc<Self> {
        let open = Instant::now() + open;
        Arc::new(Self { tasks: Tasks::new(), dormitories: [Dormitory::default(), Dormitory::default()], open })
    }

    /// The way of a task that is near to the first node.
    fn submit(&self, task: usize) {
        self.tasks.push(task);
        self.wake_near(0);
    }

    fn wake_near(&self, node: usize) {
        let _ = self.dormitories[node].wake_one() || self.dormitories[1 - node].wake_one();
    }
}

/// A worker that is held up for ever by the first task it takes.
struct Worker {
    nodes: Arc<Nodes>,
    home: usize,
    took: Cell<bool>,
    to_leave: Arc<AtomicBool>,
    /// Hears of each task that was begun.
    begun: Option<mpsc::Sender<usize>>,
}

impl Worker {
    fn at(nodes: &Arc<Nodes>, home: usize) -> Self {
        let nodes = Arc::clone(nodes);
        Self { nodes, home, took: Cell::new(false), to_leave: Arc::new(AtomicBool::new(false)), begun: None }
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
        if self.nodes.tasks.take(0) {
            return Ok(0);
        }
        if Instant::now() < self.nodes.open {
            return Err(Some(self.nodes.open));
        }
        if self.nodes.tasks.take(1) { Ok(1) } else { Err(None) }
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
    nodes.tasks.push(0);
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
