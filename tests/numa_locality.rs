//! Who works for which node: nobody for another one's where only its own workers may, the nearest for memory without
//! CPUs, and whoever has time otherwise; and what is told of the nodes meanwhile.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod machines;

use std::sync::Arc;
use std::sync::Mutex;

use machines::{
    CHUNK, Deed, Gate, MIB, PAGE, Witness, anonymous, assert_on, assert_zero, bind, cpu_nodes, cpus_of, fill,
    host, memory_nodes, node_of_cpu, occupy, several_nodes, topology_of, without_huge_pages, witnessed,
};
use vm_memory::GuestMemoryMmap;
use vm_zeroing::{Intent, Job, Locality, NodeId, Topology, ZeroingService};

fn service(locality: Locality, topology: Topology, per_node: usize) -> ZeroingService {
    let builder = ZeroingService::builder().topology(topology).locality(locality).small_job(0);
    builder.workers_per_node(per_node).build().unwrap()
}

fn everywhere(locality: Locality) -> ZeroingService {
    service(locality, Topology::detect().unwrap(), 8)
}

/// Used memory with so many bytes on each of these nodes, one after the other.
fn spread(on: &[(NodeId, u64)], witness: &Witness) -> Arc<GuestMemoryMmap<Witness>> {
    let all: u64 = on.iter().map(|(_, bytes)| bytes).sum();
    let memory = witnessed(all, witness);
    let mut at = 0;
    for (node, bytes) in on {
        bind(host(&*memory, 0).wrapping_add(at as usize), *bytes, *node);
        at += bytes;
    }
    fill(&*memory, 0, all);
    at = 0;
    for (node, bytes) in on {
        assert_on(*node, host(&*memory, 0).wrapping_add(at as usize), *bytes, PAGE);
        at += bytes;
    }
    memory
}

/// As much on each node with memory, but for one chunk more on each than on the one before.
fn on_all_nodes() -> Vec<(NodeId, u64)> {
    memory_nodes().into_iter().zip(4..).map(|(node, chunks)| (node, chunks * CHUNK)).collect()
}

/// The node of each byte of such memory.
fn node_at(on: &[(NodeId, u64)], offset: u64) -> NodeId {
    let mut end = 0;
    let holds = |(_, bytes): &&(NodeId, u64)| {
        end += bytes;
        offset < end
    };
    on.iter().find(holds).unwrap().0
}

#[test]
fn local_only_is_local_only() {
    if several_nodes().is_none() {
        return;
    }
    let service = everywhere(Locality::LocalOnly);
    let topology = service.topology().clone();
    let on = on_all_nodes();
    let all: u64 = on.iter().map(|(_, bytes)| bytes).sum();
    for intent in [Intent::Teardown, Intent::Boot, Intent::Background] {
        let witness = Witness::new(|_| {});
        let memory = spread(&on, &witness);
        let report = service.zero(&memory, intent).unwrap().wait().unwrap();
        assert_zero(&*memory, 0, all);
        for (offset, _, cpu) in witness.cleared() {
            let (node, by) = (node_at(&on, offset), node_of_cpu(cpu));
            if cpus_of(node).is_empty() {
                // Memory without CPUs is served by the nearest ones.
                assert!(topology.serving_nodes(node).contains(&by), "{node} by {by}");
            } else {
                assert_eq!(node, by, "at {offset:#x}");
            }
        }
        let without_cpus = on.iter().filter(|(node, _)| cpus_of(*node).is_empty());
        let remote: u64 = without_cpus.map(|(_, bytes)| bytes).sum();
        assert_eq!((report.node_local_bytes, report.node_remote_bytes), (all - remote, remote), "{report:?}");
    }
}

/// A worker that has nothing to do leaves another node's alone, or helps: it depends on the setting.
#[test]
fn idle_workers_help_other_nodes_or_do_not() {
    let Some(nodes) = several_nodes() else { return };
    let (here, there) = (nodes[0], nodes[1]);
    for locality in [Locality::LocalOnly, Locality::PreferLocal] {
        let service = service(locality, topology_of(&[here, there]), 1);
        let mut busy = match locality {
            Locality::PreferLocal => occupy(&service),
            // Nothing is known of a page that is not there, so any worker might look at it: bound ones, then.
            _ => [here, there].into_iter().map(|node| (node, occupied(&service, node))).collect(),
        };
        let (worker_here, worker_there) = (busy.remove(&here).unwrap(), busy.remove(&there).unwrap());
        let witness = Witness::new(|_| {});
        let memory = spread(&[(here, 3 * CHUNK)], &witness);
        let job = service.zero(&memory, Intent::Teardown).unwrap();
        worker_there.release();
        if locality == Locality::PreferLocal {
            let report = job.wait().unwrap();
            assert_eq!((report.node_local_bytes, report.node_remote_bytes), (0, 3 * CHUNK));
            worker_here.release();
        } else {
            for _ in 0..3 {
                // It is awake, and looks for more each time that it has done one.
                let own = spread(&[(there, CHUNK)], &Witness::new(|_| {}));
                service.zero(&own, Intent::Teardown).unwrap().wait().unwrap();
            }
            assert!(!job.is_over() && witness.log().is_empty(), "{:?}", witness.log());
            worker_here.release();
            let report = job.wait().unwrap();
            assert_eq!((report.node_local_bytes, report.node_remote_bytes), (3 * CHUNK, 0));
        }
        assert_zero(&*memory, 0, 3 * CHUNK);
    }
}

