//! What the workers share: queues, beds, the plan, and the rate of background work.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use crossbeam::deque::{Injector, Steal, Stealer};
use crossbeam::utils::CachePadded;

use super::machine::{Place, Plan, Throttle};
use super::register::Register;
use super::seats::Seats;
use super::sleep::Dormitory;
use super::{LANES, Task};
use crate::job::JobCore;
use crate::sync::lock;

/// What has come to a place, and what of it is there.
#[derive(Debug, Default)]
struct Counts {
    /// Tasks that were queued there; see `Quiet`.
    arrivals: AtomicU64,
    /// Bytes in the node's queue and in the deques of its workers; read late, a worker is lent late.
    waiting: AtomicU64,
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) plan: Plan,
    /// A queue for each place and priority.
    pub(super) injectors: Vec<[Injector<Task>; LANES]>,
    /// The far ends of the deques of each number a worker may have: those that began, then their stand-ins.
    pub(super) stealers: Vec<[Stealer<Task>; LANES]>,
    /// By place and lane.
    counts: Vec<[CachePadded<Counts>; LANES]>,
    pub(super) dormitories: Vec<Dormitory>,
    /// Who was stuck and is to leave when it comes back, by the worker's number.
    replaced: Vec<AtomicBool>,
    /// By the worker's number: twice the chunks that it is done with, and one more while it has one.
    turns: Vec<CachePadded<AtomicU64>>,
    pub(super) seats: Seats,
    pub(super) register: Register<JobCore>,
    throttle: Mutex<Throttle>,
    /// Whether there is a rate at all, to be read without the lock. Whoever reads it late does one more chunk at the
    /// old rate, or takes the lock to learn that there is none.
    throttled: AtomicBool,
    began: Instant,
}

impl Shared {
    pub(super) fn new(
        plan: Plan,
        stealers: Vec<[Stealer<Task>; LANES]>,
        seats: Seats,
        rate: Option<u64>,
    ) -> Self {
        let places = plan.homes().len();
        Self {
            injectors: (0..places).map(|_| std::array::from_fn(|_| Injector::new())).collect(),
            counts: (0..places).map(|_| Default::default()).collect(),
            dormitories: (0..places).map(|_| Dormitory::default()).collect(),
            replaced: stealers.iter().map(|_| AtomicBool::new(false)).collect(),
            turns: stealers.iter().map(|_| CachePadded::default()).collect(),
            stealers,
            plan,
            seats,
            register: Register::default(),
            throttle: Mutex::new(Throttle::new(rate)),
            throttled: AtomicBool::new(rate.is_some()),
            began: Instant::now(),
        }
    }

    /// Queues a task at a place and wakes somebody for it.
    pub(super) fn send(&self, place: Place, task: Task) {
        let lane = task.job.priority() as usize;
        if let Some(injector) = self.injectors.get(place).and_then(|lanes| lanes.get(lane)) {
            self.queue(place, task, |task| injector.push(task));
        }
    }

    /// Lets `push` queue a task at a place, in the node's queue or a deque; counts it, and wakes somebody for it.
    pub(super) fn queue(&self, place: Place, task: Task, push: impl FnOnce(Task)) {
        let counts = self.counts_of(place, task.job.priority() as usize);
        if let Some(counts) = counts {
            // First, so that nobody takes it away before it is there.
            counts.waiting.fetch_add(task.extent.len, Ordering::Relaxed);
        }
        push(task);
        if let Some(counts) = counts {
            // Who reads this count finds the task. The fence before the look for sleepers comes after it.
            counts.arrivals.fetch_add(1, Ordering::Release);
        }
        self.wake_near(place);
    }

    /// Counts a task that was taken from what waited at a place.
    pub(super) fn taken(&self, place: Place, task: &Task) {
        if let Some(counts) = self.counts_of(place, task.job.priority() as usize) {
            counts.waiting.fetch_sub(task.extent.len, Ordering::Relaxed);
        }
    }

    /// Bytes that wait at a place.
    pub(super) fn waiting(&self, place: Place, lane: usize) -> u64 {
        self.counts_of(place, lane).map_or(0, |counts| counts.waiting.load(Ordering::Relaxed))
    }

