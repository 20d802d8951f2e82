//! The errors of pools and leases.

use std::fmt;
use std::io;
use std::ops::Range;

use vm_memory::GuestRegionCollectionError;

use super::lease::LeaseId;
use super::memory::LeasedMemory;
use crate::error::{JobError, RequestError};
use crate::frames::FrameError;
use crate::topology::NodeId;

/// A pool could not be built; the host has all its pages back.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PoolError {
    /// No capacity was asked for.
    #[error("a pool without capacity was asked for; say how many bytes it takes from which node")]
    NoCapacity,
    /// The machine has no such node, or the process may not use its memory.
    #[error("{node} has no memory for this process; nodes with memory: {known:?}")]
    UnknownNode {
        /// The node asked for.
        node: NodeId,
        /// The nodes there are.
        known: Vec<NodeId>,
    },
    /// The kernel offers no hugepages of this size.
    #[error(
        "the host has no pages of {asked} bytes; it offers {offered:?} (a larger size may need hugepagesz= on the kernel's command line)"
    )]
    NoSuchPageSize {
        /// The size asked for, in bytes.
        asked: u64,
        /// The sizes there are, in bytes.
        offered: Vec<u64>,
    },
    /// A size is not made of whole pages.
    #[error("{bytes} bytes are no multiple of the page size of {page} bytes")]
    NotWholePages {
        /// What was asked.
        bytes: u64,
        /// The page size in bytes.
        page: u64,
    },
    /// The host has too few hugepages, in all or on the node.
    #[error(
        "need {needed} pages of {page} bytes on {node}, {free} free: echo a larger number to {file}, or free some"
    )]
    NotEnoughHugepages {
        /// The node.
        node: NodeId,
        /// The page size in bytes.
        page: u64,
        /// Pages asked for.
        needed: u64,
        /// Pages free now.
        free: u64,
        /// The file that sets their number.
        file: String,
    },
    /// The host has hugepages enough, but does not give them to this process.
    #[error(
        "need {needed} pages of {page} bytes on {node}, {free} are free, and yet they are refused: raise the \
         hugetlb cgroup limit (max, rsvd.max), or look at the process's cpuset and memory policy"
    )]
    HugepagesRefused {
        /// The node.
        node: NodeId,
        /// The page size in bytes.
        page: u64,
        /// Pages asked for.
        needed: u64,
        /// Pages free now.
        free: u64,
    },
    /// The node has less memory than this.
    #[error(
        "need {needed} bytes on {node}, which has {total} in all: ask for less, or for some on other nodes"
    )]
    NotEnoughMemory {
        /// The node.
        node: NodeId,
        /// Bytes asked for.
        needed: u64,
        /// Bytes the node has in all.
        total: u64,
    },
    /// The kernel refused a call.
    #[error("{call} for a slab of {bytes} bytes on {node}: {source}")]
    System {
        /// The call.
        call: &'static str,
        /// The slab's size in bytes.
        bytes: u64,
        /// The slab's node.
        node: NodeId,
        /// What the kernel said.
        source: io::Error,
    },
    /// The pages could not be made present.
    #[error("the pool's pages could not be made present: {0}")]
    Populate(#[source] JobError),
    /// The service refused the job that makes them present.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The page-frame table could not be made.
    #[error(transparent)]
    Frames(#[from] FrameError),
}

/// A lease was refused; the pool has not changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseError {
    /// Nothing, or not whole pages, were asked for.
    #[error(
        "a lease of {bytes} bytes was asked for; it takes a positive multiple of the page size of {page} bytes"
    )]
    NotWholePages {
        /// What was asked.
        bytes: u64,
        /// The page size in bytes.
        page: u64,
    },
    /// The pool has no memory on the node.
    #[error("the pool has no memory on {node}; it has some on {known:?}")]
    NoMemoryOn {
        /// The node asked for.
        node: NodeId,
        /// The nodes it has memory on.
        known: Vec<NodeId>,
    },
    /// Too few zero bytes.
    #[error(
        "{needed} bytes needed on {nodes:?}: {zero} zero, {stale} stale or being zeroed, {leased} leased, {parked} parked, {quarantined} quarantined; {remedy}"
    )]
    Exhausted {
        /// Bytes needed.
        needed: u64,
        /// The nodes that the policy allows.
        nodes: Vec<NodeId>,
        /// Bytes that could be lent now.
        zero: u64,
        /// Bytes that are stale or being zeroed.
        stale: u64,
        /// Bytes lent to others.
        leased: u64,
        /// Bytes of leases that were dropped without being recycled.
        parked: u64,
        /// Bytes of slabs with a bad page.
        quarantined: u64,
        /// What helps.
        remedy: &'static str,
    },
    /// Called in a forked child ([`RequestError::ForkedChild`]), where its parent's pages are not to be lent.
    #[error(transparent)]
    Request(RequestError),
    /// The ledger contradicts itself; the slab in question was taken out of use.
    #[error("the ledger contradicts itself (a bug): {0}")]
    Ledger(#[from] FrameError),
}

