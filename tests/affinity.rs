//! Where workers run (R24, R27, R29, R32): inside what the process was given, on their nodes, and started
//! before the first page is touched. The caller's own affinity is nobody's business.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use common::hooked::{Answer, hooked, memory_of};
use common::{
    MIB, PAGE, Tree, all_zero, allowed_cpus, assert_exact, cpus_of, fill, list, pin_to, worker_threads,
};
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vm_zeroing::{Intent, NodeId, NodeKind, Topology, ZeroRequest, ZeroingService};

/// Workers are counted by the names of the process's threads, so one test at a time has some.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    let guard = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    // Joined threads of the test before may be listed for a moment longer.
    while !worker_threads().is_empty() {
        std::thread::yield_now();
    }
    guard
}

/// The CPUs that the calling thread may use.
fn own_cpus() -> Vec<u32> {
    cpus_of("/proc/thread-self/status")
}

/// (node in the thread's name, its CPUs)
fn workers() -> Vec<(u32, Vec<u32>)> {
    let mut workers: Vec<_> = worker_threads()
        .into_iter()
        .map(|(thread, name)| {
            let node = name.strip_prefix("vmz-n").unwrap().split('-').next().unwrap().parse().unwrap();
            (node, cpus_of(&format!("/proc/self/task/{thread}/status")))
        })
        .collect();
    workers.sort();
    workers
}

/// A tree whose nodes have these CPUs; each also claims a CPU that is not there, and one that nobody gave us.
fn tree(nodes: &[(u32, &[u32])]) -> Tree {
    let tree = Tree::new();
    let absent = |id: u32| 6000 + id;
    let all: Vec<u32> =
        nodes.iter().flat_map(|(id, cpus)| cpus.iter().copied().chain([absent(*id)])).collect();
    tree.file("sys/devices/system/cpu/online", &list(&all));
    tree.file("sys/devices/system/node/online", &list(&nodes.iter().map(|(id, _)| *id).collect::<Vec<_>>()));
    for (id, cpus) in nodes {
        let folder = format!("sys/devices/system/node/node{id}");
        let own: Vec<u32> = cpus.iter().copied().chain([absent(*id)]).collect();
        tree.file(&format!("{folder}/cpulist"), &list(&own));
        tree.file(&format!("{folder}/meminfo"), &format!("Node {id} MemTotal: 1048576 kB"));
        let distances = nodes.iter().map(|(to, _)| if to == id { "10" } else { "21" }).collect::<Vec<_>>();
        tree.file(&format!("{folder}/distance"), &distances.join(" "));
    }
    tree
}

fn service_on(topology: Topology) -> ZeroingService {
    ZeroingService::builder().topology(topology).build().unwrap()
}

/// A job over both kinds of pages, that looks at the worker threads whenever it is asked for a slice.
fn run(service: &ZeroingService) {
    let len = 24 * MIB + PAGE;
    let started = worker_threads().len();
    assert_eq!(started, service.workers(), "all of them are there before the first job");
    for intent in [Intent::Boot, Intent::Teardown] {
        let memory = memory_of(vec![hooked(MIB, len, move |_, _| {
            assert_eq!(
                worker_threads().len(),
                started,
                "a thread was started after the first page was touched"
            );
            Answer::AsAsked
        })]);
        fill(&*memory, MIB, len / 2);
        let report = service.zero(&memory, intent).unwrap().wait().unwrap();
        assert!(report.is_all_zero());
        assert!(common::is_zero(&*memory, MIB, len));
        assert!(report.node_local_bytes + report.node_remote_bytes <= len);
    }
}

