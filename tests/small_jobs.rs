//! Small jobs are done by the thread that submits them, before `submit` returns and without waking anybody. Whatever
//! might make that thread wait, and whatever others could share, goes to the workers.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::hooked::{Answer, Gate, HookedMemory, hooked, hooked_memory, memory_of};
use common::hugepages::{HUGE, Hugepages, hugetlb_memfd};
use common::limits::never_hang;
use common::mapped::Mapped;
use common::uffd::Userfaultfd;
use common::wakeups::asleep;
use common::{
    KIB, MIB, PAGE, all_zero, assert_exact, exactly, fill, is_child, is_pattern, is_zero, kernel_is_at_least,
    memfd, one_node, readable, run_child, two_nodes,
};
use vm_memory::bitmap::{AtomicBitmap, Bitmap};
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionCollection,
};
#[cfg(feature = "serde")]
use vm_zeroing::Calibration;
use vm_zeroing::{
    Cause, HugepagePool, Intent, Job, JobError, Locality, NodePolicy, Outcome, PageSize, Priority, Quiesced,
    Report, Strategy, Verify, WorkerShare, ZeroRequest, ZeroingService, ZeroingServiceBuilder,
};

const LEN: u64 = 256 * KIB;

/// Whether the kernel tells, without a page fault, that a store would meet a page (`PROCMAP_QUERY`).
fn presence_is_known() -> bool {
    kernel_is_at_least((6, 11), "skipped: that pages are there is not known, so workers do all jobs")
}

type Memory = Arc<GuestMemoryMmap<()>>;

/// As a VMM builds it, but for the nodes of the machine.
fn builder() -> ZeroingServiceBuilder {
    ZeroingService::builder().topology(one_node())
}

fn service() -> ZeroingService {
    builder().build().unwrap()
}

/// Memory that was used, all of it.
fn used(len: u64) -> Memory {
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), len as usize)]).unwrap();
    fill(&memory, 0, len);
    Arc::new(memory)
}

/// Whether the report says that the submitting thread did it all.
fn is_the_callers(report: &Report) -> bool {
    match report.workers.as_slice() {
        [share] if share.worker.is_none() => {
            assert_eq!((share.bytes, report.steals), (report.total_bytes, 0), "{report:?}");
            assert_eq!(share.cpu_time, report.cpu_time);
            true
        }
        shares => {
            assert!(shares.iter().all(|share| share.worker.is_some()), "one or the others: {report:?}");
            false
        }
    }
}

/// Submits; says whether it was done by this thread, and then within `submit`.
fn done_here(service: &ZeroingService, request: ZeroRequest) -> (bool, Job) {
    let job = service.submit(request).unwrap();
    let is_over = job.is_over();
    let here = is_the_callers(&all_zero(&job));
    assert!(is_over || !here, "over when `submit` returns");
    (here, job)
}

#[test]
fn done_within_submit() {
    if !presence_is_known() {
        return;
    }
    let service = service();
    for intent in [Intent::Teardown, Intent::Boot] {
        for strategy in [Strategy::Overwrite, Strategy::Populate] {
            for verify in [Verify::None, Verify::Full] {
                let memory = used(LEN);
                let request = ZeroRequest::new(&memory).intent(intent).strategy(strategy).verify(verify);
                let job = service.submit(request).unwrap();
                assert!(job.is_over() && readable(job.completion_fd().unwrap(), 0));
                assert_eq!(job.progress().done_bytes, LEN);
                let report = all_zero(&job);
                assert!(is_the_callers(&report), "{report:?}");
                assert_exact(&*memory, &report, &[(0, LEN)]);
                assert_eq!((report.erased_bytes, report.node_local_bytes), (LEN, LEN), "{report:?}");
                assert!(report.method.is_some() && report.cpu_time > Duration::ZERO);
                assert_eq!(job.progress_by_node()[0].done_bytes, LEN);
                assert_eq!(Arc::strong_count(&memory), 1);
            }
        }
    }
}

