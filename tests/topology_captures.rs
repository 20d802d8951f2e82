//! The topology reader on captures of real machines, compared with what hwloc's lstopo makes of them.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "helpers of tests are tests"
)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use vm_zeroing::{Node, NodeKind, Topology};

/// What lstopo says of one NUMA node.
#[derive(Debug)]
struct Expected {
    id: u32,
    cpus: Vec<u32>,
    memory_bytes: u64,
    gpu: bool,
}

fn attribute<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = line.split_once(&format!(" {name}=\""))?;
    rest.split_once('"').map(|(value, _)| value)
}

/// The ids of "0x000000ff,,0x0": hwloc leaves out a word that is zero.
fn bitmap(text: &str) -> Vec<u32> {
    let mut ids = Vec::new();
    for (word, base) in text.rsplit(',').zip((0u32..).step_by(32)) {
        let bits = u32::from_str_radix(word.trim_start_matches("0x"), 16).unwrap_or(0);
        ids.extend((0..32).filter(|bit| bits >> bit & 1 == 1).map(|bit| base + bit));
    }
    ids
}

/// lstopo on the whole machine: offline CPUs left out, what a cpuset forbade left in, GPU nodes kept.
/// `None` when it is not installed or cannot read the capture.
fn lstopo(root: &Path) -> Option<Vec<Expected>> {
    let output = Command::new("lstopo-no-graphics")
        .args(["--if", "fsroot", "--of", "xml", "--no-io", "--disallowed", "--input"])
        .arg(root)
        .env("HWLOC_KEEP_NVIDIA_GPU_NUMA_NODES", "1")
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    let text = String::from_utf8(output.stdout).unwrap();
    let nodes = text.lines().filter(|line| line.contains("<object type=\"NUMANode\""));
    let mut nodes: Vec<Expected> = nodes
        .map(|line| Expected {
            id: attribute(line, "os_index").unwrap().parse().unwrap(),
            cpus: bitmap(attribute(line, "cpuset").unwrap()),
            memory_bytes: attribute(line, "local_memory").map_or(0, |bytes| bytes.parse().unwrap()),
            gpu: attribute(line, "subtype") == Some("GPUMemory"),
        })
        .collect();
    nodes.sort_by_key(|node| node.id);
    Some(nodes)
}

/// A capture unpacked into a folder of its own, removed at the end.
struct Capture(PathBuf);

impl Capture {
    fn unpack(archive: &Path) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = archive.file_name().unwrap().to_string_lossy();
        let unique = format!("{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let unique = format!("vm-zeroing-capture-{unique}-{name}");
        // A capture is thousands of small files: memory holds them in a tenth of the time.
        let folders = [PathBuf::from("/dev/shm"), std::env::temp_dir()].map(|parent| parent.join(&unique));
        let folder =
            folders.into_iter().find(|folder| fs::create_dir(folder).is_ok()).expect("a temporary folder");
        let capture = Self(folder);
        let mut tar = Command::new("tar");
        tar.args(["--no-same-owner", "-xf"]).arg(archive).arg("-C").arg(&capture.0);
        assert!(tar.status().unwrap().success(), "tar and bzip2 unpack {name}");
        capture
    }

