//! What goes first: urgent before normal before background, at the next chunk of every worker, whatever it has in hand
//! or in its own deque.
#![allow(
    clippy::type_complexity,
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "helpers of tests are tests"
)]

mod common;

use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

use common::hooked::{Answer, Gate, HookedMemory, hooked_memory};
use common::{MIB, PAGE, all_zero, exactly, fill, is_zero};
use vm_zeroing::{Intent, Job, Priority, ZeroRequest, ZeroingService};

const LEN: u64 = 8 * MIB;

/// Who began which chunk (by its offset in MiB) of which memory, in the order of time.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<(ThreadId, &'static str, u64)>>>);

impl Log {
    /// Memory full of another guest's bytes, of a name. Workers pass the gate when they first ask for a chunk.
    fn memory(&self, name: &'static str, gate: &Arc<Gate>) -> Arc<HookedMemory> {
        let (log, gate) = (self.clone(), Arc::clone(gate));
        let memory = hooked_memory(LEN, move |offset, _| {
            let chunk = (thread::current().id(), name, offset / MIB);
            let is_new = {
                let mut log = log.0.lock().unwrap();
                let is_new = !log.contains(&chunk);
                if is_new {
                    log.push(chunk);
                }
                is_new
            };
            if is_new {
                gate.pass();
            }
            Answer::AsAsked
        });
        fill(&*memory, 0, LEN);
        memory
    }

    fn all(&self) -> Vec<(ThreadId, &'static str, u64)> {
        self.0.lock().unwrap().clone()
    }

    /// The names, each once for what was done of it in a row.
    fn order(&self) -> Vec<&'static str> {
        let mut order: Vec<&'static str> = self.all().into_iter().map(|(_, name, _)| name).collect();
        order.dedup();
        order
    }
}

fn open() -> Arc<Gate> {
    let gate = Gate::after(0);
    gate.open();
    gate
}

/// Whose chunks take no more than a millisecond stay of a MiB: what is shorter counts for the same.
fn service(workers: usize) -> ZeroingService {
    exactly(workers).chunk(MIB).build().unwrap()
}

fn submit(service: &ZeroingService, memory: &Arc<HookedMemory>, priority: Priority) -> Job {
    service.submit(ZeroRequest::new(memory).priority(priority)).unwrap()
}

/// The only worker has half a job in its own deque when another one comes that goes first.
#[test]
fn the_next_chunk_is_the_most_urgent_one() {
    let (service, log) = (service(1), Log::default());
    let (at_background, at_normal) = (Gate::after(2), Gate::after(3));
    let memories = [
        log.memory("background", &at_background),
        log.memory("normal", &at_normal),
        log.memory("urgent", &open()),
        log.memory("late background", &open()),
    ];
    let [background, normal, urgent, late_background] = &memories;
    let mut jobs = vec![submit(&service, background, Priority::Background)];
    at_background.wait_for_somebody();
    jobs.push(submit(&service, late_background, Priority::Background));
    jobs.push(submit(&service, normal, Priority::Normal));
    at_background.open();
    at_normal.wait_for_somebody();
    jobs.push(submit(&service, urgent, Priority::Urgent));
    at_normal.open();
    jobs.iter().for_each(|job| drop(all_zero(job)));
    let order = ["background", "normal", "urgent", "normal", "background", "late background"];
    assert_eq!(log.order(), order, "{:?}", log.all());
    // And each from where it was.
    for name in ["background", "normal", "urgent", "late background"] {
        let chunks: Vec<u64> =
            log.all().into_iter().filter(|(_, of, _)| *of == name).map(|(_, _, chunk)| chunk).collect();
        assert_eq!(chunks, (0..LEN / MIB).collect::<Vec<_>>(), "{name}");
    }
    assert!(memories.iter().all(|memory| is_zero(&**memory, 0, LEN)));
}

