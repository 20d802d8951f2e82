//! Limits of the operator that bite in the middle of the work: hugepages (R8), memory (R20), CPU time (R21), files.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::collections::HashSet;
use std::os::unix::process::ExitStatusExt;
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use common::cgroup::{self, Cgroup};
use common::hooked::{Answer, HookedMemory, hooked, memory_of};
use common::hugepages::{HUGE, Hugepages, hugetlb_memfd};
use common::limits::{Limit, never_hang};
use common::{MIB, all_zero, assert_exact, ends_well, exactly, fill, is_child, run_child, service, sum};
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionCollection, GuestRegionMmap, MmapRegion,
};
use vm_zeroing::{
    Cause, HugepagePool, Intent, JobError, Method, NodePolicy, Outcome, PageSize, PoolError, Verify,
    ZeroRequest, ZeroingService,
};

type Memory = GuestMemoryMmap<()>;

fn anonymous(len: u64) -> Arc<Memory> {
    Arc::new(Memory::from_ranges(&[(GuestAddress(0), len as usize)]).unwrap())
}

/// R8: 64 MiB of hugepages are there, and a cgroup may have 16 MiB of them.
#[test]
fn a_limit_on_hugepages() {
    let Some(_pages) = Hugepages::reserve(32) else { return };
    let Some(cgroup) = Cgroup::new("hugetlb") else { return };
    let Some(()) = cgroup.set("hugetlb.2MB.limit_in_bytes", "hugetlb.2MB.max", 16 * MIB) else { return };
    ends_well(&mut cgroup.child("a_limit_on_hugepages_child"));
}

#[test]
#[ignore = "a part of a_limit_on_hugepages"]
fn a_limit_on_hugepages_child() {
    if !is_child() {
        return;
    }
    never_hang();
    cgroup::enter();
    let service = service();
    let over = |flags, file: Option<FileOffset>| {
        let rw = libc::PROT_READ | libc::PROT_WRITE;
        let mapping = MmapRegion::build(file, 32 * HUGE as usize, rw, flags).unwrap();
        let region = GuestRegionMmap::<()>::new(mapping, GuestAddress(0)).unwrap();
        Arc::new(GuestRegionCollection::from_regions(vec![region]).unwrap())
    };
    let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB;
    for intent in [Intent::Teardown, Intent::Boot] {
        for is_file in [false, true] {
            let memory = match is_file {
                false => over(private, None),
                true => over(libc::MAP_SHARED, Some(FileOffset::new(hugetlb_memfd(32), 0))),
            };
            let error = service.zero(&memory, intent).unwrap().wait().unwrap_err();
            let JobError::Failed { cause: Cause::Shortage { .. }, report, .. } = &error else {
                panic!("{error}")
            };
            // Needed and got, and what to raise.
            assert_eq!(report.total_bytes, 64 * MIB);
            let got = report.zero_bytes();
            assert!(if intent == Intent::Teardown { got == 16 * MIB } else { got <= 16 * MIB }, "{report:?}");
            let text = error.to_string();
            assert!(
                text.contains(&format!("{got} of {}", 64 * MIB)) && text.contains("hugetlb cgroup"),
                "{text}"
            );
            for range in report.ranges.iter().filter(|range| range.outcome.is_zero()) {
                assert!(common::is_zero(&*memory, range.start, range.len));
            }
        }
    }
    let pool = |huge: u64| {
        let node = service.topology().default_memory_nodes()[0];
        HugepagePool::builder(&service).page_size(PageSize::Huge2M).capacity(node, huge * HUGE).build()
    };
    let error = pool(32).unwrap_err();
    println!("a pool of 64 MiB under a limit of 16 MiB: {error}");
    assert!(matches!(error, PoolError::HugepagesRefused { needed: 32, free: 32.., .. }), "{error:?}");
    assert!(error.to_string().contains("hugetlb cgroup"), "{error}");
    // What the limit allows can be had, so the failures have given everything back.
    assert!(pool(8).unwrap().lease(8 * HUGE, NodePolicy::Any).is_ok());
}

/// The other limit of that controller, which bites when memory is mapped.
#[test]
fn a_limit_on_reserved_hugepages() {
    let Some(_pages) = Hugepages::reserve(32) else { return };
    let Some(cgroup) = Cgroup::new("hugetlb") else { return };
    let Some(()) = cgroup.set("hugetlb.2MB.rsvd.limit_in_bytes", "hugetlb.2MB.rsvd.max", 16 * MIB) else {
        return;
    };
    ends_well(&mut cgroup.child("a_limit_on_reserved_hugepages_child"));
}

