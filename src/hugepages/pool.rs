//! The pool: builds the slabs, lends them, takes them back.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::error::{LeaseError, PoolError, RecycleError};
use super::frames::PoolFrames;
use super::host::{free_hugepages, hugepage_sizes, reservation_file};
use super::lease::{Lease, LeaseId, NodePolicy};
use super::ledger::{Holder, Ledger, PoolUsage};
use super::slab::Slab;
use super::zeroing::SlabSource;
use crate::error::{JobError, RequestError};
use crate::frames::{FrameTable, Span};
use crate::guest::{Freshness, Planned, Purpose, Quiesced, Strategy, Verify};
use crate::job::{Cause, Job, Lane, Terms};
use crate::service::{ServiceCore, ZeroingService};
use crate::sys::{Reservation, page_size};
use crate::topology::{Node, NodeId};

/// The size of a pool's pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PageSize {
    /// The base page (4 KiB on x86-64), as an ordinary memory file.
    Base,
    /// 2 MiB hugepages.
    Huge2M,
    /// 1 GiB hugepages.
    Huge1G,
}

impl PageSize {
    /// The size in bytes.
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            PageSize::Base => page_size(),
            PageSize::Huge2M => 2 << 20,
            PageSize::Huge1G => 1 << 30,
        }
    }
}

/// Memory that a host keeps across VMs. Clones are handles of the same pool.
#[derive(Debug, Clone)]
pub struct HugepagePool {
    core: Arc<PoolCore>,
}

#[derive(Debug)]
pub(super) struct PoolCore {
    pub(super) service: Arc<ServiceCore>,
    pub(super) ledger: Arc<Ledger>,
    pub(super) page: u64,
    pub(super) is_hugetlb: bool,
}

impl HugepagePool {
    /// Settings for a pool whose pages `service` zeroes.
    pub fn builder(service: &ZeroingService) -> HugepagePoolBuilder {
        let service = Arc::clone(service.core());
        HugepagePoolBuilder { service, page_size: None, capacity: BTreeMap::new(), slab_bytes: None }
    }

    /// Lends `bytes` bytes of zero pages, a multiple of the page size, in whole slabs.
    ///
    /// Does not wait: what is being zeroed counts as exhausted.
    ///
    /// # Errors
    ///
    /// [`LeaseError::Exhausted`] names what is needed, zero and stale, where, and what helps.
    pub fn lease(&self, bytes: u64, policy: NodePolicy) -> Result<Lease, LeaseError> {
        let page = self.core.page;
        if bytes == 0 || !bytes.is_multiple_of(page) {
            return Err(LeaseError::NotWholePages { bytes, page });
        }
        self.core.check_process().map_err(LeaseError::Request)?;
        let nodes = self.core.nodes_for(policy)?;
        let id = LeaseId::next();
        match self.core.ledger.lend(id, bytes, &nodes)? {
            Some(slabs) => Ok(Lease::new(Arc::clone(&self.core), id, slabs, bytes)),
            None => Err(self.core.exhausted(bytes, nodes)),
        }
    }

    /// The page size in bytes.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.core.page
    }

    /// Whether the pages are hugepages (hugetlb) or base pages of ordinary memory files.
    #[must_use]
    pub fn is_hugetlb(&self) -> bool {
        self.core.is_hugetlb
    }

    /// What the pool's bytes on a node are.
    #[must_use]
    pub fn usage(&self, node: NodeId) -> PoolUsage {
        self.core.ledger.usage(&[node])
    }

    /// State, node and generation of every page.
    #[must_use]
    pub fn frames(&self) -> PoolFrames<'_> {
        PoolFrames::new(&self.core.ledger.frames)
    }

    /// Starts a job that zeroes whatever is stale and held by nobody, after a job was cancelled or failed.
    ///
    /// # Errors
    ///
    /// [`RequestError`]; the pages stay stale.
    pub fn zero_stale(&self) -> Result<Job, RequestError> {
        self.core.zero(Holder::Stale)
    }

    /// The leases whose memory was dropped without being recycled.
    #[must_use]
    pub fn parked(&self) -> Vec<LeaseId> {
        self.core.ledger.parked()
    }

    /// Tells the pool that nobody can write to a parked lease's memory any more, and starts the job that
    /// zeroes it. Its addresses stay reserved until [`vm_is_gone`](Self::vm_is_gone).
    ///
    /// # Errors
    ///
    /// [`RecycleError::NotParked`], [`RecycleError::NotCovered`] and [`RecycleError::Revoke`] (it stays
    /// parked), [`RecycleError::Request`].
    pub fn reclaim(&self, lease: LeaseId, quiet: Quiesced) -> Result<Job, RecycleError> {
        let parked = self.parked();
        if !parked.contains(&lease) {
            return Err(RecycleError::NotParked { lease, parked });
        }
        if let Some(kept) = self.core.ledger.holders().kept_addresses.get_mut(&lease) {
            let mut ranges =
                kept.iter().map(|addresses| addresses.base()..addresses.base() + addresses.len());
            if let Some(uncovered) = ranges.find(|range| !quiet.covers(range)) {
                return Err(RecycleError::NotCovered { uncovered });
            }
            // What could not be taken from its addresses when it was dropped is now, or nobody gets it.
            kept.iter_mut().try_for_each(Reservation::revoke).map_err(RecycleError::Revoke)?;
        }
        self.core.zero(Holder::Parked(lease)).map_err(RecycleError::Request)
    }

    /// States that the VM of an ended lease is gone: its descriptor and all copies of it are closed. Its
    /// host addresses may now be used for something else. Returns whether any were kept for it.
    pub fn vm_is_gone(&self, lease: LeaseId) -> bool {
        self.core.ledger.holders().kept_addresses.remove(&lease).is_some()
    }
}

