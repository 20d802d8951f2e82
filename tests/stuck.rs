//! R17: workers that hang in a page fault which nobody answers. The job ends all the same, with or without
//! somebody who waits; stand-ins take over; whoever comes back stores nothing; and in the end there are as many
//! workers as there were.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "helpers of tests are tests"
)]

mod common;

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::events;
use common::hooked::{Gate, hooked_memory};
use common::limits::{Limit, become_ordinary_user};
use common::mapped::Mapped;
use common::uffd::{Handler, Userfaultfd};
use common::{
    KIB, MIB, all_zero, assert_exact, bytes, exactly, fill, in_children, is_zero, readable, sum,
    worker_threads,
};
use tracing::Level;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vm_zeroing::{Intent, Job, JobError, Outcome, ThreadKind, ZeroRequest, ZeroingService};

/// The shortest chunk there is: however long one takes, workers take no less.
const CHUNK: u64 = 64 * KIB;

/// Long enough for whatever ends a job by itself.
const LONG_MS: i32 = 60_000;

type Memory = Arc<GuestMemoryMmap<()>>;

fn anonymous(len: u64) -> Memory {
    Arc::new(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), len as usize)]).unwrap())
}

fn service_with(workers: usize) -> ZeroingService {
    exactly(workers).chunk(CHUNK).build().unwrap()
}

/// Memory whose pages nobody brings.
struct Missing {
    memory: Memory,
    len: u64,
    handler: Userfaultfd,
}

impl Missing {
    fn new(len: u64) -> Option<Self> {
        let memory = anonymous(len);
        let base = memory.get_host_address(GuestAddress(0)).unwrap() as u64;
        Some(Self { handler: Userfaultfd::register(base, len)?, memory, len })
    }

    /// Its handler begins to answer, with bytes of its own.
    fn answer_late(self) -> (Answered, Handler) {
        let Self { memory, len, handler } = self;
        (Answered { memory, len }, handler.answer_with(0x5a))
    }
}

struct Answered {
    memory: Memory,
    len: u64,
}

impl Answered {
    /// When the workers have let go of it, it holds what the handler brought.
    fn assert_nothing_was_stored(&self) {
        while Arc::strong_count(&self.memory) > 1 {
            thread::yield_now();
        }
        let found = bytes(&*self.memory, 0, self.len);
        assert!(found.iter().all(|byte| *byte == 0x5a), "stored after the end");
    }
}

/// A job whose only worker stands before a page that nobody brings.
fn stuck(service: &ZeroingService, deadline: Duration) -> Option<(Job, Missing)> {
    let missing = Missing::new(CHUNK)?;
    let request = ZeroRequest::new(&missing.memory).deadline(Instant::now() + deadline);
    let job = service.submit(request).unwrap();
    missing.handler.wait_for_a_fault();
    Some((job, missing))
}

/// The job ends over the heads of its workers, although nobody waits for it.
fn ends_stalled(job: &Job, in_flight: u64) {
    assert!(readable(job.completion_fd().unwrap(), LONG_MS), "nobody was told");
    let error = job.wait().unwrap_err();
    let JobError::Stalled { in_flight_bytes, report } = &error else { panic!("{error}") };
    assert_eq!(*in_flight_bytes, in_flight);
    assert_eq!(sum(report, |outcome| *outcome == Outcome::InFlight), in_flight);
    let shares: u64 = report.workers.iter().map(|share| share.bytes).sum();
    assert_eq!((shares, report.zero_bytes()), (job.progress().done_bytes, shares), "{report:?}");
}

/// Somebody works.
fn works(service: &ZeroingService) {
    for intent in [Intent::Teardown, Intent::Background, Intent::Boot] {
        let memory = anonymous(9 * MIB);
        fill(&*memory, 0, 9 * MIB);
        let job = service.zero(&memory, intent).unwrap();
        assert!(readable(job.completion_fd().unwrap(), LONG_MS), "nobody works any more");
        assert_exact(&*memory, &all_zero(&job), &[(0, 9 * MIB)]);
    }
}

