//! Stopping in the middle: by cancel, by deadline, by dropping the service or the job. What is called zero
//! is zero, what is called untouched was not written, and nothing is written after the end.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use common::hooked::{Answer, Gate, HookedMemory, hooked, hooked_memory, memory_of};
use common::mapped::Mapped;
use common::{
    MIB, PAGE, all_zero, assert_exact, fill, is_pattern, outcome_at, readable, service, service_with, sum,
};
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vm_zeroing::{Intent, Job, JobError, Outcome, Report, ZeroRequest};

const LEN: u64 = 96 * MIB + 3 * PAGE;

/// Memory full of another guest's bytes; workers pass the gate each time they ask for a slice.
fn gated(gate: &Arc<Gate>, longest: &Arc<AtomicUsize>) -> Arc<HookedMemory> {
    let (gate, longest) = (Arc::clone(gate), Arc::clone(longest));
    let memory = hooked_memory(LEN, move |_, len| {
        longest.fetch_max(len, Ordering::SeqCst);
        gate.pass();
        Answer::AsAsked
    });
    fill(&*memory, 0, LEN);
    memory
}

fn untouched(report: &Report) -> u64 {
    sum(report, |outcome| *outcome == Outcome::Untouched)
}

#[test]
fn cancel_stops_every_worker_within_a_chunk() {
    for free in [0, 1, 2, 7, 12] {
        let service = service_with(4);
        let (gate, longest) = (Gate::after(free), Arc::default());
        let memory = gated(&gate, &longest);
        let job = service.zero(&memory, Intent::Teardown).unwrap();
        gate.wait_for_somebody();
        job.cancel();
        let before = job.progress().done_bytes;
        gate.open();
        let error = job.wait().unwrap_err();
        // On a host so busy that nobody came back for half a second it is called stalled.
        let (JobError::Cancelled { report } | JobError::Stalled { report, .. }) = &error else {
            panic!("{error}")
        };
        assert_exact(&*memory, report, &[(0, LEN)]);
        assert!(untouched(report) > 0);
        // Each worker finishes the chunk that it was storing to, and takes no other.
        let most = before + (service.workers() * longest.load(Ordering::SeqCst)) as u64;
        assert!(report.zero_bytes() <= most, "{} > {most}", report.zero_bytes());
        assert_eq!(job.progress().done_bytes, report.zero_bytes());
        // The rest can be had later.
        all_zero(&service.zero(&memory, Intent::Teardown).unwrap());
    }
}

#[test]
fn a_deadline_stops_every_worker_within_a_chunk() {
    let service = service_with(4);
    let deadline = Instant::now() + Duration::from_millis(30);
    let calls = AtomicUsize::new(0);
    let memory = hooked_memory(LEN, move |_, _| {
        // The third slice is handed out when the time is over.
        while calls.fetch_add(1, Ordering::SeqCst) >= 2 && Instant::now() < deadline {
            thread::yield_now();
        }
        Answer::AsAsked
    });
    fill(&*memory, 0, LEN);
    let job = service.submit(ZeroRequest::new(&memory).deadline(deadline)).unwrap();
    // Nobody waits: the workers look at the clock themselves.
    assert!(readable(job.completion_fd().unwrap(), -1));
    let error = job.wait().unwrap_err();
    let (JobError::DeadlinePassed { report } | JobError::Stalled { report, .. }) = &error else {
        panic!("{error}")
    };
    assert_exact(&*memory, report, &[(0, LEN)]);
    assert!(untouched(report) > 0);
}

/// Cancelled at any moment, many times.
#[test]
fn cancel_at_any_moment() {
    let service = service();
    let len = 24 * MIB;
    let memory = Arc::new(GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), len as usize)]).unwrap());
    for turn in 0..40 {
        fill(&*memory, 0, len);
        let job = service.zero(&memory, Intent::Teardown).unwrap();
        while job.progress().done_bytes < turn % 7 * 4 * MIB {
            thread::yield_now();
        }
        job.cancel();
        match job.wait() {
            Ok(report) => assert_exact(&*memory, &report, &[(0, len)]),
            Err(JobError::Cancelled { report }) => assert_exact(&*memory, &report, &[(0, len)]),
            Err(other) => panic!("{other}"),
        }
    }
}

/// A worker stands before a chunk that cannot be made present, and comes back when the job is over.
#[test]
fn nothing_is_stored_after_the_end() {
    let service = service_with(1);
    // One slice to make the chunk present, one to store: the second chunk's first is held up.
    let (gate, longest) = (Gate::after(2), Arc::default());
    let memory = gated(&gate, &longest);
    let job = service.zero(&memory, Intent::Teardown).unwrap();
    gate.wait_for_somebody();
    job.cancel();
    let error = job.wait().unwrap_err();
    let JobError::Stalled { in_flight_bytes, report } = &error else { panic!("{error}") };
    assert!(readable(job.completion_fd().unwrap(), 0));
    assert_eq!(sum(report, |outcome| *outcome == Outcome::InFlight), *in_flight_bytes);
    assert!(*in_flight_bytes > 0 && report.erased_bytes > 0 && untouched(report) > 0);
    assert_exact(&*memory, report, &[(0, LEN)]);
    // Now it comes back. The only worker takes the next job when it has left this one.
    gate.open();
    all_zero(&service.zero(&hooked_memory(PAGE, |_, _| Answer::AsAsked), Intent::Teardown).unwrap());
    assert_exact(&*memory, report, &[(0, LEN)]);
    assert_eq!(job.wait().unwrap_err().report(), Some(report));
    assert_eq!(Arc::strong_count(&memory), 1, "nobody holds it any more");
}

