//! What other floors ask: which nodes, how far, served by which CPUs.

use super::{LOCAL_DISTANCE, Node, NodeId, NodeKind, REMOTE_DISTANCE, Topology};

impl Topology {
    /// All nodes, ascending by number.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    fn index(&self, id: NodeId) -> Option<usize> {
        self.nodes.binary_search_by_key(&id, Node::id).ok()
    }

    /// The node with this number.
    pub fn node(&self, id: NodeId) -> Option<&Node> {
        self.index(id).map(|index| &self.nodes[index])
    }

    /// Whether the kernel showed no nodes and one was made up that holds all CPUs and all memory.
    pub fn is_implicit(&self) -> bool {
        self.implicit
    }

    /// How far `to` is from `from`: 10 is local, 20 twice as slow, 255 out of reach (ACPI's units).
    ///
    /// The firmware's table is believed as far as it makes sense. A node is 10 from itself. A row that is
    /// missing or does not fit the nodes, a distance below 10 and a node that does not exist count as 20;
    /// anything above 255 as 255. A table with 10 everywhere is kept: all nodes are equally near.
    pub fn distance(&self, from: NodeId, to: NodeId) -> u32 {
        match (self.index(from), self.index(to)) {
            _ if from == to => LOCAL_DISTANCE,
            (Some(from), Some(to)) => self.distances[from * self.nodes.len() + to],
            _ => REMOTE_DISTANCE,
        }
    }

    /// All nodes, the nearest to `from` first, itself before all; among equals the lower number first.
    pub fn nodes_by_distance(&self, from: NodeId) -> Vec<NodeId> {
        let mut ids: Vec<NodeId> = self.nodes.iter().map(Node::id).collect();
        ids.sort_by_key(|to| (*to != from, self.distance(from, *to), *to));
        ids
    }

    /// The nodes with allowed CPUs, in the order in which they should work on memory of node `memory`:
    /// itself if it has CPUs, then by distance from the CPUs to the memory; among equals the lower number
    /// first. Never empty, also for a node that does not exist.
    pub fn serving_nodes(&self, memory: NodeId) -> Vec<NodeId> {
        let mut ids: Vec<NodeId> =
            self.nodes.iter().filter(|node| !node.allowed_cpus.is_empty()).map(Node::id).collect();
        ids.sort_by_key(|cpus| (*cpus != memory, self.distance(*cpus, memory), *cpus));
        ids
    }

    /// The allowed CPUs nearest to the memory of node `memory`, ascending: its own if it has some, else
    /// those of all nodes at the smallest distance. Never empty, also for a node that does not exist.
    pub fn cpus_serving(&self, memory: NodeId) -> &[u32] {
        let with_cpus = || self.nodes.iter().find(|node| !node.allowed_cpus.is_empty());
        self.node(memory).or_else(with_cpus).map_or(&[], |node| &node.serving)
    }

    /// The nodes whose memory may be chosen when nobody named a node, ascending: the ordinary ones among
    /// those with allowed memory. Where there are none, those with memory that nobody says is foreign.
    /// GPU memory and what a driver added (CXL) is never among them, so that a cpuset with nothing else
    /// gets an empty list: the caller then names the node.
    pub fn default_memory_nodes(&self) -> Vec<NodeId> {
        let of = |kinds: &[NodeKind]| -> Vec<NodeId> {
            let suits = |node: &&Node| node.memory_allowed && kinds.contains(&node.kind);
            self.nodes.iter().filter(suits).map(Node::id).collect()
        };
        let ordinary = of(&[NodeKind::Normal]);
        if ordinary.is_empty() { of(&[NodeKind::MemoryOnly, NodeKind::Overlapping]) } else { ordinary }
    }
}
