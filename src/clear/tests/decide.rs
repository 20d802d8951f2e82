//! From made-up readings to choices, and from choices to methods: no clock.

use std::time::Duration;

use proptest::prelude::*;

use super::boastful;
use crate::clear::decide::{Measurement, Readings, Shortfall, upper_quartile};
use crate::clear::plan::Plan;
use crate::clear::{
    Calibration, Choice, Concurrency, CpuDescription, Method, Reason, Reuse, Situation, Vendor,
};

const KIB: u64 = 1 << 10;
const COLD: Situation = Situation { reuse: Reuse::Cold, concurrency: Concurrency::One };
const COLD_ALL: Situation = Situation { reuse: Reuse::Cold, concurrency: Concurrency::All };
const SOON: Situation = Situation { reuse: Reuse::Soon, concurrency: Concurrency::One };

/// A measurement of two workers on a CPU that has everything, without a reading.
pub(super) fn nothing() -> Measurement {
    let cpu = boastful();
    Measurement {
        classes: Measurement::classes(&cpu),
        cpu,
        page_bytes: 2 << 20,
        workers: 2,
        asked: 8,
        budget: Duration::from_millis(50),
        spent: Duration::from_millis(49),
        readings: Vec::new(),
        scaling: Vec::new(),
        shortfalls: Vec::new(),
    }
}

/// Readings of one class: a speed for each method, read three times.
fn read(situation: Situation, size_class: u64, rates: &[(Method, f64)]) -> Vec<Readings> {
    let readings = rates.iter().map(|&(method, rate)| Readings {
        situation,
        size_class,
        method,
        gb_per_s: vec![rate; 3],
    });
    readings.collect()
}

/// The choice for 64 KiB of cold memory and one worker.
fn chosen(rates: &[(Method, f64)]) -> Choice {
    decided(read(COLD, 64 * KIB, rates)).choice(64 * KIB, Reuse::Cold, Concurrency::One).unwrap().clone()
}

fn decided(readings: Vec<Readings>) -> Calibration {
    Measurement { readings, ..nothing() }.decide()
}

/// Whatever the rule of this maker's CPUs says: here, that would be CLZERO.
#[test]
fn the_fastest_is_chosen() {
    // A CPU where non-temporal stores lose.
    let choice = chosen(&[(Method::RepStosb, 12.0), (Method::Clzero, 8.0), (Method::Avx2, 7.9)]);
    assert_eq!(
        (choice.method, choice.reason, choice.gb_per_s),
        (Method::RepStosb, Reason::Fastest, Some(12.0))
    );
    let ranked: Vec<_> = choice.measured.iter().map(|measured| measured.method).collect();
    assert_eq!(ranked, [Method::RepStosb, Method::Clzero, Method::Avx2], "the fastest first");
    assert!(choice.measured.iter().all(|measured| measured.readings == 3));
    // One where a method that the rule never takes wins, and one where REP STOSQ does.
    for best in [Method::Movdir64b, Method::RepStosq, Method::Portable] {
        let choice = chosen(&[(Method::Clzero, 20.0), (best, 21.0), (Method::RepStosb, 10.0)]);
        assert_eq!((choice.method, choice.reason), (best, Reason::Fastest));
    }
}

#[test]
fn of_equally_fast_ones_the_gentlest() {
    for (fastest, gentler) in [
        (Method::Movdir64b, Method::Avx2),
        (Method::Avx512, Method::Avx2),
        (Method::RepStosb, Method::Movnti),
        (Method::RepStosq, Method::RepStosb),
        (Method::Portable, Method::Movdir64b),
    ] {
        let choice = chosen(&[(fastest, 100.0), (gentler, 98.1)]);
        assert_eq!((choice.method, choice.reason, choice.gb_per_s), (gentler, Reason::AsFast, Some(98.1)));
        let choice = chosen(&[(fastest, 100.0), (gentler, 97.9)]);
        assert_eq!((choice.method, choice.reason, choice.gb_per_s), (fastest, Reason::Fastest, Some(100.0)));
        let choice = chosen(&[(fastest, 98.1), (gentler, 100.0)]);
        assert_eq!((choice.method, choice.reason), (gentler, Reason::Fastest));
        let tie = chosen(&[(fastest, 50.0), (gentler, 50.0)]);
        assert_eq!(tie.method, gentler);
    }
}

