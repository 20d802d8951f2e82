//! A service without threads: every job is done by the thread that submits it, before `submit` returns.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use common::files::truncated;
use common::hooked::{Answer, HookedMemory, hooked, memory_of};
use common::mapped::Mapped;
use common::{
    KIB, MIB, PAGE, all_zero, assert_exact, fill, is_child, is_pattern, is_zero, one_node, readable,
    run_child, sum, two_nodes,
};
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vm_zeroing::{
    Cause, FrameTable, HugepagePool, Intent, Job, JobError, LeaseError, Locality, NodeId, NodePolicy,
    Outcome, PageSize, Priority, Quiesced, RecycleError, RequestError, Span, Strategy, Topology, Verify,
    ZeroRequest, ZeroingService, ZeroingServiceBuilder,
};

const LEN: u64 = 9 * MIB + 3 * PAGE;

type Memory = Arc<GuestMemoryMmap<()>>;

fn builder(topology: Topology) -> ZeroingServiceBuilder {
    ZeroingService::builder().topology(topology).workers_per_node(0)
}

fn service() -> ZeroingService {
    builder(one_node()).build().unwrap()
}

fn fresh(len: u64) -> Memory {
    Arc::new(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), len as usize)]).unwrap())
}

fn used(len: u64) -> Memory {
    let memory = fresh(len);
    fill(&*memory, 0, len);
    memory
}

/// Over when it was submitted, by the caller's hands.
fn assert_done_here(job: &Job) {
    assert!(job.is_over() && readable(job.completion_fd().unwrap(), 0));
    let report = all_zero(job);
    assert_eq!((report.workers.len(), report.workers[0].worker), (1, None), "{report:?}");
    assert_eq!((report.workers[0].bytes, report.steals), (report.total_bytes, 0));
    assert_eq!(job.progress().done_bytes, report.total_bytes);
}

/// Memory full of another guest's bytes whose hook is called on any thread.
fn watched(
    len: u64,
    hook: impl Fn(u64, usize) -> Answer + Send + Sync + 'static,
) -> (Arc<HookedMemory>, Arc<AtomicBool>) {
    let armed = Arc::new(AtomicBool::new(false));
    let mut region = hooked(0, len, {
        let armed = Arc::clone(&armed);
        move |offset, count| if armed.load(Ordering::SeqCst) { hook(offset, count) } else { Answer::AsAsked }
    });
    region.on_all_threads = true;
    let memory = memory_of(vec![region]);
    fill(&*memory, 0, len);
    (memory, armed)
}

#[test]
fn no_thread_is_started() {
    run_child("no_thread_is_started_child");
}

#[test]
#[ignore = "a part of no_thread_is_started"]
fn no_thread_is_started_child() {
    if !is_child() {
        return;
    }
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let before = threads();
    let service = ZeroingService::builder()
        .workers_per_node(0)
        .on_thread_start(|info| panic!("no thread of ours: {info:?}"))
        .build()
        .unwrap();
    assert_eq!((service.workers(), service.threads().len(), threads()), (0, 0, before));
    assert_done_here(&service.zero(&used(LEN), Intent::Teardown).unwrap());
    assert_eq!(threads(), before);
}

#[test]
fn every_intent_strategy_and_verification() {
    let service = service();
    for intent in [Intent::Boot, Intent::Teardown, Intent::Background] {
        for strategy in [Strategy::Overwrite, Strategy::Populate] {
            for verify in [Verify::None, Verify::Full] {
                let memory = fresh(LEN);
                fill(&*memory, 2 * MIB, 5 * MIB);
                let request = ZeroRequest::new(&memory).intent(intent).strategy(strategy).verify(verify);
                let job = service.submit(request).unwrap();
                assert_done_here(&job);
                assert!(all_zero(&job).erased_bytes >= 5 * MIB);
                assert_exact(&*memory, &all_zero(&job), &[(0, LEN)]);
                assert_eq!(Arc::strong_count(&memory), 1);
            }
        }
    }
}

/// First to last, in chunks that are looked at like a worker's.
#[test]
fn in_ascending_order_by_chunks() {
    let service = builder(one_node()).chunk(MIB).build().unwrap();
    let log = Arc::new(Mutex::new(Vec::new()));
    let (memory, armed) = watched(LEN, {
        let log = Arc::clone(&log);
        move |offset, len| {
            log.lock().unwrap().push((offset, len as u64));
            Answer::AsAsked
        }
    });
    let ranges = [(GuestAddress(0), 3 * MIB), (GuestAddress(4 * MIB), 5 * MIB)];
    armed.store(true, Ordering::SeqCst);
    let job = service.submit(ZeroRequest::new(&memory).ranges(ranges)).unwrap();
    armed.store(false, Ordering::SeqCst);
    assert_done_here(&job);
    let mut log = log.lock().unwrap().clone();
    // The first byte of each range is looked at when it is planned.
    log.retain(|(_, len)| *len > 1);
    log.dedup();
    assert!(log.is_sorted() && log.iter().all(|(_, len)| *len <= MIB), "{log:?}");
    assert_eq!(log.iter().map(|(_, len)| len).sum::<u64>(), 8 * MIB);
}

