//! Clearing one chunk: made present, looked up, overwritten, marked, verified. The same for `vm-memory`
//! regions, host ranges and slabs, which differ only in where the bytes come from.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vm_memory::FileOffset;

use super::fresh::Freshness;
use super::request::{Strategy, Verify};
use crate::clear::{Clearer, Concurrency, Reuse, Situation, first_nonzero};
use crate::extent::Extent;
use crate::job::{Cause, Outcome, Outcomes, Piece, Prepared, Work, WorkRegion};
use crate::sys::{Chunk, Presence, Survey, bind_to_node, node_of, page_size, policy_node, populate};
use crate::topology::{NodeId, Topology};

/// Where the bytes of a job come from.
pub(crate) trait Source: Send + Sync + fmt::Debug {
    /// Calls `visit` with the bytes of the extent, or says why they cannot be had.
    fn with_chunk(&self, extent: Extent, visit: &mut dyn FnMut(&Chunk<'_>)) -> Result<(), Cause>;

    /// The bytes of the extent were written: told after the fence, before the job can end.
    fn mark_written(&self, _extent: Extent) {}

    /// Told once when the job is over.
    fn finish(&self, _regions: &[WorkRegion], _outcomes: &Outcomes) {}
}

/// A region of a source, and the file behind it.
#[derive(Debug, Clone)]
pub(crate) struct SourceRegion {
    pub(crate) work: WorkRegion,
    /// The file, from the offset of the region's first byte on.
    pub(crate) file: Option<FileOffset>,
    /// By the region's own word its pages are memory: where they are there, a store waits for no file system. Nothing
    /// but who does a small job hangs on it.
    pub(crate) in_memory: bool,
}

/// What is to be done with the bytes of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Purpose {
    pub(crate) strategy: Strategy,
    pub(crate) verify: Verify,
    pub(crate) reuse: Reuse,
}

/// How this host clears: the method, what is known of its nodes, and how it is asked for present pages.
#[derive(Debug)]
pub(crate) struct Clearing {
    pub(crate) clearer: Clearer,
    pub(crate) numa: Numa,
    pub(crate) presence: Presence,
}

/// Questions about nodes, asked only where there is more than one and as long as the kernel answers them.
#[derive(Debug)]
pub(crate) struct Numa {
    /// The node everything is on, on a machine with one.
    only: Option<NodeId>,
    move_pages: Call,
    get_mempolicy: Call,
    mbind: Call,
}

impl Numa {
    pub(crate) fn new(topology: &Topology) -> Self {
        let only = match topology.nodes() {
            [single] => Some(single.id()),
            _ => None,
        };
        let [move_pages, get_mempolicy, mbind] = ["move_pages", "get_mempolicy", "mbind"].map(Call::new);
        Self { only, move_pages, get_mempolicy, mbind }
    }

    /// The node of the chunk's first page, if it is known.
    fn of(&self, chunk: &Chunk<'_>) -> Option<NodeId> {
        self.ask(&self.move_pages, || node_of(chunk))
    }

    /// The node that the memory policy at the chunk's start names, if it names one.
    pub(crate) fn policy_of(&self, chunk: &Chunk<'_>) -> Option<NodeId> {
        self.ask(&self.get_mempolicy, || policy_node(chunk))
    }

    fn ask(&self, call: &Call, question: impl FnOnce() -> Result<Option<u32>, i32>) -> Option<NodeId> {
        if self.only.is_some() {
            return self.only;
        }
        match call.make(question) {
            Ok(answer) => answer.flatten().map(NodeId),
            Err(errno) => {
                tracing::error!(call = call.name, errno, "the kernel refused a NUMA question");
                None
            }
        }
    }

    /// Binds future pages of the chunk to a node. Where there is only one, or where the kernel does not let
    /// us (containers), nothing is bound.
    pub(crate) fn bind(&self, chunk: &Chunk<'_>, node: NodeId) -> io::Result<()> {
        if self.only.is_some() {
            return Ok(());
        }
        let bound = self.mbind.make(|| bind_to_node(chunk, node.0));
        bound.map(drop).map_err(io::Error::from_raw_os_error)
    }
}

/// A system call that containers forbid and small kernels lack: said once, then done without.
#[derive(Debug)]
struct Call {
    name: &'static str,
    refused: AtomicBool,
}

impl Call {
    fn new(name: &'static str) -> Self {
        Self { name, refused: AtomicBool::new(false) }
    }

