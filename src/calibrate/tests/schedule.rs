//! Schedules on made-up machines with a made-up clock.

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;

use super::super::schedule::{Candidate, Round, Schedule};
use crate::clear::{Concurrency, Method, Readings, Reuse, Situation};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const CLASSES: [u64; 8] = [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB];
const METHODS: [Method; 5] =
    [Method::RepStosb, Method::Sse2, Method::Avx2, Method::Movdir64b, Method::Portable];
const ALL_LONG: [u64; 2] = [64 * MIB; 2];

/// One round as it was.
#[derive(Debug, Clone, PartialEq)]
struct Done {
    situation: Situation,
    class: u64,
    candidates: Vec<(Method, usize)>,
}

/// Follows a schedule until its end. `speed`: GB/s of a method in a class by so many threads; making memory hot
/// or cold takes as long as clearing it. What was done in whole rounds, and the time that is left.
fn follow(
    schedule: &mut Schedule,
    budget: Duration,
    speed: impl Fn(&Done, Method, usize) -> f64,
) -> (Vec<Done>, Duration) {
    let (mut left, mut all) = (budget, Vec::new());
    while let Some(round) = schedule.next(left) {
        let done = describe(schedule, &round);
        let bytes = schedule.race_of(&round).bytes;
        let rates: Vec<f64> =
            done.candidates.iter().map(|(method, threads)| speed(&done, *method, *threads)).collect();
        let took = rates.iter().zip(&done.candidates).map(|(rate, (_, threads))| {
            Duration::from_nanos((2.0 * (bytes * *threads as u64) as f64 / rate) as u64)
        });
        let took = took.sum();
        let Some(rest) = left.checked_sub(took) else {
            // Longer than was thought: it is broken off when the time is up, and no reading.
            schedule.book(&round, left, &[]);
            left = Duration::ZERO;
            continue;
        };
        left = rest;
        schedule.book(&round, took, &rates);
        all.push(done);
    }
    (all, left)
}

fn describe(schedule: &Schedule, round: &Round) -> Done {
    let race = schedule.race_of(round);
    let candidates = schedule.candidates(round).map(|Candidate { method, threads, .. }| (*method, *threads));
    Done { situation: race.situation, class: race.class, candidates: candidates.collect() }
}

/// How many readings there are.
fn counts(schedule: &Schedule) -> BTreeMap<(u64, bool, bool, Method), usize> {
    let key = |read: &Readings| {
        let Situation { reuse, concurrency } = read.situation;
        (read.size_class, reuse == Reuse::Soon, concurrency == Concurrency::All, read.method)
    };
    schedule.readings().iter().map(|read| (key(read), read.gb_per_s.len())).collect()
}

/// As here: 50 ms less what memory takes are enough for what a service clears, and for a little more.
#[test]
fn short_classes_get_their_readings_first() {
    let mut schedule = Schedule::new(&CLASSES, &METHODS, 2, [48 * MIB; 2]);
    let (done, left) =
        follow(&mut schedule, Duration::from_millis(40), |_, _, threads| 30.0 * threads as f64);
    assert!(left < Duration::from_micros(100), "time is used: {left:?} is left");
    let counts = counts(&schedule);
    for class in &CLASSES[..6] {
        for (soon, all) in [(false, false), (false, true), (true, false), (true, true)] {
            for method in METHODS.into_iter().filter(|method| !soon || !method.is_non_temporal()) {
                assert!(counts[&(*class, soon, all, method)] >= 3, "{method} {class}: {counts:?}");
            }
        }
    }
    let long: Vec<_> = counts.iter().filter(|((class, ..), _)| *class > 4 * MIB).collect();
    assert!(
        !long.is_empty() && long.iter().all(|((class, ..), count)| *class == 16 * MIB && **count <= 2),
        "{long:?}"
    );
    // A class after the other, again and again, in all situations; no long one before these have had theirs.
    let classes: Vec<u64> = done.iter().map(|done| done.class).collect();
    let first: Vec<u64> = CLASSES[..6].iter().flat_map(|class| [*class; 4]).collect();
    assert_eq!(classes[..72], [first.clone(), first.clone(), first].concat());
    assert!(classes[72..].contains(&(16 * MIB)));
}

