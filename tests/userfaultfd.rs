//! Memory whose page faults somebody else answers: never (R17), late, no more because it died, or with lies (R48).
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "helpers of tests are tests"
)]

mod common;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use common::hugepages::{HUGE, Hugepages, hugetlb_memfd};
use common::uffd::Userfaultfd;
use common::{
    KIB, MIB, PAGE, all_zero, bytes, fill, is_zero, memfd, one_node, outcome_at, readable, service, sum,
};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vm_zeroing::{Intent, Job, JobError, Outcome, Report, Strategy, Verify, ZeroRequest, ZeroingService};

type Memory = GuestMemoryMmap<()>;

const LEN: u64 = 24 * MIB;
/// The chunk whose pages are missing.
const START: u64 = 8 * MIB;
const MISSING: u64 = 64 * KIB;

/// Workers that take the shortest chunks there are, however long one takes.
fn service_with(workers: usize) -> ZeroingService {
    let builder = ZeroingService::builder().topology(one_node()).workers_per_node(workers);
    builder.small_job(0).chunk(MISSING).build().unwrap()
}

fn memory(len: u64, file: Option<std::fs::File>) -> Arc<Memory> {
    let file = file.map(|file| FileOffset::new(file, 0));
    Arc::new(Memory::from_ranges_with_files([(GuestAddress(0), len as usize, file)]).unwrap())
}

fn base(memory: &Memory) -> u64 {
    memory.get_host_address(GuestAddress(0)).unwrap() as u64
}

/// Memory full of a guest's bytes but for one chunk, whose handler does not answer.
fn with_a_silent_handler() -> Option<(Arc<Memory>, Userfaultfd)> {
    let memory = memory(LEN, None);
    let handler = Userfaultfd::register(base(&memory) + START, MISSING)?;
    fill(&*memory, 0, START);
    fill(&*memory, START + MISSING, LEN - START - MISSING);
    Some((memory, handler))
}

/// How a job ends over the heads of stuck workers: not never.
fn stopped(job: &Job) -> JobError {
    job.wait_timeout(Duration::from_secs(60)).expect("a waiter is freed").unwrap_err()
}

/// What a job that was stopped with one worker stuck says. The missing chunk cannot be read yet.
fn assert_stalled(memory: &Memory, job: &Job) -> Arc<Report> {
    let error = stopped(job);
    let JobError::Stalled { in_flight_bytes, report } = error else { panic!("{error}") };
    assert!(readable(job.completion_fd().unwrap(), 0));
    assert_eq!(in_flight_bytes, sum(&report, |outcome| *outcome == Outcome::InFlight));
    assert_eq!(report.total_bytes, LEN);
    assert_eq!(report.ranges.iter().map(|range| range.len).sum::<u64>(), LEN);
    for at in (0..LEN).step_by(PAGE as usize) {
        let in_flight = (START..START + MISSING).contains(&at);
        match outcome_at(&report, at) {
            Outcome::InFlight => assert!(in_flight, "{at:#x} is in nobody's hands"),
            Outcome::Erased => assert!(!in_flight && is_zero(memory, at, PAGE), "{at:#x}"),
            Outcome::Untouched => assert!(!in_flight && common::is_pattern(memory, at, PAGE), "{at:#x}"),
            other => panic!("{at:#x}: {other:?}"),
        }
    }
    assert_eq!(in_flight_bytes, MISSING);
    report
}

/// Lets the stuck worker go, and waits until it holds the memory no more.
fn answer_late(memory: &Arc<Memory>, handler: Userfaultfd) {
    let _handler = handler.answer_with(0x5a);
    while Arc::strong_count(memory) > 1 {
        thread::yield_now();
    }
    assert!(bytes(&**memory, START, MISSING).iter().all(|byte| *byte == 0x5a), "stored after the end");
}

/// R17: cancelled while a worker stands before a page that nobody brings.
#[test]
fn a_handler_that_has_stopped_and_a_cancelled_job() {
    let service = service_with(2);
    let Some((memory, handler)) = with_a_silent_handler() else { return };
    let job = service.zero(&memory, Intent::Teardown).unwrap();
    handler.wait_for_a_fault();
    if service.workers() > 1 {
        // The other worker does all the rest, and then what else there is.
        while job.progress().done_bytes < LEN - MISSING {
            thread::yield_now();
        }
        let other = self::memory(LEN, None);
        fill(&*other, 0, LEN);
        all_zero(&service.zero(&other, Intent::Teardown).unwrap());
        assert!(is_zero(&*other, 0, LEN));
    }
    job.cancel();
    let report = assert_stalled(&memory, &job);
    assert!(service.workers() == 1 || report.erased_bytes == LEN - MISSING);
    answer_late(&memory, handler);
    assert_eq!(job.wait().unwrap_err().report(), Some(&report), "the report stays as it was");
    // Whoever was stuck works again.
    all_zero(&service.zero(&memory, Intent::Teardown).unwrap());
    assert!(is_zero(&*memory, 0, LEN));
}