/// Numbers of the workers that there are, once there are so many.
fn workers(service: &ZeroingService, count: usize) -> BTreeSet<u32> {
    loop {
        let threads = service.threads();
        let numbers: Vec<u32> = threads.iter().filter_map(|thread| thread.worker).collect();
        if numbers.len() == count && worker_threads().len() == count {
            assert_eq!(threads.len(), count + 1);
            assert_eq!(threads.iter().filter(|thread| thread.kind == ThreadKind::Watchdog).count(), 1);
            let distinct: BTreeSet<u32> = numbers.into_iter().collect();
            assert_eq!(distinct.len(), count, "each has its own number");
            return distinct;
        }
        thread::yield_now();
    }
}

in_children! {
    the_descriptor_tells_of_a_deadline_that_nobody_waits_for => deadline_child {
        let service = service_with(1);
        let Some((job, missing)) = stuck(&service, Duration::from_millis(200)) else { return };
        ends_stalled(&job, CHUNK);
        let (memory, _handler) = missing.answer_late();
        memory.assert_nothing_was_stored();
    }

    the_descriptor_tells_of_a_cancelling_that_nobody_waits_for => cancel_child {
        let service = service_with(1);
        let Some((job, missing)) = stuck(&service, Duration::from_secs(3600)) else { return };
        job.cancel();
        job.cancel();
        ends_stalled(&job, CHUNK);
        let (memory, _handler) = missing.answer_late();
        memory.assert_nothing_was_stored();
    }

    /// Somebody who waits ends the job, and the stand-in comes all the same.
    a_stuck_worker_is_replaced => replaced_child {
        let service = service_with(1);
        let Some((job, missing)) = stuck(&service, Duration::from_millis(200)) else { return };
        assert!(job.wait().is_err());
        works(&service);
        assert_eq!(workers(&service, 2), BTreeSet::from([0, 1]));
        let (memory, _handler) = missing.answer_late();
        memory.assert_nothing_was_stored();
        assert_eq!(workers(&service, 1), BTreeSet::from([1]), "who was stuck has left");
        works(&service);
    }

    /// Again and again, with the same numbers, and nothing is left of those who left.
    one_after_the_other => one_after_the_other_child {
        let service = service_with(1);
        for turn in 0..6 {
            let Some((job, missing)) = stuck(&service, Duration::from_secs(3600)) else { return };
            job.cancel();
            ends_stalled(&job, CHUNK);
            works(&service);
            let (memory, _handler) = missing.answer_late();
            memory.assert_nothing_was_stored();
            assert_eq!(workers(&service, 1), BTreeSet::from([1 - turn % 2]));
        }
        works(&service);
        drop(service);
        while !worker_threads().is_empty() {
            thread::yield_now();
        }
    }

    /// One job holds all workers up, the stand-ins do the next ones.
    all_of_several_workers => all_of_several_child {
        let service = service_with(4);
        let count = service.workers();
        let Some(missing) = Missing::new(count as u64 * CHUNK) else { return };
        let job = service.zero(&missing.memory, Intent::Teardown).unwrap();
        missing.handler.wait_for_faults(count);
        job.cancel();
        ends_stalled(&job, missing.len);
        works(&service);
        workers(&service, 2 * count);
        let (memory, _handler) = missing.answer_late();
        memory.assert_nothing_was_stored();
        let left = workers(&service, count);
        assert!(left.iter().all(|number| *number as usize >= count), "{left:?}");
        works(&service);
    }

    /// Workers and stand-ins are stuck: whoever comes back first works, whoever it is, and the last one makes the
    /// number what it was.
    more_are_stuck_than_can_be_replaced => more_child {
        for order in [[0, 1, 2], [1, 0, 2], [2, 1, 0], [0, 2, 1]] {
            let service = service_with(1);
            let mut held: Vec<Option<Missing>> = Vec::new();
            for _ in 0..2 {
                let Some((job, missing)) = stuck(&service, Duration::from_secs(3600)) else { return };
                job.cancel();
                ends_stalled(&job, CHUNK);
                held.push(Some(missing));
            }
            // Nobody is left to begin the third: it ends when it is told to, and its bytes are in nobody's hands.
            let third = Missing::new(CHUNK).unwrap();
            let job = service.zero(&third.memory, Intent::Teardown).unwrap();
            job.cancel();
            assert!(job.is_over());
            held.push(Some(third));
            let mut handlers = Vec::new();
            let mut back = 0;
            for which in order {
                let (memory, handler) = held[which].take().unwrap().answer_late();
                handlers.push(handler);
                if which == 2 {
                    continue;
                }
                memory.assert_nothing_was_stored();
                back += 1;
                works(&service);
                workers(&service, if back == 1 { 2 } else { 1 });
            }
            works(&service);
            assert_eq!(workers(&service, 1).len(), 1);
            drop(service);
            while !worker_threads().is_empty() {
                thread::yield_now();
            }
        }
    }

    /// What else lay in the deque of the worker that is stuck is done by whoever stands in.
    the_rest_of_its_deque_is_done => deque_child {
        let service = service_with(1);
        let len = 24 * MIB;
        let gate = Gate::after(2);
        let memory = hooked_memory(len, gate.hook());
        fill(&*memory, 0, len);
        let background = service.zero(&memory, Intent::Background).unwrap();
        gate.wait_for_somebody();
        let Some(missing) = Missing::new(CHUNK) else { return };
        let job = service.zero(&missing.memory, Intent::Boot).unwrap();
        gate.open();
        missing.handler.wait_for_a_fault();
        assert!(!background.is_over());
        job.cancel();
        ends_stalled(&job, CHUNK);
        assert!(readable(background.completion_fd().unwrap(), LONG_MS), "forgotten in the deque");
        assert_exact(&*memory, &all_zero(&background), &[(0, len)]);
        let (memory, _handler) = missing.answer_late();
        memory.assert_nothing_was_stored();
        workers(&service, 1);
    }

    /// A background job that is stuck is ended and replaced like any other.
    background_work => background_child {
        let service = service_with(1);
        let Some(missing) = Missing::new(CHUNK) else { return };
        let job = service.zero(&missing.memory, Intent::Background).unwrap();
        missing.handler.wait_for_a_fault();
        service.set_background_rate(Some(0));
        job.cancel();
        ends_stalled(&job, CHUNK);
        service.set_background_rate(None);
        works(&service);
        let (memory, _handler) = missing.answer_late();
        memory.assert_nothing_was_stored();
        workers(&service, 1);
    }

    /// A worker that is stuck, but whose job goes on, is not replaced: it may only be slow.
    a_slow_handler => slow_child {
        let service = service_with(1);
        let Some((job, missing)) = stuck(&service, Duration::from_secs(3600)) else { return };
        assert!(job.wait_timeout(Duration::from_millis(700)).is_none());
        assert_eq!(workers(&service, 1), BTreeSet::from([0]));
        let memory = Arc::clone(&missing.memory);
        let (_, _handler) = missing.answer_late();
        all_zero(&job);
        assert!(is_zero(&*memory, 0, CHUNK), "what the handler brought is overwritten");
        assert_eq!(workers(&service, 1), BTreeSet::from([0]));
    }

    /// Stand-ins are introduced to the embedder as every thread is. One that it refuses leaves the others as they
    /// are, and whoever was stuck works on when it comes back.
    a_stand_in_that_is_refused => refused_child {
        static REFUSE: AtomicBool = AtomicBool::new(false);
        static CALLS: AtomicUsize = AtomicUsize::new(0);
        let service = exactly(1).chunk(CHUNK);
        let service = service
            .on_thread_start(|info| {
                CALLS.fetch_add(1, Ordering::SeqCst);
                let name = std::fs::read_to_string("/proc/thread-self/comm").unwrap();
                assert!(info.worker.is_none_or(|number| name.trim() == format!("vmz-n0-w{number}")), "{name}");
                if REFUSE.load(Ordering::SeqCst) { Err(io::Error::other("not now")) } else { Ok(()) }
            })
            .build()
            .unwrap();
        assert_eq!(CALLS.load(Ordering::SeqCst), 2, "the worker and the watchdog");
        REFUSE.store(true, Ordering::SeqCst);
        let Some((job, missing)) = stuck(&service, Duration::from_secs(3600)) else { return };
        job.cancel();
        ends_stalled(&job, CHUNK);
        while CALLS.load(Ordering::SeqCst) < 3 {
            thread::yield_now();
        }
        let waiting = anonymous(MIB);
        let next = service.zero(&waiting, Intent::Teardown).unwrap();
        assert_eq!(workers(&service, 1), BTreeSet::from([0]));
        let (memory, _handler) = missing.answer_late();
        memory.assert_nothing_was_stored();
        all_zero(&next);
        // The next time it is let in.
        REFUSE.store(false, Ordering::SeqCst);
        let Some((job, missing)) = stuck(&service, Duration::from_secs(3600)) else { return };
        job.cancel();
        ends_stalled(&job, CHUNK);
        works(&service);
        assert_eq!(CALLS.load(Ordering::SeqCst), 4);
        let (memory, _handler) = missing.answer_late();
        memory.assert_nothing_was_stored();
        assert_eq!(workers(&service, 1), BTreeSet::from([1]));
    }

    /// The host has no thread for a stand-in, and later has one: the service, whose only worker is stuck, works again.
    a_stand_in_that_comes_later => later_child {
        events::collect();
        // An ordinary user may not have one.
        let Some(missing) = Missing::new(CHUNK) else { return };
        let Some(()) = become_ordinary_user() else { return };
        let service = service_with(1);
        let full = Limit::lower(libc::RLIMIT_NPROC, 1);
        let job = service.zero(&missing.memory, Intent::Teardown).unwrap();
        missing.handler.wait_for_a_fault();
        job.cancel();
        ends_stalled(&job, CHUNK);
        while !events::at(Level::WARN).iter().any(|said| said.contains("no stand-in could be started")) {
            thread::yield_now();
        }
        let memory = anonymous(MIB);
        let waiting = service.zero(&memory, Intent::Teardown).unwrap();
        assert_eq!(workers(&service, 1), BTreeSet::from([0]));
        drop(full);
        all_zero(&waiting);
        works(&service);
        let (memory, _handler) = missing.answer_late();
        memory.assert_nothing_was_stored();
        assert_eq!(workers(&service, 1), BTreeSet::from([1]));
    }

    /// Raw memory is kept by the worker that is stuck, although the job is over, its last handle gone and, perhaps,
    /// the service as well; and only until that worker comes back.
    a_host_range_is_kept_alive => host_range_child {
        for service_goes_first in [false, true] {
            let mut service = Some(service_with(1));
            let mapped = Arc::new(Mapped::anonymous(CHUNK));
            let Some(handler) = Userfaultfd::register(mapped.base(), CHUNK) else { return };
            let keep_alive = Arc::new(());
            let range = mapped.host_range_kept_by(0, CHUNK, Arc::clone(&keep_alive) as Arc<_>);
            let job = service.as_ref().unwrap().submit(ZeroRequest::host([range])).unwrap();
            handler.wait_for_a_fault();
            job.cancel();
            let told = job.completion_fd().unwrap().try_clone_to_owned().unwrap();
            drop(job);
            // The last handle waited for the end; whoever ended it may still be on its way to the descriptor.
            assert!(readable(&told, LONG_MS));
            assert!(Arc::strong_count(&keep_alive) > 1, "the kernel may still write there");
            if service_goes_first {
                drop(service.take());
                assert!(Arc::strong_count(&keep_alive) > 1, "the kernel may still write there");
            }
            let _handler = handler.answer_with(0x5a);
            // The worker lets go when it is back, and no service has to go for that.
            while Arc::strong_count(&keep_alive) > 1 {
                thread::yield_now();
            }
            assert!(mapped.holds(0, CHUNK, 0x5a), "stored after the end");
            service.iter().for_each(works);
        }
    }

    /// The service goes while workers are stuck and others stand in for them.
    the_service_goes => the_service_goes_child {
        let service = service_with(2);
        let count = service.workers();
        let Some(missing) = Missing::new(count as u64 * CHUNK) else { return };
        let job = service.zero(&missing.memory, Intent::Teardown).unwrap();
        missing.handler.wait_for_faults(count);
        job.cancel();
        ends_stalled(&job, missing.len);
        works(&service);
        drop(service);
        // Those who stood in were joined; a joined thread may be listed for a moment longer.
        while worker_threads().len() > count {
            thread::yield_now();
        }
        let (memory, _handler) = missing.answer_late();
        memory.assert_nothing_was_stored();
        while !worker_threads().is_empty() {
            thread::yield_now();
        }
    }
}
