//! The pool: lends slabs and takes them back.

use std::sync::Arc;

use super::builder::HugepagePoolBuilder;
use super::error::{LeaseError, RecycleError};
use super::frames::PoolFrames;
use super::lease::{Lease, LeaseId, NodePolicy};
use super::ledger::{Holder, Ledger, PoolUsage};
use super::zeroing::SlabSource;
use crate::clear::Reuse;
use crate::error::RequestError;
use crate::guest::{Freshness, Planned, Purpose, Quiesced, Strategy, Verify};
use crate::job::{Job, Priority, Terms};
use crate::service::{ServiceCore, ZeroingService};
use crate::sys::Reservation;
use crate::topology::NodeId;

/// Memory that a host keeps across VMs. Clones are handles of the same pool.
#[derive(Debug, Clone)]
pub struct HugepagePool {
    pub(super) core: Arc<PoolCore>,
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
        HugepagePoolBuilder::new(Arc::clone(service.core()))
    }

    /// Lends `bytes` bytes of zero pages, a multiple of the page size, in whole slabs.
    ///
    /// Does not wait: what is being zeroed counts as exhausted.
    ///
    /// # Errors
    ///
    /// [`LeaseError::Exhausted`] names what is needed, zero and stale, where, and what helps;
    /// [`LeaseError::NoMemoryOn`]: the policy names a node of which the pool has nothing; [`LeaseError::Request`]: a
    /// forked child asks. Others are said at [`LeaseError`]. Nothing is lent then.
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
        let terms = Terms { priority: Priority::Normal, deadline: None, stop_on_shortage: false };
        // An absent page was punched by a peer: it must be had again, or its slab is not whole.
        self.submit(slabs, Strategy::Overwrite, Freshness::Nothing, terms)
    }

    /// Pages of new slabs, present and on their node. They come zeroed: nobody else has ever had the files.
    pub(super) fn populate(&self) -> Result<Job, RequestError> {
        let slabs = self.ledger.begin_zeroing(Holder::Stale);
        let terms = Terms { priority: Priority::Urgent, deadline: None, stop_on_shortage: true };
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
        let purpose = Purpose { strategy, verify: Verify::None, reuse: Reuse::Cold };
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
