//! Jobs over memory of several nodes: pages stay where they were put, work goes to the node of the pages, and the
//! report's local share is the kernel's.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod machines;

use std::sync::{Arc, Mutex};

use machines::{
    CHUNK, Deed, Gate, LEAST, PAGE, Witness, anonymous, assert_on, assert_zero, bind, cpu_nodes, fill, host,
    memory_nodes, node_of_cpu, nodes_of, occupy, one_worker_on_each, several_nodes, topology_of,
    without_huge_pages, witnessed,
};
use vm_zeroing::{Intent, NodeId, ZeroingService};

#[test]
fn memory_is_populated_where_it_is_bound() {
    if several_nodes().is_none() {
        return;
    }
    let service = ZeroingService::builder().build().unwrap();
    for node in memory_nodes() {
        let bytes = 6 * CHUNK;
        let memory = anonymous(bytes);
        bind(host(&*memory, 0), bytes, node);
        without_huge_pages(host(&*memory, 0), bytes);
        let report = service.zero(&memory, Intent::Boot).unwrap().wait().unwrap();
        assert_eq!(report.reads_zero_bytes, bytes, "fresh pages are not written twice: {report:?}");
        assert_on(node, host(&*memory, 0), bytes, PAGE);
        assert_eq!(report.node_local_bytes + report.node_remote_bytes, bytes);
    }
}

/// Where nothing is bound, a page comes from the node of the worker that takes it.
#[test]
fn unbound_memory_is_populated_by_its_neighbours() {
    let Some(nodes) = several_nodes() else { return };
    let service = ZeroingService::builder().topology(topology_of(&nodes)).build().unwrap();
    let bytes = 16 * CHUNK;
    let memory = anonymous(bytes);
    let report = service.zero(&memory, Intent::Boot).unwrap().wait().unwrap();
    assert_eq!((report.node_local_bytes, report.node_remote_bytes), (bytes, 0), "{report:?}");
    let found = nodes_of(host(&*memory, 0), bytes, PAGE);
    assert!(found.iter().all(|found| nodes.iter().any(|node| node.0 as i32 == *found)), "{found:?}");
}

/// One region, one half on each node. What the report calls local is what was cleared by a CPU of the page's node.
#[test]
fn the_local_share_is_what_the_kernel_says() {
    let Some(nodes) = several_nodes() else { return };
    let service = ZeroingService::builder().build().unwrap();
    let (half, witness) = (8 * CHUNK, Witness::new(|_| {}));
    let memory = witnessed(2 * half, &witness);
    let start = host(&*memory, 0);
    for (index, node) in nodes.iter().take(2).enumerate() {
        bind(start.wrapping_add(index * half as usize), half, *node);
    }
    fill(&*memory, 0, 2 * half);
    let found = nodes_of(start, 2 * half, PAGE);
    for (index, node) in nodes.iter().take(2).enumerate() {
        assert_on(*node, start.wrapping_add(index * half as usize), half, PAGE);
    }

    let report = service.zero(&memory, Intent::Teardown).unwrap().wait().unwrap();
    assert_zero(&*memory, 0, 2 * half);
    let mut cleared = witness.cleared();
    let local: u64 = cleared
        .iter()
        .filter(|(offset, _, cpu)| node_of_cpu(*cpu).0 as i32 == found[(offset / PAGE) as usize])
        .map(|(_, bytes, _)| bytes)
        .sum();
    assert_eq!((report.node_local_bytes, report.node_remote_bytes), (local, 2 * half - local));
    assert!((report.node_local_share() - local as f64 / (2 * half) as f64).abs() < 1e-9);
    assert_eq!(nodes_of(start, 2 * half, PAGE), found, "no page has moved");

    cleared.sort_unstable();
    let mut at = 0;
    for (offset, bytes, _) in cleared {
        assert_eq!(offset, at, "each byte once");
        assert_eq!(offset / half, (offset + bytes - 1) / half, "a chunk lies on one node");
        at += bytes;
    }
    assert_eq!(at, 2 * half);
}

