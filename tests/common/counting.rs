//! An allocator that counts. A test binary that wants it says so:
//! `#[global_allocator] static ALLOCATOR: Counting = Counting;`
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug)]
pub struct Counting;

static CALLS: AtomicU64 = AtomicU64::new(0);
static LIVE: AtomicU64 = AtomicU64::new(0);
static PEAK: AtomicU64 = AtomicU64::new(0);

/// Allocations made so far, by all threads.
pub fn calls() -> u64 {
    CALLS.load(Ordering::SeqCst)
}

/// Bytes allocated and not freed.
pub fn live() -> u64 {
    LIVE.load(Ordering::SeqCst)
}

/// The most bytes alive at once while `work` ran, above what was alive before.
pub fn peak_of<T>(work: impl FnOnce() -> T) -> (u64, T) {
    let before = live();
    PEAK.store(before, Ordering::SeqCst);
    let result = work();
    (PEAK.load(Ordering::SeqCst).saturating_sub(before), result)
}

// SAFETY: the system's allocator does the work; counting changes nothing about it. `realloc` and
// `alloc_zeroed` keep their default bodies, which call these two.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.fetch_add(1, Ordering::SeqCst);
        let live = LIVE.fetch_add(layout.size() as u64, Ordering::SeqCst) + layout.size() as u64;
        PEAK.fetch_max(live, Ordering::SeqCst);
        // SAFETY: the caller keeps the contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size() as u64, Ordering::SeqCst);
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}
