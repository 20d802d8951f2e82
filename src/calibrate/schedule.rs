//! What is read next, and who is out of the race. Pure: whoever measures has the clock.

use std::time::Duration;

use crate::clear::{Concurrency, Measurement, Method, Readings, Reuse, Situation, upper_quartile};

/// What a reading clears at least, in bytes a thread: some microseconds, so that looking at the clock and meeting
/// at a barrier weigh little.
const LEAST_BYTES: u64 = 256 << 10;

/// The longest run that a service clears: shorter classes come first.
const FIRST_UP_TO: u64 = 4 << 20;

/// Rounds that the first classes get before any other.
const FIRST_ROUNDS: usize = 3;

/// Rounds that the others get before time is shared.
const OTHER_ROUNDS: usize = 2;

/// Below this share of the fastest a method is out, after [`OTHER_ROUNDS`]; of the shortest readings, which cost
/// little, after [`SHORT_ROUNDS`]: something else may have run twice.
const OUT: f64 = 0.75;
const SHORT_ROUNDS: usize = 4;

/// Below this share of the fastest in the class below, a method is not tried: in the long classes, where trying
/// takes long. (Less strict than [`OUT`]: a long `REP STOSB` may be faster than short ones.)
const HOPELESS: f64 = 0.5;

/// One way of clearing in a race.
#[derive(Debug, Clone)]
pub(super) struct Candidate {
    pub(super) method: Method,
    /// Threads that clear at the same time.
    pub(super) threads: usize,
    /// 10⁹ bytes a second, a reading each.
    rates: Vec<f64>,
    racing: bool,
}

impl Candidate {
    fn new(method: Method, threads: usize) -> Self {
        Self { method, threads, rates: Vec::new(), racing: true }
    }

    fn rate(&self) -> Option<f64> {
        upper_quartile(&self.rates)
    }
}

/// Candidates that are compared with each other.
#[derive(Debug, Clone)]
pub(super) struct Race {
    pub(super) situation: Situation,
    pub(super) class: u64,
    /// What each thread clears a reading.
    pub(super) bytes: u64,
    candidates: Vec<Candidate>,
    rounds: usize,
    used: Duration,
    /// Of the last round, for each candidate.
    cost: Option<Duration>,
}

impl Race {
    fn new(situation: Situation, class: u64, candidates: Vec<Candidate>) -> Self {
        let bytes = class.max(LEAST_BYTES);
        Self { situation, class, bytes, candidates, rounds: 0, used: Duration::ZERO, cost: None }
    }

    fn fastest(&self) -> Option<(Method, f64)> {
        let rates =
            self.candidates.iter().filter_map(|candidate| Some((candidate.method, candidate.rate()?)));
        rates.max_by(|(_, a), (_, b)| a.total_cmp(b))
    }

    /// Takes those out that reach less than this share of the fastest, or were not read; nobody if nobody was.
    fn drop_below(&mut self, share: f64, of: &[(Method, f64)]) {
        if of.is_empty() {
            return;
        }
        let fastest = of.iter().map(|(_, rate)| *rate).fold(0.0, f64::max);
        for candidate in &mut self.candidates {
            let rate = of.iter().find(|(method, _)| *method == candidate.method).map(|(_, rate)| *rate);
            candidate.racing &= rate.is_some_and(|rate| rate >= share * fastest);
        }
    }

    fn rates(&self) -> Vec<(Method, f64)> {
        self.candidates.iter().filter_map(|candidate| Some((candidate.method, candidate.rate()?))).collect()
    }

    /// The racing candidates by index, each round starting with another one.
    fn round(&self) -> Vec<usize> {
        let mut racing: Vec<usize> =
            (0..self.candidates.len()).filter(|index| self.candidates[*index].racing).collect();
        let first = self.rounds % racing.len().max(1);
        racing.rotate_left(first);
        racing
    }
}

/// All races of a calibration, and the one over worker counts.
#[derive(Debug)]
pub(super) struct Schedule {
    races: Vec<Race>,
    /// Cold memory, the same method with more and more threads.
    scaling: Race,
}

/// The length that scaling is measured with.
const SCALING_CLASS: u64 = 4 << 20;
const SCALING: Situation = Situation { reuse: Reuse::Cold, concurrency: Concurrency::All };

/// The next round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Round {
    race: usize,
    /// By index.
    candidates: Vec<usize>,
}

impl Schedule {
    /// `longest`: the longest class that one thread has memory for, and that all have.
    pub(super) fn new(classes: &[u64], methods: &[Method], threads: usize, longest: [u64; 2]) -> Self {
        let mut races = Vec::new();
        for &class in classes {
            for situation in Situation::ALL {
                let (threads, longest) = match situation.concurrency {
                    Concurrency::One => (1, longest[0]),
                    Concurrency::All => (threads, longest[1]),
                };
                if class.max(LEAST_BYTES) > longest
                    || situation.concurrency == Concurrency::All && threads < 2
                {
                    continue;
                }
                let worth =
                    Measurement::candidates(situation.reuse).filter(|method| methods.contains(method));
                let candidates = worth.map(|method| Candidate::new(method, threads)).collect();
                races.push(Race::new(situation, class, candidates));
            }
        }
        Self { races, scaling: Race::new(SCALING, SCALING_CLASS, Vec::new()) }
    }