/// The policy says one node and the pages lie on another: the worker that finds out sends its chunks there, and
/// the other node's worker takes what is left when it is free.
#[test]
fn misplaced_chunks_go_to_the_node_of_their_pages() {
    let Some(nodes) = several_nodes() else { return };
    let (here, there) = (nodes[0], nodes[1]);
    let service = one_worker_on_each(&[here, there]);
    let mut busy = occupy(&service);
    let (worker_here, worker_there) = (busy.remove(&here).unwrap(), busy.remove(&there).unwrap());

    // Whoever clears first waits for the other one.
    let (first, both) = (Arc::new(Gate::default()), Arc::new(Gate::default()));
    let done = Mutex::new(0);
    let witness = Witness::new({
        let (first, both) = (Arc::clone(&first), Arc::clone(&both));
        move |event| {
            if matches!(event.deed, Deed::Cleared(_)) {
                let mut so_far = done.lock().unwrap();
                *so_far += 1;
                if *so_far == 2 {
                    both.open();
                }
                drop(so_far);
                first.open();
                both.pass();
            }
        }
    });
    let memory = witnessed(2 * LEAST, &witness);
    bind(host(&*memory, 0), 2 * LEAST, there);
    fill(&*memory, 0, 2 * LEAST);
    bind(host(&*memory, 0), 2 * LEAST, here);
    assert_on(there, host(&*memory, 0), 2 * LEAST, PAGE);

    let job = service.zero(&memory, Intent::Teardown).unwrap();
    worker_here.release();
    first.pass();
    let so_far = witness.log();
    let first_clear = so_far.iter().position(|event| matches!(event.deed, Deed::Cleared(_))).unwrap();
    assert!(so_far.iter().all(|event| node_of_cpu(event.cpu) == here), "the other one is busy: {so_far:?}");
    assert!(
        so_far[..first_clear].iter().any(|event| event.offset == LEAST && event.deed == Deed::Asked),
        "both chunks are looked at before one is cleared, since both belong elsewhere: {so_far:?}"
    );
    worker_there.release();
    let report = job.wait().unwrap();
    assert_zero(&*memory, 0, 2 * LEAST);
    let by: Vec<NodeId> = witness.cleared().iter().map(|(_, _, cpu)| node_of_cpu(*cpu)).collect();
    assert_eq!(by, [here, there]);
    assert_eq!((report.node_local_bytes, report.node_remote_bytes), (LEAST, LEAST));
}

/// An idle worker helps the nearest node first.
#[test]
fn help_goes_to_the_nearest_node_first() {
    let Some(nodes) = several_nodes() else { return };
    let service = one_worker_on_each(&cpu_nodes());
    let topology = service.topology();
    // A worker, a node near to it, one farther away; neither its own.
    let found = cpu_nodes().into_iter().find_map(|helper| {
        let mut others: Vec<NodeId> = nodes.iter().copied().filter(|node| *node != helper).collect();
        others.sort_by_key(|node| topology.distance(helper, *node));
        let (near, far) = (*others.first()?, *others.last()?);
        (topology.distance(helper, near) < topology.distance(helper, far)).then_some((helper, near, far))
    });
    let Some((helper, near, far)) = found else {
        println!("no node of this machine has two others at different distances");
        return;
    };
    println!("{helper} helps {near} before {far}");
    let mut busy = occupy(&service);
    let order = Arc::new(Mutex::new(Vec::new()));
    let jobs: Vec<_> = [far, near]
        .into_iter()
        .map(|node| {
            let order = Arc::clone(&order);
            let witness = Witness::new(move |event| {
                if matches!(event.deed, Deed::Cleared(_)) {
                    order.lock().unwrap().push((node, node_of_cpu(event.cpu)));
                }
            });
            let memory = witnessed(LEAST, &witness);
            bind(host(&*memory, 0), LEAST, node);
            (service.zero(&memory, Intent::Teardown).unwrap(), memory)
        })
        .collect();
    busy.remove(&helper).unwrap().release();
    for (job, memory) in jobs {
        let report = job.wait().unwrap();
        assert_eq!((report.node_local_bytes, report.node_remote_bytes), (0, LEAST));
        assert_zero(&*memory, 0, LEAST);
    }
    assert_eq!(*order.lock().unwrap(), [(near, helper), (far, helper)]);
    for (_, busy) in busy {
        busy.release();
    }
}
