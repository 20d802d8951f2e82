//! Bytes that are not zero, for measuring: some CPUs drop stores that change nothing.

use crate::sys::Chunk;

/// What the bytes become.
const STAIN: u8 = 0xa5;

/// Stores to every byte of a chunk, past the caches (the bytes are in none afterwards) or through them.
pub(crate) fn stain(chunk: &Chunk<'_>, past_caches: bool) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a chunk's bytes may be written while it lives and nobody holds a reference to them.
    unsafe {
        if past_caches && chunk.ptr().addr().is_multiple_of(64) && chunk.len().is_multiple_of(64) {
            past(chunk.ptr(), chunk.len());
        } else {
            through(chunk.ptr(), chunk.len());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    for at in 0..chunk.len() {
        // SAFETY: `at` lies in the chunk, which may be stored to.
        unsafe { chunk.ptr().wrapping_add(at).write_volatile(STAIN) };
        let _ = past_caches;
    }
}

/// # Safety
///
/// Every byte of `ptr .. ptr + len` is mapped and writable, and no Rust reference to one of them is live.
#[cfg(target_arch = "x86_64")]
#[inline(never)]
unsafe fn through(ptr: *mut u8, len: usize) {
    // SAFETY: stores `len` bytes from `ptr` upwards, which the caller vouches for; the registers are named.
    unsafe {
        std::arch::asm!("rep stosb", inout("rdi") ptr => _, inout("rcx") len => _, in("al") STAIN, options(nostack, preserves_flags));
    }
}

/// # Safety
///
/// As [`through`]; and `ptr` and `len` are multiples of 64.
#[cfg(target_arch = "x86_64")]
#[inline(never)]
unsafe fn past(ptr: *mut u8, len: usize) {
    let word = u64::from_ne_bytes([STAIN; 8]);
    // SAFETY: stores the 64 bytes at `rdi` and steps 64 upwards until `len`, a multiple of 64, is used up; fenced
    // on the way out. Every x86-64 CPU has the instructions; the registers are named.
    unsafe {
        std::arch::asm!(
            "test rsi, rsi",
            "jz 3f",
            "movq xmm0, {word}",
            "punpcklqdq xmm0, xmm0",
            "2:",
            "movntdq [rdi], xmm0",
            "movntdq [rdi + 16], xmm0",
            "movntdq [rdi + 32], xmm0",
            "movntdq [rdi + 48], xmm0",
            "add rdi, 64",
            "sub rsi, 64",
            "jnz 2b",
            "sfence",
            "3:",
            word = in(reg) word,
            inout("rdi") ptr => _,
            inout("rsi") len => _,
            out("xmm0") _,
            options(nostack),
        );
    }
}
