//! Booting: pages that the kernel hands out fresh are not written twice, and whatever is not proved fresh
//! is overwritten. Afterwards all of it is present.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use common::hooked::{Answer, HookedRegion, memory_of};
use common::hugepages::{HUGE, Hugepages, hugetlb_memfd};
use common::mapped::{Mapped, present_pages, punch};
use common::uffd::Userfaultfd;
use common::{
    MIB, PAGE, all_zero, assert_exact, bytes, fill, holes_are_believed, is_zero, memfd, outcome_at, service,
};
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestRegionMmap, MmapRegion,
};
use vm_zeroing::{Intent, Outcome, Report, Strategy, Verify, ZeroRequest};

type Memory = GuestMemoryMmap<()>;

const LEN: u64 = 48 * MIB;

fn anonymous() -> Arc<Memory> {
    Arc::new(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), LEN as usize)]).unwrap())
}

/// A mapping of the whole file, shared or private.
fn over(file: &File, len: u64, flags: libc::c_int) -> Arc<Memory> {
    let offset = FileOffset::new(file.try_clone().unwrap(), 0);
    let region = MmapRegion::build(
        Some(offset),
        len as usize,
        libc::PROT_READ | libc::PROT_WRITE,
        flags | libc::MAP_NORESERVE,
    );
    let region = GuestRegionMmap::new(region.unwrap(), GuestAddress(0)).unwrap();
    Arc::new(GuestMemoryMmap::from_regions(vec![region]).unwrap())
}

fn base(memory: &Memory) -> u64 {
    memory.get_host_address(GuestAddress(0)).unwrap() as u64
}

/// Boots it: everything is zero and present afterwards.
fn boot(memory: &Arc<Memory>, len: u64) -> Arc<Report> {
    let report = all_zero(&service().zero(memory, Intent::Boot).unwrap());
    assert_eq!(present_pages(base(memory), len) as u64, len / PAGE, "made present");
    assert_exact(&**memory, &report, &[(0, len)]);
    report
}

fn nothing_is_fresh(report: &Report) {
    assert_eq!((report.reads_zero_bytes, report.erased_bytes), (0, report.total_bytes), "{report:?}");
}

#[test]
fn fresh_private_anonymous_memory_is_not_written() {
    let memory = anonymous();
    let report = boot(&memory, LEN);
    assert_eq!((report.reads_zero_bytes, report.erased_bytes), (LEN, 0));
    assert_eq!((report.ranges.len(), report.method), (1, None));
    // Once present, it is fresh no more: a guest may have had it meanwhile.
    fill(&*memory, 0, LEN);
    nothing_is_fresh(&boot(&memory, LEN));
    nothing_is_fresh(&boot(&memory, LEN));
}

/// R5: memory that looks fresh, with a few bytes somewhere.
#[test]
fn stray_bytes_in_private_anonymous_memory() {
    let memory = anonymous();
    let stray = [0, 5 * MIB + 17, 12 * MIB - 1, 30 * MIB, LEN - 1];
    for at in stray {
        memory.write_obj(0xa5u8, GuestAddress(at)).unwrap();
    }
    let report = boot(&memory, LEN);
    for at in stray {
        assert_eq!(outcome_at(&report, at), &Outcome::Erased, "{at:#x}");
    }
    assert!(report.reads_zero_bytes > 0);
}

/// The same by host range, where nothing but the mapping itself tells what it is.
#[test]
fn stray_bytes_in_a_host_range() {
    let memory = Arc::new(Mapped::anonymous(LEN));
    memory.fill(9 * MIB + 5, 1, 0xa5);
    let range = memory.host_range(0, LEN);
    let at = range.base() + 9 * MIB + 5;
    let report = all_zero(&service().submit(ZeroRequest::host([range]).intent(Intent::Boot)).unwrap());
    assert_eq!(outcome_at(&report, at), &Outcome::Erased);
    assert!(report.reads_zero_bytes > 0);
    assert!(memory.holds(0, LEN, 0));
    assert_eq!(memory.present_pages() as u64, LEN / PAGE);
}

/// A page that was only read shows as present, and one that was swapped shows as swapped; neither is fresh.
#[test]
fn pages_that_were_only_read() {
    let memory = anonymous();
    assert_eq!(bytes(&*memory, 7 * MIB, 1), [0]);
    let report = boot(&memory, LEN);
    assert_eq!(outcome_at(&report, 7 * MIB), &Outcome::Erased);
}

#[test]
fn a_memory_file_with_holes() {
    let file = memfd(LEN);
    let data = [(PAGE, 10), (9 * MIB - 3, 6), (33 * MIB, 5 * MIB)];
    for (start, len) in data {
        file.write_all_at(&vec![0xa5; len as usize], start).unwrap();
    }
    let report = boot(&over(&file, LEN, libc::MAP_SHARED), LEN);
    for (start, len) in data {
        for at in [start, start + len - 1] {
            assert_eq!(outcome_at(&report, at), &Outcome::Erased, "{at:#x}");
        }
    }
    assert_eq!(report.reads_zero_bytes > 0, holes_are_believed());
    assert!(is_zero(&*over(&file, LEN, libc::MAP_SHARED), 0, LEN), "through another mapping too");
}

/// The data were written through another mapping, and this one has never been touched.
#[test]
fn data_that_came_by_another_mapping() {
    let file = memfd(LEN);
    fill(&*over(&file, LEN, libc::MAP_SHARED), 0, LEN);
    nothing_is_fresh(&boot(&over(&file, LEN, libc::MAP_SHARED), LEN));
}

