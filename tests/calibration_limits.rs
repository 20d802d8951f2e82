//! Calibration runs where threads, memory or hugepages are short, and which pages they measure on. x86-64 only:
//! elsewhere there is nothing to choose from.
#![cfg(target_arch = "x86_64")]
#![allow(unsafe_code, clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use common::calibration::{SHORT, alone, assert_whole, calibrate, measures_something, size_and_threads};
use common::cgroup::{self, Cgroup};
use common::events;
use common::hugepages::{HUGE, Hugepages, available};
use common::limits::{Limit, become_ordinary_user, never_hang};
use common::{MIB, PAGE, Tree, allowed_cpus, cpus_of, ends_well, is_child, list, run_child};
use tracing::Level;
use vm_zeroing::{Concurrency, Reason, Topology, ZeroingService};

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

/// Memory of another node would be measured too slow.
#[test]
fn hugepages_of_other_nodes_are_left_alone() {
    let _alone = alone();
    if Topology::detect().unwrap().nodes().len() > 1 {
        println!("skipped: this machine has several nodes");
        return;
    }
    let Some(_hugepages) = Hugepages::reserve(64) else { return };
    run_child("hugepages_of_other_nodes_are_left_alone_child");
}

#[test]
#[ignore = "a part of hugepages_of_other_nodes_are_left_alone"]
fn hugepages_of_other_nodes_are_left_alone_child() {
    if !is_child() {
        return;
    }
    // All hugepages are of node 0 here; the CPUs are said to be of node 1.
    let tree = Tree::new();
    tree.file("sys/devices/system/cpu/online", &list(&allowed_cpus()));
    for (id, cpus) in [(0, String::new()), (1, list(&allowed_cpus()))] {
        tree.file(&format!("sys/devices/system/node/node{id}/cpulist"), &cpus);
        tree.file(
            &format!("sys/devices/system/node/node{id}/meminfo"),
            &format!("Node {id} MemTotal: 1048576 kB"),
        );
    }
    // SAFETY: numbers only.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) }, 0);
    assert_eq!(measures_something(ZeroingService::builder).page_bytes(), HUGE);
    let elsewhere = || ZeroingService::builder().topology(Topology::read(&tree.0).unwrap());
    assert_eq!(measures_something(elsewhere).page_bytes(), PAGE);
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
