//! The pool, with events for threads: what `src/pool/worker.rs`, `shared.rs` and `sleep.rs` do, step by step,
//! over the same decisions (`machine`) and the same splitting (`extent`).
//!
//! Not here: `seats.rs` (each worker has a CPU of its own from the start); the least chunk of jobs that make memory
//! present (the memory is there); small jobs, stand-ins and the watchdog; a second job.

use std::cell::Cell;
use std::collections::VecDeque;
use std::time::Duration;

use crate::agenda::Agenda;
use crate::extent::Extent;
use crate::host::Host;
use crate::layout::Layout;
use crate::machine::{Grain, Locality, Origin, Place, Plan, Quiet, Throttle};
use crate::memory::Memory;
use crate::queues::{Lane, LaneOf, Task};
use crate::run::Run;

/// What a pool is set to, and what its steps cost in seconds.
#[derive(Debug, Clone)]
pub struct Settings {
    pub locality: Locality,
    /// The longest chunk in bytes.
    pub chunk: u64,
    /// The lane of the job.
    pub lane: usize,
    /// Bytes a second for background work.
    pub rate: Option<u64>,
    /// From a wake until the worker looks for work.
    pub wake: f64,
    /// A task from another worker's deque.
    pub steal: f64,
    /// A look at a queue.
    pub look: f64,
    /// A passage through the lock of the job's books: three a chunk, one at a time.
    pub lock: f64,
}

/// One for each priority, the first first.
pub const LANES: usize = 3;
pub const NORMAL: usize = 1;
pub const BACKGROUND: usize = 2;

/// Everybody sleeps, and bytes are left: a mistake in the decisions.
#[derive(Debug, thiserror::Error)]
#[error("everybody sleeps, and {left} bytes are not cleared: a task was slept through")]
pub struct Stuck {
    left: u64,
}

/// What happens to a worker, or to the memory of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// It looks for work.
    Looks(usize),
    /// It found none; it counts itself idle, looks once more and sleeps.
    Rests(usize),
    /// It slept for as long as the rate asks for, unless it was woken since.
    WakesUp(usize, u64),
    /// It has its task in its hands.
    Takes(usize),
    /// Its chunk belongs elsewhere, and it has let go of it.
    Sends(usize),
    /// Its chunk is confirmed.
    Stores(usize),
    /// Somebody finishes there, unless shares have changed since.
    Finishes(usize, u64),
}

/// What a worker has at hand.
#[derive(Debug)]
struct Worker {
    home: Place,
    grain: Grain,
    /// By lane.
    quiet: [Quiet; LANES],
    task: Option<Task>,
    origin: Origin,
    begun: f64,
    /// Counts its wakes.
    woken: u64,
}

struct Pool<'a> {
    host: &'a Host,
    layout: &'a Layout,
    plan: &'a Plan,
    settings: &'a Settings,
    agenda: Agenda<Event>,
    memories: Vec<Memory>,
    workers: Vec<Worker>,
    lanes: Vec<Lane>,
    /// Who sleeps at each place, the first first.
    beds: Vec<VecDeque<usize>>,
    throttle: Throttle,
    /// When the lock of the books is free.
    books: f64,
    left: u64,
    run: Run,
}

/// The plan of a pool on this machine. There are stand-ins' queues to look at, as in the pool; nobody stands in.
pub fn plan(host: &Host, locality: Locality) -> Plan {
    Plan::new(&host.topology, &host.wanted, locality).with_stand_ins()
}

/// Clears the memory and says how it went.
pub fn clear(
    host: &Host,
    layout: &Layout,
    plan: &Plan,
    settings: &Settings,
    name: &str,
) -> Result<Run, Stuck> {
    let places = plan.homes().len();
    let lane = Lane::new(plan);
    let at_home = host.workers.iter().zip(plan.workers());
    let workers: Vec<Worker> = at_home
        .map(|(_, home)| Worker {
            home: *home,
            grain: Grain::new(settings.chunk),
            quiet: Default::default(),
            task: None,
            origin: Origin::Own,
            begun: 0.0,
            woken: 0,
        })
        .collect();
    let mut beds = vec![VecDeque::new(); places];
    for (number, worker) in workers.iter().enumerate() {
        beds[worker.home].push_back(number);
    }
    let pool = Pool {
        host,
        layout,
        plan,
        settings,
        agenda: Agenda::new(),
        memories: host.memories(),
        workers,
        lanes: vec![lane; LANES],
        beds,
        throttle: Throttle::new(settings.rate),
        books: 0.0,
        left: layout.bytes(),
        run: Run { threads: host.workers.len(), ..Run::new(name, host.nodes()) },
    };
    pool.work()
}

