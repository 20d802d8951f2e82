//! Which process this is, without asking the kernel each time: a forked child must be told from its parent whenever
//! something is submitted.

use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use super::page_size;

/// The process's number in the system. A child that shares its parent's memory (`vfork`, `CLONE_VM`) shares its
/// workers, too, and is told its parent's.
pub(crate) fn process_id() -> u32 {
    static KNOWN: OnceLock<Option<&'static AtomicU32>> = OnceLock::new();
    let Some(known) = KNOWN.get_or_init(|| lost_by_fork(libc::MADV_WIPEONFORK)) else {
        return std::process::id();
    };
    match known.load(Ordering::Relaxed) {
        0 => {
            let own = std::process::id();
            known.store(own, Ordering::Relaxed);
            own
        }
        own => own,
    }
}

/// A number that a forked child finds to be 0: the kernel gives it a page of zeroes instead of this one
/// (`MADV_WIPEONFORK`, Linux 4.14). `None` where it does not.
fn lost_by_fork(advice: libc::c_int) -> Option<&'static AtomicU32> {
    let len = page_size() as usize;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a fresh private mapping at an address of the kernel's choosing disturbs nothing.
    let page = unsafe {
        libc::mmap(ptr::null_mut(), len, protection, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    };
    if page == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the page was mapped above, and the advice concerns children only.
    if unsafe { libc::madvise(page, len, advice) } != 0 {
        // SAFETY: nobody else knows the page.
        unsafe { libc::munmap(page, len) };
        return None;
    }
    // SAFETY: the page is aligned, zeroed, a valid `AtomicU32`, and stays mapped for as long as the process lives.
    Some(unsafe { AtomicU32::from_ptr(page.cast()) })
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
