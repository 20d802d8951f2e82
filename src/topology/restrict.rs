//! Narrows a topology to what may be used. Never widens: what was taken away stays away.

use std::collections::BTreeSet;

use super::{NodeId, Topology};
use crate::error::TopologyError;

impl Topology {
    /// Allows of the allowed CPUs only these.
    ///
    /// # Errors
    ///
    /// [`TopologyError::NoAllowedCpu`] when none is left.
    pub fn restrict_cpus(mut self, allowed: &[u32]) -> Result<Self, TopologyError> {
        let keep: BTreeSet<u32> = allowed.iter().copied().collect();
        for node in &mut self.nodes {
            node.allowed_cpus.retain(|cpu| keep.contains(cpu));
        }
        self.unclaimed.retain(|cpu| keep.contains(cpu));
        self.settled(allowed)
    }

    /// Allows of the nodes' allowed memory only these nodes'. A topology with one implicit node keeps its
    /// memory: the kernel it was read from knows no nodes.
    ///
    /// # Errors
    ///
    /// [`TopologyError::NoAllowedMemory`] when none is left.
    pub fn restrict_memory(mut self, allowed: &[NodeId]) -> Result<Self, TopologyError> {
        if self.implicit {
            return Ok(self);
        }
        for node in &mut self.nodes {
            node.memory_allowed &= allowed.contains(&node.id);
        }
        if self.nodes.iter().any(|node| node.memory_allowed) {
            return Ok(self);
        }
        let allowed = allowed.iter().map(|node| node.0).collect();
        Err(TopologyError::NoAllowedMemory { root: self.root, allowed })
    }

    /// Sees to it that some node has allowed CPUs and every node is served by the nearest; `allowed` is
    /// for the error.
    pub(super) fn settled(mut self, allowed: &[u32]) -> Result<Self, TopologyError> {
        if self.nodes.iter().all(|node| node.allowed_cpus.is_empty()) {
            // The mask must not be empty: CPUs that no node claims are better than none.
            match self.nodes.first_mut() {
                Some(first) if !self.unclaimed.is_empty() => {
                    first.allowed_cpus = std::mem::take(&mut self.unclaimed)
                }
                _ => return Err(TopologyError::NoAllowedCpu { root: self.root, allowed: allowed.to_vec() }),
            }
        }
        let serving: Vec<Vec<u32>> = self.nodes.iter().map(|node| self.nearest_cpus(node.id)).collect();
        for (node, serving) in self.nodes.iter_mut().zip(serving) {
            node.serving = serving;
        }
        Ok(self)
    }

    /// The node's own allowed CPUs, else those of the nearest nodes that have some.
    fn nearest_cpus(&self, id: NodeId) -> Vec<u32> {
        let own = self.node(id).map_or(&[][..], |node| node.allowed_cpus());
        if !own.is_empty() {
            return own.to_vec();
        }
        let with_cpus = || self.nodes.iter().filter(|node| !node.allowed_cpus.is_empty());
        // Seen from the CPU: it is what reaches for the memory.
        let nearest = with_cpus().map(|node| self.distance(node.id, id)).min();
        let near = with_cpus().filter(|node| Some(self.distance(node.id, id)) == nearest);
        let mut cpus: Vec<u32> = near.flat_map(|node| node.allowed_cpus.iter().copied()).collect();
        cpus.sort_unstable();
        cpus
    }
}
