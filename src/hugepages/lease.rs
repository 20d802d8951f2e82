//! Leases: slabs lent to one VM, and how a lease ends.

use std::fmt;
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vm_memory::bitmap::NewBitmap;
use vm_memory::{FileOffset, GuestAddress, GuestRegionCollection};

use super::error::LayoutError;
use super::ledger::Holder;
use super::memory::{LeasedMemory, LeasedRegion};
use super::pool::PoolCore;
use crate::sys::{Chunk, Reservation};
use crate::topology::NodeId;

/// The number of a lease, never given twice in a process: a lease of one pool means nothing to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(u64);

impl LeaseId {
    pub(super) fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lease {}", self.0)
    }
}

/// On which nodes a lease may lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum NodePolicy {
    /// On this node or not at all.
    Strict(NodeId),
    /// On this node as far as it has zero pages, then on the others by distance.
    Prefer(NodeId),
    /// Anywhere.
    Any,
}

/// Zero pages lent to one VM. Nobody has seen them yet; dropped, they go back and are zeroed again.
#[derive(Debug)]
#[must_use = "a lease does nothing until it is guest memory"]
pub struct Lease {
    core: LeaseCore,
}

impl Lease {
    pub(super) fn new(pool: Arc<PoolCore>, id: LeaseId, slabs: Vec<usize>, bytes: u64) -> Self {
        Self { core: LeaseCore { pool, id, slabs, bytes, addresses: Vec::new(), ended: false } }
    }

    /// The lease's number.
    #[must_use]
    pub fn id(&self) -> LeaseId {
        self.core.id
    }

    /// Bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.core.bytes
    }

    /// Maps the lease as guest memory: `layout` gives guest physical address and length in bytes of each
    /// piece, ascending, whole pages, as many bytes in all as were leased. A piece that crosses from one
    /// slab into the next becomes several regions, each with its file and offset, at adjacent addresses.
    ///
    /// Every byte of it reads zero.
    ///
    /// # Errors
    ///
    /// [`LayoutError`]; the lease ends then, and its pages are zeroed again.
    pub fn into_memory<B: NewBitmap>(
        mut self,
        layout: impl IntoIterator<Item = (GuestAddress, u64)>,
    ) -> Result<LeasedMemory<B>, LayoutError> {
        let layout: Vec<(GuestAddress, u64)> = layout.into_iter().collect();
        self.core.check(&layout)?;
        match self.core.map(layout) {
            Ok(regions) => Ok(LeasedMemory::new(regions, self.core)),
            Err(error) => {
                // Nobody has seen the addresses: the lease ends like one that was never mapped.
                self.core.addresses.clear();
                Err(error)
            }
        }
    }
}

const HUGE_2M: u64 = 2 << 20;

/// What a lease holds, before and after it is mapped.
#[derive(Debug)]
pub(super) struct LeaseCore {
    pub(super) pool: Arc<PoolCore>,
    pub(super) id: LeaseId,
    slabs: Vec<usize>,
    pub(super) bytes: u64,
    /// Where it is mapped; shared with its regions. Empty: nobody has ever seen it.
    pub(super) addresses: Vec<Arc<Reservation>>,
    ended: bool,
}

impl LeaseCore {
    fn check(&self, layout: &[(GuestAddress, u64)]) -> Result<(), LayoutError> {
        self.pool.check_process().map_err(LayoutError::Request)?;
        let page = self.pool.page;
        let mut laid_out = 0u64;
        for &(guest, len) in layout {
            if len == 0 || len % page != 0 || guest.0 % crate::sys::page_size() != 0 {
                return Err(LayoutError::NotWholePages { guest: guest.0, len, page });
            }
            if guest.0.checked_add(len).is_none() {
                return Err(LayoutError::Overflow { guest: guest.0, len });
            }
            laid_out = laid_out.saturating_add(len);
        }
        if laid_out != self.bytes {
            return Err(LayoutError::WrongSum { laid_out, leased: self.bytes });
        }
        Ok(())
    }