#[test]
fn readings_that_are_none_do_not_count() {
    let mut readings = read(COLD, 64 * KIB, &[(Method::Sse2, 30.0), (Method::RepStosb, 20.0)]);
    let nonsense = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -5.0];
    readings[0].gb_per_s.extend(nonsense);
    for method in [Method::Avx2, Method::Avx512] {
        readings.push(Readings {
            situation: COLD,
            size_class: 64 * KIB,
            method,
            gb_per_s: nonsense.to_vec(),
        });
    }
    let choice = decided(readings).choice(64 * KIB, Reuse::Cold, Concurrency::One).unwrap().clone();
    assert_eq!((choice.method, choice.gb_per_s), (Method::Sse2, Some(30.0)));
    assert_eq!(choice.measured.len(), 2);
}

/// Something else ran while one method was read, again and again.
#[test]
fn disturbed_readings_do_not_decide() {
    let mut readings = read(COLD, 64 * KIB, &[(Method::Sse2, 30.0), (Method::RepStosb, 20.0)]);
    readings[0].gb_per_s = vec![7.0, 30.0, 3.0];
    assert_eq!(decided(readings.clone()).choices()[2].method, Method::Sse2);
    // Nor does a single lucky one among many.
    readings[1].gb_per_s = vec![20.0, 20.0, 90.0, 20.0, 20.0];
    assert_eq!(decided(readings).choices()[2].method, Method::Sse2);
}

#[test]
fn one_reading_is_no_measurement() {
    let mut readings = read(COLD, 64 * KIB, &[(Method::RepStosb, 90.0), (Method::Clzero, 20.0)]);
    readings.iter_mut().for_each(|readings| readings.gb_per_s.truncate(1));
    let choice = decided(readings).choice(64 * KIB, Reuse::Cold, Concurrency::One).unwrap().clone();
    assert_eq!((choice.method, choice.reason), (Method::Clzero, Reason::TooLittleTime));
    assert_eq!((choice.gb_per_s, choice.measured.len()), (Some(20.0), 2), "what was read is told");
}

/// The rule, and why.
#[test]
fn nothing_was_measured() {
    let with = |shortfalls| Measurement { shortfalls, ..nothing() }.decide();
    let everywhere = |why| {
        let classes = nothing().classes;
        let each = move |situation| classes.clone().into_iter().map(move |class| (situation, class, why));
        Situation::ALL.into_iter().flat_map(each).collect::<Vec<_>>()
    };
    for (shortfalls, reason) in [
        (vec![], Reason::TooLittleTime),
        (everywhere(Shortfall::Time), Reason::TooLittleTime),
        (everywhere(Shortfall::Memory), Reason::TooLittleMemory),
        (everywhere(Shortfall::Threads), Reason::TooFewThreads),
    ] {
        let calibration = with(shortfalls);
        assert_eq!(calibration.choices().len(), 4 * nothing().classes.len());
        for choice in calibration.choices() {
            assert_eq!(choice.method, boastful().choose(choice.size_class, choice.reuse));
            assert_eq!((choice.reason, choice.gb_per_s, choice.measured.len()), (reason, None, 0));
        }
        assert_eq!((calibration.workers_per_node(), calibration.workers()), (8, 2));
        // The rule itself, for every length.
        let plan = Plan::calibrated(&calibration, &boastful(), |_| true);
        for situation in Situation::ALL {
            for len in [0, 1, 4095, 4096, 65_535, 65_536, 1 << 40, u64::MAX] {
                assert_eq!(plan.method_for(len, situation), boastful().choose(len, situation.reuse), "{len}");
            }
        }
    }
    // Only where it fell short.
    let some = with(vec![(COLD_ALL, 64 * KIB, Shortfall::Memory)]);
    let reasons: Vec<_> =
        some.choices().iter().filter(|choice| choice.reason == Reason::TooLittleMemory).collect();
    assert_eq!(reasons.len(), 1);
    assert_eq!((reasons[0].situation(), reasons[0].size_class), (COLD_ALL, 64 * KIB));
}