#[test]
#[ignore = "a part of a_limit_on_reserved_hugepages"]
fn a_limit_on_reserved_hugepages_child() {
    if !is_child() {
        return;
    }
    never_hang();
    cgroup::enter();
    let service = service();
    let node = service.topology().default_memory_nodes()[0];
    let pool = |huge: u64| {
        HugepagePool::builder(&service).page_size(PageSize::Huge2M).capacity(node, huge * HUGE).build()
    };
    let error = pool(32).unwrap_err();
    println!("a pool of 64 MiB under a limit of 16 MiB reserved: {error}");
    assert!(matches!(error, PoolError::HugepagesRefused { needed: 32, free: 32.., .. }), "{error:?}");
    assert!(pool(8).is_ok());
}

/// R20: more memory than the cgroup may have. The library says so or the kernel ends the process; nobody hangs.
#[test]
fn a_limit_on_memory() {
    let Some(cgroup) = Cgroup::new("memory") else { return };
    let Some(()) = cgroup.set("memory.limit_in_bytes", "memory.max", 128 * MIB) else { return };
    let output = cgroup.child("a_limit_on_memory_child").output().unwrap();
    let (said, status) = (String::from_utf8_lossy(&output.stdout), output.status);
    assert!(said.contains("populating"), "{said}");
    match status.signal() {
        // The kernel's own way.
        Some(libc::SIGKILL) => {
            let kills = cgroup.read("memory.oom_control", "memory.events");
            let kills = kills.lines().find_map(|line| line.strip_prefix("oom_kill ")).unwrap();
            assert_ne!(kills.trim(), "0", "killed by whom?");
        }
        _ => assert!(status.success() && said.contains("an error"), "{status}: {said}"),
    }
    assert!(!said.contains("all zero"));
}

#[test]
#[ignore = "a part of a_limit_on_memory"]
fn a_limit_on_memory_child() {
    if !is_child() {
        return;
    }
    never_hang();
    cgroup::enter();
    let service = service();
    let memory = anonymous(256 * MIB);
    println!("populating");
    match service.zero(&memory, Intent::Boot).map(|job| job.wait()) {
        Ok(Ok(_)) => println!("all zero"),
        Ok(Err(error)) => println!("an error: {error}"),
        Err(error) => println!("an error: {error}"),
    }
}

/// Within the limit it is a job like any other.
#[test]
fn memory_within_its_limit() {
    let Some(cgroup) = Cgroup::new("memory") else { return };
    let Some(()) = cgroup.set("memory.limit_in_bytes", "memory.max", 128 * MIB) else { return };
    ends_well(&mut cgroup.child("memory_within_its_limit_child"));
}

#[test]
#[ignore = "a part of memory_within_its_limit"]
fn memory_within_its_limit_child() {
    if !is_child() {
        return;
    }
    never_hang();
    cgroup::enter();
    let memory = anonymous(64 * MIB);
    all_zero(&service().zero(&memory, Intent::Boot).unwrap());
}

/// R21: the process gets a fiftieth of a CPU, and the deadline passes long before the end.
#[test]
fn a_limit_on_cpu_time() {
    let Some(cgroup) = Cgroup::new("cpu") else { return };
    // Microseconds of each period of 100 ms, which is the default.
    let Some(()) = cgroup.set("cpu.cfs_quota_us", "cpu.max", 2000) else { return };
    ends_well(&mut cgroup.child("a_limit_on_cpu_time_child"));
}

/// A chunk that a thread asked for.
#[derive(Debug)]
struct Taken {
    thread: ThreadId,
    offset: u64,
    len: u64,
    /// Whether the deadline had passed.
    late: bool,
}

type Deadline = Arc<Mutex<Option<Instant>>>;
type AllTaken = Arc<Mutex<Vec<Taken>>>;

/// Memory of another guest, and what is asked for of it while there is a deadline.
fn watched(len: u64) -> (Arc<HookedMemory>, Deadline, AllTaken) {
    let (deadline, taken) = (Deadline::default(), AllTaken::default());
    let mut region = hooked(0, len, {
        let (deadline, taken) = (Arc::clone(&deadline), Arc::clone(&taken));
        move |offset, len| {
            let Some(deadline) = *deadline.lock().unwrap() else { return Answer::AsAsked };
            let (thread, len, late) = (thread::current().id(), len as u64, Instant::now() >= deadline);
            let mut taken = taken.lock().unwrap();
            // A chunk is asked for more than once; submitting looks at the first byte.
            if len > 1 && !taken.iter().any(|taken| taken.offset == offset) {
                taken.push(Taken { thread, offset, len, late });
            }
            Answer::AsAsked
        }
    });
    region.on_all_threads = true;
    let memory = memory_of(vec![region]);
    fill(&*memory, 0, len);
    (memory, deadline, taken)
}

