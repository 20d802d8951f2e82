//! The memory of one node: a bandwidth that whoever clears there shares.
//!
//! Everybody gets an equal share, but nobody more than it can store; what one leaves goes to the others
//! (max-min fairness). What all remote workers get together is bounded by the link, where there is a bound.
//! Shares change only when somebody begins or finishes. So workers that can store equally fast are a class:
//! how far each of a class has come since it began is the same sum, and who finishes next is the head of a
//! queue, however many there are.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::agenda::Mark;

/// How fast somebody can store to a node's memory when alone.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
    /// Bytes a second.
    pub most: f64,
    /// Through the link.
    pub remote: bool,
}

/// Workers of one pace.
#[derive(Debug)]
struct Class {
    pace: Pace,
    /// Bytes a second that each of them has now.
    rate: f64,
    /// Bytes that one of them would have cleared who was always there.
    cleared: f64,
    /// What `cleared` is when they finish, and who they are.
    at_work: BinaryHeap<Reverse<(Mark, usize)>>,
}

/// The memory of one node.
#[derive(Debug)]
pub struct Memory {
    /// Bytes a second.
    bandwidth: f64,
    /// Bytes a second from all remote workers.
    link: f64,
    /// Ascending by pace.
    classes: Vec<Class>,
    now: f64,
    /// Counts changes of the shares.
    version: u64,
}

impl Memory {
    pub fn new(bandwidth: f64, link: f64) -> Self {
        Self { bandwidth, link, classes: Vec::new(), now: 0.0, version: 0 }
    }

    /// Somebody begins to clear so many bytes.
    pub fn begin(&mut self, now: f64, who: usize, pace: Pace, bytes: u64) {
        self.advance(now);
        let index = self.classes.iter().position(|class| class.pace == pace).unwrap_or_else(|| {
            let index = self.classes.partition_point(|class| class.pace.most < pace.most);
            let class = Class { pace, rate: 0.0, cleared: 0.0, at_work: BinaryHeap::new() };
            self.classes.insert(index, class);
            index
        });
        if let Some(class) = self.classes.get_mut(index) {
            class.at_work.push(Reverse((Mark(class.cleared + bytes as f64), who)));
        }
        self.share_out();
    }

    /// When the next one finishes, unless somebody begins or finishes before; and the version this holds for.
    pub fn next(&self) -> Option<(f64, u64)> {
        let first = self.classes.iter().filter_map(Class::left).min_by(f64::total_cmp)?;
        Some((self.now + first, self.version))
    }

    /// Who finishes now, as [`next`](Self::next) of this version said; `None` for another version.
    pub fn finish(&mut self, now: f64, version: u64) -> Option<usize> {
        if version != self.version {
            return None;
        }
        let lefts = self.classes.iter().enumerate().filter_map(|(index, class)| Some((index, class.left()?)));
        let (index, _) = lefts.min_by(|a, b| a.1.total_cmp(&b.1))?;
        self.advance(now);
        let class = self.classes.get_mut(index)?;
        let Reverse((Mark(goal), who)) = class.at_work.pop()?;
        // Not a hair short of it, as rounding may leave it; and small numbers are kept exactly.
        class.cleared = if class.at_work.is_empty() { 0.0 } else { class.cleared.max(goal) };
        self.share_out();
        Some(who)
    }

    fn advance(&mut self, now: f64) {
        let passed = now - self.now;
        for class in self.classes.iter_mut().filter(|class| !class.at_work.is_empty()) {
            class.cleared += class.rate * passed;
        }
        self.now = now;
    }

    fn share_out(&mut self) {
        self.version += 1;
        let all = |_: &Pace| true;
        fill(&mut self.classes, self.bandwidth, all);
        let through_link: f64 = self
            .classes
            .iter()
            .filter(|class| class.pace.remote)
            .map(|class| class.rate * class.at_work.len() as f64)
            .sum();
        if through_link > self.link {
            fill(&mut self.classes, self.link, |pace| pace.remote);
            fill(&mut self.classes, self.bandwidth - self.link, |pace| !pace.remote);
        }
    }
}

impl Class {
    /// Seconds until the first of them finishes.
    fn left(&self) -> Option<f64> {
        let Reverse((Mark(goal), _)) = self.at_work.peek()?;
        Some((goal - self.cleared).max(0.0) / self.rate)
    }
}

