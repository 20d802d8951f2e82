//! Holes of guest memory (R35): the hole around device addresses is not memory, and its neighbours are.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use common::{MIB, PAGE, all_zero, assert_exact, fill, is_pattern, is_zero, memfd, service};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};
use vm_zeroing::{Intent, RequestError, ZeroRequest};

const GIB: u64 = 1 << 30;
/// Below and above the hole, of uneven sizes.
const LOW: (u64, u64) = (3 * GIB - 5 * MIB - PAGE, 5 * MIB + PAGE);
const HIGH: (u64, u64) = (4 * GIB, 9 * MIB + 7 * PAGE);

/// Both regions in one file, with strangers' bytes before, between and behind them.
fn memory() -> (Arc<GuestMemoryMmap<()>>, std::fs::File, [(u64, u64); 3]) {
    let gap = 3 * PAGE;
    let file = memfd(gap + LOW.1 + gap + HIGH.1 + gap);
    let strangers = [(0, gap), (gap + LOW.1, gap), (gap + LOW.1 + gap + HIGH.1, gap)];
    let at = |offset| Some(FileOffset::new(file.try_clone().unwrap(), offset));
    let regions = [
        (GuestAddress(LOW.0), LOW.1 as usize, at(gap)),
        (GuestAddress(HIGH.0), HIGH.1 as usize, at(gap + LOW.1 + gap)),
    ];
    let memory = GuestMemoryMmap::from_ranges_with_files(regions).unwrap();
    for (start, len) in [LOW, HIGH] {
        fill(&memory, start, len);
    }
    for (start, len) in strangers {
        file.write_all_at(&vec![0x77; len as usize], start).unwrap();
    }
    (Arc::new(memory), file, strangers)
}

#[test]
fn both_regions_are_zero_and_their_neighbours_intact() {
    let service = service();
    for intent in [Intent::Teardown, Intent::Boot, Intent::Background] {
        let (memory, file, strangers) = memory();
        let report = all_zero(&service.zero(&memory, intent).unwrap());
        assert_exact(&*memory, &report, &[LOW, HIGH]);
        for (start, len) in strangers {
            let mut found = vec![0; len as usize];
            file.read_exact_at(&mut found, start).unwrap();
            assert!(found.iter().all(|byte| *byte == 0x77), "{intent:?} wrote at {start:#x}");
        }
    }
}

#[test]
fn a_range_up_to_the_hole_and_one_behind_it() {
    let (memory, ..) = memory();
    let asked = [(LOW.0 + LOW.1 - 4099, 4099), (HIGH.0, 4 * MIB + 1)];
    let request = ZeroRequest::new(&memory).ranges(asked.map(|(start, len)| (GuestAddress(start), len)));
    let report = all_zero(&service().submit(request).unwrap());
    assert_exact(&*memory, &report, &asked);
    assert!(is_pattern(&*memory, LOW.0, LOW.1 - 4099));
    assert!(is_pattern(&*memory, HIGH.0 + 4 * MIB + 1, HIGH.1 - 4 * MIB - 1));
}

/// A range that spans the hole names an address that is no memory: refused whole, and nothing touched.
#[test]
fn a_range_across_the_hole_is_refused() {
    let (memory, ..) = memory();
    let (start, len) = (LOW.0 + 1, HIGH.0 - LOW.0);
    let error = service().submit(ZeroRequest::new(&memory).ranges([(GuestAddress(start), len)])).unwrap_err();
    let RequestError::NotGuestMemory { start: named, len: named_len, hole } = error else {
        panic!("{error}")
    };
    assert_eq!((named, named_len, hole), (start, len, LOW.0 + LOW.1));
    assert!(is_pattern(&*memory, LOW.0, LOW.1) && is_pattern(&*memory, HIGH.0, HIGH.1));
}

/// Regions that touch are one piece of guest memory to a range.
#[test]
fn a_range_across_two_regions_that_touch() {
    let regions = [(0, 3 * PAGE), (3 * PAGE, 5 * MIB)];
    let memory = regions.map(|(start, len)| (GuestAddress(start), len as usize));
    let memory = Arc::new(GuestMemoryMmap::<()>::from_ranges(&memory).unwrap());
    fill(&*memory, 0, 5 * MIB + 3 * PAGE);
    let asked = (PAGE + 1, 4 * MIB);
    let request = ZeroRequest::new(&memory).ranges([(GuestAddress(asked.0), asked.1)]);
    let report = all_zero(&service().submit(request).unwrap());
    assert_eq!(report.total_bytes, asked.1);
    assert!(is_zero(&*memory, asked.0, asked.1));
    assert!(is_pattern(&*memory, 0, PAGE + 1));
    assert!(is_pattern(&*memory, asked.0 + asked.1, MIB + 2 * PAGE - 1));
}
