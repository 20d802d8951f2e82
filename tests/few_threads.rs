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
use vm_zeroing::{BuildError, Intent, Topology, ZeroingService, ZeroingServiceBuilder};

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
    // Workers of CPUs that the machine does not have may say that they cannot be pinned.
    let refused: Vec<_> =
        warnings.iter().filter(|said| said.contains("refused more worker threads")).collect();
    assert_eq!(refused.len(), 1, "{warnings:#?}");
    assert!(refused[0].contains("asked=8") && refused[0].contains(&format!("started={free}")), "{refused:?}");
}

/// None at all: an error that names the limits, and no thread is left behind.
fn cannot_start_any() {
    let before = threads();
    let error = eight_cpus().build().unwrap_err();
    assert!(matches!(&error, BuildError::Spawn { asked: 8, .. }), "{error}");
    assert!(error.to_string().contains("RLIMIT_NPROC") && error.to_string().contains("pids.max"), "{error}");
    assert_eq!(threads(), before);
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
    cannot_start_any();
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
        cannot_start_any();
    }
    let _limit = Limit::lower(libc::RLIMIT_NPROC, threads() + 3);
    make_do_with(3);
}