/// Shares a bandwidth out among the classes that `of` picks, the slowest first: what they leave is for the rest.
fn fill(classes: &mut [Class], mut bandwidth: f64, of: impl Fn(&Pace) -> bool) {
    let mut takers: usize =
        classes.iter().filter(|class| of(&class.pace)).map(|class| class.at_work.len()).sum();
    for class in classes.iter_mut().filter(|class| of(&class.pace) && !class.at_work.is_empty()) {
        let count = class.at_work.len();
        class.rate = class.pace.most.min(bandwidth / takers as f64);
        bandwidth -= class.rate * count as f64;
        takers -= count;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCAL: Pace = Pace { most: 10.0, remote: false };
    const REMOTE: Pace = Pace { most: 4.0, remote: true };

    /// Everybody who finishes, and when.
    fn finish_all(memory: &mut Memory) -> Vec<(usize, f64)> {
        let mut finished = Vec::new();
        while let Some((at, version)) = memory.next() {
            finished.push((memory.finish(at, version).unwrap(), at));
        }
        finished
    }

    #[test]
    fn one_alone_stores_at_its_own_pace_or_at_that_of_the_memory() {
        let mut memory = Memory::new(100.0, f64::INFINITY);
        memory.begin(2.0, 7, LOCAL, 50);
        assert_eq!(finish_all(&mut memory), [(7, 7.0)]);
        let mut memory = Memory::new(5.0, f64::INFINITY);
        memory.begin(2.0, 7, LOCAL, 50);
        assert_eq!(finish_all(&mut memory), [(7, 12.0)]);
        assert_eq!(memory.next(), None);
    }

    /// 15 a second: the remote one cannot use its share of 5 and leaves 1 to the two others.
    #[test]
    fn what_one_leaves_goes_to_the_others() {
        let mut memory = Memory::new(15.0, f64::INFINITY);
        memory.begin(0.0, 0, LOCAL, 55);
        memory.begin(0.0, 1, LOCAL, 110);
        memory.begin(0.0, 2, REMOTE, 40);
        // At 10 the first has 55, the remote one 40, the second 55 of 110; then it goes on at 10 a second.
        assert_eq!(finish_all(&mut memory), [(2, 10.0), (0, 10.0), (1, 15.5)]);
    }

    #[test]
    fn whoever_comes_later_takes_an_equal_share_from_then_on() {
        let mut memory = Memory::new(10.0, f64::INFINITY);
        memory.begin(0.0, 0, LOCAL, 100);
        memory.begin(5.0, 1, LOCAL, 25);
        // 50 are left at 5; both get 5 a second until 10; 25 are left at 10.
        assert_eq!(finish_all(&mut memory), [(1, 10.0), (0, 12.5)]);
    }

    #[test]
    fn a_link_bounds_all_remote_workers_together() {
        let mut memory = Memory::new(20.0, 4.0);
        memory.begin(0.0, 0, REMOTE, 20);
        memory.begin(0.0, 1, REMOTE, 20);
        memory.begin(0.0, 2, LOCAL, 100);
        memory.begin(0.0, 3, LOCAL, 160);
        // The remote ones get 2 each, the local ones 8 each, and 10 each when they are alone.
        assert_eq!(finish_all(&mut memory), [(0, 10.0), (1, 10.0), (2, 12.0), (3, 18.0)]);
    }

    /// A change makes what was said before void.
    #[test]
    fn an_old_promise_is_not_kept() {
        let mut memory = Memory::new(10.0, f64::INFINITY);
        memory.begin(0.0, 0, LOCAL, 100);
        let (at, version) = memory.next().unwrap();
        memory.begin(5.0, 1, LOCAL, 100);
        assert_eq!(memory.finish(at, version), None);
    }

    proptest::proptest! {
        /// Bandwidth is used up as far as anybody can use it, and never more; bytes are conserved.
        #[test]
        fn bandwidth_is_used_up_and_no_more(
            tasks in proptest::collection::vec((1u64..1000, 1u8..4, 0u32..50), 1..30),
            bandwidth in 1u32..100,
        ) {
            let mut memory = Memory::new(bandwidth.into(), f64::INFINITY);
            let mut order: Vec<usize> = (0..tasks.len()).collect();
            order.sort_by_key(|task| tasks[*task].2);
            let (mut at_work, mut done) = (std::collections::BTreeSet::new(), 0.0);
            let mut check = |from: f64, to: f64, at_work: &std::collections::BTreeSet<usize>| {
                let wanted: f64 = at_work.iter().map(|task: &usize| f64::from(tasks[*task].1)).sum();
                done += wanted.min(bandwidth.into()) * (to - from);
            };
            let (mut now, mut order) = (0.0, order.into_iter().peekable());
            loop {
                let begins = order.peek().map(|task| f64::from(tasks[*task].2));
                let finishes = memory.next();
                match (begins, finishes) {
                    (None, None) => break,
                    (Some(at), finishes) if finishes.is_none_or(|(finishes, _)| at <= finishes) => {
                        check(now, at, &at_work);
                        now = at;
                        let task = order.next().unwrap();
                        at_work.insert(task);
                        let pace = Pace { most: tasks[task].1.into(), remote: false };
                        memory.begin(now, task, pace, tasks[task].0);
                    }
                    (_, Some((at, version))) => {
                        check(now, at, &at_work);
                        now = at;
                        let who = memory.finish(at, version).unwrap();
                        proptest::prop_assert!(at_work.remove(&who));
                    }
                    (Some(_), None) => unreachable!("the first arm takes it"),
                }
            }
            let bytes: u64 = tasks.iter().map(|task| task.0).sum();
            proptest::prop_assert!((done - bytes as f64).abs() < 1e-6 * bytes as f64, "{done} of {bytes}");
        }
    }
}
