//! What a running guest's VMM feels of background work: how long its own `mmap` and `munmap` take, which want
//! the lock of the address space that every page fault holds, too.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use vm_zeroing::{Intent, Strategy, ZeroRequest, ZeroingService};

use super::contest::Score;
use super::host::{Hog, allowed_cpus};
use super::memory::{Memory, Pages, fill};
use super::yardstick::{in_pieces, populate};

/// What peers populate at once, and what the service does.
const PIECE: usize = 4 << 20;
/// How long a state lasts at most: what is not done by then is cancelled.
const AT_MOST: Duration = Duration::from_millis(1500);
/// Bytes a second.
const RATE: u64 = 512 << 20;

/// Something that goes on until it is told to stop, or ends by itself.
type State<'a> = (String, Box<dyn Fn(&AtomicBool) + Sync + 'a>);

/// Every CPU is busy with a guest, as far as the scheduler can see: there is a hog on each.
pub fn of_mmap(bytes: usize, rounds: usize) {
    let memory = Memory::new(Pages::Anonymous4K, bytes);
    let service = ZeroingService::builder().build().unwrap();
    let background = |strategy: Strategy, rate: Option<u64>| {
        let (service, memory) = (&service, &memory);
        move |stop: &AtomicBool| {
            service.set_background_rate(rate);
            let request = ZeroRequest::new(&memory.guest).intent(Intent::Background).strategy(strategy);
            let job = service.submit(request).unwrap();
            while job.wait_timeout(Duration::from_millis(2)).is_none() {
                if stop.load(Ordering::Relaxed) {
                    job.cancel();
                }
            }
        }
    };
    let idle = |stop: &AtomicBool| {
        while !stop.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(2));
        }
    };
    let populated_by = |policy: libc::c_int| {
        let memory = &memory;
        move |stop: &AtomicBool| {
            take_policy(policy);
            in_pieces((memory.start, memory.len), PIECE, |at, len| {
                if !stop.load(Ordering::Relaxed) {
                    populate(at, len);
                }
            });
        }
    };
    let named_rate = format!("{} MiB/s", RATE >> 20);
    let absent: Vec<State<'_>> = vec![
        ("nothing".into(), Box::new(idle)),
        ("background job".into(), Box::new(background(Strategy::Populate, None))),
        (format!("background job, {named_rate}"), Box::new(background(Strategy::Populate, Some(RATE)))),
        ("a thread that populates 4 MiB at a time".into(), Box::new(populated_by(libc::SCHED_OTHER))),
        ("the same thread at SCHED_IDLE".into(), Box::new(populated_by(libc::SCHED_IDLE))),
    ];
    compare("absent pages are populated by", rounds, &absent, || discard(&memory));
    fill(memory.start, memory.len);
    let present: Vec<State<'_>> = vec![
        ("nothing".into(), Box::new(idle)),
        ("background job".into(), Box::new(background(Strategy::Overwrite, None))),
        (format!("background job, {named_rate}"), Box::new(background(Strategy::Overwrite, Some(RATE)))),
    ];
    compare("present pages are overwritten by", rounds, &present, || ());
}

fn compare(title: &str, rounds: usize, states: &[State<'_>], prepare: impl Fn()) {
    let hogs: Vec<Hog> = allowed_cpus().into_iter().map(Hog::on).collect();
    let mut scores: Vec<Score> = states.iter().map(|(name, _)| Score::new(name)).collect();
    for round in 0..rounds {
        for step in 0..states.len() {
            let index = (round + step) % states.len();
            prepare();
            let (stop, over) = (AtomicBool::new(false), AtomicBool::new(false));
            thread::scope(|scope| {
                scope.spawn(|| {
                    states[index].1(&stop);
                    over.store(true, Ordering::Release);
                });
                // Time to begin.
                thread::sleep(Duration::from_millis(10));
                let begun = Instant::now();
                loop {
                    scores[index].times.push(map_and_unmap());
                    if begun.elapsed() > AT_MOST || over.load(Ordering::Acquire) {
                        break;
                    }
                    thread::sleep(Duration::from_micros(200));
                }
                stop.store(true, Ordering::Relaxed);
            });
        }
    }
    drop(hogs);
    println!(
        "\n| mmap, store, munmap of 64 KiB, every CPU busy, while {title} | calls | median | 99 % | longest |\n|---|---|---|---|---|"
    );
    for score in scores {
        let (count, longest) = (score.times.len(), score.fastest_and_slowest().1);
        let (median, most) = (score.median(), score.quantile(0.99));
        println!("| {} | {count} | {median:.1?} | {most:.1?} | {longest:.1?} |", score.name);
    }
}

fn map_and_unmap() -> Duration {
    let len = 64 << 10;
    let start = Instant::now();
    // SAFETY: a mapping of its own, that nobody else knows of, and that is gone afterwards.
    unsafe {
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let at = libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0);
        assert_ne!(at, libc::MAP_FAILED);
        at.cast::<u8>().write_volatile(1);
        assert_eq!(libc::munmap(at, len), 0);
    }
    start.elapsed()
}

fn discard(memory: &Memory) {
    // SAFETY: private anonymous memory of the bench, whose bytes nobody needs.
    let answer = unsafe { libc::madvise(memory.start as *mut _, memory.len, libc::MADV_DONTNEED) };
    assert_eq!(answer, 0);
}

fn take_policy(policy: libc::c_int) {
    // SAFETY: a plain number each; the call changes this thread's policy only.
    let answer = unsafe {
        let mut parameter: libc::sched_param = std::mem::zeroed();
        parameter.sched_priority = 0;
        libc::sched_setscheduler(0, policy, &raw const parameter)
    };
    assert_eq!(answer, 0, "sched_setscheduler: {}", std::io::Error::last_os_error());
}
