//! Calibration runs, and what every one of them has to be.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use vm_zeroing::{Calibration, Choice, Concurrency, CpuDescription, Reason, Reuse, ZeroingServiceBuilder};

use super::{PAGE, allowed_cpus};

/// Enough to measure something on a machine that has nothing else to do.
pub const SHORT: Duration = Duration::from_millis(40);

/// One at a time, those in children as well: they would measure each other, and take each other's hugepages.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn calibrate(builder: &ZeroingServiceBuilder) -> Calibration {
    calibrate_for(builder, SHORT)
}

pub fn calibrate_for(builder: &ZeroingServiceBuilder, budget: Duration) -> Calibration {
    let calibration = builder.calibrate(budget).unwrap();
    println!("{calibration}");
    assert_whole(&calibration);
    calibration
}

pub fn is_measured(choice: &Choice) -> bool {
    matches!(choice.reason, Reason::Fastest | Reason::AsFast)
}

/// Each situation has its choices, for ascending lengths without a gap, by methods that are there.
pub fn assert_whole(calibration: &Calibration) {
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
    let all: Vec<_> = Reuse::ALL
        .iter()
        .copied()
        .flat_map(|reuse| Concurrency::ALL.iter().map(move |all| (reuse, *all)))
        .collect();
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
pub fn size_and_threads() -> (u64, usize) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let number = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().next().unwrap().parse::<u64>().unwrap()
    };
    (number("VmSize:") * 1024, number("Threads:") as usize)
}

/// The shortest class takes microseconds, but other processes may want the CPUs, too: within 5 s.
pub fn measures_something(builder: impl Fn() -> ZeroingServiceBuilder) -> Calibration {
    (0..8)
        .map(|doubled| calibrate_for(&builder(), SHORT * (1 << doubled)))
        .find(|calibration| is_measured(&calibration.choices()[0]))
        .unwrap()
}
