//! The rate of background work: it is kept to over any time, 0 is a pause, and it can be changed while jobs run.
//! Cancel, deadline and shutdown end a paused job like any other, and other work does not notice.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::hooked::{Answer, Gate, HookedMemory, hooked_memory};
use common::mapped::Mapped;
use common::{KIB, MIB, all_zero, assert_exact, fill, is_pattern, is_zero, one_node, readable, sum};
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vm_zeroing::{
    FrameTable, Intent, Job, JobError, Outcome, Priority, SectionState, Span, ZeroRequest, ZeroingService,
    ZeroingServiceBuilder,
};

const LEN: u64 = 12 * MIB;
/// Longer than anything here takes on any machine: a job that is not over by then hangs.
const LONG: Duration = Duration::from_secs(60);

/// What fills the bucket to the brim, and so may come at once.
const DEPTH: Duration = Duration::from_millis(5);

fn builder(workers: usize) -> ZeroingServiceBuilder {
    ZeroingService::builder().topology(one_node()).workers_per_node(workers).small_job(0)
}

fn paused(workers: usize) -> ZeroingService {
    builder(workers).background_rate(0).build().unwrap()
}

fn anonymous(len: u64) -> Arc<GuestMemoryMmap<()>> {
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), len as usize)]).unwrap();
    fill(&memory, 0, len);
    Arc::new(memory)
}

/// Memory full of another guest's bytes, and how often workers asked for it.
fn counted(len: u64) -> (Arc<HookedMemory>, Arc<AtomicUsize>) {
    let asked = Arc::new(AtomicUsize::new(0));
    let memory = hooked_memory(len, {
        let asked = Arc::clone(&asked);
        move |_, _| {
            asked.fetch_add(1, Ordering::SeqCst);
            Answer::AsAsked
        }
    });
    fill(&*memory, 0, len);
    (memory, asked)
}

fn in_background(service: &ZeroingService, memory: &Arc<HookedMemory>) -> Job {
    service.zero(memory, Intent::Background).unwrap()
}

/// Ends well, and does not hang.
fn ends(job: &Job) {
    assert!(job.wait_timeout(LONG).unwrap().unwrap().is_all_zero());
}

#[test]
fn a_rate_of_zero_is_a_pause() {
    let service = paused(2);
    assert_eq!(service.background_rate(), Some(0));
    let (memory, asked) = counted(LEN);
    let job = in_background(&service, &memory);
    // Whatever else comes is done by workers that pass the paused job by.
    for intent in [Intent::Boot, Intent::Teardown] {
        let other = anonymous(LEN);
        ends(&service.zero(&other, intent).unwrap());
        assert!(is_zero(&*other, 0, LEN));
    }
    assert!(!job.is_over() && job.wait_timeout(Duration::ZERO).is_none());
    assert_eq!((job.progress().done_bytes, asked.load(Ordering::SeqCst)), (0, 0));
    assert!(is_pattern(&*memory, 0, LEN), "nothing is stored");
    for rate in [Some(u64::MAX), Some(0), None] {
        service.set_background_rate(rate);
        assert_eq!(service.background_rate(), rate);
    }
    ends(&job);
    assert!(is_zero(&*memory, 0, LEN));
}

/// It is the priority that the rate is for, not the intent.
#[test]
fn other_priorities_are_not_held_to_it() {
    let service = paused(1);
    let submit = |intent, priority| {
        let memory = anonymous(LEN);
        let request = ZeroRequest::new(&memory).intent(intent).priority(priority);
        (service.submit(request).unwrap(), memory)
    };
    let (held, memory) = submit(Intent::Boot, Priority::Background);
    for intent in [Intent::Boot, Intent::Teardown, Intent::Background] {
        for priority in [Priority::Urgent, Priority::Normal] {
            ends(&submit(intent, priority).0);
        }
    }
    assert!(!held.is_over() && is_pattern(&*memory, 0, LEN));
    service.set_background_rate(None);
    ends(&held);
}

#[test]
fn a_paused_job_is_cancelled_at_once() {
    let service = paused(2);
    let (memory, asked) = counted(LEN);
    let job = in_background(&service, &memory);
    job.cancel();
    assert!(job.is_over() && readable(job.completion_fd().unwrap(), 0), "nobody has anything of it in hand");
    let error = job.wait().unwrap_err();
    let JobError::Cancelled { report } = &error else { panic!("{error}") };
    assert_exact(&*memory, report, &[(0, LEN)]);
    assert_eq!(sum(report, |outcome| *outcome == Outcome::Untouched), LEN);
    assert_eq!(Arc::strong_count(&memory), 1, "what lies in the queues holds no memory");
    // What is left of it in the queues disturbs nobody.
    service.set_background_rate(None);
    let (other, _) = counted(LEN);
    ends(&in_background(&service, &other));
    assert_eq!(asked.load(Ordering::SeqCst), 0);
}

