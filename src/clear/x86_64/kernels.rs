//! The stores. One function per method, each with the contract under which it may be called.
//!
//! They are inline assembly from the first store to the fence, so that the compiler can neither drop,
//! merge nor reorder a store, and they are never inlined, so that a test can read their machine code.
//! Counters are 64-bit. Addresses ascend, a line a turn: `docs/tried.md` has what else was measured.
//!
//! Where stores are weakly ordered, an `SFENCE` stands between the last of them and every way out (Intel
//! SDM volume 1, 11.4.4; AMD APM volume 2, 7.1): when such a function returns, its zeroes are ordered
//! before everything that this CPU stores later, so an atomic release publishes them.

use std::arch::asm;

/// Zeroes any bytes by `REP STOSB`.
///
/// # Safety
///
/// Every byte of `ptr .. ptr + len` is mapped and writable, and no Rust reference to one of them is live.
/// Every x86-64 CPU has the instruction.
#[inline(never)]
pub(crate) unsafe fn rep_stosb(ptr: *mut u8, len: usize) {
    // SAFETY: stores `len` bytes from `ptr` upwards (Rust keeps the direction flag clear), which the caller
    // vouches for; the registers it changes are named.
    unsafe {
        asm!("rep stosb", inout("rdi") ptr => _, inout("rcx") len => _, in("al") 0u8, options(nostack, preserves_flags));
    }
}

/// Zeroes whole lines by `REP STOSQ`.
///
/// # Safety
///
/// As [`rep_stosb`]; and `len` is a multiple of 8.
#[inline(never)]
pub(crate) unsafe fn rep_stosq(ptr: *mut u8, len: usize) {
    // SAFETY: stores `len` / 8 words of 8 bytes from `ptr` upwards (Rust keeps the direction flag clear),
    // which the caller vouches for; the registers it changes are named.
    unsafe {
        asm!("rep stosq", inout("rdi") ptr => _, inout("rcx") len >> 3 => _, in("rax") 0u64, options(nostack, preserves_flags));
    }
}

