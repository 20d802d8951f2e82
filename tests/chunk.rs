//! How much a worker takes at a time: what the setting means, and what is made of odd ones.
#![allow(
    unsafe_code,
    clippy::type_complexity,
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of tests are tests"
)]

mod common;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use common::hooked::{Answer, HookedMemory, hooked_memory};
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