#[test]
#[ignore = "a part of a_limit_on_cpu_time"]
fn a_limit_on_cpu_time_child() {
    if !is_child() {
        return;
    }
    never_hang();
    let len = 512 * MIB;
    // Without workers nobody looks at the clock but who does the job.
    for workers in [2, 0] {
        // The slowest method, read back: some CPUs are through in no time otherwise.
        let builder = exactly(2).workers_per_node(workers).method(Method::Portable);
        let service = builder.build().unwrap();
        while !on_little_cpu_time(&service, len) {}
    }
}

/// A job that is late; says whether the workers came to see that: who gets no CPU for half a second looks stuck,
/// and then the job ends without them.
fn on_little_cpu_time(service: &ZeroingService, len: u64) -> bool {
    let (memory, deadline, taken) = watched(len);
    let workers = common::worker_threads();
    let folder = cgroup::enter();
    let at = Instant::now() + Duration::from_millis(500);
    *deadline.lock().unwrap() = Some(at);
    let job = service.submit(ZeroRequest::new(&memory).verify(Verify::Full).deadline(at)).unwrap();
    let result = job.wait();
    *deadline.lock().unwrap() = None;
    // Let go, for the rest of the test.
    std::fs::write(folder.parent().unwrap().join("cgroup.procs"), "0").unwrap();
    let error = result.unwrap_err();
    let (were_stuck, report) = match &error {
        JobError::DeadlinePassed { report } => (false, report),
        JobError::Stalled { report, .. } if !workers.is_empty() => (true, report),
        other => panic!("{other}"),
    };
    assert!(report.erased_bytes < len && sum(report, |outcome| *outcome == Outcome::Untouched) > 0);
    assert_exact(&*memory, report, &[(0, len)]);
    // A worker that looked stuck was replaced, and leaves when it gets a CPU again.
    while common::worker_threads().len() != workers.len() {
        thread::yield_now();
    }
    assert!(were_stuck || common::worker_threads() == workers, "the threads are fine");
    // Each worker had claimed one chunk at most when the time was over, and nobody claimed another.
    let taken = std::mem::take(&mut *taken.lock().unwrap());
    let (late, in_time): (Vec<&Taken>, Vec<&Taken>) = taken.iter().partition(|taken| taken.late);
    let threads: HashSet<ThreadId> = late.iter().map(|taken| taken.thread).collect();
    assert_eq!(late.len(), threads.len(), "a second chunk after the deadline: {late:?}");
    assert!(late.iter().all(|taken| taken.len <= 4 * MIB), "{late:?}");
    let before: u64 = in_time.iter().map(|taken| taken.len).sum();
    let most = before + threads.len() as u64 * 4 * MIB;
    let in_flight = sum(report, |outcome| *outcome == Outcome::InFlight);
    assert!(report.erased_bytes + in_flight <= most, "{} + {in_flight} > {most}", report.erased_bytes);
    all_zero(&service.zero(&memory, Intent::Teardown).unwrap());
    !were_stuck
}

/// No descriptor is left for the job's event: that is refused, and the job goes on.
#[test]
fn a_limit_on_files() {
    run_child("a_limit_on_files_child");
}

#[test]
#[ignore = "a part of a_limit_on_files"]
fn a_limit_on_files_child() {
    if !is_child() {
        return;
    }
    let service = service();
    let memory = anonymous(8 * MIB);
    fill(&*memory, 0, 8 * MIB);
    let mut refused = Vec::new();
    {
        let _limit = Limit::lower(libc::RLIMIT_NOFILE, 0);
        for intent in [Intent::Teardown, Intent::Boot] {
            let job = service.zero(&memory, intent).unwrap();
            assert_eq!(job.completion_fd().unwrap_err().raw_os_error(), Some(libc::EMFILE));
            all_zero(&job);
            refused.push(job);
        }
        let node = service.topology().default_memory_nodes()[0];
        let pool = HugepagePool::builder(&service).page_size(PageSize::Base).capacity(node, MIB).build();
        let error = pool.unwrap_err();
        assert!(matches!(error, PoolError::System { .. }), "{error}");
    }
    // It can be had later, and tells of an end that is past.
    assert!(refused.iter().all(|job| common::readable(job.completion_fd().unwrap(), 0)));
    fill(&*memory, 0, 8 * MIB);
    all_zero(&service.zero(&memory, Intent::Teardown).unwrap());
}
