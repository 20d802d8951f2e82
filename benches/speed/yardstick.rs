//! What the service is measured against: bare loops, plain threads, the kernel's own way.

use std::arch::asm;
use std::os::fd::AsRawFd;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use vm_zeroing::Method;

use super::memory::Memory;

/// Clears a run of whole lines.
pub type Loop = unsafe fn(usize, usize);

/// A bare loop of the stores of a method; `None` for methods that are not chosen unasked.
pub fn bare(method: Method) -> Option<Loop> {
    match method {
        Method::RepStosb => Some(rep_stosb),
        Method::RepStosq => Some(rep_stosq),
        Method::Sse2 => Some(sse2),
        Method::Avx2 => Some(avx2),
        Method::Clzero => Some(clzero),
        _ => None,
    }
}

/// A loop in machine code: `$at` and `$len` name the registers that hold the address and the length.
macro_rules! bare_loop {
    ($name:ident, $at:tt, $len:ident => $count:expr, [$($line:tt),+], $($operand:tt)*) => {
        unsafe fn $name(at: usize, $len: usize) {
            // SAFETY: the caller's run is mapped, its own, not empty, and made of whole aligned lines, which
            // are all that is stored to; the service of this very run chose the method, so the CPU has it.
            unsafe { asm!($($line),+, inout($at) at => _, inout("rcx") $count => _, $($operand)*) }
        }
    };
}

bare_loop!(rep_stosb, "rdi", len => len, ["rep stosb"], in("al") 0u8, options(nostack));
bare_loop!(rep_stosq, "rdi", len => len / 8, ["rep stosq"], in("rax") 0u64, options(nostack));
bare_loop!(
    sse2, "rdi", len => len,
    [
        "pxor xmm0, xmm0", "2:", "movntdq [rdi], xmm0", "movntdq [rdi + 16], xmm0", "movntdq [rdi + 32], xmm0",
        "movntdq [rdi + 48], xmm0", "add rdi, 64", "sub rcx, 64", "jnz 2b", "sfence"
    ],
    out("xmm0") _, options(nostack)
);
bare_loop!(
    avx2, "rdi", len => len,
    [
        "vpxor ymm0, ymm0, ymm0", "2:", "vmovntdq [rdi], ymm0", "vmovntdq [rdi + 32], ymm0", "add rdi, 64",
        "sub rcx, 64", "jnz 2b", "sfence", "vzeroupper"
    ],
    out("ymm0") _, options(nostack)
);
bare_loop!(
    clzero, "rax", len => len,
    ["2:", "clzero", "add rax, 64", "sub rcx, 64", "jnz 2b", "sfence"],
    options(nostack)
);

/// What the C library makes of it.
pub unsafe fn memset(at: usize, len: usize) {
    // SAFETY: the caller's run is mapped and its own.
    unsafe { libc::memset(at as *mut _, 0, len) };
}

/// Calls `run` for consecutive pieces, as the service does. `piece` of `usize::MAX`: in one call.
pub fn in_pieces((start, len): (usize, usize), piece: usize, run: impl Fn(usize, usize)) {
    let mut done = 0;
    while done < len {
        let now = piece.min(len - done);
        run(start + done, now);
        done += now;
    }
}

/// Threads that are there already, each let loose on an equal share of the memory at the same moment.
pub fn plain_threads(memory: &Memory, count: usize, run: impl Fn((usize, usize)) + Sync) -> Duration {
    settled_threads(memory, count, |_| (), run)
}

/// The same, each of them told its number before.
pub fn settled_threads(
    memory: &Memory,
    count: usize,
    settle: impl Fn(usize) + Sync,
    run: impl Fn((usize, usize)) + Sync,
) -> Duration {
    let gate = Barrier::new(count + 1);
    let start = thread::scope(|scope| {
        for (number, share) in memory.shares(count).into_iter().enumerate() {
            let (gate, settle, run) = (&gate, &settle, &run);
            scope.spawn(move || {
                settle(number);
                gate.wait();
                gate.wait();
                run(share);
            });
        }
        gate.wait();
        // All are there. Read before the gate opens again: behind it, they may be done before this thread runs.
        let start = Instant::now();
        gate.wait();
        start
    });
    start.elapsed()
}

/// Faults a run in as a store would.
pub fn populate(at: usize, len: usize) {
    // SAFETY: changes no byte of a mapping of ours.
    let answer = unsafe { libc::madvise(at as *mut _, len, libc::MADV_POPULATE_WRITE) };
    assert_eq!(answer, 0, "MADV_POPULATE_WRITE: {}", std::io::Error::last_os_error());
}

/// Gives the pages of a run back to the host.
pub fn punch(memory: &Memory, at: usize, len: usize) {
    let Some(file) = &memory.file else { return };
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: passes numbers only; the bytes are ours.
    let answer = unsafe { libc::fallocate(file.as_raw_fd(), mode, (at - memory.start) as i64, len as i64) };
    assert_eq!(answer, 0, "PUNCH_HOLE: {}", std::io::Error::last_os_error());
}
