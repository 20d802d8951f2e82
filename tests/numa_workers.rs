//! Where the service's workers run: on the CPUs of their nodes, and nowhere else.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod machines;

use std::collections::BTreeMap;
use std::fs;

use machines::{
    CHUNK, Witness, cpu_nodes, cpus_of, node_of_cpu, occupy, one_worker_on_each, several_nodes, status_list,
    witnessed,
};
use vm_zeroing::{Intent, NodeId, ZeroingService};

/// Thread and the node in its name, of every worker.
fn workers() -> Vec<(String, NodeId)> {
    let tasks = fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
    tasks
        .filter_map(|task| {
            let name = fs::read_to_string(task.join("comm")).ok()?;
            let node = name.trim().strip_prefix("vmz-n")?.split('-').next()?.parse().ok()?;
            Some((task.to_str()?.to_owned(), NodeId(node)))
        })
        .collect()
}

/// The CPU a thread ran on last (proc_pid_stat(5), field 39).
fn last_cpu(task: &str) -> u32 {
    let stat = fs::read_to_string(format!("{task}/stat")).unwrap();
    // Field 2, the name, may hold anything; field 3 follows the last parenthesis.
    let (_, fields) = stat.rsplit_once(')').unwrap();
    fields.split_ascii_whitespace().nth(39 - 3).unwrap().parse().unwrap()
}

#[test]
fn workers_are_pinned_to_their_nodes() {
    if several_nodes().is_none() {
        return;
    }
    let before = status_list("/proc/thread-self/status", "Cpus_allowed_list:");
    let service = ZeroingService::builder().build().unwrap();
    let mut per_node: BTreeMap<NodeId, usize> = BTreeMap::new();
    for (task, node) in workers() {
        let allowed = status_list(&format!("{task}/status"), "Cpus_allowed_list:");
        assert_eq!(allowed, cpus_of(node), "{task} of {node}");
        *per_node.entry(node).or_default() += 1;
    }
    let expected = cpu_nodes().into_iter().map(|node| (node, cpus_of(node).len().min(8)));
    assert_eq!(per_node, expected.collect());

    let witness = Witness::new(|_| {});
    let memory = witnessed(16 * CHUNK, &witness);
    service.zero(&memory, Intent::Teardown).unwrap().wait().unwrap();
    for (task, node) in workers() {
        let cpu = last_cpu(&task);
        assert!(cpus_of(node).contains(&cpu), "{task} of {node} ran on CPU {cpu}");
    }
    assert_eq!(status_list("/proc/thread-self/status", "Cpus_allowed_list:"), before, "the caller's own");
}

/// Every node's worker at once, each seen at work on a CPU of its node.
#[test]
fn workers_work_on_their_nodes() {
    if several_nodes().is_none() {
        return;
    }
    let nodes = cpu_nodes();
    let service = one_worker_on_each(&nodes);
    let busy = occupy(&service);
    assert_eq!(busy.keys().copied().collect::<Vec<_>>(), nodes);
    for (task, node) in workers() {
        assert_eq!(node_of_cpu(last_cpu(&task)), node);
    }
    for (_, busy) in busy {
        busy.release();
    }
}
