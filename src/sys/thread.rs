//! What a worker thread is to the operating system.

use std::io;
use std::time::Duration;

/// Blocks the signals that are sent to a process and land on any of its threads: they are the VMM's. Those
/// that a thread raises by its own doing stay as they are.
pub(crate) fn block_asynchronous_signals() {
    let own = [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS];
    // SAFETY: the set is a plain C struct that `sigfillset` initialises, and the calls change nothing but
    // the set and the mask of the calling thread.
    unsafe {
        let mut signals: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut signals);
        own.iter().for_each(|signal| {
            libc::sigdelset(&raw mut signals, *signal);
        });
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const signals, std::ptr::null_mut());
    }
}

/// Leaves a policy below the normal one (`SCHED_IDLE`, `SCHED_BATCH`) that the creating thread passed on: a
/// thread that faults pages in at low priority holds the mmap lock for as long as it is kept from running.
pub(crate) fn use_normal_policy() -> io::Result<()> {
    if !has_low_policy() {
        return Ok(());
    }
    // A normal thread's priority is 0.
    let priority: libc::c_int = 0;
    // SAFETY: the kernel's sched_param is this one number; it outlives the call, which changes the calling
    // thread only.
    match unsafe { libc::syscall(libc::SYS_sched_setscheduler, 0, libc::SCHED_OTHER, &raw const priority) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether the calling thread's policy is below the normal one.
pub(crate) fn has_low_policy() -> bool {
    const RESET_ON_FORK: libc::c_long = libc::SCHED_RESET_ON_FORK as libc::c_long;
    // The system calls themselves: musl's functions of these names refuse.
    // SAFETY: asks for the policy of the calling thread.
    let policy = unsafe { libc::syscall(libc::SYS_sched_getscheduler, 0) } & !RESET_ON_FORK;
    [libc::SCHED_IDLE, libc::SCHED_BATCH].map(libc::c_long::from).contains(&policy)
}

/// CPU time that the calling thread has used.
pub(crate) fn thread_cpu_time() -> Duration {
    // SAFETY: a timespec is two numbers, for which zeros are valid; the kernel writes to it and nothing else.
    let time = unsafe {
        let mut time: libc::timespec = std::mem::zeroed();
        libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time);
        time
    };
    // Neither is negative, and there are less than 10^9 nanoseconds.
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// The calling thread's number in the system.
pub(crate) fn thread_id() -> u32 {
    // SAFETY: gettid takes nothing, cannot fail and has no side effects.
    let id = unsafe { libc::syscall(libc::SYS_gettid) };
    id.unsigned_abs() as u32
}

/// Page faults of the calling thread so far that needed no disk, those within `MADV_POPULATE_WRITE` among them: one
/// for each page that became present, whatever its size (`getrusage(2)`).
pub(crate) fn minor_faults() -> u64 {
    // SAFETY: an all-zero rusage is a valid value of that plain C struct, and the call fills it.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` outlives the call, which asks about the calling thread.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    u64::try_from(usage.ru_minflt).unwrap_or(0)
}
