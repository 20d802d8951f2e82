//! Somebody who reads beside those who clear: from a cache, as long as they leave it to him.

use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::contestant::Contestant;
use crate::measure::{Gate, ReadingError, Shape, from_first_to_last, gb_per_s, on_threads};
use crate::raw::{Memory, pin, thread_cpu_time};

/// What he does before he looks whether it is over.
const LOADS: u64 = 1024;

/// How long he is timed alone.
const ALONE: Duration = Duration::from_millis(10);

/// A page, as far as address translation goes: the reader is to wait for caches, not for page tables.
const PAGE_LINES: usize = 64;

/// Lines that each name the next one, in an order that no prefetcher foresees.
#[derive(Debug)]
pub struct Chain {
    lines: Box<[Line]>,
}

#[derive(Debug, Clone)]
#[repr(align(64))]
struct Line {
    next: u32,
}

impl Chain {
    /// All lines of `bytes` bytes, one cycle: page after page in a random order (the same each time), and in each
    /// page its lines in one.
    pub fn new(bytes: u64) -> Self {
        let count = (bytes / 64).clamp(2, u64::from(u32::MAX)) as u32;
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut order: Vec<u32> = (0..count).collect();
        let mut pages: Vec<&mut [u32]> = order.chunks_mut(PAGE_LINES).collect();
        pages.iter_mut().for_each(|page| shuffle(page, &mut state));
        shuffle(&mut pages, &mut state);
        let order: Vec<u32> = pages.iter().flat_map(|page| page.iter().copied()).collect();
        let mut lines = vec![Line { next: 0 }; order.len()];
        for (from, to) in order.iter().zip(order.iter().cycle().skip(1)) {
            if let Some(line) = lines.get_mut(*from as usize) {
                line.next = *to;
            }
        }
        Self { lines: lines.into() }
    }

    /// So many loads, each of which needs the one before; where they end.
    fn walk(&self, mut at: u32, loads: u64) -> u32 {
        for _ in 0..loads {
            at = self.lines.get(at as usize).map_or(0, |line| line.next);
        }
        black_box(at)
    }

    /// Twice round, so that what fits a cache is in it.
    fn warm(&self) {
        self.walk(0, 2 * self.lines.len() as u64);
    }

    /// Walks until `over`; nanoseconds of CPU time a load, so that other work on this CPU does not count.
    fn timed(&self, over: impl Fn() -> bool) -> f64 {
        let (mut at, mut loads) = (0, 0);
        let start = thread_cpu_time();
        loop {
            at = self.walk(at, LOADS);
            loads += LOADS;
            if over() {
                return (thread_cpu_time() - start).as_secs_f64() * 1e9 / loads as f64;
            }
        }
    }
}

/// Fisher and Yates's, by a generator with a fixed start.
fn shuffle<T>(items: &mut [T], state: &mut u64) {
    for index in (1..items.len()).rev() {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        items.swap(index, (*state % (index as u64 + 1)) as usize);
    }
}

/// Nanoseconds a load, nobody clearing.
pub fn alone(chain: &Chain, cpu: u32) -> Result<f64, ReadingError> {
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            pin(cpu);
            chain.warm();
            let start = Instant::now();
            chain.timed(|| start.elapsed() >= ALONE)
        });
        reader.join().map_err(|_| ReadingError::Panicked)
    })
}

/// Nanoseconds a load while all of the memory is cleared once in such a shape, and the GB/s reached.
pub fn beside(
    chain: &Chain,
    cpus: (u32, &[u32]),
    contestant: &Contestant,
    shape: Shape,
    memory: &mut Memory,
) -> Result<(f64, f64), ReadingError> {
    let Shape { share, call, .. } = shape;
    let parts = memory.parts(shape.threads, share);
    let clearing = parts.len();
    // First all is made cold, then the reader warms his buffer, then they begin.
    let (cold, warm) = (Gate::new(clearing + 1), Gate::new(clearing + 1));
    let left = AtomicUsize::new(clearing);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            pin(cpus.0);
            cold.wait();
            chain.warm();
            warm.wait();
            chain.timed(|| left.load(Ordering::Relaxed) == 0)
        });
        let times = on_threads(cpus.1, parts, |part, _| {
            part.fill_cold(0, share);
            cold.wait();
            warm.wait();
            let start = Instant::now();
            let cleared =
                (0..share).step_by(call as usize).try_for_each(|at| contestant.clear(part, at, call));
            let end = Instant::now();
            left.fetch_sub(1, Ordering::Relaxed);
            cleared?;
            match part.first_stale(0, share) {
                None => Ok((start, end)),
                Some(at) => Err(ReadingError::NotZero { name: contestant.name.clone(), at }),
            }
        });
        let nanoseconds = reader.join().map_err(|_| ReadingError::Panicked)?;
        Ok((nanoseconds, gb_per_s(share * clearing as u64, from_first_to_last(&times?))))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_is_one_cycle_over_all_its_lines() {
        for bytes in [128, 192, 4096, 4160, 100 << 10] {
            let chain = Chain::new(bytes);
            let count = bytes / 64;
            assert_eq!(chain.lines.len() as u64, count);
            assert_eq!(chain.walk(0, count), 0, "{bytes}");
            assert!((1..count).all(|loads| chain.walk(0, loads) != 0), "{bytes}");
        }
        assert_eq!(size_of::<Line>(), 64);
    }
}
