//! What of this machine the process may use: the scheduler and the cpuset have the word.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "helpers of tests are tests"
)]

use std::fs;
use std::path::Path;
use std::process::Command;

use vm_zeroing::Topology;

#[test]
fn this_machine_agrees_with_its_scheduler() {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).unwrap().trim().to_owned();
    let expand = |list: String| -> Vec<u32> {
        let ends = list.split(',').map(|part| part.split_once('-').unwrap_or((part, part)));
        ends.flat_map(|(a, b)| a.parse::<u32>().unwrap()..=b.parse().unwrap()).collect()
    };
    let allowed = expand(line("Cpus_allowed_list:"));

    let topology = Topology::detect().unwrap();
    let mut cpus: Vec<u32> = topology.nodes().iter().flat_map(|node| node.allowed_cpus().to_vec()).collect();
    cpus.sort_unstable();
    let online = |cpu: &u32| {
        let file = format!("/sys/devices/system/cpu/cpu{cpu}/online");
        Path::new(&format!("/sys/devices/system/cpu/cpu{cpu}")).exists()
            && fs::read_to_string(file).map_or(true, |online| online.trim() == "1")
    };
    let online: Vec<u32> = allowed.into_iter().filter(online).collect();
    assert_eq!(cpus, online);
    let memory = topology.nodes().iter().filter(|node| node.memory_allowed()).map(|node| node.id().0);
    assert_eq!(memory.collect::<Vec<u32>>(), expand(line("Mems_allowed_list:")));
    assert!(topology.nodes().iter().map(|node| node.memory_bytes()).sum::<u64>() > 0);
    assert!(topology.nodes().iter().all(|node| !topology.cpus_serving(node.id()).is_empty()));
}

/// R24: what an operator set for the whole process is obeyed. The test above runs again below `taskset`.
#[test]
fn an_operators_taskset_is_obeyed() {
    let topology = Topology::detect().unwrap();
    for cpu in topology.nodes().iter().flat_map(|node| node.allowed_cpus()) {
        let child = Command::new("taskset")
            .args(["-c", &cpu.to_string()])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "this_machine_agrees_with_its_scheduler"])
            .output();
        let Ok(child) = child else {
            println!("skipped: taskset is not installed");
            return;
        };
        let output = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success() && output.contains("1 passed"), "on CPU {cpu}: {output}");
    }
}
