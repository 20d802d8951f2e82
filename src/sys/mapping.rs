//! Mappings that we own: the pool's own view of a slab, the address range lent with a lease, memory to measure on.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr;

use vm_memory::VolatileSlice;
use vm_memory::bitmap::BitmapSlice;

use super::Chunk;

/// A shared, writable mapping of a whole memory file, not dumped and not inherited by fork.
#[derive(Debug)]
pub(crate) struct SharedMapping {
    range: AddressRange,
}

impl SharedMapping {
    /// Maps `len` bytes of `file` from its start. For hugetlb files this reserves the hugepages:
    /// `ENOMEM` says that the host lacks them.
    pub(crate) fn new(file: &File, len: u64) -> io::Result<Self> {
        let range = AddressRange::map(None, to_usize(len)?, RW, libc::MAP_SHARED, Some((file, 0)))?;
        range.keep_private()?;
        Ok(Self { range })
    }

    /// The bytes `offset .. offset + len`, or `None` where that leaves the mapping.
    pub(crate) fn chunk(&self, offset: u64, len: u64) -> Option<Chunk<'_>> {
        let start = self.range.at(offset, len)?;
        // SAFETY: inside a mapping that `self` owns, that stays readable and writable until it is
        // dropped, and of which no Rust reference is ever made.
        Some(unsafe { Chunk::from_raw(start, len as usize) })
    }
}

/// A range of addresses that is ours: nothing at first (PROT_NONE), then memory files mapped side by
/// side, then nothing again. Only dropping it gives the addresses back to the process.
#[derive(Debug)]
pub(crate) struct Reservation {
    range: AddressRange,
    /// Bytes from the start that are mapped readable and writable.
    mapped: u64,
}

impl Reservation {
    /// Reserves `len` bytes whose start is a multiple of `alignment` (a power of two).
    pub(crate) fn new(len: u64, alignment: u64) -> io::Result<Self> {
        let padded = len.checked_add(alignment).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let mut range = AddressRange::map(None, to_usize(padded)?, libc::PROT_NONE, flags, None)?;
        range.trim(to_usize(len)?, to_usize(alignment)?);
        Ok(Self { range, mapped: 0 })
    }

    pub(crate) fn base(&self) -> u64 {
        self.range.start as u64
    }

    pub(crate) fn len(&self) -> u64 {
        self.range.len as u64
    }

    /// Maps `len` bytes of `file` from `file_offset` on, behind what is mapped already.
    pub(crate) fn append(&mut self, file: &File, file_offset: u64, len: u64) -> io::Result<()> {
        let start =
            self.range.at(self.mapped, len).ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        let piece = AddressRange::map(Some(start), to_usize(len)?, RW, flags, Some((file, file_offset)))?;
        // The addresses stay those of the reservation, whatever becomes of the piece.
        let piece = std::mem::ManuallyDrop::new(piece);
        self.mapped += len;
        piece.keep_private()
    }

    /// Takes the memory away and keeps the addresses: whoever still holds one of them, a KVM memslot
    /// above all, finds nothing there. `&mut`: no slice of it is alive.
    ///
    /// A forked child has nothing to take away: the mapping was not inherited, and what lies there now is
    /// the child's own.
    pub(crate) fn revoke(&mut self) -> io::Result<()> {
        if self.mapped == 0 || !self.range.is_of_this_process() {
            return Ok(());
        }
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        let start = self.range.start as *mut u8;
        let nothing = AddressRange::map(Some(start), self.range.len, libc::PROT_NONE, flags, None)?;
        std::mem::forget(nothing);
        self.mapped = 0;
        Ok(())
    }

    /// The mapped bytes `offset .. offset + len` as a `vm-memory` slice, or `None` where they are not all mapped.
    pub(crate) fn slice<B: BitmapSlice>(
        &self,
        offset: u64,
        len: u64,
        bitmap: B,
    ) -> Option<VolatileSlice<'_, B>> {
        if offset.checked_add(len)? > self.mapped {
            return None;
        }
        let start = self.range.at(offset, len)?;
        // SAFETY: the bytes are mapped readable and writable (`mapped`), and stay so while `self` is
        // borrowed: `revoke` needs it exclusively. No Rust reference to them is ever made.
        Some(unsafe { VolatileSlice::with_bitmap(start, len as usize, bitmap, None) })
    }
}

/// Private anonymous memory of our own that is measured on and thrown away; not dumped, not inherited by fork.
#[derive(Debug)]
pub(crate) struct ScratchMapping {
    range: AddressRange,
}

impl ScratchMapping {
    /// Maps `len` bytes on hugepages of `page` bytes from the host's pool. They are reserved at once, so that
    /// none that others have reserved is taken: `ENOMEM` says that too few are left.
    pub(crate) fn on_hugepages(len: u64, page: u64) -> io::Result<Self> {
        let size = (page.trailing_zeros() as libc::c_int) << libc::MAP_HUGE_SHIFT;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | size;
        Self::kept_private(AddressRange::map(None, to_usize(len)?, RW, flags, None)?)
    }

