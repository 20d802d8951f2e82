//! Zeroing through the service, whatever holds the memory: every byte that was asked for, and no other.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::os::unix::fs::FileExt;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use common::hooked::{Answer, hooked, memory_of};
use common::hugepages::{HUGE, Hugepages, hugetlb_memfd};
use common::mapped::Mapped;
use common::{
    KIB, MIB, PAGE, all_zero, assert_exact, bytes, fill, is_pattern, is_zero, memfd, pattern, readable,
    service,
};
use proptest::prelude::*;
use vm_memory::{
    FileOffset, GuestAddress, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap, MmapRegion,
};
use vm_zeroing::{CpuDescription, Intent, Outcome, Verify, ZeroRequest, ZeroingService};

type Memory = GuestMemoryMmap<()>;

fn anonymous(ranges: &[(u64, u64)]) -> Arc<Memory> {
    let ranges: Vec<_> = ranges.iter().map(|(start, len)| (GuestAddress(*start), *len as usize)).collect();
    Arc::new(GuestMemoryMmap::from_ranges(&ranges).unwrap())
}

fn over_file(file: std::fs::File, len: u64) -> Arc<Memory> {
    let file = FileOffset::new(file, 0);
    Arc::new(GuestMemoryMmap::from_ranges_with_files([(GuestAddress(0), len as usize, Some(file))]).unwrap())
}

#[test]
fn private_anonymous_memory() {
    let len = 24 * MIB + 3 * PAGE;
    let memory = anonymous(&[(0, len)]);
    fill(&*memory, 0, len);
    for intent in [Intent::Teardown, Intent::Background] {
        fill(&*memory, 5, MIB);
        let report = all_zero(&service().zero(&memory, intent).unwrap());
        assert_exact(&*memory, &report, &[(0, len)]);
        assert_eq!((report.ranges.len(), report.erased_bytes), (1, len), "one range, all of it overwritten");
        assert!(report.method.is_some());
    }
}

#[test]
fn a_memory_file_reads_zero_through_the_file_too() {
    let len = 9 * MIB;
    let file = memfd(len);
    let memory = over_file(file.try_clone().unwrap(), len);
    fill(&*memory, 0, len);
    let report = all_zero(&service().zero(&memory, Intent::Teardown).unwrap());
    assert_exact(&*memory, &report, &[(0, len)]);
    let mut found = vec![1; len as usize];
    file.read_exact_at(&mut found, 0).unwrap();
    assert!(found.iter().all(|byte| *byte == 0));
}

#[test]
fn hugepages_of_a_memory_file() {
    let Some(_pages) = Hugepages::reserve(4) else { return };
    let memory = over_file(hugetlb_memfd(4), 4 * HUGE);
    fill(&*memory, 0, 4 * HUGE);
    // Ranges of any shape, too: a hugepage is not the unit of zeroing.
    let odd = (HUGE - 77, HUGE + 1000);
    let service = service();
    let ranges = [(GuestAddress(odd.0), odd.1)];
    let report = all_zero(&service.submit(ZeroRequest::new(&memory).ranges(ranges)).unwrap());
    assert_exact(&*memory, &report, &[odd]);
    assert!(is_pattern(&*memory, 0, odd.0) && is_pattern(&*memory, odd.0 + odd.1, 4 * HUGE - odd.0 - odd.1));
    let report = all_zero(&service.zero(&memory, Intent::Teardown).unwrap());
    assert_exact(&*memory, &report, &[(0, 4 * HUGE)]);
}

/// The job works on the memory as it was at submission, and keeps it.
#[test]
fn a_snapshot_of_memory_that_is_exchanged() {
    let len = 8 * MIB;
    let (old, new) = (anonymous(&[(0, len)]), anonymous(&[(0, len)]));
    fill(&*old, 0, len);
    fill(&*new, 0, len);
    let memory = GuestMemoryAtomic::from(Arc::clone(&old));
    let service = service();
    let request = ZeroRequest::new(&memory);
    memory.lock().unwrap().replace(Memory::clone(&new));
    all_zero(&service.submit(request).unwrap());
    assert!(is_zero(&*old, 0, len));
    assert!(is_pattern(&*new, 0, len));
    all_zero(&service.zero(&memory, Intent::Teardown).unwrap());
    assert!(is_zero(&*memory.memory(), 0, len));
}

