//! Memory that cannot be had: shortage, truncated files, poisoned pages, memory objects that panic. The
//! rest is cleared, what is not zero is named exactly, no signal comes, and the service goes on.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::files::truncated;
use common::hooked::{Answer, HookedMemory, HookedRegion, hooked, hooked_memory, memory_of};
use common::hugepages::{HUGE, Hugepages, available, hugetlb_memfd};
use common::mapped::Mapped;
use common::uffd::Userfaultfd;
use common::{
    MIB, PAGE, all_zero, assert_exact, fill, is_pattern, is_zero, memfd, outcome_at, readable, service,
    service_with, sum,
};
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestRegionCollection,
    GuestRegionMmap, MmapRegion,
};
use vm_zeroing::{Cause, Intent, JobError, Outcome, Report, ZeroRequest, ZeroingService};

fn failed(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Failed(_))
}

/// Ends with a failure, which is told with its first range.
fn failure(result: Result<Arc<Report>, JobError>) -> (u64, Cause, Arc<Report>) {
    match result.unwrap_err() {
        JobError::Failed { start, len, cause, report } => {
            let outcome = outcome_at(&report, start);
            assert_eq!(
                (outcome, outcome_at(&report, start + len - 1)),
                (&Outcome::Failed(cause.clone()), outcome)
            );
            (start, cause, report)
        }
        other => panic!("{other}"),
    }
}

/// Eight regions of guest memory; the last one has no memory behind its mapping (as if the host had none
/// left: the kernel answers EFAULT), and does not say that a file is to blame.
fn last_of_eight(each: u64) -> (Arc<HookedMemory>, Vec<(u64, u64)>) {
    let asked: Vec<(u64, u64)> = (0..8).map(|number| (number * 2 * each, each)).collect();
    let regions = asked.iter().enumerate().map(|(number, &(start, len))| {
        let file = FileOffset::new(memfd(if number == 7 { 0 } else { len }), 0);
        let mapping = MmapRegion::from_file(file, len as usize).unwrap();
        let mut region = HookedRegion::over(mapping, start, |_, _| Answer::AsAsked);
        region.file = None;
        region
    });
    let memory = memory_of(regions.collect());
    for &(start, len) in &asked[..7] {
        fill(&*memory, start, len);
    }
    (memory, asked)
}

/// R7, teardown: a shortage costs its own range only.
#[test]
fn a_teardown_goes_on_after_a_shortage() {
    for each in [PAGE, 5 * MIB] {
        let (memory, asked) = last_of_eight(each);
        let (last, len) = asked[7];
        let (start, cause, report) = failure(service().zero(&memory, Intent::Teardown).unwrap().wait());
        assert_eq!(cause, Cause::Shortage { errno: libc::EFAULT });
        assert!((last..last + len).contains(&start));
        assert_eq!(report.erased_bytes, 7 * each);
        let (tail, rest) = (report.ranges.last().unwrap(), &report.ranges[..report.ranges.len() - 1]);
        assert_eq!((tail.start, tail.len, failed(&tail.outcome)), (last, len, true));
        assert_eq!(rest.len(), 7);
        for (range, (start, len)) in rest.iter().zip(&asked) {
            assert_eq!((range.start, range.len, &range.outcome), (*start, *len, &Outcome::Erased));
            assert!(is_zero(&*memory, *start, *len));
        }
    }
}

/// R7, boot: a shortage ends the job; the report is exact about the other seven all the same.
#[test]
fn a_boot_ends_with_a_shortage() {
    // One worker comes to the last region at last, or at first: the queue decides. Both are right.
    for workers in [1, 4] {
        let (memory, asked) = last_of_eight(9 * MIB);
        let (last, len) = asked[7];
        let service = service_with(workers);
        let (start, cause, report) = failure(service.zero(&memory, Intent::Boot).unwrap().wait());
        assert_eq!(cause, Cause::Shortage { errno: libc::EFAULT });
        assert!((last..last + len).contains(&start));
        assert!(report.ranges.iter().all(|range| range.start >= last || !failed(&range.outcome)));
        // Several workers may all have a piece of the last region in hand when the first of them fails.
        let untouched = sum(&report, |outcome| *outcome == Outcome::Untouched);
        assert!(workers > 1 || untouched > 0, "it stopped: {report:?}");
        // Outside the last region, which cannot be read.
        let mut seven = Report::clone(&report);
        seven.ranges.retain(|range| range.start < last);
        seven.total_bytes -= len;
        assert_exact(&*memory, &seven, &asked[..7]);
    }
}

