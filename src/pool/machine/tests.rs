//! The decisions over model queues, driven by tests instead of threads.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fs;

mod cover;
mod grain;
mod throttle;

use super::*;
use crate::topology::{NodeId, Topology};

/// A topology with nodes of (id, CPUs, distances).
fn topology(nodes: &[(u32, &str, &str)]) -> Topology {
    use std::sync::atomic::{AtomicU32, Ordering};
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let name = format!("vm-zeroing-plan-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let root = std::env::temp_dir().join(name);
    let cpus: Vec<&str> = nodes.iter().map(|(_, cpus, _)| *cpus).filter(|cpus| !cpus.is_empty()).collect();
    fs::create_dir_all(root.join("sys/devices/system/cpu")).unwrap();
    fs::write(root.join("sys/devices/system/cpu/online"), cpus.join(",")).unwrap();
    for (id, cpus, distances) in nodes {
        let folder = root.join(format!("sys/devices/system/node/node{id}"));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("cpulist"), cpus).unwrap();
        fs::write(folder.join("meminfo"), format!("Node {id} MemTotal: 1024 kB")).unwrap();
        fs::write(folder.join("distance"), distances).unwrap();
    }
    let topology = Topology::read(&root);
    let _ = fs::remove_dir_all(&root);
    topology.unwrap()
}

/// Three nodes with gaps between their numbers; node 4 is nearer to node 0 than node 2 is.
fn three_nodes() -> Topology {
    topology(&[(0, "0-1", "10 30 20"), (2, "2-4", "30 10 25"), (4, "5", "20 25 10")])
}

fn plan_of(topology: &Topology, per_node: usize) -> Plan {
    Plan::new(topology, &Plan::wanted(topology, per_node), Locality::PreferLocal)
}

/// Writes down where it was asked.
struct Asked(Vec<String>);

impl Queues for Asked {
    type Task = ();

    fn pop_own(&mut self) -> Option<()> {
        self.0.push("own".into());
        None
    }

    fn take_from_node(&mut self, node: Place) -> Option<()> {
        self.0.push(format!("node {node}"));
        None
    }

    fn rob(&mut self, victim: usize) -> Option<()> {
        self.0.push(format!("rob {victim}"));
        None
    }

    fn has_own(&self) -> bool {
        false
    }

    fn waiting(&self, _place: Place) -> u64 {
        0
    }
}

#[test]
fn own_then_node_then_siblings_then_nodes_by_distance() {
    let nodes = [0, 0, 2, 2, 2, 4].map(NodeId);
    let plan = Plan::new(&three_nodes(), &nodes, Locality::PreferLocal);
    assert_eq!(plan.homes(), [NodeId(0), NodeId(2), NodeId(4)]);
    assert_eq!(plan.workers(), [0, 0, 1, 1, 1, 2]);
    let asked = |worker| {
        let mut asked = Asked(Vec::new());
        assert_eq!(plan.next(worker, &mut asked), None);
        asked.0.join(", ")
    };
    assert_eq!(asked(0), "own, node 0, rob 1, node 2, rob 5, node 1, rob 2, rob 3, rob 4");
    assert_eq!(asked(1), "own, node 0, rob 0, node 2, rob 5, node 1, rob 2, rob 3, rob 4");
    assert_eq!(
        asked(3),
        "own, node 1, rob 4, rob 2, node 2, rob 5, node 0, rob 0, rob 1",
        "not all at one victim"
    );
    assert_eq!(asked(5), "own, node 2, node 0, rob 0, rob 1, node 1, rob 2, rob 3, rob 4");
    assert_eq!(asked(6), "", "there is no such worker");

    // Nobody else's, where locality is all.
    let plan = Plan::new(&three_nodes(), &nodes, Locality::LocalOnly);
    let mut asked = Asked(Vec::new());
    assert_eq!(plan.next(3, &mut asked), None);
    assert_eq!(asked.0.join(", "), "own, node 1, rob 4, rob 2");
    assert_eq!(plan.partners(1), [1]);
}

#[test]
fn workers_are_no_more_than_asked_for_or_than_cpus() {
    assert_eq!(plan_of(&three_nodes(), 2).workers(), [0, 1, 2, 0, 1]);
    assert_eq!(plan_of(&three_nodes(), 1).workers(), [0, 1, 2]);
    assert!(plan_of(&three_nodes(), 0).workers().is_empty());
}

