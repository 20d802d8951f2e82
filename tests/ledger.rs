//! Random lives of leases against a naive model: a slab is never in two live leases, what is lent reads
//! zero by every way to it, and the books always balance.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

#[path = "common/pool.rs"]
mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use common::*;
use proptest::prelude::*;
use proptest::sample::Index;
use vm_memory::{Bytes, GuestAddress};
use vm_zeroing::{
    HugepagePool, Job, LeaseError, LeaseId, LeasedMemory, NodePolicy, PageState, Quiesced, RecycleError,
    ZeroingService,
};

/// What becomes of a job that somebody started.
#[derive(Debug, Clone, Copy)]
enum Fate {
    Awaited,
    CancelledAtOnce,
    LeftAlone,
}

#[derive(Debug, Clone)]
enum Operation {
    /// Lends so many pages, as two pieces of guest memory if there are several.
    Lease {
        pages: u64,
    },
    LeaseUnused {
        pages: u64,
    },
    Write {
        lease: Index,
        at: Index,
        byte: u8,
    },
    RecycleWhileCloned {
        lease: Index,
    },
    Recycle {
        lease: Index,
        fate: Fate,
        vm_is_gone: bool,
    },
    Drop {
        lease: Index,
    },
    Reclaim {
        parked: Index,
        fate: Fate,
    },
    ZeroStale {
        fate: Fate,
    },
    Settle,
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![Just(Fate::Awaited), Just(Fate::CancelledAtOnce), Just(Fate::LeftAlone)]
}

fn operation(most_pages: u64) -> impl Strategy<Value = Operation> {
    let any_lease = any::<Index>;
    prop_oneof![
        4 => (1..=most_pages).prop_map(|pages| Operation::Lease { pages }),
        1 => (1..=most_pages).prop_map(|pages| Operation::LeaseUnused { pages }),
        4 => (any_lease(), any::<Index>(), 1u8..)
            .prop_map(|(lease, at, byte)| Operation::Write { lease, at, byte }),
        1 => any_lease().prop_map(|lease| Operation::RecycleWhileCloned { lease }),
        3 => (any_lease(), fate(), any::<bool>())
            .prop_map(|(lease, fate, vm_is_gone)| Operation::Recycle { lease, fate, vm_is_gone }),
        1 => any_lease().prop_map(|lease| Operation::Drop { lease }),
        1 => (any::<Index>(), fate()).prop_map(|(parked, fate)| Operation::Reclaim { parked, fate }),
        1 => fate().prop_map(|fate| Operation::ZeroStale { fate }),
        1 => Just(Operation::Settle),
    ]
}

/// A lease as the model knows it: its slabs by number, and what was written to it.
struct Live {
    memory: LeasedMemory,
    slabs: Vec<u64>,
    written: BTreeMap<u64, u8>,
}

struct Model {
    pool: HugepagePool,
    slabs: u64,
    slab_bytes: u64,
    /// Slab numbers by inode.
    number: BTreeMap<u64, u64>,
    live: Vec<Live>,
    parked: Vec<(LeaseId, Vec<u64>)>,
    jobs: Vec<Job>,
}

fn the_service() -> &'static ZeroingService {
    static SERVICE: OnceLock<ZeroingService> = OnceLock::new();
    SERVICE.get_or_init(service)
}

impl Model {
    fn new(slabs: u64, slab_bytes: u64) -> Self {
        let pool = pool(the_service(), slabs, slab_bytes);
        // A lease of everything shows the slabs in the order of their frames.
        let all = memory(&pool, slabs * slab_bytes);
        let number = (0..).zip(pieces(&all)).map(|(number, (inode, ..))| (inode, number)).collect();
        let id = all.lease();
        all.recycle(Quiesced::on_callers_word()).unwrap().wait().unwrap();
        pool.vm_is_gone(id);
        Self { pool, slabs, slab_bytes, number, live: Vec::new(), parked: Vec::new(), jobs: Vec::new() }
    }

    fn meet(&mut self, job: Job, fate: Fate) {
        match fate {
            Fate::Awaited => drop(job.wait().expect("nothing hinders it")),
            Fate::CancelledAtOnce => {
                job.cancel();
                self.jobs.push(job);
            }
            Fate::LeftAlone => self.jobs.push(job),
        }
    }

    fn settle(&mut self) {
        for job in self.jobs.drain(..) {
            // Cancelled or not, it ends.
            let _ = job.wait();
        }
        // Unused leases go back by jobs that nobody holds.
        while self.usage().zeroing_bytes > 0 {
            std::thread::yield_now();
        }
    }

    fn usage(&self) -> vm_zeroing::PoolUsage {
        self.pool.usage(node(the_service()))
    }

