//! Page state transitions: every step legal or refused, all of a range or nothing, one winner for each page.
// Helpers of tests are tests too.
#![allow(clippy::unwrap_used)]

#[path = "common/frames.rs"]
mod common;

use std::ops::Range;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use common::*;
use proptest::prelude::*;
use vm_zeroing::PageState::{Leased, Quarantined, Stale, Zero, Zeroing};
use vm_zeroing::{FrameError, FrameTable, NodeId, PageState};

/// A table of one frame in the given state.
fn one(state: PageState) -> FrameTable {
    let table = FrameTable::new(&[span(0, 0, 1)]).unwrap();
    match state {
        Stale => {}
        Zeroing => table.transition(0..1, Stale, Zeroing, None).unwrap(),
        _ => table.preset(0..1, state).unwrap(),
    }
    table
}

#[test]
fn every_step_is_legal_or_refused() {
    #[rustfmt::skip]
    let legal = [
        // to: Stale  Zeroing  Zero  Leased  Quarantined
        [false, true,  false, false, true],  // from Stale
        [true,  false, true,  false, true],  // from Zeroing
        [false, false, false, true,  true],  // from Zero
        [true,  false, false, false, true],  // from Leased
        [false, false, false, false, false], // from Quarantined
    ];
    for (from, row) in PageState::ALL.into_iter().zip(legal) {
        for (to, legal) in PageState::ALL.into_iter().zip(row) {
            assert_eq!(from.may_become(to), legal, "{from:?} to {to:?}");
            for is in PageState::ALL {
                let table = one(is);
                let expected = match legal {
                    false => Err(FrameError::IllegalTransition { from, to }),
                    true if is != from => Err(FrameError::WrongState { frame: 0, expected: from, found: is }),
                    true => Ok(()),
                };
                assert_eq!(table.transition(0..1, from, to, None), expected, "{is:?}: {from:?} to {to:?}");
                let now = if expected.is_ok() { to } else { is };
                let frame = table.frame(0).unwrap();
                assert_eq!(frame.state(), now);
                assert_eq!(frame.generation(), u32::from(expected.is_ok() && is == Leased && to == Stale));
            }
        }
    }
}

#[test]
fn a_range_with_a_hole_is_refused_before_anything_changes() {
    let table = FrameTable::new(&[span(0, 0, 10), span(0, 10, 2), span(0, 20, 10)]).unwrap();
    let hole = FrameError::NoSuchFrame { frame: 12 };
    assert_eq!(table.transition(5..25, Stale, Zeroing, None), Err(hole));
    assert_eq!(table.ready_sections(), 0);
    table.transition(5..12, Stale, Zeroing, None).unwrap();
    table.transition(15..15, Stale, Zeroing, None).unwrap();
    assert_eq!(five(table.counts(NodeId(0))), (15, 7, 0, 0, 0));
}

#[test]
fn a_handle_of_an_older_lease_is_refused() {
    let table = one(Leased);
    let frame = table.frame(0).unwrap();
    table.transition(0..1, Leased, Stale, Some(0)).unwrap();
    for (from, to) in [(Stale, Zeroing), (Zeroing, Zero), (Zero, Leased)] {
        table.transition(0..1, from, to, None).unwrap();
    }
    let old = FrameError::WrongGeneration { frame: 0, expected: 0, found: 1 };
    assert_eq!(table.transition(0..1, Leased, Stale, Some(0)), Err(old.clone()));
    assert_eq!(frame.pin(0), Err(old));
    assert_eq!((frame.state(), frame.pins(), frame.generation()), (Leased, 0, 1));
}

#[test]
fn a_pinned_page_does_not_go_back_into_use() {
    let table = FrameTable::new(&[span(0, 0, 8)]).unwrap();
    table.preset(0..8, Leased).unwrap();
    let frame = table.frame(5).unwrap();
    assert_eq!(frame.unpin(), Err(FrameError::NotPinned { frame: 5 }));
    frame.pin(0).unwrap();
    frame.pin(0).unwrap();
    let pinned = FrameError::Pinned { frame: 5, pins: 2 };
    assert_eq!(table.transition(0..8, Leased, Stale, None), Err(pinned));
    assert_eq!(states(&table, 0..8), [Leased; 8]);
    frame.unpin().unwrap();
    assert!(table.transition(0..8, Leased, Stale, None).is_err());
    frame.unpin().unwrap();
    table.frame(7).unwrap().pin(0).unwrap();
    table.transition(7..8, Leased, Quarantined, None).unwrap();
    table.transition(0..7, Leased, Stale, None).unwrap();
    // The device is still there, and can still be taken away; no new one comes.
    assert_eq!(table.frame(7).unwrap().pins(), 1);
    table.frame(7).unwrap().unpin().unwrap();
    let refused = FrameError::WrongState { frame: 0, expected: Leased, found: Stale };
    assert_eq!(table.frame(0).unwrap().pin(1), Err(refused));
    assert_eq!(five(table.counts(NodeId(0))), (7, 0, 0, 0, 1));
}