/// Paused while a worker holds a chunk: that one is finished, and no other is begun.
#[test]
fn a_pause_in_the_middle_takes_effect_at_the_next_chunk() {
    let service = builder(1).chunk(MIB).build().unwrap();
    let gate = Gate::after(2);
    let memory = hooked_memory(LEN, gate.hook());
    fill(&*memory, 0, LEN);
    let job = in_background(&service, &memory);
    gate.wait_for_somebody();
    let one = job.progress().done_bytes;
    assert!(one > 0 && one <= MIB);
    service.set_background_rate(Some(0));
    gate.open();
    // The only worker takes this when it is through with the chunk that it holds.
    ends(&service.zero(&anonymous(MIB), Intent::Teardown).unwrap());
    let two = job.progress().done_bytes;
    assert!(two > one && two <= 2 * MIB);
    ends(&service.zero(&anonymous(MIB), Intent::Teardown).unwrap());
    assert_eq!(job.progress().done_bytes, two);
    assert!(is_zero(&*memory, 0, two) && is_pattern(&*memory, two, LEN - two));
    // Half done, it can be cancelled as well as one that was never begun.
    job.cancel();
    assert!(job.is_over());
    assert_exact(&*memory, job.wait().unwrap_err().report().unwrap(), &[(0, LEN)]);
}

#[test]
fn a_deadline_ends_a_paused_job_for_which_nobody_waits() {
    let service = paused(2);
    let (memory, _) = counted(LEN);
    let request = ZeroRequest::new(&memory).intent(Intent::Background);
    let job = service.submit(request.deadline(Instant::now() + Duration::from_millis(50))).unwrap();
    assert!(readable(job.completion_fd().unwrap(), LONG.as_millis() as i32), "nobody was told");
    let error = job.wait().unwrap_err();
    assert!(matches!(&error, JobError::DeadlinePassed { report } if report.zero_bytes() == 0), "{error}");
    assert!(is_pattern(&*memory, 0, LEN));
}

#[test]
fn a_service_that_goes_ends_its_paused_jobs() {
    let service = paused(2);
    let (memory, _) = counted(LEN);
    let job = in_background(&service, &memory);
    drop(service);
    assert!(job.is_over());
    let error = job.wait().unwrap_err();
    assert!(matches!(&error, JobError::ServiceClosed { report } if report.zero_bytes() == 0), "{error}");
    assert!(is_pattern(&*memory, 0, LEN));
    assert_eq!(Arc::strong_count(&memory), 1);
}

/// The last handle of a job over host ranges cancels it and waits: not as long as the pause.
#[test]
fn a_paused_job_over_host_ranges_can_be_dropped() {
    let service = paused(1);
    let memory = Arc::new(Mapped::anonymous(LEN));
    memory.fill(0, LEN, 0xa5);
    let request = ZeroRequest::host([memory.host_range(0, LEN)]).intent(Intent::Background);
    drop(service.submit(request).unwrap());
    assert_eq!(Arc::strong_count(&memory), 1);
    assert!(memory.holds(0, LEN, 0xa5));
}

/// Raised and lowered while it runs, a job still comes to its end.
#[test]
fn the_rate_is_changed_while_a_job_runs() {
    let service = builder(2).background_rate(MIB).build().unwrap();
    let (memory, _) = counted(LEN);
    let job = in_background(&service, &memory);
    for rate in [Some(0), Some(1), Some(4 * MIB), Some(0), Some(16 * MIB), Some(1 << 40)] {
        service.set_background_rate(rate);
        let seen = job.progress().done_bytes;
        // At rates that take a second a chunk and more, nobody waits for one.
        while !job.is_over() && rate > Some(MIB) && job.progress().done_bytes == seen {
            thread::yield_now();
        }
    }
    ends(&job);
    assert!(is_zero(&*memory, 0, LEN));
}

