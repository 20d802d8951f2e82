//! R43: the end of a service, in the middle of whatever: in bounded time, every job told and exact, no thread left, no
//! memory held. Who is stuck is reported and left behind. Handles go on to answer.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use common::events;
use common::hooked::{Gate, hooked_memory};
use common::mapped::Mapped;
use common::uffd::Userfaultfd;
use common::{
    KIB, MIB, PAGE, assert_exact, bytes, exactly, fill, in_children, is_pattern, is_zero, readable, sum,
    worker_threads,
};
use tracing::Level;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vm_zeroing::{
    HugepagePool, Intent, Job, JobError, NodePolicy, Outcome, PageSize, Priority, Quiesced, RecycleError,
    Report, RequestError, ZeroRequest, ZeroingService,
};

type Memory = Arc<GuestMemoryMmap<()>>;

fn anonymous(len: u64) -> Memory {
    Arc::new(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), len as usize)]).unwrap())
}

fn used(len: u64) -> Memory {
    let memory = anonymous(len);
    fill(&*memory, 0, len);
    memory
}

fn until_no_worker_is_left() {
    // A joined thread may be listed for a moment longer.
    while !worker_threads().is_empty() {
        thread::yield_now();
    }
}

/// The account of a job whose service was dropped, however it went.
fn account(job: &Job) -> Arc<Report> {
    assert!(job.is_over() && readable(job.completion_fd().unwrap(), 0));
    match job.wait() {
        Ok(report) | Err(JobError::ServiceClosed { report } | JobError::Stalled { report, .. }) => report,
        Err(other) => panic!("{other}"),
    }
}