/// R47: the file is all hole, and the mapping's own copies still hold the bytes.
#[test]
fn private_copies_of_a_punched_file() {
    let file = memfd(LEN);
    let memory = over(&file, LEN, libc::MAP_PRIVATE);
    fill(&*memory, 0, LEN);
    punch(&file, 0, LEN);
    nothing_is_fresh(&boot(&memory, LEN));
    // Not even where the mapping was never touched.
    nothing_is_fresh(&boot(&over(&file, LEN, libc::MAP_PRIVATE), LEN));
}

/// R1: hugepages of an object that was used before, opened anew; this mapping has seen none of them.
#[test]
fn hugepages_that_were_used_before() {
    let Some(_pages) = Hugepages::reserve(4) else { return };
    let file = hugetlb_memfd(4);
    fill(&*over(&file, 3 * HUGE, libc::MAP_SHARED), 0, 3 * HUGE);
    let memory = over(&file, 4 * HUGE, libc::MAP_SHARED);
    let report = all_zero(&service().zero(&memory, Intent::Boot).unwrap());
    assert_eq!(outcome_at(&report, 0), &Outcome::Erased);
    assert_eq!(outcome_at(&report, 3 * HUGE - 1), &Outcome::Erased);
    assert!(is_zero(&*over(&file, 4 * HUGE, libc::MAP_SHARED), 0, 4 * HUGE));
}

/// A region that says that it maps a file, or a part of one, which it does not map.
#[test]
fn a_region_that_is_wrong_about_its_file() {
    let (mapped, empty) = (memfd(LEN), memfd(LEN));
    mapped.write_all_at(&vec![0xa5; LEN as usize / 2], LEN / 2).unwrap();
    let lies = [
        FileOffset::new(empty.try_clone().unwrap(), 0),
        FileOffset::new(empty.try_clone().unwrap(), LEN / 2),
        // The right file, and the part of it that is a hole.
        FileOffset::new(mapped.try_clone().unwrap(), 0),
        FileOffset::new(mapped.try_clone().unwrap(), 2 * LEN),
        FileOffset::new(mapped.try_clone().unwrap(), u64::MAX - LEN / 2),
        FileOffset::new(File::open("/proc/self/status").unwrap(), 0),
    ];
    for lie in lies {
        mapped.write_all_at(&vec![0xa5; LEN as usize / 2], LEN / 2).unwrap();
        let truth = FileOffset::new(mapped.try_clone().unwrap(), LEN / 2);
        let mapping = MmapRegion::<()>::from_file(truth, LEN as usize / 2).unwrap();
        let mut region = HookedRegion::over(mapping, 0, |_, _| Answer::AsAsked);
        region.file = Some(lie.clone());
        let memory = memory_of(vec![region]);
        let report = all_zero(&service().zero(&memory, Intent::Boot).unwrap());
        assert_exact(&*memory, &report, &[(0, LEN / 2)]);
        nothing_is_fresh(&report);
    }
}

/// R48: whoever handles the faults decides the bytes. Nothing there is fresh, and no hole.
#[test]
fn memory_under_a_userfaultfd() {
    let file = memfd(16 * MIB);
    let memories = [
        Arc::new(GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 16 * MIB as usize)]).unwrap()),
        over(&file, 16 * MIB, libc::MAP_SHARED),
    ];
    for memory in memories {
        let Some(handled) = Userfaultfd::register(base(&memory), 16 * MIB) else { return };
        let handler = handled.answer_with(0x5a);
        let report = all_zero(&service().zero(&memory, Intent::Boot).unwrap());
        nothing_is_fresh(&report);
        assert_exact(&*memory, &report, &[(0, 16 * MIB)]);
        drop(handler);
    }
}

/// Only a part of the memory is under one; the rest may be fresh.
#[test]
fn memory_partly_under_a_userfaultfd() {
    let memory = anonymous();
    let (start, len) = (8 * MIB, 12 * MIB);
    let Some(handled) = Userfaultfd::register(base(&memory) + start, len) else { return };
    let handler = handled.answer_with(0x5a);
    let report = boot(&memory, LEN);
    drop(handler);
    for at in (start..start + len).step_by(PAGE as usize) {
        assert_eq!(outcome_at(&report, at), &Outcome::Erased, "{at:#x}");
    }
    assert!(report.reads_zero_bytes > 0);
}

/// Strategy and intent are two things.
#[test]
fn strategy_can_be_overridden() {
    let service = service();
    let submit = |memory: &Arc<Memory>, intent, strategy| {
        let request = ZeroRequest::new(memory).intent(intent).strategy(strategy).verify(Verify::Full);
        all_zero(&service.submit(request).unwrap())
    };
    // What was never used: left as it is, or made present.
    for (intent, strategy, present) in
        [(Intent::Boot, Strategy::Overwrite, 0), (Intent::Background, Strategy::Populate, LEN / PAGE)]
    {
        let memory = anonymous();
        assert_eq!(submit(&memory, intent, strategy).reads_zero_bytes, LEN);
        assert_eq!(present_pages(base(&memory), LEN) as u64, present);
    }
}

/// Sub-ranges: a page that is partly asked for may hold bytes in its other part.
#[test]
fn a_range_whose_first_page_holds_strangers() {
    let memory = anonymous();
    memory.write_slice(&[0xa5; 100], GuestAddress(PAGE)).unwrap();
    let (start, len) = (PAGE + 50, 20 * MIB);
    let request = ZeroRequest::new(&memory).ranges([(GuestAddress(start), len)]).intent(Intent::Boot);
    let report = all_zero(&service().submit(request).unwrap());
    assert_eq!(outcome_at(&report, start), &Outcome::Erased);
    assert_eq!(bytes(&*memory, PAGE, 100), [[0xa5; 50], [0; 50]].concat());
    assert!(is_zero(&*memory, start, len));
    assert!(report.reads_zero_bytes > 0);
}