#[test]
fn each_round_starts_with_another() {
    let mut schedule = Schedule::new(&CLASSES[..1], &METHODS, 1, ALL_LONG);
    let (done, _) = follow(&mut schedule, Duration::from_millis(10), |_, _, _| 10.0);
    let firsts: Vec<Method> = done
        .iter()
        .filter(|done| done.situation.reuse == Reuse::Cold)
        .map(|done| done.candidates[0].0)
        .collect();
    assert!(firsts.len() > METHODS.len());
    assert!(
        firsts.iter().zip(METHODS.iter().cycle()).all(|(first, expected)| first == expected),
        "{firsts:?}"
    );
    assert!(done.iter().all(|done| done.situation.concurrency == Concurrency::One), "of one thread");
}

/// After two readings, or four of the short ones. Their figures are kept.
#[test]
fn losers_are_out() {
    let speed = |_: &Done, method, _| match method {
        Method::Avx2 => 100.0,
        Method::Sse2 => 76.0,
        Method::Movdir64b => 74.0,
        Method::RepStosb => 51.0,
        _ => 49.0,
    };
    let mut schedule = Schedule::new(&CLASSES, &METHODS, 1, ALL_LONG);
    follow(&mut schedule, Duration::from_millis(400), speed);
    let counts = counts(&schedule);
    for class in CLASSES {
        let of = |method| counts.get(&(class, false, false, method)).copied().unwrap_or(0);
        let rounds = if class <= 256 * KIB { 4 } else { 2 };
        assert!(of(Method::Avx2) > rounds && of(Method::Sse2) > rounds, "{class}: {counts:?}");
        assert_eq!((of(Method::Movdir64b), of(Method::RepStosb)), (rounds, rounds), "{class}: {counts:?}");
        // In the long ones, what lost by more than half one class below is not tried.
        assert_eq!(of(Method::Portable), if class <= 4 * MIB { rounds } else { 0 }, "{class}: {counts:?}");
    }
}

/// Slow as it is for long, a method that catches up with length gets its chance.
#[test]
fn who_was_out_may_race_in_the_next_class() {
    let speed = |done: &Done, method, _| match method {
        Method::RepStosb if done.class >= 16 * MIB => 120.0,
        Method::RepStosb => 55.0,
        _ => 100.0,
    };
    let mut schedule = Schedule::new(&CLASSES, &METHODS, 1, ALL_LONG);
    follow(&mut schedule, Duration::from_millis(200), speed);
    let counts = counts(&schedule);
    assert_eq!(counts[&(4 * MIB, false, false, Method::RepStosb)], 2);
    assert!(counts[&(16 * MIB, false, false, Method::RepStosb)] > 2);
}

/// Something else ran during one of its two readings.
#[test]
fn one_disturbed_reading_puts_nobody_out() {
    let mut schedule = Schedule::new(&CLASSES[4..5], &METHODS, 1, ALL_LONG);
    let reads = std::cell::Cell::new(0);
    follow(&mut schedule, Duration::from_millis(10), |_, method, _| {
        reads.set(reads.get() + usize::from(method == Method::Avx2));
        if method == Method::Avx2 && reads.get() == 1 { 1.0 } else { 10.0 }
    });
    assert!(counts(&schedule)[&(MIB, false, false, Method::Avx2)] > 2);
}

