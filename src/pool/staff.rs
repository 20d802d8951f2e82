//! Who does what: threads become workers, a watchdog, and stand-ins for workers that are stuck.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;

use super::crew::{Crew, NoThread, Post, Recruit, ThreadInfo};
use super::machine::Grain;
use super::shared::Shared;
use super::watchdog::Watchdog;
use super::worker::{Deques, Worker};
use crate::error::BuildError;
use crate::sync::lock;
use crate::topology::Topology;

/// The threads that were given a duty.
pub(super) type Roster = Arc<Mutex<Vec<(ThreadInfo, JoinHandle<()>)>>>;

/// What a worker thread is given to do, and what it holds as long as it runs.
pub(super) type Duty = (Worker, Bench, mpsc::Sender<()>);

/// Deques without a worker, by the number of the worker they are for.
pub(super) type Bench = Arc<Mutex<BTreeMap<usize, Deques>>>;

pub(super) fn duty((worker, bench, alive): Duty) {
    let index = worker.index;
    let shared = Arc::clone(&worker.shared);
    let deques = worker.run();
    // For whoever stands in next.
    lock(&bench).insert(index, deques);
    shared.set_replaced(index, false);
    drop(alive);
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
    /// Makes a thread the worker of that number.
    pub(super) fn engage(&self, recruit: Recruit<Duty>, number: usize) {
        let Some(deques) = lock(&self.bench).remove(&number) else { return };
        let home = self.shared.plan.workers().get(number).copied().unwrap_or_default();
        let grain = std::cell::Cell::new(Grain::new(self.chunk));
        let worker = Worker { shared: Arc::clone(&self.shared), index: number, home, deques, grain };
        let engaged = recruit.begin((worker, Arc::clone(&self.bench), self.alive.clone()));
        lock(&self.threads).push(engaged);
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
            watchdog.keep(|stuck| staff.replace(stuck as usize, &crew_of_watchdog, &topology));
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

    /// Starts a stand-in for a worker that a job ended without. The worker leaves when it comes back.
    fn replace(&self, stuck: usize, crew: &Crew, topology: &Topology) {
        if self.shared.register.is_closed() || !self.shared.set_replaced(stuck, true) {
            return;
        }
        let home = |number: usize| self.shared.plan.workers().get(number).copied();
        let free = lock(&self.bench).keys().copied().find(|number| home(*number) == home(stuck));
        let node = home(stuck).and_then(|place| self.shared.plan.homes().get(place)).copied();
        let (Some(number), Some(node)) = (free, node) else {
            tracing::warn!(worker = stuck, "a worker is stuck in a page fault, and so is its stand-in");
            return;
        };
        match crew.start_one(Post::worker(number, node, topology), duty) {
            Ok(recruit) => {
                tracing::warn!(
                    worker = stuck,
                    stand_in = number,
                    "a worker is stuck in a page fault; another one stands in"
                );
                self.engage(recruit, number);
            }
            Err(NoThread::Refused(error) | NoThread::Start(error)) => {
                self.shared.set_replaced(stuck, false);
                tracing::warn!(worker = stuck, %error, "a worker is stuck in a page fault, and no stand-in could be started");
            }
        }
    }
}
