//! Guest memory that carries its lease.

use std::fmt;
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

use vm_memory::bitmap::{BS, Bitmap, NewBitmap};
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryError, GuestMemoryRegion,
    GuestMemoryRegionBytes, GuestRegionCollection, GuestUsize, MemoryRegionAddress, VolatileSlice,
};

use super::error::{RecycleError, RecycleFailure};
use super::lease::{LeaseCore, LeaseId};
use super::ledger::Holder;
use crate::guest::Quiesced;
use crate::job::Job;
use crate::sys::Reservation;

/// A region of leased memory: a run of one slab.
#[derive(Debug)]
pub struct LeasedRegion<B = ()> {
    start: GuestAddress,
    len: u64,
    addresses: Arc<Reservation>,
    /// Where the region begins in `addresses`.
    offset: u64,
    file: FileOffset,
    is_hugetlb: bool,
    bitmap: B,
}

impl<B: NewBitmap> LeasedRegion<B> {
    pub(super) fn new(
        start: GuestAddress,
        len: u64,
        addresses: Arc<Reservation>,
        offset: u64,
        file: FileOffset,
        is_hugetlb: bool,
    ) -> Self {
        let bitmap = B::with_len(len as usize);
        Self { start, len, addresses, offset, file, is_hugetlb, bitmap }
    }
}

impl<B: Bitmap> GuestMemoryRegion for LeasedRegion<B> {
    type B = B;

    fn len(&self) -> GuestUsize {
        self.len
    }

    fn start_addr(&self) -> GuestAddress {
        self.start
    }

    fn bitmap(&self) -> BS<'_, B> {
        self.bitmap.slice_at(0)
    }

    fn get_host_address(&self, addr: MemoryRegionAddress) -> Result<*mut u8, GuestMemoryError> {
        self.get_slice(addr, 1).map(|slice| slice.ptr_guard_mut().as_ptr())
    }

    fn file_offset(&self) -> Option<&FileOffset> {
        Some(&self.file)
    }

    fn get_slice(
        &self,
        offset: MemoryRegionAddress,
        count: usize,
    ) -> Result<VolatileSlice<'_, BS<'_, B>>, GuestMemoryError> {
        let inside = offset.0.checked_add(count as u64).is_some_and(|end| end <= self.len);
        let bitmap = self.bitmap.slice_at(offset.0 as usize);
        let slice =
            inside.then(|| self.addresses.slice(self.offset + offset.0, count as u64, bitmap)).flatten();
        slice.ok_or(GuestMemoryError::InvalidBackendAddress)
    }

    fn is_hugetlbfs(&self) -> Option<bool> {
        Some(self.is_hugetlb)
    }
}

impl<B: Bitmap> GuestMemoryRegionBytes for LeasedRegion<B> {}

/// Guest memory that carries its lease: a `vm-memory` backend to be used like a
/// [`GuestMemoryMmap`](vm_memory::GuestMemoryMmap), cloned cheaply, put into an `Arc` or a
/// [`GuestMemoryAtomic`](vm_memory::GuestMemoryAtomic).
///
/// It ends with [`recycle`](Self::recycle). If the last clone is dropped without it, the pages are stale
/// and parked: their addresses turn into nothing, and they are not lent again before
/// [`HugepagePool::reclaim`](crate::HugepagePool::reclaim).
pub struct LeasedMemory<B = ()> {
    inner: Arc<Inner<B>>,
}

/// Fields drop in order: the regions first, which share the addresses that the lease then revokes.
struct Inner<B> {
    regions: GuestRegionCollection<LeasedRegion<B>>,
    lease: LeaseCore,
}

impl<B> Inner<B>
where
    B: Bitmap,
{
    /// Handles to the slabs' files beside the pool's and the regions' own: with a
    /// [`FileOffset`](vm_memory::FileOffset) that was cloned from a region, somebody may still write to it.
    fn other_file_handles(&self) -> usize {
        let of_slab = |file: &Arc<File>| {
            let own = self.regions.iter().filter(|region| Arc::ptr_eq(region.file.arc(), file)).count();
            Arc::strong_count(file).saturating_sub(own + 1)
        };
        self.lease.files().map(of_slab).sum()
    }
}

