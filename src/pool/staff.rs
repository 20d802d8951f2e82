//! Who does what: threads become workers, a watchdog, and stand-ins for workers that are stuck.
//!
//! Each number that a worker began with has a second one beside it, for whoever stands in. Of the numbers of a
//! node, as many as began are always [`Standing::Engaged`] or [`Standing::Unrelieved`]: so many workers there are
//! when those that are stuck have come back, in whatever order they do.

use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;

use super::crew::{Crew, NoThread, Post, Recruit, ThreadInfo};
use super::machine::Grain;
use super::shared::Shared;
use super::watchdog::{Stuck, Watchdog};
use super::worker::{Deques, Worker};
use crate::error::BuildError;
use crate::sync::lock;
use crate::topology::Topology;

/// The threads that were given a duty.
pub(super) type Roster = Arc<Mutex<Vec<(ThreadInfo, JoinHandle<()>)>>>;

/// What a worker thread is given to do, and what it holds as long as it runs.
pub(super) type Duty = (Worker, Bench, mpsc::Sender<()>);

/// Who works under which number, or what waits for whoever will.
pub(super) type Bench = Arc<Mutex<Vec<Standing>>>;

#[derive(Debug)]
pub(super) enum Standing {
    /// No thread has this number.
    Free(Deques),
    Engaged,
    /// Was stuck when there was nobody to stand in for it. It may have come back since.
    Unrelieved,
    /// Somebody stands in for it: it is to leave when it comes back.
    Relieved,
}

impl Standing {
    /// Whether it is one of the workers that the pool is to have.
    fn counts(&self) -> bool {
        matches!(self, Standing::Engaged | Standing::Unrelieved)
    }

    /// Engages whoever asks, if nobody has the number.
    fn take(&mut self) -> Option<Deques> {
        match std::mem::replace(self, Standing::Engaged) {
            Standing::Free(deques) => Some(deques),
            other => {
                *self = other;
                None
            }
        }
    }
}

/// The life of a worker thread.
pub(super) fn duty((worker, bench, alive): Duty) {
    let mut on_duty = Some(worker);
    while let Some(worker) = on_duty.take() {
        worker.run();
        on_duty = relieve(worker, &bench);
    }
    drop(alive);
}

/// Lets a worker go that was told to; unless another one of its node is stuck with nobody standing in for it:
/// then it stays in its stead.
fn relieve(worker: Worker, bench: &Bench) -> Option<Worker> {
    let shared = Arc::clone(&worker.shared);
    let (own, home) = (worker.index, worker.home);
    let mut bench = lock(bench);
    let of_node = |number: usize| shared.plan.workers().get(number) == Some(&home);
    let is_unrelieved = |(number, standing): &(usize, &mut Standing)| {
        matches!(standing, Standing::Unrelieved) && of_node(*number)
    };
    let unrelieved = bench.iter_mut().enumerate().find(is_unrelieved);
    let stays = match unrelieved {
        Some((other, standing)) if !shared.register.is_closed() => {
            *standing = Standing::Relieved;
            shared.set_replaced(other, true);
            true
        }
        _ => false,
    };
    shared.set_replaced(own, false);
    let standing = bench.get_mut(own)?;
    if stays {
        *standing = Standing::Engaged;
        drop(bench);
        // The other one may be back and asleep.
        shared.wake_place(home);
        return Some(worker);
    }
    *standing = Standing::Free(worker.deques);
    None
}

/// Gives threads their duties.
#[derive(Clone)]
pub(super) struct Staff {
    pub(super) shared: Arc<Shared>,
    pub(super) bench: Bench,
    pub(super) threads: Roster,
    pub(super) chunk: u64,
    pub(super) alive: mpsc::Sender<()>,
}

impl Staff {
    /// Makes a thread the worker of a number that is free.
    pub(super) fn engage(&self, recruit: Recruit<Duty>, number: usize) {
        let deques = lock(&self.bench).get_mut(number).and_then(Standing::take);
        if let Some(deques) = deques {
            self.engage_with(recruit, number, deques);
        }
    }

    fn engage_with(&self, recruit: Recruit<Duty>, number: usize, deques: Deques) {
        let home = self.shared.plan.workers().get(number).copied().unwrap_or_default();
        let grain = std::cell::Cell::new(Grain::new(self.chunk));
        let (shared, quiet, seat) = (Arc::clone(&self.shared), Default::default(), Default::default());
        let worker = Worker { shared, index: number, home, deques, grain, quiet, seat };
        let engaged = recruit.begin((worker, Arc::clone(&self.bench), self.alive.clone()));
        let mut threads = lock(&self.threads);
        for (_, gone) in threads.extract_if(.., |(_, thread)| thread.is_finished()) {
            let _ = gone.join();
        }
        threads.push(engaged);
    }

