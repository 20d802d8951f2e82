//! R18: the list of system calls in `docs/syscalls.md` is complete: the library lives under a seccomp filter that
//! kills the process on any other call.
#![cfg(target_arch = "x86_64")]
#![allow(unsafe_code, clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use common::hooked::{Answer, HookedRegion, memory_of};
use common::hugepages::{HUGE, Hugepages};
use common::seccomp::{Otherwise, Scope, TRAPPED, allow_only, name_trapped_calls};
use common::uffd::Userfaultfd;
use common::{MIB, PAGE, child, fill, is_child, memfd};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, MmapRegion};
use vm_zeroing::{
    HugepagePool, Intent, JobError, NodePolicy, PageSize, Quiesced, Strategy, ThreadInfo, ThreadKind,
    Topology, Verify, ZeroRequest, ZeroingService,
};

const LIST: &str = include_str!("../docs/syscalls.md");
const TRAP: &str = "VM_ZEROING_TEST_TRAP";
/// How a child ends that came through: nothing else exits with it.
const THROUGH: i32 = 42;

macro_rules! numbers {
    ($($name:literal $constant:ident,)*) => { &[$(($name, libc::$constant)),*] };
}

/// The calls that the document may name.
const NUMBERS: &[(&str, libc::c_long)] = numbers! {
    "brk" SYS_brk,
    "clock_gettime" SYS_clock_gettime,
    "clone" SYS_clone,
    "clone3" SYS_clone3,
    "close" SYS_close,
    "eventfd2" SYS_eventfd2,
    "exit" SYS_exit,
    "fcntl" SYS_fcntl,
    "fstat" SYS_fstat,
    "fstatfs" SYS_fstatfs,
    "ftruncate" SYS_ftruncate,
    "futex" SYS_futex,
    "get_mempolicy" SYS_get_mempolicy,
    "getcpu" SYS_getcpu,
    "getdents64" SYS_getdents64,
    "getpid" SYS_getpid,
    "getrusage" SYS_getrusage,
    "gettid" SYS_gettid,
    "ioctl" SYS_ioctl,
    "lseek" SYS_lseek,
    "madvise" SYS_madvise,
    "lstat" SYS_lstat,
    "mbind" SYS_mbind,
    "membarrier" SYS_membarrier,
    "memfd_create" SYS_memfd_create,
    "mmap" SYS_mmap,
    "move_pages" SYS_move_pages,
    "mprotect" SYS_mprotect,
    "mremap" SYS_mremap,
    "munmap" SYS_munmap,
    "newfstatat" SYS_newfstatat,
    "open" SYS_open,
    "openat" SYS_openat,
    "poll" SYS_poll,
    "prctl" SYS_prctl,
    "pread64" SYS_pread64,
    "prlimit64" SYS_prlimit64,
    "read" SYS_read,
    "readv" SYS_readv,
    "restart_syscall" SYS_restart_syscall,
    "rseq" SYS_rseq,
    "rt_sigaction" SYS_rt_sigaction,
    "rt_sigprocmask" SYS_rt_sigprocmask,
    "sched_getaffinity" SYS_sched_getaffinity,
    "sched_getscheduler" SYS_sched_getscheduler,
    "sched_setaffinity" SYS_sched_setaffinity,
    "sched_setscheduler" SYS_sched_setscheduler,
    "sched_yield" SYS_sched_yield,
    "set_robust_list" SYS_set_robust_list,
    "set_tid_address" SYS_set_tid_address,
    "sigaltstack" SYS_sigaltstack,
    "stat" SYS_stat,
    "statx" SYS_statx,
    "uname" SYS_uname,
    "write" SYS_write,
    "writev" SYS_writev,
};

/// The calls in the rows whose first cell begins so.
fn named(beginning: &str) -> BTreeSet<&'static str> {
    let rows = LIST.lines().filter_map(|line| {
        let [_, phase, calls, ..] = line.split('|').map(str::trim).collect::<Vec<_>>()[..] else {
            return None;
        };
        phase.starts_with(beginning).then_some(calls)
    });
    // Every other piece between backticks is a name.
    rows.flat_map(|calls| calls.split('`').skip(1).step_by(2)).collect()
}