    fn root(&self) -> PathBuf {
        let mut entries = fs::read_dir(&self.0).unwrap();
        let root = entries.next().unwrap().unwrap().path();
        assert!(entries.next().is_none(), "one folder in an archive");
        root
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Every archive there is, or none and a word about it.
fn archives() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/topologies");
    let Ok(entries) = fs::read_dir(&folder) else {
        println!("skipped: no captures in {}", folder.display());
        return Vec::new();
    };
    for tool in ["tar", "bzip2"] {
        if Command::new(tool).arg("--version").output().is_err() {
            println!("skipped: {tool} is not installed");
            return Vec::new();
        }
    }
    let mut archives: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    archives.retain(|path| path.to_string_lossy().contains(".tar."));
    archives.sort();
    archives
}

fn agree(name: &str, topology: &Topology, expected: &[Expected]) {
    for node in expected {
        let ours = topology.nodes().iter().find(|ours| ours.id().0 == node.id);
        let ours = ours.unwrap_or_else(|| panic!("{name}: node {} is missing", node.id));
        assert_eq!(ours.memory_bytes(), node.memory_bytes, "{name}: memory of node {}", node.id);
        if ours.cpus().is_empty() {
            // lstopo shows such a node beside CPUs that are near: not the node's own.
            assert_eq!(ours.kind() == NodeKind::Device, node.gpu, "{name}: {ours:?}");
        } else {
            assert_eq!(ours.cpus(), node.cpus, "{name}: CPUs of node {}", node.id);
        }
    }
    // lstopo leaves out nodes that claim other nodes' CPUs, and may leave out those without memory.
    let must_be_shown = |node: &&Node| node.memory_bytes() > 0 && node.kind() != NodeKind::Overlapping;
    for node in topology.nodes().iter().filter(must_be_shown) {
        assert!(
            expected.iter().any(|theirs| theirs.id == node.id().0),
            "{name}: {} is not in lstopo",
            node.id()
        );
    }
}

fn sane(name: &str, topology: &Topology) {
    let mut seen = std::collections::BTreeSet::new();
    for node in topology.nodes() {
        assert!(node.cpus().iter().all(|cpu| seen.insert(*cpu)), "{name}: a CPU is on two nodes");
        assert!(!topology.cpus_serving(node.id()).is_empty(), "{name}: {}", node.id());
        assert_eq!(topology.nodes_by_distance(node.id())[0], node.id(), "{name}");
        for to in topology.nodes() {
            let distance = topology.distance(node.id(), to.id());
            assert!((10..=255).contains(&distance), "{name}: {} to {} is {distance}", node.id(), to.id());
        }
    }
    assert!(!topology.default_memory_nodes().is_empty(), "{name}");
    let chosen = topology.default_memory_nodes().into_iter().filter_map(|id| topology.node(id));
    for node in chosen {
        assert!(!matches!(node.kind(), NodeKind::Device | NodeKind::Expansion), "{name}: {}", node.id());
    }
}

/// What is special about some captures, whatever lstopo says.
fn known_for_what_they_are(name: &str, topology: &Topology) -> bool {
    let are = |ids: &[u32], kind: NodeKind| {
        ids.iter().all(|id| topology.nodes().iter().any(|node| node.id().0 == *id && node.kind() == kind))
    };
    match name.trim_end_matches(".tar.bz2") {
        "nvidiagpunumanodes" => {
            are(&[250, 251, 252, 253, 254, 255], NodeKind::Device)
                && topology.default_memory_nodes().iter().map(|id| id.0).eq([0, 8])
        }
        "fakememinitiators-1np2c+1npp+gi" => {
            are(&[0, 1, 2, 3], NodeKind::CpusOnly)
                && are(&[4], NodeKind::Empty)
                && are(&[5, 6, 8, 9], NodeKind::MemoryOnly)
                && are(&[7, 10], NodeKind::Expansion)
        }
        "8em64t-2s2ca2c-buggynuma" => are(&[1, 2, 3, 4, 5, 6, 7], NodeKind::Overlapping),
        "20s390-2g6s4c" | "2i386-2c-nohugepage" => topology.is_implicit(),
        "256ia64-64n2s2c" => topology.nodes().len() == 64,
        _ => true,
    }
}

#[test]
fn captures_agree_with_lstopo() {
    let mut compared = 0;
    let archives = archives();
    for archive in &archives {
        let name = archive.file_name().unwrap().to_string_lossy().into_owned();
        let capture = Capture::unpack(archive);
        let topology = Topology::read(&capture.root()).unwrap_or_else(|error| panic!("{name}: {error}"));
        sane(&name, &topology);
        assert!(known_for_what_they_are(&name, &topology), "{name}: {:?}", topology.nodes());
        match lstopo(&capture.root()) {
            Some(expected) => {
                assert!(!expected.is_empty(), "{name}: lstopo shows no node");
                agree(&name, &topology, &expected);
                compared += 1;
            }
            None => println!("skipped: lstopo-no-graphics (Debian: hwloc-nox) did not read {name}, we did"),
        }
    }
    let installed = Command::new("lstopo-no-graphics").arg("--version").output().is_ok();
    assert!(compared > 0 || !installed || archives.is_empty(), "lstopo reads none of the captures");
    println!("{compared} captures compared with lstopo");
}
