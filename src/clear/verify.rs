//! Looking for a byte that is not zero.

#[cfg(target_arch = "x86_64")]
use super::x86_64::kernels::skip_zeroes;
use crate::sys::Chunk;

/// Bytes looked at in one step.
const BLOCK: usize = 128;

/// The offset of the first byte that is not zero. Says what was there when it looked: others may write
/// before, while and after.
///
/// A byte that somebody zeroes again between the fast look and the exact one is still reported, by the
/// offset of the block it was in.
pub(crate) fn first_nonzero(chunk: &Chunk<'_>) -> Option<usize> {
    let (ptr, len) = (chunk.ptr(), chunk.len());
    let blocks = len & !(BLOCK - 1);
    // SAFETY: a chunk's bytes are mapped while it lives, and a multiple of `BLOCK` of them is looked at.
    let found = unsafe { skip_zeroes(ptr, blocks) };
    let end = if found < blocks { found + BLOCK } else { len };
    (found..end)
        // SAFETY: `at` < `end` <= `len`: a byte of the chunk, mapped while it lives.
        .find(|&at| unsafe { ptr.wrapping_add(at).read_volatile() } != 0)
        .or((found < blocks).then_some(found))
}

/// The offset of the first `BLOCK` bytes that are not all zero, or `len`.
///
/// # Safety
///
/// Every byte of `ptr .. ptr + len` is mapped and readable, and `len` is a multiple of `BLOCK`.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn skip_zeroes(ptr: *const u8, len: usize) -> usize {
    let mut at = 0;
    while at < len {
        let seen = (0..BLOCK).fold(0, |seen, byte| {
            // SAFETY: `at` + `byte` < `len`, which the caller vouches for.
            seen | unsafe { ptr.wrapping_add(at + byte).read_volatile() }
        });
        if seen != 0 {
            break;
        }
        at += BLOCK;
    }
    at
}