impl<B> LeasedMemory<B> {
    pub(super) fn new(regions: GuestRegionCollection<LeasedRegion<B>>, lease: LeaseCore) -> Self {
        Self { inner: Arc::new(Inner { regions, lease }) }
    }

    /// The lease's number.
    #[must_use]
    pub fn lease(&self) -> LeaseId {
        self.inner.lease.id
    }

    /// Bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.inner.lease.bytes
    }

    /// The page size in bytes.
    #[must_use]
    pub fn page_size(&self) -> u64 {
        self.inner.lease.pool.page
    }

    /// The host addresses of the memory, a range a layout entry.
    pub fn host_ranges(&self) -> impl Iterator<Item = Range<u64>> {
        self.inner
            .lease
            .addresses
            .iter()
            .map(|addresses| addresses.base()..addresses.base() + addresses.len())
    }
}

impl<B: Bitmap> LeasedMemory<B> {
    /// Ends the lease: takes the memory from its addresses, calls its pages stale, and starts the job that
    /// zeroes them. When the job is over, they can be lent again.
    ///
    /// `quiet` states that nobody else can write to the memory any more. On the caller's word alone, the
    /// addresses stay reserved until [`HugepagePool::vm_is_gone`](crate::HugepagePool::vm_is_gone).
    ///
    /// With an `Arc<LeasedMemory>` in hand: `Arc::unwrap_or_clone(memory).recycle(quiet)`.
    ///
    /// # Errors
    ///
    /// [`RecycleFailure`] with the memory, if the lease goes on: other clones of it or of a region's
    /// [`FileOffset`](vm_memory::FileOffset) are alive ([`RecycleError::StillMapped`]), or the statement is
    /// about other memory.
    pub fn recycle(self, quiet: Quiesced) -> Result<Job, Box<RecycleFailure<B>>> {
        let fail = |memory, error| Err(Box::new(RecycleFailure { memory, error }));
        let uncovered = self.host_ranges().find(|range| !quiet.covers(range));
        if let Some(uncovered) = uncovered {
            return fail(Some(self), RecycleError::NotCovered { uncovered });
        }
        let inner = match Arc::try_unwrap(self.inner) {
            Ok(inner) => inner,
            Err(inner) => {
                let others = Arc::strong_count(&inner).saturating_sub(1).max(1);
                return fail(Some(Self { inner }), RecycleError::StillMapped { others });
            }
        };
        match inner.other_file_handles() {
            0 => {}
            others => {
                let inner = Arc::new(inner);
                return fail(Some(Self { inner }), RecycleError::StillMapped { others });
            }
        }
        let Inner { regions, mut lease } = inner;
        // Each region is held by the collection alone: a clone of it would be a clone of `inner`.
        drop(regions);
        if let Err(error) = lease.revoke() {
            // Dropping the lease parks it.
            return fail(None, RecycleError::Revoke(error));
        }
        let (pool, id) = (Arc::clone(&lease.pool), lease.id);
        lease.end(Holder::Parked(id), !quiet.slots_are_gone());
        pool.zero(Holder::Parked(id)).or_else(|error| fail(None, RecycleError::Request(error)))
    }
}

impl<B: Bitmap> GuestMemoryBackend for LeasedMemory<B> {
    type R = LeasedRegion<B>;

    fn num_regions(&self) -> usize {
        self.inner.regions.num_regions()
    }

    fn find_region(&self, addr: GuestAddress) -> Option<&Self::R> {
        self.inner.regions.find_region(addr)
    }

    fn iter(&self) -> impl Iterator<Item = &Self::R> {
        self.inner.regions.iter()
    }
}

impl<B> Clone for LeasedMemory<B> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner) }
    }
}

impl<B> fmt::Debug for LeasedMemory<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranges: Vec<_> = self.host_ranges().collect();
        f.debug_struct("LeasedMemory")
            .field("lease", &self.lease())
            .field("host", &ranges)
            .finish_non_exhaustive()
    }
}
