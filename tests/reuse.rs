//! How a service chooses the method: by when the zeroes will be read, how many workers clear, and what a
//! calibration says of both; what the caller forces goes before. The report tells what was taken. x86-64 only:
//! elsewhere there is one method.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{KIB, MIB, PAGE, all_zero, allowed_cpus, assert_exact, fill, is_zero, one_node};
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vm_zeroing::{
    BuildError, Calibration, CalibrationError, Clearer, Concurrency, CpuDescription, Intent, Method, Reuse,
    ZeroRequest, ZeroingService, ZeroingServiceBuilder,
};

/// The run that one worker clears at once, and the largest job that one worker does alone.
const CHUNK: u64 = 4 * MIB;

/// Jobs below the rule's threshold and above it, of one chunk and of many.
const LENGTHS: [u64; 5] = [PAGE, 48 * KIB, MIB, CHUNK, 6 * CHUNK];

/// A builder for one node, so that the number of workers is known.
fn builder() -> ZeroingServiceBuilder {
    ZeroingService::builder().topology(one_node())
}

/// A calibration that had no time to measure, so that all of it is the rule.
fn by_rule() -> Calibration {
    ZeroingService::builder().calibrate(Duration::ZERO).unwrap()
}

fn service_by(calibration: Calibration) -> ZeroingService {
    builder().calibration(calibration).build().unwrap()
}

/// Zeroes memory that holds another guest's bytes; the method that the report names.
fn method_of(service: &ZeroingService, len: u64, ask: impl FnOnce(ZeroRequest) -> ZeroRequest) -> Method {
    let memory = Arc::new(GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), len as usize)]).unwrap());
    fill(&*memory, 0, len);
    let report = all_zero(&service.submit(ask(ZeroRequest::new(&memory))).unwrap());
    assert_exact(&*memory, &report, &[(0, len)]);
    assert!(is_zero(&*memory, 0, len));
    assert_eq!(report.erased_bytes, len);
    report.method.unwrap()
}

fn method_for(service: &ZeroingService, len: u64, reuse: Reuse) -> Method {
    method_of(service, len, |request| request.reuse(reuse))
}

/// Two methods of this CPU that the rule does not take for any of the jobs here: for cold memory and for
/// memory read soon.
fn two_others() -> (Method, Method) {
    let here = CpuDescription::detect();
    let ruled = |method: &Method| {
        LENGTHS.iter().any(|len| Reuse::ALL.iter().any(|reuse| here.choose(*len, *reuse) == *method))
    };
    let others: Vec<Method> = here.methods().into_iter().filter(|method| !ruled(method)).collect();
    (others[0], others[1])
}

#[test]
fn read_soon_is_cleared_through_the_caches() {
    let (service, rule) = (builder().build().unwrap(), Clearer::auto());
    for len in LENGTHS {
        for intent in [Intent::Teardown, Intent::Background, Intent::Boot] {
            let method = method_of(&service, len, |request| request.intent(intent).reuse(Reuse::Soon));
            assert!(!method.is_non_temporal(), "{len} bytes by {method}");
            assert_eq!(method, rule.method_for(len, Reuse::Soon, Concurrency::One));
        }
    }
}

/// The bytes of a job of many chunks are cleared chunk by chunk.
#[test]
fn cold_is_what_is_not_said() {
    let (service, rule) = (builder().build().unwrap(), Clearer::auto());
    for len in LENGTHS {
        let wanted = rule.method_for(len.min(CHUNK), Reuse::Cold, Concurrency::One);
        assert_eq!(method_of(&service, len, |request| request), wanted, "{len} bytes");
        assert_eq!(method_for(&service, len, Reuse::Cold), wanted, "{len} bytes");
        assert_eq!(service.method_for(len.min(CHUNK)), wanted);
    }
}

/// One calibration, two hints: each job is cleared by the method chosen for its own.
#[test]
fn a_calibration_decides_for_each_reuse() {
    let (cold, soon) = two_others();
    let both = by_rule().with_method(Reuse::Cold, .., cold).with_method(Reuse::Soon, .., soon);
    let service = service_by(both);
    for len in LENGTHS {
        assert_eq!(method_for(&service, len, Reuse::Cold), cold, "{len} bytes");
        assert_eq!(method_for(&service, len, Reuse::Soon), soon, "{len} bytes");
        assert_eq!(service.method_for(len), cold);
    }
}

#[test]
fn a_calibration_decides_for_each_length() {
    let (short, long) = two_others();
    let by_length =
        by_rule().with_method(Reuse::Cold, ..=64 * KIB, short).with_method(Reuse::Cold, 256 * KIB.., long);
    let service = service_by(by_length);
    for len in LENGTHS {
        let wanted = if len < 128 * KIB { short } else { long };
        assert_eq!(method_of(&service, len, |request| request), wanted, "{len} bytes");
        // Nothing was said of the other hint.
        let ruled = Clearer::auto().method_for(len.min(CHUNK), Reuse::Soon, Concurrency::One);
        assert_eq!(method_for(&service, len, Reuse::Soon), ruled, "{len} bytes");
    }
}

