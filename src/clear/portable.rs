//! Ordinary stores written in Rust: the heads and tails of every other method, and all there is outside
//! x86-64 (where it is compiled but untested).
//!
//! Volatile, so that the compiler neither drops the stores nor turns them into a call of `memset`. Ascending.

/// Stores `line` again and again over `ptr .. ptr + len`. Available on every CPU.
///
/// # Safety
///
/// Every byte of `ptr .. ptr + len` is mapped and writable, and no Rust reference to one of them is live.
/// `ptr` and `len` are multiples of 64.
#[inline(never)]
pub(super) unsafe fn lines(ptr: *mut u8, len: usize, line: &[u8; 64]) {
    let (words, _) = line.as_chunks::<8>();
    let mut at = 0;
    while at < len {
        let mut word_at = ptr.wrapping_add(at).cast::<u64>();
        for word in words {
            // SAFETY: the eight words of the line at `at` < `len`, both multiples of 64, as is `ptr`; the
            // caller vouches for the bytes.
            unsafe { word_at.write_volatile(u64::from_ne_bytes(*word)) };
            word_at = word_at.wrapping_add(1);
        }
        at = at.wrapping_add(64);
    }
}

/// Stores the first `len` bytes of `line` to `ptr .. ptr + len`, by words where they are aligned.
///
/// # Safety
///
/// Every byte of `ptr .. ptr + len` is mapped and writable, and no Rust reference to one of them is live.
/// `len` is at most 64.
#[inline(never)]
pub(super) unsafe fn bytes(ptr: *mut u8, len: usize, line: &[u8; 64]) {
    let mut at = 0;
    while at < len {
        let (from, to) = (line.as_ptr().wrapping_add(at), ptr.wrapping_add(at));
        if to.addr() & 7 == 0 && len.wrapping_sub(at) >= 8 {
            // SAFETY: `at` + 8 <= `len` <= 64; `to` is a multiple of 8, and the caller vouches for the bytes.
            unsafe { to.cast::<u64>().write_volatile(from.cast::<u64>().read_unaligned()) };
            at = at.wrapping_add(8);
        } else {
            // SAFETY: `at` < `len` <= 64; the caller vouches for the byte.
            unsafe { to.write_volatile(*from) };
            at = at.wrapping_add(1);
        }
    }
}
