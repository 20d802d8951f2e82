//! Readings: threads that start together, memory made cold or hot before, looked at afterwards.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use vm_zeroing::RequestError;

use crate::contestant::{Contestant, State};
use crate::raw::{Memory, Part, pin};
use crate::stats::Stats;
use crate::{Failure, memory::Pages};

/// What one reading is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    pub state: State,
    pub threads: usize,
    /// Bytes of one call.
    pub call: u64,
    /// Bytes that each thread clears, whole calls.
    pub share: u64,
    /// Hot: bytes that each thread writes and then clears at a time, whole calls.
    pub batch: u64,
}

impl Shape {
    /// For calls of `size` bytes, `reading` bytes or more in all; hot memory in batches of `hot` bytes or more.
    /// Where an equal share of the size is less than `reading` asks of a thread, the calls are such shares.
    pub fn new(state: State, threads: usize, size: u64, reading: u64, hot: u64) -> Self {
        let lines = |bytes: u64| (bytes / 64).max(1) * 64;
        let share = lines(reading.max(size) / threads as u64);
        let call = size.min(share);
        let share = share / call * call;
        let batch = (hot.min(share) / call).max(1) * call;
        // Hot memory is made of whole batches.
        let share = if state == State::Hot { share / batch * batch } else { share };
        Self { state, threads, call, share, batch }
    }

    /// What a thread needs to have.
    pub fn memory_per_thread(&self) -> u64 {
        if self.state == State::Hot { self.batch } else { self.share }
    }

    /// Bytes that all threads clear.
    pub fn reading(&self) -> u64 {
        self.share * self.threads as u64
    }
}

/// A reading that says nothing.
#[derive(Debug, thiserror::Error)]
pub enum ReadingError {
    #[error("{name} left a byte that is not zero, {at:#x} bytes into its memory; this is a bug, report it")]
    NotZero { name: String, at: u64 },
    #[error(transparent)]
    Request(#[from] RequestError),
    #[error("a thread of the measurement panicked")]
    Panicked,
    #[error("the kernel made no pages: {0}")]
    Populate(std::io::Error),
}

/// Opens when so many threads have come. They spin, so that all leave within a fraction of a microsecond;
/// those that wait for others on the same CPU let them go first.
#[derive(Debug)]
pub struct Gate {
    missing: AtomicUsize,
}

impl Gate {
    pub fn new(threads: usize) -> Self {
        Self { missing: AtomicUsize::new(threads) }
    }

