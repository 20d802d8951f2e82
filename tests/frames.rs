//! The page-frame table: every entry initialised once, presets kept, early readers served (R39).
// Helpers of tests are tests too.
#![allow(clippy::unwrap_used)]

#[path = "common/frames.rs"]
mod common;

use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use common::*;
use vm_zeroing::PageState::{Leased, Quarantined, Stale, Zero, Zeroing};
use vm_zeroing::{FrameError, FrameTable, NodeId, SectionState, Span};

#[test]
fn a_new_table_is_pending_and_stale() {
    let table = FrameTable::new(&[span(3, 100, 2 * SECTION)]).unwrap();
    assert_eq!((table.sections(), table.ready_sections()), (2, 0));
    assert_eq!(table.section_state(1), Ok(SectionState::Pending));
    assert_eq!(five(table.counts(NodeId(3))), (2 * SECTION, 0, 0, 0, 0));
    assert_eq!(table.counts(NodeId(0)), None);
    // Asked early, it is initialised now: stale, so no frame can be leased that nobody made zero.
    let frame = table.frame(100 + SECTION).unwrap();
    assert_eq!((frame.number(), frame.state(), frame.node()), (100 + SECTION, Stale, NodeId(3)));
    assert_eq!((frame.generation(), frame.pins()), (0, 0));
    assert_eq!(table.section_state(0), Ok(SectionState::Pending));
    assert_eq!(table.section_state(1), Ok(SectionState::Ready));
    let refused = table.transition(100..101, Zero, Leased, None).unwrap_err();
    assert_eq!(refused, FrameError::WrongState { frame: 100, expected: Zero, found: Stale });
}

/// R39, all at once: unaligned starts, a hole, presets across the border of sections and spans, workers and
/// early readers on the same sections.
#[test]
fn each_entry_is_initialised_once_and_presets_are_kept() {
    let (first, hole, second) = (1001, 1001 + 2 * SECTION + 7, 1001 + 3 * SECTION);
    let (third, end) = (second + SECTION + 1, second + 2 * SECTION + 6);
    let spans = [span(1, third, end - third), span(0, first, hole - first), span(0, second, third - second)];
    let frames = || (first..hole).chain(second..end);
    for round in 0..50 {
        let table = FrameTable::new(&spans).unwrap();
        assert_eq!(table.sections(), 3 + 2 + 2);
        table.preset(first + SECTION - 2..first + SECTION + 3, Zero).unwrap();
        table.preset(third - 4..third + 1, Leased).unwrap();
        table.preset(end - 1..end, Quarantined).unwrap();
        let preset = |frame| match frame {
            _ if (first + SECTION - 2..first + SECTION + 3).contains(&frame) => Zero,
            _ if (third - 4..third + 1).contains(&frame) => Leased,
            _ if frame == end - 1 => Quarantined,
            _ => Stale,
        };
        assert_eq!(five(table.counts(NodeId(0))), (hole - first + third - second - 9, 0, 5, 4, 0));
        assert_eq!(five(table.counts(NodeId(1))), (end - third - 2, 0, 0, 1, 1));

        // An early user moves a frame of each span on; whoever initialises afterwards must not undo it.
        let moved = [first + round, second + round, third + 1 + round];
        let (start, done) = (Barrier::new(4), AtomicUsize::new(0));
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    start.wait();
                    for section in 0..table.sections() {
                        let did = table.initialise_section(section).unwrap();
                        done.fetch_add(usize::from(did), Ordering::Relaxed);
                        assert_eq!(table.section_state(section), Ok(SectionState::Ready));
                    }
                });
            }
            scope.spawn(|| {
                start.wait();
                for frame in frames().step_by(97) {
                    let found = table.frame(frame).unwrap().state();
                    assert!(found == preset(frame) || moved.contains(&frame), "{frame}: {found:?}");
                }
            });
            scope.spawn(|| {
                start.wait();
                for frame in moved {
                    table.transition(frame..frame + 1, Stale, Zeroing, None).unwrap();
                }
            });
        });
        assert!(done.into_inner() <= table.sections());
        assert_eq!(table.ready_sections(), table.sections());
        for section in 0..table.sections() {
            assert_eq!(table.initialise_section(section), Ok(false));
        }
        for frame in frames() {
            let expected = if moved.contains(&frame) { Zeroing } else { preset(frame) };
            let found = table.frame(frame).unwrap();
            assert_eq!((found.state(), found.generation()), (expected, 0), "frame {frame}");
            assert_eq!(found.node(), NodeId(u32::from(frame >= third)));
            assert_eq!(table.section_node(table.section_of(frame).unwrap()), Ok(found.node()));
        }
        for missing in [0, first - 1, hole, second - 1, end, u64::MAX] {
            assert_eq!(table.frame(missing).unwrap_err(), FrameError::NoSuchFrame { frame: missing });
        }
    }
}

