//! How much a worker takes at a time.

use std::time::Duration;

/// The length of a chunk, kept so that clearing one takes about [`Grain::TARGET`] at most: a job is looked at
/// between chunks, so this is how long cancel, deadline and priority wait, on slow memory too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Grain {
    bytes: u64,
    most: u64,
}

impl Grain {
    /// What a chunk should take at most.
    pub(crate) const TARGET: Duration = Duration::from_millis(1);

    /// The shortest chunk, in bytes. A power of two, as every length of a chunk: cuts fall on its multiples.
    pub(crate) const LEAST: u64 = 64 << 10;

    /// Chunks of `most` bytes at most: rounded down to a power of two, up to [`LEAST`](Self::LEAST).
    pub(crate) fn new(most: u64) -> Self {
        let most = 1 << most.max(Self::LEAST).ilog2();
        Self { bytes: most, most }
    }

    /// The length of the next chunk in bytes, no more than `limit` where that is above the shortest.
    pub(crate) fn next(&self, limit: Option<u64>) -> u64 {
        limit.map_or(self.bytes, |limit| self.bytes.min(Self::new(limit).most))
    }

    /// Learns from a chunk of `bytes` that took so long: halved where it took too long, doubled where a whole
    /// one took less than a quarter.
    pub(crate) fn learn(&mut self, bytes: u64, took: Duration) {
        if took > Self::TARGET {
            self.bytes = (self.bytes / 2).max(Self::LEAST);
        } else if bytes >= self.bytes && took < Self::TARGET / 4 {
            self.bytes = self.bytes.saturating_mul(2).min(self.most);
        }
    }
}