#[test]
fn a_forced_method_goes_before_a_calibration() {
    let (overridden, forced) = two_others();
    let calibration =
        Reuse::ALL.iter().copied().fold(by_rule(), |all, reuse| all.with_method(reuse, .., overridden));
    // In either order.
    let services = [
        builder().calibration(calibration.clone()).method(forced),
        builder().method(forced).calibration(calibration),
    ];
    for service in services.map(|builder| builder.build().unwrap()) {
        for (len, reuse) in [(PAGE, Reuse::Cold), (PAGE, Reuse::Soon), (6 * CHUNK, Reuse::Soon)] {
            assert_eq!(method_for(&service, len, reuse), forced);
        }
    }
}

#[test]
fn a_calibration_says_how_many_workers() {
    let cpus = allowed_cpus().len();
    if cpus < 2 {
        return println!("skipped: with one CPU there is one worker, whatever is said");
    }
    assert_eq!(builder().build().unwrap().workers(), cpus.min(8));
    for enough in [1, 2] {
        let calibration = by_rule().with_workers_per_node(enough);
        assert_eq!(calibration.workers_per_node(), enough);
        assert_eq!(service_by(calibration.clone()).workers(), enough);
        let foreign = builder().calibration_of_another_cpu(calibration.clone());
        assert_eq!(foreign.build().unwrap().workers(), enough);
        // The caller's word goes before, in either order.
        let other = 3 - enough;
        let services = [
            builder().calibration(calibration.clone()).workers_per_node(other),
            builder().workers_per_node(other).calibration(calibration),
        ];
        for builder in services {
            assert_eq!(builder.build().unwrap().workers(), other);
        }
    }
    let none = builder().calibration(by_rule()).workers_per_node(0).build().unwrap();
    assert_eq!(none.workers(), 0, "the caller's thread does it all");
    // Nobody works with none; and not more than there are CPUs.
    assert_eq!(service_by(by_rule().with_workers_per_node(0)).workers(), 1);
    assert_eq!(service_by(by_rule().with_workers_per_node(1000)).workers(), cpus);
}

#[test]
fn a_calibration_of_another_cpu_only_when_forced() {
    let mut other = CpuDescription::detect();
    other.model += 1;
    let (cold, _) = two_others();
    let foreign = ZeroingService::builder().cpu(other).calibrate(Duration::ZERO).unwrap();
    let foreign = foreign.with_method(Reuse::Cold, .., cold);
    let refused = builder().calibration(foreign.clone()).build().unwrap_err();
    assert!(matches!(refused, BuildError::Calibration(CalibrationError::OtherCpu { .. })), "{refused}");
    assert!(refused.to_string().contains("calibration_of_another_cpu"), "{refused}");
    let service = builder().calibration_of_another_cpu(foreign).build().unwrap();
    assert_eq!(method_of(&service, 6 * CHUNK, |request| request), cold);
}

/// Chosen there, not to be had here: refused of this model, by rule of another.
#[test]
fn a_calibration_with_a_method_that_is_not_here() {
    let here = CpuDescription::detect().methods();
    let Some(absent) = Method::ALL.into_iter().find(|method| !here.contains(method)) else {
        return println!("skipped: this CPU has every method");
    };
    let calibration = by_rule().with_method(Reuse::Cold, .., absent);
    let refused = builder().calibration(calibration.clone()).build().unwrap_err();
    assert!(matches!(refused, BuildError::Calibration(CalibrationError::Method(_))), "{refused}");
    assert!(refused.to_string().contains(absent.name()), "{refused}");
    let service = builder().calibration_of_another_cpu(calibration).build().unwrap();
    let ruled = Clearer::calibrated(&by_rule()).unwrap();
    for len in LENGTHS {
        let wanted = ruled.method_for(len.min(CHUNK), Reuse::Cold, Concurrency::One);
        assert_eq!(method_of(&service, len, |request| request), wanted, "{len} bytes");
    }
}

/// Several workers share the memory's bandwidth, so that another method may be best: jobs of many chunks are
/// cleared by the one for all workers, jobs of one chunk, and all jobs of a service with one worker, by
/// the one for a single worker. A calibration that tells them apart has to be measured, or read.
#[cfg(feature = "serde")]
#[test]
fn a_calibration_decides_for_one_worker_and_for_all() {
    let (one, all) = two_others();
    let mut saved = serde_json::to_value(by_rule()).unwrap();
    for choice in saved["choices"].as_array_mut().unwrap() {
        let method = if choice["concurrency"] == "all" { all } else { one };
        choice["method"] = method.name().into();
        choice["reason"] = "overridden".into();
    }
    let calibration: Calibration = serde_json::from_value(saved).unwrap();
    let alone = builder().calibration(calibration.clone()).workers_per_node(1).build().unwrap();
    for len in LENGTHS {
        for &reuse in Reuse::ALL {
            assert_eq!(method_for(&alone, len, reuse), one, "{len} bytes, one worker");
        }
    }
    if allowed_cpus().len() < 2 {
        return println!("skipped: no second worker with one CPU");
    }
    let service = builder().calibration(calibration).workers_per_node(2).build().unwrap();
    assert_eq!(service.method_for(CHUNK), all);
    for len in LENGTHS {
        let wanted = if len > CHUNK { all } else { one };
        for &reuse in Reuse::ALL {
            assert_eq!(method_for(&service, len, reuse), wanted, "{len} bytes, two workers");
        }
    }
}
