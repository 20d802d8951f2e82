//! Which workers there are, in which order they look for work, whom to wake, where a chunk belongs.

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

/// Where a task was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// In the worker's own deque.
    Own,
    /// In the queue of a node.
    Node(Place),
    /// In the deque of that worker.
    Robbed(usize),
}

/// Which workers may clear which memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Locality {
    /// A worker serves its own node first and helps others, the nearest first, when it finds nothing there.
    #[default]
    PreferLocal,
    /// A worker serves its own node only, and the nodes without CPUs that it is nearest to. Memory whose node
    /// is not known until its pages are there may be looked at by any worker, and is then sent home.
    LocalOnly,
}

/// Which nodes have workers, and in which order each of them looks for work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Nodes with workers, ascending by id.
    homes: Vec<NodeId>,
    /// The home of each worker.
    workers: Vec<Place>,
    /// The workers of each place, ascending.
    crews: Vec<Vec<usize>>,
    /// For each place: all places by distance, itself first.
    neighbours: Vec<Vec<Place>>,
    /// Every node of the machine and the nearest place that serves it.
    served_by: Vec<(NodeId, Place)>,
    locality: Locality,
}

impl Plan {
    /// Whom the machine has room for: workers on every node with allowed CPUs, `per_node` at most and no more
    /// than the node has CPUs. The first of each node, then the second of each, and so on: so that a host
    /// that starts only some of them leaves no node without for long.
    pub(crate) fn wanted(topology: &Topology, per_node: usize) -> Vec<NodeId> {
        let with_cpus = topology.nodes().iter().filter(|node| !node.allowed_cpus().is_empty());
        let sizes: Vec<(NodeId, usize)> =
            with_cpus.map(|node| (node.id(), node.allowed_cpus().len().min(per_node))).collect();
        let most = sizes.iter().map(|(_, count)| *count).max().unwrap_or(0);
        (0..most)
            .flat_map(|rank| sizes.iter().filter(move |(_, count)| rank < *count).map(|(id, _)| *id))
            .collect()
    }

    /// A plan for the workers that there are, given by the nodes they sit on.
    pub(crate) fn new(topology: &Topology, workers: &[NodeId], locality: Locality) -> Self {
        let mut homes = workers.to_vec();
        homes.sort_unstable();
        homes.dedup();
        let place_of = |id: NodeId| homes.binary_search(&id).ok();
        let by_distance = |from: NodeId| topology.nodes_by_distance(from).into_iter().filter_map(place_of);
        let neighbours = homes.iter().map(|home| by_distance(*home).collect()).collect();
        let served_by = topology
            .nodes()
            .iter()
            .filter_map(|node| {
                let nearest = topology.serving_nodes(node.id()).into_iter().find_map(place_of);
                // The nodes that should serve it may have no worker: then the nearest that has one.
                Some((node.id(), nearest.or_else(|| by_distance(node.id()).next())?))
            })
            .collect();
        let workers: Vec<Place> = workers.iter().filter_map(|node| place_of(*node)).collect();
        let mut crews = vec![Vec::new(); homes.len()];
        for (worker, home) in workers.iter().enumerate() {
            crews[*home].push(worker);
        }
        Self { workers, crews, neighbours, served_by, homes, locality }
    }

    /// The workers' homes, one entry a worker.
    pub(crate) fn workers(&self) -> &[Place] {
        &self.workers
    }

    pub(crate) fn homes(&self) -> &[NodeId] {
        &self.homes
    }

    pub(crate) fn is_local_only(&self) -> bool {
        self.locality == Locality::LocalOnly
    }

    /// The place that serves a node's memory; the first place for an unknown node.
    pub(crate) fn place_for(&self, node: NodeId) -> Place {
        self.served_by.iter().find(|(id, _)| *id == node).map_or(0, |(_, place)| *place)
    }

    /// The places whose tasks workers of `place` take, and whose workers are woken for tasks of `place`: by
    /// distance, itself first.
    pub(crate) fn partners(&self, place: Place) -> &[Place] {
        let all = self.neighbours.get(place).map_or(&[][..], Vec::as_slice);
        match self.locality {
            Locality::PreferLocal => all,
            Locality::LocalOnly => all.get(..1).unwrap_or(all),
        }
    }

    /// Finds the next task of `worker`: its own, its node's, its siblings', then node by node by
    /// distance, each node's queue before its workers' deques.
    pub(crate) fn next<Q: Queues>(&self, worker: usize, queues: &mut Q) -> Option<(Q::Task, Origin)> {
        let home = *self.workers.get(worker)?;
        if let Some(task) = queues.pop_own() {
            return Some((task, Origin::Own));
        }
        self.partners(home).iter().find_map(|&place| {
            let queued = queues.take_from_node(place).map(|task| (task, Origin::Node(place)));
            queued.or_else(|| self.rob_place(worker, place, queues))
        })
    }

    /// Starts behind the robber's own number, so that robbers do not all queue at the same victim.
    fn rob_place<Q: Queues>(&self, robber: usize, place: Place, queues: &mut Q) -> Option<(Q::Task, Origin)> {
        let crew = self.crews.get(place)?;
        let (before, behind) = crew.split_at(crew.partition_point(|victim| *victim <= robber));
        let mut victims = behind.iter().chain(before).copied().filter(|victim| *victim != robber);
        victims.find_map(|victim| Some((queues.rob(victim)?, Origin::Robbed(victim))))
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
