//! Workers take turns in any order, chunks take any time and lie on any node: what never fails is checked.

use std::collections::{BTreeSet, VecDeque};
use std::sync::OnceLock;
use std::time::Duration;

use proptest::prelude::*;

use super::{three_crews, *};
use crate::extent::Extent;

const LANES: usize = 3;
const NODES: [NodeId; 3] = [NodeId(0), NodeId(2), NodeId(4)];

#[derive(Debug, Clone, Copy)]
struct Task {
    extent: Extent,
    believed: Option<NodeId>,
    lane: usize,
}

/// The queues of one priority.
#[derive(Debug, Clone)]
struct Lane {
    injectors: Vec<VecDeque<Task>>,
    deques: Vec<VecDeque<Task>>,
}

/// A lane as one worker sees it.
struct Seen<'l> {
    lane: &'l mut Lane,
    homes: &'l [Place],
    own: usize,
    /// Where the last task came from.
    from: Option<Origin>,
}

impl Seen<'_> {
    fn from(&mut self, origin: Origin, task: Option<Task>) -> Option<Task> {
        self.from = task.map(|_| origin);
        task
    }
}

impl Queues for Seen<'_> {
    type Task = Task;

    fn pop_own(&mut self) -> Option<Task> {
        let task = self.lane.deques[self.own].pop_back();
        self.from(Origin::Own, task)
    }

    fn take_from_node(&mut self, node: Place) -> Option<Task> {
        let task = self.lane.injectors[node].pop_front();
        self.from(Origin::Node(node), task)
    }

    fn rob(&mut self, victim: usize) -> Option<Task> {
        assert_ne!(victim, self.own, "nobody robs itself");
        let task = self.lane.deques[victim].pop_front();
        self.from(Origin::Robbed(victim), task)
    }

    fn has_own(&self) -> bool {
        !self.lane.deques[self.own].is_empty()
    }

    /// As if the shortest chunk were a gigabyte, so that places fall behind.
    fn waiting(&self, place: Place) -> u64 {
        let of_crew = self.lane.deques.iter().zip(self.homes).filter(|(_, home)| **home == place);
        let tasks = of_crew.flat_map(|(deque, _)| deque).chain(&self.lane.injectors[place]);
        tasks.map(|task| task.extent.len).sum::<u64>() * ((1 << 30) / Grain::LEAST)
    }
}

/// A pool whose workers are driven one at a time.
struct Model {
    plan: Plan,
    lanes: Vec<Lane>,
    grains: Vec<Grain>,
    /// The longest chunk in the last lane.
    limit: Option<u64>,
}

impl Model {
    fn new(locality: Locality, most: u64, limit: Option<u64>) -> Self {
        static NODES: OnceLock<Topology> = OnceLock::new();
        let topology = NODES.get_or_init(three_crews);
        let plan = Plan::new(topology, &Plan::wanted(topology, 8), locality);
        let workers = plan.workers().len();
        let lane = Lane {
            injectors: vec![VecDeque::new(); plan.homes().len()],
            deques: vec![VecDeque::new(); workers],
        };
        Self { plan, lanes: vec![lane; LANES], grains: vec![Grain::new(most); workers], limit }
    }

    /// Whether `worker` could find something in a lane, wherever it lies.
    fn reaches(&self, worker: usize, lane: usize) -> bool {
        let Lane { injectors, deques } = &self.lanes[lane];
        let partners = self.plan.partners(self.plan.workers()[worker]);
        let queued = partners.iter().any(|place| !injectors[*place].is_empty());
        let held = |victim: &usize| partners.contains(&self.plan.workers()[*victim]);
        queued || (0..deques.len()).filter(held).any(|victim| !deques[victim].is_empty())
    }

    /// What comes next for a worker, as a worker thread asks for it.
    fn find(&mut self, own: usize) -> Option<(Task, Origin)> {
        (0..LANES).find_map(|lane| {
            let reachable = self.reaches(own, lane);
            let homes = self.plan.workers();
            let mut seen = Seen { lane: &mut self.lanes[lane], homes, own, from: None };
            let found = self.plan.next(own, &mut seen);
            let from = seen.from;
            assert_eq!(found.is_some(), reachable, "worker {own} overlooked something in lane {lane}");
            match (found.map(|(_, origin)| origin), from) {
                (Some(Origin::Behind(place)), Some(Origin::Node(from))) => assert_eq!(place, from),
                (Some(Origin::Behind(place)), Some(Origin::Robbed(victim))) => {
                    assert_eq!(place, homes[victim])
                }
                (said, from) => assert_eq!(said, from, "taken from elsewhere than it is said"),
            }
            found
        })
    }