#[test]
fn a_region_type_of_the_vmm_itself() {
    let regions = [(0, 5 * MIB), (6 * MIB, 7 * PAGE)];
    let memory = memory_of(regions.map(|(start, len)| hooked(start, len, |_, _| Answer::AsAsked)).into());
    for (start, len) in regions {
        fill(&*memory, start, len);
    }
    let report = all_zero(&service().zero(&memory, Intent::Teardown).unwrap());
    assert_exact(&*memory, &report, &regions);
}

/// Each method that this CPU has, forced, with heads and tails that are no whole lines.
#[test]
fn every_method_of_this_cpu() {
    let len = 4 * MIB + 3 * PAGE;
    for method in CpuDescription::detect().methods() {
        let service = ZeroingService::builder().method(method).build().unwrap();
        assert_eq!(service.method_for(len), method);
        let memory = anonymous(&[(0, len)]);
        for (start, asked) in
            [(0, 0), (1, 1), (63, 63), (64, 64), (65, 65), (1, 127), (4095, 4097), (13, 4 * MIB + 99)]
        {
            fill(&*memory, 0, len);
            let ranges = [(GuestAddress(start), asked)];
            let report = all_zero(&service.submit(ZeroRequest::new(&memory).ranges(ranges)).unwrap());
            assert_eq!(report.method, (asked > 0).then_some(method));
            assert!(is_zero(&*memory, start, asked), "{method} {start} {asked}");
            assert!(is_pattern(&*memory, 0, start), "{method} {start} {asked}");
            assert!(is_pattern(&*memory, start + asked, len - start - asked), "{method} {start} {asked}");
        }
    }
}

/// Canaries on both sides, and beyond them pages that nobody may touch.
#[test]
fn host_ranges_between_canaries_and_guards() {
    for method in CpuDescription::detect().methods() {
        let service = ZeroingService::builder().method(method).build().unwrap();
        for pages in [1, 2, 1025] {
            let whole = (pages + 4) * PAGE;
            let memory = Arc::new(Mapped::anonymous(whole));
            memory.fill(0, whole, 0xa5);
            memory.forbid(0, PAGE);
            memory.forbid(whole - PAGE, PAGE);
            let range = memory.host_range(2 * PAGE, pages * PAGE);
            let start = range.base();
            let job = service.submit(ZeroRequest::host([range]).verify(Verify::Full)).unwrap();
            let report = all_zero(&job);
            assert_eq!((report.ranges[0].start, report.ranges[0].len), (start, pages * PAGE));
            assert_eq!((report.ranges.len(), &report.ranges[0].outcome), (1, &Outcome::Erased));
            assert!(memory.holds(2 * PAGE, pages * PAGE, 0), "{method}");
            assert!(memory.holds(PAGE, PAGE, 0xa5) && memory.holds(whole - 2 * PAGE, PAGE, 0xa5), "{method}");
        }
    }
}

/// Right up to the guards: a store or a prefetching read of one byte more is a SIGSEGV.
#[test]
fn host_ranges_end_where_memory_ends() {
    for method in CpuDescription::detect().methods() {
        let service = ZeroingService::builder().method(method).build().unwrap();
        let memory = Arc::new(Mapped::anonymous(5 * PAGE));
        memory.fill(0, 5 * PAGE, 0xa5);
        memory.forbid(0, PAGE);
        memory.forbid(4 * PAGE, PAGE);
        all_zero(&service.submit(ZeroRequest::host([memory.host_range(PAGE, 3 * PAGE)])).unwrap());
        assert!(memory.holds(PAGE, 3 * PAGE, 0), "{method}");
    }
}

#[test]
fn many_host_ranges_in_one_request() {
    let memory = Arc::new(Mapped::anonymous(64 * PAGE));
    memory.fill(0, 64 * PAGE, 0xa5);
    let ranges: Vec<_> = (0..16).map(|i| memory.host_range(i * 4 * PAGE, (i % 4) * PAGE)).collect();
    let report = all_zero(&service().submit(ZeroRequest::host(ranges)).unwrap());
    assert_eq!(report.total_bytes, 24 * PAGE);
    for i in 0..16 {
        let (start, len) = (i * 4 * PAGE, (i % 4) * PAGE);
        assert!(memory.holds(start, len, 0) && memory.holds(start + len, 4 * PAGE - len, 0xa5));
    }
}

