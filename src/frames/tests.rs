//! What only the inside can show: bits, the moment of initialisation, the work list of the driver.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;

use proptest::prelude::*;

use super::state::Descriptor;
use super::transition::update;
use super::*;
use crate::FrameError;
use crate::topology::NodeId;

const SECTION: u64 = FrameTable::SECTION_FRAMES;

fn span(node: u32, first: u64, frames: u64) -> Span {
    Span { node: NodeId(node), first, frames }
}

#[test]
fn zero_bits_are_a_stale_frame() {
    let nothing = Descriptor(0);
    assert_eq!(nothing.state(), PageState::Stale);
    assert_eq!((nothing.node(), nothing.pins(), nothing.generation()), (NodeId(0), 0, 0));
    assert!(!nothing.is_held());
    assert_eq!(Descriptor::new(PageState::Stale, NodeId(0)), Some(nothing));
}

#[test]
fn states_that_were_never_written_count_as_bad() {
    for bits in 5..8 {
        assert_eq!(Descriptor(bits).state(), PageState::Quarantined);
    }
}

#[test]
fn a_node_number_must_fit() {
    assert_eq!(Descriptor::new(PageState::Zero, NodeId(1023)).map(Descriptor::node), Some(NodeId(1023)));
    assert_eq!(Descriptor::new(PageState::Zero, NodeId(1024)), None);
}

#[test]
fn the_generation_wraps_without_touching_its_neighbours() {
    let last = Descriptor(u64::from(u32::MAX) << 32 | PageState::Leased as u64 | 7 << 4);
    let next = last.changed_to(PageState::Stale);
    assert_eq!((next.generation(), next.node(), next.pins()), (0, NodeId(7), 0));
    assert_eq!(next.state(), PageState::Stale);
}

proptest! {
    /// Every field changes alone.
    #[test]
    fn fields_do_not_leak_into_each_other(
        generation: u32, pins in 0..=Descriptor::PINS_MAX, new_pins in 0..=Descriptor::PINS_MAX,
        node in 0u32..1024, from in 0usize..5, to in 0usize..5,
    ) {
        let (from, to) = (PageState::ALL[from], PageState::ALL[to]);
        let plain = Descriptor::new(from, NodeId(node)).unwrap().with_pins(pins);
        let frame = Descriptor(plain.0 | u64::from(generation) << 32);
        let fields = |d: Descriptor| (d.state(), d.is_held(), d.node(), d.pins(), d.generation());
        prop_assert_eq!(fields(frame), (from, false, NodeId(node), pins, generation));
        prop_assert_eq!(fields(frame.held()), (from, true, NodeId(node), pins, generation));
        prop_assert_eq!(frame.held().let_go(), frame);
        prop_assert_eq!(fields(frame.with_pins(new_pins)), (from, false, NodeId(node), new_pins, generation));
        let back = from == PageState::Leased && to == PageState::Stale;
        let expected = generation.wrapping_add(u32::from(back));
        prop_assert_eq!(fields(frame.changed_to(to)), (to, false, NodeId(node), pins, expected));
    }
}

/// The lock on the presets is held open by the test, so the initialiser stops half-way: the section is seen
/// `Initialising`, a preset is refused, a second asker gets in line, and only one of them does the work.
#[test]
fn a_section_half_way_is_initialising_and_a_reader_waits() {
    let table = FrameTable::new(&[span(0, 5, 10)]).unwrap();
    table.preset(7..8, PageState::Zero).unwrap();
    let done = AtomicUsize::new(0);
    thread::scope(|scope| {
        let presets = table.presets();
        for _ in 0..2 {
            scope.spawn(|| {
                let did = table.initialise_section(0).unwrap();
                done.fetch_add(usize::from(did), Ordering::Relaxed);
            });
        }
        let reader = scope.spawn(|| table.frame(7).map(|frame| frame.state()));
        while table.section_state(0) == Ok(SectionState::Pending) {
            thread::yield_now();
        }
        assert_eq!(table.section_state(0), Ok(SectionState::Initialising));
        assert!(!reader.is_finished());
        assert_eq!(table.ready_sections(), 0);
        drop(presets);
        assert_eq!(reader.join().unwrap(), Ok(PageState::Zero));
    });
    assert!(done.into_inner() <= 1);
    assert_eq!((table.ready_sections(), table.section_state(0)), (1, Ok(SectionState::Ready)));
}