    /// Maps the pieces of a checked layout, and keeps the addresses.
    fn map<B: NewBitmap>(
        &mut self,
        layout: Vec<(GuestAddress, u64)>,
    ) -> Result<GuestRegionCollection<LeasedRegion<B>>, LayoutError> {
        let mut regions = Vec::new();
        let mut source = self.pieces();
        for (guest, len) in layout {
            let pool = &self.pool;
            let mut addresses = Reservation::new(len, pool.page.max(HUGE_2M)).map_err(LayoutError::Map)?;
            let mut parts = Vec::new();
            let mut at = 0;
            while at < len {
                let Some((slab, offset, part)) = source.take(len - at) else { break };
                let Some(slab) = pool.ledger.slab(slab) else { break };
                addresses.append(&slab.file, offset, part).map_err(LayoutError::Map)?;
                if let Some(slice) = addresses.slice(at, part, ()) {
                    let chunk = Chunk::from_slice(&slice);
                    pool.service.numa().bind(&chunk, slab.node).map_err(LayoutError::Map)?;
                }
                parts.push((at, part, FileOffset::from_arc(Arc::clone(&slab.file), offset)));
                at += part;
            }
            let addresses = Arc::new(addresses);
            self.addresses.push(Arc::clone(&addresses));
            for (at, part, file) in parts {
                let (start, addresses) = (GuestAddress(guest.0 + at), Arc::clone(&addresses));
                regions.push(LeasedRegion::new(start, part, addresses, at, file, pool.is_hugetlb));
            }
        }
        Ok(GuestRegionCollection::from_regions(regions)?)
    }

    /// The lease's bytes in order, to be taken piece by piece.
    fn pieces(&self) -> Pieces {
        let sizes = self.slabs.iter().filter_map(|&slab| Some((slab, self.pool.ledger.slab(slab)?.bytes)));
        Pieces { slabs: sizes.collect::<Vec<_>>().into_iter(), current: None }
    }

    /// The files of its slabs.
    pub(super) fn files(&self) -> impl Iterator<Item = &Arc<File>> {
        self.slabs.iter().filter_map(|&slab| self.pool.ledger.slab(slab)).map(|slab| &slab.file)
    }

    /// Takes the memory from its addresses; the regions are gone, so nothing else refers to them.
    pub(super) fn revoke(&mut self) -> std::io::Result<()> {
        for addresses in &mut self.addresses {
            match Arc::get_mut(addresses) {
                Some(own) => own.revoke()?,
                // The regions, the only other holders, are gone before this is called.
                None => return Err(std::io::Error::from_raw_os_error(libc::EBUSY)),
            }
        }
        Ok(())
    }

    /// Ends the lease: its pages are stale from here on.
    pub(super) fn end(&mut self, next: Holder, keep_addresses: bool) {
        self.ended = true;
        let addresses = std::mem::take(&mut self.addresses);
        if keep_addresses && !addresses.is_empty() {
            let own = addresses.into_iter().filter_map(Arc::into_inner).collect();
            self.pool.ledger.holders().kept_addresses.insert(self.id, own);
        }
        self.pool.ledger.end_lease(&self.slabs, next);
    }
}

impl Drop for LeaseCore {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        if self.addresses.is_empty() {
            // Nobody has ever had an address of it.
            self.end(Holder::Stale, false);
            if let Err(error) = self.pool.zero(Holder::Stale) {
                tracing::warn!(lease = %self.id, %error, "a lease went back unused and is not zeroed yet");
            }
            return;
        }
        tracing::warn!(
            lease = %self.id,
            bytes = self.bytes,
            "guest memory was dropped without being recycled; its slabs are parked"
        );
        if let Err(error) = self.revoke() {
            tracing::error!(lease = %self.id, %error, "parked memory could not be taken from its addresses");
        }
        self.end(Holder::Parked(self.id), true);
    }
}

/// Slabs in order, consumed from the front.
struct Pieces {
    slabs: std::vec::IntoIter<(usize, u64)>,
    /// Slab, offset, bytes left of it.
    current: Option<(usize, u64, u64)>,
}

impl Pieces {
    /// At most `bytes` bytes of one slab: its index, the offset in it, and how many.
    fn take(&mut self, bytes: u64) -> Option<(usize, u64, u64)> {
        let (slab, offset, left) = match self.current.take() {
            Some(current) => current,
            None => self.slabs.next().map(|(slab, size)| (slab, 0, size))?,
        };
        let part = left.min(bytes);
        if part < left {
            self.current = Some((slab, offset + part, left - part));
        }
        Some((slab, offset, part))
    }
}
