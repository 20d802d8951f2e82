//! R32: the process's cpuset shrinks in the middle of a job that was submitted by a thread pinned to one CPU. The
//! job ends, the workers stay inside, and the caller is where it was.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::sync::Arc;

use common::cgroup::{self, Cgroup};
use common::hooked::{Answer, Gate, hooked_memory};
use common::limits::never_hang;
use common::uffd::Userfaultfd;
use common::{
    MIB, all_zero, allowed_cpus, assert_exact, cpus_of, ends_well, fill, is_child, list, pin_to, service,
    service_with, worker_threads,
};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vm_zeroing::Intent;

const LEN: u64 = 48 * MIB;

#[test]
fn a_cpuset_that_shrinks_in_the_middle_of_a_job() {
    let cpus = allowed_cpus();
    if cpus.len() < 2 {
        println!("skipped: a cpuset of one CPU cannot shrink");
        return;
    }
    let Some(cgroup) = Cgroup::new("cpuset") else { return };
    let Some(()) = cgroup.set("cpuset.mems", "cpuset.mems", mems_allowed()) else { return };
    let Some(()) = cgroup.set("cpuset.cpus", "cpuset.cpus", list(&cpus)) else { return };
    ends_well(&mut cgroup.child("a_cpuset_that_shrinks_in_the_middle_of_a_job_child"));
}

fn mems_allowed() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    status.lines().find_map(|line| line.strip_prefix("Mems_allowed_list:")).unwrap().trim().to_owned()
}

fn own_cpus() -> Vec<u32> {
    cpus_of("/proc/thread-self/status")
}

/// (CPUs that each worker may use)
fn workers_cpus() -> Vec<Vec<u32>> {
    worker_threads().iter().map(|(thread, _)| cpus_of(&format!("/proc/self/task/{thread}/status"))).collect()
}

#[test]
#[ignore = "a part of a_cpuset_that_shrinks_in_the_middle_of_a_job"]
fn a_cpuset_that_shrinks_in_the_middle_of_a_job_child() {
    if !is_child() {
        return;
    }
    never_hang();
    let folder = cgroup::enter();
    let before = allowed_cpus();
    let shrunk = [before[0]];
    let caller = std::thread::spawn({
        let (before, folder) = (before.clone(), folder.clone());
        move || {
            pin_to(before[0]);
            let service = service();
            let workers = workers_cpus();
            assert!(
                workers.concat().contains(&before[1]),
                "the process's CPUs, not the caller's: {workers:?}"
            );
            let gate = Gate::after(3);
            let memory = hooked_memory(LEN, gate.hook());
            fill(&*memory, 0, LEN);
            let job = service.zero(&memory, Intent::Teardown).unwrap();
            gate.wait_for_somebody();
            std::fs::write(folder.join("cpuset.cpus"), list(&shrunk)).unwrap();
            gate.open();
            let report = all_zero(&job);
            assert_exact(&*memory, &report, &[(0, LEN)]);
            assert_eq!(workers_cpus(), vec![shrunk.to_vec(); service.workers()], "inside what is left");
            assert_eq!(own_cpus(), [before[0]], "the caller's affinity");
            // And the service works on.
            fill(&*memory, 0, LEN);
            all_zero(&service.zero(&memory, Intent::Teardown).unwrap());
            assert_eq!(own_cpus(), [before[0]]);
        }
    });
    caller.join().unwrap();
    // What is built from here on knows the smaller set.
    assert_eq!(allowed_cpus(), shrunk);
    let service = service();
    assert_eq!(workers_cpus(), [shrunk]);
    assert_eq!(service.workers(), 1);
    drop(service);
    // Nor is what starts later wider than what is left by then: a stand-in of a service that was built before.
    std::fs::write(folder.join("cpuset.cpus"), list(&before)).unwrap();
    let service = service_with(1);
    assert_eq!(workers_cpus(), std::slice::from_ref(&before));
    std::fs::write(folder.join("cpuset.cpus"), list(&shrunk)).unwrap();
    let memory = Arc::new(GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), MIB as usize)]).unwrap());
    let base = memory.get_host_address(GuestAddress(0)).unwrap() as u64;
    if let Some(handler) = Userfaultfd::register(base, MIB) {
        let stuck = service.zero(&memory, Intent::Teardown).unwrap();
        handler.wait_for_a_fault();
        stuck.cancel();
        assert!(stuck.wait().is_err());
        all_zero(&service.zero(&hooked_memory(MIB, |_, _| Answer::AsAsked), Intent::Teardown).unwrap());
        assert_eq!(
            workers_cpus(),
            vec![shrunk.to_vec(); 2],
            "the one that is stuck, and who stands in for it"
        );
        drop(handler);
    }
    // The workers do not widen again by themselves; that the operator does is no promise of ours to undo.
    std::fs::write(folder.join("cpuset.cpus"), list(&before)).unwrap();
    assert!(workers_cpus().concat().iter().all(|cpu| before.contains(cpu)));
}