in_children! {
    /// 1 GiB, or what the machine has to spare.
    in_the_middle_of_a_long_job => long_job_child {
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
        let available = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:")).unwrap();
        let available: u64 = available.trim().trim_end_matches(" kB").parse().unwrap();
        let len = (available / 3 * KIB).min(1 << 30) / MIB * MIB;
        let memory = used(len);
        let mut stopped = false;
        for turn in 0..6 {
            let service = exactly(2).build().unwrap();
            let job = service.zero(&memory, Intent::Teardown).unwrap();
            while job.progress().done_bytes < turn * len / 64 {
                thread::yield_now();
            }
            drop(service);
            let report = account(&job);
            assert_exact(&*memory, &report, &[(0, len)]);
            stopped |= sum(&report, |outcome| *outcome == Outcome::Untouched) > 0;
            until_no_worker_is_left();
            assert_eq!(Arc::strong_count(&memory), 1, "nobody holds it any more");
            for range in report.ranges.iter().filter(|range| range.outcome.is_zero()) {
                fill(&*memory, range.start, range.len);
            }
        }
        assert!(stopped, "never in the middle");
    }

    /// Thousands that nobody came to.
    with_a_long_queue => long_queue_child {
        let service = exactly(2).build().unwrap();
        let gate = Gate::after(0);
        let memory = hooked_memory(PAGE, gate.hook());
        let held = [(); 2].map(|()| service.zero(&memory, Intent::Boot).unwrap());
        gate.wait_for_somebody();
        let queued = used(8 * MIB);
        let jobs: Vec<Job> = (0..3000)
            .map(|number| {
                let request = ZeroRequest::new(&queued).priority(Priority::ALL[number % 3]);
                service.submit(request.ranges([(GuestAddress(0), 8 * MIB)])).unwrap()
            })
            .collect();
        let dropper = thread::spawn(move || drop(service));
        // They end before the workers are waited for. A process may have a thousand descriptors, as a rule.
        jobs.iter().step_by(10).for_each(|job| assert!(readable(job.completion_fd().unwrap(), -1)));
        for job in &jobs {
            while !job.is_over() {
                thread::yield_now();
            }
        }
        gate.open();
        dropper.join().unwrap();
        for job in &jobs {
            let error = job.wait().unwrap_err();
            let JobError::ServiceClosed { report } = &error else { panic!("{error}") };
            assert_eq!((report.zero_bytes(), report.ranges.len()), (0, 1));
        }
        held.iter().for_each(|job| drop(account(job)));
        assert!(is_pattern(&*queued, 0, 8 * MIB));
        assert_eq!(Arc::strong_count(&queued), 1);
        until_no_worker_is_left();
    }

    /// A worker stands before a page that nobody brings: said, left behind, and it stores nothing when it comes back.
    while_a_worker_is_stuck => stuck_child {
        events::collect();
        let service = exactly(2).build().unwrap();
        let memory = anonymous(8 * MIB);
        let base = memory.get_host_address(GuestAddress(0)).unwrap() as u64;
        let Some(handler) = Userfaultfd::register(base, 8 * MIB) else { return };
        let job = service.zero(&memory, Intent::Teardown).unwrap();
        handler.wait_for_faults(2);
        drop(service);
        assert!(job.is_over());
        let error = job.wait().unwrap_err();
        let JobError::Stalled { in_flight_bytes, report } = &error else { panic!("{error}") };
        assert_eq!((*in_flight_bytes, report.zero_bytes()), (8 * MIB, 0));
        let said = events::at(Level::WARN);
        for number in [0, 1] {
            let thread = format!("vmz-n0-w{number}");
            let reported = said.iter().filter(|said| said.contains(&thread) && said.contains("left behind"));
            assert_eq!(reported.count(), 1, "{said:#?}");
        }
        assert_eq!(events::at(Level::ERROR), Vec::<String>::new());
        assert_eq!(worker_threads().len(), 2);
        let handler = handler.answer_with(0x5a);
        until_no_worker_is_left();
        assert!(bytes(&*memory, 0, 8 * MIB).iter().all(|byte| *byte == 0x5a), "stored after the end");
        assert_eq!(Arc::strong_count(&memory), 1);
        drop(handler);
    }

    /// A worker is held up where it stores. The job cannot end before that store does, and the service does not wait
    /// for it; what else was asked for is over.
    while_a_store_is_stuck => stuck_store_child {
        events::collect();
        let service = exactly(1).chunk(4 * MIB).build().unwrap();
        // One slice to make the chunk ready; the second, to store, is not handed out.
        let gate = Gate::after(1);
        let memory = hooked_memory(16 * MIB, gate.hook());
        fill(&*memory, 0, 16 * MIB);
        let job = service.zero(&memory, Intent::Teardown).unwrap();
        gate.wait_for_somebody();
        let queued = used(MIB);
        let queued_job = service.zero(&queued, Intent::Teardown).unwrap();
        drop(service);
        assert!(queued_job.is_over() && is_pattern(&*queued, 0, MIB));
        assert!(matches!(queued_job.wait(), Err(JobError::ServiceClosed { .. })));
        job.cancel();
        assert!(!job.is_over() && !readable(job.completion_fd().unwrap(), 0), "ended while a worker stored");
        assert!(job.wait_timeout(Duration::ZERO).is_none());
        let (warned, failed) = (events::at(Level::WARN), events::at(Level::ERROR));
        assert!(warned.len() == 1 && warned[0].contains("vmz-n0-w0") && warned[0].contains("left behind"), "{warned:#?}");
        assert!(failed.len() == 1 && failed[0].contains("a job's store is stuck"), "{failed:#?}");
        assert!(is_pattern(&*memory, 0, 16 * MIB));
        gate.open();
        assert!(readable(job.completion_fd().unwrap(), 60_000), "it ends when the store does");
        let error = job.wait().unwrap_err();
        let JobError::ServiceClosed { report } = &error else { panic!("{error}") };
        assert_eq!((report.erased_bytes, report.zero_bytes()), (4 * MIB, 4 * MIB));
        until_no_worker_is_left();
        assert_exact(&*memory, report, &[(0, 16 * MIB)]);
        assert_eq!(Arc::strong_count(&memory), 1);
    }

    /// The watchdog ends a job whose memory owns the service: it cannot wait for itself, and yet all of them go.
    memory_that_owns_the_service_and_is_let_go_of_by_the_watchdog => by_the_watchdog_child {
        struct Keeper(Arc<Mutex<Option<ZeroingService>>>);
        impl Drop for Keeper {
            fn drop(&mut self) {
                let service = self.0.lock().unwrap().take();
                drop(service);
            }
        }
        events::collect();
        let service = exactly(2).background_rate(0).build().unwrap();
        let mapped = Arc::new(Mapped::anonymous(MIB));
        mapped.fill(0, MIB, 0xa5);
        let owned = Arc::new(Mutex::new(None));
        let range = mapped.host_range_kept_by(0, MIB, Arc::new((Arc::clone(&mapped), Keeper(Arc::clone(&owned)))));
        let request = ZeroRequest::host([range]).intent(Intent::Background);
        let job = {
            let mut place = owned.lock().unwrap();
            let deadline = Instant::now() + Duration::from_millis(100);
            let job = service.submit(request.deadline(deadline)).unwrap();
            *place = Some(service);
            job
        };
        assert!(readable(job.completion_fd().unwrap(), 60_000));
        assert!(matches!(job.wait(), Err(JobError::DeadlinePassed { .. })));
        assert!(mapped.holds(0, MIB, 0xa5));
        let is_ours = |name: &str| name.starts_with("vmz-");
        let ours = || {
            let tasks = std::fs::read_dir("/proc/self/task").unwrap().filter_map(|task| {
                std::fs::read_to_string(task.ok()?.path().join("comm")).ok()
            });
            tasks.filter(|name| is_ours(name)).count()
        };
        while ours() > 0 {
            thread::yield_now();
        }
        let said = events::at(Level::WARN);
        assert!(said.iter().all(|said| !said.contains("left behind")), "nobody was stuck: {said:#?}");
    }

    /// Pools go on to hold the service's core: whatever they ask for while it goes is either done, or stopped and told,
    /// or refused.
    while_others_submit => while_others_submit_child {
        for turn in 0..10 {
            let service = exactly(2).small_job(64 * KIB).build().unwrap();
            let node = service.topology().nodes()[0].id();
            let pool = HugepagePool::builder(&service).page_size(PageSize::Base).capacity(node, 16 * MIB);
            let pool = Arc::new(pool.slab_bytes(64 * KIB).build().unwrap());
            let cycles = Arc::new(AtomicU64::new(0));
            let users: Vec<_> = (0..3)
                .map(|number| {
                    let (pool, cycles) = (Arc::clone(&pool), Arc::clone(&cycles));
                    let len = (number + 1) * 64 * KIB;
                    thread::spawn(move || {
                        loop {
                            let Ok(lease) = pool.lease(len, NodePolicy::Any) else { thread::yield_now(); continue };
                            let memory = lease.into_memory::<()>([(GuestAddress(0), len)]).unwrap();
                            assert!(is_zero(&memory, 0, len), "lent what was not zero");
                            fill(&memory, 0, len);
                            match memory.recycle(Quiesced::on_callers_word()) {
                                Ok(job) => drop(job.wait()),
                                Err(failure) => {
                                    assert!(matches!(
                                        failure.error,
                                        RecycleError::Request(RequestError::Closed)
                                    ));
                                    return;
                                }
                            }
                            cycles.fetch_add(1, Ordering::SeqCst);
                        }
                    })
                })
                .collect();
            while cycles.load(Ordering::SeqCst) < 10 + turn {
                thread::yield_now();
            }
            drop(service);
            users.into_iter().for_each(|user| user.join().unwrap());
            assert!(matches!(pool.zero_stale(), Err(RequestError::Closed)));
            until_no_worker_is_left();
        }
    }

    /// Services come and go under jobs of all kinds that are waited for, cancelled, forgotten, paused and stolen. For
    /// the sanitizers, too.
    a_bounded_churn => churn_child {
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = move |below: u64| {
            // xorshift64: any sequence does.
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % below
        };
        let memories: Vec<Memory> = (0..4).map(|number| used((number + 1) * 3 * MIB)).collect();
        for _ in 0..40 {
            let builder = exactly(1 + next(4) as usize).chunk((64 * KIB) << next(4)).small_job(next(2) * MIB);
            let service = builder.build().unwrap();
            let mut jobs: Vec<Job> = Vec::new();
            for _ in 0..next(40) {
                let memory = &memories[next(4) as usize];
                let len = 1 + next(3 * MIB);
                let mut request = ZeroRequest::new(memory)
                    .priority(Priority::ALL[next(3) as usize])
                    .ranges([(GuestAddress(next(3 * MIB - len + 1)), len)]);
                if next(5) == 0 {
                    request = request.deadline(Instant::now() + Duration::from_micros(next(2000)));
                }
                let job = service.submit(request).unwrap();
                match next(6) {
                    0 => job.cancel(),
                    1 => {
                        service.set_background_rate(None);
                        drop(job.wait());
                    }
                    2 => service.set_background_rate([None, Some(0), Some(next(1 << 32))][next(3) as usize]),
                    3 => continue,
                    _ => {}
                }
                jobs.push(job);
            }
            if next(2) == 0 {
                service.set_background_rate(None);
                jobs.iter().for_each(|job| drop(job.wait()));
            }
            drop(service);
            for job in &jobs {
                assert!(job.is_over() && readable(job.completion_fd().unwrap(), 0));
                let report = match job.wait() {
                    Ok(report) => report,
                    Err(error) => Arc::clone(error.report().unwrap()),
                };
                assert_eq!(report.ranges.iter().map(|range| range.len).sum::<u64>(), report.total_bytes);
                assert_eq!(report.workers.iter().map(|share| share.bytes).sum::<u64>(), job.progress().done_bytes);
            }
        }
        until_no_worker_is_left();
        assert!(memories.iter().all(|memory| Arc::strong_count(memory) == 1));
    }
}