    /// Maps `len` bytes from a multiple of `alignment` on (a power of two), and advises the kernel to take
    /// transparent hugepages for them. It may have none, or not have the feature.
    pub(crate) fn on_transparent_hugepages(len: u64, alignment: u64) -> io::Result<Self> {
        let padded = len.checked_add(alignment).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let mut range = AddressRange::map(None, to_usize(padded)?, RW, flags, None)?;
        range.trim(to_usize(len)?, to_usize(alignment)?);
        // SAFETY: the advice changes no byte.
        unsafe { libc::madvise(range.start as *mut libc::c_void, range.len, libc::MADV_HUGEPAGE) };
        Self::kept_private(range)
    }

    fn kept_private(range: AddressRange) -> io::Result<Self> {
        range.keep_private()?;
        Ok(Self { range })
    }

    pub(crate) fn len(&self) -> u64 {
        self.range.len as u64
    }

    /// Gives back what lies behind the first `len` bytes (whole pages of its kind). `&mut`: no chunk of it is alive.
    pub(crate) fn truncate(&mut self, len: u64) {
        let (start, len) = (self.range.start, len.min(self.len()) as usize);
        let behind = self.range.len - len;
        // SAFETY: a part of our own mapping that nothing refers to.
        if behind > 0 && unsafe { libc::munmap((start + len) as *mut libc::c_void, behind) } == 0 {
            self.range.len = len;
        }
    }

    /// The bytes `offset .. offset + len`, or `None` where that leaves the mapping.
    pub(crate) fn chunk(&self, offset: u64, len: u64) -> Option<Chunk<'_>> {
        let start = self.range.at(offset, len)?;
        // SAFETY: inside a mapping that `self` owns, that stays readable and writable until it is
        // dropped, and of which no Rust reference is ever made.
        Some(unsafe { Chunk::from_raw(start, len as usize) })
    }
}

const RW: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;

/// A mapping to be unmapped when dropped. The address is kept as a number, so the type is `Send` and `Sync`.
#[derive(Debug)]
struct AddressRange {
    start: usize,
    len: usize,
    /// The process that has it. Guest memory is not inherited by fork, so in a child other things lie there.
    process: u32,
}

impl AddressRange {
    fn map(
        fixed: Option<*mut u8>,
        len: usize,
        protection: libc::c_int,
        flags: libc::c_int,
        file: Option<(&File, u64)>,
    ) -> io::Result<Self> {
        let (fd, offset) = match file {
            Some((file, offset)) => (file.as_raw_fd(), to_usize(offset)? as libc::off_t),
            None => (-1, 0),
        };
        // SAFETY: without `fixed` the kernel chooses an address where nothing is. With it, both callers
        // (`append`, `revoke`) name addresses inside their own reservation, hold it exclusively, and so
        // no slice into what is replaced is alive.
        let start = unsafe {
            libc::mmap(fixed.map_or(ptr::null_mut(), |at| at.cast()), len, protection, flags, fd, offset)
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { start: start as usize, len, process: super::process_id() })
    }

    fn is_of_this_process(&self) -> bool {
        self.process == super::process_id()
    }

    /// The address of `offset .. offset + len` inside the range.
    fn at(&self, offset: u64, len: u64) -> Option<*mut u8> {
        let inside = offset.checked_add(len)? <= self.len as u64;
        inside.then(|| (self.start + offset as usize) as *mut u8)
    }

    /// Cuts the range to `len` bytes from its first multiple of `alignment` on.
    fn trim(&mut self, len: usize, alignment: usize) {
        let start = self.start.next_multiple_of(alignment);
        let (before, after) = (start - self.start, self.start + self.len - start - len);
        for (at, bytes) in [(self.start, before), (start + len, after)] {
            if bytes > 0 {
                // SAFETY: the margins are parts of our own new range that nothing refers to.
                unsafe { libc::munmap(at as *mut libc::c_void, bytes) };
            }
        }
        (self.start, self.len) = (start, len);
    }

    /// Keeps guest memory out of core dumps and out of forked children.
    fn keep_private(&self) -> io::Result<()> {
        for advice in [libc::MADV_DONTDUMP, libc::MADV_DONTFORK] {
            // SAFETY: both only set a flag of the mapping.
            if unsafe { libc::madvise(self.start as *mut libc::c_void, self.len, advice) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    }
}

impl Drop for AddressRange {
    fn drop(&mut self) {
        if !self.is_of_this_process() {
            return;
        }
        // SAFETY: the range is ours in this process, and whoever borrowed from it is gone: slices borrow the owner.
        unsafe { libc::munmap(self.start as *mut libc::c_void, self.len) };
    }
}

fn to_usize(value: u64) -> io::Result<usize> {
    usize::try_from(value).map_err(|_| io::Error::from_raw_os_error(libc::EOVERFLOW))
}
