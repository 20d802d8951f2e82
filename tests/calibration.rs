//! Calibration runs: what they yield, what they leave alone, and what becomes of them where threads, memory or time
//! are short. How fast anything is, is not tested. x86-64 only: elsewhere there is nothing to choose from.
#![cfg(target_arch = "x86_64")]
#![allow(unsafe_code, clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use common::cgroup::{self, Cgroup};
use common::events;
use common::hugepages::{HUGE, Hugepages, available};
use common::limits::{Limit, become_ordinary_user, never_hang};
use common::{
    MIB, PAGE, Tree, all_zero, allowed_cpus, assert_exact, cpus_of, ends_well, fill, is_child, one_node,
    pin_to, run_child,
};
use tracing::Level;
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vm_zeroing::{
    BuildError, Calibration, Choice, Concurrency, CpuDescription, Method, Reason, Reuse, Topology,
    ZeroingService, ZeroingServiceBuilder,
};

/// Enough to measure something on a machine that has nothing else to do.
const SHORT: Duration = Duration::from_millis(40);

/// One at a time, those in children as well: they would measure each other, and take each other's hugepages.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn calibrate(builder: &ZeroingServiceBuilder) -> Calibration {
    calibrate_for(builder, SHORT)
}

fn calibrate_for(builder: &ZeroingServiceBuilder, budget: Duration) -> Calibration {
    let calibration = builder.calibrate(budget).unwrap();
    println!("{calibration}");
    assert_whole(&calibration);
    calibration
}

fn is_measured(choice: &Choice) -> bool {
    matches!(choice.reason, Reason::Fastest | Reason::AsFast)
}

/// Each situation has its choices, for ascending lengths without a gap, by methods that are there.
fn assert_whole(calibration: &Calibration) {
    let cpu = calibration.cpu();
    let mut classes = BTreeMap::<_, Vec<u64>>::new();
    for choice in calibration.choices() {
        classes.entry((choice.reuse, choice.concurrency)).or_default().push(choice.size_class);
        assert_eq!(choice.from_bytes, choice.size_class / 2);
        assert!(cpu.supports(choice.method).is_ok(), "{} is not there", choice.method);
        for measured in &choice.measured {
            assert!(cpu.supports(measured.method).is_ok(), "{} was run", measured.method);
            assert!(CpuDescription::detect().supports(measured.method).is_ok());
            assert!(choice.reuse == Reuse::Cold || !measured.method.is_non_temporal());
            assert!(measured.readings > 0 && measured.gb_per_s.is_finite() && measured.gb_per_s > 0.0);
        }
        match is_measured(choice) {
            true => assert!(choice.gb_per_s.unwrap() > 0.0 && !choice.measured.is_empty()),
            false => assert_eq!(choice.method, cpu.choose(choice.size_class, choice.reuse)),
        }
    }
    let all: Vec<_> =
        Reuse::ALL.into_iter().flat_map(|reuse| Concurrency::ALL.map(|all| (reuse, all))).collect();
    assert_eq!(classes.keys().copied().collect::<Vec<_>>(), all);
    for classes in classes.values() {
        assert_eq!(classes[..8], [1, 4, 16, 64, 256, 1024, 4096, 16_384].map(|pages| pages * PAGE));
        assert!(classes.is_sorted_by(|a, b| a < b) && *classes.last().unwrap() <= 1 << 30);
    }
    assert!(calibration.scaling().iter().map(|scaling| scaling.workers).is_sorted_by(|a, b| a < b));
    assert!((1..=allowed_cpus().len().max(8)).contains(&calibration.workers()));
    assert!(calibration.workers_per_node() > 0 && calibration.page_bytes() >= PAGE);
}

/// Bytes of address space, and threads.
fn size_and_threads() -> (u64, usize) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let number = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().next().unwrap().parse::<u64>().unwrap()
    };
    (number("VmSize:") * 1024, number("Threads:") as usize)
}

/// The shortest class takes microseconds, but other processes may want the CPUs, too: within 5 s.
fn measures_something(builder: impl Fn() -> ZeroingServiceBuilder) -> Calibration {
    (0..8)
        .map(|doubled| calibrate_for(&builder(), SHORT * (1 << doubled)))
        .find(|calibration| is_measured(&calibration.choices()[0]))
        .unwrap()
}

