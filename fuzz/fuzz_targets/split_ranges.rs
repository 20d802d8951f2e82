//! Any order of splits covers each byte once; merged ranges hold the bytes of their parts, each once.
//!
//! Input, little-endian: start, length and grain (8 bytes each), one byte: how many choices, that many
//! choices of one byte, then ranges of 16 bytes (start, length).
#![no_main]

use libfuzzer_sys::arbitrary::Unstructured;
use libfuzzer_sys::fuzz_target;

#[path = "../../src/extent/mod.rs"]
mod extent;

use extent::{Extent, merge_ranges};

const REGION: u32 = 7;

fuzz_target!(|data: &[u8]| {
    let mut input = Unstructured::new(data);
    // An exhausted input goes on as zeros.
    let mut word = || input.arbitrary::<u64>().unwrap_or(0);
    let (start, len, grain) = (word(), word(), word());
    let choices = input.arbitrary::<u8>().unwrap_or(0).into();
    let choices = input.bytes(choices).unwrap_or_default();
    // The contract of an extent: its end does not overflow.
    split(Extent { region: REGION, start, len: len.min(u64::MAX - start) }, grain, choices);
    let ranges = input.take_rest().chunks_exact(16).map(|range| {
        let (start, len) = range.split_at(8);
        let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        (word(start), word(len))
    });
    merge(ranges.collect());
});

/// Splits as the choices say: bit 0 whether once or down to a cell, the others which extent is next.
fn split(whole: Extent, grain: u64, choices: &[u8]) {
    let cell_of = |byte: u64| byte / grain.max(1);
    let mut extents = vec![whole];
    for choice in choices {
        let extent = extents.swap_remove(usize::from(choice >> 1) % extents.len());
        if choice & 1 == 0 {
            let (near, far) = extent.halve(grain);
            match far {
                Some(far) => {
                    let cells = |part: Extent| cell_of(part.end() - 1) - cell_of(part.start);
                    assert!(cells(near).abs_diff(cells(far)) <= 1, "halves differ by one cell at most");
                    extents.extend([near, far]);
                }
                None => {
                    assert_eq!(near, extent, "what is not halved comes back whole");
                    assert!(extent.len == 0 || cell_of(extent.start) == cell_of(extent.end() - 1));
                    extents.push(near);
                }
            }
        } else {
            let mut end = extent.end();
            let cell = extent.split_to_cell(grain, |far| {
                assert_eq!(far.end(), end, "the farthest is offered first");
                end = far.start;
                extents.push(far);
            });
            assert_eq!((cell.start, cell.end()), (extent.start, end));
            assert!(cell.len == 0 || cell_of(cell.start) == cell_of(cell.end() - 1), "one cell is left");
            extents.push(cell);
        }
    }
    extents.sort_unstable();
    let mut at = whole.start;
    for extent in &extents {
        assert_eq!((extent.region, extent.start), (REGION, at), "in the region, without hole or overlap");
        assert!(extent.len > 0 || *extent == whole, "nothing empty is made");
        assert!(at == whole.start || at.is_multiple_of(grain.max(1)), "cuts lie on the grain");
        at = extent.end();
    }
    assert_eq!(at, whole.end());

    // Every other one of them as a hole: the pieces between and in them are the whole again.
    let holes: Vec<Extent> = extents.iter().copied().skip(1).step_by(2).collect();
    let mut at = whole.start;
    for (piece, inside) in whole.pieces(&holes) {
        assert_eq!((piece.region, piece.start), (REGION, at));
        assert!(piece.len > 0);
        assert_eq!(holes.iter().any(|hole| hole.start <= at && piece.end() <= hole.end()), inside);
        at = piece.end();
    }
    assert_eq!(at, whole.end());
}

/// Compares with membership, asked of the bytes where it may change.
fn merge(ranges: Vec<(u64, u64)>) {
    let overflows = ranges.iter().any(|range| range.1 > 0 && range.0.checked_add(range.1).is_none());
    let merged = merge_ranges(ranges.clone());
    assert_eq!(merged.is_none(), overflows);
    let Some(merged) = merged else { return };
    let holders = |all: &[(u64, u64)], byte: u64| {
        all.iter().filter(|range| range.0 <= byte && byte - range.0 < range.1).count()
    };
    for range in ranges.iter().chain(&merged) {
        let edges = [range.0, range.0.wrapping_add(range.1)];
        for byte in edges.into_iter().flat_map(|edge| [edge.wrapping_sub(1), edge]) {
            assert_eq!(holders(&merged, byte), usize::from(holders(&ranges, byte) > 0), "byte {byte:#x}");
        }
    }
    let apart = |pair: &[(u64, u64)]| pair[0].0 + pair[0].1 < pair[1].0;
    assert!(merged.windows(2).all(apart), "ascending, none touches the next");
    assert!(merged.iter().all(|range| range.1 > 0));
}
