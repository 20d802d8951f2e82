//! The service: CPU, topology and pinned workers behind one handle.

use std::fmt;
use std::io;
use std::num::NonZero;
use std::sync::Arc;
use std::time::Duration;

use vm_memory::GuestAddressSpace;

use crate::calibrate::calibrate;
use crate::clear::{Calibration, Clearer, Concurrency, CpuDescription, Method, Reuse};
use crate::error::{BuildError, RequestError};
use crate::frames::{FrameTable, Initialisation};
use crate::guest::{Clearing, Intent, Numa, Planned, Purpose, SourceWork, ZeroRequest};
use crate::job::{Job, Priority, Terms, WorkRegion};
use crate::pool::{CHUNK, Crew, Locality, OnThreadStart, Pool, Settings, ThreadInfo};
use crate::sys::Presence;
use crate::topology::Topology;

/// Zeroes guest memory with workers pinned to the nodes of this machine.
///
/// Building it starts the workers and measures nothing; an idle service uses no CPU. Dropping it stops
/// every job (what was not reached stays stale) and joins the workers; a worker stuck in a page fault is
/// reported and left behind after two seconds (and a job whose store is stuck after two more), and stores nothing when it wakes.
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
        let alone = bytes <= CHUNK || self.pool.workers() <= 1;
        let concurrency = if alone { Concurrency::One } else { Concurrency::All };
        let work = Arc::new(SourceWork { source, regions, clearing, purpose, concurrency, freshness });
        let core = self.pool.submit(work, work_regions, terms)?;
        Ok(Job::new(core, cancel_on_drop, self.pool.process()))
    }

    /// Initialises the first section of each node, and submits the job that initialises the rest.
    pub(crate) fn initialise(&self, table: &Arc<FrameTable>) -> Result<Job, RequestError> {
        self.pool.check_process()?;
        for section in table.eager_sections() {
            // Out of range is the only error there is.
            let _ = table.initialise_section(section);
        }
        let (work, regions) = Initialisation::new(table);
        let terms = Terms { priority: Priority::Background, deadline: None, stop_on_shortage: false };
        let core = self.pool.submit(Arc::new(work), regions, terms)?;
        Ok(Job::new(core, false, self.pool.process()))
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

    /// How many workers were started; 0: the threads that submit jobs do them.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.core.pool.workers()
    }

    /// The service's threads: workers, and the watchdog. None of them is in a forked child.
    #[must_use]
    pub fn threads(&self) -> Vec<ThreadInfo> {
        self.core.pool.threads()
    }

    /// Holds background work to so many bytes a second from now on; 0 pauses it, `None` lets it go as fast as
    /// it can. What of it is under way when this is called ends its chunk.
    ///
    /// A paused job can be cancelled, and waiting for it takes as long as the pause. Frame tables are initialised
    /// in the background, and so at this rate. A service without workers has no background: the rate means
    /// nothing there. In a forked child this changes nothing.
    pub fn set_background_rate(&self, bytes_per_second: Option<u64>) {
        self.core.pool.set_background_rate(bytes_per_second);
    }

    /// The rate that background work keeps to, in bytes a second; `None`: none (or a forked child asks).
    #[must_use]
    pub fn background_rate(&self) -> Option<u64> {
        self.core.pool.background_rate()
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

/// Longer chunks are not taken: where they take too long, halving them would take long as well.
const MOST_CHUNK: u64 = 1 << 30;

/// Jobs of so many bytes are done by the thread that submits them, unless a calibration says otherwise.
const SMALL_JOB: u64 = 2 << 20;

/// Settings for a [`ZeroingService`].
#[derive(Default)]
#[must_use = "a builder does nothing until `build`"]
pub struct ZeroingServiceBuilder {
    method: Option<Method>,
    calibration: Option<Source>,
    cpu: Option<CpuDescription>,
    topology: Option<Topology>,
    workers_per_node: Option<usize>,
    locality: Locality,
    chunk: Option<u64>,
    small_job: Option<u64>,
    background_rate: Option<u64>,
    on_thread_start: Option<Arc<OnThreadStart>>,
}

impl fmt::Debug for ZeroingServiceBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZeroingServiceBuilder")
            .field("method", &self.method)
            .field("calibration", &self.calibration)
            .field("workers_per_node", &self.workers_per_node)
            .field("locality", &self.locality)
            .field("chunk", &self.chunk)
            .field("background_rate", &self.background_rate)
            .finish_non_exhaustive()
    }
}

