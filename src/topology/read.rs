//! Reads the machine from sysfs and procfs below a root folder. Absent files are no errors (old kernels,
//! kernels without NUMA, containers); unreadable or senseless ones are, and the error names them.
//!
//! Formats: `Documentation/ABI/stable/sysfs-devices-node`, `Documentation/admin-guide/cputopology.rst`
//! of Linux, proc(5).

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use super::list::{self, LIST, MASK};
use super::{LOCAL_DISTANCE, Node, NodeId, NodeKind, REMOTE_DISTANCE, Topology, UNREACHABLE_DISTANCE};
use crate::error::TopologyError;

const NODES: &str = "sys/devices/system/node";
const CPUS: &str = "sys/devices/system/cpu";

/// The text of a file; `None` when it is absent or blank.
fn text(path: &Path) -> Result<Option<String>, TopologyError> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(Some(list::text(&bytes)).filter(|text| !text.is_empty())),
        Err(error) if absent(&error) => Ok(None),
        Err(source) => Err(TopologyError::Unreadable { path: path.to_owned(), source }),
    }
}

fn absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

fn malformed(path: &Path, expected: &'static str, found: &str) -> TopologyError {
    TopologyError::Malformed { path: path.to_owned(), expected, found: found.chars().take(60).collect() }
}

/// A file that holds a list; `None` when it is absent or blank.
fn list(path: &Path) -> Result<Option<Vec<u32>>, TopologyError> {
    let Some(text) = text(path)? else { return Ok(None) };
    list::parse_list(&text).map(Some).ok_or_else(|| malformed(path, LIST, &text))
}

/// The names in a folder, none when it is absent.
fn names(folder: &Path) -> Result<Vec<String>, TopologyError> {
    let unreadable = |source| TopologyError::Unreadable { path: folder.to_owned(), source };
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if absent(&error) => return Ok(Vec::new()),
        Err(error) => return Err(unreadable(error)),
    };
    entries.map(|entry| Ok(entry.map_err(unreadable)?.file_name().to_string_lossy().into_owned())).collect()
}

/// The numbers of a folder's entries "cpu7" or "node7", ascending; "cpufreq" is none of them.
fn numbered(folder: &Path, prefix: &str) -> Result<Vec<u32>, TopologyError> {
    let ids: BTreeSet<u32> =
        names(folder)?.iter().filter_map(|name| name.strip_prefix(prefix)).filter_map(list::id).collect();
    Ok(ids.into_iter().collect())
}

/// The online CPUs, from the first of these that says anything: the kernel's list; the CPU folders less
/// those that say they are offline; /proc/cpuinfo; /proc/stat.
fn online_cpus(root: &Path) -> Result<BTreeSet<u32>, TopologyError> {
    let folder = root.join(CPUS);
    if let Some(online) = list(&folder.join("online"))? {
        return Ok(online.into_iter().collect());
    }
    let mut online = BTreeSet::new();
    for cpu in numbered(&folder, "cpu")? {
        // CPUs that cannot be unplugged have no such file.
        if text(&folder.join(format!("cpu{cpu}/online")))?.as_deref() != Some("0") {
            online.insert(cpu);
        }
    }
    if online.is_empty() {
        let cpuinfo = text(&root.join("proc/cpuinfo"))?;
        online.extend(cpuinfo.iter().flat_map(|text| text.lines()).filter_map(|line| {
            let (key, value) = line.split_once(':')?;
            // "processor : 3", on s390 "processor 3: version = ...".
            let key = key.trim().strip_prefix("processor")?.trim();
            list::id(if key.is_empty() { value.trim() } else { key })
        }));
        if online.is_empty() {
            let stat = text(&root.join("proc/stat"))?;
            let first =
                stat.iter().flat_map(|text| text.lines()).filter_map(|line| line.split_whitespace().next());
            online.extend(first.filter_map(|word| word.strip_prefix("cpu")).filter_map(list::id));
        }
        // Kernels for one processor need not number it.
        if online.is_empty() && cpuinfo.is_some() {
            online.insert(0);
        }
    }
    Ok(online)
}

/// The bytes behind "MemTotal: 123 kB", also after "Node 0"; `None` when the file is absent or blank.
fn memory_bytes(path: &Path) -> Result<Option<u64>, TopologyError> {
    const EXPECTED: &str = "a line like MemTotal: 1024 kB";
    let Some(text) = text(path)? else { return Ok(None) };
    let Some(line) = text.lines().find(|line| line.contains("MemTotal:")) else {
        return Err(malformed(path, EXPECTED, &text));
    };
    let value = line.split_once("MemTotal:").map_or("", |(_, value)| value.trim());
    let kib = value.strip_suffix("kB").map(str::trim).and_then(list::number);
    kib.and_then(|kib| kib.checked_mul(1024)).map(Some).ok_or_else(|| malformed(path, EXPECTED, line))
}

/// The CPUs a node lists, online or not: its mask, else its list, else the CPUs linked in its folder.
fn node_cpus(folder: &Path) -> Result<Vec<u32>, TopologyError> {
    let path = folder.join("cpumap");
    if let Some(text) = text(&path)? {
        return list::parse_mask(&text).ok_or_else(|| malformed(&path, MASK, &text));
    }
    match list(&folder.join("cpulist"))? {
        Some(cpus) => Ok(cpus),
        None => numbered(folder, "cpu"),
    }
}

