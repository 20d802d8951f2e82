//! Calibration runs: what they yield, and what they leave alone. How fast anything is, is not tested. x86-64 only:
//! elsewhere there is nothing to choose from.
#![cfg(target_arch = "x86_64")]
#![allow(unsafe_code, clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::calibration::{SHORT, alone, assert_whole, calibrate, measures_something, size_and_threads};
use common::limits::never_hang;
use common::{
    MIB, PAGE, Tree, all_zero, allowed_cpus, assert_exact, cpus_of, fill, is_child, one_node, pin_to,
    run_child,
};
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vm_zeroing::{
    BuildError, Calibration, Concurrency, CpuDescription, Method, Reason, Reuse, Topology, ZeroingService,
};

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
