//! A request: which memory, to what end, by when.

use std::fmt;
use std::time::Instant;

use vm_memory::{GuestAddress, GuestAddressSpace};

use super::clearing::{Numa, Source, SourceRegion};
use super::fresh::Freshness;
use super::host::HostSource;
use super::memory::GuestSource;
use crate::clear::Reuse;
use crate::error::RequestError;
use crate::job::{Priority, Terms};
use crate::sys::HostRange;

/// What the memory is zeroed for. Sets the strategy and what goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Intent {
    /// A guest is about to start: [`Strategy::Populate`]; a shortage of pages ends the job.
    Boot,
    /// A guest has ended: [`Strategy::Overwrite`]; goes on whatever fails.
    Teardown,
    /// As teardown, but every other job goes first, chunk by chunk.
    Background,
}

/// How bytes become zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Strategy {
    /// Overwrite every byte, but for holes that are proved to read zero: they stay holes, page by page, so
    /// that no memory is allocated to clear what was never used.
    Overwrite,
    /// Let the kernel hand out the pages of such holes (they come zeroed), and overwrite the rest. Afterwards
    /// all of it is present.
    Populate,
}

/// Whether the bytes are read back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Verify {
    /// No.
    #[default]
    None,
    /// Every byte, right after it was cleared; a hole that was left one is not read, but looked for again.
    /// True for that moment only: that nobody writes afterwards is what [`Quiesced`](crate::Quiesced) stands for.
    Full,
}

/// A request to zero memory: built here, submitted with [`ZeroingService::submit`](crate::ZeroingService::submit).
#[derive(Debug)]
#[must_use = "a request does nothing until it is submitted"]
pub struct ZeroRequest {
    target: Box<dyn Target>,
    ranges: Option<Vec<(GuestAddress, u64)>>,
    intent: Intent,
    strategy: Option<Strategy>,
    priority: Option<Priority>,
    verify: Verify,
    reuse: Reuse,
    deadline: Option<Instant>,
}

impl ZeroRequest {
    /// All of a guest's memory as it is now (a snapshot of a [`GuestMemoryAtomic`](vm_memory::GuestMemoryAtomic)),
    /// for [`Intent::Teardown`]. The job keeps the snapshot alive until it is over; if it is the last to do so,
    /// the memory's destructor runs on a thread of the service, and must not wait for another job there.
    ///
    /// Memory seen through an IOMMU that is in use is refused at submission ([`RequestError::IommuView`]).
    pub fn new<A>(memory: &A) -> Self
    where
        A: GuestAddressSpace,
        A::M: 'static,
        A::T: Send + Sync + 'static,
    {
        Self::over(Box::new(OfGuest(memory.memory())))
    }

    /// Raw host ranges, for VMMs with their own memory types. Dropping the last handle of the job
    /// cancels it and waits for it.
    pub fn host(ranges: impl IntoIterator<Item = HostRange>) -> Self {
        Self::over(Box::new(OfHost(ranges.into_iter().collect())))
    }

    fn over(target: Box<dyn Target>) -> Self {
        Self {
            target,
            ranges: None,
            intent: Intent::Teardown,
            strategy: None,
            priority: None,
            verify: Verify::default(),
            reuse: Reuse::default(),
            deadline: None,
        }
    }

    /// Only these ranges: guest physical address and length in bytes. They may overlap, cross from one
    /// region into the next, and begin and end anywhere. (A request over host ranges has no guest
    /// addresses, so there they are [`RequestError::NotGuestMemory`].)
    pub fn ranges(mut self, ranges: impl IntoIterator<Item = (GuestAddress, u64)>) -> Self {
        self.ranges = Some(ranges.into_iter().collect());
        self
    }

    /// What the memory is zeroed for.
    pub fn intent(mut self, intent: Intent) -> Self {
        self.intent = intent;
        self
    }

    /// Another strategy than the intent's own.
    pub fn strategy(mut self, strategy: Strategy) -> Self {
        self.strategy = Some(strategy);
        self
    }

    /// Another priority than the intent's own.
    pub fn priority(mut self, priority: Priority) -> Self {
        self.priority = Some(priority);
        self
    }

    /// Whether to read the bytes back.
    pub fn verify(mut self, verify: Verify) -> Self {
        self.verify = verify;
        self
    }

    /// Whether the zeroes will be read at once (not, unless said). Decides between stores that leave the
    /// caches alone and stores that leave the memory in them.
    pub fn reuse(mut self, reuse: Reuse) -> Self {
        self.reuse = reuse;
        self
    }

    /// When to stop; what was not reached by then stays stale. A deadline that has passed already ends
    /// the job before its first byte.
    pub fn deadline(mut self, deadline: Instant) -> Self {
        self.deadline = Some(deadline);
        self
    }

    pub(crate) fn terms(&self) -> Terms {
        let own = match self.intent {
            Intent::Boot => Priority::Urgent,
            Intent::Teardown => Priority::Normal,
            Intent::Background => Priority::Background,
        };
        Terms {
            priority: self.priority.unwrap_or(own),
            deadline: self.deadline,
            stop_on_shortage: self.intent == Intent::Boot,
        }
    }

    pub(crate) fn purpose(&self) -> super::Purpose {
        let own = if self.intent == Intent::Boot { Strategy::Populate } else { Strategy::Overwrite };
        super::Purpose { strategy: self.strategy.unwrap_or(own), verify: self.verify, reuse: self.reuse }
    }

    pub(crate) fn plan(self, numa: &Numa) -> Result<Planned, RequestError> {
        self.target.plan(self.ranges, numa)
    }
}

/// A source and its regions, ready for the pool.
pub(crate) struct Planned {
    pub(crate) source: Box<dyn Source>,
    pub(crate) regions: Vec<SourceRegion>,
    /// Dropping the last handle cancels the job.
    pub(crate) cancel_on_drop: bool,
    /// What may be believed of pages that are not there.
    pub(crate) freshness: Freshness,
}

/// What a request is about, its type erased.
trait Target: Send + fmt::Debug {
    fn plan(
        self: Box<Self>,
        ranges: Option<Vec<(GuestAddress, u64)>>,
        numa: &Numa,
    ) -> Result<Planned, RequestError>;
}

struct OfGuest<T>(T);

impl<T, M> Target for OfGuest<T>
where
    T: std::ops::Deref<Target = M> + Send + Sync + 'static,
    M: vm_memory::GuestMemory + 'static,
{
    fn plan(
        self: Box<Self>,
        ranges: Option<Vec<(GuestAddress, u64)>>,
        numa: &Numa,
    ) -> Result<Planned, RequestError> {
        let (source, regions) = GuestSource::plan(self.0, ranges, numa)?;
        Ok(Planned {
            source: Box::new(source),
            regions,
            cancel_on_drop: false,
            freshness: Freshness::by_proof(),
        })
    }
}

impl<T> fmt::Debug for OfGuest<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("guest memory")
    }
}

#[derive(Debug)]
struct OfHost(Vec<HostRange>);

impl Target for OfHost {
    fn plan(
        self: Box<Self>,
        ranges: Option<Vec<(GuestAddress, u64)>>,
        numa: &Numa,
    ) -> Result<Planned, RequestError> {
        if let Some(&(start, len)) = ranges.iter().flatten().find(|(_, len)| *len > 0) {
            return Err(RequestError::NotGuestMemory { start: start.0, len, hole: start.0 });
        }
        let (source, regions) = HostSource::plan(self.0, numa);
        Ok(Planned {
            source: Box::new(source),
            regions,
            cancel_on_drop: true,
            freshness: Freshness::by_proof(),
        })
    }
}