/// One frame of the naive model.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Naive {
    state: PageState,
    generation: u32,
}

fn any_state() -> impl Strategy<Value = PageState> {
    (0usize..5).prop_map(|number| PageState::ALL[number])
}

/// Mostly legal, so that the walk gets somewhere.
fn any_step() -> impl Strategy<Value = (PageState, PageState)> {
    let round =
        prop::sample::select(vec![(Stale, Zeroing), (Zeroing, Zero), (Zero, Leased), (Leased, Stale)]);
    prop_oneof![9 => round, 1 => (any_state(), any_state())]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Random steps on two spans that meet (on two nodes, the first over a section's end), against a vector.
    #[test]
    fn random_transitions_agree_with_a_vector_of_states(
        steps in prop::collection::vec((0u64..24, 0u64..12, any_step(), prop::option::weighted(0.2, 0u32..3)), 1..120),
        presets in prop::collection::vec((0u64..24, 0u64..6, any_state()), 0..4),
    ) {
        let (start, border) = (SECTION - 8, SECTION + 8);
        let table = FrameTable::new(&[span(0, 3, border - 3), span(1, border, 8)]).unwrap();
        let mut model = vec![Naive { state: Stale, generation: 0 }; 24];
        let mut taken = [false; 24];
        for (at, len, state) in presets {
            let range = at as usize..(at + len).min(24) as usize;
            let allowed = matches!(state, Zero | Leased | Quarantined) && !taken[range.clone()].contains(&true);
            let done = table.preset(start + range.start as u64..start + range.end as u64, state);
            if range.is_empty() {
                continue;
            }
            prop_assert_eq!(done.is_ok(), allowed, "{:?}", done);
            if allowed {
                model[range.clone()].fill(Naive { state, generation: 0 });
                taken[range].fill(true);
            }
        }
        for (at, len, (from, to), generation) in steps {
            let range = at as usize..(at + len).min(24) as usize;
            let fits = |frame: &Naive| frame.state == from && generation.is_none_or(|g| g == frame.generation);
            let refused = model[range.clone()].iter().position(|frame| !fits(frame));
            let done = table.transition(start + range.start as u64..start + range.end as u64, from, to, generation);
            match (from.may_become(to), refused) {
                (false, _) => prop_assert_eq!(done, Err(FrameError::IllegalTransition { from, to })),
                (true, None) => {
                    prop_assert_eq!(done, Ok(()));
                    for frame in &mut model[range] {
                        frame.state = to;
                        frame.generation += u32::from((from, to) == (Leased, Stale));
                    }
                }
                (true, Some(first)) => {
                    let at = start + (range.start + first) as u64;
                    let named = match done {
                        Err(FrameError::WrongState { frame, found, .. }) => {
                            prop_assert_eq!(found, model[range.start + first].state);
                            Some(frame)
                        }
                        Err(FrameError::WrongGeneration { frame, .. }) => Some(frame),
                        _ => None,
                    };
                    prop_assert_eq!(named, Some(at));
                }
            }
            for (frame, expected) in (start..).zip(&model) {
                let found = table.frame(frame).unwrap();
                prop_assert_eq!(Naive { state: found.state(), generation: found.generation() }, *expected);
            }
            for (node, part, others) in [(0, &model[..16], border - 3 - 16), (1, &model[16..], 0)] {
                let of = |state| part.iter().filter(|frame| frame.state == state).count() as u64;
                let expected = (of(Stale) + others, of(Zeroing), of(Zero), of(Leased), of(Quarantined));
                prop_assert_eq!(five(table.counts(NodeId(node))), expected);
            }
        }
    }
}

/// Threads that all want to lease overlapping ranges over a section's end: of those who want a page one gets
/// it, no page has two owners, somebody always wins, and the counts add up when it is quiet.
#[test]
fn no_page_is_in_two_leases() {
    const FRAMES: u64 = 32;
    let start = SECTION - FRAMES / 2;
    let table = FrameTable::new(&[span(0, 0, 2 * SECTION)]).unwrap();
    table.preset(start..start + FRAMES, Zero).unwrap();
    let owners: Vec<AtomicUsize> = (0..FRAMES).map(|_| AtomicUsize::new(0)).collect();
    let (begin, leases) = (Barrier::new(4), AtomicUsize::new(0));
    thread::scope(|scope| {
        for me in 1..=4 {
            let (table, owners, begin, leases) = (&table, &owners, &begin, &leases);
            scope.spawn(move || {
                begin.wait();
                for round in 0..4000u64 {
                    let first = (round * 7 + me as u64 * 5) % (FRAMES - 11);
                    let range = start + first..start + first + 1 + round % 11;
                    if table.transition(range.clone(), Zero, Leased, None).is_err() {
                        continue;
                    }
                    leases.fetch_add(1, Ordering::Relaxed);
                    let mine = &owners[(range.start - start) as usize..(range.end - start) as usize];
                    for owner in mine {
                        assert_eq!(owner.swap(me, Ordering::Relaxed), 0, "a page has two owners");
                    }
                    for owner in mine {
                        assert_eq!(owner.swap(0, Ordering::Relaxed), me, "a page has two owners");
                    }
                    for (from, to) in [(Leased, Stale), (Stale, Zeroing), (Zeroing, Zero)] {
                        table.transition(range.clone(), from, to, None).unwrap();
                    }
                }
            });
        }
    });
    let generations: u32 = (start..start + FRAMES).map(|f| table.frame(f).unwrap().generation()).sum();
    assert!(generations as usize >= leases.into_inner() && generations > 0);
    assert_eq!(states(&table, start..start + FRAMES), [Zero; FRAMES as usize]);
    assert_eq!(five(table.counts(NodeId(0))), (2 * SECTION - FRAMES, 0, FRAMES, 0, 0));
}

/// Two threads want the same pages at the same moment: one gets all of them, the other none. The ranges are
/// long, so that the two really meet.
#[test]
fn of_two_that_want_the_same_pages_one_wins() {
    let table = FrameTable::new(&[span(0, 0, SECTION)]).unwrap();
    table.preset(0..SECTION, Zero).unwrap();
    for round in 0..300 {
        let begin = Barrier::new(2);
        let want = |range: Range<u64>| {
            begin.wait();
            table.transition(range, Zero, Leased, None).is_ok()
        };
        let (a, b) = thread::scope(|scope| {
            let other = scope.spawn(|| want(1000..SECTION));
            (want(0..3000), other.join().unwrap())
        });
        assert!(a != b, "round {round}: {a} and {b}");
        let won = if a { 0..3000 } else { 1000..SECTION };
        for (from, to) in [(Leased, Stale), (Stale, Zeroing), (Zeroing, Zero)] {
            table.transition(won.clone(), from, to, None).unwrap();
        }
        assert_eq!(five(table.counts(NodeId(0))), (0, 0, SECTION, 0, 0));
    }
}

/// Two threads side by side take page after page and pin one page again and again: no page is taken twice, no
/// pin is lost.
#[test]
fn every_change_of_a_descriptor_counts_once() {
    const PINS: u32 = 20_000;
    let table = FrameTable::new(&[span(0, 0, 4 * SECTION)]).unwrap();
    table.preset(0..1, Leased).unwrap();
    let (begin, pinned) = (Barrier::new(2), Barrier::new(2));
    let taken = || {
        begin.wait();
        let frame = table.frame(0).unwrap();
        (0..PINS).for_each(|_| frame.pin(0).unwrap());
        pinned.wait();
        let take = |frame: &u64| table.transition(*frame..frame + 1, Stale, Zeroing, None).is_ok();
        (1..4 * SECTION).filter(take).count() as u64
    };
    let (a, b) = thread::scope(|scope| {
        let other = scope.spawn(taken);
        (taken(), other.join().unwrap())
    });
    assert_eq!(table.frame(0).unwrap().pins(), 2 * PINS);
    assert_eq!(a + b, 4 * SECTION - 1);
}

/// A recycle that fails at the last page (a device has it pinned) must not show the others as stale, not
/// even for a moment: a zeroing worker would take them from under the guest.
#[test]
fn a_refused_range_never_shows_a_page_in_the_new_state() {
    let table = FrameTable::new(&[span(0, 0, 256)]).unwrap();
    table.preset(0..256, Leased).unwrap();
    table.frame(255).unwrap().pin(0).unwrap();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let thief = scope.spawn(|| {
            let mut stolen = 0;
            while !over.load(Ordering::Relaxed) {
                for frame in 0..4 {
                    stolen += usize::from(table.frame(frame).unwrap().state() != Leased);
                    stolen += usize::from(table.transition(frame..frame + 1, Stale, Zeroing, None).is_ok());
                }
            }
            stolen
        });
        let pinned = Err(FrameError::Pinned { frame: 255, pins: 1 });
        let refused = (0..20_000).all(|_| table.transition(0..256, Leased, Stale, Some(0)) == pinned);
        over.store(true, Ordering::Relaxed);
        assert!(refused);
        assert_eq!(thief.join().unwrap(), 0);
    });
    assert_eq!(five(table.counts(NodeId(0))), (0, 0, 0, 256, 0));
}
