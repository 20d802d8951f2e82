//! Descriptions of machines: made to measure, or captured from a real one.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use vm_zeroing::{Topology, TopologyError};
use vmm_sys_util::tempdir::TempDir;

/// A machine to be made.
#[derive(Debug, Clone, Copy)]
pub struct Made {
    pub nodes: u32,
    pub cpus_per_node: u32,
    pub memory_only_nodes: u32,
}

/// A machine that cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    #[error("no node has CPUs, so nobody can clear; give --cpus-per-node 1 or more")]
    NoCpus,
    #[error(
        "{0} is not there; give the folder that stands for / (with a machine's sys in it), or its archive; \
         examples/scale_sim/three-nodes is one, with all that is read"
    )]
    Absent(PathBuf),
    #[error(
        "{0} describes no machine: there is no sys/devices/system in it; give the folder that stands for /"
    )]
    NoMachine(PathBuf),
    #[error("{path} holds {found} entries, not one folder that stands for /; unpack it and give that folder")]
    Archive { path: PathBuf, found: usize },
    #[error("tar cannot unpack {path}: {why}; install tar and bzip2, or unpack it and give the folder")]
    Unpack { path: PathBuf, why: String },
    #[error("a temporary folder cannot be used ({0}); make room there, or set TMPDIR to another one")]
    Temporary(io::Error),
    #[error(transparent)]
    Topology(#[from] TopologyError),
}

/// Nodes of a socket, and sockets of a chassis, in what is made.
const SOCKET: u32 = 4;
const CHASSIS: u32 = 4 * SOCKET;

impl Made {
    /// As firmware says it of machines with several chassis: 10 here, 12 in the socket, 20 in the chassis, 30
    /// beyond. Memory without CPUs hangs on one of the nodes, ten further than that is.
    fn distance(&self, from: u32, to: u32) -> u32 {
        let host = |node: u32| {
            let behind = node.checked_sub(self.nodes);
            behind.map_or(node, |number| {
                (u64::from(number) * u64::from(self.nodes) / u64::from(self.memory_only_nodes)) as u32
            })
        };
        let further = |node: u32| if node < self.nodes { 0 } else { 10 };
        let (a, b) = (host(from), host(to));
        let near = match () {
            () if from == to => return 10,
            () if a == b => 10,
            () if a / SOCKET == b / SOCKET => 12,
            () if a / CHASSIS == b / CHASSIS => 20,
            () => 30,
        };
        near + further(from).max(further(to))
    }

    /// Writes what the kernel would show of it, and reads that.
    pub fn topology(&self) -> Result<Topology, TreeError> {
        if self.nodes == 0 || self.cpus_per_node == 0 {
            return Err(TreeError::NoCpus);
        }
        let folder = temporary()?;
        self.write(folder.as_path()).map_err(TreeError::Temporary)?;
        Ok(Topology::read(folder.as_path())?)
    }

    fn write(&self, root: &Path) -> io::Result<()> {
        let cpus = root.join("sys/devices/system/cpu");
        fs::create_dir_all(&cpus)?;
        fs::write(
            cpus.join("online"),
            format!("0-{}", u64::from(self.nodes) * u64::from(self.cpus_per_node) - 1),
        )?;
        let all = self.nodes + self.memory_only_nodes;
        for node in 0..all {
            let folder = root.join(format!("sys/devices/system/node/node{node}"));
            fs::create_dir_all(&folder)?;
            let first = u64::from(node) * u64::from(self.cpus_per_node);
            let last = first + u64::from(self.cpus_per_node) - 1;
            let list = if node < self.nodes { format!("{first}-{last}") } else { String::new() };
            fs::write(folder.join("cpulist"), list)?;
            fs::write(folder.join("meminfo"), format!("Node {node} MemTotal: 1048576 kB"))?;
            let row: Vec<String> = (0..all).map(|to| self.distance(node, to).to_string()).collect();
            fs::write(folder.join("distance"), row.join(" "))?;
        }
        Ok(())
    }
}

