//! Floor 2: the arithmetic of splitting. Pure: no threads, no system calls, no allocation.
//!
//! A region enters the pool as one extent, however large. Whoever holds an extent halves it until one
//! chunk is left, keeps the near half and offers the far one, so that memory is cleared in ascending
//! order and a thief takes what its owner would reach last. Cuts fall on multiples of the grain, so
//! that no two workers share a page (or a cache line).

mod split;

pub use split::{Extent, merge_ranges};

#[cfg(test)]
mod tests;
