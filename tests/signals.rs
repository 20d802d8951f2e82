//! Signals (R9): whatever fails, the application's handlers stay as they are, no signal is raised, and the
//! caller's signal mask is its own.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]
#![allow(unsafe_code)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use common::hooked::{Answer, hooked_memory};
use common::hugepages::{HUGE, Hugepages, available, hugetlb_memfd};
use common::mapped::Mapped;
use common::uffd::Userfaultfd;
use common::{MIB, PAGE, fill, memfd, service, worker_threads};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vm_zeroing::{Intent, ZeroRequest, ZeroingService};

/// Signals that a library might be tempted by.
const SIGNALS: [libc::c_int; 8] = [
    libc::SIGBUS,
    libc::SIGSEGV,
    libc::SIGILL,
    libc::SIGFPE,
    libc::SIGPIPE,
    libc::SIGUSR1,
    libc::SIGALRM,
    libc::SIGTERM,
];

/// Handler, flags, mask.
type Disposition = (usize, libc::c_int, Vec<bool>);

fn disposition(signal: libc::c_int) -> Disposition {
    // SAFETY: an all-zero sigaction is a valid value, which the call fills; nothing is changed.
    let found = unsafe {
        let mut found: libc::sigaction = std::mem::zeroed();
        assert_eq!(libc::sigaction(signal, std::ptr::null(), &raw mut found), 0);
        found
    };
    (found.sa_sigaction, found.sa_flags, members(&found.sa_mask))
}

fn members(set: &libc::sigset_t) -> Vec<bool> {
    // SAFETY: reads a set that is alive.
    (1..=64).map(|signal| unsafe { libc::sigismember(set, signal) } == 1).collect()
}

fn all() -> (Vec<Disposition>, Vec<bool>) {
    // SAFETY: an all-zero set is a valid value, which the call fills; nothing is changed.
    let mask = unsafe {
        let mut mask: libc::sigset_t = std::mem::zeroed();
        assert_eq!(libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &raw mut mask), 0);
        mask
    };
    (SIGNALS.map(disposition).to_vec(), members(&mask))
}

/// Signals that came to the application's handler.
static CAME: AtomicUsize = AtomicUsize::new(0);

extern "C" fn application_handler(signal: libc::c_int) {
    CAME.fetch_add(1, Ordering::SeqCst);
    if signal == libc::SIGSEGV || signal == libc::SIGBUS {
        // Returning would raise it again and again.
        // SAFETY: ends the process at once, which a handler may do.
        unsafe { libc::_exit(77) };
    }
}

fn install(signal: libc::c_int) {
    // SAFETY: the handler does nothing that a handler may not do; the struct is filled as far as it is used.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = application_handler as extern "C" fn(libc::c_int) as usize;
        action.sa_flags = libc::SA_RESTART;
        libc::sigaddset(&mut action.sa_mask, libc::SIGUSR2);
        assert_eq!(libc::sigaction(signal, &raw const action, std::ptr::null_mut()), 0);
    }
}

/// Every way to fail that needs no privilege, and those that do where they can be had.
fn fail_in_every_way(service: &ZeroingService) {
    let submit =
        |request: ZeroRequest| service.submit(request.intent(Intent::Teardown)).unwrap().wait().is_err();

    let refused = hooked_memory(5 * MIB, |_, _| Answer::Refused);
    assert!(submit(ZeroRequest::new(&refused)));
    let short = hooked_memory(5 * MIB, |_, len| Answer::Short(len - 1));
    assert!(submit(ZeroRequest::new(&short)));
    let panics = hooked_memory(5 * MIB, |_, _| panic!("this panic is part of the test"));
    assert!(submit(ZeroRequest::new(&panics)));

    let file = memfd(5 * MIB);
    let offset = FileOffset::new(file.try_clone().unwrap(), 0);
    let memory = Arc::new(
        GuestMemoryMmap::<()>::from_ranges_with_files([(GuestAddress(0), 5 * MIB as usize, Some(offset))])
            .unwrap(),
    );
    fill(&*memory, 0, 5 * MIB);
    assert!(submit(ZeroRequest::new(&memory).deadline(Instant::now())));
    file.set_len(2 * MIB).unwrap();
    assert!(submit(ZeroRequest::new(&memory)));

    let unwritable = Arc::new(Mapped::anonymous(8 * PAGE));
    unwritable.forbid(3 * PAGE, PAGE);
    assert!(submit(ZeroRequest::host([unwritable.host_range(0, 8 * PAGE)])));

    let poisoned = Arc::new(GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), MIB as usize)]).unwrap());
    let base = poisoned.get_host_address(GuestAddress(0)).unwrap() as u64;
    if let Some(handled) = Userfaultfd::register(base, MIB)
        && handled.poison(base, PAGE).is_some()
    {
        let _handler = handled.answer_with(1);
        assert!(submit(ZeroRequest::new(&poisoned)));
    }

    if let Some(_pages) = Hugepages::reserve(1) {
        let pages = available() + 1;
        let file = FileOffset::new(hugetlb_memfd(pages), 0);
        let region = (GuestAddress(0), (pages * HUGE) as usize, Some(file));
        let memory = Arc::new(GuestMemoryMmap::<()>::from_ranges_with_files([region]).unwrap());
        assert!(submit(ZeroRequest::new(&memory)));
    }

    let cancelled = hooked_memory(24 * MIB, |_, _| Answer::AsAsked);
    let job = service.zero(&cancelled, Intent::Teardown).unwrap();
    job.cancel();
    let _ = job.wait();
}

#[test]
fn handlers_stay_as_they_are() {
    common::run_child("handlers_stay_as_they_are_child");
}

/// In a process of its own, because handlers belong to the process.
#[test]
#[ignore = "a part of handlers_stay_as_they_are"]
fn handlers_stay_as_they_are_child() {
    if !common::is_child() {
        return;
    }
    let untouched = all();
    let early = service();
    fail_in_every_way(&early);
    assert_eq!(all(), untouched, "the system's own");

    // Set after a service was built, and before another is.
    install(libc::SIGBUS);
    install(libc::SIGUSR1);
    let half = all();
    assert_ne!(half, untouched);
    fail_in_every_way(&early);
    assert_eq!(all(), half);
    install(libc::SIGSEGV);
    let own = all();
    let late = service();
    fail_in_every_way(&late);
    fail_in_every_way(&early);
    drop((early, late));
    assert_eq!(all(), own);
    assert_eq!(CAME.load(Ordering::SeqCst), 0, "no signal came");
}

/// The application's signals are for its own threads: a worker takes none, not even one sent to it by name.
#[test]
fn signals_during_a_job() {
    common::run_child("signals_during_a_job_child");
}

#[test]
#[ignore = "a part of signals_during_a_job"]
fn signals_during_a_job_child() {
    if !common::is_child() {
        return;
    }
    install(libc::SIGUSR1);
    let service = service();
    let (threads, len) = (worker_threads(), 24 * MIB);
    let memory = hooked_memory(len, move |_, _| {
        for (thread, _) in &threads {
            // SAFETY: sends a signal that has a handler to a thread of our own.
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), *thread, libc::SIGUSR1) };
        }
        Answer::AsAsked
    });
    for intent in [Intent::Boot, Intent::Teardown] {
        fill(&*memory, 0, len / 2);
        assert!(service.zero(&memory, intent).unwrap().wait().unwrap().is_all_zero());
        assert!(common::is_zero(&*memory, 0, len));
    }
    assert_eq!(CAME.load(Ordering::SeqCst), 0, "a worker ran the application's handler");
}