/// A calibration, and whether it must be of this CPU model.
#[derive(Debug)]
enum Source {
    OfThisModel(Calibration),
    OfAnyModel(Calibration),
}

impl Source {
    fn calibration(&self) -> &Calibration {
        match self {
            Source::OfThisModel(calibration) | Source::OfAnyModel(calibration) => calibration,
        }
    }
}

/// What a caller's thread clears while a worker would be woken, give or take: the bytes of 200 µs.
fn small_job(calibration: &Calibration) -> Option<u64> {
    let rate = calibration.choice(SMALL_JOB, Reuse::Cold, Concurrency::One)?.gb_per_s?;
    Some(((rate * 1e9 * 200e-6) as u64).min(CHUNK))
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
    /// more than the node has CPUs for us). A host that starts fewer threads gets fewer.
    ///
    /// 0: no thread is started, and every job is done within `submit`, by the thread that calls it, background
    /// jobs too, at no rate but their own. Such a job looks at its deadline between chunks only, and nobody
    /// else can end it while a page fault keeps it. On which node the caller sits is not asked: where there are
    /// several, no byte is reported as local or remote, and [`Locality`] means nothing.
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

    /// A topology instead of [`Topology::detect`]: for a VMM that keeps some nodes or CPUs to itself. It narrows what
    /// the process may use, and never widens it: a worker whose node's CPUs are all forbidden runs where it may, with
    /// a warning.
    pub fn topology(mut self, topology: Topology) -> Self {
        self.topology = Some(topology);
        self
    }

    /// Whether workers help other nodes ([`Locality::PreferLocal`], unless said).
    pub fn locality(mut self, locality: Locality) -> Self {
        self.locality = locality;
        self
    }

    /// The most bytes a worker clears between two looks at cancel, deadline and priority: rounded down to a
    /// power of two, at least 64 KiB; 4 MiB unless said. Where that takes longer than a millisecond, workers
    /// take less, by what their last chunks took. Each worker's first chunk is the longest one, on slow memory
    /// too, as nothing is known yet (on a caller's own thread, the first one of each job). More than a region has
    /// makes one chunk of it; more than 1 GiB is taken for 1 GiB. One page fault is not cut: the kernel clears a
    /// fresh 1 GiB page in one go, and where pages are to be made present
    /// ([`Strategy::Populate`](crate::Strategy::Populate)) chunks have 2 MiB at least, as transparent hugepages
    /// do. 0 is refused by [`build`](Self::build) ([`BuildError::NoChunk`]).
    pub fn chunk(mut self, bytes: u64) -> Self {
        self.chunk = Some(bytes);
        self
    }

    /// Jobs of up to so many bytes are done by the thread that submits them, within `submit`, if their pages are
    /// all there: that takes less time than waking a worker. 0: none is, for event loops that want it so.
    /// Unless said, what one worker clears in 200 µs by the calibration, 4 MiB at most; 2 MiB without one.
    ///
    /// Linux tells since 6.11 whether a store would meet a page; before that, none is small.
    ///
    /// Background jobs are left to the workers, and so are those of threads at `SCHED_IDLE` or `SCHED_BATCH` and of
    /// memory that a file system has a say in. So are the later ones of a burst: while a job that was
    /// so done has not been waited for, more of them are queued.
    pub fn small_job(mut self, bytes: u64) -> Self {
        self.small_job = Some(bytes);
        self
    }

    /// The bytes a second that background work keeps to at first; see
    /// [`set_background_rate`](ZeroingService::set_background_rate).
    pub fn background_rate(mut self, bytes_per_second: u64) -> Self {
        self.background_rate = Some(bytes_per_second);
        self
    }

    /// Runs on every thread of the service, after it is pinned and before it works: for a seccomp filter, a
    /// cgroup. An error ends `build`, and no thread is left. (On a thread that stands in later for one that is
    /// stuck, an error leaves the service with one worker less; and what waits there holds up the watchdog.)
    pub fn on_thread_start(
        mut self,
        start: impl Fn(&ThreadInfo) -> io::Result<()> + Send + Sync + 'static,
    ) -> Self {
        self.on_thread_start = Some(Arc::new(start));
        self
    }

    /// Measures which methods are the fastest here, with the CPU, topology and workers of this builder; give
    /// the result to [`calibration`](Self::calibration), or save it for this model of machine.
    ///
    /// Takes `budget`, and a few milliseconds more at most unless other processes want the CPUs. 50 ms are enough
    /// for runs of 4 KiB to 4 MiB, all that a service clears, and mostly for 16 MiB; 200 ms for 64 MiB, too (two
    /// workers of a Zen 5); a last cache of more than 32 MiB adds a longer run, which takes seconds.
    ///
    /// Uses memory of its own, an eighth of what is free at most, on hugepages if there are free ones, and all
    /// workers of one node: ask for it before guests run, once a host. What the time or the memory does not allow
    /// follows the rule of [`CpuDescription::choose`], and the result says so.
    ///
    /// # Errors
    ///
    /// [`BuildError::Topology`].
    pub fn calibrate(&self, budget: Duration) -> Result<Calibration, BuildError> {
        let cpu = self.cpu.clone().unwrap_or_else(CpuDescription::detect);
        let topology = self.topology.clone().map_or_else(Topology::detect, Ok)?;
        // A service without workers clears with one thread, its caller's.
        let asked = self.workers_per_node.unwrap_or(WORKERS_PER_NODE);
        let workers = NonZero::new(asked).unwrap_or(NonZero::<usize>::MIN);
        Ok(calibrate(cpu, &topology, workers, budget))
    }

    /// Starts the service: detects CPU and topology, pins and starts the workers. About a millisecond.
    ///
    /// # Errors
    ///
    /// [`BuildError`]; no thread is left running then.
    pub fn build(self) -> Result<ZeroingService, BuildError> {
        let cpu = self.cpu.unwrap_or_else(CpuDescription::detect);
        let measured = match &self.calibration {
            None => Clearer::by_rule(&cpu),
            Some(Source::OfThisModel(own)) => Clearer::by_calibration(own, &cpu)?,
            Some(Source::OfAnyModel(any)) => Clearer::by_foreign_calibration(any, &cpu),
        };
        let calibration = self.calibration.as_ref().map(Source::calibration);
        let enough = calibration.map_or(WORKERS_PER_NODE, Calibration::workers_per_node);
        let small = calibration.and_then(small_job).unwrap_or(SMALL_JOB);
        let clearer = self.method.map_or(Ok(measured), |method| Clearer::only(method, &cpu))?;
        let topology = self.topology.map_or_else(Topology::detect, Ok)?;
        let numa = Numa::new(&topology);
        let settings = Settings {
            workers_per_node: self.workers_per_node.unwrap_or(enough),
            locality: self.locality,
            chunk: if self.chunk == Some(0) {
                Err(BuildError::NoChunk)
            } else {
                Ok(self.chunk.unwrap_or(CHUNK).min(MOST_CHUNK))
            }?,
            background_rate: self.background_rate,
            small: self.small_job.unwrap_or(small),
            crew: Crew::new(self.on_thread_start),
        };
        let pool = Pool::start(&topology, settings)?;
        let clearing = Arc::new(Clearing { clearer, numa, presence: Presence::default() });
        Ok(ZeroingService { core: Arc::new(ServiceCore { topology, clearing, pool }) })
    }
}

#[cfg(test)]
#[cfg(feature = "serde")]
mod tests;
