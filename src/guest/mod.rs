//! Floor 4: guest memory as work for the pool: `vm-memory` regions, raw host ranges, what may be taken
//! as fresh, the dirty bitmap, `Quiesced`, and KVM's memory slots.

mod clearing;
mod fresh;
mod host;

#[cfg(feature = "kvm")]
mod kvm;
mod memory;
mod quiesced;
mod request;

pub(crate) use clearing::{Clearing, Numa, Purpose, Source, SourceRegion, SourceWork};

pub(crate) use fresh::Freshness;
#[cfg(feature = "kvm")]
pub use kvm::{KvmQuiesced, KvmSlots, TeardownFailure};
pub use quiesced::Quiesced;
pub(crate) use request::Planned;
pub use request::{Intent, Strategy, Verify, ZeroRequest};
