//! R19: the host has room for one more thread, and eight workers are wanted. The service makes do with what it got.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::sync::Arc;

use common::cgroup::{self, Cgroup};
use common::events;
use common::limits::{Limit, become_ordinary_user, never_hang};
use common::{MIB, Tree, all_zero, assert_exact, ends_well, fill, is_child, run_child, worker_threads};
use tracing::Level;
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vm_zeroing::{Intent, Topology, ZeroingService, ZeroingServiceBuilder};

const LEN: u64 = 24 * MIB;

/// A machine that would have eight workers.
fn eight_cpus() -> ZeroingServiceBuilder {
    let tree = Tree::new();
    tree.file("sys/devices/system/cpu/online", "0-7");
    ZeroingService::builder().topology(Topology::read(&tree.0).unwrap()).workers_per_node(8)
}

fn threads() -> u64 {
    std::fs::read_dir("/proc/self/task").unwrap().count() as u64
}

/// Builds a service where this many threads can be had, and works with it.
fn make_do_with(free: usize) {
    let service = eight_cpus().build().unwrap();
    assert_eq!((service.workers(), worker_threads().len()), (free, free));
    for intent in [Intent::Boot, Intent::Teardown] {
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), LEN as usize)]).unwrap();
        let memory = Arc::new(memory);
        fill(&*memory, 0, LEN / 2);
        assert_exact(&*memory, &all_zero(&service.zero(&memory, intent).unwrap()), &[(0, LEN)]);
    }
    let warnings = events::at(Level::WARN);
    let refused_watchdog = warnings.iter().filter(|said| said.contains("refused the watchdog")).count();
    assert_eq!(refused_watchdog, 1, "workers go first: {warnings:#?}");
    // Workers of CPUs that the machine does not have may say that they cannot be pinned.
    let refused: Vec<_> = warnings
        .iter()
        .filter(|said| said.contains("refused more worker threads") && !said.contains("started=0"))
        .collect();
    assert_eq!(refused.len(), 1, "{warnings:#?}");
    assert!(refused[0].contains("asked=8") && refused[0].contains(&format!("started={free}")), "{refused:?}");
}

/// None at all: the caller does the work itself, and says so in the report.
fn make_do_with_the_caller() {
    let before = threads();
    let service = eight_cpus().build().unwrap();
    assert_eq!((service.workers(), service.threads().len(), threads()), (0, 0, before));
    let memory = Arc::new(GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), LEN as usize)]).unwrap());
    fill(&*memory, 0, LEN / 2);
    let job = service.zero(&memory, Intent::Boot).unwrap();
    assert!(job.is_over(), "done when `submit` returns");
    let report = all_zero(&job);
    assert_exact(&*memory, &report, &[(0, LEN)]);
    assert_eq!((report.workers.len(), report.workers[0].worker, report.workers[0].bytes), (1, None, LEN));
    assert!(events::at(Level::WARN).iter().any(|said| said.contains("started=0")));
}

#[test]
fn a_pids_limit() {
    let Some(cgroup) = Cgroup::new("pids") else { return };
    ends_well(&mut cgroup.child("a_pids_limit_child"));
}

#[test]
#[ignore = "a part of a_pids_limit"]
fn a_pids_limit_child() {
    if !is_child() {
        return;
    }
    never_hang();
    events::collect();
    let folder = cgroup::enter();
    let allow = |more: u64| std::fs::write(folder.join("pids.max"), (threads() + more).to_string()).unwrap();
    allow(0);
    make_do_with_the_caller();
    allow(1);
    make_do_with(1);
}

#[test]
fn a_limit_on_the_users_processes() {
    run_child("a_limit_on_the_users_processes_child");
}

#[test]
#[ignore = "a part of a_limit_on_the_users_processes"]
fn a_limit_on_the_users_processes_child() {
    if !is_child() {
        return;
    }
    never_hang();
    events::collect();
    let Some(()) = become_ordinary_user() else { return };
    {
        let _limit = Limit::lower(libc::RLIMIT_NPROC, threads());
        make_do_with_the_caller();
    }
    let _limit = Limit::lower(libc::RLIMIT_NPROC, threads() + 3);
    make_do_with(3);
}
