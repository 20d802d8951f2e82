//! The CLZERO kernel on every CPU: where the instruction traps, a SIGILL handler of the test does its work.
//!
//! On CPUs that have it the handler would never run, so the same checks also run a twin of the kernel with
//! `UD2` before each CLZERO; the handler takes the pair for one instruction.

use std::arch::asm;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use super::guarded::{Guarded, PAGE};
use crate::clear::x86_64::kernels;
use crate::clear::{Method, Store, lacks_here, run};

const UD2: [u8; 2] = [0x0f, 0x0b];
const CLZERO: [u8; 3] = [0x0f, 0x01, 0xfc];

/// Instructions done by the handler.
static EMULATED: AtomicUsize = AtomicUsize::new(0);
/// Traps that were none of its business.
static CHAINED: AtomicUsize = AtomicUsize::new(0);
/// What was installed before it.
static PREVIOUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());

type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);

/// Does a CLZERO, with or without UD2 before it; hands everything else to the previous action.
extern "C" fn emulate(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let at = |code: *const u8, wanted: &[u8]| {
        // SAFETY: the CPU just fetched an instruction there; a byte is read only if all before it are of the
        // instruction looked for.
        wanted.iter().enumerate().all(|(byte, wanted)| unsafe { code.wrapping_add(byte).read() } == *wanted)
    };
    // SAFETY: the kernel hands a handler with SA_SIGINFO the interrupted thread's context.
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    let code = registers[libc::REG_RIP as usize] as *const u8;
    let marker = if at(code, &UD2) { UD2.len() } else { 0 };
    if at(code.wrapping_add(marker), &CLZERO) {
        let line = (registers[libc::REG_RAX as usize] & !63) as *mut u64;
        for word in 0..8 {
            // SAFETY: the interrupted code asked for this line to be written; a bad address kills the test
            // as it would have with the instruction.
            unsafe { line.wrapping_add(word).write_volatile(0) };
        }
        registers[libc::REG_RIP as usize] += (marker + CLZERO.len()) as i64;
        EMULATED.fetch_add(1, Ordering::Relaxed);
        return;
    }
    // SAFETY: set before this handler was installed and never freed while it is; a handler in an action with
    // SA_SIGINFO has this signature, one without takes the number only. The default action is
    // re-installed, so that going back to the instruction ends the process by it.
    unsafe {
        let previous = PREVIOUS.load(Ordering::Acquire);
        match (*previous).sa_sigaction {
            libc::SIG_DFL | libc::SIG_IGN => {
                libc::signal(signal, libc::SIG_DFL);
            }
            handler if (*previous).sa_flags & libc::SA_SIGINFO != 0 => {
                std::mem::transmute::<usize, Handler>(handler)(signal, info, context);
            }
            handler => std::mem::transmute::<usize, extern "C" fn(libc::c_int)>(handler)(signal),
        }
    }
}

/// Steps over a UD2 and counts it.
extern "C" fn step_over(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel hands a handler with SA_SIGINFO the interrupted thread's context.
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    registers[libc::REG_RIP as usize] += UD2.len() as i64;
    CHAINED.fetch_add(1, Ordering::Relaxed);
}

/// A SIGILL action, until dropped.
struct Installed(Box<libc::sigaction>);

impl Installed {
    fn new(handler: Handler) -> Self {
        // SAFETY: all-zero is a valid action; the calls get pointers to whole ones. The handlers call nothing
        // that a signal handler must not.
        unsafe {
            let mut previous: Box<libc::sigaction> = Box::new(std::mem::zeroed());
            assert_eq!(libc::sigaction(libc::SIGILL, ptr::null(), &mut *previous), 0);
            PREVIOUS.store(&mut *previous, Ordering::Release);
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            assert_eq!(libc::sigaction(libc::SIGILL, &action, ptr::null_mut()), 0);
            Self(previous)
        }
    }
}

impl Drop for Installed {
    fn drop(&mut self) {
        // SAFETY: an action the kernel gave us.
        unsafe { libc::sigaction(libc::SIGILL, &*self.0, ptr::null_mut()) };
    }
}

/// The kernel's twin, which traps on every CPU.
///
/// # Safety
///
/// As the kernel; and `emulate` is installed.
unsafe fn marked(ptr: *mut u8, len: usize) {
    for line in (0..len).step_by(64) {
        // SAFETY: the handler zeroes the 64 bytes of this line and steps over both instructions.
        unsafe { asm!("ud2", "clzero", in("rax") ptr.wrapping_add(line)) };
    }
}

/// Clears by a line kernel at many places between canaries and guard pages; the lines there were.
fn check(what: &str, kernel: unsafe fn(*mut u8, usize)) -> usize {
    const LONG: usize = (1 << 20) + 3;
    let mut lines = 0;
    let mut check = |memory: &mut Guarded, at: usize, len: usize| {
        memory.check(at, len, what, |chunk| {
            // SAFETY: a chunk's bytes may be written; the CPU or the handler does the instruction.
            unsafe { run(Store::Lines(kernel), chunk.ptr(), chunk.len()) };
            let (from, to) = (chunk.ptr().addr(), chunk.ptr().addr() + chunk.len());
            lines += (to / 64).saturating_sub(from.div_ceil(64));
        });
    };
    let mut memory = Guarded::new(3 * PAGE);
    for len in [0, 1, 63, 64, 65, 127, 128, 129, 191, 4095, 4096, 4097] {
        let last = memory.len() - len;
        for at in [0, 1, 7, 63, 64, 65, PAGE - 1, PAGE + 1, last - 1, last] {
            check(&mut memory, at, len);
        }
    }
    let mut memory = Guarded::new(LONG + PAGE);
    let last = memory.len() - LONG;
    for at in [0, 61, last] {
        check(&mut memory, at, LONG);
    }
    lines
}

#[test]
fn clzero_clears_exactly_the_range() {
    let below = Installed::new(step_over);
    let ours = Installed::new(emulate);

    let lines = check("clzero", kernels::clzero);
    match EMULATED.swap(0, Ordering::Relaxed) {
        0 => println!("CLZERO ran natively, {lines} lines"),
        emulated => {
            println!("CLZERO was emulated, {emulated} lines");
            assert_eq!(emulated, lines);
            assert!(lacks_here(Method::Clzero).is_some(), "detected, but it traps");
        }
    }

    // The handler is proved on CPUs of either kind.
    assert_eq!(check("marked clzero", marked), EMULATED.load(Ordering::Relaxed));

    // What it does not know goes on to the action below.
    assert_eq!(CHAINED.load(Ordering::Relaxed), 0);
    // SAFETY: `step_over` steps over it.
    unsafe { asm!("ud2") };
    assert_eq!(CHAINED.load(Ordering::Relaxed), 1);

    drop(ours);
    drop(below);
}
