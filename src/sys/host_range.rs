//! Guest memory for VMMs that do not use `vm-memory`: a raw host range with somebody who keeps it alive.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use super::{Chunk, page_size};
use crate::error::RequestError;

/// A range of this process's address space that holds guest memory, for VMMs with their own memory types.
///
/// `base` and `len` are multiples of the base page size. The job keeps `keep_alive` until it is over, and a worker
/// that was stuck in a page fault then keeps it until it comes back. Dropping the last handle of a job over host
/// ranges cancels the job and waits for it.
#[derive(Clone)]
pub struct HostRange {
    base: usize,
    len: u64,
    _keep_alive: Arc<dyn Any + Send + Sync>,
}

impl HostRange {
    /// The host range `base .. base + len`; `len` in bytes, 0 is allowed.
    ///
    /// # Errors
    ///
    /// [`RequestError::Misaligned`] if `base` or `len` is no multiple of the base page size,
    /// [`RequestError::Overflow`] if the range wraps round the end of the address space.
    ///
    /// # Safety
    ///
    /// Until the last clone of `keep_alive` is dropped:
    /// - every byte of the range stays mapped, readable and writable, in this process;
    /// - no Rust reference (`&`, `&mut`, slices included) to any byte of it exists;
    /// - the mapping is not replaced (`MAP_FIXED`), moved (`mremap`) or made read-only.
    ///
    /// That nobody else writes to it while it is cleared is the statement [`Quiesced`](crate::Quiesced)
    /// stands for; breaking it leaves non-zero bytes, not undefined behaviour.
    pub unsafe fn new(
        base: *mut u8,
        len: usize,
        keep_alive: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self, RequestError> {
        let (address, len, page) = (base as usize as u64, len as u64, page_size());
        if address % page != 0 || len % page != 0 {
            return Err(RequestError::Misaligned { start: address, len, alignment: page });
        }
        if address.checked_add(len).is_none() {
            return Err(RequestError::Overflow { start: address, len });
        }
        Ok(Self { base: base as usize, len, _keep_alive: keep_alive })
    }

    /// The host address of the first byte.
    #[must_use]
    pub fn base(&self) -> u64 {
        self.base as u64
    }

    /// The length in bytes.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the range holds no byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes `offset .. offset + len`, or `None` where that leaves the range.
    pub(crate) fn chunk(&self, offset: u64, len: u64) -> Option<Chunk<'_>> {
        if offset.checked_add(len)? > self.len {
            return None;
        }
        let start = self.base.checked_add(usize::try_from(offset).ok()?)?;
        // SAFETY: the sub-range lies inside the range, whose bytes `new`'s caller vowed to be mapped,
        // writable and without Rust references while `keep_alive` lives, and `self` holds it.
        Some(unsafe { Chunk::from_raw(start as *mut u8, usize::try_from(len).ok()?) })
    }
}

impl fmt::Debug for HostRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostRange({:#x} + {:#x})", self.base, self.len)
    }
}
