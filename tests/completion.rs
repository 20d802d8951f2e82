//! How a job tells that it is over: `wait`, progress, and a descriptor for the VMM's event loop.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use common::hooked::{Gate, HookedMemory, hooked_memory};
use common::{MIB, PAGE, all_zero, fill, is_zero, readable, service, service_with};
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vm_zeroing::{Intent, Job, ZeroRequest, ZeroingService};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

const LEN: u64 = 33 * MIB + PAGE;

fn gated(gate: &Arc<Gate>) -> Arc<HookedMemory> {
    let memory = hooked_memory(LEN, gate.hook());
    fill(&*memory, 0, LEN);
    memory
}

/// A VMM's event loop that knows jobs by number.
fn event_loop(jobs: &[&Job]) -> Epoll {
    let epoll = Epoll::new().unwrap();
    for (number, job) in (0..).zip(jobs) {
        let event = EpollEvent::new(EventSet::IN, number);
        epoll.ctl(ControlOperation::Add, job.completion_fd().unwrap().as_raw_fd(), event).unwrap();
    }
    epoll
}

/// The numbers of the jobs that are over, within a time in ms.
fn turn(epoll: &Epoll, timeout: i32) -> Vec<u64> {
    let mut events = [EpollEvent::default(); 8];
    let count = epoll.wait(timeout, &mut events).unwrap();
    events[..count].iter().map(EpollEvent::data).collect()
}

#[test]
fn the_descriptor_is_readable_when_the_job_is_over_and_stays_so() {
    let service = service_with(2);
    let gate = Gate::after(1);
    let memory = gated(&gate);
    let job = service.zero(&memory, Intent::Teardown).unwrap();
    let epoll = event_loop(&[&job]);
    gate.wait_for_somebody();
    assert!(turn(&epoll, 0).is_empty(), "not over");
    assert!(!job.is_over() && job.wait_timeout(Duration::ZERO).is_none());
    gate.open();
    assert_eq!(turn(&epoll, -1), [0]);
    // The event comes last: by now everything is true that it promises.
    assert!(job.is_over());
    let report = job.wait_timeout(Duration::ZERO).unwrap().unwrap();
    assert!(report.is_all_zero());
    assert!(is_zero(&*memory, 0, LEN));
    assert_eq!(job.progress().done_bytes, LEN);
    // Level-triggered and never read by us.
    assert_eq!(turn(&epoll, 0), [0]);
    all_zero(&job);
    assert_eq!(turn(&epoll, 0), [0]);
    let late = event_loop(&[&job]);
    assert_eq!(turn(&late, 0), [0], "a descriptor that is watched too late tells all the same");
    drop(service);
    assert_eq!(turn(&epoll, 0), [0]);
}

#[test]
fn each_job_has_its_own_descriptor() {
    let service = service_with(2);
    let gate = Gate::after(0);
    let held_up = service.zero(&gated(&gate), Intent::Background).unwrap();
    let empty = service.submit(ZeroRequest::host([])).unwrap();
    let epoll = event_loop(&[&held_up, &empty]);
    assert_eq!(turn(&epoll, -1), [1]);
    gate.wait_for_somebody();
    assert!(!readable(held_up.completion_fd().unwrap(), 0));
    held_up.cancel();
    gate.open();
    while turn(&epoll, -1).len() < 2 {}
    assert!(held_up.wait().is_err());
}

/// The stores of all workers come before the event, again and again.
#[test]
fn zero_when_the_event_comes() {
    let service = service();
    let len = 17 * MIB;
    let memory = Arc::new(GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), len as usize)]).unwrap());
    for _ in 0..20 {
        fill(&*memory, 0, len);
        let job = service.zero(&memory, Intent::Teardown).unwrap();
        assert_eq!(turn(&event_loop(&[&job]), -1), [0]);
        assert!(is_zero(&*memory, 0, len));
        assert!(job.wait_timeout(Duration::ZERO).unwrap().is_ok());
    }
}