#[test]
fn every_length_has_a_choice() {
    let _alone = alone();
    let calibration = measures_something(ZeroingService::builder);
    assert_eq!(calibration.cpu(), &CpuDescription::detect());
    let first = &calibration.choices()[0];
    assert_eq!((first.reuse, first.concurrency, first.size_class), (Reuse::Cold, Concurrency::One, PAGE));
    let mut read: Vec<Method> = first.measured.iter().map(|measured| measured.method).collect();
    read.sort();
    assert_eq!(read, CpuDescription::detect().methods(), "each method that is there is tried");
    assert!(calibration.spent() > Duration::ZERO);
    assert!(calibration.choice(PAGE / 2 - 1, Reuse::Cold, Concurrency::One).is_none());
    assert_eq!(calibration.choice(PAGE / 2, Reuse::Cold, Concurrency::One), Some(first));
}

#[test]
fn a_service_clears_by_it() {
    let _alone = alone();
    let calibration = calibrate(&ZeroingService::builder());
    let service = ZeroingService::builder().calibration(calibration.clone()).build().unwrap();
    for len in [4 * MIB, MIB, 64 << 10] {
        let wanted = calibration.choice(len, Reuse::Cold, Concurrency::All).unwrap();
        assert_eq!(service.method_for(len), wanted.method);
    }
    let memory = Arc::new(GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 9 << 20)]).unwrap());
    fill(&*memory, 0, 9 * MIB);
    let job = service.zero(&memory, vm_zeroing::Intent::Teardown).unwrap();
    assert_exact(&*memory, &all_zero(&job), &[(0, 9 * MIB)]);
}

/// R13, R14: what the builder's description takes away is not run, and what it boasts of neither.
#[test]
fn only_what_the_description_and_the_cpu_have_is_run() {
    let _alone = alone();
    let bare = measures_something(|| ZeroingService::builder().cpu(CpuDescription::bare()));
    assert_eq!(bare.choices()[0].measured.len(), CpuDescription::bare().methods().len());
    let mut boastful = CpuDescription::detect();
    (boastful.avx2, boastful.avx512f, boastful.clzero, boastful.movdir64b) = (true, true, true, true);
    (boastful.osxsave, boastful.xcr0) = (true, !0);
    let boast = ZeroingService::builder().cpu(boastful).calibrate(SHORT).unwrap();
    let here = CpuDescription::detect();
    for measured in boast.choices().iter().flat_map(|choice| &choice.measured) {
        assert!(here.supports(measured.method).is_ok(), "{} was run", measured.method);
    }
}

/// R12: a cache that is shown as the host's, as nothing, or not at all.
#[test]
fn caches_that_are_not_as_shown() {
    let _alone = alone();
    for (llc_bytes, classes) in [(None, 8), (Some(0), 8), (Some(300 << 20), 9), (Some(u64::MAX), 9)] {
        let mut cpu = CpuDescription::detect();
        cpu.llc_bytes = llc_bytes;
        assert_eq!(calibrate(&ZeroingService::builder().cpu(cpu)).choices().len(), 4 * classes);
    }
}

#[test]
fn no_time_is_the_rule() {
    let _alone = alone();
    for budget in [Duration::ZERO, Duration::from_nanos(1), Duration::from_micros(400)] {
        let calibration = ZeroingService::builder().calibrate(budget).unwrap();
        assert_whole(&calibration);
        assert!(calibration.choices().iter().all(|choice| choice.reason == Reason::TooLittleTime));
        assert_eq!(calibration.workers_per_node(), 8, "as without a calibration");
        assert!(calibration.scaling().is_empty());
    }
    let of_three = ZeroingService::builder().workers_per_node(3).calibrate(Duration::ZERO).unwrap();
    assert_eq!(of_three.workers_per_node(), 3);
    // No workers: the thread that submits.
    let of_none = ZeroingService::builder().workers_per_node(0).calibrate(Duration::ZERO).unwrap();
    assert_eq!((of_none.workers(), of_none.workers_per_node()), (1, 1));
}

/// One worker: all are one, and nothing is said twice.
#[test]
fn of_one_worker() {
    let _alone = alone();
    let tree = Tree::new();
    tree.file("sys/devices/system/cpu/online", &allowed_cpus()[0].to_string());
    let one_cpu = || ZeroingService::builder().topology(Topology::read(&tree.0).unwrap());
    let one_worker = || ZeroingService::builder().workers_per_node(1);
    for calibration in [measures_something(one_cpu), measures_something(one_worker)] {
        assert_eq!(calibration.workers(), 1);
        for choice in calibration.choices() {
            let one = calibration.choice(choice.size_class, choice.reuse, Concurrency::One).unwrap();
            assert_eq!(
                (choice.method, choice.reason, &choice.measured),
                (one.method, one.reason, &one.measured)
            );
        }
        assert!(!calibration.to_string().contains("1 workers"));
        assert_eq!(calibration.to_string().matches("cold memory").count(), 1);
    }
    assert_eq!(ZeroingService::builder().calibrate(SHORT).unwrap().workers(), allowed_cpus().len().min(8));
}