/// Zeroes that are read soon are to stay in the caches.
#[test]
fn soon_is_never_non_temporal() {
    let rates =
        [(Method::Clzero, 300.0), (Method::Avx2, 200.0), (Method::RepStosq, 20.0), (Method::Portable, 10.0)];
    let calibration = decided(read(SOON, 4 * KIB, &rates));
    let choice = calibration.choice(4 * KIB, Reuse::Soon, Concurrency::One).unwrap();
    assert_eq!((choice.method, choice.measured.len()), (Method::RepStosq, 2));
    assert!(Measurement::candidates(Reuse::Soon).all(|method| !method.is_non_temporal()));
    assert_eq!(Measurement::candidates(Reuse::Cold).count(), Method::ALL.len());
}

#[test]
fn all_of_one_worker_are_one() {
    let readings = read(COLD, 64 * KIB, &[(Method::Movnti, 9.0), (Method::RepStosb, 5.0)]);
    let alone = Measurement { workers: 1, readings: readings.clone(), ..nothing() }.decide();
    for &concurrency in Concurrency::ALL {
        let choice = alone.choice(64 * KIB, Reuse::Cold, concurrency).unwrap();
        assert_eq!(
            (choice.method, choice.reason, choice.gb_per_s),
            (Method::Movnti, Reason::Fastest, Some(9.0))
        );
    }
    let two = decided(readings);
    assert_eq!(two.choice(64 * KIB, Reuse::Cold, Concurrency::All).unwrap().reason, Reason::TooLittleTime);
}

#[test]
fn workers_that_are_enough() {
    let enough = |rates: &[(usize, f64)]| {
        let scaling =
            rates.iter().map(|&(workers, rate)| (workers, vec![rate, 0.1, rate, f64::NAN])).collect();
        Measurement { scaling, workers: 8, asked: 12, ..nothing() }.decide().workers_per_node()
    };
    assert_eq!(enough(&[(1, 20.0), (2, 39.0), (4, 60.0), (8, 61.0)]), 4);
    assert_eq!(
        enough(&[(1, 20.0), (2, 39.0), (4, 60.0), (8, 62.0)]),
        12,
        "3.2 % are a gain, and more may be to come"
    );
    assert_eq!(enough(&[(1, 60.0), (2, 61.0), (4, 55.0), (8, 50.0)]), 1);
    assert_eq!(enough(&[(1, 30.0), (2, 61.0), (4, 55.0), (8, 50.0)]), 2, "more are worse");
    assert_eq!(enough(&[(1, 30.0)]), 12, "nothing to compare with");
    assert_eq!(enough(&[]), 12);
    assert_eq!(Measurement { asked: 0, ..nothing() }.decide().workers_per_node(), 1);
}

/// R12: what is said of the cache never makes classes absurd.
#[test]
fn classes_reach_beyond_the_cache() {
    let last = |llc_bytes| {
        let classes = Measurement::classes(&CpuDescription { llc_bytes, ..boastful() });
        assert_eq!(classes[..8], [1, 4, 16, 64, 256, 1024, 4096, 16_384].map(|pages| pages * 4 * KIB));
        assert!(classes.is_sorted_by(|a, b| a < b) && classes.len() <= 9, "{classes:?}");
        *classes.last().unwrap()
    };
    for small in [None, Some(0), Some(1), Some(32 << 20)] {
        assert_eq!(last(small), 64 << 20);
    }
    assert_eq!(last(Some((32 << 20) + 1)), 128 << 20);
    assert_eq!(last(Some(300 << 20)), 1 << 30);
    assert_eq!(last(Some(u64::MAX)), 1 << 30);
}

