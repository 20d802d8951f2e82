//! Large jobs, and many jobs as large together.

use std::time::Instant;

use vm_zeroing::vm_memory::GuestAddress;
use vm_zeroing::{Intent, Job, Method, ZeroRequest, ZeroingService};

use super::contest::{Contest, Score};
use super::host::{Hog, allowed_cpus, pin_to};
use super::memory::{Memory, Pages};
use super::print::rates;
use super::yardstick::{bare, in_pieces, plain_threads, settled_threads};

/// The run that the service clears at once.
const PIECE: usize = 4 << 20;

/// The bytes of each of many jobs.
const JOB: usize = 2 << 20;

pub fn all_workers(pages: Pages, bytes: usize, rounds: usize) {
    let memory = Memory::new(pages, bytes);
    let service = ZeroingService::builder().build().unwrap();
    let workers = service.workers();
    let store = store_of(&service);
    let mut contest = Contest::over(&memory);
    contest.enter("plain threads, equal shares", || {
        plain_threads(&memory, workers, |share| in_pieces(share, PIECE, store))
    });
    contest.enter_whole("service", || zero(&service, &memory));
    let scores = contest.hold(rounds);
    rates(&format!("{workers} workers, {}", service.method_for(PIECE as u64)), pages, bytes, &scores);
    say_goal(&scores[1], &scores[0], 0.97);
}

/// One CPU is shared with a thread that is always busy: what a static split then waits for.
pub fn beside_a_hog(pages: Pages, bytes: usize, rounds: usize) {
    let memory = Memory::new(pages, bytes);
    let cpus = allowed_cpus();
    for method in [None, Some(Method::RepStosb)] {
        let builder = ZeroingService::builder();
        let service = method.into_iter().fold(builder, |builder, method| builder.method(method));
        let service = service.build().unwrap();
        let workers = service.workers();
        let store = store_of(&service);
        let hog = Hog::on(cpus[0]);
        let mut contest = Contest::over(&memory);
        contest.enter("plain threads, equal shares, one pinned to each CPU", || {
            let pin = |number: usize| pin_to(&cpus[number % cpus.len()..][..1]);
            settled_threads(&memory, workers, pin, |share| in_pieces(share, PIECE, store))
        });
        contest.enter("plain threads, equal shares, where the scheduler puts them", || {
            plain_threads(&memory, workers, |share| in_pieces(share, PIECE, store))
        });
        contest.enter_whole("service", || zero(&service, &memory));
        let scores = contest.hold(rounds);
        drop(hog);
        let title = format!("{workers} workers beside a hog, {}", service.method_for(PIECE as u64));
        rates(&title, pages, bytes, &scores);
        say_goal(&scores[2], &scores[0], 1.3);
    }
}

/// All of the jobs are submitted before the first is waited for. The memory is smaller than all of them together:
/// it is cleared several times over, by either contestant.
pub fn many_jobs(pages: Pages, bytes: usize, count: usize, rounds: usize) {
    let times = (count * JOB).div_ceil(bytes);
    let jobs = count / times;
    let memory = Memory::new(pages, jobs * JOB);
    let service = ZeroingService::builder().build().unwrap();
    let mut contest = Contest::over(&memory);
    contest.enter_whole(format!("one job, {times} times in turn"), || {
        (0..times).for_each(|_| zero(&service, &memory));
    });
    contest.enter(format!("{} jobs of 2 MiB, all queued", jobs * times), || {
        let start = Instant::now();
        let queued: Vec<Job> = (0..jobs * times)
            .map(|job| {
                let range = (GuestAddress((job % jobs * JOB) as u64), JOB as u64);
                service.submit(ZeroRequest::new(&memory.guest).ranges([range])).unwrap()
            })
            .collect();
        queued.iter().for_each(|job| drop(job.wait().unwrap()));
        drop(queued);
        start.elapsed()
    });
    let scores = contest.hold(rounds);
    rates("Many jobs", pages, memory.len * times, &scores);
    say_goal(&scores[1], &scores[0], 0.9);
}

/// The stores of the method that a service takes for a chunk.
fn store_of(service: &ZeroingService) -> impl Fn(usize, usize) + Copy {
    let run = bare(service.method_for(PIECE as u64)).expect("a method with a bare loop");
    // SAFETY: the memory is the bench's own, whole pages; see the loops.
    move |at, len| unsafe { run(at, len) }
}

fn zero(service: &ZeroingService, memory: &Memory) {
    service.zero(&memory.guest, Intent::Teardown).unwrap().wait().unwrap();
}

fn say_goal(score: &Score, against: &Score, goal: f64) {
    let reached = score.speed_against(against);
    println!("{} against {}: {reached:.3}, wanted {goal:.2} or more.", score.name, against.name);
}
