//! The write log of `vm-memory` (R38): every page that was written is marked, after it is zero and before
//! anybody can see that the job is over; nothing else is.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use common::hooked::{Answer, HookedRegion, memory_of};
use common::{MIB, PAGE, all_zero, fill, readable, service, service_with};
use proptest::prelude::*;
use vm_memory::bitmap::{AtomicBitmap, Bitmap, BitmapSlice, WithBitmapSlice};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{
    Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, MmapRegion, VolatileMemory,
};
use vm_zeroing::{Cause, Intent, JobError, Outcome, Verify, ZeroRequest};

type Logged = GuestMemoryMmap<AtomicBitmap>;

fn logged(ranges: &[(u64, u64)]) -> Arc<Logged> {
    let ranges: Vec<_> = ranges.iter().map(|(start, len)| (GuestAddress(*start), *len as usize)).collect();
    Arc::new(GuestMemoryMmap::from_ranges(&ranges).unwrap())
}

/// The same, every page of it used and none marked.
fn used(ranges: &[(u64, u64)]) -> Arc<Logged> {
    let memory = logged(ranges);
    for (start, len) in ranges {
        fill(&*memory, *start, *len);
        memory.find_region(GuestAddress(*start)).unwrap().get_mmap().bitmap().reset();
    }
    memory
}

/// Whether the page at a guest address is marked.
fn is_marked(memory: &Logged, at: u64) -> bool {
    let (region, offset) = memory.to_region_addr(GuestAddress(at)).unwrap();
    GuestMemoryRegion::bitmap(region).dirty_at(offset.0 as usize)
}

#[test]
fn all_pages_that_were_written() {
    let regions = [(0, 5 * MIB + PAGE), (16 * MIB, 3 * PAGE)];
    let memory = used(&regions);
    all_zero(&service().zero(&memory, Intent::Teardown).unwrap());
    for (start, len) in regions {
        assert!((start..start + len).step_by(PAGE as usize).all(|page| is_marked(&memory, page)));
    }
}

/// Fresh pages come zeroed from the kernel, or stay holes: nobody wrote them, so nobody marks them.
#[test]
fn fresh_pages_are_not_marked() {
    for intent in [Intent::Boot, Intent::Teardown] {
        let memory = logged(&[(0, 16 * MIB)]);
        memory.write_obj(0xa5u8, GuestAddress(9 * MIB)).unwrap();
        memory.find_region(GuestAddress(0)).unwrap().get_mmap().bitmap().reset();
        let report = all_zero(&service().zero(&memory, intent).unwrap());
        assert!(report.reads_zero_bytes > 0 && report.erased_bytes > 0);
        for range in &report.ranges {
            for page in (range.start..range.start + range.len).step_by(PAGE as usize) {
                assert_eq!(is_marked(&memory, page), range.outcome == Outcome::Erased, "{page:#x}");
            }
        }
    }
}

/// What a worker could not have, it does not mark.
#[test]
fn failed_pages_are_not_marked() {
    let bad = 5 * PAGE;
    let mapping = MmapRegion::<AtomicBitmap>::new(4 * MIB as usize).unwrap();
    mapping.as_volatile_slice().write_slice(&[0xa5; 4 * MIB as usize], 0).unwrap();
    mapping.bitmap().reset();
    let covers_bad = move |offset: u64, len| {
        if (offset..offset + len as u64).contains(&bad) { Answer::Refused } else { Answer::AsAsked }
    };
    let memory = memory_of(vec![HookedRegion::over(mapping, 0, covers_bad)]);
    service().zero(&memory, Intent::Teardown).unwrap().wait().unwrap_err();
    let region = memory.find_region(GuestAddress(0)).unwrap();
    for page in (0..4 * MIB).step_by(PAGE as usize) {
        assert_eq!(region.bitmap().dirty_at(page as usize), page != bad, "{page:#x}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn pages_of_ranges_of_any_shape(asked in prop::collection::vec((0..16 * PAGE, 0..3 * PAGE), 0..4)) {
        let (start, len) = (0x7000, 20 * PAGE);
        let memory = used(&[(start, len)]);
        let asked: Vec<_> = asked.into_iter().map(|(offset, len)| (start + offset, len)).collect();
        let ranges = asked.iter().map(|(start, len)| (GuestAddress(*start), *len));
        all_zero(&service_with(2).submit(ZeroRequest::new(&memory).ranges(ranges)).unwrap());
        for page in (start..start + len).step_by(PAGE as usize) {
            let written = asked.iter().any(|(from, len)| *len > 0 && *from < page + PAGE && page < from + len);
            prop_assert_eq!(is_marked(&memory, page), written, "{:#x}", page);
        }
    }
}

/// A write log that looks around whenever it is told of a write.
#[derive(Clone)]
struct Spy {
    seen: Arc<Seen>,
    /// Where in the region this part of the log begins.
    at: usize,
}

#[derive(Default)]
struct Seen {
    /// The job's descriptor, once it is known.
    completion: OnceLock<OwnedFd>,
    memory: OnceLock<usize>,
    marked: AtomicUsize,
    too_late: AtomicBool,
    too_early: AtomicBool,
    /// Store here when told of it: a guest that still runs.
    disturb: Option<usize>,
}

impl std::fmt::Debug for Spy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Spy")
    }
}