    /// `Ok(None)` where the call is not to be had; any other error is passed on.
    fn make<T>(&self, call: impl FnOnce() -> Result<T, i32>) -> Result<Option<T>, i32> {
        if self.refused.load(Ordering::Relaxed) {
            return Ok(None);
        }
        match call() {
            Err(errno @ (libc::EPERM | libc::ENOSYS | libc::EACCES)) => {
                if !self.refused.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        call = self.name,
                        errno,
                        "this host does not allow the call; going on without it"
                    );
                }
                Ok(None)
            }
            answer => answer.map(Some),
        }
    }
}

/// A job over a source.
#[derive(Debug)]
pub(crate) struct SourceWork {
    pub(crate) source: Box<dyn Source>,
    pub(crate) regions: Vec<SourceRegion>,
    pub(crate) clearing: Arc<Clearing>,
    pub(crate) purpose: Purpose,
    pub(crate) concurrency: Concurrency,
    /// What may be believed of pages that are not there.
    pub(crate) freshness: Freshness,
}

impl SourceWork {
    fn visit<T>(&self, extent: Extent, mut visit: impl FnMut(&Chunk<'_>) -> T) -> Result<T, Cause> {
        let mut answer = None;
        self.source.with_chunk(extent, &mut |chunk| {
            // A memory object that hands out fewer bytes than asked would leave the rest uncleared.
            answer = (chunk.len() as u64 == extent.len).then(|| visit(chunk));
        })?;
        answer.ok_or(Cause::NoHostAddress)
    }

    fn region(&self, extent: Extent) -> Option<&SourceRegion> {
        self.regions.get(extent.region as usize)
    }

    /// Bytes of the extent that the file behind it holds; all of them where there is no file.
    fn backed_bytes(&self, extent: Extent) -> u64 {
        let file = self.region(extent).and_then(|region| region.file.as_ref());
        let len = file.and_then(|file| Some((file.start(), file.file().metadata().ok()?.len())));
        len.map_or(extent.len, |(start, len)| {
            len.saturating_sub(start.saturating_add(extent.start)).min(extent.len)
        })
    }

    /// What the kernel's refusal to make a page present means.
    fn cause(&self, errno: i32, extent: Extent) -> Cause {
        match errno {
            libc::EHWPOISON => Cause::Poisoned,
            libc::EFAULT if self.backed_bytes(extent) < extent.len => Cause::Truncated,
            libc::EFAULT | libc::ENOMEM | libc::ENOSPC => Cause::Shortage { errno },
            _ => Cause::System { call: "madvise(MADV_POPULATE_WRITE)", errno },
        }
    }

    /// Which pages of the chunk are there, if that is worth knowing.
    fn survey(&self, chunk: &Chunk<'_>, extent: Extent) -> Survey {
        if self.is_surveyed(extent) { self.clearing.presence.survey(chunk) } else { Survey::default() }
    }

    /// Not hugetlb files, where the answer proves nothing and spares nothing, nor where it is known.
    fn is_surveyed(&self, extent: Extent) -> bool {
        let base_pages = self.region(extent).is_some_and(|region| region.work.page == page_size());
        base_pages && !matches!(self.freshness, Freshness::ByConstruction)
    }

    fn prepare_surveyed(
        &self,
        chunk: &Chunk<'_>,
        extent: Extent,
        survey: &Survey,
    ) -> Result<Prepared, Cause> {
        let zero = self.holes(chunk, extent, survey);
        let populates = self.purpose.strategy == Strategy::Populate;
        let left = if populates { &[] } else { zero.as_slice() };
        self.make_present(chunk, extent, survey, left)?;
        let mut present = extent.pieces(left).filter(|(_, is_left)| !is_left);
        let node = match present.next() {
            Some((first, _)) => self.clearing.numa.of(&part(chunk, extent, first)?),
            None => None,
        };
        drop(present);
        Ok(Prepared { node, made_present: populates && !zero.is_empty(), zero })
    }

    /// The parts of the chunk that read zero without a store.
    fn holes(&self, chunk: &Chunk<'_>, extent: Extent, survey: &Survey) -> Vec<Extent> {
        if matches!(self.freshness, Freshness::ByConstruction) {
            return vec![extent];
        }
        let files = self.regions.iter().filter_map(|region| region.file.as_ref());
        let holes = self.freshness.holes(&survey.absent, files.map(FileOffset::file));
        let (base, end) = (chunk.ptr() as u64, chunk.ptr() as u64 + chunk.len() as u64);
        holes
            .into_iter()
            .map(|hole| hole.start.clamp(base, end)..hole.end.clamp(base, end))
            .map(|hole| Extent {
                start: extent.start + (hole.start - base),
                len: hole.end - hole.start,
                ..extent
            })
            .collect()
    }

    /// Makes the chunk present, but for the holes that are to stay.
    fn make_present(
        &self,
        chunk: &Chunk<'_>,
        extent: Extent,
        survey: &Survey,
        left: &[Extent],
    ) -> Result<(), Cause> {
        let refused = |errno| self.cause(errno, extent);
        if left.is_empty() {
            let populated = self.clearing.presence.is_populated(chunk, survey).map_err(refused)?;
            return if populated { Ok(()) } else { populate(chunk).map_err(refused) };
        }
        for (piece, _) in extent.pieces(left).filter(|(_, is_left)| !is_left) {
            populate(&part(chunk, extent, piece)?).map_err(refused)?;
        }
        Ok(())
    }

    /// Reads the chunk back, but for what is a hole: reading would allocate memory there.
    fn verify(&self, chunk: &Chunk<'_>, extent: Extent, any_left: bool) -> Result<(), Cause> {
        // Looked for again: somebody may have written to a hole since.
        let left = if any_left { self.holes(chunk, extent, &self.survey(chunk, extent)) } else { Vec::new() };
        for (piece, _) in extent.pieces(&left).filter(|(_, is_left)| !is_left) {
            if let Some(offset) = first_nonzero(&part(chunk, extent, piece)?) {
                let base = self.region(extent).map_or(0, |region| region.work.address);
                return Err(Cause::NotZero { address: base + piece.start + offset as u64 });
            }
        }
        Ok(())
    }
}

/// The bytes of a piece of the extent whose bytes are `chunk`.
fn part<'c>(chunk: &'c Chunk<'_>, extent: Extent, piece: Extent) -> Result<Chunk<'c>, Cause> {
    let offset = piece.start.checked_sub(extent.start);
    offset.and_then(|offset| chunk.part(offset, piece.len)).ok_or(Cause::NoHostAddress)
}

impl Work for SourceWork {
    fn prepare(&self, extent: Extent) -> Result<Prepared, Cause> {
        self.visit(extent, |chunk| self.prepare_surveyed(chunk, extent, &self.survey(chunk, extent)))?
    }