impl Pool<'_> {
    fn work(mut self) -> Result<Run, Stuck> {
        self.submit();
        while let Some((now, event)) = self.agenda.next() {
            match event {
                Event::Looks(worker) => self.looks(worker, now),
                Event::Rests(worker) => self.rests(worker, now),
                Event::WakesUp(worker, woken) => self.wakes_up(worker, woken, now),
                Event::Takes(worker) => self.takes(worker, now),
                Event::Sends(worker) => self.sends(worker, now),
                Event::Stores(worker) => self.stores(worker, now),
                Event::Finishes(node, version) => self.finishes(node, version, now),
            }
            if self.left == 0 {
                return Ok(self.run);
            }
        }
        Err(Stuck { left: self.left })
    }

    /// `Pool::submit`
    fn submit(&mut self) {
        let places = self.plan.homes().len();
        for (index, (len, believed)) in self.layout.regions().enumerate() {
            let extent = Extent { region: index as u32, start: 0, len };
            let place = believed.map_or(index % places, |node| self.plan.place_for(node));
            self.send(place, Task { extent, believed }, 0.0);
        }
    }

    /// `Shared::send`
    fn send(&mut self, place: Place, task: Task, now: f64) {
        self.lanes[self.settings.lane].queue(place, None, task);
        self.wake_near(place, now);
    }

    /// `Hands::offer`
    fn offer(&mut self, worker: usize, task: Task, now: f64) {
        let home = self.workers[worker].home;
        self.lanes[self.settings.lane].queue(home, Some(worker), task);
        self.wake_near(home, now);
    }

    /// `Shared::wake_near`
    fn wake_near(&mut self, place: Place, now: f64) {
        let sleeper = self.plan.partners(place).iter().find_map(|place| self.beds[*place].pop_front());
        if let Some(worker) = sleeper {
            self.run.wakes += 1;
            self.workers[worker].woken += 1;
            self.agenda.enter(now + self.settings.wake, Event::Looks(worker));
        }
    }

    /// `Worker::find`, and how long it took.
    fn find(&mut self, worker: usize, now: f64) -> (Result<(Task, Origin), Option<Duration>>, f64) {
        let mut cost = 0.0;
        for (number, lane) in self.lanes.iter_mut().enumerate() {
            if number == BACKGROUND
                && let Err(until) = self.throttle.ask(since_submission(now))
            {
                return (Err(until), cost);
            }
            let looks = Cell::new(0);
            let arrivals = std::mem::take(&mut lane.arrivals);
            let count = || {
                looks.set(looks.get() + arrivals.len());
                arrivals.iter().sum()
            };
            let mut seen = LaneOf { lane, plan: self.plan, own: worker, looks: &looks };
            let found = self.workers[worker].quiet[number].look(count, || self.plan.next(worker, &mut seen));
            lane.arrivals = arrivals;
            cost += looks.get() as f64 * self.settings.look;
            if let Some(found) = found {
                cost += if matches!(found.1, Origin::Robbed(_) | Origin::Behind(_)) {
                    self.settings.steal
                } else {
                    0.0
                };
                return (Ok(found), cost);
            }
        }
        (Err(None), cost)
    }

    fn looks(&mut self, worker: usize, now: f64) {
        match self.find(worker, now) {
            (Ok(found), cost) => self.found(worker, found, now + cost),
            (Err(_), cost) => self.agenda.enter(now + cost, Event::Rests(worker)),
        }
    }

    /// `Shift::rest`. Between the count and the look nobody else gets a word in, so no wake is owed.
    fn rests(&mut self, worker: usize, now: f64) {
        match self.find(worker, now) {
            (Ok(found), cost) => self.found(worker, found, now + cost),
            (Err(until), cost) => {
                self.beds[self.workers[worker].home].push_back(worker);
                if let Some(until) = until {
                    let nap = Event::WakesUp(worker, self.workers[worker].woken);
                    self.agenda.enter(until.as_secs_f64().max(now + cost), nap);
                }
            }
        }
    }

    fn wakes_up(&mut self, worker: usize, woken: u64, now: f64) {
        if self.workers[worker].woken == woken {
            self.beds[self.workers[worker].home].retain(|sleeper| *sleeper != worker);
            self.workers[worker].woken += 1;
            self.looks(worker, now);
        }
    }

    fn found(&mut self, worker: usize, (task, origin): (Task, Origin), at: f64) {
        self.workers[worker].task = Some(task);
        self.workers[worker].origin = origin;
        self.agenda.enter(at, Event::Takes(worker));
    }

    /// `Worker::execute`, up to the look at where the chunk lies.
    fn takes(&mut self, worker: usize, now: f64) {
        let Some(Task { extent, believed }) = self.workers[worker].task else { return };
        let Worker { grain, origin, home, .. } = self.workers[worker];
        match origin {
            Origin::Behind(_) => self.run.helped_out += 1,
            Origin::Robbed(victim) => self.run.stole(self.plan.workers()[victim] == home),
            Origin::Own | Origin::Node(_) => {}
        }
        let background = self.settings.lane == BACKGROUND;
        let limit = if background { self.throttle.longest_chunk() } else { None };
        let chunk = extent.split_to_cell(grain.next(limit), |far| {
            let task = Task { extent: far, believed };
            match origin {
                Origin::Behind(place) => self.send(place, task, now),
                _ => self.offer(worker, task, now),
            }
        });
        if background {
            self.throttle.pay(chunk.len, since_submission(now));
        }
        let found = self.host.id(self.layout.node_of(chunk.region, chunk.start));
        // Claimed, and either handed back or confirmed.
        let at = self.pass_the_books(now, 2);
        let next = match self.plan.belongs_elsewhere(home, believed, Some(found)) {
            Some(_) => Event::Sends(worker),
            None => Event::Stores(worker),
        };
        self.workers[worker].task = Some(Task { extent: chunk, believed });
        self.agenda.enter(at, next);
    }

    fn sends(&mut self, worker: usize, now: f64) {
        let Some(task) = self.workers[worker].task.take() else { return };
        let found = Some(self.host.id(self.layout.node_of(task.extent.region, task.extent.start)));
        if let Some(place) = self.plan.belongs_elsewhere(self.workers[worker].home, task.believed, found) {
            self.run.sent_home += 1;
            self.send(place, Task { believed: found, ..task }, now);
        }
        self.looks(worker, now);
    }

    fn stores(&mut self, worker: usize, now: f64) {
        let Some(task) = self.workers[worker].task else { return };
        let node = self.layout.node_of(task.extent.region, task.extent.start);
        let pace = self.host.pace(self.host.workers[worker], node);
        self.workers[worker].begun = now;
        self.memories[node].begin(now, worker, pace, task.extent.len);
        self.expect(node);
    }

    fn finishes(&mut self, node: usize, version: u64, now: f64) {
        let Some(worker) = self.memories[node].finish(now, version) else { return };
        self.expect(node);
        let Some(task) = self.workers[worker].task.take() else { return };
        let took = since_submission((now - self.workers[worker].begun).max(0.0));
        self.workers[worker].grain.learn(task.extent.len, took);
        let settled = self.pass_the_books(now, 1);
        self.left -= task.extent.len;
        self.run.cleared(node, self.host.workers[worker].node == node, task.extent.len, settled);
        self.agenda.enter(settled, Event::Looks(worker));
    }

    fn expect(&mut self, node: usize) {
        if let Some((at, version)) = self.memories[node].next() {
            self.agenda.enter(at, Event::Finishes(node, version));
        }
    }

    /// Waits for the lock of the books and holds it so many times; when it lets go.
    fn pass_the_books(&mut self, now: f64, times: u32) -> f64 {
        self.books = self.books.max(now) + f64::from(times) * self.settings.lock;
        self.books
    }
}

fn since_submission(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}
