//! seccomp(2): system calls that answer with an error, or that end the process. A filter can never be taken
//! off again, so it goes on a thread that ends, or on a process of its own.
#![allow(unsafe_code)]

use std::io;

/// Whom a filter is for. Threads started afterwards inherit it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    Thread,
    /// All threads there are.
    Process,
}

/// A system call with an answer of ours, perhaps with such arguments only.
#[derive(Debug, Clone)]
pub struct Refusal {
    number: libc::c_long,
    errno: i32,
    /// Comparison, argument (from 0), value.
    conditions: Vec<(u32, u32, u32)>,
}

impl Refusal {
    pub fn new(number: libc::c_long, errno: i32) -> Self {
        Self { number, errno, conditions: Vec::new() }
    }

    /// Only if the lower half of this argument is `value`.
    pub fn if_equal(mut self, argument: u32, value: u32) -> Self {
        self.conditions.push((libc::BPF_JEQ, argument, value));
        self
    }

    /// Only if the lower half of this argument has one of these bits.
    pub fn if_set(mut self, argument: u32, bits: u32) -> Self {
        self.conditions.push((libc::BPF_JSET, argument, bits));
        self
    }
}

/// What becomes of a call that is not allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Otherwise {
    /// The process is killed by SIGSYS.
    Kill,
    /// The thread gets a SIGSYS that can be caught: see [`name_trapped_calls`].
    Trap,
}

const fn step(code: u32, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt, jf, k }
}

const fn load(offset: u32) -> libc::sock_filter {
    step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, offset)
}

const fn answer(value: u32) -> libc::sock_filter {
    step(libc::BPF_RET | libc::BPF_K, 0, 0, value)
}

/// From here on these calls are refused; `None`, said aloud, where no filter can be had.
pub fn refuse(scope: Scope, refusals: &[Refusal]) -> Option<()> {
    let mut program = Vec::new();
    for Refusal { number, errno, conditions } in refusals {
        // struct seccomp_data: the number at 0, arguments of 8 bytes from 16 on, the lower half first.
        let mut left = 2 * conditions.len() as u8 + 1;
        program.extend([load(0), step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, left, *number as u32)]);
        for (comparison, argument, value) in conditions {
            left -= 2;
            program.push(load(16 + argument * 8));
            program.push(step(libc::BPF_JMP | comparison | libc::BPF_K, 0, left, *value));
        }
        program.push(answer(libc::SECCOMP_RET_ERRNO | *errno as u32));
    }
    program.push(answer(libc::SECCOMP_RET_ALLOW));
    install(scope, &mut program)
}

/// From here on no other calls than these are made without harm.
pub fn allow_only(scope: Scope, calls: &[libc::c_long], otherwise: Otherwise) -> Option<()> {
    let mut program = vec![load(0)];
    for number in calls {
        program.push(step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, *number as u32));
        program.push(answer(libc::SECCOMP_RET_ALLOW));
    }
    program.push(answer(match otherwise {
        Otherwise::Kill => libc::SECCOMP_RET_KILL_PROCESS,
        Otherwise::Trap => libc::SECCOMP_RET_TRAP,
    }));
    install(scope, &mut program)
}

fn install(scope: Scope, program: &mut [libc::sock_filter]) -> Option<()> {
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    let flags = if scope == Scope::Process { libc::SECCOMP_FILTER_FLAG_TSYNC } else { 0 };
    // SAFETY: numbers in; the program outlives the call, which copies it.
    let refused = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const filter)
    };
    if refused != 0 {
        println!("skipped: no seccomp filter: {}", io::Error::last_os_error());
        return None;
    }
    Some(())
}

/// What a process says and how it ends when [`Otherwise::Trap`] struck.
pub const TRAPPED: &str = "refused system call number ";

/// Says which call was trapped, and ends the process.
pub fn name_trapped_calls() {
    extern "C" fn handler(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
        // SAFETY: the kernel's siginfo_t of a SIGSYS has the call's number behind 16 bytes of header and an
        // address; write and _exit may be called in a handler.
        unsafe {
            let mut number = info.cast::<u8>().add(24).cast::<u32>().read();
            let mut text = [b' '; 12];
            text[11] = b'\n';
            for place in text[..11].iter_mut().rev() {
                *place = b'0' + (number % 10) as u8;
                number /= 10;
            }
            libc::write(2, TRAPPED.as_ptr().cast(), TRAPPED.len());
            libc::write(2, text.as_ptr().cast(), text.len());
            libc::_exit(1);
        }
    }
    // SAFETY: the handler does nothing that a handler may not do; the struct is filled as far as it is used.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as extern "C" fn(_, _, _) as usize;
        action.sa_flags = libc::SA_SIGINFO;
        assert_eq!(libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut()), 0);
    }
}
