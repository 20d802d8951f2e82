//! Clearing one chunk: made present, looked up, overwritten, marked, verified. The same for `vm-memory`
//! regions, host ranges and slabs, which differ only in where the bytes come from.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vm_memory::FileOffset;

use super::fresh::Freshness;
use super::request::{Strategy, Verify};
use crate::clear::{Clearer, Method, first_nonzero};
use crate::extent::Extent;
use crate::job::{Cause, Outcome, Outcomes, Prepared, Work, WorkRegion};
use crate::sys::{Chunk, bind_to_node, node_of, policy_node, populate};
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
}

/// What is to be done with the bytes of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Purpose {
    pub(crate) strategy: Strategy,
    pub(crate) verify: Verify,
}

/// How this host clears: the method and what is known of its nodes.
#[derive(Debug)]
pub(crate) struct Clearing {
    pub(crate) clearer: Clearer,
    pub(crate) numa: Numa,
}

/// Questions about nodes, asked only where there is more than one and the kernel answers.
#[derive(Debug)]
pub(crate) struct Numa {
    /// The node everything is on, on a machine with one.
    only: Option<NodeId>,
    refused: AtomicBool,
}

impl Numa {
    pub(crate) fn new(topology: &Topology) -> Self {
        let only = match topology.nodes() {
            [single] => Some(single.id()),
            _ => None,
        };
        Self { only, refused: AtomicBool::new(false) }
    }

    /// The node of the chunk's first page, if it is known.
    fn of(&self, chunk: &Chunk<'_>) -> Option<NodeId> {
        self.ask("move_pages", || node_of(chunk))
    }

    /// The node that the memory policy at the chunk's start names, if it names one.
    pub(crate) fn policy_of(&self, chunk: &Chunk<'_>) -> Option<NodeId> {
        self.ask("get_mempolicy", || policy_node(chunk))
    }

    /// Binds future pages of the chunk to a node. Where there is only one, or where the kernel does not let
    /// us (containers), nothing is bound.
    pub(crate) fn bind(&self, chunk: &Chunk<'_>, node: NodeId) -> io::Result<()> {
        if self.only.is_some() || self.refused.load(Ordering::Relaxed) {
            return Ok(());
        }
        match bind_to_node(chunk, node.0) {
            Err(errno) if is_refusal(errno) => {
                self.refusal("mbind", errno);
                Ok(())
            }
            bound => bound.map_err(io::Error::from_raw_os_error),
        }
    }

    fn ask(&self, call: &'static str, question: impl FnOnce() -> Result<Option<u32>, i32>) -> Option<NodeId> {
        if self.only.is_some() || self.refused.load(Ordering::Relaxed) {
            return self.only;
        }
        question().unwrap_or_else(|errno| self.refusal(call, errno)).map(NodeId)
    }

    /// Containers forbid these calls and small kernels lack them: said once, then done without.
    fn refusal(&self, call: &'static str, errno: i32) -> Option<u32> {
        if is_refusal(errno) {
            if !self.refused.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    call,
                    errno,
                    "the kernel does not answer NUMA calls here; going on without locality"
                );
            }
        } else {
            tracing::error!(call, errno, "the kernel refused a NUMA question");
        }
        None
    }
}

/// What containers and small kernels answer to NUMA calls.
fn is_refusal(errno: i32) -> bool {
    matches!(errno, libc::EPERM | libc::ENOSYS | libc::EACCES)
}

/// A job over a source.
#[derive(Debug)]
pub(crate) struct SourceWork {
    pub(crate) source: Box<dyn Source>,
    pub(crate) regions: Vec<SourceRegion>,
    pub(crate) clearing: Arc<Clearing>,
    pub(crate) purpose: Purpose,
    /// What may be believed of pages that are not there yet; asked only by `Strategy::Populate`.
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

    /// Whether the file behind the extent ends before the extent does.
    fn is_cut_off(&self, extent: Extent) -> bool {
        self.region(extent).and_then(|region| region.file.as_ref()).is_some_and(|backing| {
            let end = backing.start().saturating_add(extent.end());
            backing.file().metadata().is_ok_and(|found| found.len() < end)
        })
    }

    /// What the kernel's refusal to make a page present means.
    fn cause(&self, errno: i32, extent: Extent) -> Cause {
        match errno {
            libc::EHWPOISON => Cause::Poisoned,
            libc::EFAULT if self.is_cut_off(extent) => Cause::Truncated,
            libc::EFAULT | libc::ENOMEM | libc::ENOSPC => Cause::Shortage { errno },
            _ => Cause::System { call: "madvise(MADV_POPULATE_WRITE)", errno },
        }
    }
}

impl Work for SourceWork {
    fn prepare(&self, extent: Extent) -> Result<Prepared, Cause> {
        self.visit(extent, |chunk| {
            let fresh = self.purpose.strategy == Strategy::Populate && self.freshness.proves(chunk, extent);
            populate(chunk).map_err(|errno| self.cause(errno, extent))?;
            Ok(Prepared { node: self.clearing.numa.of(chunk), fresh })
        })?
    }

    fn perform(&self, extent: Extent, prepared: Prepared) -> Result<(Outcome, Option<Method>), Cause> {
        self.visit(extent, |chunk| {
            let done = if prepared.fresh {
                (Outcome::ReadsZero, None)
            } else {
                let method = self.clearing.clearer.clear(chunk);
                self.source.mark_written(extent);
                (Outcome::Erased, Some(method))
            };
            match self.purpose.verify {
                Verify::None => Ok(done),
                Verify::Full => match first_nonzero(chunk) {
                    None => Ok(done),
                    Some(offset) => {
                        let base = self.region(extent).map_or(0, |region| region.work.address);
                        Err(Cause::NotZero { address: base + extent.start + offset as u64 })
                    }
                },
            }
        })?
    }

    fn finish(&self, regions: &[WorkRegion], outcomes: &Outcomes) {
        self.source.finish(regions, outcomes);
    }
}
