//! The rate that background work keeps to.

use std::time::Duration;

/// A bucket of bytes that fills at a rate and pays for background chunks. A chunk is paid for when it is
/// begun, whatever is in the bucket then, as long as that is something: the bucket may go into debt, and
/// nothing begins until the debt is paid. So the rate holds over time, whatever the length of a chunk.
///
/// It holds while the rate is changed, too: in any window no more is begun than what comes in at the highest rate
/// in it, what the bucket holds, and a chunk of each worker. For a debt is waited for at one of these rates at
/// least: a higher one shortens the wait to what the debt takes at it, a lower one does not lengthen it.
///
/// Times are since any moment that stays the same.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Throttle {
    /// Bytes a second; `None`: as fast as it goes; 0: not at all.
    rate: Option<u64>,
    /// Bytes, below zero while in debt.
    balance: f64,
    filled: Duration,
    /// When the debt is paid.
    open: Duration,
}

impl Throttle {
    /// What the bucket holds at most, as the time it takes to fill.
    const DEPTH: Duration = Duration::from_millis(5);

    pub(crate) fn new(rate: Option<u64>) -> Self {
        Self { rate, balance: 0.0, filled: Duration::ZERO, open: Duration::ZERO }
    }

    pub(crate) fn rate(&self) -> Option<u64> {
        self.rate
    }

    /// Changes the rate. Nobody waits the longer for it, except for a rate of 0.
    pub(crate) fn set_rate(&mut self, rate: Option<u64>, now: Duration) {
        self.fill(now);
        self.rate = rate;
        self.open = self.open.min(now.saturating_add(self.time_of(-self.balance)));
    }

    /// When the next chunk may begin: now (`Ok`), or at a time, or (`None`) not before the rate is changed.
    pub(crate) fn ask(&mut self, now: Duration) -> Result<(), Option<Duration>> {
        match self.rate {
            None => Ok(()),
            Some(0) => Err(None),
            Some(_) if now >= self.open => Ok(()),
            Some(_) => Err(Some(self.open)),
        }
    }

    /// Pays for a chunk that begins.
    pub(crate) fn pay(&mut self, bytes: u64, now: Duration) {
        if self.rate.is_none() {
            return;
        }
        self.fill(now);
        let debt = bytes as f64 - self.balance.max(0.0);
        self.balance -= bytes as f64;
        self.open = self.open.max(now).saturating_add(self.time_of(debt));
    }

    /// The longest chunk that keeps the rate even, in bytes: what comes in while the bucket fills.
    pub(crate) fn longest_chunk(&self) -> Option<u64> {
        self.rate.map(|rate| (rate as f64 * Self::DEPTH.as_secs_f64()) as u64)
    }

    /// How long so many bytes take to come in.
    fn time_of(&self, bytes: f64) -> Duration {
        match self.rate {
            _ if bytes <= 0.0 => Duration::ZERO,
            Some(rate) => Duration::try_from_secs_f64(bytes / rate as f64).unwrap_or(Duration::MAX),
            None => Duration::ZERO,
        }
    }

    fn fill(&mut self, now: Duration) {
        let rate = self.rate.unwrap_or(0) as f64;
        let came = now.saturating_sub(self.filled).as_secs_f64() * rate;
        self.balance = (self.balance + came).min(rate * Self::DEPTH.as_secs_f64());
        if now >= self.open {
            self.balance = self.balance.max(0.0);
        }
        self.filled = self.filled.max(now);
    }
}
