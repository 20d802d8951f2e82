//! The rate that background work keeps to.

use std::time::Duration;

/// A bucket of bytes that fills at a rate and pays for background chunks. A chunk is paid for when it is
/// begun, whatever is in the bucket then, as long as that is something: the bucket may go into debt, and
/// nothing begins until the debt is paid. So the rate holds over time, whatever the length of a chunk.
///
/// Times are since any moment that stays the same.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Throttle {
    /// Bytes a second; `None`: as fast as it goes; 0: not at all.
    rate: Option<u64>,
    /// Bytes, below zero while in debt.
    balance: f64,
    filled: Duration,
}

impl Throttle {
    /// What the bucket holds at most, as the time it takes to fill.
    const DEPTH: Duration = Duration::from_millis(5);

    pub(crate) fn new(rate: Option<u64>) -> Self {
        Self { rate, balance: 0.0, filled: Duration::ZERO }
    }

    pub(crate) fn rate(&self) -> Option<u64> {
        self.rate
    }

    /// Changes the rate. Debts made at another rate are forgiven.
    pub(crate) fn set_rate(&mut self, rate: Option<u64>, now: Duration) {
        *self = Self { rate, balance: 0.0, filled: now };
    }

    /// When the next chunk may begin: now (`Ok`), or at a time, or (`None`) not before the rate is changed.
    pub(crate) fn ask(&mut self, now: Duration) -> Result<(), Option<Duration>> {
        let Some(rate) = self.rate else { return Ok(()) };
        if rate == 0 {
            return Err(None);
        }
        self.fill(rate, now);
        if self.balance >= 0.0 {
            return Ok(());
        }
        let wait = Duration::try_from_secs_f64(-self.balance / rate as f64).unwrap_or(Duration::MAX);
        // A little more, so that whoever comes then finds the debt paid.
        Err(Some(now.saturating_add(wait).saturating_add(Duration::from_micros(1))))
    }

    /// Pays for a chunk that begins.
    pub(crate) fn pay(&mut self, bytes: u64, now: Duration) {
        if let Some(rate) = self.rate {
            self.fill(rate, now);
            self.balance -= bytes as f64;
        }
    }

    /// The longest chunk that keeps the rate even, in bytes: what comes in while the bucket fills.
    pub(crate) fn longest_chunk(&self) -> Option<u64> {
        self.rate.map(|rate| (rate as f64 * Self::DEPTH.as_secs_f64()) as u64)
    }

    fn fill(&mut self, rate: u64, now: Duration) {
        let passed = now.saturating_sub(self.filled).as_secs_f64();
        let depth = rate as f64 * Self::DEPTH.as_secs_f64();
        self.balance = (self.balance + passed * rate as f64).min(depth);
        self.filled = self.filled.max(now);
    }
}
