//! One worker: finds a task, splits it, and takes its chunk from claim to settlement.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use crossbeam::deque::Worker as Deque;

use super::machine::{Grain, Origin, Place, Queues, Quiet};
use super::seats::Seat;
use super::shared::{Shared, persist};
use super::sleep::{Dormitory, Shift};
use super::{LANES, Task};
use crate::job::{Cause, Claim, Hand, Prepared, Priority};
use crate::topology::NodeId;

/// The deques of one worker, one for each priority; the owner takes from the near end, thieves from the far end.
pub(super) type Deques = [Deque<Task>; LANES];

/// Whoever works on chunks: a worker, or a caller's own thread.
pub(super) trait Hands {
    fn hand(&self, stolen: bool) -> Hand;

    /// Puts a task where these hands find it next.
    fn offer(&self, task: Task);

    /// Where a chunk that was believed on one node and found on another is to be done, if not here.
    fn elsewhere(&self, believed: Option<NodeId>, found: Option<NodeId>) -> Option<Place>;

    /// Queues a task at a place.
    fn send(&self, place: Place, task: Task);

    /// Makes a chunk ready; `None` if that is to be left to others.
    fn prepare(&self, claim: &mut Claim) -> Option<Result<Prepared, Cause>>;

    /// What these hands know of how long a chunk takes them.
    fn grain(&self) -> &Cell<Grain>;

    /// Takes one chunk from claim to settlement. What it takes to make it ready and to do it is learnt from; not
    /// what others take with the books of the job: if they are in each other's way there, shorter chunks put
    /// more of them there.
    fn work_on(&self, task: Task) {
        let Task { job, extent: chunk, believed, stolen } = task;
        let Some(mut claim) = job.claim(chunk, self.hand(stolen)) else { return };
        let prepared = match self.prepare(&mut claim) {
            Some(Ok(prepared)) => prepared,
            None => {
                claim.hand_back();
                return self.offer(Task { job, extent: chunk, believed, stolen });
            }
            Some(Err(cause)) => {
                let page = job.regions().get(chunk.region as usize).map_or(u64::MAX, |region| region.page);
                let (near, far) = chunk.halve(page);
                let Some(far) = far.filter(|_| claim.may_be_narrowed(&cause) && !job.ends_on(&cause)) else {
                    return claim.fail(cause);
                };
                claim.hand_back();
                // Queued, not called: should a panic end this look, the far half is still accounted for.
                self.offer(Task { job: Arc::clone(&job), extent: far, believed, stolen });
                return self.work_on(Task { job, extent: near, believed, stolen });
            }
        };
        let found = prepared.node.filter(|_| !prepared.made_present);
        if let Some(place) = self.elsewhere(believed, found) {
            // First let go of, then queued: an extent has one holder at a time.
            claim.hand_back();
            return self.send(place, Task { job, extent: chunk, believed: found, stolen });
        }
        if !claim.confirm() {
            return claim.hand_back();
        }
        let performed = claim.perform(&prepared);
        let mut grain = self.grain().get();
        grain.learn(chunk.len, claim.took());
        self.grain().set(grain);
        match performed {
            Ok(pieces) => claim.settle(pieces, prepared.node),
            Err(cause) => claim.fail(cause),
        }
    }
}

/// A worker thread's own.
pub(super) struct Worker {
    pub(super) shared: Arc<Shared>,
    pub(super) index: usize,
    pub(super) home: Place,
    pub(super) deques: Deques,
    pub(super) grain: Cell<Grain>,
    /// By lane.
    pub(super) quiet: [Cell<Quiet>; LANES],
    pub(super) seat: RefCell<Seat>,
}

impl Worker {
    /// Works until the pool closes or somebody else has taken over; its deques are empty then.
    pub(super) fn run(&self) {
        // Not when the first job has come: the cpuset may be smaller by then.
        self.seat.borrow_mut().bounds();
        self.work();
        self.stand_up();
        for task in self.deques.iter().flat_map(|deque| std::iter::from_fn(|| deque.pop())) {
            self.shared.taken(self.home, &task);
            // Whoever has taken over finds it there; nobody does where the pool closes.
            self.shared.send(self.home, task);
        }
    }

