//! `vm-memory` address spaces as a source of bytes.

use std::fmt;
use std::ops::Deref;

use vm_memory::bitmap::Bitmap;
use vm_memory::{
    FileOffset, GuestAddress, GuestMemory, GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress,
};

use super::clearing::{Numa, Source, SourceRegion};
use crate::error::RequestError;
use crate::extent::{Extent, merge_ranges};
use crate::job::{Cause, WorkRegion};
use crate::sys::{Chunk, FileKind, known_file_kind, page_size};

/// A snapshot of guest memory, kept alive by the job until it is over.
pub(crate) struct GuestSource<T> {
    memory: T,
    /// Guest physical address of each region of the job.
    starts: Vec<u64>,
}

impl<T, M> GuestSource<T>
where
    T: Deref<Target = M> + Send + Sync + 'static,
    M: GuestMemory + 'static,
{
    /// All of the memory, or `ranges` of it, cut at the borders of its regions.
    pub(crate) fn plan(
        memory: T,
        ranges: Option<Vec<(GuestAddress, u64)>>,
        numa: &Numa,
    ) -> Result<(Self, Vec<SourceRegion>), RequestError> {
        let physical = memory.physical_memory().ok_or(RequestError::IommuView)?;
        let pieces = match ranges {
            None => physical.iter().map(|region| (region.start_addr().0, region.len())).collect(),
            Some(ranges) => pieces_of(physical, ranges)?,
        };
        let mut starts = Vec::with_capacity(pieces.len());
        let mut regions = Vec::with_capacity(pieces.len());
        for (start, len) in pieces.into_iter().filter(|(_, len)| *len > 0) {
            let no_host_address = RequestError::NoHostAddress { address: start };
            let Some((region, offset)) = physical.to_region_addr(GuestAddress(start)) else {
                return Err(no_host_address);
            };
            let file = region.file_offset();
            let kind = file.map_or(FileKind::Other, |file| known_file_kind(file.arc()));
            let page = if let FileKind::Hugetlbfs(page) = kind { page } else { page_size() };
            let in_memory = kind != FileKind::Other;
            for (from, len) in cut_at_page(offset.0, len, page) {
                let offset = MemoryRegionAddress(offset.0 + from);
                let Ok(first) = region.get_slice(offset, 1) else { return Err(no_host_address) };
                let file = file.and_then(|file| {
                    Some(FileOffset::from_arc(file.arc().clone(), file.start().checked_add(offset.0)?))
                });
                let node = numa.policy_of(&Chunk::from_slice(&first));
                let address = start + from;
                starts.push(address);
                regions.push(SourceRegion { work: WorkRegion { address, len, node, page }, file, in_memory });
            }
        }
        Ok((Self { memory, starts }, regions))
    }

    /// The region that holds an extent of the job, and the extent's offset in it.
    fn locate(
        &self,
        extent: Extent,
    ) -> Option<(&<M::PhysicalMemory as GuestMemoryBackend>::R, MemoryRegionAddress)> {
        let address = self.starts.get(extent.region as usize)?.checked_add(extent.start)?;
        self.memory.physical_memory()?.to_region_addr(GuestAddress(address))
    }
}

impl<T, M> Source for GuestSource<T>
where
    T: Deref<Target = M> + Send + Sync + 'static,
    M: GuestMemory + 'static,
{
    fn with_chunk(&self, extent: Extent, visit: &mut dyn FnMut(&Chunk<'_>)) -> Result<(), Cause> {
        let (region, offset) = self.locate(extent).ok_or(Cause::NoHostAddress)?;
        let len = usize::try_from(extent.len).map_err(|_| Cause::NoHostAddress)?;
        let slice = region.get_slice(offset, len).map_err(|_| Cause::NoHostAddress)?;
        visit(&Chunk::from_slice(&slice));
        Ok(())
    }

    fn mark_written(&self, extent: Extent) {
        if let Some((region, offset)) = self.locate(extent) {
            region.bitmap().mark_dirty(offset.0 as usize, extent.len as usize);
        }
    }
}

/// A piece (offset in its region and length) cut at its first page border, as `(from, len)`: chunks are
/// counted from the start of a piece, and so no two of them share a page, and a failure is narrowed down to
/// whole pages of memory.
fn cut_at_page(offset: u64, len: u64, page: u64) -> impl Iterator<Item = (u64, u64)> {
    let head = ((page - offset % page) % page).min(len);
    [(0, head), (head, len - head)].into_iter().filter(|(_, len)| *len > 0)
}

/// Guest ranges cut at region borders: sorted, merged, each inside one region.
fn pieces_of<M: GuestMemoryBackend + ?Sized>(
    memory: &M,
    ranges: Vec<(GuestAddress, u64)>,
) -> Result<Vec<(u64, u64)>, RequestError> {
    for &(start, len) in &ranges {
        if start.0.checked_add(len).is_none() {
            return Err(RequestError::Overflow { start: start.0, len });
        }
    }
    let ranges: Vec<_> = ranges.into_iter().map(|(start, len)| (start.0, len)).collect();
    let mut pieces = Vec::with_capacity(ranges.len());
    for (start, len) in merge_ranges(ranges).unwrap_or_default() {
        let mut at = start;
        while at < start + len {
            let Some((region, offset)) = memory.to_region_addr(GuestAddress(at)) else {
                return Err(RequestError::NotGuestMemory { start, len, hole: at });
            };
            let piece = region.len().saturating_sub(offset.0).min(start + len - at);
            if piece == 0 {
                return Err(RequestError::NotGuestMemory { start, len, hole: at });
            }
            pieces.push((at, piece));
            at += piece;
        }
    }
    Ok(pieces)
}

impl<T> fmt::Debug for GuestSource<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GuestSource").field("starts", &self.starts).finish_non_exhaustive()
    }
}
