//! What a job tells of itself besides outcomes: who did how much of it, in what CPU time, how local; and how far it is,
//! on each node (R22).
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use common::files::truncated;
use common::hooked::{Answer, Gate, HookedMemory, hooked_memory};
use common::{MIB, PAGE, Tree, all_zero, allowed_cpus, exactly, fill, list, one_node, sum};
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vm_zeroing::{Intent, Job, JobError, NodeId, Outcome, Report, Topology, ZeroRequest, ZeroingService};

const LEN: u64 = 24 * MIB + PAGE;

fn used() -> Arc<GuestMemoryMmap<()>> {
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), LEN as usize)]).unwrap();
    fill(&memory, 0, LEN);
    Arc::new(memory)
}

fn gated(free: usize) -> (Arc<HookedMemory>, Arc<Gate>) {
    let gate = Gate::after(free);
    let memory = hooked_memory(LEN, gate.hook());
    fill(&*memory, 0, LEN);
    (memory, gate)
}

/// Nodes 2 and 5, each with half of our CPUs (or one CPU that both claim, where there is one).
fn split() -> Topology {
    let allowed = allowed_cpus();
    let half = allowed.len() / 2;
    let tree = Tree::new();
    let absent = 6000;
    tree.file("sys/devices/system/cpu/online", &list(&[&allowed[..], &[absent]].concat()));
    let far = if half == 0 { vec![absent] } else { allowed[..half].to_vec() };
    for (id, cpus, distance) in [(2, &allowed[half..], "10 20"), (5, &far[..], "20 10")] {
        let folder = format!("sys/devices/system/node/node{id}");
        tree.file(&format!("{folder}/cpulist"), &list(cpus));
        tree.file(&format!("{folder}/meminfo"), &format!("Node {id} MemTotal: 1048576 kB"));
        tree.file(&format!("{folder}/distance"), distance);
    }
    Topology::read(&tree.0).unwrap()
}

/// The shares add up to what was done, and the CPU time to no more than there was.
fn assert_adds_up(job: &Job, report: &Report) {
    let shares = &report.workers;
    assert_eq!(shares.iter().map(|share| share.bytes).sum::<u64>(), job.progress().done_bytes);
    assert!(shares.iter().all(|share| share.chunks > 0 && share.bytes > 0), "{report:?}");
    let chunks: u64 = shares.iter().map(|share| share.chunks).sum();
    assert!(report.steals <= chunks);
    let numbers: Vec<_> = shares.iter().map(|share| share.worker.unwrap_or(u32::MAX)).collect();
    assert!(numbers.is_sorted() && numbers.iter().collect::<BTreeSet<_>>().len() == numbers.len());
    let cpu: Duration = shares.iter().map(|share| share.cpu_time).sum();
    assert!(cpu <= report.cpu_time && (chunks == 0 || cpu > Duration::ZERO), "{report:?}");
    for share in shares {
        // Two clocks: a little more may be told by one of them.
        let most = report.duration + report.duration / 50 + Duration::from_millis(10);
        assert!(share.cpu_time <= most, "{share:?} in {:?}", report.duration);
    }
    let known = report.node_local_bytes + report.node_remote_bytes;
    assert!(known <= report.total_bytes);
}

#[test]
fn shares_add_up() {
    for workers in [0, 1, 2, 5] {
        let service = exactly(5).workers_per_node(workers).chunk(MIB).build().unwrap();
        for intent in [Intent::Boot, Intent::Teardown, Intent::Background] {
            let memory = used();
            let job = service.zero(&memory, intent).unwrap();
            let report = all_zero(&job);
            assert_adds_up(&job, &report);
            assert_eq!(job.progress().done_bytes, LEN);
            assert!(report.workers.len() <= workers.max(1));
            assert_eq!(report.node_local_bytes, LEN, "there is one node");
            assert_eq!(report.steals > 0, report.workers.len() > 1, "one region: {report:?}");
        }
    }
}

