//! What a job allocates for itself: by its regions, not by its bytes, and nothing of it stays.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::sync::Arc;

use common::counting::{Counting, calls, live, peak_of};
use common::hooked::{Answer, Gate, HookedRegion, memory_of};
use common::{MIB, PAGE, all_zero, service_with};
use vm_memory::{GuestAddress, GuestMemoryMmap, MmapRegion};
use vm_zeroing::{Intent, JobError, ZeroingService};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn memory(len: u64) -> Arc<GuestMemoryMmap<()>> {
    Arc::new(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), len as usize)]).unwrap())
}

/// The most that a job over so many bytes held at once.
fn peak(service: &ZeroingService, len: u64) -> u64 {
    let memory = memory(len);
    let (peak, report) = peak_of(|| all_zero(&service.zero(&memory, Intent::Boot).unwrap()));
    assert_eq!(report.total_bytes, len);
    peak
}

/// The most that submitting and cancelling a job over so many bytes of address space held at once, no page of which
/// is looked at: until it is cancelled, workers are held up before their first one.
fn peak_of_submitting(service: &ZeroingService, len: u64) -> Option<u64> {
    let mapping = MmapRegion::<()>::new(usize::try_from(len).ok()?).ok()?;
    let gate = Gate::after(0);
    let memory = memory_of(vec![HookedRegion::over(mapping, 0, {
        let gate = Arc::clone(&gate);
        move |_, _| {
            gate.pass();
            Answer::Refused
        }
    })]);
    let (peak, job) = peak_of(|| {
        let job = service.zero(&memory, Intent::Teardown).unwrap();
        gate.wait_for_somebody();
        job.cancel();
        job
    });
    gate.open();
    assert!(matches!(job.wait(), Err(JobError::Cancelled { report }) if report.total_bytes == len));
    Some(peak)
}

/// One test: the counts are the process's.
#[test]
fn a_job_allocates_by_its_regions() {
    let service = service_with(2);
    // Queues grow to their size first.
    let warm_up = peak(&service, 256 * MIB);
    assert!(warm_up > 0);
    let small = peak(&service, 16 * MIB);
    let large = peak(&service, 512 * MIB);
    // A piece of the lazily halved rest for each doubling, and what the other worker holds; 128 chunks listed up
    // front would be more.
    assert!(large < small + 16 * 1024, "{small} bytes for 16 MiB, {large} for 512 MiB");

    peak_of_submitting(&service, 256 * MIB).unwrap();
    match peak_of_submitting(&service, 16 << 40) {
        Some(peak) => assert!(peak <= 64 << 10, "{peak} bytes to submit 16 TiB"),
        None => println!("skipped: the host has no 16 TiB of address space to spare"),
    }

    // Nothing stays, however many jobs: queues hold blocks of a fixed number of tasks, so compare late with late.
    let memory = memory(20 * PAGE);
    let run = |jobs: u32| {
        for _ in 0..jobs {
            all_zero(&service.zero(&memory, Intent::Teardown).unwrap());
        }
    };
    run(1000);
    let (before, calls_before) = (live(), calls());
    run(1000);
    assert!(calls() > calls_before, "it counts");
    assert!(live() < before + 16 * 1024, "{} bytes more after 1000 jobs", live() - before);
}