    fn counts_of(&self, place: Place, lane: usize) -> Option<&Counts> {
        Some(&**self.counts.get(place)?.get(lane)?)
    }

    /// How many tasks have come to a lane. Each count only grows: two equal sums are of equal counts.
    pub(super) fn arrivals(&self, lane: usize) -> u64 {
        let counts = self.counts.iter().filter_map(|lanes| lanes.get(lane));
        counts.map(|counts| counts.arrivals.load(Ordering::Acquire)).fold(0, u64::wrapping_add)
    }

    /// Wakes the nearest sleeper, if anybody sleeps.
    pub(super) fn wake_near(&self, place: Place) {
        let near = self.plan.partners(place).iter().filter_map(|place| self.dormitories.get(*place));
        for dormitory in near {
            if dormitory.wake_one() {
                return;
            }
        }
    }

    pub(super) fn wake_all(&self) {
        self.dormitories.iter().for_each(Dormitory::wake_all);
    }

    /// Wakes everybody of one place, to see who is to leave.
    pub(super) fn wake_place(&self, place: Place) {
        self.dormitories.get(place).into_iter().for_each(Dormitory::wake_all);
    }

    pub(super) fn is_replaced(&self, worker: usize) -> bool {
        self.replaced.get(worker).is_some_and(|replaced| replaced.load(Ordering::Acquire))
    }

    pub(super) fn begin_a_turn(&self, worker: usize) {
        if let Some(turns) = self.turns.get(worker) {
            turns.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn end_a_turn(&self, worker: usize) {
        self.begin_a_turn(worker);
    }

    /// Which turn of a worker this is; `None` between two.
    pub(super) fn turn(&self, worker: usize) -> Option<u64> {
        let turns = self.turns.get(worker)?.load(Ordering::Relaxed);
        (turns % 2 == 1).then_some(turns)
    }

    /// Says whether a worker is to leave when it comes back. Called under the lock of the bench.
    pub(super) fn set_replaced(&self, worker: usize, replaced: bool) {
        if let Some(known) = self.replaced.get(worker) {
            known.store(replaced, Ordering::Release);
        }
    }

    pub(super) fn background_rate(&self) -> Option<u64> {
        lock(&self.throttle).rate()
    }

    pub(super) fn set_background_rate(&self, rate: Option<u64>) {
        {
            // The flag is changed under the lock, so that it tells of the rate that was set last.
            let mut throttle = lock(&self.throttle);
            throttle.set_rate(rate, self.began.elapsed());
            self.throttled.store(rate.is_some(), Ordering::Release);
        }
        self.wake_all();
    }

    /// Whether a background chunk may begin; if not, when, unless that is up to whoever changes the rate.
    pub(super) fn background_may_go(&self) -> Result<(), Option<Instant>> {
        if !self.throttled.load(Ordering::Acquire) {
            return Ok(());
        }
        let asked = lock(&self.throttle).ask(self.began.elapsed());
        asked.map_err(|until| self.began.checked_add(until?))
    }

    pub(super) fn longest_background_chunk(&self) -> Option<u64> {
        if self.throttled.load(Ordering::Acquire) { lock(&self.throttle).longest_chunk() } else { None }
    }

    pub(super) fn pay_for(&self, bytes: u64) {
        if self.throttled.load(Ordering::Acquire) {
            lock(&self.throttle).pay(bytes, self.began.elapsed());
        }
    }

    /// Lets go of what is still queued, and so of the jobs.
    pub(super) fn drain(&self) {
        self.injectors.iter().flatten().for_each(|queue| while persist(|| queue.steal()).is_some() {});
        self.stealers.iter().flatten().for_each(|deque| while persist(|| deque.steal()).is_some() {});
    }
}

/// Takes from a queue, again while another thief is in the way.
pub(super) fn persist(mut steal: impl FnMut() -> Steal<Task>) -> Option<Task> {
    loop {
        match steal() {
            Steal::Success(task) => return Some(task),
            Steal::Empty => return None,
            Steal::Retry => std::hint::spin_loop(),
        }
    }
}
