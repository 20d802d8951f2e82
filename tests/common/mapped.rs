//! Mappings made by hand, for memory that `vm-memory` does not describe.
#![allow(unsafe_code)]

use std::any::Any;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use vm_zeroing::HostRange;

const RW: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;

/// A mapping of base pages, unmapped when dropped.
#[derive(Debug)]
pub struct Mapped {
    base: usize,
    len: usize,
}

impl Mapped {
    pub fn anonymous(len: u64) -> Self {
        Self::map(len, RW, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, None)
    }

    pub fn shared(file: &File, len: u64) -> Self {
        Self::map(len, RW, libc::MAP_SHARED, Some(file))
    }

    pub fn shared_read_only(file: &File, len: u64) -> Self {
        Self::map(len, libc::PROT_READ, libc::MAP_SHARED, Some(file))
    }

    fn map(len: u64, protection: libc::c_int, flags: libc::c_int, file: Option<&File>) -> Self {
        let fd = file.map_or(-1, AsRawFd::as_raw_fd);
        // SAFETY: a new mapping at an address of the kernel's choosing.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len as usize, protection, flags, fd, 0) };
        assert_ne!(base, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        Self { base: base as usize, len: len as usize }
    }

    pub fn base(&self) -> u64 {
        self.base as u64
    }

    /// Takes a part away from everybody: a store there is a SIGSEGV.
    pub fn forbid(&self, offset: u64, len: u64) {
        assert!(offset + len <= self.len as u64);
        // SAFETY: inside our own mapping, to which nobody holds a reference.
        let answer =
            unsafe { libc::mprotect((self.base + offset as usize) as *mut _, len as usize, libc::PROT_NONE) };
        assert_eq!(answer, 0);
    }

    pub fn fill(&self, offset: u64, len: u64, byte: u8) {
        assert!(offset + len <= self.len as u64);
        // SAFETY: inside our own writable mapping, to which nobody holds a reference.
        unsafe { ((self.base + offset as usize) as *mut u8).write_bytes(byte, len as usize) };
    }

    /// Whether all of these bytes are `byte`.
    pub fn holds(&self, offset: u64, len: u64, byte: u8) -> bool {
        assert!(offset + len <= self.len as u64);
        let mut found = vec![!byte; len as usize];
        // SAFETY: inside our own readable mapping; the copy is our own.
        unsafe {
            std::ptr::copy_nonoverlapping(
                (self.base + offset as usize) as *const u8,
                found.as_mut_ptr(),
                len as usize,
            )
        };
        found == vec![byte; len as usize]
    }

    /// A part of it as a range for the service, which keeps the mapping alive.
    pub fn host_range(self: &Arc<Self>, offset: u64, len: u64) -> HostRange {
        self.host_range_kept_by(offset, len, Arc::clone(self) as Arc<dyn Any + Send + Sync>)
    }

    /// The same, kept alive by something else.
    pub fn host_range_kept_by(
        &self,
        offset: u64,
        len: u64,
        keep_alive: Arc<dyn Any + Send + Sync>,
    ) -> HostRange {
        assert!(offset + len <= self.len as u64);
        let start = (self.base + offset as usize) as *mut u8;
        // SAFETY: mapped and writable until the mapping is dropped, which `keep_alive` or the test (after
        // the job) puts off; this type hands out no references.
        unsafe { HostRange::new(start, len as usize, keep_alive) }.unwrap()
    }

    /// How many base pages are present.
    pub fn present_pages(&self) -> usize {
        present_pages(self.base(), self.len as u64)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: our own mapping, and every job over it is over or keeps it alive.
        unsafe { libc::munmap(self.base as *mut _, self.len) };
    }
}

/// How many base pages of a mapping are present (`mincore(2)`).
pub fn present_pages(base: u64, len: u64) -> usize {
    let mut pages = vec![0u8; len.div_ceil(super::PAGE) as usize];
    // SAFETY: one byte a page of a mapping, as the call writes them.
    let answer = unsafe { libc::mincore(base as *mut _, len as usize, pages.as_mut_ptr()) };
    assert_eq!(answer, 0, "{}", std::io::Error::last_os_error());
    pages.iter().filter(|page| **page & 1 == 1).count()
}

/// Frees the memory behind a part of a file, which then reads zero.
pub fn punch(file: &File, offset: u64, len: u64) {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: numbers only.
    let answer =
        unsafe { libc::fallocate(file.as_raw_fd(), mode, offset as libc::off_t, len as libc::off_t) };
    assert_eq!(answer, 0, "{}", std::io::Error::last_os_error());
}
