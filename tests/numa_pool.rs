//! Pools on several nodes: their pages lie where they were asked for, whoever makes them present, and a node that
//! has too few hugepages is named.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod machines;

use std::fs;

use machines::{
    HUGE, MIB, NodeHugepages, PAGE, assert_on, assert_zero, cpus_of, fill, host, memory_nodes, several_nodes,
};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion};
use vm_zeroing::{
    HugepagePool, LeaseError, LeasedMemory, NodeId, NodePolicy, PageSize, PoolError, Quiesced, ZeroingService,
};

fn leased(pool: &HugepagePool, bytes: u64, policy: NodePolicy) -> LeasedMemory {
    pool.lease(bytes, policy).unwrap().into_memory([(GuestAddress(0), bytes)]).unwrap()
}

/// A life on each node: populated there, lent there, cleared there.
fn lives_on_its_nodes(page_size: PageSize, capacity: u64) {
    let service = ZeroingService::builder().build().unwrap();
    let mut builder = HugepagePool::builder(&service).page_size(page_size).slab_bytes(capacity / 2);
    for node in memory_nodes() {
        builder = builder.capacity(node, capacity);
    }
    let pool = builder.build().unwrap();
    for node in memory_nodes() {
        assert_eq!(pool.usage(node).zero_bytes, capacity, "{node}");
        let memory = leased(&pool, capacity, NodePolicy::Strict(node));
        assert_zero(&memory, 0, capacity);
        assert_on(node, host(&memory, 0), capacity, page_size.bytes());
        fill(&memory, 0, capacity);
        let report = memory.recycle(Quiesced::on_callers_word()).unwrap().wait().unwrap();
        assert_eq!(report.erased_bytes, capacity, "{report:?}");
        if cpus_of(node).is_empty() {
            assert_eq!(report.node_remote_bytes, capacity, "no worker sits on {node}");
        }
        let memory = leased(&pool, capacity, NodePolicy::Strict(node));
        assert_zero(&memory, 0, capacity);
        assert_on(node, host(&memory, 0), capacity, page_size.bytes());
        drop(memory);
    }
}

#[test]
fn base_pages_lie_on_the_node_asked_for() {
    if several_nodes().is_some() {
        lives_on_its_nodes(PageSize::Base, 16 * MIB);
    }
}

#[test]
fn hugepages_lie_on_the_node_asked_for() {
    if several_nodes().is_none() {
        return;
    }
    let reserved: Vec<_> = memory_nodes().into_iter().map(|node| NodeHugepages::set(node, 12)).collect();
    if reserved.iter().any(Option::is_none) {
        println!("skipped: 12 hugepages cannot be reserved on every node");
        return;
    }
    lives_on_its_nodes(PageSize::Huge2M, 12 * HUGE);
}

