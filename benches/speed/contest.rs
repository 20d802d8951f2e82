//! Contestants that take turns, and what became of them.

use std::time::{Duration, Instant};

use super::memory::{Memory, fill, is_zero};

/// Something that is timed. Returns how long its measured part took.
type Run<'a> = Box<dyn Fn() -> Duration + 'a>;

/// Contestants, most of them over the same memory. The first is what the others are compared with.
pub struct Contest<'a> {
    memory: &'a Memory,
    runs: Vec<(String, Run<'a>)>,
}

/// The times of one contestant, a round each.
pub struct Score {
    pub name: String,
    pub times: Vec<Duration>,
}

impl<'a> Contest<'a> {
    pub fn over(memory: &'a Memory) -> Self {
        Self { memory, runs: Vec::new() }
    }

    pub fn enter(&mut self, name: impl Into<String>, run: impl Fn() -> Duration + 'a) {
        let memory = self.memory;
        self.enter_with_own_memory(name, move || {
            fill(memory.start, memory.len);
            let time = run();
            assert!(is_zero(memory.start, memory.len), "bytes are left that are not zero");
            time
        });
    }

    /// A contestant that brings the memory, fills it and looks at it afterwards.
    pub fn enter_with_own_memory(&mut self, name: impl Into<String>, run: impl Fn() -> Duration + 'a) {
        self.runs.push((name.into(), Box::new(run)));
    }

    /// As [`enter`](Self::enter), for contestants that are timed as a whole.
    pub fn enter_whole(&mut self, name: impl Into<String>, run: impl Fn() + 'a) {
        self.enter(name, move || {
            let start = Instant::now();
            run();
            start.elapsed()
        });
    }

    /// Every contestant once per round, each round starting with another, after one round that does not count.
    pub fn hold(self, rounds: usize) -> Vec<Score> {
        let mut scores: Vec<Score> = self.runs.iter().map(|(name, _)| Score::new(name)).collect();
        for round in 0..=rounds {
            for turn in 0..self.runs.len() {
                let index = (round + turn) % self.runs.len();
                let time = self.runs[index].1();
                if round > 0 {
                    scores[index].times.push(time);
                }
            }
        }
        scores
    }
}

impl Score {
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), times: Vec::new() }
    }

    pub fn median(&self) -> Duration {
        self.quantile(0.5)
    }

    /// The time that this share of all is not above.
    pub fn quantile(&self, share: f64) -> Duration {
        let mut sorted = self.times.clone();
        sorted.sort();
        sorted[((sorted.len() as f64 * share) as usize).min(sorted.len() - 1)]
    }

    pub fn fastest_and_slowest(&self) -> (Duration, Duration) {
        (*self.times.iter().min().unwrap(), *self.times.iter().max().unwrap())
    }

    /// How many times as fast as `other`: the median of the rounds.
    pub fn speed_against(&self, other: &Score) -> f64 {
        let mut ratios: Vec<f64> = self
            .times
            .iter()
            .zip(&other.times)
            .map(|(own, theirs)| theirs.as_secs_f64() / own.as_secs_f64())
            .collect();
        ratios.sort_by(f64::total_cmp);
        ratios[ratios.len() / 2]
    }
}

/// The median of `count` runs of something that needs no memory.
pub fn median_of(count: usize, mut run: impl FnMut() -> Duration) -> Duration {
    let mut times: Vec<Duration> = (0..count).map(|_| run()).collect();
    times.sort();
    times[times.len() / 2]
}