/// Never more than the rate times the time that has passed, and what may come at once: what fills the bucket, a chunk
/// of each worker, since several may begin one when there is something in it, and another one that was begun before
/// and is told of now.
#[test]
fn no_more_than_the_rate_over_any_time() {
    for (workers, rate, len) in [(1, 64 * MIB, LEN), (2, 100 * MIB, 2 * LEN), (4, 20 * MIB, LEN / 4)] {
        let began = Instant::now();
        let service = builder(workers).background_rate(rate).build().unwrap();
        let memories = [counted(len).0, counted(len).0];
        let jobs = memories.each_ref().map(|memory| in_background(&service, memory));
        let chunk = ((rate as f64 * DEPTH.as_secs_f64()) as u64).max(64 * KIB);
        let at_once = chunk + 2 * service.workers() as u64 * chunk;
        let allowed = |since: Instant| at_once + (rate as f64 * since.elapsed().as_secs_f64()) as u64;
        let done = || jobs.iter().map(|job| job.progress().done_bytes).sum::<u64>();
        // Over all of it, and over any part: from each look to the next ones.
        let (mut since, mut before) = (began, 0);
        while !jobs.iter().all(Job::is_over) {
            // The clock is looked at last, so that whatever comes between speaks for the library.
            let now = done();
            assert!(now <= allowed(began), "{now} bytes with {workers} workers at {rate} a second");
            assert!(now - before <= allowed(since), "{} bytes at once", now - before);
            if since.elapsed() > Duration::from_millis(20) {
                (since, before) = (Instant::now(), done());
            }
            thread::yield_now();
        }
        assert!(done() <= allowed(began));
        jobs.iter().for_each(ends);
        assert!(memories.iter().all(|memory| is_zero(&**memory, 0, len)));
    }
}

/// Thousands of short rests, each of which ends with nobody's help. At rates that are about what one worker clears,
/// a debt is often paid just when the worker looks.
#[test]
fn nobody_oversleeps() {
    let service = builder(1).chunk(64 * KIB).background_rate(0).build().unwrap();
    let (memory, _) = counted(2 * LEN);
    for step in 0..20 {
        service.set_background_rate(Some(((256 * MIB) << (step / 3)) | (step * MIB)));
        let job = in_background(&service, &memory);
        ends(&job);
        assert_eq!(job.wait().unwrap().workers[0].chunks, 2 * LEN / (64 * KIB));
    }
}

/// Chunks are as short as the rate wants them, so that it is kept to evenly.
#[test]
fn a_low_rate_makes_short_chunks() {
    for (rate, longest) in [(16 * MIB, 64 * KIB), (100 * MIB, 512 * KIB)] {
        let service = builder(1).background_rate(rate).build().unwrap();
        let seen = Arc::new(AtomicUsize::new(0));
        let memory = hooked_memory(LEN / 4, {
            let seen = Arc::clone(&seen);
            move |_, len| {
                seen.fetch_max(len, Ordering::SeqCst);
                Answer::AsAsked
            }
        });
        fill(&*memory, 0, LEN / 4);
        ends(&in_background(&service, &memory));
        let seen = seen.load(Ordering::SeqCst) as u64;
        assert!(seen <= longest, "{seen} bytes at once at {rate} a second");
    }
}

/// Without a rate background work goes as fast as it can, and there is none unless it is asked for.
#[test]
fn no_rate_unless_it_is_asked_for() {
    let service = builder(2).build().unwrap();
    assert_eq!(service.background_rate(), None);
    let (memory, _) = counted(LEN);
    ends(&in_background(&service, &memory));
    let asked = builder(2).background_rate(77).build().unwrap();
    assert_eq!(asked.background_rate(), Some(77));
}

/// A frame table's initialisation is background work: paused, it leaves a table that works on demand.
#[test]
fn a_paused_initialisation_of_frames() {
    let service = paused(1);
    let frames = 64 * FrameTable::SECTION_FRAMES;
    let node = service.topology().nodes()[0].id();
    let table = Arc::new(FrameTable::new(&[Span { node, first: 0, frames }]).unwrap());
    let job = service.initialise_frames(&table).unwrap();
    ends(&service.zero(&anonymous(MIB), Intent::Teardown).unwrap());
    assert!(!job.is_over());
    assert_eq!(table.section_state(table.sections() - 1).unwrap(), SectionState::Pending);
    assert!(table.frame(frames - 1).is_ok(), "on demand");
    service.set_background_rate(None);
    assert!(all_zero(&job).total_bytes > 0);
}

/// What is still queued of jobs that were cancelled during a pause keeps neither their memory nor a descriptor.
#[test]
fn jobs_cancelled_during_a_pause_leave_nothing_open() {
    let service = paused(1);
    let (memory, _) = counted(LEN);
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = open();
    for _ in 0..500 {
        in_background(&service, &memory).cancel();
    }
    // Other tests open some meanwhile.
    assert!(open() < before + 250, "{before} descriptors before, {} now", open());
    assert_eq!(Arc::strong_count(&memory), 1);
    service.set_background_rate(None);
    ends(&in_background(&service, &memory));
}