#[test]
fn host_ranges() {
    let service = service();
    let memory = Arc::new(Mapped::anonymous(LEN));
    memory.fill(0, LEN, 0xa5);
    let job = service.submit(ZeroRequest::host([memory.host_range(PAGE, LEN - 2 * PAGE)])).unwrap();
    assert_done_here(&job);
    drop(job);
    assert_eq!(Arc::strong_count(&memory), 1);
    assert!(memory.holds(PAGE, LEN - 2 * PAGE, 0));
    assert!(memory.holds(0, PAGE, 0xa5) && memory.holds(LEN - PAGE, PAGE, 0xa5));
}

/// There is no background to put it into: the rate is not kept to, and a pause is none.
#[test]
fn a_background_rate_means_nothing() {
    for rate in [0, 1, MIB] {
        let service = builder(one_node()).background_rate(rate).build().unwrap();
        assert_eq!(service.background_rate(), Some(rate));
        assert_done_here(&service.zero(&used(LEN), Intent::Background).unwrap());
        service.set_background_rate(Some(0));
        let request = ZeroRequest::new(&used(LEN)).priority(Priority::Background);
        assert_done_here(&service.submit(request).unwrap());
    }
}

#[test]
fn nothing_to_do() {
    let service = service();
    let memory = used(LEN);
    let job = service.submit(ZeroRequest::new(&memory).ranges([])).unwrap();
    assert!(job.is_over() && all_zero(&job).workers.is_empty());
    let error = service.submit(ZeroRequest::new(&memory).ranges([(GuestAddress(1), u64::MAX)])).unwrap_err();
    assert!(matches!(error, RequestError::Overflow { .. }), "{error}");
    assert!(is_pattern(&*memory, 0, LEN));
}

/// Looked at between chunks; what was reached by then is zero and nothing else.
#[test]
fn deadlines() {
    let service = builder(one_node()).chunk(MIB).build().unwrap();
    let memory = used(LEN);
    let late = service.submit(ZeroRequest::new(&memory).deadline(Instant::now())).unwrap();
    assert!(late.is_over());
    let error = late.wait().unwrap_err();
    assert!(matches!(&error, JobError::DeadlinePassed { report } if report.zero_bytes() == 0), "{error}");
    assert!(is_pattern(&*memory, 0, LEN));

    let deadline = Instant::now() + Duration::from_millis(50);
    let calls = AtomicUsize::new(0);
    let (memory, armed) = watched(LEN, move |_, _| {
        // The sixth slice is handed out when the time is over.
        while calls.fetch_add(1, Ordering::SeqCst) >= 5 && Instant::now() < deadline {
            thread::yield_now();
        }
        Answer::AsAsked
    });
    armed.store(true, Ordering::SeqCst);
    let job = service.submit(ZeroRequest::new(&memory).deadline(deadline)).unwrap();
    armed.store(false, Ordering::SeqCst);
    assert!(job.is_over());
    let error = job.wait().unwrap_err();
    let JobError::DeadlinePassed { report } = &error else { panic!("{error}") };
    assert!(sum(report, |outcome| *outcome == Outcome::Untouched) > 0);
    assert_exact(&*memory, report, &[(0, LEN)]);
    let far = Instant::now() + Duration::from_secs(3600);
    assert_done_here(&service.submit(ZeroRequest::new(&memory).deadline(far)).unwrap());
}