#[test]
fn scaling_is_read_with_the_best_method() {
    let speed = |_: &Done, method, threads: usize| match method {
        Method::Avx2 => 20.0 * threads.min(4) as f64,
        _ => 15.0 * threads.min(4) as f64,
    };
    for (threads, counts) in [(2, vec![1, 2]), (6, vec![1, 2, 4, 6]), (8, vec![1, 2, 4, 8])] {
        let mut schedule = Schedule::new(&CLASSES, &METHODS, threads, ALL_LONG);
        let (done, _) = follow(&mut schedule, Duration::from_millis(300), speed);
        let scaling = schedule.scaling();
        assert_eq!(scaling.iter().map(|(count, _)| *count).collect::<Vec<_>>(), counts);
        for (count, rates) in scaling {
            assert!(
                rates.len() >= 3 && rates.iter().all(|rate| *rate == 20.0 * count.min(4) as f64),
                "{rates:?}"
            );
        }
        let of_scaling = done
            .iter()
            .filter(|done| done.candidates.iter().any(|(_, count)| *count != 1 && *count != threads));
        assert_eq!(of_scaling.count() > 0, threads > 2);
    }
    let mut alone = Schedule::new(&CLASSES, &METHODS, 1, ALL_LONG);
    follow(&mut alone, Duration::from_millis(300), speed);
    assert!(alone.scaling().is_empty());
}

/// Classes longer than the ring, of one thread or of all, are not read; the least reading has to fit, too.
#[test]
fn rings_limit_the_classes() {
    let longest = |rings: [u64; 2]| {
        let mut schedule = Schedule::new(&CLASSES, &METHODS, 2, rings);
        follow(&mut schedule, Duration::from_secs(1), |_, _, _| 50.0);
        let readings = schedule.readings();
        [Concurrency::One, Concurrency::All].map(|concurrency| {
            let of = readings.iter().filter(|read| read.situation.concurrency == concurrency);
            of.map(|read| read.size_class).max().unwrap_or(0)
        })
    };
    assert_eq!(longest([64 * MIB, 64 * MIB]), [64 * MIB; 2]);
    assert_eq!(longest([64 * MIB - 1, 4 * MIB]), [16 * MIB, 4 * MIB]);
    assert_eq!(longest([2 * MIB, 0]), [MIB, 0]);
    assert_eq!(longest([255 * KIB, 256 * KIB]), [0, 256 * KIB]);
    assert_eq!(longest([0, 0]), [0, 0]);
}

/// A round that was not finished is no reading, and there is an end.
#[test]
fn unfinished_rounds_do_not_count() {
    let mut schedule = Schedule::new(&CLASSES, &METHODS, 2, ALL_LONG);
    assert_eq!(schedule.next(Duration::ZERO), None);
    let round = schedule.next(Duration::from_secs(1)).unwrap();
    schedule.book(&round, Duration::from_millis(3), &[5.0, 5.0]);
    assert!(schedule.readings().is_empty());
    assert_eq!(schedule.next(Duration::ZERO), None);
    let nobody = Schedule::new(&CLASSES, &[], 2, ALL_LONG).next(Duration::from_secs(1));
    assert_eq!(nobody, None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// Whatever the machine, as long as it is not slower than is thought at first: within the budget (see
    /// `follow`), with an end, and each class that is read at all is read for each method that is not out.
    #[test]
    fn within_any_budget(
        speeds in prop::collection::vec(3.0..200.0f64, METHODS.len()),
        threads in 1usize..9,
        ring in 0..100 * MIB,
        budget in 0u64..50_000,
    ) {
        let of = |method| speeds[METHODS.iter().position(|known| *known == method).unwrap()];
        let mut schedule = Schedule::new(&CLASSES, &METHODS, threads, [ring, ring / 2]);
        // All threads together, so that a reading takes as long as one of one thread.
        let (_, left) = follow(&mut schedule, Duration::from_micros(budget), |_, method, threads| of(method) * threads as f64);
        prop_assert!(left <= Duration::from_micros(budget));
        let best = speeds.iter().copied().fold(0.0, f64::max);
        let counts = counts(&schedule);
        for ((class, soon, all, method), count) in &counts {
            let others = METHODS.iter().filter(|other| !*soon || !other.is_non_temporal());
            let most = others.filter_map(|other| counts.get(&(*class, *soon, *all, *other))).max().unwrap();
            let is_out = count < most;
            prop_assert!(!is_out || *count == if *class <= 256 * KIB { 4 } else { 2 } && of(*method) < 0.75 * best, "{method} {class}: {counts:?}");
        }
    }
}
