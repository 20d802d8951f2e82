//! Floor 1: the machine's NUMA nodes, their CPUs, memory and distances, read from sysfs.
/// Placeholder.
#[derive(Debug)]
pub struct Node;
/// A NUMA node's number, as the kernel counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u32);
/// Placeholder.
#[derive(Debug)]
pub struct NodeKind;
/// Placeholder.
#[derive(Debug)]
pub struct Topology;
