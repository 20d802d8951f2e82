//! R46: a page of the guest is pinned (a pipe holds it, as a device's mapping would). After the memory was
//! zeroed, the pinned page itself reads zero: it was overwritten, not exchanged for another one.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::sync::Arc;

use common::hugepages::{HUGE, Hugepages, hugetlb_memfd};
use common::pinned::Pinned;
use common::{MIB, PAGE, all_zero, assert_exact, fill, is_zero, memfd, service};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vm_zeroing::{Intent, Outcome};

const LEN: u64 = 12 * MIB;

/// Private anonymous memory, a memory file, hugepages where there are some.
fn memories(hugepages: bool) -> Vec<GuestMemoryMmap<()>> {
    let over = |file: Option<FileOffset>| {
        GuestMemoryMmap::from_ranges_with_files([(GuestAddress(0), LEN as usize, file)]).unwrap()
    };
    let mut memories = vec![over(None), over(Some(FileOffset::new(memfd(LEN), 0)))];
    if hugepages {
        memories.push(over(Some(FileOffset::new(hugetlb_memfd(LEN / HUGE), 0))));
    }
    memories
}

#[test]
fn a_pinned_page_reads_zero_afterwards() {
    let hugepages = Hugepages::reserve(LEN / HUGE);
    let service = service();
    for intent in [Intent::Teardown, Intent::Boot, Intent::Background] {
        for memory in memories(hugepages.is_some()).into_iter().map(Arc::new) {
            fill(&*memory, 0, LEN);
            let base = memory.get_host_address(GuestAddress(0)).unwrap() as u64;
            // In the first chunk, across a chunk's end, the last page.
            let pins = [(5 * PAGE, 3 * PAGE), (4 * MIB - PAGE, 2 * PAGE), (LEN - PAGE, PAGE)];
            let pinned = pins.map(|(start, len)| Pinned::pages(base + start, len));
            let report = all_zero(&service.zero(&memory, intent).unwrap());
            assert_exact(&*memory, &report, &[(0, LEN)]);
            assert!(report.ranges.iter().all(|range| range.outcome == Outcome::Erased), "{report:?}");
            for (pin, (start, _)) in pinned.into_iter().zip(pins) {
                assert!(pin.bytes().iter().all(|byte| *byte == 0), "{intent:?}: old bytes at {start:#x}");
            }
        }
    }
}

/// What the case is about: the same test sees the old bytes when the page is exchanged instead.
#[test]
fn a_page_that_is_exchanged_keeps_its_bytes_for_whoever_pinned_it() {
    let file = memfd(LEN);
    let over = FileOffset::new(file.try_clone().unwrap(), 0);
    let memory =
        GuestMemoryMmap::<()>::from_ranges_with_files([(GuestAddress(0), LEN as usize, Some(over))]).unwrap();
    fill(&memory, 0, LEN);
    let pinned = Pinned::pages(memory.get_host_address(GuestAddress(0)).unwrap() as u64, PAGE);
    common::mapped::punch(&file, 0, PAGE);
    assert!(is_zero(&memory, 0, PAGE), "it looks erased");
    assert!(pinned.bytes().iter().all(|byte| *byte != 0));
}
