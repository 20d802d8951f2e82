//! The machine's decisions as the threads carry them out, on a machine of three nodes that is made up: its memory
//! is nowhere, and its CPUs need not be here.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use super::machine::tests::three_crews;
use super::machine::{Grain, Origin, Queues};
use super::sleep::Shift;
use super::worker::{LaneOf, Worker};
use super::*;
use crate::job::{Cause, Piece, Prepared};

const SMALL: u64 = 4 << 30;
const BIG: u64 = 64 << 30;

/// A small job on node 2, then a big one on node 0. Everybody waits with a chunk of the small one in hand until the
/// worker that node 2 lends has come to the big one; it waits until that is there.
#[derive(Debug)]
struct WaitsForHelp {
    is_big: bool,
    seen: Arc<(Mutex<Seen>, Condvar)>,
}

#[derive(Debug, Default)]
struct Seen {
    /// Workers with a chunk in hand.
    waiting: usize,
    big_is_there: bool,
    done_of_small: u64,
    helped: bool,
}

impl WaitsForHelp {
    /// Not for ever: the test is to fail, not to hang.
    fn wait_while(&self, goes_on: impl Fn(&Seen) -> bool) {
        let (seen, changed) = &*self.seen;
        let mut seen = lock(seen);
        seen.waiting += 1;
        changed.notify_all();
        let timeout = Duration::from_secs(10);
        drop(changed.wait_timeout_while(seen, timeout, |seen| goes_on(seen)).unwrap());
    }
}

impl Work for WaitsForHelp {
    fn prepare(&self, _: Extent) -> Result<Prepared, Cause> {
        Ok(Prepared { node: Some(NodeId(if self.is_big { 0 } else { 2 })), ..Prepared::default() })
    }

    fn perform(&self, chunk: Extent, _: &Prepared) -> Result<Vec<Piece>, Cause> {
        let is_lent = thread::current().name() == Some("vmz-n2-w1");
        if is_lent && !self.is_big {
            self.wait_while(|seen| !seen.big_is_there);
        } else if !is_lent {
            self.wait_while(|seen| !seen.helped);
        }
        let (seen, changed) = &*self.seen;
        let mut seen = lock(seen);
        if is_lent && self.is_big && seen.done_of_small < SMALL / 2 {
            seen.helped = true;
            changed.notify_all();
        }
        seen.done_of_small += if self.is_big { 0 } else { chunk.len };
        Ok(vec![Piece::erased(chunk, None)])
    }
}

#[test]
fn a_place_helps_another_before_its_own_work_is_done() {
    let crew = Crew::new(None);
    let settings = Settings {
        workers_per_node: 4,
        locality: Locality::PreferLocal,
        chunk: CHUNK,
        background_rate: None,
        small: 0,
        crew,
    };
    let pool = Pool::start(&three_crews(), settings).unwrap();
    assert_eq!(pool.workers(), 12);
    let shared = Arc::new((Mutex::new(Seen::default()), Condvar::new()));
    let submit = |is_big, len, node| {
        let work = Arc::new(WaitsForHelp { is_big, seen: Arc::clone(&shared) });
        let region = WorkRegion { address: 0, len, node: Some(NodeId(node)), page: 4096 };
        let terms = Terms { priority: Priority::Normal, deadline: None, stop_on_shortage: true };
        pool.submit(work, vec![region], terms).unwrap()
    };
    let small = submit(false, SMALL, 2);
    let (seen, changed) = &*shared;
    // So that nobody else comes to the big job for want of anything to do.
    let mut all = changed.wait_while(lock(seen), |seen| seen.waiting < 12).unwrap();
    let big = submit(true, BIG, 0);
    all.big_is_there = true;
    drop(all);
    changed.notify_all();
    for (job, len) in [(small, SMALL), (big, BIG)] {
        let report = job.wait_until(None).unwrap().unwrap();
        assert!(report.is_all_zero());
        assert_eq!(report.erased_bytes, len);
    }
    assert!(lock(seen).helped, "node 2 kept all its workers while node 0 was far behind");
    let waiting = (0..3).flat_map(|place| (0..LANES).map(move |lane| (place, lane)));
    for (place, lane) in waiting {
        assert_eq!(pool.shared.waiting(place, lane), 0, "what was queued has been taken: {place}, {lane}");
    }
}

/// Work that is done as soon as it is asked for.
#[derive(Debug)]
struct Done;

impl Work for Done {
    fn prepare(&self, _: Extent) -> Result<Prepared, Cause> {
        Ok(Prepared::default())
    }

    fn perform(&self, chunk: Extent, _: &Prepared) -> Result<Vec<Piece>, Cause> {
        Ok(vec![Piece::erased(chunk, None)])
    }
}

