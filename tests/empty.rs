//! Requests without a byte (R36): over at once, with an empty report, and no worker is woken.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::sync::Arc;

use common::hooked::HookedMemory;
use common::mapped::Mapped;
use common::wakeups::asleep;
use common::{PAGE, fill, is_pattern, readable, service};
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionCollection};
use vm_zeroing::{Intent, Job, RequestError, ZeroRequest, ZeroingService};

fn memory() -> Arc<GuestMemoryMmap<()>> {
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 4 * PAGE as usize)]).unwrap();
    fill(&memory, 0, 4 * PAGE);
    Arc::new(memory)
}

/// One of each kind.
fn empty_requests() -> Vec<ZeroRequest> {
    let (memory, no_regions) = (memory(), Arc::new(HookedMemory::<()>::new()));
    let mapped = Arc::new(Mapped::anonymous(2 * PAGE));
    vec![
        ZeroRequest::new(&no_regions),
        ZeroRequest::new(&Arc::new(GuestRegionCollection::<vm_memory::GuestRegionMmap<()>>::new())),
        ZeroRequest::new(&memory).ranges([]),
        ZeroRequest::new(&memory).ranges([(GuestAddress(PAGE), 0), (GuestAddress(0), 0)]),
        ZeroRequest::new(&memory).ranges([(GuestAddress(u64::MAX), 0)]),
        ZeroRequest::host([]),
        ZeroRequest::host([mapped.host_range(PAGE, 0)]),
    ]
}

fn assert_empty_and_over(job: &Job) {
    assert!(job.is_over(), "at submission, without a worker");
    assert!(readable(job.completion_fd().unwrap(), 0));
    let (progress, report) = (job.progress(), job.wait().unwrap());
    assert_eq!((progress.done_bytes, progress.total_bytes), (0, 0));
    assert_eq!((report.total_bytes, report.zero_bytes(), report.method), (0, 0, None));
    assert!(report.ranges.is_empty() && report.is_all_zero());
    assert_eq!(report.gb_per_s(), 0.0);
    assert_eq!(report.node_local_share(), 1.0);
}

#[test]
fn an_empty_request_is_over_when_it_is_submitted() {
    let service = service();
    for intent in [Intent::Boot, Intent::Teardown, Intent::Background] {
        for request in empty_requests() {
            assert_empty_and_over(&service.submit(request.intent(intent)).unwrap());
        }
    }
    // A deadline that has passed takes nothing away from a job without bytes.
    let request = ZeroRequest::host([]).deadline(std::time::Instant::now());
    assert_empty_and_over(&service.submit(request).unwrap());
}

/// A range that would wrap round is an error, next to empty ones and valid ones too.
#[test]
fn overflow_is_an_error() {
    let (service, memory) = (service(), memory());
    for (start, len) in [(1, u64::MAX), (u64::MAX, 1), (u64::MAX - PAGE, PAGE + 1), (u64::MAX, u64::MAX)] {
        let ranges = [(0, 0), (0, PAGE), (start, len)].map(|(start, len)| (GuestAddress(start), len));
        let error = service.submit(ZeroRequest::new(&memory).ranges(ranges)).unwrap_err();
        assert!(
            matches!(error, RequestError::Overflow { start: s, len: l } if (s, l) == (start, len)),
            "{error}"
        );
    }
    assert!(is_pattern(&*memory, 0, 4 * PAGE), "nothing was touched");
}

/// In a process of its own, so that other tests' workers are not counted.
#[test]
fn no_worker_is_woken() {
    common::run_child("no_worker_is_woken_child");
}

#[test]
#[ignore = "a part of no_worker_is_woken"]
fn no_worker_is_woken_child() {
    if !common::is_child() {
        return;
    }
    let service: ZeroingService = service();
    let woken = |requests: fn() -> Vec<ZeroRequest>| {
        let before = asleep();
        for _ in 0..50 {
            let _jobs: Vec<Job> =
                requests().into_iter().map(|request| service.submit(request).unwrap()).collect();
        }
        asleep() - before
    };
    assert!(woken(|| vec![ZeroRequest::new(&memory())]) > 0, "the measure measures");
    // A worker on its way to bed may still be counted, but not every time.
    assert!((0..20).any(|_| woken(empty_requests) == 0), "empty jobs wake workers");
}