/// What the intent sets, and what a request may set instead: the order that comes of it.
#[test]
fn intents_set_the_priority_and_requests_override_it() {
    let cases: [(&str, fn(ZeroRequest) -> ZeroRequest); 9] = [
        ("boot", |r| r.intent(Intent::Boot)),
        ("teardown", |r| r.intent(Intent::Teardown)),
        ("unsaid", |r| r),
        ("background", |r| r.intent(Intent::Background)),
        ("boot, normal", |r| r.intent(Intent::Boot).priority(Priority::Normal)),
        ("boot, background", |r| r.priority(Priority::Background).intent(Intent::Boot)),
        ("teardown, urgent", |r| r.intent(Intent::Teardown).priority(Priority::Urgent)),
        ("teardown, background", |r| r.intent(Intent::Teardown).priority(Priority::Background)),
        ("background, urgent", |r| r.intent(Intent::Background).priority(Priority::Urgent)),
    ];
    let (service, log) = (service(1), Log::default());
    let gate = Gate::after(0);
    let held = submit(&service, &log.memory("held", &gate), Priority::Urgent);
    gate.wait_for_somebody();
    let jobs: Vec<Job> = cases
        .into_iter()
        .rev()
        .map(|(name, ask)| service.submit(ask(ZeroRequest::new(&log.memory(name, &open())))).unwrap())
        .collect();
    gate.open();
    jobs.iter().chain([&held]).for_each(|job| drop(all_zero(job)));
    let order = [
        "held",
        "background, urgent",
        "teardown, urgent",
        "boot",
        "boot, normal",
        "unsaid",
        "teardown",
        "teardown, background",
        "boot, background",
        "background",
    ];
    assert_eq!(log.order(), order, "by priority, and who comes first goes first");
    assert!(Priority::ALL.is_sorted() && Priority::ALL[0] == Priority::Urgent);
}

/// A worker with background chunks in its own deque robs another one's urgent chunks before it goes on.
#[test]
fn what_others_have_goes_before_ones_own_if_it_is_more_urgent() {
    let (service, log) = (service(2), Log::default());
    // Each worker is held up by what nobody can take from it, and then gets a background job of its own.
    let blocks = [Gate::after(0), Gate::after(0)];
    let mut jobs: Vec<Job> = Vec::new();
    for block in &blocks {
        let block = Arc::clone(block);
        let memory = hooked_memory(PAGE, move |_, _| {
            block.pass();
            Answer::AsAsked
        });
        jobs.push(submit(&service, &memory, Priority::Urgent));
    }
    blocks.iter().for_each(|block| block.wait_for_somebody());
    let gates = [Gate::after(0), Gate::after(0), Gate::after(0)];
    let names = ["background 0", "background 1", "urgent"];
    let memories = [0, 1, 2].map(|number| log.memory(names[number], &gates[number]));
    jobs.extend(memories[..2].iter().map(|memory| submit(&service, memory, Priority::Background)));
    for (block, gate) in blocks.iter().zip(&gates) {
        block.open();
        gate.wait_for_somebody();
    }
    jobs.push(submit(&service, &memories[2], Priority::Urgent));
    gates[0].open();
    // One of them stands before the first urgent chunk, and the others lie in its deque.
    gates[2].wait_for_somebody();
    let keeper = log.all().into_iter().find(|(_, name, _)| *name == "urgent").unwrap().0;
    let before = log.all().len();
    gates[1].open();
    // The robber comes to the gate as well.
    while log.all().len() == before {
        thread::yield_now();
    }
    let (thief, name, chunk) = log.all()[before];
    assert!(thief != keeper, "the keeper stands still");
    assert_eq!((name, chunk), ("urgent", LEN / MIB / 2), "the far half: {:?}", log.all());
    gates[2].open();
    let reports: Vec<_> = jobs.iter().map(all_zero).collect();
    assert!(reports[4].steals > 0);
    assert!(memories.iter().all(|memory| is_zero(&**memory, 0, LEN)));
}

/// Many jobs of all priorities at once, from many threads: all of them end.
#[test]
fn nobody_is_forgotten() {
    let service = exactly(3).chunk(64 << 10).build().unwrap();
    thread::scope(|scope| {
        for number in 0..6 {
            let service = &service;
            scope.spawn(move || {
                for turn in 0..10 {
                    let memory = hooked_memory(MIB, |_, _| Answer::AsAsked);
                    fill(&*memory, 0, MIB);
                    all_zero(&submit(service, &memory, Priority::ALL[(number + turn) % 3]));
                    assert!(is_zero(&*memory, 0, MIB));
                }
            });
        }
    });
}