    pub fn wait(&self) {
        self.missing.fetch_sub(1, Ordering::AcqRel);
        let mut turns = 0_u32;
        while self.missing.load(Ordering::Acquire) != 0 {
            turns += 1;
            if turns.is_multiple_of(256) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    }
}

/// Runs `work` on a thread for each part, each bound to a CPU of its own as far as there are enough.
pub fn on_threads<T: Send>(
    cpus: &[u32],
    parts: Vec<Part<'_>>,
    work: impl Fn(&mut Part<'_>, &Gate) -> Result<T, ReadingError> + Sync,
) -> Result<Vec<T>, ReadingError> {
    let gate = Gate::new(parts.len());
    std::thread::scope(|scope| {
        let threads: Vec<_> = parts
            .into_iter()
            .zip(cpus.iter().cycle())
            .map(|(mut part, cpu)| {
                let (gate, work) = (&gate, &work);
                scope.spawn(move || {
                    pin(*cpu);
                    work(&mut part, gate)
                })
            })
            .collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or(Err(ReadingError::Panicked))
        };
        // All are joined before the first error is looked at.
        let results: Vec<Result<T, ReadingError>> = threads.into_iter().map(join).collect();
        results.into_iter().collect()
    })
}

/// Memory for `threads` parts of `part` bytes each, all of it present, each part made so by its own thread.
pub fn present(pages: Pages, cpus: &[u32], threads: usize, part: u64) -> Result<Memory, Failure> {
    // Neighbours do not share a hugepage.
    let part = part.next_multiple_of(2 << 20);
    let wanted = part.saturating_mul(threads as u64);
    let mut memory = pages.map(wanted)?;
    make_present(pages, &mut memory, cpus, threads, part).map_err(|error| match error {
        ReadingError::Populate(source) => Failure::from(pages.refused(wanted, source)),
        other => other.into(),
    })?;
    Ok(memory)
}

/// Has each thread's part faulted in by that thread.
pub fn make_present(
    pages: Pages,
    memory: &mut Memory,
    cpus: &[u32],
    threads: usize,
    part: u64,
) -> Result<(), ReadingError> {
    on_threads(cpus, memory.parts(threads, part), |part, gate| {
        gate.wait();
        let len = part.len();
        match part.populate(0, len) {
            // A kernel before 5.14.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                part.touch(0, len, pages.bytes() as usize);
                Ok(())
            }
            other => other.map_err(ReadingError::Populate),
        }
    })?;
    Ok(())
}

/// One reading: 10⁹ bytes a second, all threads together.
pub fn reading(
    contestant: &Contestant,
    shape: Shape,
    memory: &mut Memory,
    cpus: &[u32],
) -> Result<f64, ReadingError> {
    let room = memory.len() / shape.threads as u64 / 64 * 64;
    let parts = memory.parts(shape.threads, room);
    match shape.state {
        State::Cold => {
            let times = on_threads(cpus, parts, |part, gate| {
                part.fill_cold(0, shape.share);
                gate.wait();
                let start = Instant::now();
                let cleared = clear(contestant, part, shape.share, shape.call);
                let end = Instant::now();
                cleared?;
                look(contestant, part, shape.share)?;
                Ok((start, end))
            })?;
            Ok(gb_per_s(shape.reading(), from_first_to_last(&times)))
        }
        State::Hot => {
            let times = on_threads(cpus, parts, |part, gate| {
                let mut time = Duration::ZERO;
                gate.wait();
                for _ in 0..shape.share / shape.batch {
                    part.fill_hot(0, shape.batch);
                    let start = Instant::now();
                    let cleared = clear(contestant, part, shape.batch, shape.call);
                    time += start.elapsed();
                    cleared?;
                    look(contestant, part, shape.batch)?;
                }
                Ok(time)
            })?;
            // Threads write and clear each in its own turn: their rates add up.
            Ok(times.iter().map(|time| gb_per_s(shape.share, *time)).sum())
        }
    }
}

/// Clears `bytes` in calls of `call`.
fn clear(contestant: &Contestant, part: &mut Part<'_>, bytes: u64, call: u64) -> Result<(), RequestError> {
    let mut at = 0;
    while at < bytes {
        contestant.clear(part, at, call)?;
        at += call;
    }
    Ok(())
}

fn look(contestant: &Contestant, part: &Part<'_>, bytes: u64) -> Result<(), ReadingError> {
    match part.first_stale(0, bytes) {
        None => Ok(()),
        Some(at) => Err(ReadingError::NotZero { name: contestant.name.clone(), at }),
    }
}

/// From when the first thread began until the last one ended.
pub fn from_first_to_last(times: &[(Instant, Instant)]) -> Duration {
    let first = times.iter().map(|(start, _)| *start).min();
    let last = times.iter().map(|(_, end)| *end).max();
    first.zip(last).map_or(Duration::ZERO, |(first, last)| last - first)
}

/// 10⁹ bytes a second; 0 for no time.
pub fn gb_per_s(bytes: u64, time: Duration) -> f64 {
    let seconds = time.as_secs_f64();
    if seconds > 0.0 { bytes as f64 / seconds / 1e9 } else { 0.0 }
}

/// Everybody once a run, each run beginning with another, after one that does not count.
pub fn take_turns<E>(
    contestants: usize,
    runs: usize,
    mut reading: impl FnMut(usize) -> Result<f64, E>,
) -> Result<Vec<Stats>, E> {
    let mut readings = vec![Vec::with_capacity(runs); contestants];
    for run in 0..=runs {
        for turn in 0..contestants {
            let index = (run + turn) % contestants;
            let rate = reading(index)?;
            if let (1.., Some(readings)) = (run, readings.get_mut(index)) {
                readings.push(rate);
            }
        }
    }
    Ok(readings.into_iter().map(Stats::of).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_whole_calls_and_equal_shares() {
        let shape = |state, threads, size, reading, hot| {
            let shape = Shape::new(state, threads, size, reading, hot);
            (shape.call, shape.share, shape.memory_per_thread())
        };
        assert_eq!(shape(State::Cold, 1, 4096, 1 << 20, 0), (4096, 1 << 20, 1 << 20));
        // Two threads share a size that is more than a reading: half of it each, in one call.
        assert_eq!(shape(State::Cold, 2, 4 << 20, 1 << 20, 0), (2 << 20, 2 << 20, 2 << 20));
        assert_eq!(shape(State::Cold, 2, 64 << 10, 1 << 20, 0), (64 << 10, 512 << 10, 512 << 10));
        // Three of them: whole lines, whole calls.
        assert_eq!(shape(State::Cold, 3, 64 << 10, 1 << 20, 0), (64 << 10, 320 << 10, 320 << 10));
        assert_eq!(shape(State::Cold, 3, 256, 256, 0), (64, 64, 64));
        // Hot: batches that fit a cache, whole numbers of them.
        assert_eq!(shape(State::Hot, 1, 4096, 1 << 20, 300 << 10), (4096, 900 << 10, 300 << 10));
        assert_eq!(shape(State::Hot, 1, 1 << 20, 4 << 20, 300 << 10), (1 << 20, 4 << 20, 1 << 20));
    }

    #[test]
    fn every_run_begins_with_another_and_the_first_does_not_count() {
        let mut order = Vec::new();
        let stats = take_turns::<()>(3, 2, |index| {
            order.push(index);
            Ok(order.len() as f64)
        });
        assert_eq!(order, [0, 1, 2, 1, 2, 0, 2, 0, 1]);
        let runs: Vec<Vec<f64>> = stats.unwrap().into_iter().map(|stats| stats.runs).collect();
        assert_eq!(runs, [[6.0, 8.0], [4.0, 9.0], [5.0, 7.0]]);
    }

    #[test]
    fn an_error_ends_it() {
        let mut asked = 0;
        let result = take_turns(2, 5, |_| {
            asked += 1;
            if asked == 3 { Err("no") } else { Ok(1.0) }
        });
        assert_eq!((result.unwrap_err(), asked), ("no", 3));
    }

    #[test]
    fn what_was_left_is_found_outside_of_the_timed_part() {
        let contestant = Contestant::method(crate::contestant::yardstick()).unwrap();
        let mut memory = Pages::Base.map(64 << 10).unwrap();
        let found = on_threads(&[0], memory.parts(1, 64 << 10), |part, _| {
            part.fill_cold(0, 64 << 10);
            clear(&contestant, part, 60 << 10, 4 << 10)?;
            look(&contestant, part, 60 << 10)?;
            look(&contestant, part, 64 << 10)
        });
        let Err(ReadingError::NotZero { name, at }) = found else { panic!("{found:?}") };
        assert_eq!((name, at), (contestant.name, 60 << 10));
    }

    #[test]
    fn rates_are_of_all_threads_together() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(from_first_to_last(&[(at(2), at(5)), (at(1), at(3))]), Duration::from_millis(4));
        assert_eq!(from_first_to_last(&[]), Duration::ZERO);
        assert_eq!((gb_per_s(3_000_000, Duration::from_millis(1)), gb_per_s(1, Duration::ZERO)), (3.0, 0.0));
    }
}