/// Of every shape, kind and priority but one.
#[test]
fn of_any_kind() {
    if !presence_is_known() {
        return;
    }
    let service = service();
    let memory = used(LEN);
    let ranges = [(GuestAddress(5), 3 * PAGE), (GuestAddress(LEN - 77), 77), (GuestAddress(9 * PAGE), 1)];
    let (here, job) = done_here(&service, ZeroRequest::new(&memory).ranges(ranges));
    assert!(here);
    assert_exact(&*memory, &job.wait().unwrap(), &[(5, 3 * PAGE), (9 * PAGE, 1), (LEN - 77, 77)]);

    let mapped = Arc::new(Mapped::anonymous(LEN));
    mapped.fill(0, LEN, 0xa5);
    assert!(done_here(&service, ZeroRequest::host([mapped.host_range(PAGE, LEN - PAGE)])).0);
    assert!(mapped.holds(PAGE, LEN - PAGE, 0) && mapped.holds(0, PAGE, 0xa5));

    let file = FileOffset::new(memfd(LEN), 0);
    let shared = GuestMemoryMmap::from_ranges_with_files([(GuestAddress(0), LEN as usize, Some(file))]);
    let shared: Memory = Arc::new(shared.unwrap());
    for priority in [Priority::Urgent, Priority::Normal] {
        fill(&*shared, 0, LEN);
        assert!(done_here(&service, ZeroRequest::new(&shared).priority(priority)).0);
        assert!(is_zero(&*shared, 0, LEN));
    }
    if let Some(_pages) = Hugepages::reserve(1) {
        let file = FileOffset::new(hugetlb_memfd(1), 0);
        let huge = GuestMemoryMmap::from_ranges_with_files([(GuestAddress(0), HUGE as usize, Some(file))]);
        let huge: Memory = Arc::new(huge.unwrap());
        fill(&*huge, 0, HUGE);
        assert!(done_here(&service, ZeroRequest::new(&huge)).0);
        assert!(is_zero(&*huge, 0, HUGE));
    }
}

/// What was written is marked before anybody can ask (R38).
#[test]
fn pages_are_marked_dirty() {
    if !presence_is_known() {
        return;
    }
    let memory = GuestMemoryMmap::<AtomicBitmap>::from_ranges(&[(GuestAddress(0), LEN as usize)]).unwrap();
    fill(&memory, 0, LEN);
    let memory = Arc::new(memory);
    let bitmap = || memory.iter().next().unwrap().bitmap();
    memory.iter().for_each(|region| (**region).bitmap().reset());
    let request = ZeroRequest::new(&memory).ranges([(GuestAddress(2 * PAGE), 3 * PAGE)]);
    assert!(done_here(&service(), request).0);
    let dirty: Vec<u64> = (0..LEN / PAGE).filter(|page| bitmap().dirty_at((page * PAGE) as usize)).collect();
    assert_eq!(dirty, [2, 3, 4]);
}

/// A lease that is small enough is zero again when `recycle` returns.
#[test]
fn slabs_of_a_pool() {
    if !presence_is_known() {
        return;
    }
    let service = service();
    let node = service.topology().nodes()[0].id();
    let pool = HugepagePool::builder(&service).page_size(PageSize::Base).capacity(node, 4 * LEN);
    let pool = pool.slab_bytes(LEN).build().unwrap();
    let memory =
        pool.lease(LEN, NodePolicy::Any).unwrap().into_memory::<()>([(GuestAddress(0), LEN)]).unwrap();
    fill(&memory, 0, LEN);
    let job = memory.recycle(Quiesced::on_callers_word()).unwrap();
    assert!(job.is_over() && is_the_callers(&all_zero(&job)));
    assert_eq!(pool.usage(node).zero_bytes, 4 * LEN);
}

/// Where the border is, and that there need not be one.
#[test]
fn up_to_a_number_of_bytes() {
    if !presence_is_known() {
        return;
    }
    let by_default = 2 * MIB;
    for (service, most) in [
        (service(), by_default),
        (builder().small_job(3 * PAGE).build().unwrap(), 3 * PAGE),
        (builder().small_job(PAGE + 1).build().unwrap(), PAGE + 1),
        (builder().small_job(5 * MIB).build().unwrap(), 5 * MIB),
        (builder().small_job(0).build().unwrap(), 0),
    ] {
        let memory = used(9 * MIB);
        for len in
            [1, PAGE, PAGE + 1, 3 * PAGE, 3 * PAGE + 1, by_default, by_default + 1, 5 * MIB, 5 * MIB + 1]
        {
            // All regions count.
            let ranges = [(GuestAddress(0), len / 2), (GuestAddress(6 * MIB), len - len / 2)];
            let (here, _) = done_here(&service, ZeroRequest::new(&memory).ranges(ranges));
            assert_eq!(here, len <= most, "{len} of {most}");
        }
    }
}

