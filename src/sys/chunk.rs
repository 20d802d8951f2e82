//! A run of mapped bytes that may be written while a borrow lives.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use vm_memory::VolatileSlice;
use vm_memory::bitmap::BitmapSlice;
use vm_memory::volatile_memory::PtrGuardMut;

use super::page_size;

/// A run of mapped bytes that may be written while `'a` lives. Never a Rust reference: the guest, a
/// device or another process may write the same bytes at any time.
///
/// Whoever holds one may store to every byte of `ptr .. ptr + len` and to no other.
pub(crate) struct Chunk<'a> {
    ptr: *mut u8,
    len: usize,
    /// Keeps a mapping made on demand (Xen grants) alive as long as the pointer is used.
    _guard: Option<PtrGuardMut>,
    _life: PhantomData<&'a ()>,
}

impl<'a> Chunk<'a> {
    /// The bytes of a `vm-memory` slice, by its pointer guard. Does not mark the slice's bitmap.
    pub(crate) fn from_slice<B: BitmapSlice>(slice: &VolatileSlice<'a, B>) -> Self {
        let guard = slice.ptr_guard_mut();
        Self { ptr: guard.as_ptr(), len: guard.len(), _guard: Some(guard), _life: PhantomData }
    }

    /// # Safety
    ///
    /// Every byte of `ptr .. ptr + len` stays mapped and writable for `'a`, and nobody holds a Rust
    /// reference to any of them meanwhile.
    pub(crate) unsafe fn from_raw(ptr: *mut u8, len: usize) -> Self {
        Self { ptr, len, _guard: None, _life: PhantomData }
    }

    /// The bytes `offset .. offset + len` of it, or `None` where that leaves it.
    pub(crate) fn part(&self, offset: u64, len: u64) -> Option<Chunk<'_>> {
        let (offset, len) = (usize::try_from(offset).ok()?, usize::try_from(len).ok()?);
        if offset.checked_add(len)? > self.len {
            return None;
        }
        let ptr = self.ptr.wrapping_add(offset);
        // The guard stays with `self`, which is borrowed as long as the part lives.
        Some(Chunk { ptr, len, _guard: None, _life: PhantomData })
    }

    /// The addresses of the whole pages that it touches; `None` where they leave the address space.
    pub(crate) fn pages(&self) -> Option<Range<usize>> {
        let (start, page) = (self.ptr as usize, page_size() as usize);
        let end = start.checked_add(self.len)?.checked_next_multiple_of(page)?;
        Some(start & !(page - 1)..end)
    }

    pub(crate) fn ptr(&self) -> *mut u8 {
        self.ptr
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl fmt::Debug for Chunk<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Chunk({:p} + {:#x})", self.ptr, self.len)
    }
}
