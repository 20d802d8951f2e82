//! Who looks after jobs that nobody waits for: deadlines, and workers that are stuck in a page fault.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::job::{JobCore, Warden};
use crate::sync::lock;

/// How long after the host refused a stand-in it is asked again.
const ASKED_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// A worker that a job ended without.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stuck {
    pub(super) worker: u32,
    /// The turn in which the host refused a stand-in for it, if it did before.
    pub(super) refused_in: Option<u64>,
}

/// What the watchdog thread is to look at. Its jobs know it as their [`Warden`].
#[derive(Debug, Default)]
pub(crate) struct Watchdog {
    watch: Mutex<Watch>,
    bell: Condvar,
}

#[derive(Debug, Default)]
struct Watch {
    /// When to look at which job; the number tells appointments of the same time apart.
    appointments: BTreeMap<(Instant, u64), Weak<JobCore>>,
    made: u64,
    /// How many there may be before those of jobs that are gone are struck out.
    tidy_at: usize,
    /// Workers that jobs ended without.
    left_behind: Vec<u32>,
    /// Those of them for whom the host refused a stand-in, in which turn of theirs, and when it is asked again.
    refused: BTreeMap<u32, u64>,
    ask_again: Option<Instant>,
    closing: bool,
}

impl Warden for Watchdog {
    fn look_at(&self, job: Weak<JobCore>, when: Instant) {
        let mut watch = lock(&self.watch);
        let earliest = watch.earliest().is_none_or(|earliest| when < earliest);
        watch.made += 1;
        let number = watch.made;
        watch.appointments.insert((when, number), job);
        if watch.appointments.len() > watch.tidy_at {
            watch.appointments.retain(|_, job| job.strong_count() > 0);
            watch.tidy_at = 2 * watch.appointments.len() + 64;
        }
        drop(watch);
        if earliest {
            self.bell.notify_one();
        }
    }

    fn left_behind(&self, workers: &[u32]) {
        lock(&self.watch).left_behind.extend(workers);
        self.bell.notify_one();
    }
}

impl Watch {
    fn earliest(&self) -> Option<Instant> {
        self.appointments.first_key_value().map(|((when, _), _)| *when)
    }

    /// When there is something to do.
    fn next(&self) -> Option<Instant> {
        self.earliest().into_iter().chain(self.ask_again).min()
    }

    /// Takes out the workers that somebody is to stand in for.
    fn stuck(&mut self, now: Instant) -> Vec<Stuck> {
        let left_behind = std::mem::take(&mut self.left_behind).into_iter();
        let mut stuck: Vec<Stuck> = left_behind.map(|worker| Stuck { worker, refused_in: None }).collect();
        if self.ask_again.take_if(|when| *when <= now).is_some() {
            let refused = std::mem::take(&mut self.refused).into_iter();
            stuck.extend(refused.map(|(worker, turn)| Stuck { worker, refused_in: Some(turn) }));
        }
        stuck
    }

    /// Takes out what is due.
    fn due(&mut self, now: Instant) -> Vec<Weak<JobCore>> {
        let is_due = |watch: &Self| watch.earliest().is_some_and(|when| when <= now);
        let next = || is_due(self).then(|| self.appointments.pop_first()).flatten();
        std::iter::from_fn(next).map(|(_, job)| job).collect()
    }
}

impl Watchdog {
    /// Keeps watch until [`close`](Self::close); calls `replace` for each worker that a job ended without, and again
    /// after a while if it says in which turn the host refused a stand-in.
    pub(super) fn keep(&self, mut replace: impl FnMut(Stuck) -> Option<u64>) {
        let mut watch = lock(&self.watch);
        while !watch.closing {
            let now = Instant::now();
            let stuck = watch.stuck(now);
            let due = watch.due(now);
            if stuck.is_empty() && due.is_empty() {
                watch = match watch.next() {
                    None => self.bell.wait(watch).unwrap_or_else(PoisonError::into_inner),
                    Some(when) => {
                        let timeout = when.saturating_duration_since(now);
                        self.bell.wait_timeout(watch, timeout).unwrap_or_else(PoisonError::into_inner).0
                    }
                };
                continue;
            }
            drop(watch);
            let refused: Vec<(u32, u64)> =
                stuck.into_iter().filter_map(|stuck| Some((stuck.worker, replace(stuck)?))).collect();
            for job in due.iter().filter_map(Weak::upgrade) {
                if let Some(when) = job.tend(now) {
                    self.look_at(Arc::downgrade(&job), when);
                }
            }
            watch = lock(&self.watch);
            if !refused.is_empty() {
                watch.refused.extend(refused);
                watch.ask_again = Instant::now().checked_add(ASKED_AGAIN_AFTER);
            }
        }
    }

    /// Lets `keep` return.
    pub(crate) fn close(&self) {
        lock(&self.watch).closing = true;
        self.bell.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Those whom the host refused are told again when it is time, each once, and in which turn they were then.
    #[test]
    fn who_was_refused_is_told_again_later() {
        let now = Instant::now();
        let later = now + ASKED_AGAIN_AFTER;
        let mut watch = Watch { left_behind: vec![3], ..Watch::default() };
        let told = |watch: &mut Watch, now| -> Vec<(u32, Option<u64>)> {
            watch.stuck(now).into_iter().map(|stuck| (stuck.worker, stuck.refused_in)).collect()
        };
        assert_eq!(told(&mut watch, now), [(3, None)]);
        watch.refused.extend([(3, 7), (5, 1), (3, 9)]);
        watch.ask_again = Some(later);
        watch.left_behind.push(4);
        assert_eq!(watch.next(), Some(later));
        assert_eq!(told(&mut watch, now), [(4, None)], "not yet");
        assert_eq!(told(&mut watch, later), [(3, Some(9)), (5, Some(1))]);
        assert_eq!((told(&mut watch, later), watch.next()), (Vec::new(), None));
    }

    /// Nobody is asked about sooner than that, and nobody who was let in is asked about again.
    #[test]
    fn the_host_is_asked_until_it_says_yes() {
        let watchdog = Watchdog::default();
        let mut asked = Vec::new();
        watchdog.left_behind(&[2]);
        watchdog.keep(|stuck| {
            asked.push((stuck.refused_in, Instant::now()));
            match asked.len() {
                1 => Some(11),
                _ => {
                    watchdog.close();
                    None
                }
            }
        });
        let [(None, first), (Some(11), second)] = asked[..] else { panic!("{asked:?}") };
        assert!(second - first >= ASKED_AGAIN_AFTER);
        assert!(lock(&watchdog.watch).refused.is_empty());
    }
}
