//! The threads of a calibration, and rounds of readings by them.

use std::num::NonZero;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::barrier::Barrier;
use super::order::{Order, Span};
use super::ring::{Patience, Ring};
use super::schedule::{Round, Schedule};
use crate::clear::{Clearer, Method, Shortfall};
use crate::pool::{STACK, settle_in};
use crate::sync::lock;
use crate::topology::NodeId;

/// What all threads of a calibration know.
#[derive(Debug)]
pub(super) struct Terms<'a> {
    pub(super) node: NodeId,
    /// The node's CPUs.
    pub(super) cpus: &'a [u32],
    pub(super) threads: NonZero<usize>,
    /// Each method that can be measured.
    pub(super) clearers: Vec<(Method, Clearer)>,
    /// Bytes that each thread should have.
    pub(super) ring: u64,
    /// Why not more.
    pub(super) short_of: Shortfall,
    pub(super) patience: Patience,
    /// Its number, where there are others whose hugepages the kernel might take.
    pub(super) home: Option<u32>,
    pub(super) deadline: Instant,
}

/// One thread as the leader knows it.
#[derive(Debug)]
struct Follower {
    orders: Sender<Arc<Order>>,
    /// What became of its ring, once.
    ring: Receiver<Result<RingFacts, Shortfall>>,
    /// An answer to each order.
    spans: Receiver<Vec<Span>>,
}

/// What is to be known of a ring, or of the worst of several.
#[derive(Debug, Clone, Copy)]
pub(super) struct RingFacts {
    pub(super) len: u64,
    pub(super) page_bytes: u64,
    /// Why it is no longer.
    pub(super) shortfall: Option<Shortfall>,
}

impl RingFacts {
    fn of(ring: &Ring) -> Self {
        Self { len: ring.len(), page_bytes: ring.page_bytes(), shortfall: ring.shortfall() }
    }

    fn worst(self, other: Self) -> Self {
        Self {
            len: self.len.min(other.len),
            page_bytes: self.page_bytes.min(other.page_bytes),
            shortfall: self.shortfall.or(other.shortfall),
        }
    }
}

impl Terms<'_> {
    /// Starts the threads, has one of them `lead`, and ends them. Where not even one can be started, the calling
    /// thread leads, alone.
    pub(super) fn with_crew<T: Send>(&self, lead: impl Fn(Crew<'_>) -> T + Sync) -> Option<T> {
        let lead = |followers| lead(Crew::new(self, followers));
        // Nobody populates before all are there: a new thread needs the lock that populating holds.
        let gate = Mutex::new(());
        thread::scope(|scope| {
            let closed = lock(&gate);
            let named = |index| thread::Builder::new().name(format!("vmz-measure-{index}")).stack_size(STACK);
            let (hand_over, followers) = mpsc::channel::<Vec<Follower>>();
            let leading = named(0).spawn_scoped(scope, {
                let lead = &lead;
                move || {
                    self.settle(0);
                    followers.recv().ok().map(lead)
                }
            });
            let leading = match leading {
                Ok(leading) => leading,
                Err(error) => {
                    tracing::warn!(%error, "the host starts no thread to measure with; measuring on the calling one");
                    return Some(lead(Vec::new()));
                }
            };
            let (ready, started) = mpsc::channel();
            let (mut crew, mut following) = (Vec::new(), Vec::new());
            for index in 1..self.threads.get() {
                let ((orders, ordered), (answer, spans), (made, ring)) =
                    (mpsc::channel(), mpsc::channel(), mpsc::channel());
                let (ready, gate) = (ready.clone(), &gate);
                let spawned = named(index).spawn_scoped(scope, move || {
                    self.settle(index);
                    let _ = ready.send(());
                    drop(ready);
                    drop(lock(gate));
                    self.follow(&ordered, &made, &answer);
                });
                match spawned {
                    Ok(thread) => {
                        following.push(thread);
                        crew.push(Follower { orders, ring, spans });
                    }
                    Err(error) => {
                        let asked = self.threads;
                        tracing::warn!(asked, started = index, %error, "the host refused more threads to measure with; going on with fewer");
                        break;
                    }
                }
            }
            drop(ready);
            started.iter().for_each(drop);
            drop(closed);
            let _ = hand_over.send(crew);
            let found = leading.join().ok().flatten();
            // Joined, and not just done: no thread is left.
            following.into_iter().for_each(|thread| drop(thread.join()));
            found
        })
    }

    /// As a worker; one on each CPU where that is so many. Of fewer threads than CPUs the scheduler knows which
    /// should not share a core.
    fn settle(&self, index: usize) {
        match self.cpus.get(index..=index) {
            Some(own) if self.threads.get() == self.cpus.len() => settle_in(own, Some(self.node)),
            _ => settle_in(self.cpus, Some(self.node)),
        }
    }

    fn follow(
        &self,
        orders: &Receiver<Arc<Order>>,
        made: &Sender<Result<RingFacts, Shortfall>>,
        answer: &Sender<Vec<Span>>,
    ) {
        let ring = Ring::make(self.ring, self.home, self.patience);
        let _ = made.send(ring.as_ref().map(RingFacts::of).map_err(|shortfall| *shortfall));
        if let Ok(mut ring) = ring {
            for order in orders {
                let _ = answer.send(order.carry_out(&self.clearers, &mut ring, None));
            }
        }
    }
}

