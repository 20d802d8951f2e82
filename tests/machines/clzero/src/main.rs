//! Says whether the CPU under it has CLZERO, as the library detects it; and if so, clears ranges of any alignment
//! with the library's own kernel and looks at every byte in and around them.
//!
//! Made of the library's very files. Speaks through port 0xe9; ends the machine through port 0x8900 (both bochs').
#![no_std]
#![no_main]

// The files name it so.
extern crate core as std;

use core::arch::{asm, global_asm};
use core::fmt::{self, Write};
use core::panic::PanicInfo;

#[allow(dead_code, reason = "the library needs all of it")]
#[path = "../../../../src/clear/cpu.rs"]
mod cpu;
#[path = "../../../../src/clear/x86_64/detect.rs"]
mod detect;
#[allow(dead_code, reason = "the library needs all of it")]
#[path = "../../../../src/clear/x86_64/kernels.rs"]
mod kernels;
#[allow(dead_code, reason = "the library needs all of it")]
#[path = "../../../../src/clear/portable.rs"]
mod portable;
#[allow(dead_code, reason = "the library needs all of it")]
#[path = "../../../../src/clear/run.rs"]
mod run;

/// The names of the methods; the library's file also has their errors, which need `std`.
mod method {
    #[allow(dead_code, reason = "named by the contracts")]
    #[derive(Clone, Copy)]
    pub enum Method {
        RepStosb,
        RepStosq,
        Movnti,
        Sse2,
        Avx2,
        Avx512,
        Clzero,
        Movdir64b,
        Portable,
    }
}

/// Where the library's files look for one another.
mod clear {
    pub(crate) use crate::cpu;
}

global_asm!(include_str!("boot.s"));

/// Memory of ours, above everything else, aligned to a page.
const AREA: *mut u8 = 0x40_0000 as *mut u8;
/// What is there before. Bytes beside a range must keep it.
const STALE: u8 = 0xa5;

struct Console;

impl Write for Console {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            // SAFETY: bochs prints what is written to this port.
            unsafe { asm!("out 0xe9, al", in("al") byte, options(nomem, nostack)) };
        }
        Ok(())
    }
}

fn shut_down() -> ! {
    for byte in "Shutdown".bytes() {
        // SAFETY: bochs ends when this word is written to this port.
        unsafe { asm!("out dx, al", in("dx") 0x8900u16, in("al") byte, options(nomem, nostack)) };
    }
    loop {
        // SAFETY: waits for an interrupt; they are off.
        unsafe { asm!("hlt", options(nomem, nostack)) };
    }
}

#[panic_handler]
fn panic(info: &PanicInfo<'_>) -> ! {
    let _ = writeln!(Console, "{info}");
    shut_down()
}

/// Clears `len` bytes at `at` in an area of `size` bytes, and looks at each byte of it.
fn check(size: usize, at: usize, len: usize) {
    let byte = |index: usize| AREA.wrapping_add(index);
    // SAFETY: memory of ours.
    (0..size).for_each(|index| unsafe { byte(index).write_volatile(STALE) });
    // SAFETY: within the area, which nobody refers to; CLZERO was detected.
    unsafe { run::run(run::Store::Lines(kernels::clzero), byte(at), len) };
    for index in 0..size {
        let expected = if (at..at + len).contains(&index) { 0 } else { STALE };
        // SAFETY: memory of ours.
        let found = unsafe { byte(index).read_volatile() };
        assert!(found == expected, "{len} bytes at {at}: byte {index} is {found:#x}, not {expected:#x}");
    }
}

#[unsafe(no_mangle)]
extern "C" fn main() -> ! {
    let cpu = detect::detect();
    let _ = writeln!(Console, "{:?}, CLZERO bit: {}", cpu.vendor, cpu.clzero);
    if let Some(reason) = cpu.lacks(method::Method::Clzero) {
        let _ = writeln!(Console, "CLZERO refused: {reason}");
        shut_down();
    }
    let mut ranges = 0;
    // Every start in two lines, lengths up to four of them, and lines to both sides.
    for at in 128..256 {
        for len in (0..=258).filter(|len| at % 64 < 3 || at % 64 > 61 || len % 7 == 0) {
            check(704, at, len);
            ranges += 1;
        }
    }
    for (at, len) in [(64, 1 << 20), (61, (1 << 20) + 6), (127, (1 << 18) - 1)] {
        check((1 << 20) + 4096, at, len);
        ranges += 1;
    }
    let _ = writeln!(Console, "CLZERO right in {ranges} ranges");
    shut_down()
}

// What the compiler calls for copies and comparisons; `rep` is short, and nothing here is in a hurry.
global_asm!(
    ".globl memcpy, memset, memcmp, bcmp",
    "memcpy: mov rax, rdi",
    "mov rcx, rdx",
    "rep movsb",
    "ret",
    "memset: mov r8, rdi",
    "mov eax, esi",
    "mov rcx, rdx",
    "rep stosb",
    "mov rax, r8",
    "ret",
    "memcmp:",
    "bcmp: xor eax, eax",
    "mov rcx, rdx",
    "test rcx, rcx",
    "jz 2f",
    "repe cmpsb",
    "je 2f",
    "movzx eax, byte ptr [rdi - 1]",
    "movzx ecx, byte ptr [rsi - 1]",
    "sub eax, ecx",
    "2: ret",
);
