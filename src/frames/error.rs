//! The errors of page-frame tables.

use std::ops::Range;

use super::{PageState, Span};

/// The page-frame table cannot be built so, or refuses what was asked of it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// A table over nothing.
    #[error("a frame table needs at least one span, none was given")]
    NoSpans,
    /// A span without frames.
    #[error("{span:?} has no frames; leave it out")]
    EmptySpan {
        /// The span.
        span: Span,
    },
    /// A span whose end is not a 64-bit number.
    #[error("{span:?} ends past the largest frame number; check its first frame and its length")]
    SpanOverflow {
        /// The span.
        span: Span,
    },
    /// Two spans share frames.
    #[error("{span:?} and {other:?} overlap; a frame is on one node only")]
    SpansOverlap {
        /// The span that starts first.
        span: Span,
        /// The other one.
        other: Span,
    },
    /// A node number that a descriptor has no room for.
    #[error("the node of {span:?} is above 1023, the largest number Linux gives a node")]
    NodeTooLarge {
        /// The span.
        span: Span,
    },
    /// No memory for the list of sections.
    #[error("no memory to list {sections} sections for {frames} frames; use larger pages or fewer spans")]
    TooManyFrames {
        /// The frames asked for.
        frames: u64,
        /// The sections they need.
        sections: u64,
    },
    /// A frame between the spans or outside of them.
    #[error("frame {frame} is in no span of the table")]
    NoSuchFrame {
        /// The frame's number.
        frame: u64,
    },
    /// A section's number that is too large.
    #[error("there is no section {section}; the table has {sections}, counted from 0")]
    NoSuchSection {
        /// The section asked for.
        section: usize,
        /// How many there are.
        sections: usize,
    },
    /// A state that frames cannot have been in before the table.
    #[error(
        "frames cannot be preset to {state:?}, only to Zero, Leased or Quarantined; Stale they are anyway"
    )]
    NotPresettable {
        /// The state asked for.
        state: PageState,
    },
    /// A frame was preset before.
    #[error("frame {frame} has been preset to {found:?} already; use a transition to change it")]
    PresetTwice {
        /// The frame's number.
        frame: u64,
        /// What it was preset to.
        found: PageState,
    },
    /// A preset came after its section's initialisation had begun.
    #[error(
        "frames {frames:?} cannot be preset: section {section} is not pending any more; use a transition"
    )]
    PresetTooLate {
        /// The first such section.
        section: usize,
        /// The frames asked for.
        frames: Range<u64>,
    },
    /// No page ever makes this step.
    #[error("no page goes from {from:?} to {to:?}; the round is Stale, Zeroing, Zero, Leased, Stale")]
    IllegalTransition {
        /// The state to start from.
        from: PageState,
        /// The state to reach.
        to: PageState,
    },
    /// A page is in another state than the one it was to leave or be pinned in.
    #[error("frame {frame} is {found:?}, not {expected:?}; no frame of the range was changed")]
    WrongState {
        /// The first such frame's number.
        frame: u64,
        /// The state it was said to be in.
        expected: PageState,
        /// The state it is in.
        found: PageState,
    },
    /// A page has been leased anew since the handle was made.
    #[error(
        "frame {frame} is in generation {found}, not {expected}: the lease asked for has ended; drop its handle"
    )]
    WrongGeneration {
        /// The first such frame's number.
        frame: u64,
        /// The generation of the handle.
        expected: u32,
        /// The generation of the page.
        found: u32,
    },
    /// A device may still write to the page, or no further pin can be counted.
    #[error("frame {frame} is pinned {pins} times by device mappings; unmap them and unpin it first")]
    Pinned {
        /// The first such frame's number.
        frame: u64,
        /// Its pins.
        pins: u32,
    },
    /// An unpin without a pin.
    #[error("frame {frame} is not pinned; it was unpinned more often than pinned")]
    NotPinned {
        /// The frame's number.
        frame: u64,
    },
}