    /// What to do next in the time that is left: the first classes until each has its rounds, the others in
    /// ascending order, then whoever used the least time so far.
    pub(super) fn next(&mut self, left: Duration) -> Option<Round> {
        self.admit_scaling();
        let mut order: Vec<usize> = (0..=self.races.len()).collect();
        order.sort_by_key(|index| {
            let race = self.race(*index);
            match race.rounds {
                rounds if race.class <= FIRST_UP_TO && rounds < FIRST_ROUNDS => (0, rounds as u128),
                rounds if race.class > FIRST_UP_TO && rounds < OTHER_ROUNDS => (1, u128::from(race.class)),
                _ => (2, race.used.as_nanos()),
            }
        });
        for index in order {
            self.take_hopeless_out(index);
            let candidates = self.race(index).round();
            if !candidates.is_empty() && self.expected(index, candidates.len()) <= left {
                return Some(Round { race: index, candidates });
            }
        }
        None
    }

    pub(super) fn race_of(&self, round: &Round) -> &Race {
        self.race(round.race)
    }

    /// The candidates of a round, in order.
    pub(super) fn candidates<'a>(&'a self, round: &'a Round) -> impl Iterator<Item = &'a Candidate> {
        round.candidates.iter().filter_map(|index| self.race_of(round).candidates.get(*index))
    }

    /// Books a round: how long it took, and one reading for each candidate (none if it was not finished).
    pub(super) fn book(&mut self, round: &Round, took: Duration, rates: &[f64]) {
        let whole = rates.len() == round.candidates.len();
        let races = round.race < self.races.len();
        let race = self.race_mut(round.race);
        race.used += took;
        if !whole {
            return;
        }
        race.rounds += 1;
        race.cost = Some(took / u32::try_from(rates.len()).unwrap_or(1).max(1));
        for (index, rate) in round.candidates.iter().zip(rates) {
            if let Some(candidate) = race.candidates.get_mut(*index) {
                candidate.rates.push(*rate);
            }
        }
        // Then now and then: the more readings, the less one of them changes.
        let rounds = if race.bytes > LEAST_BYTES { OTHER_ROUNDS } else { SHORT_ROUNDS };
        if races && race.rounds >= rounds && race.rounds.is_power_of_two() {
            let rates = race.rates();
            race.drop_below(OUT, &rates);
        }
    }

    /// What was read.
    pub(super) fn readings(&self) -> Vec<Readings> {
        let readings = self.races.iter().flat_map(|race| {
            race.candidates.iter().filter(|candidate| !candidate.rates.is_empty()).map(|candidate| Readings {
                situation: race.situation,
                size_class: race.class,
                method: candidate.method,
                gb_per_s: candidate.rates.clone(),
            })
        });
        readings.collect()
    }

    /// What was read of so many threads.
    pub(super) fn scaling(&self) -> Vec<(usize, Vec<f64>)> {
        let read = self.scaling.candidates.iter().filter(|candidate| !candidate.rates.is_empty());
        read.map(|candidate| (candidate.threads, candidate.rates.clone())).collect()
    }

    fn race(&self, index: usize) -> &Race {
        self.races.get(index).unwrap_or(&self.scaling)
    }

    fn race_mut(&mut self, index: usize) -> &mut Race {
        self.races.get_mut(index).unwrap_or(&mut self.scaling)
    }

    /// Once the best method for its class is known: one thread, two, four, up to all.
    fn admit_scaling(&mut self) {
        if !self.scaling.candidates.is_empty() {
            return;
        }
        let whole = self.races.iter().find(|race| {
            race.situation == SCALING && race.class == SCALING_CLASS && race.rounds >= FIRST_ROUNDS
        });
        let Some((race, (method, _))) = whole.and_then(|race| Some((race, race.fastest()?))) else { return };
        let all = race.candidates.first().map_or(1, |candidate| candidate.threads);
        let counts = std::iter::successors(Some(1), |count| Some(count * 2)).take_while(|count| *count < all);
        self.scaling.candidates =
            counts.chain([all]).map(|threads| Candidate::new(method, threads)).collect();
    }

    /// Before its first round, a long class is spared the methods that lost by far in the class below.
    fn take_hopeless_out(&mut self, index: usize) {
        let (class, situation) = (self.race(index).class, self.race(index).situation);
        if index >= self.races.len() || class <= FIRST_UP_TO || self.race(index).rounds > 0 {
            return;
        }
        let below = self.races.iter().rev().find(|race| race.situation == situation && race.class < class);
        let Some(rates) = below.map(Race::rates) else { return };
        self.race_mut(index).drop_below(HOPELESS, &rates);
    }

    /// How long a round will take, rather too long than too short.
    fn expected(&self, index: usize, candidates: usize) -> Duration {
        let race = self.race(index);
        let each = match race.cost {
            Some(cost) => cost.mul_f64(1.25),
            // As in the class below, where the slower ones may be out already. Making memory hot or cold and
            // clearing it takes 1 GB/s all in all, while nothing is known.
            None => {
                let below = self.races.iter().rev();
                let mut below =
                    below.filter(|other| other.situation == race.situation && other.class < race.class);
                let per_byte = |below: &Race| Some(below.cost?.as_secs_f64() / below.bytes as f64);
                let per_byte = below.find_map(per_byte).unwrap_or(1e-9);
                Duration::from_secs_f64(1.5 * per_byte * race.bytes as f64)
            }
        };
        each.saturating_mul(u32::try_from(candidates).unwrap_or(u32::MAX))
    }
}