#[test]
fn memory_without_cpus_is_served_by_the_nearest_cpus() {
    // The way from node 1 to node 8 is short, the way back is said to be long; the CPU is what walks it.
    let nodes =
        [(0, "0", "10 20 15 40"), (1, "1", "20 10 40 11"), (7, "", "15 40 10 20"), (8, "", "12 40 20 10")];
    let plan = plan_of(&topology(&nodes), 8);
    assert_eq!(plan.homes(), [NodeId(0), NodeId(1)]);
    assert_eq!([0, 1, 7, 8].map(|id| plan.place_for(NodeId(id))), [0, 1, 0, 1]);
    assert_eq!(plan.place_for(NodeId(99)), 0, "an unknown node");
}

/// A host that starts some of the workers only: each node's memory is served by the nearest that there are.
#[test]
fn nodes_left_without_a_worker_are_served_all_the_same() {
    let wanted = Plan::wanted(&three_nodes(), 8);
    assert_eq!(wanted, [0, 2, 4, 0, 2, 2].map(NodeId));
    let plan = Plan::new(&three_nodes(), &wanted[..1], Locality::LocalOnly);
    assert_eq!([0, 2, 4].map(|id| plan.place_for(NodeId(id))), [0, 0, 0]);
    let plan = Plan::new(&three_nodes(), &wanted[..2], Locality::LocalOnly);
    assert_eq!([0, 2, 4].map(|id| plan.place_for(NodeId(id))), [0, 1, 0], "node 4 is nearer to node 0");
    let nobody = Plan::new(&three_nodes(), &[], Locality::PreferLocal);
    assert!(nobody.homes().is_empty() && nobody.partners(0).is_empty());
}

#[test]
fn stand_ins_are_robbed_last_at_each_place() {
    let plan = plan_of(&three_nodes(), 2).with_stand_ins();
    assert_eq!(plan.workers(), [0, 1, 2, 0, 1, 0, 1, 2, 0, 1]);
    let mut asked = Asked(Vec::new());
    assert_eq!(plan.next(3, &mut asked), None);
    let places =
        ["own, node 0, rob 5, rob 8, rob 0", "node 2, rob 7, rob 2", "node 1, rob 4, rob 6, rob 9, rob 1"];
    assert_eq!(asked.0.join(", "), places.join(", "));
}

/// Three places with so many bytes each.
struct Loads {
    waiting: [u64; 3],
    has_own: bool,
    in_queue: Option<Place>,
}

impl Queues for Loads {
    type Task = &'static str;

    fn pop_own(&mut self) -> Option<&'static str> {
        Some("own")
    }

    fn take_from_node(&mut self, node: Place) -> Option<&'static str> {
        (self.in_queue == Some(node)).then_some("queued")
    }

    fn rob(&mut self, _victim: usize) -> Option<&'static str> {
        Some("robbed")
    }

    fn has_own(&self) -> bool {
        self.has_own
    }

    fn waiting(&self, place: Place) -> u64 {
        self.waiting[place]
    }
}

/// Three nodes with four CPUs each; node 4 is nearer to node 0 than node 2 is.
pub(in crate::pool) fn three_crews() -> Topology {
    topology(&[(0, "0-3", "10 30 20"), (2, "4-7", "30 10 25"), (4, "8-11", "20 25 10")])
}