/// What handles answer when their service is gone.
#[test]
fn handles_outlive_the_service() {
    let (memory, paused) = (used(4 * MIB), used(4 * MIB));
    let service = exactly(2).background_rate(0).build().unwrap();
    let done = service.zero(&memory, Intent::Teardown).unwrap();
    let before = done.wait().unwrap();
    let stopped = service.zero(&paused, Intent::Background).unwrap();
    let clone = stopped.clone();
    drop(service);
    for (job, bytes) in [(&done, 4 * MIB), (&stopped, 0), (&clone, 0)] {
        job.cancel();
        assert!(job.is_over() && readable(job.completion_fd().unwrap(), 0));
        assert_eq!((job.progress().done_bytes, job.progress().total_bytes), (bytes, 4 * MIB));
        assert_eq!(job.progress_by_node().iter().map(|on| on.done_bytes).sum::<u64>(), bytes);
        assert_eq!(job.wait_timeout(Duration::ZERO).unwrap().is_ok(), bytes > 0);
        assert_eq!(job.wait().is_ok(), bytes > 0);
    }
    assert_eq!(done.wait().unwrap(), before);
    assert!(matches!(stopped.wait(), Err(JobError::ServiceClosed { report }) if report.zero_bytes() == 0));
    assert!(is_zero(&*memory, 0, 4 * MIB) && is_pattern(&*paused, 0, 4 * MIB));
}
