//! Memory of which little was ever used (R41): holes that provably read zero stay holes, page by page, unless
//! populating was asked for; everything else is overwritten. Neither clearing nor verifying allocates.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

use common::hooked::{Answer, HookedRegion, memory_of};
use common::hugepages::{HUGE, Hugepages, hugetlb_memfd};
use common::mapped::{Mapped, punch};
use common::uffd::Userfaultfd;
use common::{
    MIB, PAGE, all_zero, assert_exact, bytes, fill, holes_are_believed, is_pattern, is_zero, memfd,
    outcome_at, service, service_with, sum,
};
use proptest::prelude::*;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestRegionMmap, MmapRegion};
use vm_zeroing::{
    Cause, HugepagePool, Intent, JobError, NodePolicy, Outcome, PageSize, Quiesced, Report, Strategy, Verify,
    ZeroRequest,
};

type Memory = GuestMemoryMmap<()>;

const LEN: u64 = 256 * MIB;

/// What was used of it, in bytes: single bytes and runs, across chunks, at the first and the last page.
const USED: [(u64, u64); 9] = [
    (0, 1),
    (3 * PAGE + 17, PAGE),
    (7 * PAGE, 1),
    (9 * PAGE, 1),
    (4 * MIB - PAGE, 2 * PAGE),
    (20 * MIB + 5, 3 * MIB),
    (40 * MIB, 8 * MIB),
    (100 * MIB - 1, 2),
    (LEN - 1, 1),
];

/// Maps a file whole, or nothing. Without huge pages, whose neighbours would come along with each page used.
fn memory(file: Option<&File>, len: u64, flags: libc::c_int) -> Arc<Memory> {
    let rw = libc::PROT_READ | libc::PROT_WRITE;
    let offset = file.map(|file| FileOffset::new(file.try_clone().unwrap(), 0));
    let anonymous = if file.is_some() { 0 } else { libc::MAP_ANONYMOUS };
    let region =
        MmapRegion::build(offset, len as usize, rw, flags | anonymous | libc::MAP_NORESERVE).unwrap();
    #[allow(unsafe_code)]
    // SAFETY: advice about a mapping that was just made.
    unsafe {
        libc::madvise(region.as_ptr().cast(), len as usize, libc::MADV_NOHUGEPAGE);
    }
    let region = GuestRegionMmap::new(region, GuestAddress(0)).unwrap();
    Arc::new(GuestMemoryMmap::from_regions(vec![region]).unwrap())
}

fn anonymous(len: u64) -> Arc<Memory> {
    memory(None, len, libc::MAP_PRIVATE)
}

fn base(memory: &Memory) -> u64 {
    memory.get_host_address(GuestAddress(0)).unwrap() as u64
}

fn pages_of(used: &[(u64, u64)]) -> Vec<u64> {
    let mut pages: Vec<u64> =
        used.iter().flat_map(|(start, len)| start / PAGE..(start + len).div_ceil(PAGE)).collect();
    pages.sort_unstable();
    pages.dedup();
    pages
}

/// Numbers of the pages that are data, as the file tells.
#[allow(unsafe_code)]
fn data_of(file: &File) -> Vec<u64> {
    use std::os::fd::AsRawFd;
    // A descriptor of its own: another one's offset is not to be moved.
    let file = File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
    // SAFETY: numbers only.
    let seek = |at: u64, whence| unsafe { libc::lseek(file.as_raw_fd(), at as libc::off_t, whence) };
    let (mut pages, mut at) = (Vec::new(), 0);
    while let Ok(data) = u64::try_from(seek(at, libc::SEEK_DATA)) {
        at = u64::try_from(seek(data, libc::SEEK_HOLE)).unwrap();
        pages.extend(data / PAGE..at.div_ceil(PAGE));
    }
    pages
}

