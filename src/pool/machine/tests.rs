//! The decisions over model queues, driven by tests instead of threads.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fs;

use proptest::prelude::*;

use super::*;
use crate::extent::Extent;
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

#[derive(Debug, Clone, Copy)]
struct Task {
    extent: Extent,
    believed: Option<NodeId>,
}

/// Every worker's queues; `own` says whose turn it is.
struct Model {
    injectors: Vec<VecDeque<Task>>,
    deques: Vec<RefCell<VecDeque<Task>>>,
    own: usize,
}

impl Queues for Model {
    type Task = Task;

    fn pop_own(&mut self) -> Option<Task> {
        self.deques[self.own].borrow_mut().pop_back()
    }

    fn take_from_node(&mut self, node: Place) -> Option<Task> {
        self.injectors[node].pop_front()
    }

    fn rob(&mut self, victim: usize) -> Option<Task> {
        assert_ne!(victim, self.own, "nobody robs itself");
        self.deques[victim].borrow_mut().pop_front()
    }
}

const GRAIN: u64 = 64;

proptest! {
    /// Workers take turns in any order; chunks lie on any node, whatever was believed. Each byte comes to
    /// exactly one worker, misplaced chunks travel once, and an owner's chunks ascend.
    #[test]
    fn each_byte_once_in_any_order(
        regions in prop::collection::vec((1u64..40 * GRAIN, prop::option::of(0usize..3)), 1..5),
        turns in prop::collection::vec(0usize..6, 1..200),
        salt in any::<u64>(),
    ) {
        let plan = plan_of(&three_nodes(), 8);
        let nodes = [NodeId(0), NodeId(2), NodeId(4)];
        let mut model = Model {
            injectors: vec![VecDeque::new(); plan.homes().len()],
            deques: plan.workers().iter().map(|_| RefCell::default()).collect(),
            own: 0,
        };
        for (number, (len, believed)) in (0..).zip(&regions) {
            let believed = believed.map(|node| nodes[node]);
            let place = believed.map_or(number as usize % 3, |node| plan.place_for(node));
            model.injectors[place].push_back(Task { extent: Extent { region: number, start: 0, len: *len }, believed });
        }
        let mut seen: Vec<Vec<u8>> = regions.iter().map(|(len, _)| vec![0; *len as usize]).collect();
        let mut sent = std::collections::BTreeSet::new();
        // After the turns of the test everybody has one until nobody finds anything.
        let rest = (0..plan.workers().len()).cycle();
        let mut idle = 0;
        for worker in turns.into_iter().chain(rest) {
            model.own = worker;
            let Some((task, _)) = plan.next(worker, &mut model) else {
                idle += 1;
                if idle > plan.workers().len() {
                    break;
                }
                continue;
            };
            idle = 0;
            let chunk = task.extent.split_to_cell(GRAIN, |far| {
                model.deques[worker].borrow_mut().push_back(Task { extent: far, ..task });
            });
            // The near end of the owner's deque is what follows the chunk.
            if let Some(next) = model.deques[worker].borrow().back().filter(|_| chunk.len < task.extent.len) {
                prop_assert_eq!((next.extent.region, next.extent.start), (chunk.region, chunk.end()));
            }
            let lies = (chunk.start / GRAIN).wrapping_add(salt >> chunk.region) % 4;
            let found = nodes.get(lies as usize).copied();
            if let Some(place) = plan.belongs_elsewhere(plan.workers()[worker], task.believed, found) {
                prop_assert!(sent.insert((chunk.region, chunk.start)), "sent twice: {:?}", chunk);
                model.injectors[place].push_back(Task { extent: chunk, believed: found });
                continue;
            }
            for byte in &mut seen[chunk.region as usize][chunk.start as usize..chunk.end() as usize] {
                *byte += 1;
            }
        }
        prop_assert!(seen.iter().flatten().all(|times| *times == 1));
    }
}
