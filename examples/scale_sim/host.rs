//! The simulated machine: what its memory takes and what its workers store.

use std::collections::BTreeMap;

use vm_zeroing::{NodeId, NodeKind, Topology};

use crate::machine::Plan;
use crate::memory::{Memory, Pace};

/// How fast things are, and what they cost.
#[derive(Debug, Clone)]
pub struct Speeds {
    /// Bytes a second that a node's memory takes.
    pub node: f64,
    /// Bytes a second that one worker stores to its own node's memory when alone.
    pub core: f64,
    /// A worker at distance 20 is slower by this; at other distances in proportion.
    pub remote_penalty: f64,
    /// Bytes a second that all remote workers together store to one node.
    pub link: f64,
    /// The parts of a node's memory bandwidth that are left.
    pub slow_nodes: BTreeMap<u32, f64>,
    /// The parts that are left of all CPUs of a node.
    pub busy_nodes: BTreeMap<u32, f64>,
    /// The parts that are left of the CPUs of workers, by their numbers.
    pub slow_workers: BTreeMap<usize, f64>,
}

/// Something that is not on this machine.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    #[error("there is no node {asked}; the nodes are {known}")]
    Node { asked: u32, known: String },
    #[error("node {node} has no {lacks}; {remedy}")]
    Lacks { node: u32, lacks: &'static str, remedy: &'static str },
    #[error("there is no worker {asked}; the {count} workers have the numbers 0 to {}", count - 1)]
    Worker { asked: usize, count: usize },
    #[error("no worker: --workers-per-node 0 leaves all to the caller's thread; give 1 or more")]
    NoWorkers,
}

/// The nodes that guests may have memory on, as the topology lists them: GPUs' is not theirs.
pub fn memory_nodes(topology: &Topology) -> Vec<usize> {
    let nodes = topology.nodes().iter().enumerate();
    let suits = nodes.filter(|(_, node)| node.memory_allowed() && node.kind() != NodeKind::Device);
    suits.map(|(index, _)| index).collect()
}

/// A thread that clears: the index of its node, and which part of a CPU it has.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Hand {
    pub node: usize,
    pub share: f64,
}

/// The simulated machine. Nodes are indexed as the topology lists them.
#[derive(Debug, Clone)]
pub struct Host {
    pub topology: Topology,
    pub speeds: Speeds,
    /// Where the pool has its workers, in the order of their numbers.
    pub wanted: Vec<NodeId>,
    pub workers: Vec<Hand>,
    bandwidths: Vec<f64>,
}

impl Host {
    pub fn new(topology: Topology, workers_per_node: usize, speeds: Speeds) -> Result<Self, HostError> {
        let wanted = Plan::wanted(&topology, workers_per_node);
        if wanted.is_empty() {
            return Err(HostError::NoWorkers);
        }
        let mut host = Self { topology, wanted, workers: Vec::new(), bandwidths: Vec::new(), speeds };
        for node in host.speeds.slow_nodes.keys() {
            host.index(*node)?;
        }
        for node in host.speeds.busy_nodes.keys() {
            if host.topology.nodes()[host.index(*node)?].allowed_cpus().is_empty() {
                let remedy = "name a node whose CPUs are to be busy";
                return Err(HostError::Lacks { node: *node, lacks: "CPUs", remedy });
            }
        }
        if let Some(asked) = host.speeds.slow_workers.keys().find(|worker| **worker >= host.wanted.len()) {
            return Err(HostError::Worker { asked: *asked, count: host.wanted.len() });
        }
        let part = |parts: &BTreeMap<u32, f64>, id: u32| parts.get(&id).copied().unwrap_or(1.0);
        host.bandwidths = host
            .topology
            .nodes()
            .iter()
            .map(|node| host.speeds.node * part(&host.speeds.slow_nodes, node.id().0))
            .collect();
        let workers = host.wanted.iter().enumerate().map(|(number, id)| {
            let own = host.speeds.slow_workers.get(&number).copied().unwrap_or(1.0);
            Ok(Hand { node: host.index(id.0)?, share: own.min(part(&host.speeds.busy_nodes, id.0)) })
        });
        host.workers = workers.collect::<Result<_, _>>()?;
        Ok(host)
    }

    /// The index of a node.
    pub fn index(&self, id: u32) -> Result<usize, HostError> {
        let nodes = self.topology.nodes();
        nodes.iter().position(|node| node.id().0 == id).ok_or_else(|| {
            let mut known: Vec<String> = nodes.iter().map(|node| node.id().0.to_string()).collect();
            if known.len() > 12 && known.iter().enumerate().all(|(index, id)| *id == index.to_string()) {
                known = vec![format!("0 to {}", known.len() - 1)];
            }
            HostError::Node { asked: id, known: known.join(", ") }
        })
    }

    pub fn id(&self, index: usize) -> NodeId {
        self.topology.nodes()[index].id()
    }

    pub fn nodes(&self) -> usize {
        self.bandwidths.len()
    }

    /// Bytes a second that the memory of a node takes.
    pub fn bandwidth(&self, node: usize) -> f64 {
        self.bandwidths[node]
    }

    pub fn memories(&self) -> Vec<Memory> {
        self.bandwidths.iter().map(|bandwidth| Memory::new(*bandwidth, self.speeds.link)).collect()
    }

    /// How much slower a CPU of `from` stores to `to` than to its own memory.
    pub fn penalty(&self, from: usize, to: usize) -> f64 {
        let distance = self.topology.distance(self.id(from), self.id(to));
        1.0 + (self.speeds.remote_penalty - 1.0) * (f64::from(distance) - 10.0) / 10.0
    }

    pub fn pace(&self, hand: Hand, to: usize) -> Pace {
        Pace { most: self.speeds.core * hand.share / self.penalty(hand.node, to), remote: hand.node != to }
    }

    /// What each CPU of the machine could lend a thread, node by node; the first of a node are those of its workers.
    pub fn cpus(&self) -> Vec<Hand> {
        let of_node = |node: usize| {
            let own = self.workers.iter().filter(move |worker| worker.node == node).copied();
            let busy = self.speeds.busy_nodes.get(&self.id(node).0).copied().unwrap_or(1.0);
            let count = self.topology.nodes()[node].allowed_cpus().len();
            own.chain(std::iter::repeat(Hand { node, share: busy })).take(count)
        };
        (0..self.nodes()).flat_map(of_node).collect()
    }
}