#[test]
fn what_is_taken_from_a_place_that_is_behind_goes_back_there_but_for_a_chunk() {
    const LANE: usize = Priority::Normal as usize;
    let topology = three_crews();
    let plan = Plan::new(&topology, &Plan::wanted(&topology, 4), Locality::PreferLocal);
    let deques: Vec<Deques> =
        plan.workers().iter().map(|_| std::array::from_fn(|_| Deque::new_lifo())).collect();
    let stealers = deques.iter().map(|lanes| std::array::from_fn(|lane| lanes[lane].stealer())).collect();
    let shared = Arc::new(Shared::new(plan, stealers, Seats::new(&topology), None));
    let region = WorkRegion { address: 0, len: BIG, node: Some(NodeId(2)), page: 4096 };
    let terms = Terms { priority: Priority::Normal, deadline: None, stop_on_shortage: true };
    let job = JobCore::new(Arc::new(Done), vec![region], terms, Surroundings::default());
    let worker = Worker {
        shared: Arc::clone(&shared),
        index: 0,
        home: 0,
        deques: deques.into_iter().next().unwrap(),
        grain: std::cell::Cell::new(Grain::new(CHUNK)),
        quiet: Default::default(),
        seat: Default::default(),
    };
    let extent = Extent { region: 0, start: 0, len: BIG };
    let task = || Task { job: Arc::clone(&job), extent, believed: Some(NodeId(2)), stolen: false };
    worker.execute((task(), Origin::Behind(1)));
    assert_eq!(job.progress().done_bytes, CHUNK);
    assert_eq!([0, 1, 2].map(|place| shared.waiting(place, LANE)), [0, BIG - CHUNK, 0]);
    let mut lane = LaneOf { worker: &worker, lane: LANE };
    assert!(!lane.has_own() && lane.pop_own().is_none());
    assert_eq!(lane.take_from_node(1).unwrap().extent, Extent { start: BIG / 2, len: BIG / 2, ..extent });
    assert_eq!(shared.waiting(1, LANE), BIG / 2 - CHUNK);
    // Of what it robs it keeps the rest.
    worker.execute((task(), Origin::Robbed(1)));
    assert_eq!([0, 1, 2].map(|place| shared.waiting(place, LANE)), [BIG - CHUNK, BIG / 2 - CHUNK, 0]);
    assert!(LaneOf { worker: &worker, lane: LANE }.has_own());
}

/// Whatever two threads set at once: who asks for the rate and who keeps to it are told the same.
#[test]
fn the_rate_is_kept_to_that_was_set_last() {
    let topology = three_crews();
    let plan = Plan::new(&topology, &Plan::wanted(&topology, 1), Locality::PreferLocal);
    let shared = Shared::new(plan, Vec::new(), Seats::new(&topology), None);
    // Each thread goes on when both have come as far: at the same moment, or nearly so.
    let steps = std::sync::atomic::AtomicUsize::new(0);
    let meet = |step: usize| {
        steps.fetch_add(1, Ordering::AcqRel);
        while steps.load(Ordering::Acquire) < 2 * step {
            std::thread::yield_now();
        }
    };
    let set = |rate| {
        for round in 0..200_000 {
            meet(2 * round + 1);
            shared.set_background_rate(rate);
            meet(2 * round + 2);
            assert_eq!(shared.background_may_go().is_err(), shared.background_rate() == Some(0));
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| set(None));
        scope.spawn(|| set(Some(0)));
    });
}

#[test]
fn a_worker_knows_its_cpus_before_it_works() {
    let topology = three_crews();
    let plan = Plan::new(&topology, &Plan::wanted(&topology, 1), Locality::PreferLocal);
    let worker = Worker {
        shared: Arc::new(Shared::new(plan, Vec::new(), Seats::new(&topology), None)),
        index: 0,
        home: 0,
        deques: std::array::from_fn(|_| Deque::new_lifo()),
        grain: std::cell::Cell::new(Grain::new(CHUNK)),
        quiet: Default::default(),
        seat: Default::default(),
    };
    worker.shared.register.close();
    worker.run();
    assert!(worker.seat.borrow().bounds.is_some());
}

/// A worker that is between two chunks has come back, whatever it was stuck in.
#[test]
fn turns_of_a_worker() {
    let topology = three_crews();
    let plan = Plan::new(&topology, &Plan::wanted(&topology, 1), Locality::PreferLocal);
    let stealers =
        plan.workers().iter().map(|_| std::array::from_fn(|_| Deque::new_lifo().stealer())).collect();
    let shared = Shared::new(plan, stealers, Seats::new(&topology), None);
    assert_eq!([shared.turn(0), shared.turn(1), shared.turn(99)], [None; 3]);
    shared.begin_a_turn(1);
    let first = shared.turn(1);
    assert!(first.is_some() && shared.turn(0).is_none());
    shared.end_a_turn(1);
    assert_eq!(shared.turn(1), None);
    shared.begin_a_turn(1);
    assert!(shared.turn(1).is_some_and(|second| Some(second) != first));
}
