//! The scheduling decisions: who works where, what next, whom to rob, whom to wake, how much at a time, and
//! when background work may go on. No threads, no clocks: whoever drives it supplies queues and times.
//!
//! The same code is driven by the worker threads, by the tests, and by the simulator of large machines
//! (`examples/scale_sim`), which includes these files.

mod grain;
mod plan;
mod quiet;
mod throttle;

pub(crate) use grain::Grain;
pub use plan::Locality;
pub(crate) use plan::{Origin, Place, Plan, Queues};
pub(crate) use quiet::Quiet;
pub(crate) use throttle::Throttle;

#[cfg(test)]
pub(super) mod tests;
