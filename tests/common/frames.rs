//! Tables to test, and what is in them.
#![allow(clippy::unwrap_used, dead_code, reason = "helpers of tests are tests, and not every file needs all")]

use std::ops::Range;

use vm_zeroing::{FrameCounts, FrameTable, NodeId, PageState, Span};

pub const SECTION: u64 = FrameTable::SECTION_FRAMES;

pub fn span(node: u32, first: u64, frames: u64) -> Span {
    Span { node: NodeId(node), first, frames }
}

pub fn states(table: &FrameTable, frames: Range<u64>) -> Vec<PageState> {
    frames.map(|frame| table.frame(frame).unwrap().state()).collect()
}

/// (stale, zeroing, zero, leased, quarantined)
pub fn five(counts: Option<FrameCounts>) -> (u64, u64, u64, u64, u64) {
    let counts = counts.unwrap();
    (counts.stale, counts.zeroing, counts.zero, counts.leased, counts.quarantined)
}
