//! The queues, as `src/pool/worker.rs` shows them to the plan.

use std::cell::Cell;
use std::collections::VecDeque;

use vm_zeroing::NodeId;

use crate::extent::Extent;
use crate::machine::{Place, Plan, Queues};

/// An extent on its way to a worker.
#[derive(Debug, Clone, Copy)]
pub struct Task {
    pub extent: Extent,
    pub believed: Option<NodeId>,
}

/// The queues of one priority.
#[derive(Debug, Clone)]
pub struct Lane {
    pub injectors: Vec<VecDeque<Task>>,
    pub deques: Vec<VecDeque<Task>>,
    /// How many tasks have come to each place, and how many bytes wait there.
    pub arrivals: Vec<u64>,
    pub waiting: Vec<u64>,
}

impl Lane {
    pub fn new(plan: &Plan) -> Self {
        let places = plan.homes().len();
        Self {
            injectors: vec![VecDeque::new(); places],
            deques: vec![VecDeque::new(); plan.workers().len()],
            arrivals: vec![0; places],
            waiting: vec![0; places],
        }
    }

    /// Queues a task at a place: in its queue, or in the deque of one of its workers.
    pub fn queue(&mut self, place: Place, worker: Option<usize>, task: Task) {
        self.waiting[place] += task.extent.len;
        match worker {
            Some(worker) => self.deques[worker].push_back(task),
            None => self.injectors[place].push_back(task),
        }
        self.arrivals[place] += 1;
    }
}

/// A lane as one worker sees it; counts its looks.
pub struct LaneOf<'l> {
    pub lane: &'l mut Lane,
    pub plan: &'l Plan,
    pub own: usize,
    pub looks: &'l Cell<usize>,
}

impl LaneOf<'_> {
    fn took(&mut self, place: Place, task: Option<Task>) -> Option<Task> {
        self.lane.waiting[place] -= task?.extent.len;
        task
    }

    fn count(&self) {
        self.looks.set(self.looks.get() + 1);
    }
}

impl Queues for LaneOf<'_> {
    type Task = Task;

    fn pop_own(&mut self) -> Option<Task> {
        self.count();
        let task = self.lane.deques[self.own].pop_back();
        self.took(self.plan.workers()[self.own], task)
    }

    fn take_from_node(&mut self, node: Place) -> Option<Task> {
        self.count();
        let task = self.lane.injectors[node].pop_front();
        self.took(node, task)
    }

    fn rob(&mut self, victim: usize) -> Option<Task> {
        self.count();
        let task = self.lane.deques[victim].pop_front();
        self.took(self.plan.workers()[victim], task)
    }

    fn has_own(&self) -> bool {
        !self.lane.deques[self.own].is_empty()
    }

    fn waiting(&self, place: Place) -> u64 {
        self.count();
        self.lane.waiting[place]
    }
}