/// A kernel of weakly ordered stores: a loop over lines at `rdi`, then `SFENCE`; no way from a store to the
/// end misses the fence. With a `template` in `rdx` it stores that to every line, else zeroes.
macro_rules! weakly_ordered {
    ($(#[$doc:meta])* $name:ident($($template:ident)?), first: [$($first:literal),*], line: [$($line:literal),+],
     last: [$($last:literal),*], $($operand:tt)*) => {
        $(#[$doc])*
        ///
        /// # Safety
        ///
        /// Every byte of `ptr .. ptr + len` is mapped and writable, and no Rust reference to one of them is
        /// live. `ptr` and `len` are multiples of 64. The CPU offers the instruction, as
        /// [`CpuDescription::supports`](crate::CpuDescription::supports) on a detected description says.
        #[inline(never)]
        pub(crate) unsafe fn $name(ptr: *mut u8, len: usize $(, $template: &[u8; 64])?) {
            // SAFETY: stores the 64 bytes at `rdi` and steps 64 upwards until `len`, a multiple of 64, is
            // used up: exactly the bytes that the caller vouches for, by instructions that the caller knows
            // the CPU to have. Loads the 64 bytes at `rdx`, if any. The registers it changes are named.
            unsafe {
                asm!(
                    "test rsi, rsi",
                    "jz 3f",
                    $($first,)*
                    ".p2align 5",
                    "2:",
                    $($line,)+
                    "add rdi, 64",
                    "sub rsi, 64",
                    "jnz 2b",
                    "sfence",
                    $($last,)*
                    "3:",
                    inout("rdi") ptr => _,
                    inout("rsi") len => _,
                    $(in("rdx") $template.as_ptr(),)?
                    $($operand)*
                );
            }
        }
    };
}

weakly_ordered! {
    /// Fills whole lines by eight `MOVNTI` each. Every x86-64 CPU has it.
    movnti(template),
    first: [
        "mov rax, [rdx]",
        "mov rcx, [rdx + 8]",
        "mov r8, [rdx + 16]",
        "mov r9, [rdx + 24]",
        "mov r10, [rdx + 32]",
        "mov r11, [rdx + 40]",
        "mov r12, [rdx + 48]",
        "mov r13, [rdx + 56]"
    ],
    line: [
        "movnti [rdi], rax",
        "movnti [rdi + 8], rcx",
        "movnti [rdi + 16], r8",
        "movnti [rdi + 24], r9",
        "movnti [rdi + 32], r10",
        "movnti [rdi + 40], r11",
        "movnti [rdi + 48], r12",
        "movnti [rdi + 56], r13"
    ],
    last: [],
    out("rax") _, out("rcx") _, out("r8") _, out("r9") _, out("r10") _, out("r11") _, out("r12") _, out("r13") _,
    options(nostack),
}

weakly_ordered! {
    /// Fills whole lines by four `MOVNTDQ` each. Every x86-64 CPU has it.
    sse2(template),
    first: [
        "movdqu xmm0, [rdx]",
        "movdqu xmm1, [rdx + 16]",
        "movdqu xmm2, [rdx + 32]",
        "movdqu xmm3, [rdx + 48]"
    ],
    line: [
        "movntdq [rdi], xmm0",
        "movntdq [rdi + 16], xmm1",
        "movntdq [rdi + 32], xmm2",
        "movntdq [rdi + 48], xmm3"
    ],
    last: [],
    out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
    options(nostack),
}

weakly_ordered! {
    /// Fills whole lines by two `VMOVNTDQ` of 32 bytes each. AVX2 with YMM state enabled.
    ///
    /// Leaves with the upper halves of the vector registers zero, so that SSE code after it is not slowed.
    avx2(template),
    first: ["vmovdqu ymm0, [rdx]", "vmovdqu ymm1, [rdx + 32]"],
    line: ["vmovntdq [rdi], ymm0", "vmovntdq [rdi + 32], ymm1"],
    last: ["vzeroupper"],
    clobber_abi("sysv64"),
    options(nostack),
}

weakly_ordered! {
    /// Fills whole lines by one `VMOVNTDQ` of 64 bytes each. AVX-512F with ZMM state enabled.
    ///
    /// Leaves with the upper halves of the vector registers zero, so that SSE code after it is not slowed.
    avx512(template),
    first: ["vmovdqu64 zmm0, [rdx]"],
    line: ["vmovntdq [rdi], zmm0"],
    last: ["vzeroupper"],
    clobber_abi("sysv64"),
    options(nostack),
}

weakly_ordered! {
    /// Zeroes whole lines by `CLZERO` each. AMD and Hygon CPUs that show the bit.
    ///
    /// The instruction ignores the low 6 bits of its address: at a `ptr` that is not a multiple of 64 it would
    /// wipe the neighbour's bytes.
    clzero(),
    first: [],
    line: ["mov rax, rdi", "clzero"],
    last: [],
    out("rax") _,
    options(nostack),
}

weakly_ordered! {
    /// Fills whole lines by one `MOVDIR64B` each, which copies the template. CPUs that show the bit.
    movdir64b(template),
    first: [],
    line: ["movdir64b rdi, [rdx]"],
    last: [],
    options(nostack),
}

/// Skips bytes that are zero, 128 at a time: the offset of the first 128 bytes that are not all zero, or `len`.
///
/// # Safety
///
/// Every byte of `ptr .. ptr + len` is mapped and readable. `len` is a multiple of 128. Every x86-64 CPU has
/// the instructions. Others may write the bytes meanwhile: they are loaded by instructions the compiler does
/// not see.
#[inline(never)]
pub(crate) unsafe fn skip_zeroes(ptr: *const u8, len: usize) -> usize {
    let left: usize;
    // SAFETY: loads the 128 bytes at `rdi` and steps 128 upwards while `rsi`, the bytes left, is not zero:
    // within the bytes that the caller vouches for. Stores nothing; the registers it changes are named.
    unsafe {
        asm!(
            "pxor xmm8, xmm8",
            "test rsi, rsi",
            "jz 3f",
            ".p2align 5",
            "2:",
            "movdqu xmm0, [rdi]",
            "movdqu xmm1, [rdi + 16]",
            "movdqu xmm2, [rdi + 32]",
            "movdqu xmm3, [rdi + 48]",
            "movdqu xmm4, [rdi + 64]",
            "movdqu xmm5, [rdi + 80]",
            "movdqu xmm6, [rdi + 96]",
            "movdqu xmm7, [rdi + 112]",
            "por xmm0, xmm1",
            "por xmm2, xmm3",
            "por xmm4, xmm5",
            "por xmm6, xmm7",
            "por xmm0, xmm2",
            "por xmm4, xmm6",
            "por xmm0, xmm4",
            "pcmpeqb xmm0, xmm8",
            "pmovmskb eax, xmm0",
            "cmp eax, 0xffff",
            "jne 3f",
            "add rdi, 128",
            "sub rsi, 128",
            "jnz 2b",
            "3:",
            inout("rdi") ptr => _,
            inout("rsi") len => left,
            out("rax") _,
            out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _, out("xmm4") _,
            out("xmm5") _, out("xmm6") _, out("xmm7") _, out("xmm8") _,
            options(nostack, readonly),
        );
    }
    len.wrapping_sub(left)
}