#[test]
fn a_preset_that_meets_the_initialisation_is_refused() {
    let table = FrameTable::new(&[span(0, 0, 2 * SECTION)]).unwrap();
    table.initialise_section(1).unwrap();
    let late = table.preset(SECTION - 1..SECTION + 1, PageState::Zero).unwrap_err();
    assert!(matches!(late, FrameError::PresetTooLate { section: 1, .. }), "{late}");
    // Neither half of it was kept.
    assert_eq!(table.frame(SECTION - 1).unwrap().state(), PageState::Stale);
    assert_eq!(table.counts(NodeId(0)).unwrap().zero, 0);
}

/// Two workers a node over the node's list, while others ask for frames: as the pool will do it.
#[test]
fn workers_initialise_every_section_exactly_once() {
    let spans = [
        span(1, 3 * SECTION + 17, 4 * SECTION + 1),
        span(0, 11, 3 * SECTION),
        span(0, 20 * SECTION, 5),
        span(4, 9 * SECTION, SECTION),
    ];
    let table = FrameTable::new(&spans).unwrap();
    let ranges =
        |node| table.section_runs().filter(|run| run.0 == NodeId(node)).map(|run| run.1).collect::<Vec<_>>();
    assert_eq!(ranges(0), [0..3, 9..10]);
    assert_eq!(ranges(1), vec![3..8]);
    assert_eq!(ranges(4), vec![8..9]);
    assert!(ranges(2).is_empty());

    let done = AtomicUsize::new(0);
    for section in table.eager_sections() {
        assert!(table.initialise_section(section).unwrap());
        done.fetch_add(1, Ordering::Relaxed);
    }
    assert_eq!(table.eager_sections().collect::<BTreeSet<_>>(), BTreeSet::from([0, 3, 8]));
    assert_eq!(table.ready_sections(), 3);

    thread::scope(|scope| {
        for node in [0, 0, 1, 1, 4] {
            let (table, done) = (&table, &done);
            scope.spawn(move || {
                for (_, sections) in table.section_runs().filter(|run| run.0 == NodeId(node)) {
                    done.fetch_add(table.initialise(sections).unwrap(), Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(done.into_inner(), table.sections());
    assert_eq!(table.ready_sections(), table.sections());
    for section in 0..table.sections() {
        assert_eq!(table.section_state(section), Ok(SectionState::Ready));
    }
}

/// Somebody pins the page between the look at its descriptor and the swap: both pins count.
#[test]
fn a_descriptor_that_changed_meanwhile_is_looked_at_again() {
    let descriptor = AtomicU64::new(PageState::Leased as u64);
    let frame = PageFrame::new(0, &descriptor);
    let looks = Cell::new(0);
    update(&descriptor, |found| {
        if looks.replace(looks.get() + 1) == 0 {
            frame.pin(0)?;
        }
        Ok(found.with_pins(found.pins() + 1))
    })
    .unwrap();
    assert_eq!(frame.pins(), 2);
    assert!(looks.get() >= 2);
}

/// The test plays another transition that has secured frame 6. A transition of 0..8 gets up to there, shows
/// nothing of itself meanwhile, and waits for the outcome: if the other one gives up it goes on, else it
/// is refused and lets go of what it held.
#[test]
fn a_transition_that_meets_a_held_frame_waits_for_the_outcome() {
    for outcome in [PageState::Stale, PageState::Zeroing] {
        let table = FrameTable::new(&[span(0, 0, 10)]).unwrap();
        let run = table.runs(0..10).next().unwrap();
        let read = |frame: usize| Descriptor(run.descriptors[frame].load(Ordering::Acquire));
        run.descriptors[6].store(read(6).held().0, Ordering::Release);
        let done = thread::scope(|scope| {
            let table = &table;
            let waiting = scope.spawn(|| table.transition(0..8, PageState::Stale, PageState::Zeroing, None));
            while read(5) == Descriptor(0) && !waiting.is_finished() {
                thread::yield_now();
            }
            let seen: Vec<_> = (0..10).map(|frame| (read(frame).state(), read(frame).is_held())).collect();
            run.descriptors[6].store(read(6).let_go().changed_to(outcome).0, Ordering::Release);
            let expected: Vec<_> = (0..10).map(|frame| (PageState::Stale, frame < 7)).collect();
            assert_eq!(seen, expected);
            waiting.join().unwrap()
        });
        let now: Vec<PageState> = (0..8).map(|frame| read(frame).state()).collect();
        if outcome == PageState::Stale {
            assert_eq!((done, now), (Ok(()), vec![PageState::Zeroing; 8]));
        } else {
            let (expected, found) = (PageState::Stale, PageState::Zeroing);
            assert_eq!(done, Err(FrameError::WrongState { frame: 6, expected, found }));
            assert_eq!(now.iter().filter(|state| **state == PageState::Stale).count(), 7);
        }
        assert!((0..10).all(|frame| !read(frame).is_held()));
    }
}
