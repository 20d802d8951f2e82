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
    /// Whether there is a task in the worker's own deque.
    fn has_own(&self) -> bool;
    /// Bytes that wait in the queue of a place and in the deques of its workers.
    fn waiting(&self, place: Place) -> u64;
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
    /// At a place that is far behind the worker's own: what is more than a chunk goes back to that place.
    Behind(Place),
}

/// Which workers may clear which memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Locality {
    /// A worker serves its own node first and helps others, the nearest first, when it finds nothing there. A
    /// node with four workers or more also lends one of them to a near node that is far behind.
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
    /// Whom each place lends to places that are behind.
    lent: Vec<Option<usize>>,
    /// For each place: all places by distance, itself first.
    neighbours: Vec<Vec<Place>>,
    /// Every node of the machine and the nearest place that serves it.
    served_by: Vec<(NodeId, Place)>,
    locality: Locality,
}

impl Plan {
    /// A place lends one worker, if it has so many.
    const TO_LEND: usize = 4;

    /// To that many of the nearest places.
    const NEAR: usize = 16;

    /// What another place must have more, in bytes, to be worth a journey, besides a sixteenth.
    const FAR_BEHIND: u64 = 256 << 20;

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
        let lent = crews.iter().map(|crew| crew.first().copied().filter(|_| crew.len() >= Self::TO_LEND));
        let lent = lent.collect();
        Self { workers, crews, lent, neighbours, served_by, homes, locality }
    }

    /// With as many numbers again, for whoever stands in for a worker that is stuck.
    pub(crate) fn with_stand_ins(mut self) -> Self {
        let regulars = self.workers.len();
        self.workers.extend_from_within(..);
        for crew in &mut self.crews {
            let stand_ins: Vec<usize> = crew.iter().map(|worker| worker + regulars).collect();
            crew.extend(stand_ins);
        }
        self
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
    /// distance, each node's queue before its workers' deques. Before all that, a place far behind may need it.
    pub(crate) fn next<Q: Queues>(&self, worker: usize, queues: &mut Q) -> Option<(Q::Task, Origin)> {
        let home = *self.workers.get(worker)?;
        if let Some(found) = self.help_out(worker, home, queues) {
            return Some(found);
        }
        if let Some(task) = queues.pop_own() {
            return Some((task, Origin::Own));
        }
        self.partners(home).iter().find_map(|&place| {
            let queued = queues.take_from_node(place).map(|task| (task, Origin::Node(place)));
            queued.or_else(|| self.rob_place(worker, place, queues))
        })
    }

    /// One worker of a place looks, between its own chunks, whether one of the nearest places is far behind, and
    /// does a chunk there. Help that comes when all is done at home may come too late: the memory of a place
    /// whose CPUs are busy with something else takes no more than it takes, however many come in the end.
    ///
    /// Only who has tasks of its own does so: then the first tasks of a job have been taken by workers of their
    /// own places.
    fn help_out<Q: Queues>(&self, worker: usize, home: Place, queues: &mut Q) -> Option<(Q::Task, Origin)> {
        if self.lent.get(home) != Some(&Some(worker)) || !queues.has_own() {
            return None;
        }
        let near = self.partners(home).iter().skip(1).take(Self::NEAR);
        let (there, place) = near.map(|&place| (queues.waiting(place), place)).max()?;
        let here = queues.waiting(home);
        if there <= here.saturating_add(here / 16).saturating_add(Self::FAR_BEHIND) {
            return None;
        }
        let task = queues.take_from_node(place);
        let task = task.or_else(|| Some(self.rob_place(worker, place, queues)?.0))?;
        Some((task, Origin::Behind(place)))
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