/// What cannot be had fails as it does in a worker's hands, and a panic stays inside.
#[test]
fn failures() {
    let service = service();
    for intent in [Intent::Teardown, Intent::Boot] {
        let (memory, _file) = truncated(8 * MIB, 5 * MIB);
        let job = service.zero(&memory, intent).unwrap();
        assert!(job.is_over());
        let error = job.wait().unwrap_err();
        let JobError::Failed { cause: Cause::Truncated, report, .. } = &error else { panic!("{error}") };
        assert_eq!((report.zero_bytes(), is_zero(&*memory, 0, 5 * MIB)), (5 * MIB, true));
    }
    for nth in [1, 2, 3, 4] {
        let calls = AtomicUsize::new(0);
        let (memory, armed) = watched(LEN, move |_, len| {
            // Planning looks at one byte.
            assert!(
                len == 1 || calls.fetch_add(1, Ordering::SeqCst) + 1 != nth,
                "this panic is part of the test"
            );
            Answer::AsAsked
        });
        armed.store(true, Ordering::SeqCst);
        let job = service.zero(&memory, Intent::Teardown).unwrap();
        armed.store(false, Ordering::SeqCst);
        assert!(job.is_over());
        let error = job.wait().unwrap_err();
        let JobError::Failed { cause: Cause::Panicked, report, .. } = &error else { panic!("{error}") };
        assert_exact(&*memory, report, &[(0, LEN)]);
        assert_eq!(Arc::strong_count(&memory), 1);
    }
    assert_done_here(&service.zero(&used(LEN), Intent::Teardown).unwrap());
}

#[test]
fn a_pool_of_leases() {
    let service = service();
    let node = service.topology().nodes()[0].id();
    let pool = HugepagePool::builder(&service).page_size(PageSize::Base).capacity(node, 8 * MIB);
    let pool = pool.slab_bytes(2 * MIB).build().unwrap();
    let lend = || {
        let lease = pool.lease(8 * MIB, NodePolicy::Any).unwrap();
        let memory = lease.into_memory::<()>([(GuestAddress(0), 8 * MIB)]).unwrap();
        assert!(is_zero(&memory, 0, 8 * MIB));
        fill(&memory, 0, 8 * MIB);
        memory
    };
    for _ in 0..3 {
        let job = lend().recycle(Quiesced::on_callers_word()).unwrap();
        assert_done_here(&job);
    }
    let memory = lend();
    let id = memory.lease();
    drop(memory);
    assert_done_here(&pool.reclaim(id, Quiesced::on_callers_word()).unwrap());
    let last = lend();
    // The pool outlives the service, and nothing is cleared for it any more.
    drop(service);
    let failure = last.recycle(Quiesced::on_callers_word()).unwrap_err();
    assert!(matches!(failure.error, RecycleError::Request(RequestError::Closed)), "{}", failure.error);
    assert!(matches!(pool.lease(2 * MIB, NodePolicy::Any), Err(LeaseError::Exhausted { .. })));
}

#[test]
fn a_frame_table() {
    let service = service();
    let frames = 64 * FrameTable::SECTION_FRAMES;
    let table = Arc::new(FrameTable::new(&[Span { node: NodeId(0), first: 0, frames }]).unwrap());
    assert_done_here(&service.initialise_frames(&table).unwrap());
    assert_eq!(table.ready_sections(), table.sections());
}

#[test]
fn from_many_threads() {
    let service = service();
    thread::scope(|scope| {
        for number in 0..4 {
            let service = &service;
            scope.spawn(move || {
                for turn in 0..20 {
                    let memory = used(64 * KIB * (turn + 1));
                    let intent =
                        [Intent::Boot, Intent::Teardown, Intent::Background][(number + turn as usize) % 3];
                    assert_done_here(&service.zero(&memory, intent).unwrap());
                    assert!(is_zero(&*memory, 0, 64 * KIB * (turn + 1)));
                }
            });
        }
    });
}

/// Where there are several nodes, nobody knows on which one the caller sits; nothing is kept from it.
#[test]
fn several_nodes() {
    for locality in [Locality::PreferLocal, Locality::LocalOnly] {
        let service = builder(two_nodes()).locality(locality).build().unwrap();
        let memory = used(LEN);
        let job = service.zero(&memory, Intent::Teardown).unwrap();
        assert_done_here(&job);
        let report = all_zero(&job);
        assert_eq!((report.node_local_bytes, report.node_remote_bytes), (0, 0));
        assert_eq!(report.workers[0].node, None);
        let by_node = job.progress_by_node();
        assert_eq!(by_node.iter().map(|on| on.node.0).collect::<Vec<_>>(), [0, 1]);
        assert!(by_node.iter().map(|on| on.done_bytes).sum::<u64>() <= LEN);
        assert!(is_zero(&*memory, 0, LEN));
    }
}

/// Jobs are over before anybody can end them.
#[test]
fn what_comes_later_changes_nothing() {
    let service = service();
    let memory = used(LEN);
    let job = service.zero(&memory, Intent::Teardown).unwrap();
    job.cancel();
    drop(service);
    job.cancel();
    assert_done_here(&job);
    assert!(is_zero(&*memory, 0, LEN));
}
