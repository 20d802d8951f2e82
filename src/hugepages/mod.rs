//! Floor 6: hugepages that a host keeps across VMs: slabs, leases, and the ledger that never forgets
//! what is stale.
//!
//! A pool is made of *slabs*, one sealed memory file each, populated and bound to a node when the pool
//! is built. A *lease* lends whole slabs to one VM, at addresses of its own; the pool clears them
//! through mappings of its own. The ledger is a [`FrameTable`](crate::FrameTable), one descriptor a page:
//! `Stale → Zeroing → Zero → Leased → Stale`. A page is `Zero` only by a finished job over it, and only
//! slabs whose pages are all `Zero` are lent.

mod builder;
mod error;
mod frames;
mod host;
mod lease;
mod ledger;
mod memory;
mod pool;
mod slab;
mod zeroing;

pub use builder::{HugepagePoolBuilder, PageSize};
pub use error::{LayoutError, LeaseError, PoolError, RecycleError, RecycleFailure};
pub use frames::PoolFrames;
pub use lease::{Lease, LeaseId, NodePolicy};
pub use ledger::PoolUsage;
pub use memory::{LeasedMemory, LeasedRegion};
pub use pool::HugepagePool;
