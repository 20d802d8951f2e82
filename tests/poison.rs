//! R16: pages that the hardware gave up on, by `MADV_HWPOISON`. The rest is zeroed, the page is named and taken out
//! of use, and nobody is signalled.
//!
//! For emulated machines only: a poisoned page is lost to its host until the next boot.
#![allow(unsafe_code, clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod machines;

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::mem;
use std::os::fd::FromRawFd;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use machines::{
    CHUNK, HUGE, MIB, NodeHugepages, PAGE, anonymous, assert_zero, described, fill, host, memory_nodes,
};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};
use vm_zeroing::{
    Cause, HugepagePool, Intent, JobError, LeaseError, LeasedMemory, NodePolicy, Outcome, PageSize,
    PageState, Quiesced, Report, ZeroingService,
};

static SIGNALS: AtomicUsize = AtomicUsize::new(0);

/// The kernel tells whoever asks for poison about it, with a SIGBUS on the way out of `madvise`.
extern "C" fn count(_: libc::c_int) {
    if SIGNALS.fetch_add(1, Ordering::Relaxed) > 3 {
        // A store that meets the page again and again.
        // SAFETY: ends the process, from wherever it is.
        unsafe { libc::abort() };
    }
}

/// Poisons the page at an address; forgets the signal that it costs.
fn poison(at: *mut u8) {
    // SAFETY: all-zero is a valid action, and the handler only counts. The page is guest memory that nobody
    // refers to; its content may get lost.
    unsafe {
        let mut action: libc::sigaction = mem::zeroed();
        action.sa_sigaction = count as *const () as usize;
        assert_eq!(libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()), 0);
        let answer = libc::madvise(at.cast(), PAGE as usize, libc::MADV_HWPOISON);
        assert_eq!(answer, 0, "MADV_HWPOISON: {}", io::Error::last_os_error());
    }
    SIGNALS.store(0, Ordering::Relaxed);
}

fn emulated() -> bool {
    let emulated = described().is_some();
    if !emulated {
        println!("skipped: not in an emulated machine (tests/machines/run), and pages are lost to the host");
    }
    emulated
}

fn memfd(name: &CStr, bytes: u64) -> File {
    // SAFETY: the name is a C string; the kernel has just given us the descriptor.
    let file = unsafe {
        let fd = libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC);
        assert!(fd >= 0, "{}", io::Error::last_os_error());
        File::from_raw_fd(fd)
    };
    file.set_len(bytes).unwrap();
    file
}

/// A page in the middle of a chunk in the middle is poisoned; boot and teardown come to the same end.
fn all_but_one_page(make: impl Fn(u64) -> Arc<GuestMemoryMmap>) {
    let (bytes, bad) = (3 * CHUNK, CHUNK + 77 * PAGE);
    for intent in [Intent::Teardown, Intent::Background, Intent::Boot] {
        let service = ZeroingService::builder().build().unwrap();
        let memory = make(bytes);
        fill(&*memory, 0, bytes);
        poison(host(&*memory, bad));
        let error = service.zero(&memory, intent).unwrap().wait().unwrap_err();
        let JobError::Failed { start, len, cause, report } = error else { panic!("{error:?}") };
        assert_eq!((start, len, cause), (bad, PAGE, Cause::Poisoned));
        let expected = [
            (0, bad, Outcome::Erased),
            (bad, PAGE, Outcome::Failed(Cause::Poisoned)),
            (bad + PAGE, bytes - bad - PAGE, Outcome::Erased),
        ];
        assert_eq!(ranges(&report), expected, "{intent:?}");
        assert_zero(&*memory, 0, bad);
        assert_zero(&*memory, bad + PAGE, bytes - bad - PAGE);
        assert_eq!(SIGNALS.load(Ordering::Relaxed), 0, "{intent:?}");
    }
}

/// Start, length and outcome of every range.
fn ranges(report: &Report) -> Vec<(u64, u64, Outcome)> {
    report.ranges.iter().map(|range| (range.start, range.len, range.outcome.clone())).collect()
}

#[test]
fn anonymous_memory() {
    if emulated() {
        all_but_one_page(anonymous);
    }
}

#[test]
fn a_memory_file() {
    if emulated() {
        all_but_one_page(|bytes| {
            let file = FileOffset::new(memfd(c"poison", bytes), 0);
            let ranges = [(GuestAddress(0), bytes as usize, Some(file))];
            Arc::new(GuestMemoryMmap::from_ranges_with_files(ranges).unwrap())
        });
    }
}

/// A page of a lease goes bad while the guest runs.
fn quarantined(page_size: PageSize, slab: u64) {
    let node = memory_nodes()[0];
    let service = ZeroingService::builder().build().unwrap();
    let pool = HugepagePool::builder(&service)
        .page_size(page_size)
        .capacity(node, 2 * slab)
        .slab_bytes(slab)
        .build()
        .unwrap();
    let lease = |bytes| -> LeasedMemory {
        pool.lease(bytes, NodePolicy::Any).unwrap().into_memory([(GuestAddress(0), bytes)]).unwrap()
    };
    let page = page_size.bytes();
    let memory = lease(2 * slab);
    fill(&memory, 0, 2 * slab);
    // In the second slab, not at its borders.
    let bad = slab + page;
    poison(host(&memory, bad + page / 2 / PAGE * PAGE));

    let error = memory.recycle(Quiesced::on_callers_word()).unwrap().wait().unwrap_err();
    let JobError::Failed { start, len, cause, report } = error else { panic!("{error:?}") };
    // The chunk that met it first, which is a part of the page where clearing a whole one takes long.
    assert!(bad <= start && start + len <= bad + page, "{start:#x} + {len:#x}");
    assert_eq!(cause, Cause::Poisoned);
    let expected = [
        (0, bad, Outcome::Erased),
        (bad, page, Outcome::Failed(Cause::Poisoned)),
        (bad + page, 2 * slab - bad - page, Outcome::Erased),
    ];
    assert_eq!(ranges(&report), expected);
    assert_eq!(SIGNALS.load(Ordering::Relaxed), 0, "nobody is signalled");

    for frame in 0..2 * slab / page {
        let state = pool.frames().state(frame).unwrap();
        let expected = if frame == bad / page { PageState::Quarantined } else { PageState::Zero };
        assert_eq!(state, expected, "frame {frame}");
    }
    let usage = pool.usage(node);
    assert_eq!((usage.zero_bytes, usage.quarantined_bytes), (slab, slab));
    match pool.lease(2 * slab, NodePolicy::Any).unwrap_err() {
        LeaseError::Exhausted { zero, quarantined, .. } => assert_eq!((zero, quarantined), (slab, slab)),
        other => panic!("{other:?}"),
    }
    // The other slab goes on, the bad one does not come back.
    let memory = lease(slab);
    assert_zero(&memory, 0, slab);
    memory.recycle(Quiesced::on_callers_word()).unwrap().wait().unwrap();
    assert_eq!(pool.zero_stale().unwrap().wait().unwrap().total_bytes, 0);
    assert_eq!(pool.usage(node).quarantined_bytes, slab);
}

#[test]
fn a_pool_of_base_pages() {
    if emulated() {
        quarantined(PageSize::Base, 8 * MIB);
    }
}

#[test]
fn a_pool_of_hugepages() {
    if !emulated() {
        return;
    }
    let reserved = NodeHugepages::set(memory_nodes()[0], 8);
    assert!(reserved.is_some(), "an emulated machine has hugepages");
    quarantined(PageSize::Huge2M, 4 * HUGE);
}