/// By the calibration, what one worker clears in 200 µs; 4 MiB at most, and 2 MiB where that was not measured.
#[cfg(feature = "serde")]
#[test]
fn up_to_what_takes_200_microseconds() {
    if !presence_is_known() {
        return;
    }
    let saved = serde_json::to_value(builder().calibrate(Duration::ZERO).unwrap()).unwrap();
    for (gb_per_s, most) in [(Some(1.0), 200_000), (Some(92.0), 4 * MIB), (None, 2 * MIB)] {
        let mut saved = saved.clone();
        for choice in saved["choices"].as_array_mut().unwrap() {
            choice["gb_per_s"] = gb_per_s.into();
        }
        let calibration: Calibration = serde_json::from_value(saved).unwrap();
        let service = builder().calibration(calibration.clone()).build().unwrap();
        let other = builder().calibration(calibration).small_job(PAGE).build().unwrap();
        let memory = used(9 * MIB);
        for len in [PAGE, PAGE + 1, 200_000, 200_001, 2 * MIB, 2 * MIB + 1, 4 * MIB, 4 * MIB + 1] {
            let request = || ZeroRequest::new(&memory).ranges([(GuestAddress(0), len)]);
            assert_eq!(done_here(&service, request()).0, len <= most, "{len} at {gb_per_s:?} GB/s");
            assert_eq!(done_here(&other, request()).0, len <= PAGE, "the builder's word goes before");
        }
    }
}

#[test]
fn background_jobs_are_the_workers() {
    if !presence_is_known() {
        return;
    }
    let service = service();
    for (intent, priority) in [
        (Intent::Background, Priority::Background),
        (Intent::Boot, Priority::Background),
        (Intent::Background, Priority::Urgent),
    ] {
        let request = ZeroRequest::new(&used(PAGE)).intent(intent).priority(priority);
        assert_eq!(done_here(&service, request).0, priority != Priority::Background);
    }
}

/// One page of many that would have to be had from the host first: the caller does not wait for it.
#[test]
fn absent_pages_are_the_workers() {
    if !presence_is_known() {
        return;
    }
    let service = service();
    for absent in [0, 7, LEN / PAGE - 1] {
        for intent in [Intent::Boot, Intent::Teardown] {
            let memory: Memory =
                Arc::new(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), LEN as usize)]).unwrap());
            let at = absent * PAGE;
            fill(&*memory, 0, at);
            fill(&*memory, at + PAGE, LEN - at - PAGE);
            assert!(
                !done_here(&service, ZeroRequest::new(&memory).intent(intent)).0,
                "page {absent} is absent"
            );
            assert!(is_zero(&*memory, 0, LEN));
            // What reading brings is the zero page, which is as good as none.
            fill(&*memory, at, PAGE);
            assert!(done_here(&service, ZeroRequest::new(&memory).intent(intent)).0);
        }
    }
}

/// A handler of page faults that does not answer holds a worker up, not the event loop that submits.
#[test]
fn missing_pages_of_a_userfaultfd_are_the_workers() {
    if !presence_is_known() {
        return;
    }
    run_child("missing_pages_of_a_userfaultfd_child");
}

#[test]
#[ignore = "a part of missing_pages_of_a_userfaultfd_are_the_workers"]
fn missing_pages_of_a_userfaultfd_child() {
    if !is_child() {
        return;
    }
    never_hang();
    let service = service();
    let memory: Memory = Arc::new(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), LEN as usize)]).unwrap());
    let base = memory.get_host_address(GuestAddress(0)).unwrap() as u64;
    let Some(handler) = Userfaultfd::register(base, LEN) else { return };
    let job = service.zero(&memory, Intent::Teardown).unwrap();
    assert!(!job.is_over());
    handler.wait_for_a_fault();
    // Meanwhile others are done here, though a worker is held up.
    assert!(done_here(&service, ZeroRequest::new(&used(LEN))).0);
    let _handler = handler.answer_with(0x5a);
    assert!(!is_the_callers(&all_zero(&job)));
}

