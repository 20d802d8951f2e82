//! Making pages present before they are stored to, so that a bad page is an error and not a signal.

use std::sync::OnceLock;

use super::{Chunk, errno, page_size};

/// Makes every page that `chunk` touches present and writable.
///
/// The error is the kernel's number: `EFAULT` where a store would raise SIGBUS (file too short, no
/// hugepage left), `EHWPOISON` for a poisoned page, `ENOMEM`, `EINVAL` (a mapping without write
/// permission or of device memory). On kernels before 5.14, which lack `MADV_POPULATE_WRITE`
/// (`madvise(2)`), each page is touched instead, and a bad page raises SIGBUS there.
pub(crate) fn populate(chunk: &Chunk<'_>) -> Result<(), i32> {
    let pages = chunk.pages().ok_or(libc::EINVAL)?;
    if chunk.len() == 0 {
        return Ok(());
    }
    if !kernel_populates() {
        touch(chunk, page_size() as usize);
        return Ok(());
    }
    populate_write(pages.start, pages.end - pages.start)
}

pub(super) fn populate_write(start: usize, len: usize) -> Result<(), i32> {
    loop {
        // SAFETY: MADV_POPULATE_WRITE changes no byte: it faults the pages of a range in, as a store
        // would, and reports what a store would meet. The kernel rounds `len` up to whole pages, and a
        // page is mapped whole or not at all.
        let answer = unsafe { libc::madvise(start as *mut libc::c_void, len, libc::MADV_POPULATE_WRITE) };
        if answer == 0 {
            return Ok(());
        }
        match errno() {
            libc::EINTR | libc::EAGAIN => {}
            other => return Err(other),
        }
    }
}

/// Whether this kernel has `MADV_POPULATE_WRITE`. Asked once, on a page of our own: device mappings answer EINVAL
/// as an old kernel does.
pub(crate) fn kernel_populates() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| {
        let page = page_size() as usize;
        // SAFETY: a fresh private mapping at an address of the kernel's choosing disturbs nothing.
        let own = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                page,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if own == libc::MAP_FAILED {
            // Too little memory to ask: the real call will say what is wrong.
            return true;
        }
        let known = populate_write(own as usize, page) != Err(libc::EINVAL);
        // SAFETY: the page was mapped above and nobody else knows its address.
        unsafe { libc::munmap(own, page) };
        if !known {
            tracing::warn!("this kernel lacks MADV_POPULATE_WRITE (Linux 5.14): pages are touched one by one, and a bad page raises SIGBUS");
        }
        known
    })
}

/// A write to each page that changes nothing.
fn touch(chunk: &Chunk<'_>, page: usize) {
    let mut offset = 0;
    while offset < chunk.len() {
        let at = chunk.ptr().wrapping_add(offset);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `at` lies in the chunk, which may be stored to; a locked OR with 0 writes the byte
        // back unchanged, atomically towards any other writer.
        unsafe {
            std::arch::asm!("lock or byte ptr [{at}], 0", at = in(reg) at, options(nostack));
        }
        #[cfg(not(target_arch = "x86_64"))]
        // SAFETY: `at` lies in the chunk, which may be stored to.
        unsafe {
            at.write_volatile(at.read_volatile());
        }
        // On to the next page boundary, from wherever the chunk began.
        offset += page - (at as usize & (page - 1));
    }
}