#[test]
fn a_place_lends_one_worker_to_one_that_is_far_behind() {
    const G: u64 = 1 << 30;
    let plan = plan_of(&three_crews(), 4);
    let next = |plan: &Plan, worker, waiting: [u64; 3], has_own, in_queue| {
        plan.next(worker, &mut Loads { waiting, has_own, in_queue }).unwrap()
    };
    let behind = [16 * G, 18 * G, 16 * G];
    assert_eq!(next(&plan, 0, behind, true, None), ("robbed", Origin::Behind(1)));
    assert_eq!(next(&plan, 0, behind, true, Some(1)), ("queued", Origin::Behind(1)));
    assert_eq!(next(&plan, 2, behind, true, None), ("robbed", Origin::Behind(1)), "the first of node 4");
    assert_eq!(
        next(&plan, 0, [16 * G, 18 * G, 19 * G], true, None),
        ("robbed", Origin::Behind(2)),
        "the last"
    );
    // A sixteenth and 256 MiB.
    assert_eq!(next(&plan, 0, [16 * G, 17 * G + G / 4, 0], true, None), ("own", Origin::Own));
    assert_eq!(next(&plan, 0, [16 * G, 17 * G + G / 4 + 1, 0], true, None), ("robbed", Origin::Behind(1)));
    assert_eq!(next(&plan, 0, [0, G / 4, 0], true, None), ("own", Origin::Own), "not worth it");
    assert_eq!(next(&plan, 0, [u64::MAX; 3], true, None), ("own", Origin::Own));
    // The others stay, and who has nothing of its own yet begins at home.
    assert_eq!(next(&plan, 3, behind, true, None), ("own", Origin::Own));
    assert_eq!(next(&plan, 0, behind, false, None), ("own", Origin::Own));
    // Nor is one of a few lent, stand-ins or not, or one whose service keeps to its nodes.
    assert_eq!(
        next(&plan_of(&three_crews(), 3).with_stand_ins(), 0, behind, true, None),
        ("own", Origin::Own)
    );
    let nodes = Plan::wanted(&three_crews(), 4);
    let local = Plan::new(&three_crews(), &nodes, Locality::LocalOnly);
    assert_eq!(next(&local, 0, behind, true, None), ("own", Origin::Own));
}

#[test]
fn nobody_looks_twice_where_nothing_has_come() {
    let (arrivals, looks) = (Cell::new(5), Cell::new(0));
    let mut quiet = Quiet::default();
    let mut look = |found: Option<u32>| {
        looks.set(0);
        let count = || looks.set(looks.get() + 1);
        let found =
            quiet.look(|| arrivals.get(), || found.inspect(|_| count()).or_else(|| (count(), None).1));
        (found, looks.get())
    };
    assert_eq!(look(Some(1)), (Some(1), 1));
    assert_eq!(look(None), (None, 2), "once, and once more after the count");
    assert_eq!(look(None), (None, 0));
    assert_eq!(look(Some(2)), (None, 0), "it was not counted, so it is not there");
    arrivals.set(6);
    assert_eq!(look(Some(2)), (Some(2), 1));
    assert_eq!(look(Some(3)), (Some(3), 1), "while there is something the count is not asked");
}

/// A task that comes right after the look, or in the middle of it, is found by the next one.
#[test]
fn a_task_that_comes_while_somebody_looks_is_not_missed() {
    for comes_at in 1..=2 {
        let (arrivals, looks) = (Cell::new(0), Cell::new(0));
        let queue = RefCell::new(VecDeque::new());
        let look = || {
            let found = queue.borrow_mut().pop_front();
            looks.set(looks.get() + 1);
            if looks.get() == comes_at {
                queue.borrow_mut().push_back("task");
                arrivals.set(arrivals.get() + 1);
            }
            found
        };
        let mut quiet = Quiet::default();
        let found = quiet.look(|| arrivals.get(), look).or_else(|| quiet.look(|| arrivals.get(), look));
        assert_eq!(found, Some("task"), "comes at look {comes_at}");
    }
}

#[test]
fn a_misplaced_chunk_is_sent_once() {
    let plan = plan_of(&three_nodes(), 8);
    let elsewhere = |home, believed: Option<u32>, found: Option<u32>| {
        plan.belongs_elsewhere(home, believed.map(NodeId), found.map(NodeId))
    };
    assert_eq!(elsewhere(0, None, Some(4)), Some(2), "to the place that serves it");
    assert_eq!(elsewhere(0, Some(0), Some(2)), Some(1), "the belief was wrong");
    assert_eq!(elsewhere(1, Some(2), Some(2)), None, "where it belongs");
    assert_eq!(elsewhere(0, Some(2), Some(2)), None, "a robber keeps what it knew");
    assert_eq!(elsewhere(2, None, Some(4)), None, "it is here already");
    assert_eq!(elsewhere(0, Some(2), None), None, "nobody knows");
    assert_eq!(elsewhere(0, None, Some(99)), None, "an unknown node is served by the first place");
}
