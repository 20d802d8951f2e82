//! Work moves to whoever has time: a worker that is held up keeps the chunk in its hands, others do the rest. Thieves
//! take the far half of what is left, and everybody ascends.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

use common::hooked::{Answer, Gate, HookedMemory, hooked, memory_of};
use common::{KIB, all_zero, exactly, fill, is_pattern, is_zero};
use vm_zeroing::{Intent, Job, Report, Strategy, WorkerShare, ZeroRequest};

/// The shortest chunk there is: however long one takes, workers take no less.
const CHUNK: u64 = 64 * KIB;
const LEN: u64 = 16 * CHUNK;

/// Which thread asked for what, in the order of time. (Twice a chunk: before it is made present, before the stores.)
type Log = Arc<Mutex<Vec<(ThreadId, u64, u64)>>>;

/// Memory full of another guest's bytes. Whoever first asks for a byte before `held` waits at the gate.
fn watched(start: u64, held: u64, gate: &Arc<Gate>) -> (Arc<HookedMemory>, Log) {
    let (log, gate) = (Log::default(), Arc::clone(gate));
    let memory = memory_of(vec![hooked(start, LEN, {
        let log = Arc::clone(&log);
        move |offset, len| {
            log.lock().unwrap().push((thread::current().id(), offset, len as u64));
            if offset < held {
                gate.pass();
            }
            Answer::AsAsked
        }
    })]);
    fill(&*memory, start, LEN);
    (memory, log)
}

/// The runs that a thread went through, each ascending without a gap, in the order of time.
fn runs(log: &Log, of: impl Fn(ThreadId) -> bool) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for (_, offset, len) in log.lock().unwrap().iter().filter(|(thread, ..)| of(*thread)) {
        match runs.last_mut() {
            // The second time of the same chunk.
            Some(last) if last.1 == offset + len => {}
            Some(last) if last.1 == *offset => last.1 += len,
            _ => runs.push((*offset, offset + len)),
        }
    }
    runs
}

fn wait_for_bytes(job: &Job, bytes: u64) {
    while job.progress().done_bytes < bytes {
        thread::yield_now();
    }
}

fn share(report: &Report, such: impl Fn(&WorkerShare) -> bool) -> WorkerShare {
    let mut found = report.workers.iter().filter(|share| such(share));
    let share = *found.next().unwrap();
    assert_eq!(found.next(), None, "{report:?}");
    share
}

/// One worker stands before its first chunk while the other one does all the rest, from the far half on.
#[test]
fn whoever_has_time_does_the_rest() {
    for intent in [Intent::Teardown, Intent::Boot, Intent::Background] {
        let service = exactly(2).chunk(CHUNK).build().unwrap();
        let gate = Gate::after(0);
        let (memory, log) = watched(0, CHUNK, &gate);
        // (To make pages present, whole hugepages are taken.)
        let request = ZeroRequest::new(&memory).intent(intent).strategy(Strategy::Overwrite);
        let job = service.submit(request).unwrap();
        wait_for_bytes(&job, LEN - CHUNK);
        assert!(!job.is_over());
        assert!(is_zero(&*memory, CHUNK, LEN - CHUNK) && is_pattern(&*memory, 0, CHUNK));
        let held = log.lock().unwrap().iter().find(|(_, offset, _)| *offset == 0).unwrap().0;
        assert_eq!(runs(&log, |thread| thread == held), [(0, CHUNK)]);
        let halves = [(8, 16), (4, 8), (2, 4), (1, 2)].map(|(from, to)| (from * CHUNK, to * CHUNK));
        assert_eq!(runs(&log, |thread| thread != held), halves, "the far half first, each from its start on");
        gate.open();
        let report = all_zero(&job);
        let thief = share(&report, |share| share.bytes == LEN - CHUNK);
        assert_eq!(share(&report, |share| share.bytes == CHUNK).chunks, 1);
        assert!(thief.chunks >= LEN / CHUNK - 1);
        assert_eq!(report.steals, thief.chunks, "all that it did was another one's");
        assert!(is_zero(&*memory, 0, LEN));
    }
}

/// A worker that nobody disturbs goes from the first byte to the last.
#[test]
fn the_owner_ascends() {
    let service = exactly(1).chunk(CHUNK).build().unwrap();
    let gate = Gate::after(0);
    let (memory, log) = watched(0, 0, &gate);
    let report = all_zero(&service.zero(&memory, Intent::Teardown).unwrap());
    assert_eq!(runs(&log, |_| true), [(0, LEN)]);
    assert_eq!((report.steals, report.workers.len()), (0, 1), "there is nobody to rob");
}

/// Of several that are held up, each keeps one chunk, and one that is free is enough for the rest.
#[test]
fn one_that_is_free_is_enough() {
    let service = exactly(4).chunk(CHUNK).build().unwrap();
    let gate = Gate::after(0);
    let held: Vec<_> = (0..3).map(|number| watched(2 * number * LEN, CHUNK, &gate).0).collect();
    let jobs: Vec<Job> = held.iter().map(|memory| service.zero(memory, Intent::Teardown).unwrap()).collect();
    jobs.iter().for_each(|job| wait_for_bytes(job, LEN - CHUNK));
    assert!(jobs.iter().all(|job| !job.is_over()));
    gate.open();
    for (job, number) in jobs.iter().zip(0..) {
        let report = all_zero(job);
        assert!(report.steals >= LEN / CHUNK - 1, "{report:?}");
        assert!(is_zero(&*held[number as usize], 2 * number * LEN, LEN));
    }
}

/// What is taken from the node's queue is nobody's, and so not stolen.
#[test]
fn queued_regions_are_not_stolen() {
    let service = exactly(3).chunk(CHUNK).build().unwrap();
    let regions = (0..40).map(|number| hooked(number * 2 * CHUNK, CHUNK / 2, |_, _| Answer::AsAsked));
    let memory = memory_of(regions.collect());
    let report = all_zero(&service.zero(&memory, Intent::Teardown).unwrap());
    assert_eq!(report.steals, 0);
    assert_eq!(report.workers.iter().map(|share| share.bytes).sum::<u64>(), 20 * CHUNK);
}

/// Whatever is split and stolen by whom, each byte is done once.
#[test]
fn each_byte_once() {
    let service = exactly(6).chunk(CHUNK).build().unwrap();
    for turn in 0..10 {
        let gate = Gate::after(0);
        gate.open();
        let (memory, log) = watched(0, 0, &gate);
        let report = all_zero(&service.zero(&memory, Intent::Teardown).unwrap());
        let mut asked: Vec<_> = log.lock().unwrap().iter().map(|(_, offset, len)| (*offset, *len)).collect();
        asked.sort_unstable();
        let mut at = 0;
        for pair in asked.chunks(2) {
            assert_eq!((pair[0], pair[0].0), (pair[1], at), "turn {turn}: once to look, once to store");
            at += pair[0].1;
        }
        assert_eq!((at, report.erased_bytes), (LEN, LEN));
    }
}