/// R22: watched from another thread, progress only grows, from nothing to all.
#[test]
fn progress_grows_from_nothing_to_all() {
    let service = service_with(4);
    let gate = Gate::after(0);
    let memory = gated(&gate);
    let job = service.zero(&memory, Intent::Teardown).unwrap();
    gate.wait_for_somebody();
    assert_eq!((job.progress().done_bytes, job.progress().total_bytes), (0, LEN));
    let (first_look, looked) = std::sync::mpsc::channel();
    let watcher = thread::spawn({
        let job = job.clone();
        move || {
            let mut seen = vec![job.progress().done_bytes];
            first_look.send(()).unwrap();
            while !job.is_over() {
                let progress = job.progress();
                assert_eq!(progress.total_bytes, LEN);
                seen.push(progress.done_bytes);
            }
            seen.push(job.progress().done_bytes);
            seen
        }
    });
    looked.recv().unwrap();
    gate.open();
    let seen = watcher.join().unwrap();
    assert!(seen.is_sorted(), "progress went back");
    assert_eq!((seen.first(), seen.last()), (Some(&0), Some(&LEN)));
}

/// It is made when it is asked for, at whatever moment of the job: by several threads, before, at and after the end.
#[test]
fn the_descriptor_is_asked_for_around_the_end() {
    const LONG_MS: i32 = 60_000;
    let service = ZeroingService::builder().small_job(0).build().unwrap();
    let memory = Arc::new(GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 64 << 10)]).unwrap());
    // Of absent pages a job asks about mappings, for longer than it clears.
    fill(&*memory, 0, 64 << 10);
    for round in 0..2000 {
        let job = service.zero(&memory, Intent::Teardown).unwrap();
        thread::scope(|scope| {
            if round % 4 == 0 {
                scope.spawn(|| assert!(readable(job.completion_fd().unwrap(), LONG_MS)));
            }
            (0..round % 50).for_each(|_| std::hint::spin_loop());
            assert!(readable(job.completion_fd().unwrap(), LONG_MS), "round {round}");
            assert!(job.is_over() && readable(job.completion_fd().unwrap(), 0));
        });
    }
}

#[test]
fn many_threads_wait_for_one_job() {
    let service = service_with(2);
    let gate = Gate::after(0);
    let job = service.zero(&gated(&gate), Intent::Teardown).unwrap();
    let waiters: Vec<_> = (0..8)
        .map(|number| {
            let job = job.clone();
            thread::spawn(move || match number % 3 {
                0 => job.wait().unwrap(),
                1 => job.wait_timeout(Duration::from_secs(3600)).unwrap().unwrap(),
                _ => {
                    assert!(readable(job.completion_fd().unwrap(), -1));
                    job.wait().unwrap()
                }
            })
        })
        .collect();
    gate.wait_for_somebody();
    gate.open();
    let report = all_zero(&job);
    for waiter in waiters {
        assert_eq!(waiter.join().unwrap(), report);
    }
}

/// Jobs of all priorities, from many threads at once, all end, each with its own bytes.
#[test]
fn jobs_submitted_from_many_threads() {
    let service = service();
    thread::scope(|scope| {
        for number in 0..8 {
            let service = &service;
            scope.spawn(move || {
                let len = MIB * (number + 1) + PAGE;
                let memory =
                    Arc::new(GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), len as usize)]).unwrap());
                for intent in [Intent::Background, Intent::Boot, Intent::Teardown] {
                    fill(&*memory, 0, len);
                    let report = all_zero(&service.zero(&memory, intent).unwrap());
                    assert_eq!(report.zero_bytes(), len);
                    assert!(is_zero(&*memory, 0, len));
                }
            });
        }
    });
}

/// Descriptors and threads are given back: thousands of jobs and many services do not use them up.
#[test]
fn nothing_is_leaked() {
    common::run_child("nothing_is_leaked_child");
}

#[test]
#[ignore = "a part of nothing_is_leaked"]
fn nothing_is_leaked_child() {
    if !common::is_child() {
        return;
    }
    let count = |folder| std::fs::read_dir(folder).unwrap().count();
    let counts = || (count("/proc/self/fd"), count("/proc/self/task"));
    let memory =
        Arc::new(GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 4 * PAGE as usize)]).unwrap());
    let round = |jobs| {
        let service = service();
        for turn in 0..jobs {
            let job =
                service.zero(&memory, if turn % 2 == 0 { Intent::Teardown } else { Intent::Boot }).unwrap();
            if turn % 3 == 0 {
                job.cancel();
            }
            let _ = job.wait();
        }
    };
    round(10);
    // A joined thread may be listed for a moment longer.
    let settled = |wanted: &dyn Fn() -> bool| {
        (0..100_000).any(|_| {
            thread::yield_now();
            wanted()
        })
    };
    assert!(settled(&|| common::worker_threads().is_empty()));
    let before = counts();
    (0..50).for_each(|_| round(40));
    assert!(settled(&|| counts() == before), "{:?} where it was {before:?}", counts());
}