/// The same with hugepages that have really run out.
#[test]
fn hugepages_run_out_in_the_last_region() {
    let Some(_pages) = Hugepages::reserve(14) else { return };
    // What the host had before is put aside: a mapping that is not NORESERVE reserves its pages.
    let others = available() - 14;
    let _aside = (others > 0).then(|| Mapped::shared(&hugetlb_memfd(others), others * HUGE));
    for intent in [Intent::Teardown, Intent::Boot] {
        let regions = (0..8).map(|number| {
            let file = FileOffset::new(hugetlb_memfd(2), 0);
            (GuestAddress(number * 4 * HUGE), 2 * HUGE as usize, Some(file))
        });
        let memory =
            Arc::new(GuestMemoryMmap::<()>::from_ranges_with_files(regions.collect::<Vec<_>>()).unwrap());
        for number in 0..7 {
            fill(&*memory, number * 4 * HUGE, 2 * HUGE);
        }
        let (start, cause, report) = failure(service().zero(&memory, intent).unwrap().wait());
        assert!(matches!(cause, Cause::Shortage { .. }), "{cause}");
        assert!(cause.to_string().contains("hugepages"), "names the remedy: {cause}");
        let last = 28 * HUGE;
        assert!(start >= last);
        // A boot ends with the first of them, where a chunk has only one.
        let could_not_be_had = sum(&report, failed);
        assert!(could_not_be_had == 2 * HUGE || intent == Intent::Boot && could_not_be_had == HUGE);
        for range in report.ranges.iter().filter(|range| range.start < last) {
            match range.outcome {
                Outcome::Erased => assert!(is_zero(&*memory, range.start, range.len)),
                Outcome::Untouched if intent == Intent::Boot => {
                    assert!(is_pattern(&*memory, range.start, range.len));
                }
                _ => panic!("{range:?}"),
            }
        }
    }
}

/// R16: a file cut by a page, by more, and in the middle of a page. Neither boot nor teardown stops there.
#[test]
fn a_truncated_file() {
    let len = 13 * MIB;
    for (to, has_memory) in
        [(len - PAGE, len - PAGE), (3 * MIB + PAGE, 3 * MIB + PAGE), (8 * MIB + 1, 8 * MIB + PAGE), (0, 0)]
    {
        for intent in [Intent::Teardown, Intent::Boot] {
            let (memory, file) = truncated(len, to);
            let (start, cause, report) = failure(service().zero(&memory, intent).unwrap().wait());
            assert_eq!(cause, Cause::Truncated);
            assert!(start >= has_memory);
            assert_eq!(sum(&report, failed), len - has_memory, "exactly what has no memory: {report:?}");
            assert_eq!(outcome_at(&report, has_memory), &Outcome::Failed(Cause::Truncated));
            assert_eq!(report.zero_bytes(), has_memory);
            assert_eq!(file.metadata().unwrap().len(), to, "not made longer");
            assert!(is_zero(&*memory, 0, to));
        }
    }
}

/// The same by ranges that begin and end inside pages: the failed part is the asked part of the bad page.
#[test]
fn a_truncated_file_and_ranges_of_any_shape() {
    let len = 9 * MIB;
    let to = 5 * MIB;
    for start in [1, 77, PAGE - 1, PAGE + 64, MIB + 4000] {
        for end in [to + 1, to + PAGE, to + PAGE + 123, len] {
            let (memory, _file) = truncated(len, to);
            let request = ZeroRequest::new(&memory).ranges([(GuestAddress(start), end - start)]);
            let (_, cause, report) = failure(service().submit(request).unwrap().wait());
            assert_eq!(cause, Cause::Truncated);
            let ranges: Vec<_> = report.ranges.iter().map(|r| (r.start, r.len, r.outcome.clone())).collect();
            let expected =
                [(start, to - start, Outcome::Erased), (to, end - to, Outcome::Failed(Cause::Truncated))];
            assert_eq!(ranges, expected, "{start} {end}");
            assert!(is_zero(&*memory, start, to - start) && is_pattern(&*memory, 0, start));
        }
    }
}

/// R16: pages that were poisoned before the job began, on private and on shared memory.
#[test]
fn poisoned_pages() {
    let len = 13 * MIB;
    let file = memfd(len);
    let shared = FileOffset::new(file.try_clone().unwrap(), 0);
    let memories = [
        GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), len as usize)]).unwrap(),
        GuestMemoryMmap::from_ranges_with_files([(GuestAddress(0), len as usize, Some(shared))]).unwrap(),
    ];
    for memory in memories.map(Arc::new) {
        let base = memory.get_host_address(GuestAddress(0)).unwrap() as u64;
        let Some(handled) = Userfaultfd::register(base, len) else { return };
        let bad = [(0, PAGE), (6 * MIB + 3 * PAGE, 2 * PAGE), (8 * MIB - PAGE, 2 * PAGE), (len - PAGE, PAGE)];
        for (start, len) in bad {
            if handled.poison(base + start, len).is_none() {
                return;
            }
        }
        let is_bad = |at: u64| bad.iter().any(|(start, len)| (*start..start + len).contains(&at));
        // Its handler answers for the rest.
        let handler = handled.answer_with(0x5a);
        for intent in [Intent::Teardown, Intent::Boot] {
            let (_, cause, report) = failure(service().zero(&memory, intent).unwrap().wait());
            assert_eq!(cause, Cause::Poisoned);
            for page in (0..len).step_by(PAGE as usize) {
                let expected = if is_bad(page) { Outcome::Failed(Cause::Poisoned) } else { Outcome::Erased };
                assert_eq!(outcome_at(&report, page), &expected, "{page:#x}");
                assert!(is_bad(page) || is_zero(&*memory, page, PAGE));
            }
            assert_eq!(sum(&report, failed), 6 * PAGE);
        }
        drop(handler);
    }
}