/// The memory that is not the machine's own, by node: GPUs' (NVIDIA's driver names the node) and what
/// device-dax handed to the page allocator (CXL, persistent or high-bandwidth memory). Best effort: a
/// node that is missed here still has no CPUs and is not ordinary.
fn foreign_memory(root: &Path) -> BTreeMap<u32, NodeKind> {
    let mut kinds = BTreeMap::new();
    let mut look = |folder: &str, file: &str, kind: NodeKind, node: fn(&str) -> Option<u32>| {
        let folder = root.join(folder);
        for path in names(&folder).unwrap_or_default().iter().map(|name| folder.join(name).join(file)) {
            match text(&path) {
                Ok(text) => kinds.extend(text.as_deref().and_then(node).map(|node| (node, kind))),
                Err(error) => tracing::debug!(%error, "a device does not say on which node its memory is"),
            }
        }
    };
    look("sys/bus/dax/drivers/kmem", "target_node", NodeKind::Expansion, list::id);
    look("proc/driver/nvidia/gpus", "numa_status", NodeKind::Device, |text| {
        text.lines().find_map(|line| list::id(line.strip_prefix("Node:")?.trim()))
    });
    kinds
}

/// The distances as a table of `ids` by `ids`, with sense made of nonsense as [`Topology::distance`] says.
fn distances(folder: &Path, online: &[u32], ids: &[u32]) -> Result<Vec<u32>, TopologyError> {
    let mut table = Vec::with_capacity(ids.len() * ids.len());
    for from in ids {
        let path = folder.join(format!("node{from}/distance"));
        let row = text(&path)?.unwrap_or_default();
        let values = row.split_whitespace().map(|word| {
            let digits = word.bytes().all(|byte| byte.is_ascii_digit());
            let value = word.parse().unwrap_or(UNREACHABLE_DISTANCE).min(UNREACHABLE_DISTANCE);
            digits.then_some(value).ok_or_else(|| malformed(&path, "distances like 10 21", &row))
        });
        let values = values.collect::<Result<Vec<u32>, _>>()?;
        // A column for each online node, in the order of the ids.
        let columns =
            [online, ids].into_iter().find(|columns| columns.len() == values.len()).unwrap_or_default();
        if columns.is_empty() && !values.is_empty() {
            tracing::debug!(path = %path.display(), columns = values.len(), "distances do not fit the nodes");
        }
        table.extend(ids.iter().map(|to| {
            let value = columns.iter().position(|column| column == to).map(|column| values[column]);
            if from == to {
                LOCAL_DISTANCE
            } else {
                value.filter(|value| *value >= LOCAL_DISTANCE).unwrap_or(REMOTE_DISTANCE)
            }
        }));
    }
    Ok(table)
}

/// The whole machine described below `root`.
pub(super) fn machine(root: &Path) -> Result<Topology, TopologyError> {
    let cpus = online_cpus(root)?;
    if cpus.is_empty() {
        return Err(TopologyError::NoCpu { root: root.to_owned() });
    }
    let folder = root.join(NODES);
    let folders = numbered(&folder, "node")?;
    let online = list(&folder.join("online"))?.unwrap_or_else(|| folders.clone());
    let mut ids: Vec<u32> = online.iter().copied().filter(|id| folders.contains(id)).collect();
    if ids.is_empty() {
        ids = folders;
    }
    if ids.is_empty() {
        let bytes = memory_bytes(&root.join("proc/meminfo"))?.unwrap_or(0);
        return Topology::implicit(root, cpus.into_iter().collect(), bytes);
    }

    let with_memory = match list(&folder.join("has_memory"))? {
        Some(nodes) => Some(nodes),
        None => list(&folder.join("has_normal_memory"))?,
    };
    let foreign = foreign_memory(root);
    let mut unclaimed = cpus.clone();
    let mut claimed = BTreeSet::new();
    let mut nodes = Vec::with_capacity(ids.len());
    for id in &ids {
        let folder = folder.join(format!("node{id}"));
        let listed = node_cpus(&folder)?;
        let mut bytes = memory_bytes(&folder.join("meminfo"))?;
        if bytes.is_none() && ids.len() == 1 {
            bytes = memory_bytes(&root.join("proc/meminfo"))?;
        }
        // A node that does not say is believed to have memory unless the kernel's list omits it.
        let has_memory =
            bytes.map_or(with_memory.as_ref().is_none_or(|nodes| nodes.contains(id)), |bytes| bytes > 0);
        let overlapping = listed.iter().any(|cpu| claimed.contains(cpu));
        let own: Vec<u32> = listed.iter().copied().filter(|cpu| unclaimed.remove(cpu)).collect();
        claimed.extend(listed);
        let kind = match (own.is_empty(), has_memory) {
            _ if overlapping => NodeKind::Overlapping,
            (false, true) => NodeKind::Normal,
            (false, false) => NodeKind::CpusOnly,
            (true, true) => foreign.get(id).copied().unwrap_or(NodeKind::MemoryOnly),
            (true, false) => NodeKind::Empty,
        };
        nodes.push(Node::new(NodeId(*id), kind, own, bytes.unwrap_or(0), has_memory));
    }
    let distances = distances(&folder, &online, &ids)?;
    Topology::new(root, nodes, distances, unclaimed.into_iter().collect(), false)
}

/// The nodes whose memory the process may use; `None` where the kernel does not say.
pub(super) fn allowed_memory(root: &Path) -> Result<Option<Vec<NodeId>>, TopologyError> {
    let path: PathBuf = root.join("proc/self/status");
    let status = text(&path)?.unwrap_or_default();
    let Some(line) = status.lines().find_map(|line| line.strip_prefix("Mems_allowed_list:")) else {
        return Ok(None);
    };
    let nodes = list::parse_list(line).ok_or_else(|| malformed(&path, LIST, line))?;
    Ok(Some(nodes.into_iter().map(NodeId).collect()))
}