/// Also where it ended before its time, or something failed.
#[test]
fn shares_of_jobs_that_did_not_come_through() {
    let service = exactly(2).chunk(MIB).build().unwrap();
    let (memory, gate) = gated(9);
    let job = service.zero(&memory, Intent::Teardown).unwrap();
    gate.wait_for_somebody();
    job.cancel();
    gate.open();
    let error = job.wait().unwrap_err();
    let report = error.report().unwrap();
    assert_adds_up(&job, report);
    assert_eq!(job.progress().done_bytes, report.zero_bytes());
    assert!(report.zero_bytes() > 0 && report.zero_bytes() < LEN);

    let (memory, _file) = truncated(8 * MIB, 5 * MIB);
    let job = service.zero(&memory, Intent::Teardown).unwrap();
    let error = job.wait().unwrap_err();
    let JobError::Failed { report, .. } = &error else { panic!("{error}") };
    assert_adds_up(&job, report);
    assert_eq!(job.progress().done_bytes, 8 * MIB, "what failed is dealt with, too");
    assert_eq!(sum(report, |outcome| *outcome == Outcome::Erased), 5 * MIB);

    let late = service.submit(ZeroRequest::new(&memory).deadline(std::time::Instant::now())).unwrap();
    let error = late.wait().unwrap_err();
    assert!(error.report().unwrap().workers.is_empty());
    assert_adds_up(&late, error.report().unwrap());
}

/// CPU time is that of the threads, not of the clock on the wall: while a worker waits it takes none.
#[test]
fn waiting_takes_no_cpu_time() {
    let service = exactly(1).build().unwrap();
    let memory = hooked_memory(PAGE, |_, _| {
        thread::sleep(Duration::from_millis(60));
        Answer::AsAsked
    });
    let report = all_zero(&service.zero(&memory, Intent::Teardown).unwrap());
    assert!(report.duration >= Duration::from_millis(120));
    assert!(report.cpu_time < report.duration / 2, "{report:?}");
}

/// Local is what the node of the memory did itself. The service believes in two nodes that the kernel never names, or
/// in one, about which it does not ask. For nodes that are there see `numa_jobs`.
#[test]
fn local_and_remote() {
    if [2, 5].iter().any(|node| Path::new(&format!("/sys/devices/system/node/node{node}")).exists()) {
        println!("skipped: this machine has a node 2 or 5");
        return;
    }
    let unknown = ZeroingService::builder().topology(split()).small_job(0).build().unwrap();
    let job = unknown.zero(&used(), Intent::Teardown).unwrap();
    let report = all_zero(&job);
    assert_adds_up(&job, &report);
    assert_eq!(
        (report.node_local_bytes, report.node_remote_bytes),
        (0, LEN),
        "nobody sits where the memory is"
    );
    assert_eq!(report.node_local_share(), 0.0);
    assert!(report.workers.iter().all(|share| [Some(NodeId(2)), Some(NodeId(5))].contains(&share.node)));
    let service = ZeroingService::builder().topology(one_node()).small_job(0).build().unwrap();
    let report = all_zero(&service.zero(&used(), Intent::Teardown).unwrap());
    assert_eq!((report.node_local_bytes, report.node_remote_bytes), (LEN, 0));
    assert_eq!(report.node_local_share(), 1.0);
}

/// R22: watched from other threads, nothing goes back, no part is ahead of the whole, and the whole comes.
#[test]
fn progress_grows_on_each_node_and_in_all() {
    for topology in [one_node(), split()] {
        let nodes: Vec<NodeId> = topology.nodes().iter().map(|node| node.id()).collect();
        let service =
            ZeroingService::builder().topology(topology).chunk(64 << 10).small_job(0).build().unwrap();
        // Holes: they lie on no node, and count for that of the worker.
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), LEN as usize)]).unwrap();
        let memory = Arc::new(memory);
        let job = service.zero(&memory, Intent::Teardown).unwrap();
        let watchers: Vec<_> = (0..2)
            .map(|_| {
                let (job, nodes) = (job.clone(), nodes.clone());
                thread::spawn(move || {
                    let (mut total, mut each) = (0, vec![0; nodes.len()]);
                    loop {
                        let over = job.is_over();
                        let now = job.progress();
                        assert!(now.done_bytes >= total && now.done_bytes <= now.total_bytes);
                        total = now.done_bytes;
                        let by_node = job.progress_by_node();
                        assert_eq!(by_node.iter().map(|on| on.node).collect::<Vec<_>>(), nodes);
                        for (before, on) in each.iter_mut().zip(by_node) {
                            assert!(on.done_bytes >= *before && on.done_bytes <= now.total_bytes);
                            *before = on.done_bytes;
                        }
                        assert!(
                            each.iter().sum::<u64>() >= total,
                            "asked for later, they are as far at least"
                        );
                        if over {
                            return (total, each.iter().sum::<u64>());
                        }
                    }
                })
            })
            .collect();
        for watcher in watchers {
            assert_eq!(watcher.join().unwrap(), (LEN, LEN));
        }
        assert_eq!(all_zero(&job).reads_zero_bytes, LEN);
    }
}