    /// Starts the thread that looks after deadlines and stuck workers; a host that refuses it goes without.
    pub(super) fn set_watchdog(
        self,
        crew: &Crew,
        topology: &Topology,
    ) -> Result<Option<Arc<Watchdog>>, BuildError> {
        let watchdog = Arc::new(Watchdog::default());
        let (crew_of_watchdog, topology) = (crew.clone(), topology.clone());
        let keep = move |(watchdog, staff): (Arc<Watchdog>, Staff)| {
            watchdog.keep(|stuck| staff.replace(stuck, &crew_of_watchdog, &topology));
        };
        let post = Post::watchdog();
        match crew.start_one(post.clone(), keep) {
            Ok(recruit) => {
                let threads = Arc::clone(&self.threads);
                let engaged = recruit.begin((Arc::clone(&watchdog), self));
                lock(&threads).push(engaged);
                Ok(Some(watchdog))
            }
            Err(NoThread::Start(source)) => Err(BuildError::ThreadStart { thread: post.name(), source }),
            Err(NoThread::Refused(error)) => {
                tracing::warn!(%error, "the host refused the watchdog's thread; stuck workers are seen only by those who wait");
                Ok(None)
            }
        }
    }

    /// Starts a stand-in for a worker that a job ended without, unless it has come back. The worker leaves when it
    /// does; if it has just done, that changes nothing but who works. If the host has no thread for it now: which
    /// turn the worker is stuck in.
    fn replace(&self, Stuck { worker, refused_in }: Stuck, crew: &Crew, topology: &Topology) -> Option<u64> {
        if self.shared.register.is_closed() {
            return None;
        }
        let stuck = worker as usize;
        let homes = self.shared.plan.workers();
        let home = *homes.get(stuck)?;
        let node = *self.shared.plan.homes().get(home)?;
        let turn = self.shared.turn(stuck).filter(|turn| refused_in.is_none_or(|refused| refused == *turn));
        let (number, deques) = {
            let mut bench = lock(&self.bench);
            if !bench.get(stuck).is_some_and(Standing::counts) {
                return None;
            }
            if turn.is_none() {
                self.stand(&mut bench, stuck, Standing::Engaged);
                return None;
            }
            let mut same_home =
                bench.iter_mut().enumerate().filter(|(number, _)| homes.get(*number) == Some(&home));
            let Some(free) = same_home.find_map(|(number, standing)| Some((number, standing.take()?))) else {
                tracing::warn!(worker = stuck, "a worker is stuck in a page fault, and so is its stand-in");
                self.stand(&mut bench, stuck, Standing::Unrelieved);
                return None;
            };
            free
        };
        let started = crew.start_one(Post::worker(number, node, topology), duty);
        let mut bench = lock(&self.bench);
        // Another one that came back may have taken its place meanwhile.
        let is_wanted = bench.get(stuck).is_some_and(Standing::counts);
        let is_refused = is_wanted && matches!(started, Err(NoThread::Refused(_)));
        match started {
            Ok(recruit) if is_wanted => {
                self.stand(&mut bench, stuck, Standing::Relieved);
                drop(bench);
                tracing::warn!(
                    worker = stuck,
                    stand_in = number,
                    "a worker is stuck in a page fault; another one stands in"
                );
                self.shared.seats.vacate(stuck);
                self.engage_with(recruit, number, deques);
                // Perhaps it sleeps by now.
                self.shared.wake_place(home);
            }
            Ok(recruit) => {
                self.stand(&mut bench, number, Standing::Free(deques));
                drop(bench);
                recruit.dismiss();
            }
            Err(NoThread::Refused(error) | NoThread::Start(error)) => {
                self.stand(&mut bench, number, Standing::Free(deques));
                if is_wanted {
                    self.stand(&mut bench, stuck, Standing::Unrelieved);
                }
                drop(bench);
                if refused_in.is_none() {
                    tracing::warn!(worker = stuck, %error, "a worker is stuck in a page fault, and no stand-in could be started");
                }
            }
        }
        turn.filter(|_| is_refused)
    }

    fn stand(&self, bench: &mut [Standing], number: usize, standing: Standing) {
        self.shared.set_replaced(number, matches!(standing, Standing::Relieved));
        if let Some(known) = bench.get_mut(number) {
            *known = standing;
        }
    }
}