    /// Cuts a chunk off a task and offers the rest, as a worker thread does.
    fn split(&mut self, worker: usize, task: Task, origin: Origin) -> Extent {
        let limit = self.limit.filter(|_| task.lane == LANES - 1);
        let grain = self.grains[worker].next(limit);
        let Lane { injectors, deques } = &mut self.lanes[task.lane];
        if let Origin::Behind(place) = origin {
            return task
                .extent
                .split_to_cell(grain, |far| injectors[place].push_back(Task { extent: far, ..task }));
        }
        let deque = &mut deques[worker];
        let chunk = task.extent.split_to_cell(grain, |far| deque.push_back(Task { extent: far, ..task }));
        assert!(chunk.len > 0 && chunk.start / grain == (chunk.end() - 1) / grain, "more than a cell");
        if chunk.len < task.extent.len {
            // The near end of the owner's deque is what follows the chunk.
            let next = deque.back().unwrap().extent;
            assert_eq!((next.region, next.start), (chunk.region, chunk.end()));
            assert_eq!(next.start % Grain::LEAST, 0, "cuts lie on the shortest chunk");
        }
        chunk
    }
}

fn region() -> impl Strategy<Value = (u64, Option<usize>, usize)> {
    (1..40 * Grain::LEAST, prop::option::of(0usize..3), 0..LANES)
}

/// Whose turn it is, and how long its chunk takes.
fn turn() -> impl Strategy<Value = (usize, Duration)> {
    let took = prop_oneof![Just(0u64), 1..400u64, 400..1200u64, 1000..3_000_000u64];
    (0usize..12, took.prop_map(Duration::from_micros))
}

proptest! {
    /// Each byte comes to exactly one worker; nothing waits that a worker could have found, nor in a lane before
    /// the one it took from; misplaced chunks travel once, and to where they are to be done.
    #[test]
    fn each_byte_once_in_any_order(
        regions in prop::collection::vec(region(), 1..6),
        late in prop::collection::vec(region(), 0..3),
        turns in prop::collection::vec(turn(), 1..200),
        only_local in any::<bool>(),
        most in 16u32..22,
        limit in prop::option::of(0u64..1 << 22),
        salt in any::<u64>(),
    ) {
        let locality = if only_local { Locality::LocalOnly } else { Locality::PreferLocal };
        let mut model = Model::new(locality, 1 << most, limit);
        let workers = model.plan.workers().len();
        let submit = |model: &mut Model, number: usize, (len, believed, lane): (u64, Option<usize>, usize)| {
            let believed = believed.map(|node| NODES[node]);
            let place = believed.map_or(number % 3, |node| model.plan.place_for(node));
            let extent = Extent { region: number as u32, start: 0, len };
            model.lanes[lane].injectors[place].push_back(Task { extent, believed, lane });
        };
        let all: Vec<_> = regions.iter().chain(&late).copied().collect();
        let mut begun = regions.len();
        (0..begun).for_each(|number| submit(&mut model, number, all[number]));
        let (mut done, mut sent): (Vec<Extent>, _) = (Vec::new(), BTreeSet::new());
        // After the turns of the test everybody has one until nobody finds anything.
        let rest = (0..workers).cycle().map(|worker| (worker, Duration::from_micros(500)));
        let random = turns.len();
        let mut idle = 0;
        for (turn, (worker, took)) in turns.into_iter().chain(rest).enumerate() {
            if begun < all.len() && (turn % 16 == 15 || idle > 0) {
                submit(&mut model, begun, all[begun]);
                begun += 1;
            }
            let Some((task, origin)) = model.find(worker) else {
                idle += usize::from(turn >= random);
                if idle > workers && begun == all.len() {
                    break;
                }
                continue;
            };
            idle = 0;
            let chunk = model.split(worker, task, origin);
            model.grains[worker].learn(chunk.len, took);
            let home = model.plan.workers()[worker];
            // One in four is where nobody can tell.
            let lies = (chunk.start / Grain::LEAST).wrapping_add(salt >> chunk.region) % 4;
            let found = NODES.get(lies as usize).copied();
            if let Some(place) = model.plan.belongs_elsewhere(home, task.believed, found) {
                prop_assert!(sent.insert((chunk.region, chunk.start)), "sent twice: {:?}", chunk);
                let task = Task { extent: chunk, believed: found, ..task };
                model.lanes[task.lane].injectors[place].push_back(task);
                continue;
            }
            let at_home = found.is_none_or(|node| model.plan.place_for(node) == home);
            prop_assert!(at_home || !only_local, "done by a worker of another node: {:?}", chunk);
            done.push(chunk);
        }
        done.sort_unstable();
        let mut chunks = done.iter();
        for (number, (len, ..)) in (0..).zip(&all) {
            let mut at = 0;
            while at < *len {
                let chunk = chunks.next().expect("a chunk for every byte");
                prop_assert_eq!((chunk.region, chunk.start), (number, at), "a gap, or done twice");
                at = chunk.end();
            }
            prop_assert_eq!(at, *len);
        }
        prop_assert!(chunks.next().is_none());
    }
}
