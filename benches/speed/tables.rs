//! The tables, one function each, as Markdown.

use std::ffi::CStr;
use std::fs;
use std::time::{Duration, Instant};

use vm_zeroing::vm_memory::GuestAddress;
use vm_zeroing::{
    HugepagePool, Intent, LeasedMemory, Method, NodePolicy, PageSize, Quiesced, ZeroRequest, ZeroingService,
};

use super::contest::{Contest, Score, median_of};
use super::memory::{Memory, Pages, fill, is_zero};
use super::yardstick::{Loop, bare, in_pieces, memset, plain_threads, populate, punch};

/// The run that the service clears at once.
const PIECE: usize = 4 << 20;
const IN_ONE_CALL: usize = usize::MAX;

pub fn print_machine(bytes: usize, rounds: usize) {
    // SAFETY: answers a constant string of the C library.
    #[cfg(target_env = "gnu")]
    let libc = unsafe { CStr::from_ptr(libc::gnu_get_libc_version()) }.to_string_lossy();
    #[cfg(target_env = "gnu")]
    let libc = format!("glibc {libc}");
    #[cfg(not(target_env = "gnu"))]
    let libc = "another libc";
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = cpu
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map_or("?", |(_, name)| name);
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    println!("{cpu}, {cpus} CPUs, Linux {}, {libc}; load before the run {}", kernel.trim(), load.trim());
    println!("{} MiB of memory holding 0xA5, cold; medians of {rounds} interleaved rounds", bytes >> 20);
}

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
    print("One thread", pages, bytes, &contest.hold(rounds));
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
    print(&format!("{workers} workers, {method}"), pages, bytes, &contest.hold(rounds));
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
    print(&format!("Teardown, {threads} threads"), pages, bytes, &contest.hold(rounds));
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

/// Jobs so small that the way to a worker and back counts.
pub fn small_jobs(pages: Pages, rounds: usize) {
    let memory = Memory::new(pages, 64 << 20);
    let service = ZeroingService::builder().build().unwrap();
    println!(
        "\n| one job, from submission until the waiter runs again | bare clear | service | added |\n|---|---|---|---|"
    );
    for len in [4 << 10, 2 << 20] {
        let run = bare(service.method_for(len as u64)).unwrap();
        // Different bytes each time, so that they are cold: the memory is larger than most caches.
        let at = |turn: usize| (turn * len) % memory.len;
        let turns = || 0..rounds;
        fill(memory.start, memory.len);
        let mut turn = turns();
        let plain = median_of(rounds, || {
            let at = at(turn.next().unwrap());
            let start = Instant::now();
            // SAFETY: the memory is ours, whole pages; see the loops.
            unsafe { run(memory.start + at, len) };
            start.elapsed()
        });
        fill(memory.start, memory.len);
        let mut turn = turns();
        let served = median_of(rounds, || {
            let range = (GuestAddress(at(turn.next().unwrap()) as u64), len as u64);
            let start = Instant::now();
            service.submit(ZeroRequest::new(&memory.guest).ranges([range])).unwrap().wait().unwrap();
            start.elapsed()
        });
        println!("| {} KiB | {plain:.1?} | {served:.1?} | {:.1?} |", len >> 10, served.saturating_sub(plain));
    }
}

/// What a service costs that does nothing.
pub fn service(builds: usize) {
    let two_workers = || ZeroingService::builder().workers_per_node(2).build().unwrap();
    let start = Instant::now();
    let first = two_workers();
    let first = (start.elapsed(), first.workers());
    let build = median_of(builds, || {
        let start = Instant::now();
        let service = two_workers();
        let time = start.elapsed();
        drop(service);
        time
    });
    let service = two_workers();
    let memory = Memory::new(Pages::Anonymous4K, 64 << 20);
    zero(&service, &memory);
    // The last worker may still be on its way to sleep.
    std::thread::sleep(Duration::from_millis(20));
    let before = cpu_time_of_workers();
    std::thread::sleep(Duration::from_secs(1));
    let used = cpu_time_of_workers() - before;
    println!("\n| a service with {} workers | |\n|---|---|", first.1);
    println!("| build(), median of {builds} | {build:.0?} |");
    println!("| CPU time of its workers in one idle second, after a job | {used:?} |");
}

/// Run time of all threads that carry a worker's name, by the scheduler's own account.
fn cpu_time_of_workers() -> Duration {
    let own = fs::read_dir("/proc/self/task").unwrap().filter_map(|task| {
        let task = task.ok()?.path();
        fs::read_to_string(task.join("comm")).ok()?.starts_with("vmz-").then_some(task)
    });
    let times = own.map(|task| {
        let account = fs::read_to_string(task.join("schedstat")).expect("the kernel keeps schedstat");
        account
            .split_whitespace()
            .next()
            .and_then(|run| run.parse::<u64>().ok())
            .expect("nanoseconds of run time")
    });
    Duration::from_nanos(times.sum())
}

fn zero(service: &ZeroingService, memory: &Memory) {
    service.zero(&memory.guest, Intent::Teardown).unwrap().wait().unwrap();
}

fn print(title: &str, pages: Pages, bytes: usize, scores: &[Score]) {
    println!(
        "\n| {title}, {} MiB of {} | GB/s | slowest .. fastest | ratio |\n|---|---|---|---|",
        bytes >> 20,
        pages.name()
    );
    let rate = |time: Duration| bytes as f64 / time.as_secs_f64() / 1e9;
    for score in scores {
        let (fastest, slowest) = score.fastest_and_slowest();
        println!(
            "| {} | {:.1} | {:.1} .. {:.1} | {:.2} |",
            score.name,
            rate(score.median()),
            rate(slowest),
            rate(fastest),
            score.speed_against(&scores[0])
        );
    }
}