#[test]
fn a_topology_that_cannot_be_read_is_an_error() {
    let _alone = alone();
    let tree = Tree::new();
    assert!(matches!(Topology::read(&tree.0), Err(vm_zeroing::TopologyError::NoCpu { .. })));
    tree.file("sys/devices/system/cpu/online", &(allowed_cpus().iter().max().unwrap() + 1).to_string());
    // CPUs that are not there cannot be pinned to: it runs where it may.
    let calibration = calibrate(&ZeroingService::builder().topology(Topology::read(&tree.0).unwrap()));
    assert_eq!(calibration.workers(), 1);
}

#[test]
fn nothing_stays_behind() {
    let _alone = alone();
    run_child("nothing_stays_behind_child");
}

/// R32: not the affinity of the caller either, nor is the process narrowed by it.
#[test]
#[ignore = "a part of nothing_stays_behind"]
fn nothing_stays_behind_child() {
    if !is_child() {
        return;
    }
    never_hang();
    let run = || {
        pin_to(allowed_cpus()[0]);
        // What the allocator takes for itself, it takes at the first time.
        let _ = calibrate(&ZeroingService::builder());
        let (before, own) = (size_and_threads(), cpus_of("/proc/thread-self/status"));
        let calibration = calibrate(&ZeroingService::builder().topology(one_node()));
        assert_eq!(calibration.workers(), allowed_cpus().len().min(8));
        let after = size_and_threads();
        assert_eq!(after.1, before.1, "threads");
        assert!(after.0 < before.0 + MIB, "{before:?} {after:?}");
        assert_eq!(cpus_of("/proc/thread-self/status"), own);
        assert_eq!(own, [allowed_cpus()[0]]);
    };
    // Not the main thread, which would look like an operator's taskset.
    std::thread::spawn(run).join().unwrap();
}

