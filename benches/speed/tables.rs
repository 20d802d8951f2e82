//! The tables, one function each.

use std::time::{Duration, Instant};

use vm_zeroing::vm_memory::GuestAddress;
use vm_zeroing::{
    HugepagePool, Intent, LeasedMemory, Method, NodePolicy, PageSize, Quiesced, ZeroingService,
};

use super::contest::{Contest, median_of};
use super::memory::{Memory, Pages, fill, is_zero};
use super::print::rates;
use super::yardstick::{Loop, bare, in_pieces, memset, plain_threads, populate, punch};

/// The run that the service clears at once.
const PIECE: usize = 4 << 20;
const IN_ONE_CALL: usize = usize::MAX;

pub fn one_thread(pages: Pages, bytes: usize, rounds: usize) {
    let memory = Memory::new(pages, bytes);
    let auto = ZeroingService::builder().workers_per_node(1).build().unwrap();
    let stosb = ZeroingService::builder().workers_per_node(1).method(Method::RepStosb).build().unwrap();
    let method = auto.method_for(PIECE as u64);
    let mut contest = Contest::over(&memory);
    contest.enter_whole("service, rep-stosb", || zero(&stosb, &memory));
    contest.enter_whole(format!("service, auto ({method})"), || zero(&auto, &memory));
    let whole = (memory.start, memory.len);
    let mut loops: Vec<(&str, Loop)> = vec![("bare rep-stosb", bare(Method::RepStosb).unwrap())];
    loops.extend(
        bare(method).filter(|_| method != Method::RepStosb).map(|bare| ("bare loop of auto's method", bare)),
    );
    loops.push(("libc::memset", memset));
    for (name, run) in loops {
        for (piece, manner) in [(PIECE, "in 4 MiB calls"), (IN_ONE_CALL, "in one call")] {
            // SAFETY: the memory is ours, whole pages; see the loops.
            let store = move |at, len| unsafe { run(at, len) };
            contest.enter_whole(format!("{name}, {manner}"), move || in_pieces(whole, piece, store));
        }
    }
    rates("One thread", pages, bytes, &contest.hold(rounds));
}

pub fn all_workers(pages: Pages, bytes: usize, rounds: usize) {
    let memory = Memory::new(pages, bytes);
    let service = ZeroingService::builder().build().unwrap();
    let (method, workers) = (service.method_for(PIECE as u64), service.workers());
    let run = bare(method).expect("auto chooses among the methods that have a bare loop");
    // SAFETY: the memory is ours, whole pages; see the loops.
    let store = |at, len| unsafe { run(at, len) };
    let mut contest = Contest::over(&memory);
    contest.enter("plain threads, equal shares, 4 MiB calls", || {
        plain_threads(&memory, workers, |share| in_pieces(share, PIECE, store))
    });
    contest.enter_whole("service", || zero(&service, &memory));
    contest.enter("plain threads, equal shares, one call each", || {
        plain_threads(&memory, workers, |share| in_pieces(share, IN_ONE_CALL, store))
    });
    contest.enter("plain threads that populate each 4 MiB before they clear it", || {
        plain_threads(&memory, workers, |share| {
            in_pieces(share, PIECE, |at, len| {
                populate(at, len);
                store(at, len);
            });
        })
    });
    rates(&format!("{workers} workers, {method}"), pages, bytes, &contest.hold(rounds));
    let faults =
        median_of(rounds, || plain_threads(&memory, workers, |share| in_pieces(share, PIECE, populate)));
    println!("Populating what is present already, {workers} threads, 4 MiB a call: {faults:.3?}.");
}

pub fn teardown(pages: Pages, bytes: usize, rounds: usize) {
    let memory = Memory::new(pages, bytes);
    let service = ZeroingService::builder().build().unwrap();
    let threads = service.workers();
    let pool = pool_of(&service, pages, bytes as u64);
    let mut contest = Contest::over(&memory);
    contest.enter("punch the pages out, populate them again", || {
        plain_threads(&memory, threads, |(at, len)| {
            punch(&memory, at, len);
            populate(at, len);
        })
    });
    contest.enter_whole("service, teardown", || zero(&service, &memory));
    contest.enter_with_own_memory("hugepage pool, a lease recycled", || recycle(&pool, bytes as u64));
    rates(&format!("Teardown, {threads} threads"), pages, bytes, &contest.hold(rounds));
}

fn pool_of(service: &ZeroingService, pages: Pages, bytes: u64) -> HugepagePool {
    let size = if pages == Pages::Huge2M { PageSize::Huge2M } else { PageSize::Base };
    let with_memory = service.topology().nodes().iter().find(|node| node.memory_allowed());
    let node = with_memory.expect("a node with memory").id();
    HugepagePool::builder(service).page_size(size).capacity(node, bytes).build().unwrap()
}

/// A guest's memory from lease to recycling; only the end is timed: quiesced until it can be lent again.
fn recycle(pool: &HugepagePool, bytes: u64) -> Duration {
    let lease = pool.lease(bytes, NodePolicy::Any).unwrap();
    let memory: LeasedMemory = lease.into_memory([(GuestAddress(0), bytes)]).unwrap();
    let id = memory.lease();
    for range in memory.host_ranges() {
        let (start, len) = (range.start as usize, (range.end - range.start) as usize);
        assert!(is_zero(start, len), "bytes were lent that are not zero");
        fill(start, len);
    }
    let start = Instant::now();
    memory.recycle(Quiesced::on_callers_word()).unwrap().wait().unwrap();
    let time = start.elapsed();
    pool.vm_is_gone(id);
    time
}

fn zero(service: &ZeroingService, memory: &Memory) {
    service.zero(&memory.guest, Intent::Teardown).unwrap().wait().unwrap();
}
