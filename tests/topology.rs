//! The topology reader on hand-written trees and on this machine.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "helpers of tests are tests"
)]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use vm_zeroing::{NodeId, NodeKind, Topology, TopologyError};

/// A folder that stands for "/", removed at the end.
struct Tree(PathBuf);

impl Tree {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name =
            format!("vm-zeroing-topology-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn file(self, path: &str, content: impl AsRef<[u8]>) -> Self {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
        self
    }

    fn folder(self, path: &str) -> Self {
        fs::create_dir_all(self.0.join(path)).unwrap();
        self
    }

    fn without(self, path: &str) -> Self {
        fs::remove_file(self.0.join(path)).unwrap();
        self
    }

    fn online(self, cpus: &str) -> Self {
        self.file("sys/devices/system/cpu/online", format!("{cpus}\n"))
    }

    /// A node as today's kernels show it.
    fn node(self, id: u32, cpus: &str, kib: u64, distance: &str) -> Self {
        let folder = format!("sys/devices/system/node/node{id}");
        self.file(&format!("{folder}/cpulist"), format!("{cpus}\n"))
            .file(
                &format!("{folder}/meminfo"),
                format!("\nNode {id} MemTotal:  {kib} kB\nNode {id} MemFree:  1 kB\n"),
            )
            .file(&format!("{folder}/distance"), format!("{distance}\n"))
    }

    fn read(&self) -> Topology {
        Topology::read(&self.0).unwrap()
    }

