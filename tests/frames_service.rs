//! A page-frame table initialised by a service: the first sections at once, the rest by its workers, each
//! exactly once however many ask.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

#[path = "common/pool.rs"]
mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::*;
use vm_zeroing::{FrameTable, JobError, NodeId, Outcome, PageState, SectionState, Span};

const SECTION: u64 = FrameTable::SECTION_FRAMES;

/// Two nodes, a hole between them; the last section of each is short.
fn two_spans(sections: u64) -> Arc<FrameTable> {
    let frames = sections * SECTION - 5;
    let span = |node, first| Span { node: NodeId(node), first, frames };
    Arc::new(FrameTable::new(&[span(0, 100), span(7, 1 << 40)]).unwrap())
}

fn ready(table: &FrameTable) -> Vec<usize> {
    let is_ready = |section: &usize| table.section_state(*section).unwrap() == SectionState::Ready;
    (0..table.sections()).filter(is_ready).collect()
}

#[test]
fn the_first_section_of_each_node_is_ready_at_once_and_others_on_demand() {
    let service = service();
    let table = two_spans(40);
    table.preset(90 * SECTION / 4..100 + 25 * SECTION, PageState::Leased).unwrap();
    let gate = Gate::shut(&service);
    let job = service.initialise_frames(&table).unwrap();
    assert_eq!(ready(&table), [0, 40], "no worker has come to it yet");
    assert_eq!(table.ready_sections(), 2);
    assert_eq!(table.frame(100).unwrap().state(), PageState::Stale);
    // Asked for before its turn.
    assert_eq!(table.frame(100 + 24 * SECTION).unwrap().state(), PageState::Leased);
    assert_eq!(ready(&table), [0, 24, 40]);
    gate.open();
    let report = job.wait().unwrap();
    assert_eq!(report.total_bytes, 80 * SECTION * 8);
    assert!(report.ranges.iter().all(|range| range.outcome == Outcome::Erased), "{report:?}");
    assert_eq!((table.ready_sections(), ready(&table).len()), (80, 80));
    for section in 0..80 {
        assert!(!table.initialise_section(section).unwrap(), "section {section} a second time");
    }
    assert_eq!(table.frame(90 * SECTION / 4).unwrap().state(), PageState::Leased, "presets are kept");
    assert_eq!(table.frame(90 * SECTION / 4 - 1).unwrap().state(), PageState::Stale);
    let last = (1 << 40) + 40 * SECTION - 6;
    assert_eq!(table.frame(last).unwrap().node(), NodeId(7));
    assert!(table.frame(last + 1).is_err());
}

#[test]
fn workers_and_those_who_ask_initialise_each_section_once() {
    let service = service();
    for _ in 0..5 {
        let table = two_spans(300);
        let by_us = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let (table, by_us) = (&table, &by_us);
                scope.spawn(move || {
                    // Against the workers' order, and in it.
                    for step in 0..table.sections() {
                        let section = if thread == 0 { step } else { table.sections() - 1 - step };
                        if table.initialise_section(section).unwrap() {
                            by_us.fetch_add(1, Ordering::Relaxed);
                        }
                        assert_eq!(table.section_state(section).unwrap(), SectionState::Ready);
                    }
                });
            }
            service.initialise_frames(&table).unwrap().wait().unwrap();
        });
        assert_eq!(table.ready_sections(), 600, "counted once for each initialisation");
        assert_eq!(ready(&table).len(), 600);
        assert!(by_us.into_inner() <= 600);
    }
}

#[test]
fn a_cancelled_initialisation_leaves_a_table_that_works_on_demand() {
    let service = service();
    let table = two_spans(40);
    let gate = Gate::shut(&service);
    let job = service.initialise_frames(&table).unwrap();
    job.cancel();
    gate.open();
    assert!(matches!(job.wait(), Err(JobError::Cancelled { .. })));
    assert_eq!(ready(&table), [0, 40]);
    table.transition(100..100 + 3 * SECTION, PageState::Stale, PageState::Zeroing, None).unwrap();
    assert_eq!(ready(&table), [0, 1, 2, 40]);
    service.initialise_frames(&table).unwrap().wait().unwrap();
    assert_eq!(table.ready_sections(), 80);
    assert_eq!(table.frame(100 + SECTION).unwrap().state(), PageState::Zeroing);
}
