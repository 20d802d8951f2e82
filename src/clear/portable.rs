//! Ordinary stores written in Rust: the heads and tails of every other method, and all there is outside
//! x86-64 (where it is compiled but untested).

/// Zeroes `ptr .. ptr + len` by volatile stores in ascending order, any alignment, any length.
///
/// Available on every CPU. Volatile, so that the compiler neither drops the stores nor turns them into a
/// call of `memset`.
///
/// # Safety
///
/// Every byte of `ptr .. ptr + len` is mapped and writable, and no Rust reference to one of them is live.
#[inline(never)]
pub(super) unsafe fn portable(ptr: *mut u8, len: usize) {
    let words_at = (ptr.addr().wrapping_neg() & 7).min(len);
    let bytes_at = words_at.wrapping_add(len.wrapping_sub(words_at) & !7);
    let mut at = 0;
    while at < words_at {
        // SAFETY: `at` < `len`; the caller vouches for the byte.
        unsafe { ptr.wrapping_add(at).write_volatile(0) };
        at = at.wrapping_add(1);
    }
    while at < bytes_at {
        // SAFETY: `at` + 8 <= `bytes_at` <= `len`, and `ptr` + `at` is a multiple of 8.
        unsafe { ptr.wrapping_add(at).cast::<u64>().write_volatile(0) };
        at = at.wrapping_add(8);
    }
    while at < len {
        // SAFETY: `at` < `len`; the caller vouches for the byte.
        unsafe { ptr.wrapping_add(at).write_volatile(0) };
        at = at.wrapping_add(1);
    }
}
