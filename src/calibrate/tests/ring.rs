//! Rings, on the memory that the machine has.

use std::time::{Duration, Instant};

use super::super::ring::{Patience, Ring, SMALLEST};
use crate::clear::{Shortfall, first_nonzero};
use crate::sys::page_size;

/// Until so many seconds have passed.
fn for_seconds(seconds: u64) -> Patience {
    let until = Instant::now() + Duration::from_secs(seconds);
    Patience { until, at_the_latest: until }
}

#[test]
fn is_walked_in_ascending_order() {
    let mut ring = Ring::make(3 * SMALLEST, None, for_seconds(60)).unwrap();
    assert_eq!((ring.len(), ring.shortfall()), (3 * SMALLEST, None));
    assert!(ring.page_bytes() == page_size() || ring.page_bytes() == 2 << 20, "{}", ring.page_bytes());
    let start = ring.window(1).unwrap().ptr().addr();
    // From 1 on: two fit, then from the start; and one that is as long as the ring.
    let lens = [SMALLEST, SMALLEST, SMALLEST, 3 * SMALLEST, 64, 3 * SMALLEST - 64, 64];
    let offsets = lens.map(|len| {
        let window = ring.window(len).unwrap();
        assert_eq!(window.len() as u64, len);
        (window.ptr().addr() - start) as u64
    });
    assert_eq!(offsets, [1, 1 + SMALLEST, 0, 0, 0, 64, 0]);
    assert!(ring.window(3 * SMALLEST + 1).is_none());
    // New memory, all of it there.
    assert_eq!(first_nonzero(&ring.window(3 * SMALLEST).unwrap()), None);
}

/// The least there can be, and it says that the time was too short.
#[test]
fn is_short_where_the_time_is() {
    let now = Instant::now();
    let ring = Ring::make(64 << 20, None, Patience { until: now, at_the_latest: now }).unwrap();
    assert_eq!((ring.len(), ring.shortfall()), (SMALLEST, Some(Shortfall::Time)));
    // A little more is waited for.
    let patience = Patience { until: now, at_the_latest: now + Duration::from_secs(60) };
    let ring = Ring::make(64 << 20, None, patience).unwrap();
    assert_eq!((ring.len(), ring.shortfall()), (2 * SMALLEST, Some(Shortfall::Time)));
}

/// No machine has so much address space: half of it, and half of that.
#[test]
fn is_short_where_memory_is() {
    let now = Instant::now();
    let ring = Ring::make(1 << 50, None, Patience { until: now, at_the_latest: now }).unwrap();
    assert_eq!((ring.len(), ring.shortfall()), (SMALLEST, Some(Shortfall::Memory)));
}
