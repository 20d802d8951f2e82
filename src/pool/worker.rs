//! One worker: finds a task, splits it, and takes its chunk from claim to settlement.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crossbeam::deque::Worker as Deque;

use super::machine::{Place, Queues};
use super::sleep::Rested;
use super::{CHUNK, LANES, Shared, Task, persist};
use crate::extent::Extent;
use crate::job::{JobCore, locality};
use crate::topology::NodeId;

pub(crate) struct Worker {
    pub(crate) shared: Arc<Shared>,
    pub(crate) index: usize,
    pub(crate) home: Place,
    /// A deque for each lane; the owner takes from the near end, thieves from the far end.
    pub(crate) deques: [Deque<Task>; LANES],
}

impl Worker {
    /// Works until the pool closes; then gives up what it still holds.
    pub(crate) fn run(self) {
        while !self.shared.closing.load(Ordering::Acquire) {
            let task = self.find().or_else(|| self.rest());
            if let Some(task) = task {
                self.execute(task);
            }
        }
        for deque in &self.deques {
            while let Some(task) = deque.pop() {
                task.job.give_up(task.extent.len);
            }
        }
    }

    fn rest(&self) -> Option<Task> {
        let dormitory = self.shared.dormitories.get(self.home)?;
        let rested = dormitory.sleep_unless(|| {
            let closing = self.shared.closing.load(Ordering::Acquire);
            // `Some` keeps the worker up; an empty answer of a closing pool ends the loop of `run`.
            if closing { Some(None) } else { self.find().map(Some) }
        });
        let Rested::Found { what: task, owes_a_wake } = rested else { return None };
        if owes_a_wake {
            self.shared.wake_near(self.home);
        }
        task
    }

    fn find(&self) -> Option<Task> {
        (0..LANES).find_map(|lane| self.shared.plan.next(self.index, &mut LaneOf { worker: self, lane }))
    }

    fn execute(&self, task: Task) {
        let Task { job, extent, believed } = task;
        if !job.is_running() {
            return job.give_up(extent.len);
        }
        let chunk = extent.split_to_cell(CHUNK, |far| {
            self.offer(Task { job: Arc::clone(&job), extent: far, believed });
        });
        // A panic is caught where it cannot tear anything: the claim it drops has failed the job, and
        // nothing else is shared mutably. (With `panic = "abort"` the process is gone, and with it
        // every statement that a page is zero.)
        if catch_unwind(AssertUnwindSafe(|| self.work_on(&job, chunk, believed))).is_err() {
            tracing::error!(worker = self.index, "a worker panicked; its job failed, the pool goes on");
        }
    }

    /// Puts a task where this worker finds it next and a thief finds it last, and wakes a helper.
    fn offer(&self, task: Task) {
        if let Some(deque) = self.deques.get(task.job.lane() as usize) {
            deque.push(task);
            self.shared.wake_near(self.home);
        }
    }

    fn work_on(&self, job: &Arc<JobCore>, chunk: Extent, believed: Option<NodeId>) {
        let Some(claim) = job.claim(chunk) else { return };
        let prepared = match claim.prepare() {
            Ok(prepared) => prepared,
            Err(cause) => {
                let page = job.regions().get(chunk.region as usize).map_or(CHUNK, |region| region.page);
                let (near, far) = chunk.halve(page);
                let Some(far) = far.filter(|_| claim.may_be_narrowed(&cause) && !job.ends_on(&cause)) else {
                    return claim.fail(cause);
                };
                claim.hand_back();
                // Queued, not called: should a panic end this look, the far half is still accounted for.
                self.offer(Task { job: Arc::clone(job), extent: far, believed });
                return self.work_on(job, near, believed);
            }
        };
        let found = prepared.node.filter(|_| !prepared.made_present);
        if let Some(place) = self.shared.plan.belongs_elsewhere(self.home, believed, found) {
            claim.hand_back();
            return self.shared.send(place, Task { job: Arc::clone(job), extent: chunk, believed: found });
        }
        if !claim.confirm() {
            return claim.abandon();
        }
        let home = self.shared.plan.homes().get(self.home);
        let local = home.and_then(|home| locality(prepared.node, *home));
        match claim.perform(&prepared) {
            Ok(pieces) => claim.settle(pieces, local),
            Err(cause) => claim.fail(cause),
        }
    }
}

/// The queues of one lane, as the machine wants to see them.
struct LaneOf<'w> {
    worker: &'w Worker,
    lane: usize,
}

impl Queues for LaneOf<'_> {
    type Task = Task;

    fn pop_own(&mut self) -> Option<Task> {
        self.worker.deques.get(self.lane)?.pop()
    }

    fn take_from_node(&mut self, node: Place) -> Option<Task> {
        let injector = self.worker.shared.injectors.get(node)?.get(self.lane)?;
        persist(|| injector.steal())
    }

    fn rob(&mut self, victim: usize) -> Option<Task> {
        let stealer = self.worker.shared.stealers.get(victim)?.get(self.lane)?;
        persist(|| stealer.steal())
    }
}