fn numbers_of(names: impl IntoIterator<Item = &'static str>) -> BTreeSet<libc::c_long> {
    let number = |name| NUMBERS.iter().find(|(known, _)| *known == name).map(|(_, number)| *number);
    names.into_iter().map(|name| number(name).unwrap_or_else(|| panic!("add {name} to NUMBERS"))).collect()
}

/// The rows of a machine with several nodes count where the kernel has them.
fn several_nodes() -> bool {
    static SEVERAL: LazyLock<bool> = LazyLock::new(|| Topology::detect().unwrap().nodes().len() > 1);
    *SEVERAL
}

/// Allows the calls of these rows on this thread and all that it starts; and to end the process.
fn confine(beginnings: &[&str]) -> Option<()> {
    let mut allowed = BTreeSet::from([libc::SYS_exit_group]);
    for beginning in beginnings {
        let names = named(beginning);
        assert!(!names.is_empty(), "no row of docs/syscalls.md begins with {beginning:?}");
        allowed.extend(numbers_of(names));
        if several_nodes() {
            allowed.extend(numbers_of(named(&format!("several nodes: {beginning}"))));
        }
    }
    if cfg!(target_env = "musl") {
        allowed.extend(numbers_of(named("musl: ")));
    }
    let traps = std::env::var_os(TRAP).is_some();
    if traps {
        name_trapped_calls();
        // For the handler to say which.
        allowed.insert(libc::SYS_write);
    }
    let allowed: Vec<_> = allowed.into_iter().collect();
    allow_only(Scope::Thread, &allowed, if traps { Otherwise::Trap } else { Otherwise::Kill })
}

/// Ends the child at once: what the test runner does afterwards is not in the list.
fn through() -> ! {
    // SAFETY: no destructor is owed to anybody.
    unsafe { libc::_exit(THROUGH) }
}