/// R26.
#[test]
fn a_node_with_too_few_hugepages_is_named() {
    let Some(nodes) = several_nodes() else { return };
    let (poor, rich) = (nodes[0], nodes[1]);
    let (Some(_few), Some(_many)) = (NodeHugepages::set(poor, 8), NodeHugepages::set(rich, 64)) else {
        println!("skipped: 8 hugepages on {poor} and 64 on {rich} cannot be reserved");
        return;
    };
    let service = ZeroingService::builder().build().unwrap();
    let pool = |node: NodeId, pages: u64| {
        HugepagePool::builder(&service)
            .page_size(PageSize::Huge2M)
            .capacity(node, pages * HUGE)
            .slab_bytes(4 * HUGE)
    };
    let reservation =
        format!("/sys/devices/system/node/node{}/hugepages/hugepages-2048kB/nr_hugepages", poor.0);
    let error = pool(poor, 32).build().unwrap_err();
    let text = error.to_string();
    match error {
        PoolError::NotEnoughHugepages { node, page, needed, free, file, .. } => {
            assert_eq!((node, page, needed, free), (poor, HUGE, 32, 8), "{text}");
            assert_eq!(file, reservation);
            assert!(fs::metadata(&file).is_ok(), "the remedy exists");
        }
        other => panic!("{other:?}"),
    }
    for said in ["need 32 pages", &poor.to_string(), "8 free", &reservation] {
        assert!(text.contains(said), "{said:?} in {text}");
    }
    assert_eq!((NodeHugepages::free(poor), NodeHugepages::free(rich)), (8, 64), "all given back");

    // Of two nodes, the one that lacks them is named: also where the host as a whole has too few, and that comes out
    // at the other one.
    for for_rich in [32, 64] {
        let error = pool(rich, for_rich).capacity(poor, 16 * HUGE).build().unwrap_err();
        assert!(
            matches!(error, PoolError::NotEnoughHugepages { node, needed: 16, free: 8, .. } if node == poor),
            "{error}"
        );
        assert_eq!((NodeHugepages::free(poor), NodeHugepages::free(rich)), (8, 64), "all given back");
    }

    // There is room on the other node: for who asks there.
    let there = pool(rich, 32).build().unwrap();
    assert_eq!((NodeHugepages::free(poor), NodeHugepages::free(rich)), (8, 32));
    drop(there);

    // And a lease goes elsewhere only if its policy allows.
    let both = pool(rich, 32).capacity(poor, 8 * HUGE).build().unwrap();
    match both.lease(16 * HUGE, NodePolicy::Strict(poor)).unwrap_err() {
        LeaseError::Exhausted { needed, nodes, zero, .. } => {
            assert_eq!((needed, nodes, zero), (16 * HUGE, vec![poor], 8 * HUGE));
        }
        other => panic!("{other:?}"),
    }
    let memory = leased(&both, 16 * HUGE, NodePolicy::Prefer(poor));
    assert_zero(&memory, 0, 16 * HUGE);
    assert_on(poor, host(&memory, 0), 8 * HUGE, HUGE);
    assert_on(rich, host(&memory, 8 * HUGE), 8 * HUGE, HUGE);
    assert_eq!(memory.num_regions(), 4, "a region for each slab");
    assert!(memory.iter().all(|region| region.len() == 4 * HUGE));
}

/// Without hugepages on the node, a pool that was not told which pages to use takes base pages, of that node.
#[test]
fn base_pages_of_the_same_node_stand_in() {
    let Some(nodes) = several_nodes() else { return };
    let (poor, rich) = (nodes[1], nodes[0]);
    let (Some(_none), Some(_many)) = (NodeHugepages::set(poor, 0), NodeHugepages::set(rich, 16)) else {
        println!("skipped: hugepages cannot be reserved on {rich} alone");
        return;
    };
    let service = ZeroingService::builder().build().unwrap();
    let pool = HugepagePool::builder(&service).capacity(poor, 8 * HUGE).build().unwrap();
    assert!(!pool.is_hugetlb());
    let memory = leased(&pool, 8 * HUGE, NodePolicy::Strict(poor));
    assert_zero(&memory, 0, 8 * HUGE);
    assert_on(poor, host(&memory, 0), 8 * HUGE, PAGE);
    assert_eq!(NodeHugepages::free(rich), 16, "none was taken from the other node");
}

/// R27: memory without CPUs is lent to those who name it, not to those who take anything.
#[test]
fn memory_without_cpus_is_lent_by_name_only() {
    if several_nodes().is_none() {
        return;
    }
    let Some(foreign) = memory_nodes().into_iter().find(|node| cpus_of(*node).is_empty()) else {
        println!("no node of this machine is memory alone");
        return;
    };
    let service = ZeroingService::builder().build().unwrap();
    let ordinary = memory_nodes()[0];
    let builder = HugepagePool::builder(&service).page_size(PageSize::Base).slab_bytes(8 * MIB);
    let pool = builder.capacity(ordinary, 8 * MIB).capacity(foreign, 8 * MIB).build().unwrap();
    for policy in [NodePolicy::Any, NodePolicy::Prefer(ordinary)] {
        match pool.lease(16 * MIB, policy).unwrap_err() {
            LeaseError::Exhausted { nodes, zero, .. } => assert_eq!((nodes, zero), (vec![ordinary], 8 * MIB)),
            other => panic!("{other:?}"),
        }
    }
    let memory = leased(&pool, 16 * MIB, NodePolicy::Prefer(foreign));
    assert_zero(&memory, 0, 16 * MIB);
    assert_on(foreign, host(&memory, 0), 8 * MIB, PAGE);
    assert_on(ordinary, host(&memory, 8 * MIB), 8 * MIB, PAGE);
}
