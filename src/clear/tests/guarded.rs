//! Memory with a PROT_NONE page on both sides.

use crate::sys::Chunk;

/// What is neither zero nor likely to be left behind by anything else.
pub(super) const CANARY: u8 = 0xA5;

/// The machine's base page.
pub(super) const PAGE: usize = 4096;

/// Private memory between two pages whose touch kills the process.
pub(super) struct Guarded {
    whole: *mut u8,
    bytes: usize,
}

impl Guarded {
    /// At least `bytes` bytes, in whole pages.
    pub(super) fn new(bytes: usize) -> Self {
        let bytes = bytes.next_multiple_of(PAGE);
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nobody.
        let whole = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes + 2 * PAGE,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(whole, libc::MAP_FAILED);
        let guarded = Self { whole: whole.cast(), bytes };
        // SAFETY: the pages between the guards belong to the mapping just made.
        let rc = unsafe { libc::mprotect(guarded.start().cast(), bytes, libc::PROT_READ | libc::PROT_WRITE) };
        assert_eq!(rc, 0);
        guarded
    }

    /// The first byte after the lower guard.
    pub(super) fn start(&self) -> *mut u8 {
        self.whole.wrapping_add(PAGE)
    }

    pub(super) fn len(&self) -> usize {
        self.bytes
    }

    pub(super) fn fill(&mut self, byte: u8) {
        // SAFETY: all `bytes` are mapped and writable, and nobody else knows them.
        unsafe { self.start().write_bytes(byte, self.bytes) };
    }

    pub(super) fn set(&mut self, at: usize, byte: u8) {
        assert!(at < self.bytes);
        // SAFETY: within the mapping; nobody else knows it.
        unsafe { self.start().wrapping_add(at).write_volatile(byte) };
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: all `bytes` are mapped and initialised; nobody writes while `self` is borrowed, because
        // chunks borrow it mutably.
        unsafe { std::slice::from_raw_parts(self.start(), self.bytes) }
    }

    pub(super) fn chunk(&mut self, at: usize, len: usize) -> Chunk<'_> {
        assert!(at + len <= self.bytes);
        // SAFETY: within the mapping, and no reference to its bytes lives while the chunk borrows it.
        unsafe { Chunk::from_raw(self.start().wrapping_add(at), len) }
    }

    /// Fills with canaries, lets `clear` clear `at .. at + len` and checks every byte.
    pub(super) fn check(&mut self, at: usize, len: usize, what: &str, clear: impl FnOnce(&Chunk<'_>)) {
        self.fill(CANARY);
        clear(&self.chunk(at, len));
        let wrong = self.bytes().iter().enumerate().position(|(byte, &found)| {
            let wanted = if (at..at + len).contains(&byte) { 0 } else { CANARY };
            found != wanted
        });
        assert_eq!(wrong, None, "{what}: clearing {len} bytes at {at} of {} got byte wrong", self.bytes);
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours alone and chunks of it borrowed `self`.
        unsafe { libc::munmap(self.whole.cast(), self.bytes + 2 * PAGE) };
    }
}