#[test]
fn hugepages_are_used_and_given_back() {
    let _alone = alone();
    let Some(_hugepages) = Hugepages::reserve(64) else { return };
    let before = available();
    let calibration = calibrate(&ZeroingService::builder());
    assert_eq!((calibration.page_bytes(), available()), (HUGE, before));
    // All but two are somebody's, who has not touched them yet.
    let len = (before - 2) * HUGE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB;
    // SAFETY: a new mapping at an address of the kernel's choosing.
    let reserved = unsafe {
        libc::mmap(std::ptr::null_mut(), len as usize, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
    };
    assert_ne!(reserved, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
    assert_eq!(available(), 2);
    calibrate(&ZeroingService::builder());
    assert_eq!(available(), 2);
    // SAFETY: our own mapping; without its pages this would be a signal.
    unsafe {
        std::ptr::write_bytes(reserved.cast::<u8>(), 1, len as usize);
        libc::munmap(reserved, len as usize);
    }
    assert_eq!(available(), before);
}

#[test]
fn the_size_of_pages_is_found_out() {
    let _alone = alone();
    // Nobody's hugepages come into it.
    let Some(hugepages) = Hugepages::reserve(0) else { return };
    if available() > 0 {
        println!("skipped: the host has hugepages to spare");
        return;
    }
    run_child("the_size_of_pages_is_found_out_child");
    drop(hugepages);
}

#[test]
#[ignore = "a part of the_size_of_pages_is_found_out"]
fn the_size_of_pages_is_found_out_child() {
    if !is_child() {
        return;
    }
    let modes = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    if modes.contains("[always]") || modes.contains("[madvise]") {
        let found = (0..20).any(|_| calibrate(&ZeroingService::builder()).page_bytes() == HUGE);
        assert!(found, "one of 20 runs gets transparent hugepages");
    } else {
        println!("no transparent hugepages here: {modes}");
    }
    // SAFETY: numbers only.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) }, 0);
    assert_eq!(measures_something(ZeroingService::builder).page_bytes(), PAGE);
}

/// R19: on the calling thread, or with fewer, and said so.
#[test]
fn few_threads() {
    let _alone = alone();
    run_child("few_threads_child");
}

#[test]
#[ignore = "a part of few_threads"]
fn few_threads_child() {
    if !is_child() {
        return;
    }
    never_hang();
    events::collect();
    let Some(()) = become_ordinary_user() else { return };
    let tree = Tree::new();
    tree.file("sys/devices/system/cpu/online", "0-7");
    let eight = || ZeroingService::builder().topology(Topology::read(&tree.0).unwrap());
    let own = cpus_of("/proc/thread-self/status");
    let threads = size_and_threads().1 as u64;
    for free in [0, 1, 3] {
        let limit = Limit::lower(libc::RLIMIT_NPROC, threads + free);
        let calibration = measures_something(eight);
        drop(limit);
        let of_all = || calibration.choices().iter().filter(|choice| choice.concurrency == Concurrency::All);
        if free < 2 {
            assert!(
                of_all().all(|choice| choice.reason == Reason::TooFewThreads && choice.measured.is_empty())
            );
            assert_eq!((calibration.workers(), calibration.workers_per_node()), (8, 8), "as asked");
        } else {
            assert!(of_all().all(|choice| choice.reason != Reason::TooFewThreads));
            assert_eq!(calibration.workers(), 3);
        }
        assert_eq!(size_and_threads().1 as u64, threads);
    }
    assert_eq!(cpus_of("/proc/thread-self/status"), own);
    let warnings = events::at(Level::WARN);
    assert!(warnings.iter().any(|said| said.contains("starts no thread to measure with")), "{warnings:#?}");
    assert!(
        warnings.iter().any(|said| said.contains("asked=8") && said.contains("started=3")),
        "{warnings:#?}"
    );
}

/// R20: no more than a part of what is free in the cgroup; the OOM killer has no reason to come.
#[test]
fn little_memory() {
    let _alone = alone();
    let Some(cgroup) = Cgroup::new("memory") else { return };
    let Some(()) = cgroup.set("memory.limit_in_bytes", "memory.max", 48 * MIB) else { return };
    ends_well(&mut cgroup.child("little_memory_child"));
    let Some(()) = cgroup.set("memory.limit_in_bytes", "memory.max", 12 * MIB) else { return };
    ends_well(&mut cgroup.child("hardly_any_memory_child"));
}

#[test]
#[ignore = "a part of little_memory"]
fn little_memory_child() {
    if !is_child() {
        return;
    }
    cgroup::enter();
    let calibration = ZeroingService::builder().workers_per_node(1).calibrate(SHORT).unwrap();
    println!("{calibration}");
    assert_whole(&calibration);
    for choice in calibration.choices() {
        // An eighth of 48 MiB is less than two steps of 4 MiB; 4 KiB classes take less than that.
        let short = choice.reason == Reason::TooLittleMemory;
        assert_eq!(short, choice.size_class > 4 * MIB, "{choice:?}");
    }
}

#[test]
#[ignore = "a part of little_memory"]
fn hardly_any_memory_child() {
    if !is_child() {
        return;
    }
    cgroup::enter();
    let calibration = ZeroingService::builder().calibrate(SHORT).unwrap();
    assert_whole(&calibration);
    assert!(
        calibration.choices().iter().all(|choice| choice.reason == Reason::TooLittleMemory),
        "{calibration}"
    );
}

/// The error is the builder's, not the run's.
#[test]
fn of_another_model() {
    let _alone = alone();
    let mut elsewhere = CpuDescription::detect();
    elsewhere.family += 1;
    let calibration = ZeroingService::builder().cpu(elsewhere).calibrate(Duration::ZERO).unwrap();
    let refused = ZeroingService::builder().calibration(calibration.clone()).build().unwrap_err();
    assert!(matches!(refused, BuildError::Calibration(_)), "{refused}");
    assert!(ZeroingService::builder().calibration_of_another_cpu(calibration).build().is_ok());
}

#[cfg(feature = "serde")]
#[test]
fn is_saved_and_read_back() {
    let _alone = alone();
    let calibration = calibrate(&ZeroingService::builder());
    let saved = serde_json::to_string_pretty(&calibration).unwrap();
    let read: Calibration = serde_json::from_str(&saved).unwrap();
    assert_eq!(read, calibration);
    assert_eq!(read.to_string(), calibration.to_string());
    assert!(ZeroingService::builder().calibration(read).build().is_ok());
    let poisoned = saved.replacen("\"from_bytes\": 2048", "\"from_bytes\": 20480", 1);
    let refused = serde_json::from_str::<Calibration>(&poisoned).unwrap_err().to_string();
    assert!(refused.contains("this is no calibration") && refused.contains("save one again"), "{refused}");
}
