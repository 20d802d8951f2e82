//! What a simulated run has to tell.

use serde::Serialize;
use vm_zeroing::Topology;

/// One way to clear the memory, and how it went.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Run {
    pub name: String,
    pub threads: usize,
    /// When the last byte was settled.
    pub seconds: f64,
    pub local_bytes: u64,
    pub remote_bytes: u64,
    pub chunks: u64,
    /// Tasks from deques of workers of the same node, and of other nodes when there was no work at home.
    pub steals_near: u64,
    pub steals_far: u64,
    /// Chunks that a worker did at another place although there was work at its own.
    pub helped_out: u64,
    pub wakes: u64,
    /// Chunks found on another node than was believed.
    pub sent_home: u64,
    /// When each node's last byte was settled, as the topology lists the nodes; `None` for those without.
    #[serde(skip)]
    pub finished: Vec<Option<f64>>,
}

impl Run {
    pub fn new(name: &str, nodes: usize) -> Self {
        Self {
            name: name.to_owned(),
            threads: 0,
            seconds: 0.0,
            local_bytes: 0,
            remote_bytes: 0,
            chunks: 0,
            steals_near: 0,
            steals_far: 0,
            helped_out: 0,
            wakes: 0,
            sent_home: 0,
            finished: vec![None; nodes],
        }
    }

    pub fn stole(&mut self, near: bool) {
        if near { self.steals_near += 1 } else { self.steals_far += 1 }
    }

    pub fn cleared(&mut self, node: usize, local: bool, bytes: u64, now: f64) {
        let count = if local { &mut self.local_bytes } else { &mut self.remote_bytes };
        *count += bytes;
        self.chunks += 1;
        self.seconds = self.seconds.max(now);
        self.finished[node] = Some(self.finished[node].map_or(now, |before| before.max(now)));
    }

    /// The part of the bytes that a thread on their own node cleared.
    pub fn local_share(&self) -> f64 {
        self.local_bytes as f64 / (self.local_bytes + self.remote_bytes).max(1) as f64
    }

    /// The first, the middle and the last of the nodes to be done.
    pub fn finish(&self) -> [f64; 3] {
        let mut done: Vec<f64> = self.finished.iter().copied().flatten().collect();
        done.sort_by(f64::total_cmp);
        let at = |index: usize| done.get(index).copied().unwrap_or(0.0);
        [at(0), at(done.len() / 2), at(done.len().saturating_sub(1))]
    }

    /// The number of each node that held memory, and when it was done.
    pub fn finished_by_node(&self, topology: &Topology) -> Vec<Finish> {
        let nodes = topology.nodes().iter().zip(&self.finished);
        nodes.filter_map(|(node, at)| Some(Finish { node: node.id().0, seconds: (*at)? })).collect()
    }
}

/// When a node's last byte was settled.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Finish {
    pub node: u32,
    pub seconds: f64,
}