/// A job that is over holds on to nothing, and that is so before anybody can see that it is over.
#[test]
fn memory_is_let_go_of_before_the_end_is_seen() {
    let memory = anonymous(&[(0, 4 * MIB), (8 * MIB, PAGE)]);
    let service = service();
    for turn in 0..600 {
        let request = ZeroRequest::new(&memory);
        let last_page = [(GuestAddress(8 * MIB), PAGE)];
        let job = service.submit(match turn % 3 {
            0 => request,
            1 => request.ranges(last_page),
            _ => request.ranges(last_page).deadline(Instant::now()),
        });
        let job = job.unwrap();
        if turn % 2 == 1 {
            job.cancel();
        }
        // Not by waiting, which may find out about the deadline itself.
        assert!(readable(job.completion_fd().unwrap(), -1));
        assert_eq!(Arc::strong_count(&memory), 1, "turn {turn}");
    }
}

/// The regions of the property below: 5 pages, a hole, 3 pages.
const REGIONS: [(u64, u64); 2] = [(0x1000, 5 * PAGE), (0x8000, 3 * PAGE)];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Ranges of any shape, overlapping ones too, against a table of bytes.
    #[test]
    fn ranges_of_any_shape(asked in prop::collection::vec((0usize..2, any::<u64>(), any::<u64>()), 1..6), boot in any::<bool>()) {
        static SERVICE: OnceLock<ZeroingService> = OnceLock::new();
        let service = SERVICE.get_or_init(service);
        let memory = anonymous(&REGIONS);
        for (start, len) in REGIONS {
            fill(&*memory, start, len);
        }
        let asked: Vec<(GuestAddress, u64)> = asked
            .into_iter()
            .map(|(region, offset, len)| {
                let (start, whole) = REGIONS[region];
                let offset = offset % whole;
                (GuestAddress(start + offset), len % (whole - offset + 1))
            })
            .collect();
        let intent = if boot { Intent::Boot } else { Intent::Teardown };
        let report = all_zero(&service.submit(ZeroRequest::new(&memory).ranges(asked.clone()).intent(intent)).unwrap());
        let mut total = 0;
        for (start, len) in REGIONS {
            for (at, byte) in (start..).zip(bytes(&*memory, start, len)) {
                let inside = asked.iter().any(|(from, len)| from.0 <= at && at < from.0 + len);
                prop_assert_eq!(byte, if inside { 0 } else { pattern(at) }, "at {:#x}", at);
                total += u64::from(inside);
            }
        }
        prop_assert_eq!(report.total_bytes, total, "each byte counts once");
        prop_assert_eq!(report.ranges.iter().map(|range| range.len).sum::<u64>(), total);
    }
}

/// A region that begins in the middle of a file, at an odd place of guest memory.
#[test]
fn a_part_of_a_file() {
    let file = memfd(MIB);
    file.write_all_at(&[0xa5; MIB as usize], 0).unwrap();
    let part = FileOffset::new(file.try_clone().unwrap(), 16 * KIB);
    let region = MmapRegion::<()>::from_file(part, 64 * KIB as usize).unwrap();
    let region = vm_memory::GuestRegionMmap::new(region, GuestAddress(0x12345)).unwrap();
    let memory = Arc::new(GuestMemoryMmap::from_regions(vec![region]).unwrap());
    for intent in [Intent::Boot, Intent::Teardown] {
        let report = all_zero(&service().zero(&memory, intent).unwrap());
        assert_eq!((report.ranges[0].start, report.total_bytes), (0x12345, 64 * KIB));
        assert_eq!(report.erased_bytes, 64 * KIB, "there was data");
        let mut found = vec![0; MIB as usize];
        file.read_exact_at(&mut found, 0).unwrap();
        let expected = |at: usize| if (16 << 10..80 << 10).contains(&at) { 0 } else { 0xa5 };
        assert!(found.iter().enumerate().all(|(at, byte)| *byte == expected(at)));
    }
}