/// A capture is thousands of small files: memory holds them in a tenth of the time.
fn temporary() -> Result<TempDir, TreeError> {
    let in_memory = TempDir::new_in(Path::new("/dev/shm"));
    in_memory.or_else(|_| TempDir::new()).map_err(|error| TreeError::Temporary(error.into()))
}

/// The machine below a folder that stands for /, or in an archive of one, or in the archive of that name.
pub fn captured(path: &Path) -> Result<Topology, TreeError> {
    let archive =
        || ["tar.bz2", "tar.gz", "tar"].map(|end| PathBuf::from(format!("{}.{end}", path.display())));
    match path {
        folder if folder.is_dir() => read(folder),
        file if file.is_file() => unpack(file),
        _ => match archive().iter().find(|archive| archive.is_file()) {
            Some(archive) => unpack(archive),
            None => Err(TreeError::Absent(path.to_owned())),
        },
    }
}

fn read(root: &Path) -> Result<Topology, TreeError> {
    if !root.join("sys/devices/system").is_dir() && !root.join("proc").is_dir() {
        return Err(TreeError::NoMachine(root.to_owned()));
    }
    Ok(Topology::read(root)?)
}

fn unpack(archive: &Path) -> Result<Topology, TreeError> {
    let failed = |why: String| TreeError::Unpack { path: archive.to_owned(), why };
    let folder = temporary()?;
    let mut tar = Command::new("tar");
    tar.args(["--no-same-owner", "-xf"]).arg(archive).arg("-C").arg(folder.as_path());
    let output = tar.output().map_err(|error| failed(error.to_string()))?;
    if !output.status.success() {
        return Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    let entries = fs::read_dir(folder.as_path()).map_err(TreeError::Temporary)?;
    let entries: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    match entries.as_slice() {
        [root] => read(root),
        _ => Err(TreeError::Archive { path: archive.to_owned(), found: entries.len() }),
    }
}

#[cfg(test)]
mod tests {
    use vm_zeroing::{NodeId, NodeKind};

    use super::*;

    #[test]
    fn what_is_made_is_what_was_asked_for() {
        let topology = Made { nodes: 20, cpus_per_node: 3, memory_only_nodes: 2 }.topology().unwrap();
        let kinds = |kind| topology.nodes().iter().filter(move |node| node.kind() == kind).count();
        assert_eq!((kinds(NodeKind::Normal), kinds(NodeKind::MemoryOnly)), (20, 2));
        assert!(topology.nodes()[..20].iter().all(|node| node.cpus().len() == 3));
        let distance = |from, to| topology.distance(NodeId(from), NodeId(to));
        assert_eq!(
            [(0, 0), (0, 3), (0, 4), (0, 16), (17, 18)].map(|(a, b)| distance(a, b)),
            [10, 12, 20, 30, 12]
        );
        // Node 20 hangs on node 0, node 21 on node 10.
        assert_eq!(
            [(0, 20), (1, 20), (4, 20), (16, 20), (20, 21)].map(|(a, b)| distance(a, b)),
            [20, 22, 30, 40, 30]
        );
        assert_eq!(topology.serving_nodes(NodeId(21))[0], NodeId(10));
    }

    #[test]
    fn what_is_not_there_is_named() {
        let error = captured(Path::new("/nonexistent/tree")).unwrap_err().to_string();
        assert!(error.contains("/nonexistent/tree is not there") && error.contains("three-nodes"), "{error}");
        let empty = TempDir::new().unwrap();
        let error = captured(empty.as_path()).unwrap_err().to_string();
        assert!(error.contains("describes no machine"), "{error}");
        let file = empty.as_path().join("a.tar");
        fs::write(&file, "no archive").unwrap();
        let error = captured(&file).unwrap_err().to_string();
        assert!(error.contains("tar cannot unpack"), "{error}");
        assert!(Made { nodes: 1, cpus_per_node: 0, memory_only_nodes: 3 }.topology().is_err());
    }
}