impl PoolCore {
    /// A forked child has a copy of the ledger and the same pages: what it lent, its parent would lend too.
    pub(super) fn check_process(&self) -> Result<(), RequestError> {
        self.service.check_process()
    }

    /// Starts the job that zeroes the slabs held as `held`. On refusal they are stale and held by nobody.
    pub(super) fn zero(&self, held: Holder) -> Result<Job, RequestError> {
        let slabs = self.ledger.begin_zeroing(held);
        let terms = Terms { lane: Lane::Foreground, deadline: None, stop_on_shortage: false };
        // An absent page was punched by a peer: it must be had again, or its slab is not whole.
        self.submit(slabs, Strategy::Overwrite, Freshness::Nothing, terms)
    }

    /// Pages of new slabs, present and on their node. They come zeroed: nobody else has ever had the files.
    fn populate(&self) -> Result<Job, RequestError> {
        let slabs = self.ledger.begin_zeroing(Holder::Stale);
        let terms = Terms { lane: Lane::Foreground, deadline: None, stop_on_shortage: true };
        self.submit(slabs, Strategy::Populate, Freshness::ByConstruction, terms)
    }

    fn submit(
        &self,
        slabs: Vec<usize>,
        strategy: Strategy,
        freshness: Freshness,
        terms: Terms,
    ) -> Result<Job, RequestError> {
        let (source, regions) = SlabSource::new(Arc::clone(&self.ledger), slabs.clone(), self.page);
        let planned = Planned { source: Box::new(source), regions, cancel_on_drop: false, freshness };
        let purpose = Purpose { strategy, verify: Verify::None };
        self.service.submit(planned, purpose, terms).inspect_err(|_| {
            slabs.iter().for_each(|&slab| self.ledger.end_zeroing(slab));
        })
    }

    /// The nodes a policy allows, in its order, of those the pool has memory on.
    fn nodes_for(&self, policy: NodePolicy) -> Result<Vec<NodeId>, LeaseError> {
        let mut known: Vec<NodeId> = self.ledger.slabs.iter().map(|slab| slab.node).collect();
        known.dedup();
        let topology = self.service.topology();
        // GPU and CXL memory is lent only to those who name it.
        let unasked = topology.default_memory_nodes();
        match policy {
            NodePolicy::Strict(node) | NodePolicy::Prefer(node) if !known.contains(&node) => {
                Err(LeaseError::NoMemoryOn { node, known })
            }
            NodePolicy::Strict(node) => Ok(vec![node]),
            NodePolicy::Prefer(node) => {
                let mut order = topology.nodes_by_distance(node);
                order.retain(|other| known.contains(other) && (*other == node || unasked.contains(other)));
                Ok(order)
            }
            NodePolicy::Any => Ok(known.into_iter().filter(|node| unasked.contains(node)).collect()),
        }
    }