/// R17: the deadline ends it, for whoever waits.
#[test]
fn a_handler_that_has_stopped_and_a_deadline() {
    let service = service_with(2);
    let Some((memory, handler)) = with_a_silent_handler() else { return };
    let request = ZeroRequest::new(&memory).deadline(Instant::now() + Duration::from_secs(2));
    let job = service.submit(request).unwrap();
    handler.wait_for_a_fault();
    assert_stalled(&memory, &job);
    answer_late(&memory, handler);
    all_zero(&service.zero(&memory, Intent::Teardown).unwrap());
}

/// R17: every worker is stuck. Waiters are freed, and the pool is of use again once the faults are answered.
#[test]
fn every_worker_is_stuck() {
    let service = service_with(2);
    let memory = memory(LEN, None);
    let Some(handler) = Userfaultfd::register(base(&memory), LEN) else { return };
    let job = service.zero(&memory, Intent::Boot).unwrap();
    handler.wait_for_a_fault();
    job.cancel();
    let error = stopped(&job);
    let JobError::Stalled { in_flight_bytes, report } = &error else { panic!("{error}") };
    assert!(*in_flight_bytes > 0 && report.zero_bytes() == 0);
    let waiting = self::memory(MIB, None);
    fill(&*waiting, 0, MIB);
    let next = service.zero(&waiting, Intent::Teardown).unwrap();
    let handler = handler.answer_with(0x5a);
    all_zero(&next);
    while Arc::strong_count(&memory) > 1 {
        thread::yield_now();
    }
    assert!(bytes(&*memory, 0, LEN).iter().all(|byte| *byte == 0x5a), "stored after the end");
    drop(handler);
}

/// The handler's process dies: the kernel then answers itself, and the job goes on to its end.
#[test]
fn a_handler_that_dies() {
    let service = service_with(2);
    for intent in [Intent::Teardown, Intent::Boot] {
        let Some((memory, handler)) = with_a_silent_handler() else { return };
        let job = service.zero(&memory, intent).unwrap();
        handler.wait_for_a_fault();
        drop(handler);
        let report = all_zero(&job);
        assert_eq!(outcome_at(&report, START), &Outcome::Erased, "handled when the job began: not fresh");
        assert!(is_zero(&*memory, 0, LEN));
    }
}

/// R48: a handler that brings pages full of somebody's bytes. Nothing is fresh, nothing is a hole, all of it is
/// overwritten and reads zero, through the mapping and through the file.
#[test]
fn a_handler_that_lies() {
    let hugepages = Hugepages::reserve(8);
    let service = service();
    let files = [None, Some(memfd(16 * MIB))];
    for file in files {
        for intent in [Intent::Boot, Intent::Teardown, Intent::Background] {
            for strategy in [Strategy::Overwrite, Strategy::Populate] {
                let memory = memory(16 * MIB, file.as_ref().map(|file| file.try_clone().unwrap()));
                if let Some(file) = &file {
                    common::mapped::punch(file, 0, 16 * MIB);
                }
                let Some(handler) = Userfaultfd::register(base(&memory), 16 * MIB) else { return };
                let handler = handler.answer_with(0x5a);
                let request = ZeroRequest::new(&memory).intent(intent).strategy(strategy);
                let report = all_zero(&service.submit(request.verify(Verify::Full)).unwrap());
                assert_eq!((report.erased_bytes, report.reads_zero_bytes), (16 * MIB, 0));
                assert!(is_zero(&*memory, 0, 16 * MIB));
                drop(handler);
                let again = self::memory(16 * MIB, file.as_ref().map(|file| file.try_clone().unwrap()));
                assert!(file.is_none() || is_zero(&*again, 0, 16 * MIB));
            }
        }
    }
    // Hugepages, whose handler answers by the hugepage: here it answers before the job asks.
    if hugepages.is_some() {
        let memory = memory(8 * HUGE, Some(hugetlb_memfd(8)));
        let Some(handler) = Userfaultfd::register(base(&memory), 8 * HUGE) else { return };
        let page = vec![0x5a; HUGE as usize];
        for at in (0..8 * HUGE).step_by(HUGE as usize) {
            handler.answer(base(&memory) + at, &page);
        }
        let report = all_zero(&service.zero(&memory, Intent::Boot).unwrap());
        assert_eq!((report.erased_bytes, report.reads_zero_bytes), (8 * HUGE, 0));
        assert!(is_zero(&*memory, 0, 8 * HUGE));
    }
}
