//! How much a worker takes at a time: what the setting means, and what is made of odd ones.
#![allow(
    unsafe_code,
    clippy::type_complexity,
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of tests are tests"
)]

mod common;

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};
use std::time::Duration;

use common::hooked::{Answer, HookedMemory, hooked, hooked_memory, memory_of};
use common::{KIB, MIB, PAGE, all_zero, exactly, fill, is_zero};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vm_zeroing::{BuildError, Intent, Strategy, ZeroRequest, ZeroingService};

const LEN: u64 = 16 * MIB;

/// Memory that was used, and the chunks (offset, length) that were asked for.
fn watched(len: u64) -> (Arc<HookedMemory>, Arc<Mutex<BTreeSet<(u64, u64)>>>) {
    let chunks: Arc<Mutex<BTreeSet<(u64, u64)>>> = Arc::default();
    let memory = hooked_memory(len, {
        let chunks = Arc::clone(&chunks);
        move |offset, len| {
            chunks.lock().unwrap().insert((offset, len as u64));
            Answer::AsAsked
        }
    });
    fill(&*memory, 0, len);
    (memory, chunks)
}

#[test]
fn chunks_of_nothing_are_refused() {
    let error = ZeroingService::builder().chunk(0).build().unwrap_err();
    assert!(matches!(error, BuildError::NoChunk), "{error}");
    assert!(error.to_string().contains("chunk"), "{error}");
    let error = ZeroingService::builder().workers_per_node(0).chunk(0).build().unwrap_err();
    assert!(matches!(error, BuildError::NoChunk), "also where there are no workers: {error}");
}

/// Rounded down to a power of two, up to 64 KiB; and never longer, though shorter where it takes too long.
#[test]
fn a_chunk_is_a_power_of_two_of_the_size_asked_for() {
    for (asked, most) in [
        (1, 64 * KIB),
        (PAGE, 64 * KIB),
        (64 * KIB, 64 * KIB),
        (128 * KIB - 1, 64 * KIB),
        (3 * MIB, 2 * MIB),
        (MIB + 1, MIB),
        (8 * MIB, 8 * MIB),
    ] {
        let service = exactly(1).chunk(asked).build().unwrap();
        let (memory, chunks) = watched(LEN + PAGE);
        all_zero(&service.zero(&memory, Intent::Teardown).unwrap());
        assert!(is_zero(&*memory, 0, LEN + PAGE));
        let chunks = chunks.lock().unwrap().clone();
        let mut at = 0;
        for (start, len) in chunks {
            assert_eq!(start, at);
            assert!(len <= most, "{len} bytes where {asked} were asked for");
            assert_eq!(start & (len.next_power_of_two() - 1), 0, "cut at a multiple of its length");
            at += len;
        }
        assert_eq!(at, LEN + PAGE);
    }
}

/// Longer than any region: all of it at once.
#[test]
fn a_chunk_longer_than_the_region() {
    for asked in [2 * LEN, 1 << 40, u64::MAX] {
        for workers in [0, 1] {
            let service = exactly(1).workers_per_node(workers).chunk(asked).build().unwrap();
            let (memory, chunks) = watched(LEN + PAGE);
            let report = all_zero(&service.zero(&memory, Intent::Teardown).unwrap());
            assert!(is_zero(&*memory, 0, LEN + PAGE));
            assert_eq!((report.workers.len(), report.workers[0].chunks), (1, 1));
            assert!(workers == 0 || *chunks.lock().unwrap() == BTreeSet::from([(0, LEN + PAGE)]));
        }
    }
}

/// 4 MiB, unless said.
#[test]
fn the_default() {
    let service = exactly(2).build().unwrap();
    let (memory, chunks) = watched(LEN);
    all_zero(&service.zero(&memory, Intent::Teardown).unwrap());
    let chunks = chunks.lock().unwrap().clone();
    assert!(chunks.iter().all(|(_, len)| *len <= 4 * MIB), "{chunks:?}");
    assert!(chunks.len() >= 4, "{chunks:?}");
}

/// The part of the work on a chunk that takes long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Slow {
    ToMakeReady,
    ToStore,
}

