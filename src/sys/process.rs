//! Which process this is, without asking the kernel each time: a forked child must be told from its parent whenever
//! something is submitted.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use super::page_size;

/// Where the kernel does not tell children by a page.
static REFUSED: AtomicU32 = AtomicU32::new(0);

/// The process's number in the system. A child that shares its parent's memory (`vfork`, `CLONE_VM`) shares its
/// workers, too, and is told its parent's.
pub(crate) fn process_id() -> u32 {
    // No lock and no cell that one thread fills while others wait: a child forked just then would wait for ever.
    static KNOWN: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());
    let mut known = KNOWN.load(Ordering::Acquire);
    if known.is_null() {
        let own = lost_by_fork(libc::MADV_WIPEONFORK).unwrap_or_else(|| (&raw const REFUSED).cast_mut());
        known = match KNOWN.compare_exchange(ptr::null_mut(), own, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => own,
            // Another thread was first.
            Err(known) => {
                give_back(own);
                known
            }
        };
    }
    if ptr::eq(known, &raw const REFUSED) {
        return std::process::id();
    }
    // SAFETY: not null, so it came from `lost_by_fork`: an aligned and valid `AtomicU32` in a page that stays mapped
    // for as long as the process lives, since only a page that was not published is given back.
    let known = unsafe { &*known };
    match known.load(Ordering::Relaxed) {
        0 => {
            let own = std::process::id();
            known.store(own, Ordering::Relaxed);
            own
        }
        own => own,
    }
}

/// A number, 0 at first, that a forked child finds to be 0: the kernel gives it a page of zeroes instead of this one
/// (`MADV_WIPEONFORK`, Linux 4.14). `None` where it does not.
fn lost_by_fork(advice: libc::c_int) -> Option<*mut AtomicU32> {
    let len = page_size() as usize;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a fresh private mapping at an address of the kernel's choosing disturbs nothing.
    let page = unsafe {
        libc::mmap(ptr::null_mut(), len, protection, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    };
    if page == libc::MAP_FAILED {
        return None;
    }
    // An emulator of system calls may say yes to any advice.
    // SAFETY: the page was mapped above; the advice concerns children only, and no kernel knows the other one.
    let is_taken = unsafe { libc::madvise(page, len, advice) == 0 && libc::madvise(page, len, -1) != 0 };
    let page = page.cast();
    if !is_taken {
        give_back(page);
    }
    is_taken.then_some(page)
}

/// Unmaps a page that nobody else knows; leaves `REFUSED` alone.
fn give_back(page: *mut AtomicU32) {
    if !ptr::eq(page, &raw const REFUSED) {
        // SAFETY: the page is of `lost_by_fork`, whole, and was not published.
        unsafe { libc::munmap(page.cast(), page_size() as usize) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forked_child_is_another_process() {
        let (own, asked) = (process_id(), std::process::id());
        assert_eq!((own, process_id()), (asked, asked));
        // SAFETY: the child makes two system calls and ends without running anything of the test harness.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let right = process_id() == std::process::id() && process_id() != own;
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(i32::from(!right)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child above; `status` outlives the call.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child took itself for its parent");
        assert_eq!(process_id(), own);
    }

    #[test]
    fn a_kernel_without_the_advice_is_asked_each_time() {
        assert!(lost_by_fork(-1).is_none());
    }
}