/// A run takes the class that it is nearest to: from half of a class on.
#[test]
fn lengths_at_the_borders_of_classes() {
    let mut readings = read(COLD, 4 * KIB, &[(Method::RepStosq, 5.0)]);
    readings.extend(read(COLD, 16 * KIB, &[(Method::Movnti, 5.0)]));
    readings.extend(read(COLD, 64 * KIB, &[(Method::Movdir64b, 5.0)]));
    readings.extend(read(COLD_ALL, 64 * KIB, &[(Method::Avx512, 5.0)]));
    let calibration = decided(readings);
    let plan = Plan::calibrated(&calibration, &boastful(), |_| true);
    for (len, method) in [
        (0, Method::RepStosb),
        (2 * KIB - 1, Method::RepStosb),
        (2 * KIB, Method::RepStosq),
        (8 * KIB - 1, Method::RepStosq),
        (8 * KIB, Method::Movnti),
        (32 * KIB - 1, Method::Movnti),
        (32 * KIB, Method::Movdir64b),
        (128 * KIB - 1, Method::Movdir64b),
        (128 * KIB, Method::Clzero),
        (u64::MAX, Method::Clzero),
    ] {
        assert_eq!(plan.method_for(len, COLD), method, "{len}");
        let choice = calibration.choice(len, Reuse::Cold, Concurrency::One);
        assert_eq!(choice.map(|choice| choice.method), (len >= 2 * KIB).then_some(method), "{len}");
    }
    // The other situations have nothing to do with it.
    assert_eq!(plan.method_for(64 * KIB, COLD_ALL), Method::Avx512);
    assert_eq!(plan.method_for(64 * KIB, SOON), Method::RepStosb);
    // A method that is not here is the rule's business.
    let without = Plan::calibrated(&calibration, &boastful(), |method| method != Method::Movdir64b);
    assert_eq!(without.method_for(64 * KIB, COLD), Method::Clzero);
    assert_eq!(without.method_for(16 * KIB, COLD), Method::Movnti);
}

#[test]
fn the_callers_word_goes_before() {
    let calibration = decided(read(COLD, 64 * KIB, &[(Method::Clzero, 5.0), (Method::Sse2, 4.0)]));
    let own = calibration
        .clone()
        .with_method(Reuse::Cold, 16 * KIB..=64 * KIB, Method::Sse2)
        .with_workers_per_node(0);
    assert_eq!(own.workers_per_node(), 1, "none is none");
    for (own, measured) in own.choices().iter().zip(calibration.choices()) {
        if own.reuse == Reuse::Cold && [16 * KIB, 64 * KIB].contains(&own.size_class) {
            assert_eq!((own.method, own.reason), (Method::Sse2, Reason::Overridden));
            let known = own.situation() == COLD && own.size_class == 64 * KIB;
            assert_eq!(own.gb_per_s, known.then_some(4.0));
            assert_eq!(own.measured, measured.measured);
        } else {
            assert_eq!(own, measured);
        }
    }
    let plan = Plan::calibrated(&own, &boastful(), |_| true);
    assert_eq!(plan.method_for(64 * KIB, COLD_ALL), Method::Sse2);
    assert_eq!(plan.method_for(64 * KIB, SOON), Method::RepStosb);
    assert_eq!(plan.method_for(8 * KIB - 1, COLD), Method::RepStosb);
}

/// Speeds, disturbed and nonsensical ones among them.
fn any_rate() -> impl Strategy<Value = f64> {
    prop_oneof![8 => 0.01..400.0f64, 1 => prop::sample::select(vec![f64::NAN, f64::INFINITY, -1.0, 0.0, -0.0, f64::MIN_POSITIVE])]
}

