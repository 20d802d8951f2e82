//! Jobs so small that the way to a worker and back counts.

use std::cell::Cell;
use std::time::{Duration, Instant};

use vm_zeroing::vm_memory::GuestAddress;
use vm_zeroing::{Intent, ZeroRequest, ZeroingService};

use super::contest::Score;
use super::memory::{Memory, Pages, fill, is_zero};
use super::yardstick::{bare, populate, punch};

/// Larger than most caches, so that pieces taken in turn are cold.
pub const RING: usize = 256 << 20;

/// Something done to a piece, by its offset.
type Run<'a> = (String, Box<dyn Fn(usize) + 'a>);

/// Jobs over pages that are there.
pub fn present(pages: Pages, turns: usize) {
    let memory = Memory::new(pages, RING);
    let service = ZeroingService::builder().build().unwrap();
    let by_workers = ZeroingService::builder().small_job(0).build().unwrap();
    heading("One job over present pages", pages);
    for (len, goal) in [(4 << 10, (1.0, 3)), (64 << 10, (1.1, 10)), (2 << 20, (1.1, 10))] {
        let clear = bare(service.method_for(len as u64)).unwrap();
        let scores = take_turns(
            &memory,
            len,
            turns.min(200 + (1 << 30) / len),
            &fill,
            vec![
                // SAFETY: the memory is ours, whole pages; see the loops.
                ("bare clear".into(), Box::new(|at| unsafe { clear(memory.start + at, len) })),
                ("job".into(), Box::new(|at| job(&service, &memory, at, len, Intent::Teardown))),
                (
                    "job, left to the workers".into(),
                    Box::new(|at| job(&by_workers, &memory, at, len, Intent::Teardown)),
                ),
            ],
        );
        print(len, &scores, Some(goal));
    }
}

/// Boot jobs over pages that are absent.
pub fn absent(turns: usize) {
    let memory = Memory::new(Pages::File4K, RING);
    let service = ZeroingService::builder().build().unwrap();
    heading("One boot job over absent pages", Pages::File4K);
    for len in [4 << 10, 2 << 20] {
        let scores = take_turns(
            &memory,
            len,
            turns,
            &|at, len| punch(&memory, at, len),
            vec![
                ("MADV_POPULATE_WRITE alone".into(), Box::new(|at| populate(memory.start + at, len))),
                ("job".into(), Box::new(|at| job(&service, &memory, at, len, Intent::Boot))),
            ],
        );
        print(len, &scores, None);
    }
}

fn job(service: &ZeroingService, memory: &Memory, at: usize, len: usize, intent: Intent) {
    let range = (GuestAddress(at as u64), len as u64);
    service.submit(ZeroRequest::new(&memory.guest).ranges([range]).intent(intent)).unwrap().wait().unwrap();
}

/// Each contestant in each turn once, on a piece of its own. `prepare` makes the whole ring ready again.
fn take_turns(
    memory: &Memory,
    len: usize,
    turns: usize,
    prepare: &dyn Fn(usize, usize),
    runs: Vec<Run<'_>>,
) -> Vec<Score> {
    let used = Cell::new(memory.len);
    let piece = || {
        if used.get() + len > memory.len {
            assert!(is_zero(memory.start, used.get()) || used.get() == memory.len, "bytes are left");
            prepare(memory.start, memory.len);
            used.set(0);
        }
        used.replace(used.get() + len)
    };
    prepare(memory.start, memory.len);
    used.set(0);
    let mut scores: Vec<Score> = runs.iter().map(|(name, _)| Score::new(name)).collect();
    for turn in 0..=turns {
        for step in 0..runs.len() {
            let index = (turn + step) % runs.len();
            let at = piece();
            let start = Instant::now();
            runs[index].1(at);
            let time = start.elapsed();
            if turn > 0 {
                scores[index].times.push(time);
            }
        }
    }
    assert!(is_zero(memory.start, used.get()), "bytes are left that are not zero");
    scores
}

fn heading(title: &str, pages: Pages) {
    println!(
        "\n| {title}, {} | | median | 10 % .. 90 % | added | wanted at most |\n|---|---|---|---|---|---|",
        pages.name()
    );
}

/// `goal`: so many times the yardstick, and so many microseconds more.
fn print(len: usize, scores: &[Score], goal: Option<(f64, u64)>) {
    let bare = scores[0].median();
    for (index, score) in scores.iter().enumerate() {
        let added = match index {
            0 => String::new(),
            _ => format!("{:.1?}", score.median().saturating_sub(bare)),
        };
        let wanted = match goal {
            Some((times, more)) if index == 1 => {
                format!("{:.1?}", bare.mul_f64(times) + Duration::from_micros(more))
            }
            _ => String::new(),
        };
        let (low, high) = (score.quantile(0.1), score.quantile(0.9));
        println!(
            "| {} KiB | {} | {:.1?} | {low:.1?} .. {high:.1?} | {added} | {wanted} |",
            len >> 10,
            score.name,
            score.median()
        );
    }
}