/// The later ones of a burst are shared out; whoever waits, or forgets, begins anew.
#[test]
fn the_later_ones_of_a_burst_are_the_workers() {
    if !presence_is_known() {
        return;
    }
    let service = service();
    let submit = || service.zero(&used(LEN), Intent::Teardown).unwrap();
    let is_here = |job: &Job| is_the_callers(&all_zero(job));
    let burst: Vec<Job> = (0..4).map(|_| submit()).collect();
    // Looking is not asking.
    assert!(readable(burst[0].completion_fd().unwrap(), 0) && burst[0].progress().done_bytes == LEN);
    let fifth = submit();
    let here: Vec<bool> = burst.iter().rev().chain([&fifth]).map(is_here).collect();
    assert_eq!(here, [false, false, false, true, false]);

    let waited = submit();
    assert!(is_here(&waited) && is_here(&submit()), "the one before was waited for");
    let looked_at = submit();
    assert!(looked_at.wait_timeout(Duration::ZERO).unwrap().is_ok());
    assert!(is_here(&submit()), "that was waiting as well");
    let (forgotten, other) = (submit(), submit());
    let handle = forgotten.clone();
    drop(forgotten);
    assert!(!is_here(&submit()), "somebody may still ask");
    drop(handle);
    assert!(is_here(&submit()), "nobody can ask any more");
    assert!(!is_here(&other));
    // One that failed counts as one that was waited for, too.
    let late = service.submit(ZeroRequest::new(&used(LEN)).deadline(Instant::now())).unwrap();
    assert!(late.wait().is_err() && is_here(&submit()));
}

/// Each thread that submits does its own, as long as nobody else's is open.
#[test]
fn from_many_threads() {
    if !presence_is_known() {
        return;
    }
    let service = service();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    let memory = used(LEN);
                    done_here(&service, ZeroRequest::new(&memory));
                    assert!(is_zero(&*memory, 0, LEN));
                }
            });
        }
    });
    assert!(done_here(&service, ZeroRequest::new(&used(LEN))).0, "all of them were waited for");
}

/// Workers that are busy are none of its business.
#[test]
fn nobody_else_need_be_free() {
    if !presence_is_known() {
        return;
    }
    let service = exactly(1).small_job(MIB).build().unwrap();
    let gate = Gate::after(0);
    let held_up = hooked_memory(2 * MIB, gate.hook());
    let job = service.zero(&held_up, Intent::Teardown).unwrap();
    gate.wait_for_somebody();
    assert!(done_here(&service, ZeroRequest::new(&used(LEN))).0);
    gate.open();
    all_zero(&job);
}

/// A caller sits on any node: where only workers of a page's node may clear it, it does not.
#[test]
fn local_only_is_kept_to() {
    if !presence_is_known() {
        return;
    }
    let on = |topology, locality| {
        let service = ZeroingService::builder().topology(topology).locality(locality).build().unwrap();
        done_here(&service, ZeroRequest::new(&used(LEN))).0
    };
    assert!(on(one_node(), Locality::LocalOnly), "there is no other node");
    assert!(on(two_nodes(), Locality::PreferLocal));
    assert!(!on(two_nodes(), Locality::LocalOnly));
}

#[test]
fn a_deadline_in_the_past() {
    if !presence_is_known() {
        return;
    }
    let service = service();
    let memory = used(LEN);
    let job = service.submit(ZeroRequest::new(&memory).deadline(Instant::now())).unwrap();
    assert!(job.is_over());
    let error = job.wait().unwrap_err();
    let JobError::DeadlinePassed { report } = &error else { panic!("{error}") };
    assert_eq!((report.zero_bytes(), report.workers.len()), (0, 0));
    assert!(is_pattern(&*memory, 0, LEN));
}

/// A memory object that panics when it is asked for the `nth` time since it was told to.
fn panics(nth: usize) -> (Arc<HookedMemory>, Arc<AtomicBool>) {
    let (armed, calls) = (Arc::new(AtomicBool::new(false)), AtomicUsize::new(0));
    let mut region = hooked(0, LEN, {
        let armed = Arc::clone(&armed);
        move |_, len| {
            // Planning looks at the first byte only; the library does the rest with all of it.
            let counts = armed.load(Ordering::SeqCst) && len == LEN as usize;
            assert!(!counts || calls.fetch_add(1, Ordering::SeqCst) < nth, "this panic is part of the test");
            Answer::AsAsked
        }
    });
    region.on_all_threads = true;
    let memory = memory_of(vec![region]);
    fill(&*memory, 0, LEN);
    (memory, armed)
}