    fn stand_up(&self) {
        self.shared.seats.stand_up(self.index, &mut self.seat.borrow_mut());
    }

    /// What comes next: by priority, then by distance. If there is nothing: when to look again by oneself.
    fn look(&self) -> Result<(Task, Origin), Option<Instant>> {
        for &priority in Priority::ALL {
            if priority == Priority::Background {
                // Asked once: who asked again for the time would be told "now" if it has come meanwhile, and
                // sleep on what it did not look at.
                self.shared.background_may_go()?;
            }
            if let Some(found) = self.find_in(priority as usize) {
                return Ok(found);
            }
        }
        Err(None)
    }

    fn find_in(&self, lane: usize) -> Option<(Task, Origin)> {
        let remembered = self.quiet.get(lane)?;
        let mut quiet = remembered.get();
        let found = quiet.look(
            || self.shared.arrivals(lane),
            || self.shared.plan.next(self.index, &mut LaneOf { worker: self, lane }),
        );
        remembered.set(quiet);
        found
    }
}

impl Shift for Worker {
    type Task = (Task, Origin);

    fn is_to_leave(&self) -> bool {
        self.shared.register.is_closed() || self.shared.is_replaced(self.index)
    }

    fn find(&self) -> Result<(Task, Origin), Option<Instant>> {
        self.look().inspect_err(|_| self.stand_up())
    }

    fn dormitory(&self) -> Option<&Dormitory> {
        self.shared.dormitories.get(self.home)
    }

    fn pass_wake_on(&self) {
        self.shared.wake_near(self.home);
    }

    fn execute(&self, (task, origin): (Task, Origin)) {
        let Task { job, extent, believed, stolen } = task;
        if !job.is_running() {
            return;
        }
        let stolen = stolen || matches!(origin, Origin::Robbed(_) | Origin::Behind(_));
        let background = job.priority() == Priority::Background;
        let limit = if background { self.shared.longest_background_chunk() } else { None };
        let grain = self.grain.get().next(limit).max(job.least_chunk());
        let chunk = extent.split_to_cell(grain, |far| {
            let task = Task { job: Arc::clone(&job), extent: far, believed, stolen };
            match origin {
                Origin::Behind(place) => self.send(place, task),
                _ => self.offer(task),
            }
        });
        if background {
            self.shared.pay_for(chunk.len);
        }
        self.shared.begin_a_turn(self.index);
        run_caught(|| self.work_on(Task { job, extent: chunk, believed, stolen }));
        self.shared.end_a_turn(self.index);
    }
}

impl Hands for Worker {
    fn hand(&self, stolen: bool) -> Hand {
        let node = self.shared.plan.homes().get(self.home).copied();
        Hand { worker: self.index as u32, node, stolen }
    }

    /// Where a thief finds it last; wakes a helper.
    fn offer(&self, task: Task) {
        let lane = task.job.priority() as usize;
        if let Some(deque) = self.deques.get(lane) {
            self.shared.queue(self.home, task, |task| deque.push(task));
        }
    }

    fn elsewhere(&self, believed: Option<NodeId>, found: Option<NodeId>) -> Option<Place> {
        self.shared.plan.belongs_elsewhere(self.home, believed, found)
    }

    fn grain(&self) -> &Cell<Grain> {
        &self.grain
    }

    fn send(&self, place: Place, task: Task) {
        self.shared.send(place, task);
    }

    /// It moves when the chunk is claimed: should it wait for a CPU long, it is seen to be stuck with it.
    fn prepare(&self, claim: &mut Claim) -> Option<Result<Prepared, Cause>> {
        self.shared.seats.settle(self.index, &mut self.seat.borrow_mut());
        Some(claim.prepare())
    }
}

