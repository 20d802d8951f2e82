//! The scheduling decisions: what next, whom to rob, where a chunk belongs. No threads, no clocks.
//!
//! The same code is driven by the worker threads and by the tests; whoever drives it supplies the
//! queues through [`Queues`].

use crate::topology::{NodeId, Topology};

/// The place of a node in the plan: an index, dense where node ids are not.
pub(crate) type Place = usize;

/// Where tasks wait, as one worker sees it.
pub(crate) trait Queues {
    type Task;
    /// The near end of the worker's own deque.
    fn pop_own(&mut self) -> Option<Self::Task>;
    /// The queue of a node.
    fn take_from_node(&mut self, node: Place) -> Option<Self::Task>;
    /// The far end of another worker's deque.
    fn rob(&mut self, victim: usize) -> Option<Self::Task>;
}

/// Which nodes have workers, and in which order each of them looks for work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Nodes with workers, ascending by id.
    homes: Vec<NodeId>,
    /// The home of each worker.
    workers: Vec<Place>,
    /// For each place: all places by distance, itself first.
    neighbours: Vec<Vec<Place>>,
    /// Every node of the machine and the nearest place that serves it.
    served_by: Vec<(NodeId, Place)>,
}

impl Plan {
    /// Workers on every node with allowed CPUs, `per_node` at most and no more than the node has CPUs.
    pub(crate) fn new(topology: &Topology, per_node: usize) -> Self {
        let with_cpus = topology.nodes().iter().filter(|node| !node.allowed_cpus().is_empty());
        let sizes: Vec<(NodeId, usize)> =
            with_cpus.map(|node| (node.id(), node.allowed_cpus().len().min(per_node))).collect();
        let homes: Vec<NodeId> = sizes.iter().map(|(id, _)| *id).collect();
        let place_of = |id: NodeId| homes.binary_search(&id).ok();
        let workers = sizes
            .iter()
            .enumerate()
            .flat_map(|(place, (_, count))| std::iter::repeat_n(place, *count))
            .collect();
        let neighbours = homes
            .iter()
            .map(|home| topology.nodes_by_distance(*home).into_iter().filter_map(place_of).collect())
            .collect();
        let served_by = topology
            .nodes()
            .iter()
            .filter_map(|node| {
                let server = topology.serving_nodes(node.id()).into_iter().find_map(place_of)?;
                Some((node.id(), server))
            })
            .collect();
        Self { homes, workers, neighbours, served_by }
    }

    /// The workers' homes, one entry a worker.
    pub(crate) fn workers(&self) -> &[Place] {
        &self.workers
    }

    pub(crate) fn homes(&self) -> &[NodeId] {
        &self.homes
    }

    /// All places by distance from `place`, itself first.
    pub(crate) fn neighbours(&self, place: Place) -> &[Place] {
        self.neighbours.get(place).map_or(&[], Vec::as_slice)
    }

    /// The place that serves a node's memory; the first place for an unknown node.
    pub(crate) fn place_for(&self, node: NodeId) -> Place {
        self.served_by.iter().find(|(id, _)| *id == node).map_or(0, |(_, place)| *place)
    }

    /// Finds the next task of `worker`: its own, its node's, its siblings', then node by node by
    /// distance, each node's queue before its workers' deques.
    pub(crate) fn next<Q: Queues>(&self, worker: usize, queues: &mut Q) -> Option<Q::Task> {
        let home = *self.workers.get(worker)?;
        if let Some(task) = queues.pop_own() {
            return Some(task);
        }
        self.neighbours(home)
            .iter()
            .find_map(|&place| queues.take_from_node(place).or_else(|| self.rob_place(worker, place, queues)))
    }

    /// Starts behind the robber's own number, so that robbers do not all queue at the same victim.
    fn rob_place<Q: Queues>(&self, robber: usize, place: Place, queues: &mut Q) -> Option<Q::Task> {
        let count = self.workers.len();
        (1..count)
            .map(|step| (robber + step) % count)
            .filter(|&victim| self.workers.get(victim) == Some(&place))
            .find_map(|victim| queues.rob(victim))
    }

    /// What to do with a chunk believed to lie on `believed` and found on `found`, in the hands of a
    /// worker at `home`: send it to the place that serves it, or keep it (`None`).
    ///
    /// A chunk is sent once: with it goes the truth, and whoever then takes it, a robber included,
    /// keeps it. So no chunk travels for ever.
    pub(crate) fn belongs_elsewhere(
        &self,
        home: Place,
        believed: Option<NodeId>,
        found: Option<NodeId>,
    ) -> Option<Place> {
        let found = found.filter(|found| believed != Some(*found))?;
        Some(self.place_for(found)).filter(|place| *place != home)
    }
}

#[cfg(test)]
mod tests;