/// R43: dropping the service ends its jobs, whoever waits for them.
#[test]
fn dropping_the_service_in_the_middle() {
    for free in [0, 5, 12] {
        let service = service_with(4);
        let gate = Gate::after(free);
        let memories = [gated(&gate, &Arc::default()), gated(&gate, &Arc::default())];
        let jobs = memories.each_ref().map(|memory| service.zero(memory, Intent::Teardown).unwrap());
        gate.wait_for_somebody();
        let waiter = thread::spawn({
            let job = jobs[0].clone();
            move || job.wait()
        });
        gate.open();
        drop(service);
        for (job, memory) in jobs.iter().zip(&memories) {
            assert!(readable(job.completion_fd().unwrap(), 0) && job.is_over());
            match job.wait() {
                Ok(report) | Err(JobError::ServiceClosed { report } | JobError::Stalled { report, .. }) => {
                    assert_exact(&**memory, &report, &[(0, LEN)]);
                }
                Err(other) => panic!("{other}"),
            }
            assert_eq!(Arc::strong_count(memory), 1);
        }
        assert!(waiter.join().is_ok());
    }
}

/// Workers that do not come back are left behind; when they do, they store nothing.
#[test]
fn dropping_the_service_while_workers_are_stuck() {
    let service = service_with(2);
    let gate = Gate::after(0);
    let stuck: Arc<Mutex<HashSet<i32>>> = Arc::default();
    let memory = {
        let (gate, stuck) = (Arc::clone(&gate), Arc::clone(&stuck));
        memory_of(vec![hooked(0, LEN, move |_, _| {
            #[allow(unsafe_code)]
            // SAFETY: gettid takes nothing and cannot fail.
            stuck.lock().unwrap().insert(unsafe { libc::gettid() });
            gate.pass();
            Answer::AsAsked
        })])
    };
    fill(&*memory, 0, LEN);
    let job = service.zero(&memory, Intent::Teardown).unwrap();
    gate.wait_for_somebody();
    drop(service);
    let error = job.wait().unwrap_err();
    let JobError::Stalled { report, .. } = &error else { panic!("{error}") };
    assert_exact(&*memory, report, &[(0, LEN)]);
    assert!(is_pattern(&*memory, 0, LEN));
    gate.open();
    let gone = |thread: &i32| !std::path::Path::new(&format!("/proc/self/task/{thread}")).exists();
    while !stuck.lock().unwrap().iter().all(gone) {
        thread::yield_now();
    }
    assert!(is_pattern(&*memory, 0, LEN), "a worker stored after the end");
    assert_eq!(Arc::strong_count(&memory), 1, "what it held is free");
}

/// Dropping the last handle of a job over host ranges cancels and waits: the memory may go right after.
#[test]
fn dropping_a_job_over_host_ranges() {
    let service = service();
    for turn in 0..60 {
        let len = 64 * MIB;
        let memory = Mapped::anonymous(len);
        let keep_alive = Arc::new(());
        let range = memory.host_range_kept_by(0, len, keep_alive.clone());
        let job = service.submit(ZeroRequest::host([range])).unwrap();
        let other = job.clone();
        drop(job);
        while other.progress().done_bytes < turn % 4 * 4 * MIB {
            thread::yield_now();
        }
        drop(other);
        assert_eq!(Arc::strong_count(&keep_alive), 1, "let go of at once");
        // A store from here on is a SIGSEGV.
        drop(memory);
    }
}

/// Dropping the handle of a job over guest memory lets it finish: it keeps the memory itself.
#[test]
fn dropping_a_job_over_guest_memory() {
    let service = service_with(1);
    let len = 8 * MIB;
    let file = common::memfd(len);
    let over = |file: &std::fs::File| {
        let file = vm_memory::FileOffset::new(file.try_clone().unwrap(), 0);
        Arc::new(
            GuestMemoryMmap::<()>::from_ranges_with_files([(GuestAddress(0), len as usize, Some(file))])
                .unwrap(),
        )
    };
    let memory = over(&file);
    fill(&*memory, 0, len);
    drop(service.zero(&memory, Intent::Teardown).unwrap());
    drop(memory);
    // The only worker takes the next job when it is through with the first.
    all_zero(&service.zero(&hooked_memory(PAGE, |_, _| Answer::AsAsked), Intent::Teardown).unwrap());
    assert!(common::is_zero(&*over(&file), 0, len));
}

/// A stopped job does not disturb the others.
#[test]
fn other_jobs_go_on() {
    let service = service_with(2);
    let memories = [(), (), ()].map(|()| hooked_memory(16 * MIB, |_, _| Answer::AsAsked));
    memories.iter().for_each(|memory| fill(&**memory, 0, 16 * MIB));
    let jobs: Vec<Job> =
        memories.iter().map(|memory| service.zero(memory, Intent::Teardown).unwrap()).collect();
    jobs[1].cancel();
    all_zero(&jobs[0]);
    all_zero(&jobs[2]);
    if let Err(error) = jobs[1].wait() {
        assert_exact(&*memories[1], error.report().unwrap(), &[(0, 16 * MIB)]);
        assert_ne!(outcome_at(error.report().unwrap(), 0), &Outcome::InFlight);
    }
}