    /// The error of a tree that must be refused.
    fn error(&self) -> TopologyError {
        Topology::read(&self.0).unwrap_err()
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn two_nodes() -> Tree {
    Tree::new()
        .online("0-3")
        .file("sys/devices/system/node/online", "0-1\n")
        .node(0, "0-1", 4096, "10 21")
        .node(1, "2-3", 8192, "21 10")
}

fn ids(ids: &[u32]) -> Vec<NodeId> {
    ids.iter().copied().map(NodeId).collect()
}

fn kinds(topology: &Topology) -> Vec<(u32, NodeKind)> {
    topology.nodes().iter().map(|node| (node.id().0, node.kind())).collect()
}

/// R27: whatever the nodes are, and also for a node that does not exist, some allowed CPU serves it.
fn assert_served(topology: &Topology) {
    let allowed: Vec<u32> = topology.nodes().iter().flat_map(|node| node.allowed_cpus().to_vec()).collect();
    for id in topology.nodes().iter().map(|node| node.id()).chain([NodeId(77_777)]) {
        let cpus = topology.cpus_serving(id);
        assert!(!cpus.is_empty() && cpus.iter().all(|cpu| allowed.contains(cpu)), "{id}: {cpus:?}");
        let nodes = topology.serving_nodes(id);
        assert!(!nodes.is_empty(), "{id}");
        assert!(nodes.iter().all(|node| !topology.node(*node).unwrap().allowed_cpus().is_empty()), "{id}");
    }
}

#[test]
fn two_nodes_with_cpus_and_memory() {
    let topology = two_nodes().read();
    assert_eq!(kinds(&topology), [(0, NodeKind::Normal), (1, NodeKind::Normal)]);
    let node = topology.node(NodeId(1)).unwrap();
    assert_eq!(
        (node.cpus(), node.allowed_cpus(), node.memory_bytes()),
        (&[2, 3][..], &[2, 3][..], 8192 * 1024)
    );
    assert!(node.memory_allowed() && node.is_ordinary() && !topology.is_implicit());
    assert_eq!(topology.distance(NodeId(0), NodeId(1)), 21);
    assert_eq!(topology.distance(NodeId(1), NodeId(1)), 10);
    assert_eq!(topology.nodes_by_distance(NodeId(1)), ids(&[1, 0]));
    assert_eq!(topology.serving_nodes(NodeId(1)), ids(&[1, 0]));
    assert_eq!(topology.cpus_serving(NodeId(1)), [2, 3]);
    assert_eq!(topology.default_memory_nodes(), ids(&[0, 1]));
    assert_eq!(NodeId(1).to_string(), "node 1");
    assert_served(&topology);
}

#[test]
fn r27_memory_only_cpus_only_and_a_cxl_node_255() {
    // Node 0 is plain; 1 has CPUs only; 3 has memory of nobody's; 255 is CXL memory nearest to node 1.
    let topology = Tree::new()
        .online("0-3")
        .node(0, "0-1", 4096, "10 20 14 30")
        .node(1, "2-3", 0, "20 10 20 17")
        .node(3, "", 1024, "14 20 10 30")
        .node(4, "", 0, "20 20 20 20 20")
        .node(255, "", 2048, "30 17 30 10")
        .file("sys/devices/system/node/online", "0-1,3,255\n")
        .file("sys/bus/dax/drivers/kmem/dax0.0/target_node", "255\n")
        .read();
    assert_eq!(
        kinds(&topology),
        [
            (0, NodeKind::Normal),
            (1, NodeKind::CpusOnly),
            (3, NodeKind::MemoryOnly),
            (255, NodeKind::Expansion)
        ]
    );
    assert_eq!(topology.cpus_serving(NodeId(255)), [2, 3]);
    assert_eq!(topology.serving_nodes(NodeId(255)), ids(&[1, 0]));
    assert_eq!(topology.cpus_serving(NodeId(3)), [0, 1]);
    assert_eq!(
        topology.default_memory_nodes(),
        ids(&[0]),
        "CXL memory and memory without CPUs only when asked"
    );
    assert!(!topology.node(NodeId(1)).unwrap().memory_allowed());
    assert_served(&topology);

    // The same machine where only CPUs of node 0 are allowed.
    let topology = topology.restrict_cpus(&[1, 9]).unwrap();
    assert_eq!(topology.cpus_serving(NodeId(255)), [1]);
    assert_eq!(topology.cpus_serving(NodeId(1)), [1]);
    assert_eq!(topology.node(NodeId(1)).unwrap().cpus(), [2, 3], "still the node's");
    assert_served(&topology);
}

#[test]
fn memory_as_near_to_several_nodes_is_served_by_all_of_them() {
    let topology = Tree::new()
        .online("0-3")
        .node(0, "0-1", 1, "10 20 17")
        .node(1, "2-3", 1, "20 10 17")
        .node(2, "", 1, "")
        .read();
    assert_eq!(topology.cpus_serving(NodeId(2)), [0, 1, 2, 3]);
}

#[test]
fn gpu_memory_is_known_and_never_chosen_unasked() {
    let status = |node| format!("Node:      {node}\nStatus:    online\nAddress:   40000000000\n");
    let topology = Tree::new()
        .online("0-1")
        .node(0, "0-1", 4096, "10 80")
        .node(250, "", 4096, "80 10")
        .file("proc/driver/nvidia/gpus/0004:05:00.0/numa_status", status("250"))
        .file("proc/driver/nvidia/gpus/0004:06:00.0/numa_status", status("-1"))
        .file("proc/driver/nvidia/gpus/0004:07:00.0/numa_status", status("0"))
        .read();
    assert_eq!(kinds(&topology), [(0, NodeKind::Normal), (250, NodeKind::Device)]);
    assert!(!topology.node(NodeId(250)).unwrap().is_ordinary());
    assert_eq!(topology.default_memory_nodes(), ids(&[0]));
    let gpu_only = topology.restrict_memory(&[NodeId(250)]).unwrap();
    assert_eq!(gpu_only.default_memory_nodes(), ids(&[]), "not even when nothing else is left");
    assert!(gpu_only.node(NodeId(250)).unwrap().memory_allowed());
}

#[test]
fn a_machine_with_memory_only_apart_from_cpus_offers_it() {
    let tree = Tree::new().online("0").node(0, "0", 0, "10 11 13").node(1, "", 9, "").node(2, "", 9, "");
    let topology = tree.file("sys/bus/dax/drivers/kmem/dax0.0/target_node", "2").read();
    assert_eq!(topology.default_memory_nodes(), ids(&[1]));
}

#[test]
fn offline_cpus_do_not_count() {
    let topology = two_nodes().online("0,2-3").read();
    assert_eq!(topology.node(NodeId(0)).unwrap().cpus(), [0]);

    // Old kernels have no list: each CPU that can be unplugged says so itself.
    let tree = two_nodes().without("sys/devices/system/cpu/online").folder("sys/devices/system/cpu/cpufreq");
    let cpu = |tree: Tree, cpu: u32| tree.folder(&format!("sys/devices/system/cpu/cpu{cpu}"));
    let tree = (0..4).fold(tree, cpu).file("sys/devices/system/cpu/cpu1/online", "0\n");
    let topology = tree.file("sys/devices/system/cpu/cpu2/online", "1\n").read();
    assert_eq!(topology.node(NodeId(0)).unwrap().cpus(), [0]);
    assert_eq!(topology.node(NodeId(1)).unwrap().cpus(), [2, 3]);

    // A node whose CPUs are all offline is memory without CPUs.
    let topology = two_nodes().online("0-1").read();
    assert_eq!(kinds(&topology), [(0, NodeKind::Normal), (1, NodeKind::MemoryOnly)]);
    assert_eq!(topology.cpus_serving(NodeId(1)), [0, 1]);
}

#[test]
fn missing_files_of_old_kernels() {
    // No lists of nodes, masks instead of lists of CPUs, no meminfo, no distances.
    let topology = Tree::new()
        .online("0-3,33")
        .file("sys/devices/system/node/node0/cpumap", "00000000,00000003\n")
        .file("sys/devices/system/node/node5/cpumap", "00000002,0000000c\n")
        .read();
    assert_eq!(kinds(&topology), [(0, NodeKind::Normal), (5, NodeKind::Normal)]);
    assert_eq!(topology.node(NodeId(5)).unwrap().cpus(), [2, 3, 33]);
    assert_eq!(topology.node(NodeId(5)).unwrap().memory_bytes(), 0);
    assert_eq!(topology.distance(NodeId(0), NodeId(5)), 20);

    // Only links to the CPUs; the kernel's list says which node has memory.
    let tree = Tree::new().online("0-1").folder("sys/devices/system/node/node0/cpu0");
    let tree =
        tree.folder("sys/devices/system/node/node1/cpu1").file("sys/devices/system/node/has_memory", "0\n");
    assert_eq!(kinds(&tree.read()), [(0, NodeKind::Normal), (1, NodeKind::CpusOnly)]);

    // The only node's memory is the machine's.
    let tree = Tree::new().online("0").folder("sys/devices/system/node/node0/cpu0");
    let topology = tree.file("proc/meminfo", "MemTotal: 3 kB\n").read();
    assert_eq!(topology.nodes()[0].memory_bytes(), 3072);
}

#[test]
fn files_padded_with_nul_bytes() {
    let pad = |text: &str| format!("{text}\n{}", "\0".repeat(4000));
    let topology = two_nodes()
        .online(&pad("0-2"))
        .file("sys/devices/system/node/node0/cpumap", "\0".repeat(4096))
        .file("sys/devices/system/node/node1/cpumap", pad("0000,0000000c"))
        .file("sys/devices/system/node/node1/distance", pad("31 10"))
        .file("sys/devices/system/node/node1/meminfo", pad("Node 1 MemTotal:     7 kB"))
        .read();
    assert_eq!(topology.node(NodeId(0)).unwrap().cpus(), [0, 1], "a blank mask says nothing, the list does");
    assert_eq!(topology.node(NodeId(1)).unwrap().cpus(), [2]);
    assert_eq!(topology.node(NodeId(1)).unwrap().memory_bytes(), 7 * 1024);
    assert_eq!(topology.distance(NodeId(1), NodeId(0)), 31);
}

#[test]
fn r29_no_node_folder_is_one_implicit_node() {
    let meminfo = "MemTotal:        2053992 kB\nMemFree: 1 kB\n";
    let tree = || Tree::new().file("proc/meminfo", meminfo).folder("sys/devices/system/cpu/cpu0/cache");
    let check = |tree: Tree, cpus: &[u32]| {
        let topology = tree.read();
        assert!(topology.is_implicit());
        assert_eq!(kinds(&topology), [(0, NodeKind::Normal)]);
        assert_eq!(topology.nodes()[0].cpus(), cpus);
        assert_eq!(topology.nodes()[0].memory_bytes(), 2_053_992 * 1024);
        assert_eq!(topology.default_memory_nodes(), ids(&[0]));
        assert_served(&topology);
        // A kernel without nodes cannot mean anything by a list of them.
        assert!(topology.restrict_memory(&[NodeId(3)]).unwrap().nodes()[0].memory_allowed());
    };
    check(tree().online("0-2"), &[0, 1, 2]);
    check(tree().online("0-2").folder("sys/devices/system/node"), &[0, 1, 2]);
    check(tree(), &[0]);
    // No sysfs at all.
    let proc = |path, content: &str| Tree::new().file("proc/meminfo", meminfo).file(path, content);
    check(proc("proc/cpuinfo", "processor\t: 0\nmodel\t: x\n\nprocessor\t: 5\n"), &[0, 5]);
    check(proc("proc/cpuinfo", "processor 0: version = FF\nprocessor 1: version = FF\n"), &[0, 1]);
    check(proc("proc/cpuinfo", "cpu\t\t: Alpha\n"), &[0]);
    check(proc("proc/stat", "cpu  1 2\ncpu0 1 2\ncpu7 1 2\nintr 1\n"), &[0, 7]);
}

#[test]
fn nonsense_distances_are_replaced() {
    let distance = |row0: &str, from, to| {
        let tree = two_nodes().file("sys/devices/system/node/node0/distance", row0);
        tree.read().distance(NodeId(from), NodeId(to))
    };
    assert_eq!(distance("10 0", 0, 1), 20, "reserved by ACPI");
    assert_eq!(distance("99 30", 0, 0), 10, "a node is local to itself");
    assert_eq!(distance("10 30", 0, 1), 30);
    assert_eq!(distance("10 30", 1, 0), 21, "tables need not be symmetric");
    assert_eq!(distance("10", 0, 1), 20, "too short");
    assert_eq!(distance("10 30 40", 0, 1), 20, "too long");
    assert_eq!(distance("10 10", 0, 1), 10, "all equally near");
    assert_eq!(distance("10 99999999999999999999", 0, 1), 255);
    assert_eq!(distance("10 30", 0, 9), 20, "no such node");

    // Equally near, yet the node itself comes first.
    let topology = two_nodes().file("sys/devices/system/node/node0/distance", "10 10");
    let topology = topology.file("sys/devices/system/node/node1/distance", "10 10").read();
    assert_eq!(topology.nodes_by_distance(NodeId(1)), ids(&[1, 0]));
    assert_eq!(topology.serving_nodes(NodeId(1)), ids(&[1, 0]));
}

#[test]
fn nodes_that_claim_the_same_cpus() {
    let topology = Tree::new().online("0-3").node(0, "0-2", 4, "10 10").node(1, "2-3", 4, "10 10").read();
    assert_eq!(kinds(&topology), [(0, NodeKind::Normal), (1, NodeKind::Overlapping)]);
    assert_eq!(topology.node(NodeId(0)).unwrap().cpus(), [0, 1, 2]);
    assert_eq!(topology.node(NodeId(1)).unwrap().cpus(), [3], "each CPU once");
    assert_eq!(topology.default_memory_nodes(), ids(&[0]));
    assert_served(&topology);
}

#[test]
fn cpus_of_no_node_are_better_than_none() {
    let tree = Tree::new().online("0-5").node(0, "0-1", 4, "10 20").node(1, "2-3", 4, "20 10");
    let topology = tree.read();
    assert_eq!(topology.cpus_serving(NodeId(0)), [0, 1], "not needed");
    let topology = topology.restrict_cpus(&[4, 5]).unwrap();
    assert_eq!(topology.cpus_serving(NodeId(1)), [4, 5]);
    assert_served(&topology);
    assert_served(&topology.restrict_cpus(&[5]).unwrap());
    // Nodes that list no CPU whatsoever.
    let topology = Tree::new().online("0-1").node(2, "", 4, "").node(3, "", 4, "").read();
    assert_eq!(topology.cpus_serving(NodeId(3)), [0, 1]);
    assert_served(&topology);
}

#[test]
fn restricting_never_widens() {
    let topology = two_nodes().read().restrict_cpus(&[1, 2]).unwrap().restrict_cpus(&[3, 2, 0]).unwrap();
    let allowed: Vec<u32> = topology.nodes().iter().flat_map(|node| node.allowed_cpus().to_vec()).collect();
    assert_eq!(allowed, [2]);
    let message = topology.restrict_cpus(&[1]).unwrap_err().to_string();
    assert!(message.contains("[1]") && message.contains("affinity"), "{message}");

    let topology = two_nodes().read().restrict_memory(&[NodeId(1)]).unwrap();
    assert_eq!(topology.default_memory_nodes(), ids(&[1]));
    let error = topology.restrict_memory(&[NodeId(0)]).unwrap_err();
    assert!(matches!(&error, TopologyError::NoAllowedMemory { allowed, .. } if *allowed == [0]), "{error}");
}

#[test]
fn junk_is_refused_by_the_name_of_the_file() {
    let node = "sys/devices/system/node";
    for (file, junk) in [
        ("sys/devices/system/cpu/online", "banana"),
        ("sys/devices/system/cpu/online", "0-4294967295"),
        ("sys/devices/system/cpu/online", "0-99999999999999999999999"),
        ("sys/devices/system/node/online", "1-0"),
        ("sys/devices/system/node/has_memory", "0x3"),
        ("sys/devices/system/node/node0/cpumap", "0000000g"),
        ("sys/devices/system/node/node1/cpulist", "2-3,"),
        ("sys/devices/system/node/node1/meminfo", "Node 1 MemTotal: 18446744073709551615 kB"),
        ("sys/devices/system/node/node1/meminfo", "Node 1 MemTotal: -5 kB"),
        ("sys/devices/system/node/node1/meminfo", "nothing of the kind"),
        ("sys/devices/system/node/node0/distance", "10 -1"),
    ] {
        let tree = two_nodes().file(file, junk);
        let error = tree.error();
        assert!(
            matches!(&error, TopologyError::Malformed { path, .. } if *path == tree.0.join(file)),
            "{file}: {error}"
        );
        assert!(error.to_string().contains(junk), "{error}");
    }
    let tree = two_nodes().file(&format!("{node}/node1/cpulist"), [0xFF, 0xFE, b'1']);
    assert!(matches!(tree.error(), TopologyError::Malformed { .. }));
}

#[test]
fn unreadable_files_are_named_and_nothing_at_all_too() {
    // Reading a folder fails for root too.
    let tree = two_nodes().without("sys/devices/system/node/node1/meminfo");
    let tree = tree.folder("sys/devices/system/node/node1/meminfo");
    let error = tree.error();
    assert!(error.to_string().contains("node1/meminfo"), "{error}");
    assert!(matches!(error, TopologyError::Unreadable { .. }));

    let tree = two_nodes().without("sys/devices/system/cpu/online");
    symlink("online", tree.0.join("sys/devices/system/cpu/online")).unwrap();
    assert!(tree.error().to_string().contains("cpu/online"), "a symlink to itself");

    let error = Topology::read(Path::new("/no/such/folder")).unwrap_err();
    assert!(
        matches!(&error, TopologyError::NoCpu { root } if root == Path::new("/no/such/folder")),
        "{error}"
    );
}