/// Runs a child that ends by [`through`], or skips; says which call was refused if one was.
fn survives(name: &str) {
    let run = |command: &mut Command| {
        let output = command.output().unwrap();
        (
            output.status,
            [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat(),
        )
    };
    let (status, said) = run(&mut child(name));
    match (status.code(), status.signal()) {
        (Some(THROUGH), _) => {}
        (Some(0), _) if said.contains("skipped") => print!("{said}"),
        (_, Some(libc::SIGSYS)) => {
            let (_, said) = run(child(name).env(TRAP, "1"));
            let number = said.lines().find_map(|line| line.split_once(TRAPPED)?.1.trim().parse().ok());
            let known =
                number.and_then(|number: libc::c_long| NUMBERS.iter().find(|(_, known)| *known == number));
            panic!(
                "{name}: a call that docs/syscalls.md does not list: {known:?}, number {number:?}\n{said}"
            );
        }
        _ => panic!("{name}: {status}\n{said}"),
    }
}

type Memory = GuestMemoryMmap<()>;

const LEN: u64 = 9 * MIB;

fn anonymous() -> Arc<Memory> {
    Arc::new(Memory::from_ranges(&[(GuestAddress(0), LEN as usize)]).unwrap())
}

fn of_file() -> Arc<Memory> {
    let file = FileOffset::new(memfd(LEN), 0);
    Arc::new(Memory::from_ranges_with_files([(GuestAddress(0), LEN as usize, Some(file))]).unwrap())
}

/// Requests of every kind. What is fresh is fresh once.
fn use_it(service: &ZeroingService, memories: [Arc<Memory>; 2], truncated: &Arc<Memory>) {
    for memory in memories {
        // Teardown first: it looks for holes, and leaves them to boot.
        for intent in [Intent::Teardown, Intent::Boot, Intent::Background] {
            let request = ZeroRequest::new(&memory).intent(intent).verify(Verify::Full);
            assert!(service.submit(request).unwrap().wait().unwrap().is_all_zero());
            let request = ZeroRequest::new(&memory).intent(intent).strategy(Strategy::Overwrite);
            let part = [(GuestAddress(5), 3 * PAGE), (GuestAddress(MIB), LEN - MIB)];
            assert!(service.submit(request.ranges(part)).unwrap().wait().unwrap().is_all_zero());
        }
        let job = service.zero(&memory, Intent::Teardown).unwrap();
        job.completion_fd().unwrap();
        job.cancel();
        let _ = job.wait();
        let late = service.submit(ZeroRequest::new(&memory).deadline(Instant::now())).unwrap();
        assert!(matches!(late.wait(), Err(JobError::DeadlinePassed { .. })));
        let empty = service.submit(ZeroRequest::new(&memory).ranges([])).unwrap();
        empty.completion_fd().unwrap();
        assert!(empty.wait().is_ok());
        // Let go of by whoever ends it.
        drop(service.zero(&memory, Intent::Teardown).unwrap());
    }
    assert!(service.zero(truncated, Intent::Teardown).unwrap().wait().is_err());
}

const CALLER: [&str; 3] = ["caller: submit", "caller: wait", "caller: drop the service"];
const WORKER: [&str; 2] = ["worker: zero", "worker: end"];

#[test]
fn a_thousand_services() {
    survives("a_thousand_services_child");
}

/// The whole life of a service, a thousand times; every so often with work of each kind.
#[test]
#[ignore = "a part of a_thousand_services"]
fn a_thousand_services_child() {
    if !is_child() {
        return;
    }
    let truncated = common::files::truncated(LEN, 5 * MIB);
    let mut fresh: Vec<_> = (0..10).map(|_| [anonymous(), of_file()]).collect();
    let one = anonymous();
    fill(&*one, 0, LEN);
    let Some(()) = confine(&["caller: ", "worker: ", "any: "]) else { return };
    // An emulated machine (tests/machines) takes long for each.
    let services = if std::env::var_os("VM_ZEROING_NODES").is_some() { 100 } else { 1000 };
    for cycle in 0..services {
        let service = ZeroingService::builder().build().unwrap();
        match cycle % 100 {
            0 => use_it(&service, fresh.pop().unwrap(), &truncated.0),
            _ => {
                let request = ZeroRequest::new(&one).ranges([(GuestAddress(0), 20 * PAGE)]);
                assert!(service.submit(request).unwrap().wait().unwrap().is_all_zero());
            }
        }
    }
    through()
}

#[test]
fn each_kind_of_thread() {
    survives("each_kind_of_thread_child");
}

/// Caller and workers under their own rows only. The service is there before; a worker installs its filter when it
/// first asks for guest memory.
#[test]
#[ignore = "a part of each_kind_of_thread"]
fn each_kind_of_thread_child() {
    if !is_child() {
        return;
    }
    static CONFINED: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static DONE: std::cell::Cell<bool> = const { std::cell::Cell::new(false) });
    let confined = |mapping: MmapRegion, start| {
        HookedRegion::over(mapping, start, |_, _| {
            if !DONE.replace(true) {
                confine(&[&WORKER[..], &["any: "]].concat()).unwrap();
                CONFINED.fetch_add(1, Ordering::SeqCst);
            }
            Answer::AsAsked
        })
    };
    let memories = [anonymous(), of_file()];
    let truncated = common::files::truncated(LEN, 5 * MIB);
    let service = ZeroingService::builder().build().unwrap();
    let workers = service.workers();
    let anonymous = MmapRegion::new(64 * MIB as usize).unwrap();
    let file = MmapRegion::from_file(FileOffset::new(memfd(LEN), 0), LEN as usize).unwrap();
    let first = memory_of(vec![confined(anonymous, 0), confined(file, 128 * MIB)]);
    let small = [self::anonymous(), of_file()];
    small.iter().for_each(|memory| fill(&**memory, 0, LEN));
    let Some(()) = confine(&[&CALLER[..], &["any: "]].concat()) else { return };
    // Until each worker has been there; nobody says which of them takes what.
    while CONFINED.load(Ordering::SeqCst) < workers {
        assert!(service.zero(&first, Intent::Boot).unwrap().wait().unwrap().is_all_zero());
    }
    drop(first);
    for memory in &small {
        let request = ZeroRequest::new(memory).ranges([(GuestAddress(0), 20 * PAGE)]);
        let report = service.submit(request.verify(Verify::Full)).unwrap().wait().unwrap();
        assert!(report.is_all_zero());
    }
    use_it(&service, memories, &truncated.0);
    drop(service);
    through()
}