/// Memory objects that panic, in either of the places where they are asked: the job fails, the service lives.
#[test]
fn a_memory_object_that_panics() {
    let service = service_with(2);
    let len = 24 * MIB;
    for nth in [0, 1, 4, 5] {
        let calls = AtomicUsize::new(0);
        let memory = hooked_memory(len, move |_, _| {
            assert_ne!(calls.fetch_add(1, Ordering::SeqCst), nth, "this panic is part of the test");
            Answer::AsAsked
        });
        fill(&*memory, 0, len);
        assert_panicked(&service, &memory, len);
    }
}

fn assert_panicked(service: &ZeroingService, memory: &Arc<HookedMemory>, len: u64) {
    let workers = service.workers();
    let job = service.zero(memory, Intent::Teardown).unwrap();
    // The event comes although nobody waits.
    assert!(readable(job.completion_fd().unwrap(), -1));
    let (_, cause, report) = failure(job.wait());
    assert_eq!(cause, Cause::Panicked);
    assert_exact(&**memory, &report, &[(0, len)]);
    assert_eq!(Arc::strong_count(memory), 1, "the job is over and holds nothing");
    assert_eq!(service.workers(), workers);
    let next = memory_of(vec![hooked(0, len, |_, _| Answer::AsAsked)]);
    fill(&*next, 0, len);
    all_zero(&service.zero(&next, Intent::Teardown).unwrap());
}

/// A panic while a failure is narrowed down: what was still to be looked at is not forgotten.
#[test]
fn a_panic_on_the_way_to_the_bad_page() {
    let service = service_with(2);
    let len = 12 * MIB;
    for panics_at in [PAGE as usize, MIB as usize] {
        let memory = hooked_memory(len, move |offset, asked| {
            assert!(asked > panics_at || offset % (8 * MIB) != 0, "this panic is part of the test");
            if asked > panics_at { Answer::Refused } else { Answer::AsAsked }
        });
        fill(&*memory, 0, len);
        assert_panicked(&service, &memory, len);
    }
}

/// A host range without write permission: an error, not a signal, and the rest of the request is cleared.
#[test]
fn a_host_range_that_cannot_be_written() {
    let memory = Arc::new(Mapped::anonymous(64 * PAGE));
    memory.fill(0, 64 * PAGE, 0xa5);
    memory.forbid(20 * PAGE, PAGE);
    let range = memory.host_range(PAGE, 62 * PAGE);
    let (start, cause, report) = failure(service().submit(ZeroRequest::host([range])).unwrap().wait());
    assert!(!matches!(cause, Cause::Panicked | Cause::NotZero { .. }), "{cause}");
    assert_eq!((start, sum(&report, failed)), (memory.base() + 20 * PAGE, PAGE));
    assert!(memory.holds(PAGE, 19 * PAGE, 0) && memory.holds(21 * PAGE, 42 * PAGE, 0));
    assert!(memory.holds(0, PAGE, 0xa5) && memory.holds(63 * PAGE, PAGE, 0xa5));
}

/// One bad region of many does not hide the others' failures.
#[test]
fn every_failure_is_in_the_report() {
    let regions = (0..6).map(|number| {
        hooked(number * 8 * MIB, 4 * MIB + PAGE, move |_, _| {
            if number % 2 == 0 { Answer::Refused } else { Answer::AsAsked }
        })
    });
    let memory = memory_of(regions.collect());
    let (_, cause, report) = failure(service().zero(&memory, Intent::Teardown).unwrap().wait());
    assert_eq!(cause, Cause::NoHostAddress);
    assert_eq!(report.ranges.len(), 6);
    for (number, range) in report.ranges.iter().enumerate() {
        assert_eq!((range.start, range.len), (number as u64 * 8 * MIB, 4 * MIB + PAGE));
        assert_eq!(failed(&range.outcome), number % 2 == 0);
    }
    assert_eq!(report.zero_bytes(), 3 * (4 * MIB + PAGE));
}

/// The file of a region in the middle of the file, cut: offsets count.
#[test]
fn a_truncated_file_that_is_mapped_from_its_middle() {
    let file = memfd(8 * MIB);
    let part = FileOffset::new(file.try_clone().unwrap(), 4 * MIB);
    let region =
        GuestRegionMmap::<()>::new(MmapRegion::from_file(part, 4 * MIB as usize).unwrap(), GuestAddress(MIB));
    let memory = Arc::new(GuestRegionCollection::from_regions(vec![region.unwrap()]).unwrap());
    file.set_len(6 * MIB).unwrap();
    memory.write_obj(0xa5u8, GuestAddress(MIB)).unwrap();
    let (start, cause, report) = failure(service().zero(&memory, Intent::Teardown).unwrap().wait());
    assert_eq!((cause, report.zero_bytes()), (Cause::Truncated, 2 * MIB));
    assert!(start >= 3 * MIB);
}
