//! Building a pool: takes the pages from the host, binds them, makes them present.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::error::PoolError;
use super::host::{free_hugepages, hugepage_sizes, reservation_file};
use super::ledger::Ledger;
use super::pool::{HugepagePool, PoolCore};
use super::slab::Slab;
use crate::error::JobError;
use crate::frames::{FrameTable, Span};
use crate::job::Cause;
use crate::service::ServiceCore;
use crate::sys::page_size;
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
    pub(super) fn new(service: Arc<ServiceCore>) -> Self {
        Self { service, page_size: None, capacity: BTreeMap::new(), slab_bytes: None }
    }

    /// The size of the pages. Unless said: 2 MiB hugepages if the host has enough of them, else base pages.
    pub fn page_size(mut self, page_size: PageSize) -> Self {
        self.page_size = Some(page_size);
        self
    }

    /// Bytes of the pool on a node, a multiple of the page size; once for each node. A node that the service's
    /// topology does not have is an error at `build` ([`PoolError::UnknownNode`](crate::PoolError::UnknownNode)).
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
                    | PoolError::HugepagesRefused { .. }
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

    /// Why hugepages were refused. Names the node that lacks pages, which need not be the one where the host as a whole ran out of them
    /// (`met`): reservations are not made node by node.
    fn not_enough(&self, met: NodeId, page: u64) -> PoolError {
        let counted = |node: NodeId, bytes: u64| (node, bytes / page, free_hugepages(node, page));
        let all = self.capacity.iter().map(|(node, bytes)| counted(*node, *bytes));
        if let Some((node, needed, free)) = all.clone().find(|(_, needed, free)| free < needed) {
            let file = reservation_file(node, page);
            return PoolError::NotEnoughHugepages { node, page, needed, free, file };
        }
        let (node, needed, free) =
            all.clone().find(|(node, ..)| *node == met).unwrap_or_else(|| counted(met, 0));
        PoolError::HugepagesRefused { node, page, needed, free }
    }
}
