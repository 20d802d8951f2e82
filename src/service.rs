//! The service: CPU, topology and pinned workers behind one handle.

use std::sync::Arc;
use std::time::Duration;

use vm_memory::GuestAddressSpace;

use crate::calibrate::calibrate;
use crate::clear::{Calibration, Clearer, Concurrency, CpuDescription, Method, Reuse};
use crate::error::{BuildError, RequestError};
use crate::frames::{FrameTable, Initialisation};
use crate::guest::{Clearing, Intent, Numa, Planned, Purpose, SourceWork, ZeroRequest};
use crate::job::{Job, Lane, Terms, WorkRegion};
use crate::pool::{CHUNK, Pool};
use crate::sys::Presence;
use crate::topology::Topology;

/// Zeroes guest memory with workers pinned to the nodes of this machine.
///
/// Building it starts the workers and measures nothing; an idle service uses no CPU. Dropping it stops
/// every job (what was not reached stays stale) and joins the workers; a worker stuck in a page fault is
/// reported and left behind after two seconds, and stores nothing when it wakes.
#[derive(Debug)]
pub struct ZeroingService {
    core: Arc<ServiceCore>,
}

/// The service as hugepage pools share it.
#[derive(Debug)]
pub(crate) struct ServiceCore {
    topology: Topology,
    clearing: Arc<Clearing>,
    pool: Pool,
}

impl ServiceCore {
    /// Submits a job over a source.
    pub(crate) fn submit(
        &self,
        planned: Planned,
        purpose: Purpose,
        terms: Terms,
    ) -> Result<Job, RequestError> {
        let Planned { source, regions, cancel_on_drop, freshness } = planned;
        let work_regions: Vec<WorkRegion> = regions.iter().map(|region| region.work).collect();
        let clearing = Arc::clone(&self.clearing);
        let bytes = work_regions.iter().fold(0u64, |sum, region| sum.saturating_add(region.len));
        let alone = bytes <= CHUNK || self.pool.workers() == 1;
        let concurrency = if alone { Concurrency::One } else { Concurrency::All };
        let work = Arc::new(SourceWork { source, regions, clearing, purpose, concurrency, freshness });
        let core = self.pool.submit(work, work_regions, terms)?;
        Ok(Job::new(core, cancel_on_drop))
    }

    /// Initialises the first section of each node, and submits the job that initialises the rest.
    pub(crate) fn initialise(&self, table: &Arc<FrameTable>) -> Result<Job, RequestError> {
        self.pool.check_process()?;
        for section in table.eager_sections() {
            // Out of range is the only error there is.
            let _ = table.initialise_section(section);
        }
        let (work, regions) = Initialisation::new(table);
        let terms = Terms { lane: Lane::Background, deadline: None, stop_on_shortage: false };
        Ok(Job::new(self.pool.submit(Arc::new(work), regions, terms)?, false))
    }

    /// Whether the workers exist in this process.
    pub(crate) fn check_process(&self) -> Result<(), RequestError> {
        self.pool.check_process()
    }

    pub(crate) fn topology(&self) -> &Topology {
        &self.topology
    }

    pub(crate) fn numa(&self) -> &Numa {
        &self.clearing.numa
    }
}

impl ZeroingService {
    /// Settings for a service; the defaults suit a VMM.
    pub fn builder() -> ZeroingServiceBuilder {
        ZeroingServiceBuilder::default()
    }

    /// Zeroes all of a guest's memory: the short form of [`submit`](Self::submit).
    ///
    /// Returns at once; the [`Job`] is the handle to wait on.
    ///
    /// # Errors
    ///
    /// [`RequestError`]; nothing was touched then.
    pub fn zero<A>(&self, memory: &A, intent: Intent) -> Result<Job, RequestError>
    where
        A: GuestAddressSpace,
        A::M: 'static,
        A::T: Send + Sync + 'static,
    {
        self.submit(ZeroRequest::new(memory).intent(intent))
    }

    /// Submits a request. Takes O(regions); the workers do the rest.
    ///
    /// # Errors
    ///
    /// [`RequestError`]; nothing was touched then.
    pub fn submit(&self, request: ZeroRequest) -> Result<Job, RequestError> {
        self.core.pool.check_process()?;
        let (purpose, terms) = (request.purpose(), request.terms());
        let planned = request.plan(&self.core.clearing.numa)?;
        self.core.submit(planned, purpose, terms)
    }

    /// Initialises a page-frame table: the first section of each node before this returns, the rest by the
    /// workers of its node, in the background. Whoever needs a section earlier initialises it on demand.
    ///
    /// The job's report counts bytes of descriptors, [`Outcome::Erased`](crate::Outcome::Erased) meaning
    /// initialised.
    ///
    /// # Errors
    ///
    /// [`RequestError`]; the table can be used all the same, its sections are initialised on demand.
    pub fn initialise_frames(&self, table: &Arc<FrameTable>) -> Result<Job, RequestError> {
        self.core.initialise(table)
    }

    /// The nodes the service works on.
    #[must_use]
    pub fn topology(&self) -> &Topology {
        &self.core.topology
    }