/// R24: two nodes made up of the CPUs that we have.
#[test]
fn workers_are_pinned_inside_the_original_affinity() {
    let _alone = alone();
    let (allowed, before) = (allowed_cpus(), own_cpus());
    // On a machine with one CPU the second node has none that is allowed.
    let (near, far) = allowed.split_at(allowed.len().div_ceil(2));
    let tree = tree(&[(0, near), (3, far)]);
    let service = service_on(Topology::read(&tree.0).unwrap().restrict_cpus(&allowed).unwrap());
    let expected: Vec<(u32, Vec<u32>)> = [(0, near), (3, far)]
        .into_iter()
        .flat_map(|(node, cpus)| vec![(node, cpus.to_vec()); cpus.len().min(8)])
        .collect();
    assert_eq!(workers(), expected);
    run(&service);
    assert_eq!(workers(), expected, "nor does a job change it");
    assert_eq!(own_cpus(), before, "the caller's affinity");
    assert_eq!(service.topology().nodes().len(), 2);
}

/// R27: nodes with memory only, one of them with a CXL node's number, and nodes with CPUs only.
#[test]
fn nodes_without_cpus_get_no_workers_and_no_empty_mask() {
    let _alone = alone();
    let allowed = allowed_cpus();
    let tree = tree(&[(1, &allowed), (2, &[]), (255, &[])]);
    tree.file("sys/devices/system/node/node1/meminfo", "Node 1 MemTotal: 0 kB");
    let topology = Topology::read(&tree.0).unwrap().restrict_cpus(&allowed).unwrap();
    assert_eq!(topology.node(NodeId(1)).unwrap().kind(), NodeKind::CpusOnly);
    for memory_only in [2, 255] {
        assert!(topology.node(NodeId(memory_only)).unwrap().allowed_cpus().is_empty());
        assert_eq!(topology.cpus_serving(NodeId(memory_only)), allowed);
    }
    let service = service_on(topology);
    assert_eq!(workers(), vec![(1, allowed.clone()); allowed.len().min(8)]);
    run(&service);
}

/// R29: no folder of nodes.
#[test]
fn one_implicit_node() {
    let _alone = alone();
    let topology = common::one_node();
    assert!(topology.is_implicit());
    let service = service_on(topology);
    let allowed = allowed_cpus();
    assert_eq!(workers(), vec![(0, allowed.clone()); allowed.len().min(8)]);
    run(&service);
    let memory = Arc::new(GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), MIB as usize)]).unwrap());
    fill(&*memory, 0, MIB);
    let report = all_zero(&service.submit(ZeroRequest::new(&memory)).unwrap());
    assert_exact(&*memory, &report, &[(0, MIB)]);
    assert_eq!((report.node_local_bytes, report.node_remote_bytes), (MIB, 0), "there is no other node");
    assert_eq!(report.node_local_share(), 1.0);
}

/// R32: a caller that is pinned to one CPU gets workers on all that the process may use, and stays pinned.
#[test]
fn a_pinned_caller() {
    let _alone = alone();
    let allowed = allowed_cpus();
    std::thread::spawn({
        let allowed = allowed.clone();
        move || {
            pin_to(allowed[0]);
            assert_eq!(own_cpus(), [allowed[0]]);
            let service = common::service();
            run(&service);
            assert_eq!(own_cpus(), [allowed[0]]);
            let used: BTreeSet<u32> = workers().into_iter().flat_map(|(_, cpus)| cpus).collect();
            let expected: BTreeSet<u32> =
                service.topology().nodes().iter().flat_map(|node| node.allowed_cpus().to_vec()).collect();
            assert_eq!(used, expected);
            assert!(used.iter().all(|cpu| allowed.contains(cpu)), "never wider than the process");
            assert!(allowed.len() == 1 || used.len() > 1, "not only the caller's");
        }
    })
    .join()
    .unwrap();
}

#[test]
fn as_many_workers_as_were_asked_for() {
    let _alone = alone();
    let allowed = allowed_cpus().len();
    for asked in [1, 2, 3] {
        let service = common::service_with(asked);
        assert_eq!(service.workers(), asked.min(allowed));
        assert_eq!(worker_threads().len(), service.workers());
        drop(service);
        while !worker_threads().is_empty() {
            std::thread::yield_now();
        }
    }
}
