//! Who holds which chunk, and whether the job may end. Pure: no threads, no clocks; its owner keeps it under
//! a lock. The same file runs under `loom`.
//!
//! A chunk is *claimed* (it is being prepared, which may take for ever), *confirmed* (it is being stored to,
//! which ends within a chunk) and *closed*. The job ends once: when no byte is left; or, after it was told to
//! stop, when nobody holds a claim; or over the heads of workers that prepare and do not come back, never
//! over one that stores. What such a worker then confirms is refused: no store follows the end.
//!
//! # Why nobody claims a second chunk
//!
//! What is refused to a worker of a job that goes on is dropped, and then the job would never end. Nobody comes to
//! that:
//! - a thread takes a chunk from claim to closing before it takes another: what it cannot do it hands back before
//!   it queues it or works on a part of it, and a claim that a panic drops is closed by that;
//! - a worker's number is one thread's at a time: it is free for another only when that thread has left its work
//!   for good, and whoever stands in for a worker that is stuck has a number of its own;
//! - `Hand::CALLER` is, within a job, the number of the one thread that submits it: nobody else has its tasks
//!   before that thread has closed its last claim and leaves what is left to workers, which have their own
//!   numbers.

use std::collections::BTreeMap;

use crate::extent::Extent;

/// A chunk in a worker's hands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) extent: Extent,
    /// Whose hands.
    pub(crate) worker: u32,
    storing: bool,
}

/// What is left of a job, and in whose hands.
#[derive(Debug)]
pub(crate) struct Tally {
    /// Bytes that nobody has finished with.
    left: u64,
    /// By the worker who holds it: nobody holds two.
    held: BTreeMap<u32, Held>,
    stopping: bool,
    ended: bool,
}

impl Tally {
    pub(crate) fn new(total: u64) -> Self {
        Self { left: total, held: BTreeMap::new(), stopping: false, ended: false }
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.ended
    }

    /// Takes a chunk; refused once the job is stopping or over, and to a worker that holds one: a mistake of ours,
    /// which would lose the chunk.
    pub(crate) fn claim(&mut self, extent: Extent, worker: u32) -> bool {
        debug_assert!(!self.held.contains_key(&worker), "worker {worker} would hold two chunks");
        let open = !self.ended && !self.stopping && !self.held.contains_key(&worker);
        if open {
            self.held.insert(worker, Held { extent, worker, storing: false });
        }
        open
    }

    /// May the worker store to what it holds? Asked after preparing, which may have taken long.
    pub(crate) fn confirm(&mut self, worker: u32) -> bool {
        if self.ended || self.stopping {
            return false;
        }
        match self.held.get_mut(&worker) {
            Some(held) => held.storing = true,
            None => return false,
        }
        true
    }

    /// The worker lets go; `finished`: these bytes are dealt with. Says whether the job still counted on it:
    /// if not, whatever the worker has to tell comes too late.
    pub(crate) fn close(&mut self, worker: u32, finished: bool) -> bool {
        if self.ended {
            return false;
        }
        let Some(held) = self.held.remove(&worker) else { return false };
        if finished {
            self.left = self.left.saturating_sub(held.extent.len);
        }
        true
    }

    /// No claim and no store begins from here on.
    pub(crate) fn stop(&mut self) {
        self.stopping = true;
    }

    /// Whether the end has come by itself.
    pub(crate) fn is_due(&self) -> bool {
        !self.ended && (self.left == 0 || self.stopping && self.held.is_empty())
    }

    /// Whether the end may be had over the heads of those who hold something.
    pub(crate) fn may_end_over_heads(&self) -> bool {
        !self.ended && self.stopping && self.held.values().all(|held| !held.storing)
    }

    /// The end: what is still held. `None` if it had come before.
    pub(crate) fn end(&mut self) -> Option<Vec<Held>> {
        if std::mem::replace(&mut self.ended, true) {
            return None;
        }
        Some(std::mem::take(&mut self.held).into_values().collect())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn chunk(number: u64) -> Extent {
        Extent { region: 0, start: number * 10, len: 10 }
    }

    #[derive(Debug, Clone, Copy)]
    enum Step {
        Claim(u64),
        Confirm(u64),
        HandBack(u64),
        Finish(u64),
        Stop,
        End,
    }

    fn step() -> impl Strategy<Value = Step> {
        let number = 0u64..5;
        prop_oneof![
            4 => number.clone().prop_map(Step::Claim),
            4 => number.clone().prop_map(Step::Confirm),
            1 => number.clone().prop_map(Step::HandBack),
            4 => number.prop_map(Step::Finish),
            1 => Just(Step::Stop),
            2 => Just(Step::End),
        ]
    }

    proptest! {
        /// Whatever happens in whatever order: nobody stores after the end, and the end comes once.
        #[test]
        fn no_store_after_the_end(steps in prop::collection::vec(step(), 0..60)) {
            let mut tally = Tally::new(50);
            // What a naive book-keeper knows: 0 not begun, 1 claimed, 2 storing, 3 finished.
            let (mut phases, mut stopping, mut ends) = ([0; 5], false, 0);
            for step in steps {
                match step {
                    Step::Claim(at) if phases[at as usize] == 0 => {
                        let granted = tally.claim(chunk(at), at as u32);
                        prop_assert_eq!(granted, !stopping && ends == 0);
                        phases[at as usize] = u8::from(granted);
                    }
                    Step::Confirm(at) if phases[at as usize] == 1 => {
                        let granted = tally.confirm(at as u32);
                        prop_assert_eq!(granted, !stopping && ends == 0);
                        phases[at as usize] += u8::from(granted);
                    }
                    Step::HandBack(at) if phases[at as usize] == 1 => {
                        prop_assert_eq!(tally.close(at as u32, false), ends == 0);
                        phases[at as usize] = 0;
                    }
                    Step::Finish(at) if (1..3).contains(&phases[at as usize]) => {
                        prop_assert!(phases[at as usize] == 1 || ends == 0, "a store after the end");
                        prop_assert_eq!(tally.close(at as u32, true), ends == 0);
                        phases[at as usize] = 3;
                    }
                    Step::Stop => {
                        tally.stop();
                        stopping = true;
                    }
                    Step::End if tally.is_due() || tally.may_end_over_heads() => {
                        prop_assert!(!phases.contains(&2), "ended over a store");
                        prop_assert!(stopping || phases == [3; 5], "ended too early");
                        prop_assert!(tally.end().is_some());
                        ends += 1;
                    }
                    Step::End => prop_assert!(ends == 1 || !stopping || phases.contains(&2), "may not end"),
                    _ => {}
                }
                prop_assert!(ends <= 1);
                prop_assert_eq!(tally.has_ended(), ends == 1);
            }
            prop_assert_eq!(tally.end().is_some(), ends == 0);
        }
    }

    /// Said aloud where mistakes are looked for, refused elsewhere.
    #[test]
    #[cfg_attr(debug_assertions, should_panic(expected = "worker 7 would hold two chunks"))]
    fn nobody_holds_two_chunks() {
        let mut tally = Tally::new(20);
        assert!(tally.claim(chunk(0), 7));
        assert!(!tally.claim(chunk(1), 7) && tally.claim(chunk(1), 8));
        assert!(tally.close(7, true) && tally.close(8, true) && tally.is_due());
    }

    /// Neither a chunk handed back nor one that is done keeps its worker from the next.
    #[test]
    fn who_has_closed_one_chunk_takes_another() {
        let mut tally = Tally::new(20);
        for finished in [false, true, false, true] {
            assert!(tally.claim(chunk(0), 7) && tally.close(7, finished));
        }
        assert!(tally.is_due());
    }
}
