//! A page-frame table over several nodes: the descriptors of a node's frames are made by its worker, and lie on it.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod machines;

use std::fs;
use std::sync::Arc;

use machines::{child, is_child, occupy, one_worker_on_each, run, several_nodes};
use vm_zeroing::{FrameTable, NodeId, SectionState, Span};

/// In a span: descriptors of 12 MiB, which no cache of an allocator has lying about.
const SECTIONS: u64 = 384;
const BYTES: u64 = SECTIONS * FrameTable::SECTION_FRAMES * 8;

fn table(nodes: &[NodeId]) -> Arc<FrameTable> {
    let frames = SECTIONS * FrameTable::SECTION_FRAMES;
    let spans = nodes.iter().enumerate();
    let spans: Vec<Span> =
        spans.map(|(index, node)| Span { node: *node, first: index as u64 * 2 * frames, frames }).collect();
    Arc::new(FrameTable::new(&spans).unwrap())
}

/// Bytes of this process on a node (proc_pid_numa_maps(5)).
fn held_on(node: NodeId) -> u64 {
    let maps = fs::read_to_string("/proc/self/numa_maps").unwrap();
    let key = format!("N{}=", node.0);
    let of = |line: &str| -> u64 {
        let value = |key: &str| line.split(' ').find_map(|word| word.strip_prefix(key)?.trim().parse().ok());
        value(&key).unwrap_or(0) * value("kernelpagesize_kB=").unwrap_or(4) * 1024
    };
    maps.lines().map(of).sum()
}

/// In a process of its own, where the allocator has no memory of earlier tables to give.
#[test]
fn descriptors_lie_on_the_node_of_their_frames() {
    if several_nodes().is_some() {
        run(child("where_descriptors_lie"));
    }
}

#[test]
#[ignore = "a child of descriptors_lie_on_the_node_of_their_frames"]
fn where_descriptors_lie() {
    assert!(is_child());
    let nodes = several_nodes().unwrap();
    let mut tables = Vec::new();
    let nodes = &nodes[..2];
    let service = one_worker_on_each(nodes);
    for node in nodes {
        // Nobody helps.
        let mut busy = occupy(&service);
        busy.remove(node).unwrap().release();
        let (table, before) = (table(&[*node]), held_on(*node));
        service.initialise_frames(&table).unwrap().wait().unwrap();
        assert_eq!(table.ready_sections(), SECTIONS as usize);
        let more = held_on(*node) - before;
        assert!(more > BYTES / 10 * 9, "{more} bytes more on {node}, of {BYTES}");
        tables.push(table);
        for (_, busy) in busy {
            busy.release();
        }
    }
}

/// A worker that is alone with the spans of two nodes does those of its own first.
#[test]
fn a_worker_does_its_own_node_first() {
    let Some(nodes) = several_nodes() else { return };
    let nodes = [nodes[0], nodes[1]];
    let service = one_worker_on_each(&nodes);
    for own in nodes {
        let mut busy = occupy(&service);
        let table = table(&nodes);
        let job = service.initialise_frames(&table).unwrap();
        let (ours, others): (Vec<usize>, Vec<usize>) =
            (0..table.sections()).partition(|section| table.section_node(*section).unwrap() == own);
        let ready = |section: &usize| table.section_state(*section).unwrap() == SectionState::Ready;
        assert_eq!(
            (0..table.sections()).filter(ready).count(),
            2,
            "the first of each node, before this returned"
        );
        busy.remove(&own).unwrap().release();
        while !job.is_over() {
            // In this order: what was done before the first foreign one stays done.
            if others.iter().filter(|section| ready(section)).count() > 1 {
                assert!(ours.iter().all(ready), "foreign sections before those of {own}");
            }
        }
        job.wait().unwrap();
        for (_, busy) in busy {
            busy.release();
        }
    }
}
