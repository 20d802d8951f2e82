//! The topology of an emulated machine: what the library reads is what the machine was made of.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod machines;

use machines::{Described, cpu_nodes, described};
use vm_zeroing::{NodeId, NodeKind, Topology, ZeroingService};

fn machine() -> Option<(Described, Topology)> {
    let Some(described) = described() else {
        println!("skipped: not in an emulated machine (tests/machines/run)");
        return None;
    };
    Some((described, Topology::detect().unwrap()))
}

#[test]
fn nodes_are_those_of_the_machine() {
    let Some((described, topology)) = machine() else { return };
    let ids: Vec<u32> = topology.nodes().iter().map(|node| node.id().0).collect();
    assert_eq!(ids, described.nodes.iter().map(|node| node.0).collect::<Vec<u32>>());
    assert!(!topology.is_implicit());
    for ((id, cpus, mib), node) in described.nodes.iter().zip(topology.nodes()) {
        assert_eq!(node.cpus(), cpus, "node {id}");
        assert_eq!(node.allowed_cpus(), cpus, "node {id}");
        // The firmware and the kernel keep some for themselves.
        let found = node.memory_bytes() >> 20;
        assert!(found <= *mib && found * 10 >= *mib * 8, "node {id}: {found} MiB of {mib}");
        assert_eq!(node.memory_allowed(), *mib > 0, "node {id}");
        let kind = match (cpus.is_empty(), *mib) {
            (false, 0) => NodeKind::CpusOnly,
            (false, _) => NodeKind::Normal,
            (true, _) => NodeKind::MemoryOnly,
        };
        assert_eq!(node.kind(), kind, "node {id}");
    }
}

#[test]
fn distances_are_those_of_the_machine() {
    let Some((described, topology)) = machine() else { return };
    for (from, ..) in &described.nodes {
        for (to, ..) in &described.nodes {
            let found = topology.distance(NodeId(*from), NodeId(*to));
            assert_eq!(found, described.distance(*from, *to), "from {from} to {to}");
        }
    }
}

/// R27: whatever a node is made of, the nearest allowed CPUs serve it.
#[test]
fn every_node_is_served_by_the_nearest_cpus() {
    let Some((described, topology)) = machine() else { return };
    for (id, own, _) in &described.nodes {
        let with_cpus = || described.nodes.iter().filter(|node| !node.1.is_empty());
        let nearest = with_cpus().map(|node| described.distance(node.0, *id)).min().unwrap();
        let mut cpus: Vec<u32> = with_cpus()
            .filter(|node| described.distance(node.0, *id) == nearest)
            .flat_map(|node| node.1.clone())
            .collect();
        cpus.sort_unstable();
        let expected = if own.is_empty() { &cpus } else { own };
        assert_eq!(topology.cpus_serving(NodeId(*id)), expected, "node {id}");
    }
}

/// Memory without CPUs (CXL) is not chosen unless somebody names it.
#[test]
fn only_ordinary_memory_is_taken_unasked() {
    let Some((described, topology)) = machine() else { return };
    let ordinary = described.nodes.iter().filter(|(_, cpus, mib)| !cpus.is_empty() && *mib > 0);
    assert_eq!(topology.default_memory_nodes(), ordinary.map(|node| NodeId(node.0)).collect::<Vec<_>>());
}

#[test]
fn there_are_workers_on_every_node_with_cpus() {
    let Some((described, topology)) = machine() else { return };
    let service = ZeroingService::builder().build().unwrap();
    let cpus: usize = described.nodes.iter().map(|(_, cpus, _)| cpus.len().min(8)).sum();
    assert_eq!(service.workers(), cpus);
    assert_eq!(cpu_nodes().len(), described.nodes.iter().filter(|node| !node.1.is_empty()).count());
    assert_eq!(service.topology().nodes().len(), topology.nodes().len());
}