/// What each thread took, in order, of used memory of which every chunk takes two milliseconds at least. Longer ones
/// change nothing: from one millisecond on a chunk is too long.
fn lengths_on_slow_memory(workers: usize, len: u64, slow: Slow) -> HashMap<ThreadId, Vec<u64>> {
    let service = exactly(1.max(workers)).workers_per_node(workers).chunk(4 * MIB).build().unwrap();
    let taken: Arc<Mutex<HashMap<ThreadId, Vec<u64>>>> = Arc::default();
    let under_way = Arc::new(AtomicBool::new(false));
    let mut region = hooked(0, len, {
        let (taken, under_way) = (Arc::clone(&taken), Arc::clone(&under_way));
        let seen = Mutex::new(BTreeSet::new());
        move |offset, len| {
            // Submitting looks at the first byte.
            if !under_way.load(Ordering::SeqCst) || (len as u64) < 64 * KIB {
                return Answer::AsAsked;
            }
            let is_first = seen.lock().unwrap().insert(offset);
            if is_first {
                taken.lock().unwrap().entry(thread::current().id()).or_default().push(len as u64);
            }
            if is_first == (slow == Slow::ToMakeReady) {
                thread::sleep(Duration::from_millis(2));
            }
            Answer::AsAsked
        }
    });
    region.on_all_threads = true;
    let memory = memory_of(vec![region]);
    fill(&*memory, 0, len);
    under_way.store(true, Ordering::SeqCst);
    all_zero(&service.zero(&memory, Intent::Teardown).unwrap());
    under_way.store(false, Ordering::SeqCst);
    assert!(is_zero(&*memory, 0, len));
    let taken = std::mem::take(&mut *taken.lock().unwrap());
    assert_eq!(taken.values().flatten().sum::<u64>(), len);
    taken
}

/// How long the chunk of this number may be: half of the one before it, down to 64 KiB.
fn most_of_slow_memory(number: usize) -> u64 {
    (4 * MIB) >> number.min(6)
}

/// The first chunk is as long as may be, and from then on each is half as long, down to 64 KiB.
#[test]
fn slow_memory_is_taken_in_short_chunks() {
    for workers in [0, 1] {
        for slow in [Slow::ToMakeReady, Slow::ToStore] {
            let taken = lengths_on_slow_memory(workers, 10 * MIB, slow);
            let lengths = taken.values().next().unwrap();
            assert_eq!(taken.len(), 1);
            let expected = (0..lengths.len()).map(most_of_slow_memory);
            assert_eq!(*lengths, expected.collect::<Vec<_>>(), "{workers} workers, slow {slow:?}");
        }
    }
}

/// Each worker learns by itself.
#[test]
fn every_worker_learns_that_memory_is_slow() {
    let taken = lengths_on_slow_memory(3, 32 * MIB, Slow::ToStore);
    for lengths in taken.values() {
        for (number, len) in lengths.iter().enumerate() {
            assert!(*len <= most_of_slow_memory(number), "{lengths:?}");
        }
    }
    let shortest = |lengths: &Vec<u64>| lengths.iter().filter(|len| **len == 64 * KIB).count();
    assert!(taken.values().map(shortest).sum::<usize>() > 1, "{taken:?}");
}

/// However short chunks are, a transparent hugepage that the kernel hands out is not overwritten once more.
#[test]
fn fresh_hugepages_are_not_written_twice() {
    for workers in [0, 1, 3] {
        let service = exactly(3).workers_per_node(workers).chunk(64 * KIB).build().unwrap();
        let memory =
            GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), (LEN + 2 * MIB) as usize)]).unwrap();
        let base = memory.get_host_address(GuestAddress(0)).unwrap();
        // SAFETY: advice about a mapping of the test's own; changes no byte. Refused where there are none.
        unsafe { libc::madvise(base.cast(), (LEN + 2 * MIB) as usize, libc::MADV_HUGEPAGE) };
        let memory = Arc::new(memory);
        // From the first one on.
        let from = GuestAddress((base as u64).next_multiple_of(2 * MIB) - base as u64);
        for (strategy, fresh) in
            [(Strategy::Populate, LEN), (Strategy::Populate, 0), (Strategy::Overwrite, 0)]
        {
            let request = ZeroRequest::new(&memory).intent(Intent::Boot).strategy(strategy);
            let report = all_zero(&service.submit(request.ranges([(from, LEN)])).unwrap());
            assert_eq!((report.reads_zero_bytes, report.erased_bytes), (fresh, LEN - fresh), "{report:?}");
        }
    }
}