#[test]
fn what_cannot_be_preset() {
    let table = FrameTable::new(&[span(0, 0, 10), span(0, 20, 10)]).unwrap();
    for state in [Stale, Zeroing] {
        assert_eq!(table.preset(0..1, state), Err(FrameError::NotPresettable { state }));
    }
    assert_eq!(table.preset(8..22, Zero), Err(FrameError::NoSuchFrame { frame: 10 }));
    assert_eq!(table.preset(25..31, Zero), Err(FrameError::NoSuchFrame { frame: 30 }));
    table.preset(3..6, Zero).unwrap();
    assert_eq!(table.preset(5..7, Leased), Err(FrameError::PresetTwice { frame: 5, found: Zero }));
    table.preset(6..7, Leased).unwrap();
    table.preset(9..9, Leased).unwrap();
    assert_eq!(table.preset(0..4, Leased), Err(FrameError::PresetTwice { frame: 3, found: Zero }));
    assert_eq!(table.ready_sections(), 0);
    assert_eq!(five(table.counts(NodeId(0))), (16, 0, 3, 1, 0));
    assert_eq!(states(&table, 2..8), [Stale, Zero, Zero, Zero, Leased, Stale]);
    assert_eq!(table.preset(0..1, Zero), Err(FrameError::PresetTooLate { section: 0, frames: 0..1 }));
    table.preset(20..30, Quarantined).unwrap();
}

#[test]
fn spans_that_make_no_table() {
    let refuse = |spans: &[Span]| FrameTable::new(spans).unwrap_err();
    assert_eq!(refuse(&[]), FrameError::NoSpans);
    assert_eq!(refuse(&[span(0, 7, 0)]), FrameError::EmptySpan { span: span(0, 7, 0) });
    let long = span(0, 2, u64::MAX - 1);
    assert_eq!(refuse(&[long]), FrameError::SpanOverflow { span: long });
    let (low, high) = (span(0, 5, 10), span(1, 14, 1));
    assert_eq!(refuse(&[high, low]), FrameError::SpansOverlap { span: low, other: high });
    assert_eq!(refuse(&[span(1024, 0, 1)]), FrameError::NodeTooLarge { span: span(1024, 0, 1) });
    let frames = u64::MAX - 1;
    let sections = frames.div_ceil(SECTION);
    assert_eq!(refuse(&[span(0, 1, frames)]), FrameError::TooManyFrames { frames, sections });

    let last = FrameTable::new(&[span(1023, u64::MAX - 3, 3), span(0, 0, 1)]).unwrap();
    assert_eq!(last.frame(u64::MAX - 1).unwrap().node(), NodeId(1023));
    let none = FrameError::NoSuchSection { section: 2, sections: 2 };
    assert_eq!(last.initialise_section(2), Err(none.clone()));
    assert_eq!(last.section_state(2), Err(none.clone()));
    assert_eq!(last.section_node(2), Err(none));
}