    fn exhausted(&self, needed: u64, nodes: Vec<NodeId>) -> LeaseError {
        let found = self.ledger.usage(&nodes);
        let (zero, leased, parked) = (found.zero_bytes, found.leased_bytes, found.parked_bytes);
        let (stale, quarantined) = (found.stale_bytes + found.zeroing_bytes, found.quarantined_bytes);
        let remedy = if zero + stale >= needed {
            "wait for the zeroing jobs, or start one with `zero_stale`"
        } else if zero + stale + parked >= needed {
            "tell the pool with `reclaim` that nobody writes to the parked leases any more"
        } else if zero + stale + parked + leased >= needed {
            "recycle a lease, or allow more nodes"
        } else {
            "the pool holds less than this: give it more capacity, or allow more nodes"
        };
        LeaseError::Exhausted { needed, nodes, zero, stale, leased, parked, quarantined, remedy }
    }
}

impl Drop for PoolCore {
    fn drop(&mut self) {
        let kept = std::mem::take(&mut self.ledger.holders().kept_addresses);
        if !kept.is_empty() {
            tracing::warn!(
                leases = kept.len(),
                "a pool ends before its VMs are said to be gone; their addresses stay reserved"
            );
            // A VM that still holds them must find nothing there.
            std::mem::forget(kept);
        }
    }
}

/// Slabs are at least this large, where the capacity allows it.
const SLAB_BYTES: u64 = 128 << 20;
/// And at most this many, since each takes a file descriptor.
const SLABS: u64 = 256;

/// Settings for a [`HugepagePool`].
#[derive(Debug)]
#[must_use = "a builder does nothing until `build`"]
pub struct HugepagePoolBuilder {
    service: Arc<ServiceCore>,
    page_size: Option<PageSize>,
    capacity: BTreeMap<NodeId, u64>,
    slab_bytes: Option<u64>,
}

impl HugepagePoolBuilder {
    /// The size of the pages. Unless said: 2 MiB hugepages if the host has enough of them, else base pages.
    pub fn page_size(mut self, page_size: PageSize) -> Self {
        self.page_size = Some(page_size);
        self
    }

    /// Bytes of the pool on a node, a multiple of the page size; once for each node.
    pub fn capacity(mut self, node: NodeId, bytes: u64) -> Self {
        self.capacity.insert(node, bytes);
        self
    }

    /// Bytes of a slab, a multiple of the page size: leases are made of whole slabs, and each slab that a
    /// lease holds is a region (and so a memory slot, and a file for a vhost-user peer). Unless said:
    /// 128 MiB, or more where that would take more than 256 files.
    pub fn slab_bytes(mut self, bytes: u64) -> Self {
        self.slab_bytes = Some(bytes);
        self
    }

    /// Takes the pages from the host, binds them to their nodes, and makes them present; waits for that.
    ///
    /// # Errors
    ///
    /// [`PoolError`]; the host has all pages back then.
    pub fn build(self) -> Result<HugepagePool, PoolError> {
        match self.page_size {
            Some(size) => self.build_with(size),
            None => match self.build_with(PageSize::Huge2M) {
                Err(
                    error @ (PoolError::NotEnoughHugepages { .. }
                    | PoolError::NoSuchPageSize { .. }
                    | PoolError::NotWholePages { .. }),
                ) => {
                    tracing::warn!(%error, "no 2 MiB hugepages for the pool; it uses base pages");
                    self.build_with(PageSize::Base)
                }
                built => built,
            },
        }
    }

    fn build_with(&self, page_size: PageSize) -> Result<HugepagePool, PoolError> {
        let page = page_size.bytes();
        let hugepage = (page_size != PageSize::Base).then_some(page);
        self.check(page, hugepage)?;
        let (slabs, spans) = self.slabs(page, hugepage)?;
        let frames = Arc::new(FrameTable::new(&spans)?);
        // The descriptors are made by the workers of their nodes; whoever asks earlier makes them himself.
        let _in_background = self.service.initialise(&frames)?;
        let ledger = Arc::new(Ledger::new(slabs, frames));
        let is_hugetlb = hugepage.is_some();
        let service = Arc::clone(&self.service);
        let core = Arc::new(PoolCore { service, ledger, page, is_hugetlb });
        let populated = core.populate()?.wait();
        match populated {
            Ok(_) => Ok(HugepagePool { core }),
            Err(JobError::Failed { start, cause: Cause::Shortage { .. }, .. }) if is_hugetlb => {
                let slab = core.ledger.slabs.iter().rfind(|slab| slab.offset <= start);
                let node = slab.map_or(NodeId(0), |slab| slab.node);
                // The host gets its pages back before they are counted.
                drop(core);
                Err(self.not_enough(node, page))
            }
            Err(error) => Err(PoolError::Populate(error)),
        }
    }

