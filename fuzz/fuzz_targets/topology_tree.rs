//! A machine described by any bytes is read or refused: no panic, no hang, no memory to speak of, and
//! what is read keeps the promises that the pool relies on.
//!
//! Input: the contents of `FILES` in that order, separated by 0xff. An empty one leaves the file out, one
//! that begins with 0xfe makes it a folder. What follows the last are CPUs to restrict to, a byte each.
#![no_main]

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use vm_zeroing::{NodeId, Topology};

const FILES: [&str; 18] = [
    "sys/devices/system/cpu/online",
    "sys/devices/system/node/online",
    "sys/devices/system/node/has_memory",
    "sys/devices/system/node/node0/cpumap",
    "sys/devices/system/node/node0/cpulist",
    "sys/devices/system/node/node0/meminfo",
    "sys/devices/system/node/node0/distance",
    "sys/devices/system/node/node1/cpulist",
    "sys/devices/system/node/node1/meminfo",
    "sys/devices/system/node/node1/distance",
    "sys/devices/system/node/node255/meminfo",
    "sys/devices/system/node/node255/distance",
    "sys/devices/system/cpu/cpu3/online",
    "sys/bus/dax/drivers/kmem/dax0.0/target_node",
    "proc/driver/nvidia/gpus/0/numa_status",
    "proc/meminfo",
    "proc/cpuinfo",
    "proc/stat",
];

/// In memory where there is such a file system. It is there while an input is read, and stays after a crash.
static ROOT: LazyLock<PathBuf> = LazyLock::new(|| {
    let parents = [PathBuf::from("/dev/shm"), std::env::temp_dir()];
    let name = format!("vm-zeroing-fuzz-{}", std::process::id());
    let parent = parents.into_iter().find(|parent| parent.is_dir()).expect("a temporary folder");
    parent.join(name)
});

fuzz_target!(|data: &[u8]| {
    fs::create_dir(&*ROOT).expect("a folder of our own");
    let mut pieces = data.split(|byte| *byte == 0xff);
    for (file, content) in FILES.iter().zip(&mut pieces) {
        let path = ROOT.join(file);
        match content.first() {
            None => continue,
            Some(0xfe) => fs::create_dir_all(path).expect("a folder"),
            Some(_) => {
                fs::create_dir_all(path.parent().expect("a file in a folder")).expect("its folder");
                fs::write(path, content).expect("its content");
            }
        }
    }
    let allowed: Vec<u32> = pieces.flatten().map(|byte| u32::from(*byte)).collect();
    let read = Topology::read(&ROOT);
    fs::remove_dir_all(&*ROOT).expect("our folder goes");
    match read {
        Ok(topology) => {
            promises(&topology);
            match topology.restrict_cpus(&allowed) {
                Ok(topology) => {
                    promises(&topology);
                    for cpu in topology.nodes().iter().flat_map(|node| node.allowed_cpus()) {
                        assert!(allowed.contains(cpu), "CPU {cpu} was not allowed");
                    }
                }
                Err(error) => assert!(!error.to_string().is_empty()),
            }
        }
        Err(error) => assert!(error.to_string().len() < 4096, "an error is no dump of the file"),
    }
});

fn promises(topology: &Topology) {
    let ids: Vec<NodeId> = topology.nodes().iter().map(|node| node.id()).collect();
    assert!(ids.is_sorted_by(|a, b| a < b) && !ids.is_empty());
    let mut allowed: Vec<u32> =
        topology.nodes().iter().flat_map(|node| node.allowed_cpus().to_vec()).collect();
    allowed.sort_unstable();
    assert!(allowed.is_sorted_by(|a, b| a < b), "a CPU belongs to one node");
    for id in ids.iter().copied().chain([NodeId(77)]) {
        assert!(!topology.cpus_serving(id).is_empty(), "{id} is served");
        assert!(topology.cpus_serving(id).iter().all(|cpu| allowed.binary_search(cpu).is_ok()));
        assert!(!topology.serving_nodes(id).is_empty());
        assert_eq!(topology.nodes_by_distance(id).len(), ids.len());
        assert!(ids.iter().all(|to| (10..=255).contains(&topology.distance(id, *to))));
    }
    assert!(topology.default_memory_nodes().iter().all(|id| topology.node(*id).is_some()));
}