/// The leader's view.
#[derive(Debug)]
pub(super) struct Crew<'a> {
    terms: &'a Terms<'a>,
    followers: Vec<Follower>,
    ring: Result<Ring, Shortfall>,
    /// Of the leader alone, and of all.
    pub(super) rings: [Result<RingFacts, Shortfall>; 2],
    deadline: Instant,
}

impl<'a> Crew<'a> {
    /// Makes memory present, all at the same time.
    fn new(terms: &'a Terms<'_>, followers: Vec<Follower>) -> Self {
        let start = Instant::now();
        let ring = Ring::make(terms.ring, terms.home, terms.patience);
        let own = ring.as_ref().map(RingFacts::of).map_err(|shortfall| *shortfall);
        let all = followers.iter().fold(own, |worst, follower| {
            Ok(worst?.worst(follower.ring.recv().unwrap_or(Err(Shortfall::Threads))?))
        });
        // Giving it back takes its share of that time.
        let deadline = terms.deadline.checked_sub(start.elapsed() / 8).unwrap_or(terms.deadline);
        Self { terms, followers, ring, rings: [own, all], deadline }
    }

    pub(super) fn threads(&self) -> usize {
        1 + self.followers.len()
    }

    /// Measures until the time is up.
    pub(super) fn measure(&mut self, schedule: &mut Schedule) {
        while let Some(round) = schedule.next(self.deadline.saturating_duration_since(Instant::now())) {
            let start = Instant::now();
            let rates = self.carry_out(schedule, &round);
            schedule.book(&round, start.elapsed(), &rates);
        }
    }

    /// A reading of each candidate of a round, in 10⁹ bytes a second; fewer if the time was up.
    fn carry_out(&mut self, schedule: &Schedule, round: &Round) -> Vec<f64> {
        let Ok(ring) = &mut self.ring else { return Vec::new() };
        let race = schedule.race_of(round);
        let candidates: Vec<_> = schedule.candidates(round).collect();
        let mut rates = Vec::with_capacity(candidates.len());
        for alike in candidates.chunk_by(|a, b| a.threads == b.threads) {
            let wanted = rates.len() + alike.len();
            let threads = alike.first().map_or(1, |candidate| candidate.threads);
            let index_of = |method| self.terms.clearers.iter().position(|(known, _)| *known == method);
            let order = Arc::new(Order {
                situation: race.situation,
                class: race.class,
                bytes: race.bytes,
                clearers: alike.iter().filter_map(|candidate| index_of(candidate.method)).collect(),
                barrier: Barrier::new(threads),
            });
            let taking_part: Vec<_> = self.followers.iter().take(threads - 1).collect();
            let told = taking_part.iter().filter(|follower| follower.orders.send(Arc::clone(&order)).is_ok());
            if told.count() < threads - 1 {
                // Somebody is gone: it cannot be done.
                order.barrier.stop();
                break;
            }
            let mut spans = vec![order.carry_out(&self.terms.clearers, ring, Some(self.deadline))];
            spans.extend(taking_part.iter().filter_map(|follower| follower.spans.recv().ok()));
            let done = together(&spans).map(|took| {
                // Bytes a nanosecond.
                (race.bytes * threads as u64) as f64 / took.as_nanos() as f64
            });
            rates.extend(done);
            if rates.len() < wanted {
                break;
            }
        }
        rates
    }
}

/// How long each reading took, from the first thread's start to the last one's end.
pub(super) fn together(spans: &[Vec<Span>]) -> impl Iterator<Item = Duration> {
    let readings = spans.iter().map(Vec::len).min().unwrap_or(0);
    (0..readings).map(|reading| {
        let of_reading = || spans.iter().filter_map(|spans| spans.get(reading));
        let start = of_reading().map(|span| span.start).min();
        let end = of_reading().map(|span| span.end).max();
        start.zip(end).map_or(Duration::ZERO, |(start, end)| end - start)
    })
}