    fn check(&self, page: u64, hugepage: Option<u64>) -> Result<(), PoolError> {
        if self.capacity.values().all(|bytes| *bytes == 0) {
            return Err(PoolError::NoCapacity);
        }
        if let Some(asked) = hugepage {
            let offered = hugepage_sizes();
            if !offered.contains(&asked) {
                return Err(PoolError::NoSuchPageSize { asked, offered });
            }
        }
        let sizes = self.capacity.values().chain(&self.slab_bytes);
        if let Some(&bytes) = sizes.into_iter().find(|bytes| **bytes % page != 0) {
            return Err(PoolError::NotWholePages { bytes, page });
        }
        let usable =
            |node: &NodeId| self.service.topology().node(*node).is_some_and(|node| node.memory_allowed());
        if let Some(&node) = self.capacity.keys().find(|node| !usable(node)) {
            let nodes = self.service.topology().nodes().iter();
            let known = nodes.filter(|node| node.memory_allowed()).map(|node| node.id()).collect();
            return Err(PoolError::UnknownNode { node, known });
        }
        // Populating more base pages than there are would end in the out-of-memory killer, not in an error.
        // (Of hugepages the kernel keeps a number, and refuses.)
        let total = |node| self.service.topology().node(node).map_or(0, Node::memory_bytes);
        let exceeds = |(node, bytes): &(&NodeId, &u64)| (1..**bytes).contains(&total(**node));
        match self.capacity.iter().find(exceeds) {
            Some((&node, _)) if hugepage.is_none() => Err(self.more_than_there_is(node)),
            _ => Ok(()),
        }
    }

    /// The slabs, and a span of frames a node.
    fn slabs(&self, page: u64, hugepage: Option<u64>) -> Result<(Vec<Slab>, Vec<Span>), PoolError> {
        let total: u64 = self.capacity.values().fold(0, |sum, bytes| sum.saturating_add(*bytes));
        let automatic = SLAB_BYTES.max(total / SLABS).next_multiple_of(page);
        let slab_bytes = self.slab_bytes.filter(|bytes| *bytes > 0).unwrap_or(automatic);
        let (mut slabs, mut spans) = (Vec::new(), Vec::new());
        let mut offset = 0;
        for (&node, &capacity) in self.capacity.iter().filter(|(_, bytes)| **bytes > 0) {
            spans.push(Span { node, first: offset / page, frames: capacity / page });
            let Some(end) = offset.checked_add(capacity) else {
                return Err(self.more_than_there_is(node));
            };
            while offset < end {
                let bytes = slab_bytes.min(end - offset);
                let failed = |call| move |source| PoolError::System { call, bytes, node, source };
                let slab = match Slab::new(node, bytes, page, hugepage, offset) {
                    Ok(slab) => slab,
                    Err(source)
                        if hugepage.is_some()
                            && matches!(source.raw_os_error(), Some(libc::ENOMEM | libc::ENOSPC)) =>
                    {
                        // The host gets its pages back before they are counted.
                        drop(slabs);
                        return Err(self.not_enough(node, page));
                    }
                    Err(source) => return Err(failed("memfd_create or mmap")(source)),
                };
                if let Some(all) = slab.own.chunk(0, bytes) {
                    self.service.numa().bind(&all, node).map_err(failed("mbind"))?;
                }
                slabs.push(slab);
                offset += bytes;
            }
        }
        Ok((slabs, spans))
    }

    fn more_than_there_is(&self, node: NodeId) -> PoolError {
        let needed = self.capacity.get(&node).copied().unwrap_or(0);
        let total = self.service.topology().node(node).map_or(0, Node::memory_bytes);
        PoolError::NotEnoughMemory { node, needed, total }
    }

    /// Names the node that lacks pages, which need not be the one where the host as a whole ran out of them
    /// (`met`): reservations are not made node by node.
    fn not_enough(&self, met: NodeId, page: u64) -> PoolError {
        let counted = |node: NodeId, bytes: u64| (node, bytes / page, free_hugepages(node, page));
        let all = self.capacity.iter().map(|(node, bytes)| counted(*node, *bytes));
        let (node, needed, free) = all
            .clone()
            .find(|(_, needed, free)| free < needed)
            .or_else(|| all.clone().find(|(node, ..)| *node == met))
            .unwrap_or_else(|| counted(met, 0));
        PoolError::NotEnoughHugepages { node, page, needed, free, file: reservation_file(node, page) }
    }
}