/// Keeps the worker of a node busy by a page of that node.
fn occupied(service: &ZeroingService, node: NodeId) -> machines::Busy {
    let (gate, held) = (Arc::new(Gate::default()), Arc::new(Gate::default()));
    let witness = Witness::new({
        let (gate, held) = (Arc::clone(&gate), Arc::clone(&held));
        move |event| {
            if matches!(event.deed, Deed::Cleared(_)) {
                assert_eq!(node_of_cpu(event.cpu), node);
                held.open();
                gate.pass();
            }
        }
    });
    let memory = spread(&[(node, PAGE)], &witness);
    let job = service.zero(&memory, Intent::Teardown).unwrap();
    held.pass();
    machines::Busy::new(gate, job)
}

/// The worker of the memory's own node is held up: the other node's takes the rest away from it.
#[test]
fn work_is_stolen_across_nodes() {
    let Some(nodes) = several_nodes() else { return };
    let (here, there) = (nodes[0], nodes[1]);
    let service = service(Locality::PreferLocal, topology_of(&[here, there]), 1);
    let gate = Arc::new(Gate::default());
    let held: Arc<Mutex<Option<u64>>> = Arc::default();
    let witness = Witness::new({
        let (gate, held) = (Arc::clone(&gate), Arc::clone(&held));
        move |event| {
            // Before its bytes are told of as done.
            if let (Deed::Cleared(bytes), true) = (&event.deed, node_of_cpu(event.cpu) == here) {
                held.lock().unwrap().get_or_insert(*bytes);
                gate.pass();
            }
        }
    });
    let all = 8 * CHUNK;
    let memory = spread(&[(here, all)], &witness);
    let job = service.zero(&memory, Intent::Teardown).unwrap();
    let late = std::time::Instant::now() + std::time::Duration::from_secs(60);
    let held_bytes = || held.lock().unwrap().unwrap_or(all);
    while job.progress().done_bytes < all - held_bytes() {
        assert!(std::time::Instant::now() < late, "nobody helps: {:?}", witness.cleared());
        std::thread::yield_now();
    }
    gate.open();
    let report = job.wait().unwrap();
    assert_zero(&*memory, 0, all);
    let local: u64 = witness
        .cleared()
        .iter()
        .filter(|(_, _, cpu)| node_of_cpu(*cpu) == here)
        .map(|(_, bytes, _)| bytes)
        .sum();
    assert_eq!((report.node_local_bytes, report.node_remote_bytes), (local, all - local));
    assert!(local < all && report.steals > 0, "{report:?}");
    assert!(report.workers.iter().any(|share| share.node == Some(there) && share.bytes == all - local));
}

fn by_node(job: &Job) -> Vec<(NodeId, u64)> {
    job.progress_by_node().iter().map(|on| (on.node, on.done_bytes)).collect()
}

/// Told of each node is what lies on it, whoever works there.
#[test]
fn progress_on_each_node_is_exact() {
    if several_nodes().is_none() {
        return;
    }
    let all_nodes: Vec<NodeId> = Topology::detect().unwrap().nodes().iter().map(|node| node.id()).collect();
    let expected = |on: &[(NodeId, u64)]| -> Vec<(NodeId, u64)> {
        let bytes = |node: &NodeId| on.iter().filter(|(of, _)| of == node).map(|(_, bytes)| bytes).sum();
        all_nodes.iter().map(|node| (*node, bytes(node))).collect()
    };
    for locality in [Locality::PreferLocal, Locality::LocalOnly] {
        let service = everywhere(locality);
        let on = on_all_nodes();
        let memory = spread(&on, &Witness::new(|_| {}));
        let job = service.zero(&memory, Intent::Teardown).unwrap();
        let mut before = vec![0; all_nodes.len()];
        loop {
            let over = job.is_over();
            for ((known, (node, now)), (_, most)) in before.iter_mut().zip(by_node(&job)).zip(expected(&on)) {
                assert!(now >= *known && now <= most, "{node}: {now} of {most} after {known}");
                *known = now;
            }
            if over {
                break;
            }
        }
        job.wait().unwrap();
        assert_eq!(by_node(&job), expected(&on));
        // The pages that a job makes present count where they come to lie.
        for node in memory_nodes() {
            let fresh = anonymous(3 * CHUNK);
            bind(host(&*fresh, 0), 3 * CHUNK, node);
            let job = service.zero(&fresh, Intent::Boot).unwrap();
            job.wait().unwrap();
            assert_eq!(by_node(&job), expected(&[(node, 3 * CHUNK)]));
        }
    }
}

/// Memory whose node nobody knows before it is there: done by any worker, without an end that does not come.
#[test]
fn unbound_memory_is_done_by_anybody() {
    if several_nodes().is_none() {
        return;
    }
    let service = everywhere(Locality::LocalOnly);
    assert!(service.workers() >= cpu_nodes().len());
    for intent in [Intent::Boot, Intent::Teardown] {
        let memory = anonymous(16 * CHUNK + MIB);
        // One that a chunk's end cuts would be made present by one worker, and found so by the next.
        without_huge_pages(host(&*memory, 0), 16 * CHUNK + MIB);
        let job = service.zero(&memory, intent).unwrap();
        let report = job.wait().unwrap();
        assert_eq!(report.reads_zero_bytes, 16 * CHUNK + MIB);
        assert_eq!(by_node(&job).iter().map(|(_, bytes)| bytes).sum::<u64>(), 16 * CHUNK + MIB);
        assert_zero(&*memory, 0, 16 * CHUNK + MIB);
    }
}