/// A caller's own thread: does a small job, or every job of a service without workers, from end to end.
pub(super) struct Caller {
    node: Option<NodeId>,
    tasks: RefCell<Vec<Task>>,
    /// Whether there are workers for what the caller would have to wait for.
    may_leave: bool,
    has_left: Cell<bool>,
    grain: Cell<Grain>,
}

impl Caller {
    /// Works on the tasks (the last one first) until none is left; or until a chunk would have to be waited for,
    /// if it `may_leave` that: what is left then is returned. Chunks of `most` bytes at most.
    pub(super) fn work(node: Option<NodeId>, tasks: Vec<Task>, most: u64, may_leave: bool) -> Vec<Task> {
        let caller = Self {
            node,
            tasks: RefCell::new(tasks),
            may_leave,
            has_left: Cell::new(false),
            grain: Cell::new(Grain::new(most)),
        };
        while !caller.has_left.get() {
            let task = caller.tasks.borrow_mut().pop();
            let Some(Task { job, extent, believed, stolen }) = task else { break };
            if !job.is_running() {
                continue;
            }
            let grain = caller.grain.get().next(None).max(job.least_chunk());
            let chunk = extent.split_to_cell(grain, |far| {
                caller.offer(Task { job: Arc::clone(&job), extent: far, believed, stolen });
            });
            run_caught(|| caller.work_on(Task { job, extent: chunk, believed, stolen }));
        }
        caller.tasks.into_inner()
    }
}

impl Hands for Caller {
    fn hand(&self, stolen: bool) -> Hand {
        Hand { worker: Hand::CALLER, node: self.node, stolen }
    }

    fn offer(&self, task: Task) {
        self.tasks.borrow_mut().push(task);
    }

    fn elsewhere(&self, _believed: Option<NodeId>, _found: Option<NodeId>) -> Option<Place> {
        None
    }

    fn send(&self, _place: Place, task: Task) {
        self.offer(task);
    }

    fn grain(&self) -> &Cell<Grain> {
        &self.grain
    }

    fn prepare(&self, claim: &mut Claim) -> Option<Result<Prepared, Cause>> {
        if !self.may_leave {
            return Some(claim.prepare());
        }
        let prepared = claim.prepare_at_once();
        self.has_left.set(prepared.is_none());
        prepared
    }
}

/// A panic is caught where it cannot tear anything: the claim it drops has failed the job, and nothing else is
/// shared mutably. (With `panic = "abort"` the process is gone, and with it every statement that a page is zero.)
fn run_caught(work: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(work)).is_err() {
        tracing::error!("a worker panicked; its job failed, the pool goes on");
    }
}

/// The queues of one priority, as the machine wants to see them.
pub(super) struct LaneOf<'w> {
    pub(super) worker: &'w Worker,
    pub(super) lane: usize,
}

impl LaneOf<'_> {
    fn taken(&self, place: Place, task: Task) -> Task {
        self.worker.shared.taken(place, &task);
        task
    }
}

impl Queues for LaneOf<'_> {
    type Task = Task;

    fn pop_own(&mut self) -> Option<Task> {
        let task = self.worker.deques.get(self.lane)?.pop()?;
        Some(self.taken(self.worker.home, task))
    }

    fn take_from_node(&mut self, node: Place) -> Option<Task> {
        let injector = self.worker.shared.injectors.get(node)?.get(self.lane)?;
        Some(self.taken(node, persist(|| injector.steal())?))
    }

    fn rob(&mut self, victim: usize) -> Option<Task> {
        let stealer = self.worker.shared.stealers.get(victim)?.get(self.lane)?;
        let task = persist(|| stealer.steal())?;
        let place = self.worker.shared.plan.workers().get(victim).copied();
        Some(self.taken(place.unwrap_or(self.worker.home), task))
    }

    fn has_own(&self) -> bool {
        self.worker.deques.get(self.lane).is_some_and(|deque| !deque.is_empty())
    }

    fn waiting(&self, place: Place) -> u64 {
        self.worker.shared.waiting(place, self.lane)
    }
}