impl WithBitmapSlice<'_> for Spy {
    type S = Spy;
}

impl BitmapSlice for Spy {}

impl Bitmap for Spy {
    #[allow(unsafe_code)]
    fn mark_dirty(&self, offset: usize, len: usize) {
        let (seen, offset) = (&*self.seen, self.at + offset);
        seen.marked.fetch_add(len, Ordering::SeqCst);
        seen.too_late.fetch_or(readable(seen.completion.wait(), 0), Ordering::SeqCst);
        let base = *seen.memory.wait();
        for at in [offset, offset + len / 2, offset + len - 1] {
            // SAFETY: a byte of the region, which the job keeps mapped.
            let byte = unsafe { ((base + at) as *const u8).read_volatile() };
            seen.too_early.fetch_or(byte != 0, Ordering::SeqCst);
        }
        if let Some(at) = seen.disturb.filter(|at| (offset..offset + len).contains(at)) {
            // SAFETY: as above, and writable.
            unsafe { ((base + at) as *mut u8).write_volatile(0x5a) };
        }
    }

    fn dirty_at(&self, _: usize) -> bool {
        false
    }

    fn slice_at(&self, offset: usize) -> Spy {
        Spy { at: self.at + offset, ..self.clone() }
    }
}

fn spied(len: u64, disturb: Option<usize>) -> (Arc<common::hooked::HookedMemory<Spy>>, Spy) {
    let spy = Spy { seen: Arc::new(Seen { disturb, ..Seen::default() }), at: 0 };
    let mapping = MmapRegionBuilder::new_with_bitmap(len as usize, spy.clone())
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE)
        .build()
        .unwrap();
    spy.seen.memory.set(mapping.as_ptr() as usize).unwrap();
    for at in (0..len as usize).step_by(PAGE as usize / 2) {
        #[allow(unsafe_code)]
        // SAFETY: inside the mapping, which is ours alone so far.
        unsafe {
            mapping.as_ptr().add(at).write_volatile(0xa5);
        }
    }
    (memory_of(vec![HookedRegion::over(mapping, 0, |_, _| Answer::AsAsked)]), spy)
}

#[test]
fn marked_when_zero_and_before_completion() {
    let len = 13 * MIB + PAGE;
    let (memory, spy) = spied(len, None);
    let service = service();
    let job = service.zero(&memory, Intent::Teardown).unwrap();
    spy.seen.completion.set(job.completion_fd().unwrap().try_clone_to_owned().unwrap()).unwrap();
    assert!(readable(job.completion_fd().unwrap(), -1));
    assert_eq!(spy.seen.marked.load(Ordering::SeqCst) as u64, len, "each byte once, and all before the end");
    all_zero(&job);
    assert!(!spy.seen.too_late.load(Ordering::SeqCst), "marked after completion could be seen");
    assert!(!spy.seen.too_early.load(Ordering::SeqCst), "marked before it was zero");
}

/// R10: somebody stores between the clearing and the look. The log is told in between, and so can do it.
#[test]
fn verification_names_the_byte_that_somebody_wrote() {
    let at = 6 * MIB as usize + 4321;
    let (memory, spy) = spied(9 * MIB, Some(at));
    let service = service();
    let job = service.submit(ZeroRequest::new(&memory).verify(Verify::Full)).unwrap();
    spy.seen.completion.set(job.completion_fd().unwrap().as_fd().try_clone_to_owned().unwrap()).unwrap();
    let error = job.wait().unwrap_err();
    let JobError::Failed { start, len, cause, report } = error else { panic!("{error}") };
    assert_eq!(cause, Cause::NotZero { address: at as u64 });
    assert!(start <= at as u64 && (at as u64) < start + len);
    assert!(!report.is_all_zero() && report.zero_bytes() < report.total_bytes);
    assert_eq!(common::outcome_at(&report, at as u64), &Outcome::Failed(cause));
}