    fn prepare_at_once(&self, extent: Extent) -> Option<Result<Prepared, Cause>> {
        let prepared = self.visit(extent, |chunk| {
            let presence = &self.clearing.presence;
            let survey = presence.survey(chunk);
            let is_memory = self.region(extent).is_some_and(|region| region.in_memory);
            let waits_for_nobody = presence.waits_for_nobody(chunk, &survey, is_memory);
            let known = if self.is_surveyed(extent) { &survey } else { &Survey::default() };
            waits_for_nobody.then(|| self.prepare_surveyed(chunk, extent, known))
        });
        prepared.ok().flatten()
    }

    /// A fault may bring a whole transparent hugepage: what of it another chunk has would be found there, and
    /// overwritten for nothing.
    fn least_chunk(&self) -> u64 {
        if self.purpose.strategy == Strategy::Populate { 2 << 20 } else { 0 }
    }

    fn perform(&self, extent: Extent, prepared: &Prepared) -> Result<Vec<Piece>, Cause> {
        let situation = Situation { reuse: self.purpose.reuse, concurrency: self.concurrency };
        self.visit(extent, |chunk| {
            let mut pieces = Vec::with_capacity(2 * prepared.zero.len() + 1);
            for (piece, is_zero) in extent.pieces(&prepared.zero) {
                if is_zero {
                    let (outcome, present) = (Outcome::ReadsZero, prepared.made_present);
                    pieces.push(Piece { extent: piece, outcome, method: None, present });
                } else {
                    let method = self.clearing.clearer.clear_chunk(&part(chunk, extent, piece)?, situation);
                    self.source.mark_written(piece);
                    pieces.push(Piece::erased(piece, Some(method)));
                }
            }
            if self.purpose.verify == Verify::Full {
                self.verify(chunk, extent, !prepared.made_present && !prepared.zero.is_empty())?;
            }
            Ok(pieces)
        })?
    }

    fn may_be_narrowed(&self, extent: Extent, cause: &Cause) -> bool {
        match cause {
            Cause::Truncated => self.backed_bytes(extent) > 0,
            other => other.is_of_single_pages(),
        }
    }

    fn finish(&self, regions: &[WorkRegion], outcomes: &Outcomes) {
        self.source.finish(regions, outcomes);
    }
}