/// A service without threads, whose caller does everything.
#[test]
fn no_workers() {
    survives("no_workers_child");
}

#[test]
#[ignore = "a part of no_workers"]
fn no_workers_child() {
    if !is_child() {
        return;
    }
    let memories = [anonymous(), of_file()];
    let truncated = common::files::truncated(LEN, 5 * MIB);
    let service = ZeroingService::builder().workers_per_node(0).build().unwrap();
    let Some(()) = confine(&[&CALLER[..], &["worker: zero", "any: "]].concat()) else { return };
    use_it(&service, memories, &truncated.0);
    drop(service);
    through()
}

/// Has the watchdog confine itself to these rows.
fn on_the_watchdog(rows: &'static [&'static str]) -> impl Fn(&ThreadInfo) -> std::io::Result<()> {
    |thread| {
        if thread.kind == ThreadKind::Watchdog {
            let _ = confine(rows);
        }
        Ok(())
    }
}

/// Where no worker is stuck it needs its own row only.
#[test]
fn a_watchdog_with_nobody_stuck() {
    survives("a_watchdog_with_nobody_stuck_child");
}

#[test]
#[ignore = "a part of a_watchdog_with_nobody_stuck"]
fn a_watchdog_with_nobody_stuck_child() {
    if !is_child() {
        return;
    }
    let confined = on_the_watchdog(&["watchdog: watch", "worker: end", "any: "]);
    let service = ZeroingService::builder().background_rate(0).on_thread_start(confined).build().unwrap();
    let memories = [anonymous(), of_file()];
    let jobs: Vec<_> = memories
        .into_iter()
        .map(|memory| {
            let request = ZeroRequest::new(&memory).intent(Intent::Background);
            service.submit(request.deadline(Instant::now() + Duration::from_millis(50))).unwrap()
        })
        .collect();
    // Nobody waits and no worker looks at them: it is the watchdog that ends them, and lets go of their memory.
    jobs.iter().for_each(|job| assert!(common::readable(job.completion_fd().unwrap(), -1)));
    drop(service);
    through()
}

/// It starts a stand-in for a stuck worker, which runs under its filter.
#[test]
fn the_watchdog() {
    survives("the_watchdog_child");
}

#[test]
#[ignore = "a part of the_watchdog"]
fn the_watchdog_child() {
    if !is_child() {
        return;
    }
    let confined = on_the_watchdog(&["watchdog", "worker: ", "any: "]);
    let service = ZeroingService::builder().topology(common::one_node()).workers_per_node(1).small_job(0);
    let service = service.on_thread_start(confined).build().unwrap();
    let memory = anonymous();
    let base = memory.get_host_address(GuestAddress(0)).unwrap() as u64;
    let Some(handler) = Userfaultfd::register(base, LEN) else { return };
    let stuck =
        service.submit(ZeroRequest::new(&memory).deadline(Instant::now() + Duration::from_millis(50)));
    handler.wait_for_a_fault();
    assert!(matches!(stuck.unwrap().wait(), Err(JobError::Stalled { .. })));
    for memory in [anonymous(), of_file()] {
        assert!(service.zero(&memory, Intent::Boot).unwrap().wait().unwrap().is_all_zero());
        assert!(service.zero(&memory, Intent::Teardown).unwrap().wait().unwrap().is_all_zero());
    }
    drop(handler);
    drop(service);
    through()
}