    fn pages(&self, slab: u64) -> std::ops::Range<u64> {
        let pages = self.slab_bytes / self.pool.page_bytes();
        slab * pages..(slab + 1) * pages
    }

    fn lease(&mut self, pages: u64) {
        let page = self.pool.page_bytes();
        let bytes = pages * page;
        let before = self.usage();
        let lease = match self.pool.lease(bytes, NodePolicy::Any) {
            Ok(lease) => lease,
            Err(LeaseError::Exhausted { .. }) => {
                // What was zero before is not taken away by anybody but us.
                assert!(before.zero_bytes < bytes, "refused with {before:?}");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        let low = pages / 2 * page;
        let layout = [(GuestAddress(0), low), (GuestAddress(GIB), bytes - low)];
        let memory: LeasedMemory = lease.into_memory(layout.into_iter().filter(|(_, len)| *len > 0)).unwrap();
        assert!(is_all(&memory, 0), "stale bytes through the mapping");
        assert!(files_are_zero(&memory), "stale bytes in the file");
        let distinct: BTreeSet<u64> = pieces(&memory).iter().map(|piece| self.number[&piece.0]).collect();
        for slab in &distinct {
            assert!(self.live.iter().all(|other| !other.slabs.contains(slab)), "slab {slab} is lent twice");
            assert!(self.parked.iter().all(|(_, parked)| !parked.contains(slab)), "slab {slab} is parked");
        }
        assert_eq!(distinct.len() as u64, bytes.div_ceil(self.slab_bytes));
        let slabs = distinct.into_iter().collect();
        self.live.push(Live { memory, slabs, written: BTreeMap::new() });
    }

    fn write(&mut self, lease: Index, at: Index, byte: u8) {
        if self.live.is_empty() {
            return;
        }
        let live = lease.get_mut(&mut self.live);
        let at = at.index(live.memory.bytes() as usize) as u64;
        live.memory.write_obj(byte, guest(&live.memory, at)).unwrap();
        live.written.insert(at, byte);
    }

    fn apply(&mut self, operation: &Operation) {
        match *operation {
            Operation::Lease { pages } => self.lease(pages),
            Operation::LeaseUnused { pages } => {
                drop(self.pool.lease(pages * self.pool.page_bytes(), NodePolicy::Any));
            }
            Operation::Write { lease, at, byte } => self.write(lease, at, byte),
            Operation::RecycleWhileCloned { lease } if !self.live.is_empty() => {
                let clone = lease.get(&self.live).memory.clone();
                let failure = clone.recycle(Quiesced::on_callers_word()).unwrap_err();
                assert!(matches!(failure.error, RecycleError::StillMapped { others: 1 }));
            }
            Operation::Recycle { lease, fate, vm_is_gone } if !self.live.is_empty() => {
                let live = self.live.swap_remove(lease.index(self.live.len()));
                let id = live.memory.lease();
                let job = live.memory.recycle(Quiesced::on_callers_word()).unwrap();
                assert!(!vm_is_gone || self.pool.vm_is_gone(id));
                self.meet(job, fate);
            }
            Operation::Drop { lease } if !self.live.is_empty() => {
                let live = self.live.swap_remove(lease.index(self.live.len()));
                self.parked.push((live.memory.lease(), live.slabs));
                drop(live.memory);
            }
            Operation::Reclaim { parked, fate } if !self.parked.is_empty() => {
                let (id, _) = self.parked.swap_remove(parked.index(self.parked.len()));
                let job = self.pool.reclaim(id, Quiesced::on_callers_word()).unwrap();
                self.meet(job, fate);
                assert!(self.pool.reclaim(id, Quiesced::on_callers_word()).is_err());
            }
            Operation::ZeroStale { fate } => {
                let job = self.pool.zero_stale().unwrap();
                self.meet(job, fate);
            }
            Operation::Settle => self.settle(),
            _ => {}
        }
    }

    fn check(&self) {
        let usage = self.usage();
        let sum = usage.zero_bytes
            + usage.stale_bytes
            + usage.zeroing_bytes
            + usage.leased_bytes
            + usage.parked_bytes
            + usage.quarantined_bytes;
        assert_eq!(sum, self.slabs * self.slab_bytes, "{usage:?}");
        let count = |slabs: usize| slabs as u64 * self.slab_bytes;
        assert_eq!(usage.leased_bytes, count(self.live.iter().map(|live| live.slabs.len()).sum()));
        assert_eq!(usage.parked_bytes, count(self.parked.iter().map(|(_, slabs)| slabs.len()).sum()));
        assert_eq!(usage.quarantined_bytes, 0);
        let parked: BTreeSet<LeaseId> = self.parked.iter().map(|(id, _)| *id).collect();
        assert_eq!(self.pool.parked(), parked.into_iter().collect::<Vec<_>>());

        let state = |page| self.pool.frames().state(page).unwrap();
        for live in &self.live {
            assert!(live.slabs.iter().all(|slab| self.pages(*slab).all(|p| state(p) == PageState::Leased)));
            let mut expected = vec![0; live.memory.bytes() as usize];
            live.written.iter().for_each(|(at, byte)| expected[*at as usize] = *byte);
            assert!(contents(&live.memory) == expected, "a live lease was written by somebody else");
        }
        for (_, slabs) in &self.parked {
            assert!(slabs.iter().all(|slab| self.pages(*slab).all(|page| state(page) == PageState::Stale)));
        }
    }

    /// Nothing is under way: the frame table and the holders say the same.
    fn check_settled(&self) {
        let (usage, page) = (self.usage(), self.pool.page_bytes());
        let counts = self.pool.frames().counts(node(the_service())).unwrap();
        assert_eq!((counts.zeroing, counts.quarantined), (0, 0));
        assert_eq!(counts.leased, usage.leased_bytes / page);
        // Pages of a slab that a cancelled job left half done are zero one by one; the slab is stale.
        assert!(counts.zero >= usage.zero_bytes / page);
        assert!(counts.stale >= usage.parked_bytes / page);
        let state = |frame| self.pool.frames().state(frame).unwrap();
        let fully_zero = |slab: &u64| self.pages(*slab).all(|page| state(page) == PageState::Zero);
        let zero = (0..self.slabs).filter(fully_zero).count() as u64 * self.slab_bytes;
        assert_eq!(zero, usage.zero_bytes, "a slab is lendable exactly if all its pages are zero");
    }
}

/// The guest address of a byte of the lease.
fn guest(memory: &LeasedMemory, at: u64) -> GuestAddress {
    let low = memory.bytes() / memory.page_size() / 2 * memory.page_size();
    GuestAddress(if at < low { at } else { GIB + at - low })
}

fn contents(memory: &LeasedMemory) -> Vec<u8> {
    let mut found = vec![0xee; memory.bytes() as usize];
    let low = memory.bytes() / memory.page_size() / 2 * memory.page_size();
    let (first, second) = found.split_at_mut(low as usize);
    memory.read_slice(first, GuestAddress(0)).unwrap();
    memory.read_slice(second, GuestAddress(GIB)).unwrap();
    found
}

fn live_by(slabs: u64, slab_bytes: u64, operations: &[Operation]) {
    let mut model = Model::new(slabs, slab_bytes);
    for operation in operations {
        model.apply(operation);
        model.check();
    }
    model.settle();
    model.check();
    model.check_settled();
    // Everything heals: nothing is lost, and all of it is zero.
    model.live.clear();
    for id in model.pool.parked() {
        model.pool.reclaim(id, Quiesced::on_callers_word()).unwrap().wait().unwrap();
    }
    model.pool.zero_stale().unwrap().wait().unwrap();
    let all = memory(&model.pool, slabs * slab_bytes);
    assert!(is_all(&all, 0) && files_are_zero(&all));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn small_slabs(operations in prop::collection::vec(operation(3 * 16), 1..60)) {
        live_by(8, 64 * KIB, &operations);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    /// Slabs of several chunks: a cancelled job leaves them half done.
    #[test]
    fn slabs_of_several_chunks(operations in prop::collection::vec(operation(5000), 1..25)) {
        live_by(2, 12 * MIB, &operations);
    }
}

/// Whoever asks while slabs change hands never sees one missing or twice.
#[test]
fn usage_is_that_of_one_moment() {
    const SLABS: u64 = 4;
    let (service, over) = (service(), AtomicBool::new(false));
    let pool = pool(&service, SLABS, 64 * KIB);
    let node = node(&service);
    std::thread::scope(|scope| {
        let observer = scope.spawn(|| {
            let mut looks = 0u64;
            while !over.load(Ordering::Relaxed) {
                let usage = pool.usage(node);
                let sum = usage.zero_bytes + usage.stale_bytes + usage.zeroing_bytes + usage.leased_bytes;
                assert_eq!(sum + usage.parked_bytes + usage.quarantined_bytes, SLABS * 64 * KIB, "{usage:?}");
                looks += 1;
            }
            looks
        });
        for _ in 0..300 {
            let memory = memory(&pool, SLABS * 64 * KIB);
            let id = memory.lease();
            memory.recycle(Quiesced::on_callers_word()).unwrap().wait().unwrap();
            pool.vm_is_gone(id);
        }
        over.store(true, Ordering::Relaxed);
        assert!(observer.join().unwrap() > 0);
    });
}
