//! Floor 1: the machine's NUMA nodes, their CPUs, memory and distances, read from sysfs.

mod list;
mod query;
mod read;
mod restrict;

use std::fmt;
use std::path::{Path, PathBuf};

use crate::error::TopologyError;
use crate::sys;

/// The distance of a node to itself (ACPI specification, System Locality Information Table).
const LOCAL_DISTANCE: u32 = 10;
/// The distance of other nodes where the machine gives none or nonsense: Linux's own default.
const REMOTE_DISTANCE: u32 = 20;
/// The ACPI value for "cannot be reached".
const UNREACHABLE_DISTANCE: u32 = 255;

/// A NUMA node's number, as the kernel counts them. Numbers may have gaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct NodeId(pub u32);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {}", self.0)
    }
}

/// What a NUMA node is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NodeKind {
    /// Online CPUs and memory.
    Normal,
    /// Online CPUs, no memory.
    CpusOnly,
    /// Memory without online CPUs, and nobody says why: CXL or high-bandwidth memory that the firmware
    /// handed over, or a socket whose CPUs are offline.
    MemoryOnly,
    /// Memory without CPUs that a device-dax driver handed to the page allocator: CXL expansion,
    /// persistent or high-bandwidth memory.
    Expansion,
    /// A device's memory, such as a GPU's.
    Device,
    /// Claims CPUs that a node with a lower number has already (`numa=fake`, wrong firmware tables). Such
    /// CPUs count for the first node only; the memory may well be real.
    Overlapping,
    /// Neither CPUs nor memory: a generic initiator, or all of it offline.
    Empty,
}

/// One NUMA node.
#[derive(Debug, Clone)]
pub struct Node {
    id: NodeId,
    kind: NodeKind,
    cpus: Vec<u32>,
    allowed_cpus: Vec<u32>,
    /// The nearest allowed CPUs, see [`Topology::cpus_serving`].
    serving: Vec<u32>,
    memory_bytes: u64,
    memory_allowed: bool,
}

impl Node {
    fn new(id: NodeId, kind: NodeKind, cpus: Vec<u32>, memory_bytes: u64, has_memory: bool) -> Self {
        let allowed_cpus = cpus.clone();
        Self { id, kind, cpus, allowed_cpus, serving: Vec::new(), memory_bytes, memory_allowed: has_memory }
    }

    /// The node's number.
    pub fn id(&self) -> NodeId {
        self.id
    }

    /// What the node is made of.
    pub fn kind(&self) -> NodeKind {
        self.kind
    }

    /// The node's online CPUs, ascending, allowed or not.
    pub fn cpus(&self) -> &[u32] {
        &self.cpus
    }

    /// The CPUs on this node that may be used, ascending. Should the only allowed CPUs belong to no node,
    /// the first node lends its name to them.
    pub fn allowed_cpus(&self) -> &[u32] {
        &self.allowed_cpus
    }

    /// The node's memory in bytes (`MemTotal`); 0 also where the kernel does not say.
    pub fn memory_bytes(&self) -> u64 {
        self.memory_bytes
    }

    /// Whether the node has memory and it may be used.
    pub fn memory_allowed(&self) -> bool {
        self.memory_allowed
    }

    /// Whether the node is the machine's plain CPUs and memory, whose memory may be chosen without being
    /// asked for by number. GPU, CXL and other foreign memory is not.
    pub fn is_ordinary(&self) -> bool {
        self.kind == NodeKind::Normal
    }
}

/// The machine's NUMA nodes, and what of them may be used.
#[derive(Debug, Clone)]
pub struct Topology {
    root: PathBuf,
    /// Ascending by number.
    nodes: Vec<Node>,
    /// Row by row, the columns in the order of `nodes`.
    distances: Vec<u32>,
    /// Allowed CPUs that no node claims.
    unclaimed: Vec<u32>,
    implicit: bool,
}

impl Topology {
    /// The whole machine described below `root`, which stands for "/": its `sys/devices/system/node` and
    /// `sys/devices/system/cpu`, and `proc/meminfo`, `proc/cpuinfo`, `proc/stat` where those are missing.
    /// Everything is allowed.
    ///
    /// # Errors
    ///
    /// [`TopologyError`] names a file that exists but cannot be read or makes no sense. Absent files are
    /// no errors: without any node there is one implicit node 0 with all CPUs and all memory.
    pub fn read(root: &Path) -> Result<Self, TopologyError> {
        read::machine(root)
    }

    /// This machine, restricted to what this process may use.
    ///
    /// The CPUs are those of the affinity of the process's main thread: the kernel keeps it inside the
    /// cpuset, and `taskset` and service managers set it for the process. So a calling thread that is
    /// pinned does not narrow the process, unless it is the main thread: that looks no different from an
    /// operator's `taskset` and is obeyed. A program that pins its main thread for its own ends detects
    /// before it does, or uses [`Topology::read`] and [`Topology::restrict_cpus`]. The memory is that of
    /// the cpuset's nodes (`Mems_allowed_list`).
    ///
    /// # Errors
    ///
    /// Those of [`Topology::read`]; [`TopologyError::NoAllowedCpu`], [`TopologyError::NoAllowedMemory`]
    /// and [`TopologyError::Affinity`].
    pub fn detect() -> Result<Self, TopologyError> {
        let root = Path::new("/");
        let allowed = sys::allowed_cpus().map_err(|source| TopologyError::Affinity { source })?;
        let machine = match Self::read(root) {
            // Neither sysfs nor procfs is mounted: the CPUs that we may use are what is known.
            Err(TopologyError::NoCpu { .. }) => Self::implicit(root, allowed.clone(), 0),
            other => other,
        }?;
        let topology = machine.restrict_cpus(&allowed)?;
        match read::allowed_memory(root)? {
            Some(nodes) => topology.restrict_memory(&nodes),
            None => Ok(topology),
        }
    }

    /// One node with all CPUs and all memory.
    fn implicit(root: &Path, cpus: Vec<u32>, memory_bytes: u64) -> Result<Self, TopologyError> {
        let node = Node::new(NodeId(0), NodeKind::Normal, cpus, memory_bytes, true);
        Self::new(root, vec![node], vec![LOCAL_DISTANCE], Vec::new(), true)
    }

    fn new(
        root: &Path,
        nodes: Vec<Node>,
        distances: Vec<u32>,
        unclaimed: Vec<u32>,
        implicit: bool,
    ) -> Result<Self, TopologyError> {
        Self { root: root.to_owned(), nodes, distances, unclaimed, implicit }.settled(&[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(topology: &Topology) -> Vec<u32> {
        topology.nodes().iter().flat_map(|node| node.allowed_cpus().to_vec()).collect()
    }

    /// R32, in a thread of its own: the harness may run a lone test on the main thread.
    #[test]
    fn a_pinned_calling_thread_does_not_narrow_the_process() {
        let expected = allowed(&Topology::detect().unwrap());
        if expected.len() < 2 {
            println!("only one CPU is allowed: this proves little");
        }
        let pinned = std::thread::spawn(move || {
            sys::pin_current_thread(&expected[..1]).unwrap();
            assert_eq!(allowed(&Topology::detect().unwrap()), expected);
        });
        pinned.join().unwrap();
    }
}