/// Readings of anything, several times over, for classes that there are and that there are not.
pub(super) fn any_measurement() -> impl Strategy<Value = Measurement> {
    let readings = (
        prop::sample::select(Situation::ALL.to_vec()),
        prop::sample::select(vec![4096, 16 * KIB, 64 * KIB, 1 << 20, 64 << 20, 12_345]),
        prop::sample::select(Method::ALL.to_vec()),
        prop::collection::vec(any_rate(), 0..8),
    );
    let readings = readings.prop_map(|(situation, size_class, method, gb_per_s)| Readings {
        situation,
        size_class,
        method,
        gb_per_s,
    });
    let vendor = prop::sample::select(vec![Vendor::Intel, Vendor::Amd, Vendor::Hygon, Vendor::Other]);
    let scaling = prop::collection::vec(prop::collection::vec(any_rate(), 0..4), 0..5);
    (prop::collection::vec(readings, 0..40), 1usize..5, vendor, any::<Option<u64>>(), scaling).prop_map(
        |(readings, workers, vendor, llc_bytes, scaling)| {
            let cpu = CpuDescription { vendor, llc_bytes, ..boastful() };
            let scaling = (1..).zip(scaling).collect();
            Measurement { classes: Measurement::classes(&cpu), cpu, workers, readings, scaling, ..nothing() }
        },
    )
}

proptest! {
    #[test]
    fn every_class_has_a_choice_that_holds(measurement in any_measurement()) {
        let calibration = measurement.clone().decide();
        let asked: Vec<_> = Situation::ALL
            .into_iter()
            .flat_map(|situation| measurement.classes.iter().map(move |class| (situation, *class)))
            .collect();
        let chosen: Vec<_> =
            calibration.choices().iter().map(|choice| (choice.situation(), choice.size_class)).collect();
        prop_assert_eq!(chosen, asked);
        prop_assert!((1..=8).contains(&calibration.workers_per_node()));
        for choice in calibration.choices() {
            prop_assert!(Measurement::candidates(choice.reuse).any(|method| method == choice.method));
            prop_assert_eq!(choice.from_bytes, choice.size_class / 2);
            prop_assert!(choice.measured.is_sorted_by(|a, b| a.gb_per_s >= b.gb_per_s));
            prop_assert!(choice.measured.iter().all(|measured| measured.gb_per_s.is_finite() && measured.gb_per_s > 0.0));
            let best = choice.measured.first().map_or(0.0, |best| best.gb_per_s);
            match choice.reason {
                Reason::Fastest => prop_assert!(choice.gb_per_s == Some(best)),
                Reason::AsFast => prop_assert!(choice.gb_per_s.unwrap() >= 0.98 * best),
                _ => prop_assert_eq!(choice.method, measurement.cpu.choose(choice.size_class, choice.reuse)),
            }
            // What is kept is what the plan takes.
            let offered = |method| measurement.cpu.supports(method).is_ok();
            let plan = Plan::calibrated(&calibration, &measurement.cpu, offered);
            for len in [choice.from_bytes, choice.size_class, 2 * choice.size_class - 1] {
                let looked_up = calibration.choice(len, choice.reuse, choice.concurrency).unwrap();
                let wanted = match looked_up.reason {
                    Reason::Fastest | Reason::AsFast if offered(looked_up.method) => looked_up.method,
                    _ => measurement.cpu.choose(len, choice.reuse),
                };
                prop_assert_eq!(plan.method_for(len, choice.situation()), wanted);
            }
        }
    }

    /// More readings of what was read change nothing, nor does their order.
    #[test]
    fn the_order_of_readings_is_no_matter(measurement in any_measurement(), seed in any::<usize>()) {
        let mut other = measurement.clone();
        for readings in &mut other.readings {
            let by = seed % readings.gb_per_s.len().max(1);
            readings.gb_per_s.rotate_left(by);
        }
        prop_assert_eq!(other.decide(), measurement.decide());
    }

    #[test]
    fn the_upper_quartile_is_a_reading(rates in prop::collection::vec(any_rate(), 0..20)) {
        let good: Vec<f64> = rates.iter().copied().filter(|rate| rate.is_finite() && *rate > 0.0).collect();
        let Some(found) = upper_quartile(&rates) else {
            prop_assert!(good.is_empty());
            return Ok(());
        };
        prop_assert!(good.contains(&found));
        let no_faster = good.iter().filter(|rate| **rate <= found).count();
        let slower = good.iter().filter(|rate| **rate < found).count();
        prop_assert!(4 * no_faster >= 3 * good.len() && 4 * slower < 3 * good.len(), "{found} of {good:?}");
    }
}
