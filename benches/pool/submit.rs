//! What submitting a large job takes, and stopping it.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use vm_zeroing::vm_memory::{GuestAddress, GuestMemoryMmap};
use vm_zeroing::{Intent, JobError, ZeroingService};

use super::contest::Score;
use super::memory::{Memory, Pages};

/// A region that no host holds: address space only, of which no page is ever touched.
const REGION: usize = 16 << 40;

pub fn submitting(jobs: usize) {
    let guest = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), REGION)]);
    let guest = match guest {
        Ok(guest) => Arc::new(guest),
        Err(error) => return println!("\nno 16 TiB of address space to be had: {error}"),
    };
    let service = ZeroingService::builder().build().unwrap();
    let (mut submitted, mut cancelled) = (Score::new("submit"), Score::new("cancel, until it is over"));
    for _ in 0..jobs {
        let start = Instant::now();
        let job = service.zero(&guest, Intent::Teardown).unwrap();
        submitted.times.push(start.elapsed());
        let start = Instant::now();
        job.cancel();
        assert!(matches!(job.wait(), Err(JobError::Cancelled { .. })));
        cancelled.times.push(start.elapsed());
    }
    heading("One region of 16 TiB of address space", jobs);
    print(&submitted, "100 µs");
    print(&cancelled, "");
}

/// Jobs are cancelled at different moments, each somewhere in its first half.
pub fn cancelling(pages: Pages, bytes: usize, jobs: usize) {
    let memory = Memory::new(pages, bytes);
    let service = ZeroingService::builder().build().unwrap();
    let whole = Instant::now();
    service.zero(&memory.guest, Intent::Teardown).unwrap().wait().unwrap();
    let whole = whole.elapsed();
    let mut score = Score::new("cancel, until it is over");
    let mut left = Vec::new();
    for number in 0..jobs {
        let job = service.zero(&memory.guest, Intent::Teardown).unwrap();
        thread::sleep(whole.mul_f64(0.5 * (number % 10) as f64 / 10.0));
        let start = Instant::now();
        job.cancel();
        let result = job.wait();
        let time = start.elapsed();
        // Else the machine was so much faster this time that it was over before.
        if let Err(error) = result {
            score.times.push(time);
            let report = error.report().unwrap();
            left.push(report.total_bytes - report.zero_bytes());
        }
    }
    heading(&format!("A job over {} MiB of {}", bytes >> 20, pages.name()), score.times.len());
    if !score.times.is_empty() {
        print(&score, "2 ms, 10 ms");
        left.sort_unstable();
        println!("It had {} MiB left to do then, at the median.", left[left.len() / 2] >> 20);
    }
}

fn heading(title: &str, jobs: usize) {
    println!("\n| {title}, {jobs} times | median | 90 % | worst | wanted at most |\n|---|---|---|---|---|");
}

fn print(score: &Score, goal: &str) {
    let worst: Duration = score.fastest_and_slowest().1;
    let (median, high) = (score.median(), score.quantile(0.9));
    println!("| {} | {median:.1?} | {high:.1?} | {worst:.1?} | {goal} |", score.name);
}