/// A lease could not be laid out as guest memory. The lease ends; its pages are zeroed again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// The layout does not add up to the lease.
    #[error("the layout holds {laid_out} bytes and the lease {leased}; they must be equal")]
    WrongSum {
        /// Bytes of the layout.
        laid_out: u64,
        /// Bytes of the lease.
        leased: u64,
    },
    /// An entry is empty or not made of whole pages.
    #[error(
        "the layout's entry at {guest:#x} of {len:#x} bytes is not made of whole pages of {page:#x} bytes"
    )]
    NotWholePages {
        /// Guest physical address.
        guest: u64,
        /// Length in bytes.
        len: u64,
        /// The page size in bytes.
        page: u64,
    },
    /// An entry wraps round the end of the guest's address space.
    #[error("the layout's entry {guest:#x} + {len:#x} wraps round the end of the address space")]
    Overflow {
        /// Guest physical address.
        guest: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Entries overlap or are not in ascending order.
    #[error("the layout cannot be guest memory: {0}")]
    Regions(#[from] GuestRegionCollectionError),
    /// Called in a forked child ([`RequestError::ForkedChild`]): the lease is its parent's.
    #[error(transparent)]
    Request(RequestError),
    /// The kernel refused a mapping.
    #[error("cannot map the lease: {0}; is vm.max_map_count reached?")]
    Map(#[from] io::Error),
}

/// Why a lease could not be recycled.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecycleError {
    /// Somebody else still holds the memory.
    #[error(
        "{others} other handles to the memory or its files are alive (devices, KvmSlots, running jobs, old snapshots, clones of a FileOffset); drop them first"
    )]
    StillMapped {
        /// How many.
        others: usize,
    },
    /// The statement is about other memory.
    #[error("the Quiesced statement does not cover host addresses {:#x}..{:#x}; it was made for another VM's slots", uncovered.start, uncovered.end)]
    NotCovered {
        /// Host addresses it says nothing about.
        uncovered: Range<u64>,
    },
    /// The addresses could not be cleared of the memory; it is parked, and
    /// [`reclaim`](crate::HugepagePool::reclaim) tries again.
    #[error("cannot take the memory from its addresses: {0}; the lease is parked, `reclaim` tries again")]
    Revoke(#[source] io::Error),
    /// The lease has ended and its pages are stale, but no job zeroes them.
    #[error(
        "the lease has ended, its pages are stale, and zeroing was refused: {0}; call `zero_stale` later"
    )]
    Request(#[source] RequestError),
    /// No lease of this number is parked.
    #[error("{lease} is not parked in this pool; parked: {parked:?}")]
    NotParked {
        /// The number asked for.
        lease: LeaseId,
        /// The parked leases.
        parked: Vec<LeaseId>,
    },
}

/// A lease that was not recycled, and why.
#[derive(Debug)]
pub struct RecycleFailure<B = ()> {
    /// The memory, where the lease goes on.
    pub memory: Option<LeasedMemory<B>>,
    /// Why.
    pub error: RecycleError,
}

impl<B> fmt::Display for RecycleFailure<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<B: fmt::Debug> std::error::Error for RecycleFailure<B> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}