/// Numbers of the pages that are there or swapped, as the pagemap tells.
fn there(base: u64, len: u64) -> Vec<u64> {
    let mut entries = vec![0; (len / PAGE * 8) as usize];
    File::open("/proc/self/pagemap").unwrap().read_exact_at(&mut entries, base / PAGE * 8).unwrap();
    let is_there = |entry: &[u8]| u64::from_ne_bytes(entry.try_into().unwrap()) >> 62 != 0;
    (0..).zip(entries.chunks_exact(8)).filter(|(_, entry)| is_there(entry)).map(|(page, _)| page).collect()
}

/// KiB of a mapping that are counted as resident (`Rss` of smaps).
fn resident(base: u64) -> u64 {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&format!("{base:x}-")));
    let line = lines.find_map(|line| line.strip_prefix("Rss:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// The pages of `erased` were overwritten, and all others are said to read zero.
fn assert_erased(report: &Report, total: u64, erased: &[u64]) {
    let mut at = 0;
    for range in &report.ranges {
        assert_eq!(range.start, at);
        for page in range.start / PAGE..(range.start + range.len) / PAGE {
            let is_erased = erased.binary_search(&page).is_ok();
            let expected = if is_erased { Outcome::Erased } else { Outcome::ReadsZero };
            assert_eq!(range.outcome, expected, "page {page}");
        }
        at += range.len;
    }
    let bytes = erased.len() as u64 * PAGE;
    assert_eq!((report.erased_bytes, report.reads_zero_bytes), (bytes, total - bytes));
    assert_eq!((at, report.total_bytes), (total, total));
}

fn requests(memory: &Arc<Memory>) -> [ZeroRequest; 3] {
    [
        ZeroRequest::new(memory),
        ZeroRequest::new(memory).verify(Verify::Full),
        ZeroRequest::new(memory).intent(Intent::Background).verify(Verify::Full),
    ]
}

#[test]
fn a_sparse_memory_file_stays_sparse() {
    if !holes_are_believed() {
        return;
    }
    let service = service();
    let file = memfd(LEN);
    let guest = memory(Some(&file), LEN, libc::MAP_SHARED);
    let pages = pages_of(&USED);
    for request in requests(&guest) {
        USED.iter().for_each(|(start, len)| fill(&*guest, *start, *len));
        assert_eq!(data_of(&file), pages);
        let blocks = file.metadata().unwrap().blocks();
        let report = all_zero(&service.submit(request).unwrap());
        assert_erased(&report, LEN, &pages);
        assert_eq!(data_of(&file), pages, "as sparse as before");
        assert_eq!(file.metadata().unwrap().blocks(), blocks);
        USED.iter().for_each(|(start, len)| assert!(is_zero(&*guest, *start, *len)));
    }
    // Data that this mapping has never seen are found in the file.
    let other = memory(Some(&file), LEN, libc::MAP_SHARED);
    USED.iter().for_each(|(start, len)| fill(&*guest, *start, *len));
    assert_erased(&all_zero(&service.zero(&other, Intent::Teardown).unwrap()), LEN, &pages);
    assert_eq!(data_of(&file), pages);
    assert!(is_zero(&*guest, 0, LEN), "through the mapping that wrote them too");
}

#[test]
fn sparse_private_anonymous_memory_stays_sparse() {
    let service = service_with(8);
    let guest = anonymous(LEN);
    let pages = pages_of(&USED);
    for request in requests(&guest) {
        USED.iter().for_each(|(start, len)| fill(&*guest, *start, *len));
        assert_eq!(there(base(&guest), LEN), pages);
        let report = all_zero(&service.submit(request).unwrap());
        assert_erased(&report, LEN, &pages);
        let placed = report.node_local_bytes + report.node_remote_bytes;
        assert_eq!(placed, report.erased_bytes, "a hole is on no node");
        assert_eq!(there(base(&guest), LEN), pages, "as sparse as before");
        assert_eq!(resident(base(&guest)), pages.len() as u64 * PAGE / 1024);
        USED.iter().for_each(|(start, len)| assert!(is_zero(&*guest, *start, *len)));
    }
    // Unless populating is asked for: what is fresh is not written twice, and all is there.
    let report = all_zero(&service.submit(ZeroRequest::new(&guest).strategy(Strategy::Populate)).unwrap());
    assert_erased(&report, LEN, &pages);
    assert_eq!(report.node_local_bytes + report.node_remote_bytes, LEN);
    assert_eq!(there(base(&guest), LEN).len() as u64, LEN / PAGE);
}

/// Memory that nobody has used at all.
#[test]
fn memory_that_was_never_used_takes_no_memory() {
    let file = memfd(LEN);
    let guests = [anonymous(LEN), memory(Some(&file), LEN, libc::MAP_SHARED)];
    let count = if holes_are_believed() { 2 } else { 1 };
    for guest in &guests[..count] {
        let request = ZeroRequest::new(guest).verify(Verify::Full);
        let report = all_zero(&service().submit(request).unwrap());
        assert_eq!((report.reads_zero_bytes, report.ranges.len(), report.method), (LEN, 1, None));
        assert_eq!((report.node_local_bytes, report.node_remote_bytes), (0, 0), "no page is on any node");
        assert!(there(base(guest), LEN).is_empty());
        assert!(is_zero(&**guest, LEN - MIB, MIB));
    }
}

/// Every second page: each chunk has many holes.
#[test]
fn scattered_pages() {
    let len = 16 * MIB;
    let file = memfd(len);
    let used: Vec<(u64, u64)> = (0..len / PAGE).step_by(2).map(|page| (page * PAGE + page % 97, 1)).collect();
    let guests = [anonymous(len), memory(Some(&file), len, libc::MAP_SHARED)];
    let count = if holes_are_believed() { 2 } else { 1 };
    for guest in &guests[..count] {
        for (start, len) in &used {
            fill(&**guest, *start, *len);
        }
        let report = all_zero(&service().submit(ZeroRequest::new(guest).verify(Verify::Full)).unwrap());
        assert_erased(&report, len, &pages_of(&used));
        assert_eq!(there(base(guest), len), pages_of(&used));
        assert!(is_zero(&**guest, 0, len));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    /// Ranges of any shape over pages used at random: what is asked for is zero, nothing else is touched, a
    /// page that was a hole is one still, and the report says which is which.
    #[test]
    fn ranges_of_any_shape(
        pages in prop::collection::btree_set(0..64u64, 0..40),
        asked in prop::collection::vec((0..64 * PAGE, 0..30 * PAGE), 1..5),
        shared in any::<bool>(),
        verify in any::<bool>(),
    ) {
        let len = 64 * PAGE;
        let file = memfd(len);
        let shared = shared && holes_are_believed();
        let guest = if shared { memory(Some(&file), len, libc::MAP_SHARED) } else { anonymous(len) };
        for page in &pages {
            fill(&*guest, page * PAGE, PAGE);
        }
        let asked: Vec<_> = asked.into_iter().map(|(at, n)| (GuestAddress(at), n.min(len - at))).collect();
        let request = ZeroRequest::new(&guest).ranges(asked.clone());
        let report = all_zero(
            &service_with(2).submit(request.verify(if verify { Verify::Full } else { Verify::None })).unwrap(),
        );
        let used: Vec<u64> = pages.iter().copied().collect();
        prop_assert_eq!(if shared { data_of(&file) } else { there(base(&guest), len) }, used);
        let is_asked = |at: u64| asked.iter().any(|(start, len)| start.0 <= at && at < start.0 + len);
        for (at, byte) in (0..).zip(bytes(&*guest, 0, len)) {
            let was_used = pages.contains(&(at / PAGE));
            let expected = if was_used && !is_asked(at) { common::pattern(at) } else { 0 };
            prop_assert_eq!(byte, expected, "{:#x}", at);
        }
        for range in &report.ranges {
            for at in range.start..range.start + range.len {
                prop_assert!(is_asked(at));
                prop_assert_eq!(range.outcome == Outcome::Erased, pages.contains(&(at / PAGE)), "{:#x}", at);
            }
        }
        prop_assert_eq!(report.total_bytes, (0..len).filter(|at| is_asked(*at)).count() as u64);
    }
}

/// R47: the file is all hole, and the mapping's own copies still hold the bytes. They are found and cleared,
/// and what the mapping has not copied proves nothing.
#[test]
fn private_copies_of_a_punched_file() {
    let len = 16 * MIB;
    let file = memfd(len);
    let guest = memory(Some(&file), len, libc::MAP_PRIVATE);
    fill(&*guest, 0, len / 2);
    punch(&file, 0, len);
    assert!(data_of(&file).is_empty());
    assert!(is_pattern(&*guest, 0, len / 2));
    let report = all_zero(&service().submit(ZeroRequest::new(&guest).verify(Verify::Full)).unwrap());
    assert_eq!((report.erased_bytes, report.reads_zero_bytes), (len, 0));
    assert!(is_zero(&*guest, 0, len));
}

/// Absent from a private mapping, and the file holds bytes: a read there shows them.
#[test]
fn a_private_mapping_of_a_file_with_data() {
    let len = 8 * MIB;
    let file = memfd(len);
    file.write_all_at(&vec![0xa5; len as usize], 0).unwrap();
    let guest = memory(Some(&file), len, libc::MAP_PRIVATE);
    assert_eq!(all_zero(&service().zero(&guest, Intent::Teardown).unwrap()).erased_bytes, len);
    assert!(is_zero(&*guest, 0, len));
}

/// R48: whoever handles the faults decides the bytes. A part of the memory is under one, and the rest is not.
#[test]
fn memory_under_a_userfaultfd_is_no_hole() {
    let (len, start, handled) = (32 * MIB, 6 * MIB + 3 * PAGE, 9 * MIB);
    let file = memfd(len);
    let guests = [anonymous(len), memory(Some(&file), len, libc::MAP_SHARED)];
    let count = if holes_are_believed() { 2 } else { 1 };
    for guest in &guests[..count] {
        let Some(registered) = Userfaultfd::register(base(guest) + start, handled) else { return };
        let handler = registered.answer_with(0x5a);
        let report = all_zero(&service().submit(ZeroRequest::new(guest).verify(Verify::Full)).unwrap());
        let expected: Vec<u64> = (start / PAGE..(start + handled) / PAGE).collect();
        assert_erased(&report, len, &expected);
        assert!(is_zero(&**guest, start, handled));
        drop(handler);
    }
}

/// Shared anonymous memory has no descriptor to ask, so its holes are not believed.
#[test]
fn shared_anonymous_memory_is_overwritten() {
    let guest = memory(None, 8 * MIB, libc::MAP_SHARED);
    assert_eq!(all_zero(&service().zero(&guest, Intent::Teardown).unwrap()).erased_bytes, 8 * MIB);
}

/// A region that names another file than the one it maps, all hole or not, and the wrong part of the right one.
#[test]
fn a_region_that_is_wrong_about_its_file() {
    if !holes_are_believed() {
        return;
    }
    let len = 8 * MIB;
    let (mapped, empty) = (memfd(2 * len), memfd(2 * len));
    let lies = [
        (FileOffset::new(empty, 0), false),
        // The right file: what is mapped of it, the kernel knows.
        (FileOffset::new(mapped.try_clone().unwrap(), 0), true),
        (FileOffset::new(mapped.try_clone().unwrap(), u64::MAX - len), true),
        (FileOffset::new(File::open("/proc/self/status").unwrap(), 0), false),
    ];
    for (lie, right_file) in lies {
        // The first half of the file is a hole. The second one, which is mapped, is so but for three pages.
        punch(&mapped, 0, 2 * len);
        mapped.write_all_at(&[0xa5; 3 * PAGE as usize], len + MIB).unwrap();
        let truth = FileOffset::new(mapped.try_clone().unwrap(), len);
        let mapping = MmapRegion::<()>::from_file(truth, len as usize).unwrap();
        let mut region = HookedRegion::over(mapping, 0, |_, _| Answer::AsAsked);
        region.file = Some(lie.clone());
        let guest = memory_of(vec![region]);
        let report = all_zero(&service().zero(&guest, Intent::Teardown).unwrap());
        assert_exact(&*guest, &report, &[(0, len)]);
        assert_eq!(report.erased_bytes, if right_file { 3 * PAGE } else { len }, "{lie:?}");
    }
}

/// A file cut short has no hole behind its end, but no memory.
#[test]
fn a_sparse_file_that_was_truncated() {
    let len = 16 * MIB;
    for (to, has_memory) in [(9 * MIB, 9 * MIB), (8 * MIB + 1, 8 * MIB + PAGE), (0, 0)] {
        let file = memfd(len);
        let guest = memory(Some(&file), len, libc::MAP_SHARED);
        fill(&*guest, 3 * MIB, PAGE);
        file.set_len(to).unwrap();
        let blocks = file.metadata().unwrap().blocks();
        let JobError::Failed { cause, report, .. } =
            service().zero(&guest, Intent::Teardown).unwrap().wait().unwrap_err()
        else {
            panic!("not said to have failed")
        };
        assert_eq!(cause, Cause::Truncated);
        assert_eq!(sum(&report, |outcome| matches!(outcome, Outcome::Failed(_))), len - has_memory);
        assert_eq!(report.zero_bytes(), has_memory);
        if holes_are_believed() {
            assert_eq!(report.erased_bytes, if to == 0 { 0 } else { PAGE });
            assert_eq!(file.metadata().unwrap().blocks(), blocks);
        }
    }
}

/// A page that nobody may write cannot be cleared, be it absent or not: it fails, and its neighbours do not.
#[test]
fn a_hole_that_cannot_be_written_fails() {
    let len = 64 * PAGE;
    let memory = Arc::new(Mapped::anonymous(len));
    memory.fill(10 * PAGE, PAGE, 0xa5);
    memory.fill(21 * PAGE, PAGE, 0xa5);
    for page in [20, 21, 40] {
        memory.forbid(page * PAGE, PAGE);
    }
    let request = ZeroRequest::host([memory.host_range(0, len)]);
    let report = service().submit(request).unwrap().wait().unwrap_err().report().cloned().unwrap();
    for page in 0..64 {
        let outcome = outcome_at(&report, memory.base() + page * PAGE);
        match page {
            20 | 21 | 40 => assert!(matches!(outcome, Outcome::Failed(_)), "{page}: {outcome:?}"),
            10 => assert_eq!(outcome, &Outcome::Erased),
            _ => assert_eq!(outcome, &Outcome::ReadsZero, "{page}"),
        }
    }
    assert!(memory.holds(0, 20 * PAGE, 0));
}

/// Absent hugepages prove nothing: the file may hold them.
#[test]
fn hugepages_are_overwritten() {
    let Some(_pages) = Hugepages::reserve(2) else { return };
    let file = hugetlb_memfd(2);
    fill(&*memory(Some(&file), 2 * HUGE, libc::MAP_SHARED), 0, HUGE);
    // By regions that say so and by host ranges that do not.
    let fresh = Arc::new(Mapped::shared(&file, 2 * HUGE));
    let report = all_zero(&service().submit(ZeroRequest::host([fresh.host_range(0, 2 * HUGE)])).unwrap());
    assert_eq!(report.erased_bytes, 2 * HUGE);
    assert!(fresh.holds(0, 2 * HUGE, 0));
    let fresh = memory(Some(&file), 2 * HUGE, libc::MAP_SHARED);
    assert_eq!(all_zero(&service().zero(&fresh, Intent::Teardown).unwrap()).erased_bytes, 2 * HUGE);
}

/// Verification finds what a writer puts into a hole after it was seen to be one.
#[test]
fn a_hole_that_somebody_writes_to_is_found() {
    let (len, at) = (4 * MIB, 2 * MIB + 777);
    let mapping = MmapRegion::<()>::new(len as usize).unwrap();
    let calls = std::sync::atomic::AtomicUsize::new(0);
    let victim = mapping.as_ptr() as usize + at as usize;
    // Asked for the second time, the chunk has been surveyed.
    let region = HookedRegion::over(mapping, 0, move |_, _| {
        if calls.fetch_add(1, std::sync::atomic::Ordering::SeqCst) == 1 {
            #[allow(unsafe_code)]
            // SAFETY: a byte of the region, which the job keeps mapped.
            unsafe {
                (victim as *mut u8).write_volatile(0xa5);
            }
        }
        Answer::AsAsked
    });
    let guest = memory_of(vec![region]);
    let error = service().submit(ZeroRequest::new(&guest).verify(Verify::Full)).unwrap().wait().unwrap_err();
    let JobError::Failed { cause, .. } = error else { panic!("{error}") };
    assert_eq!(cause, Cause::NotZero { address: at });
}

/// A pool's memory is there when it is lent. A page that a peer punched out is had again.
#[test]
fn a_page_punched_out_of_a_lease_is_had_again() {
    let service = service();
    let node = service.topology().nodes()[0].id();
    let builder = HugepagePool::builder(&service).page_size(PageSize::Base).slab_bytes(8 * MIB);
    let pool = builder.capacity(node, 8 * MIB).build().unwrap();
    let leased = pool.lease(8 * MIB, NodePolicy::Any).unwrap();
    let guest = leased.into_memory::<()>([(GuestAddress(0), 8 * MIB)]).unwrap();
    let file = {
        let region = guest.find_region(GuestAddress(0)).unwrap();
        vm_memory::GuestMemoryRegion::file_offset(region).unwrap().file().try_clone().unwrap()
    };
    punch(&file, 2 * MIB, MIB);
    let report = all_zero(&guest.recycle(Quiesced::on_callers_word()).unwrap());
    assert_eq!(report.erased_bytes, 8 * MIB);
    assert_eq!(data_of(&file).len() as u64, 8 * MIB / PAGE);
}

/// `/proc/self/smaps` costs time with the memory of the process. Whoever submits does not read it, and nobody
/// does for memory that is all there; one worker does, once a job, where something is to be proved.
#[test]
fn smaps_is_read_where_it_is_needed() {
    common::run_child("smaps_is_read_where_it_is_needed_child");
}

#[test]
#[ignore = "a part of smaps_is_read_where_it_is_needed"]
fn smaps_is_read_where_it_is_needed_child() {
    if !common::is_child() {
        return;
    }
    // Bytes that a thread has read by system calls.
    let read_by = |thread: &str| {
        let io = std::fs::read_to_string(format!("/proc/{thread}/io")).ok()?;
        io.lines().find_map(|line| line.strip_prefix("rchar: ")?.parse::<u64>().ok())
    };
    if read_by("thread-self").is_none() {
        println!("SKIPPED: this kernel does not account for what threads read");
        return;
    }
    let service = service_with(4);
    let workers: Vec<String> =
        common::worker_threads().iter().map(|(thread, _)| format!("self/task/{thread}")).collect();
    let by_workers = || workers.iter().map(|worker| read_by(worker).unwrap()).sum::<u64>();
    let guest = anonymous(64 * MIB);
    let smaps = std::fs::read("/proc/self/smaps").unwrap().len() as u64;
    for (used, intent, times) in [
        (64 * MIB, Intent::Teardown, 0),
        (64 * MIB, Intent::Boot, 0),
        (63 * MIB, Intent::Teardown, 1),
        (MIB, Intent::Boot, 1),
    ] {
        let guest = if used == 64 * MIB { Arc::clone(&guest) } else { anonymous(64 * MIB) };
        fill(&*guest, 0, used);
        let (own, theirs) = (read_by("thread-self").unwrap(), by_workers());
        let job = service.zero(&guest, intent).unwrap();
        assert!(read_by("thread-self").unwrap() - own < 1000, "no more than the counters");
        all_zero(&job);
        let found = by_workers() - theirs;
        // To the nearest: mappings come and go, and the kernel's version is read as well.
        assert_eq!((found + smaps / 2) / smaps, times, "{intent:?} {used}: {found} of {smaps}");
    }
}
