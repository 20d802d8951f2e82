//! Floor 5: the page-frame table, one descriptor per page.
//!
//! A [`FrameTable`] says of every page whether it is stale, zero, leased or gone bad. Building it costs
//! only the list of its sections; a section's descriptors come into being when a worker gets to it, or
//! earlier when somebody asks for one of its frames. No thread is started and no clock is read here:
//! whoever has threads calls [`FrameTable::initialise_section`], and a service does so with its workers
//! ([`ZeroingService::initialise_frames`](crate::ZeroingService::initialise_frames)).

mod counts;
mod error;
mod initialise;
mod state;
mod table;
mod transition;

pub use counts::FrameCounts;
pub use error::FrameError;
pub(crate) use initialise::Initialisation;
pub use state::{PageState, SectionState};
pub use table::{FrameTable, Span};
pub use transition::PageFrame;

#[cfg(test)]
mod tests;
