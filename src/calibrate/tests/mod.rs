//! Tests of what is pure, and of memory and meeting points. What a calibration leaves behind is tested in
//! `tests/calibration.rs`.

mod ring;
mod room;
mod schedule;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::barrier::Barrier;
use super::crew::together;
use super::order::Span;
use super::{later, ring_bytes};
use crate::clear::{CpuDescription, Measurement, Shortfall};

/// Nobody is a turn ahead: between two meetings each has done its share.
#[test]
fn a_barrier_holds_everybody() {
    const TURNS: usize = 2000;
    let (barrier, shares) = (Barrier::new(4), AtomicUsize::new(0));
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for turn in 0..TURNS {
                    shares.fetch_add(1, Ordering::Relaxed);
                    assert!(barrier.wait(2 * turn + 1));
                    assert_eq!(shares.load(Ordering::Relaxed), 4 * (turn + 1));
                    assert!(barrier.wait(2 * turn + 2));
                }
            });
        }
    });
}

/// Whoever waits is let go, and whoever comes later; nobody a turn too late.
#[test]
fn a_barrier_that_is_stopped_holds_nobody() {
    let barrier = Barrier::new(3);
    thread::scope(|scope| {
        let others = [(); 2].map(|()| scope.spawn(|| (1..).take_while(|turn| barrier.wait(*turn)).count()));
        for turn in 1..=50 {
            assert!(barrier.wait(turn));
        }
        barrier.stop();
        assert_eq!(others.map(|other| other.join().unwrap()), [50; 2]);
    });
}

#[test]
fn a_reading_takes_from_the_first_start_to_the_last_end() {
    let zero = Instant::now();
    let span = |start, end| Span {
        start: zero + Duration::from_nanos(start),
        end: zero + Duration::from_nanos(end),
    };
    let spans = [vec![span(10, 20), span(100, 110), span(500, 600)], vec![span(12, 25), span(90, 95)]];
    let took: Vec<_> = together(&spans).map(|took| took.as_nanos()).collect();
    assert_eq!(took, [15, 20], "what only one has done is no reading");
    assert_eq!(together(&spans[..1]).count(), 3);
    assert_eq!(together(&[]).count(), 0);
}

#[test]
fn rings_fit_the_budget() {
    const MIB: u64 = 1 << 20;
    let bytes = |llc_bytes, budget| {
        let classes = Measurement::classes(&CpuDescription { llc_bytes, ..CpuDescription::bare() });
        let (bytes, short_of) = ring_bytes(&classes, u64::MAX, Duration::from_millis(budget));
        assert_eq!(short_of, Shortfall::Time);
        bytes
    };
    assert_eq!(bytes(None, 0), 0);
    assert_eq!(bytes(None, 1), 2 * MIB);
    assert_eq!(bytes(Some(0), 50), 48 * MIB);
    assert_eq!(bytes(Some(300 * MIB), 50), 48 * MIB);
    assert_eq!(bytes(Some(32 * MIB), 10_000), 64 * MIB, "the longest class");
    assert_eq!(bytes(Some(300 * MIB), 10_000), 1 << 30);
    assert_eq!(bytes(Some(u64::MAX), u64::MAX), 1 << 30);
    let classes = Measurement::classes(&CpuDescription::bare());
    for (room, ring) in [(0, 0), (2 * MIB - 1, 0), (2 * MIB, 2 * MIB), (7 * MIB, 6 * MIB)] {
        assert_eq!(ring_bytes(&classes, room, Duration::from_secs(1)), (ring, Shortfall::Memory));
    }
    assert_eq!(ring_bytes(&classes, 7 * MIB, Duration::from_millis(6)), (6 * MIB, Shortfall::Time));
}

#[test]
fn times_that_no_clock_reaches() {
    let now = Instant::now();
    assert_eq!(later(now, Duration::ZERO), now);
    assert_eq!(later(now, Duration::from_millis(3)), now + Duration::from_millis(3));
    assert!(later(now, Duration::MAX) > now + Duration::from_secs(1 << 24));
}