#[test]
fn pools() {
    // For the child.
    let _hugepages = Hugepages::reserve(8);
    survives("pools_child");
}

#[test]
#[ignore = "a part of pools"]
fn pools_child() {
    if !is_child() {
        return;
    }
    let free = common::hugepages::available();
    // Questions about nodes are asked where there are several.
    let service = ZeroingService::builder().topology(common::two_nodes()).build().unwrap();
    let node = service.topology().default_memory_nodes()[0];
    let rows = [&CALLER[..2], &["worker: ", "any: ", "pool: ", "several nodes: "]].concat();
    let Some(()) = confine(&rows) else { return };
    // A pool's last job may hold its pages for a moment after it is gone, and there are hugepages for one pool.
    let huge = u32::from(free >= 8);
    for (page_size, slab, pools) in [(PageSize::Base, 64 * PAGE, 20), (PageSize::Huge2M, 2 * HUGE, huge)] {
        for _ in 0..pools {
            let pool = HugepagePool::builder(&service).page_size(page_size).capacity(node, 4 * slab);
            let pool = pool.slab_bytes(slab).build().unwrap();
            let lease = |bytes| pool.lease(bytes, NodePolicy::Any).unwrap();
            let memory = lease(2 * slab).into_memory::<()>([(GuestAddress(0), 2 * slab)]).unwrap();
            let parked = lease(slab).into_memory::<()>([(GuestAddress(0), slab)]).unwrap();
            assert!(pool.lease(2 * slab, NodePolicy::Any).is_err());
            let (id, parked_id) = (memory.lease(), parked.lease());
            drop(parked);
            memory.recycle(Quiesced::on_callers_word()).unwrap().wait().unwrap();
            assert!(pool.vm_is_gone(id));
            pool.reclaim(parked_id, Quiesced::on_callers_word()).unwrap().wait().unwrap();
            drop(lease(4 * slab));
        }
    }
    // More than there is.
    let more = HugepagePool::builder(&service).page_size(PageSize::Huge2M).capacity(node, 1 << 40);
    assert!(more.build().is_err());
    through()
}

#[test]
fn calibrations() {
    survives("calibrations_child");
}

#[test]
#[ignore = "a part of calibrations"]
fn calibrations_child() {
    if !is_child() {
        return;
    }
    let rows = ["calibrate: ", "worker: start", "worker: end", "any: "];
    let Some(()) = confine(&rows) else { return };
    for workers in [0, 1, 2, 8] {
        for milliseconds in [0, 1, 20, 40] {
            let builder = ZeroingService::builder().workers_per_node(workers);
            let calibration = builder.calibrate(Duration::from_millis(milliseconds)).unwrap();
            assert!(!calibration.to_string().is_empty());
        }
    }
    through()
}

/// Misspelt names would allow nothing, and nobody would notice where a call is rare.
#[test]
fn every_name_is_a_system_call() {
    let rows = ["caller: ", "worker: ", "watchdog", "any: ", "several nodes: ", "pool: ", "calibrate: "];
    let names = rows.into_iter().chain(["KVM slots: ", "musl: "]).flat_map(named);
    assert!(numbers_of(names).len() > 30);
}

/// The filter does its part: a call that no row names ends the child.
#[test]
fn any_other_call_is_the_end() {
    let output = child("any_other_call_is_the_end_child").output().unwrap();
    if String::from_utf8_lossy(&output.stdout).contains("skipped") {
        println!("skipped: no seccomp filter");
        return;
    }
    assert_eq!(output.status.signal(), Some(libc::SIGSYS), "{output:?}");
}

#[test]
#[ignore = "a part of any_other_call_is_the_end"]
fn any_other_call_is_the_end_child() {
    if !is_child() {
        return;
    }
    let Some(()) = confine(&["caller: ", "worker: ", "any: ", "pool: "]) else { return };
    // SAFETY: takes nothing, cannot fail.
    unsafe { libc::getppid() };
    through()
}