    /// How many workers run.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.core.pool.workers()
    }

    /// The method for a run of `len` bytes of cold memory, cleared by all workers.
    #[must_use]
    pub fn method_for(&self, len: u64) -> Method {
        self.core.clearing.clearer.method_for(len, Reuse::Cold, Concurrency::All)
    }

    pub(crate) fn core(&self) -> &Arc<ServiceCore> {
        &self.core
    }
}

impl Drop for ZeroingService {
    fn drop(&mut self) {
        self.core.pool.close();
    }
}

/// Workers on each node unless the builder says otherwise. One core stores faster than a share of its
/// memory controller; a few of them use it up.
const WORKERS_PER_NODE: usize = 8;

/// Settings for a [`ZeroingService`].
#[derive(Debug, Default)]
#[must_use = "a builder does nothing until `build`"]
pub struct ZeroingServiceBuilder {
    method: Option<Method>,
    calibration: Option<Source>,
    cpu: Option<CpuDescription>,
    topology: Option<Topology>,
    workers_per_node: Option<usize>,
}

/// A calibration, and whether it must be of this CPU model.
#[derive(Debug)]
enum Source {
    OfThisModel(Calibration),
    OfAnyModel(Calibration),
}

impl ZeroingServiceBuilder {
    /// Clears by this method alone, instead of choosing by length. Goes before a calibration.
    pub fn method(mut self, method: Method) -> Self {
        self.method = Some(method);
        self
    }

    /// Chooses by what was measured on a CPU of this model: the method by length, and the number of workers
    /// unless [`workers_per_node`](Self::workers_per_node) says another.
    pub fn calibration(mut self, calibration: Calibration) -> Self {
        self.calibration = Some(Source::OfThisModel(calibration));
        self
    }

    /// As [`calibration`](Self::calibration), whatever CPU it was measured on: for a fleet of nearly alike
    /// machines. Where it chose a method that is not here, the rule of [`CpuDescription::choose`] does.
    pub fn calibration_of_another_cpu(mut self, calibration: Calibration) -> Self {
        self.calibration = Some(Source::OfAnyModel(calibration));
        self
    }

    /// At most this many workers on each node with CPUs (8 unless this or a calibration says otherwise; never
    /// more than the node has CPUs for us).
    pub fn workers_per_node(mut self, workers: usize) -> Self {
        self.workers_per_node = Some(workers);
        self
    }

    /// A description of the CPU instead of what is detected. It can take methods away, not add any: what
    /// the CPU lacks is refused all the same.
    pub fn cpu(mut self, cpu: CpuDescription) -> Self {
        self.cpu = Some(cpu);
        self
    }

    /// A topology instead of [`Topology::detect`]: for a VMM that keeps some nodes or CPUs to itself.
    pub fn topology(mut self, topology: Topology) -> Self {
        self.topology = Some(topology);
        self
    }

    /// Measures which methods are the fastest here, with the CPU, topology and workers of this builder; give
    /// the result to [`calibration`](Self::calibration), or save it for this model of machine.
    ///
    /// Takes `budget` and no longer (50 ms are enough for the lengths that a service clears; seconds give
    /// steadier figures and the lengths beyond a large cache), memory of its own, and all workers of one
    /// node: ask for it before guests run, once a host. What the time or the memory does not allow follows
    /// the rule of [`CpuDescription::choose`], and the result says so.
    ///
    /// # Errors
    ///
    /// [`BuildError::Topology`], [`BuildError::NoWorkers`].
    pub fn calibrate(&self, budget: Duration) -> Result<Calibration, BuildError> {
        let cpu = self.cpu.clone().unwrap_or_else(CpuDescription::detect);
        let topology = self.topology.clone().map_or_else(Topology::detect, Ok)?;
        let workers = self.workers_per_node.unwrap_or(WORKERS_PER_NODE);
        if workers == 0 {
            return Err(BuildError::NoWorkers { asked: workers });
        }
        Ok(calibrate(cpu, &topology, workers, budget))
    }

    /// Starts the service: detects CPU and topology, pins and starts the workers. About a millisecond.
    ///
    /// # Errors
    ///
    /// [`BuildError`]; no thread is left running then.
    pub fn build(self) -> Result<ZeroingService, BuildError> {
        let cpu = self.cpu.unwrap_or_else(CpuDescription::detect);
        let (measured, enough) = match &self.calibration {
            None => (Clearer::by_rule(&cpu), WORKERS_PER_NODE),
            Some(Source::OfThisModel(own)) => (Clearer::by_calibration(own, &cpu)?, own.workers_per_node()),
            Some(Source::OfAnyModel(any)) => {
                (Clearer::by_foreign_calibration(any, &cpu), any.workers_per_node())
            }
        };
        let clearer = self.method.map_or(Ok(measured), |method| Clearer::only(method, &cpu))?;
        let topology = self.topology.map_or_else(Topology::detect, Ok)?;
        let numa = Numa::new(&topology);
        let pool = Pool::start(&topology, self.workers_per_node.unwrap_or(enough))?;
        let clearing = Arc::new(Clearing { clearer, numa, presence: Presence::default() });
        Ok(ZeroingService { core: Arc::new(ServiceCore { topology, clearing, pool }) })
    }
}
