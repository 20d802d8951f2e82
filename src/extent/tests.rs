use super::*;
use proptest::prelude::*;

proptest! {
    /// Any order of splits covers each byte exactly once, and cuts lie on the grain.
    #[test]
    fn splits_cover_each_byte_once(start in 0u64..1 << 40, len in 1u64..1 << 40, grain_log in 0u32..36) {
        let grain = 1u64 << grain_log;
        prop_assume!(len / grain < 5000);
        let whole = Extent { region: 7, start, len };
        let mut pending = vec![whole];
        let mut cells = Vec::new();
        while let Some(extent) = pending.pop() {
            cells.push(extent.split_to_cell(grain, |far| pending.push(far)));
        }
        let mut at = start;
        for cell in &cells {
            prop_assert_eq!(cell.region, 7);
            prop_assert_eq!(cell.start, at, "ascending without a hole");
            prop_assert!(cell.len > 0 && cell.len <= grain);
            prop_assert!(cell.start == start || cell.start % grain == 0);
            at = cell.end();
        }
        prop_assert_eq!(at, whole.end());
    }

    /// Pieces cover the extent without a gap, and each byte is told whether a part holds it.
    #[test]
    fn pieces_tell_each_byte(start in 0u64..50, len in 0u64..60, cuts in prop::collection::vec(0u64..120, 0..12)) {
        let whole = Extent { region: 7, start, len };
        let mut cuts = cuts;
        cuts.sort_unstable();
        let parts: Vec<Extent> = cuts
            .chunks_exact(2)
            .map(|pair| Extent { region: 7, start: pair[0], len: pair[1] - pair[0] })
            .collect();
        let mut at = start;
        for (piece, inside) in whole.pieces(&parts) {
            prop_assert_eq!((piece.region, piece.start), (7, at));
            prop_assert!(piece.len > 0);
            for byte in piece.start..piece.end() {
                prop_assert_eq!(parts.iter().any(|part| part.start <= byte && byte < part.end()), inside);
            }
            at = piece.end();
        }
        prop_assert_eq!(at, whole.end());
    }

    #[test]
    fn merged_ranges_hold_the_same_bytes(ranges in prop::collection::vec((0u64..400, 0u64..40), 0..20)) {
        let merged = merge_ranges(ranges.clone()).expect("no overflow here");
        for byte in 0..500 {
            let holds = |all: &[(u64, u64)]| all.iter().filter(|r| r.0 <= byte && byte < r.0 + r.1).count();
            prop_assert_eq!(holds(&merged), usize::from(holds(&ranges) > 0));
        }
    }
}

#[test]
fn ends_of_the_address_space() {
    let top = Extent { region: 0, start: u64::MAX - 4096, len: 4096 };
    let (near, far) = top.halve(1 << 12);
    let far = far.expect("two cells are touched");
    assert_eq!((near.end(), far.end()), (far.start, u64::MAX));
    assert_eq!(top.halve(u64::MAX), (top, None));
    assert_eq!(merge_ranges(vec![(u64::MAX, 2)]), None);
    let empty = Extent { region: 0, start: 5, len: 0 };
    assert_eq!(empty.halve(0), (empty, None));
}

#[test]
fn sixteen_tib_is_split_in_a_few_steps() {
    let mut offered = 0;
    Extent { region: 0, start: 0, len: 16 << 40 }.split_to_cell(4 << 20, |_| offered += 1);
    assert_eq!(offered, 22);
}