/// A memory object that panics, wherever it is asked: the job fails, `submit` returns, and the service goes on.
#[test]
fn a_memory_object_that_panics() {
    if !presence_is_known() {
        return;
    }
    let service = service();
    // While it is made ready, and while it is cleared.
    for nth in 0..2 {
        let (memory, armed) = panics(nth);
        armed.store(true, Ordering::SeqCst);
        let job = service.zero(&memory, Intent::Teardown).unwrap();
        assert!(readable(job.completion_fd().unwrap(), 60_000));
        let error = job.wait().unwrap_err();
        let JobError::Failed { cause: Cause::Panicked, report, .. } = &error else { panic!("{error}") };
        armed.store(false, Ordering::SeqCst);
        assert_eq!(report.ranges[0].outcome, Outcome::Failed(Cause::Panicked));
        assert_exact(&*memory, report, &[(0, LEN)]);
        assert!(is_pattern(&*memory, 0, LEN));
        assert_eq!((Arc::strong_count(&memory), report.workers[0].worker), (1, None));
        assert!(done_here(&service, ZeroRequest::new(&used(LEN))).0);
    }
}

/// A file that is too short, found out by the caller's thread as by a worker: no signal, an exact report.
#[test]
fn a_truncated_file() {
    if !presence_is_known() {
        return;
    }
    let service = service();
    let file = memfd(LEN);
    let backing = FileOffset::new(file.try_clone().unwrap(), 0);
    let memory = GuestMemoryMmap::from_ranges_with_files([(GuestAddress(0), LEN as usize, Some(backing))]);
    let memory: Memory = Arc::new(memory.unwrap());
    fill(&*memory, 0, LEN);
    file.set_len(LEN / 2).unwrap();
    let error = service.zero(&memory, Intent::Teardown).unwrap().wait().unwrap_err();
    let JobError::Failed { cause: Cause::Truncated, report, .. } = &error else { panic!("{error}") };
    assert_eq!((report.zero_bytes(), is_zero(&*memory, 0, LEN / 2)), (LEN / 2, true));
}

#[test]
fn no_worker_is_woken() {
    if !presence_is_known() {
        return;
    }
    run_child("no_worker_is_woken_child");
}

/// In a process of its own, so that other tests' workers are not counted.
#[test]
#[ignore = "a part of no_worker_is_woken"]
fn no_worker_is_woken_child() {
    if !is_child() {
        return;
    }
    let service = service();
    let woken = |len| {
        let memory = used(len);
        let before = asleep();
        for _ in 0..50 {
            all_zero(&service.zero(&memory, Intent::Teardown).unwrap());
        }
        asleep() - before
    };
    assert!(woken(4 * MIB) > 0, "the measure measures");
    // A worker on its way to bed may still be counted, but not every time.
    assert!((0..20).any(|_| woken(LEN) == 0), "small jobs wake workers");
}

/// Regions count together, and one that is not ready is enough.
#[test]
fn several_regions() {
    if !presence_is_known() {
        return;
    }
    let service = service();
    let regions = |number: u64, filled: bool| {
        let memory =
            memory_of((0..number).map(|at| hooked(at * 2 * PAGE, PAGE, |_, _| Answer::AsAsked)).collect());
        for at in (0..number).filter(|at| filled || *at != number / 2) {
            fill(&*memory, at * 2 * PAGE, PAGE);
        }
        memory
    };
    for number in [1, 2, 40] {
        assert!(done_here(&service, ZeroRequest::new(&regions(number, true))).0);
    }
    // What has to be had first is left to the workers, from there on.
    let report = all_zero(&service.submit(ZeroRequest::new(&regions(3, false))).unwrap());
    let shares = |such: fn(&WorkerShare) -> bool| report.workers.iter().filter(|share| such(share)).count();
    assert_eq!(shares(|share| share.worker.is_none() && share.bytes == PAGE), 1, "{report:?}");
    assert!(shares(|share| share.worker.is_some()) > 0, "{report:?}");
    let no_regions = Arc::new(GuestRegionCollection::<vm_memory::GuestRegionMmap<()>>::new());
    let job = service.submit(ZeroRequest::new(&no_regions)).unwrap();
    assert!(job.is_over() && all_zero(&job).workers.is_empty(), "nobody did nothing");
}
