//! Jobs of all kinds, cancelled, dropped, waited for from anywhere, while services come and go and the rate of
//! background work changes: every job ends, every report is exact, and nothing is left. A seed of the dice
//! that once failed is repeated by `VM_ZEROING_STRESS_SEED=… cargo test --test stress`.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use common::limits::never_hang;
use common::mapped::Mapped;
use common::{
    KIB, MIB, PAGE, assert_exact, exactly, fill, is_child, is_pattern, readable, run_child, two_nodes,
};
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vm_zeroing::{Intent, Job, JobError, Locality, Priority, Report, Verify, ZeroRequest, ZeroingService};

const DRIVERS: u64 = 3;
const ROUNDS: u64 = 1000;

/// Numbers that look random and follow from a seed (SplitMix64).
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}

/// What all drivers share.
struct House {
    service: Mutex<Option<Arc<ZeroingService>>>,
    /// How often jobs ended in which way.
    ends: Mutex<BTreeMap<&'static str, usize>>,
}

impl House {
    fn service(&self) -> Arc<ZeroingService> {
        self.service.lock().unwrap().clone().unwrap()
    }

    /// A new service takes the place of the one there is, which goes with its last user.
    fn renew(&self, dice: &mut Dice) {
        let new = Arc::new(new_service(dice));
        let old = self.service.lock().unwrap().replace(new);
        drop(old);
    }
}

fn new_service(dice: &mut Dice) -> ZeroingService {
    let mut builder =
        exactly(dice.pick(&[0, 1, 1, 2, 3, 4])).chunk(dice.pick(&[64 * KIB, 512 * KIB, 4 * MIB]));
    if dice.one_in(4) {
        builder = builder.topology(two_nodes());
    }
    if dice.one_in(3) {
        builder = builder.locality(Locality::LocalOnly);
    }
    if dice.one_in(2) {
        builder = builder.small_job(dice.pick(&[PAGE, 2 * MIB]));
    }
    let service = builder.build().unwrap();
    service.set_background_rate(rate(dice));
    service
}

fn rate(dice: &mut Dice) -> Option<u64> {
    dice.pick(&[None, None, Some(0), Some(1), Some(20 << 20), Some(1 << 30), Some(u64::MAX)])
}

/// A guest that is gone, and what is asked for of its memory.
struct Guest {
    memory: Arc<GuestMemoryMmap<()>>,
    regions: Vec<(u64, u64)>,
    asked: Vec<(u64, u64)>,
}

impl Guest {
    fn new(dice: &mut Dice) -> Self {
        let mut at = 0;
        let mut regions = Vec::new();
        for _ in 0..dice.pick(&[1, 1, 2, 3]) {
            let most = dice.pick(&[4 * PAGE, 256 * KIB, 256 * KIB, 2 * MIB, 10 * MIB]);
            let len = (1 + dice.below(most / PAGE)) * PAGE;
            regions.push((at, len));
            at += len + 64 * PAGE;
        }
        let ranges: Vec<_> = regions.iter().map(|(at, len)| (GuestAddress(*at), *len as usize)).collect();
        let memory = Arc::new(GuestMemoryMmap::from_ranges(&ranges).unwrap());
        regions.iter().for_each(|(at, len)| fill(&*memory, *at, *len));
        let part = dice.one_in(3);
        let asked = regions.iter().map(|&(at, len)| {
            let skipped = if part { dice.below(len) } else { 0 };
            (at + skipped, if part { 1 + dice.below(len - skipped) } else { len })
        });
        let asked = asked.collect();
        Self { memory, regions, asked }
    }

    fn request(&self, dice: &mut Dice, priority: Priority) -> ZeroRequest {
        let intent = dice.pick(&[Intent::Boot, Intent::Teardown, Intent::Background]);
        let ranges = self.asked.iter().map(|(at, len)| (GuestAddress(*at), *len));
        let mut request = ZeroRequest::new(&self.memory).ranges(ranges).intent(intent).priority(priority);
        if dice.one_in(4) {
            request = request.verify(Verify::Full);
        }
        if dice.one_in(3) {
            let from_now = Duration::from_micros(dice.pick(&[0, 50, 500, 3000, 60_000_000]));
            request = request.deadline(Instant::now() + from_now);
        }
        request
    }

    /// Holds a report against the memory.
    fn check(&self, report: &Report) {
        assert_exact(&*self.memory, report, &self.asked);
        self.check_beside();
    }

    /// Nothing was stored beside what was asked for.
    fn check_beside(&self) {
        for (&(at, len), &(from, asked)) in self.regions.iter().zip(&self.asked) {
            assert!(is_pattern(&*self.memory, at, from - at), "stored before what was asked for");
            let behind = from + asked;
            assert!(is_pattern(&*self.memory, behind, at + len - behind), "stored behind what was asked for");
        }
    }
}

/// Jobs without a handle are over: the report went with it, and so did the memory.
fn check_dropped(jobs: Vec<(OwnedFd, Guest)>) {
    for (watch, guest) in jobs {
        assert!(readable(&watch, 0), "a job that was dropped outlives its service");
        guest.check_beside();
    }
}

fn report(end: &Result<Arc<Report>, JobError>) -> (&'static str, &Report) {
    match end {
        Ok(report) => ("zero", report),
        Err(JobError::Cancelled { report }) => ("cancelled", report),
        Err(JobError::DeadlinePassed { report }) => ("late", report),
        Err(JobError::ServiceClosed { report }) => ("closed", report),
        // On a host so busy that a worker did not come back for half a second.
        Err(JobError::Stalled { report, .. }) => ("stalled", report),
        Err(other) => panic!("{other}"),
    }
}

/// Somebody who submits jobs, and sees to it that they end as they should.
struct Driver<'h> {
    house: &'h House,
    dice: Dice,
    /// Jobs that end when they like, or with their service.
    left: VecDeque<(Job, Guest)>,
    /// The same without a handle: the descriptor tells.
    dropped: Vec<(OwnedFd, Guest)>,
    /// Memory that went to another guest when its job was dropped.
    reused: Vec<(Arc<Mapped>, u64)>,
}

impl Driver<'_> {
    fn round(&mut self) {
        match self.dice.below(40) {
            0 => self.house.renew(&mut self.dice),
            1..=3 => self.house.service().set_background_rate(rate(&mut self.dice)),
            4..=6 => self.host_range(),
            _ => self.job(),
        }
    }

    fn job(&mut self) {
        let guest = Guest::new(&mut self.dice);
        let priority = self.dice.pick(Priority::ALL);
        let request = guest.request(&mut self.dice, priority);
        let job = self.house.service().submit(request).unwrap();
        match self.dice.below(8) {
            0 => {
                self.left.push_back((job, guest));
                if self.left.len() > 6 {
                    let (job, guest) = self.left.pop_front().unwrap();
                    job.cancel();
                    self.end(job, &guest);
                }
            }
            1 => {
                let watch = job.completion_fd().unwrap().try_clone_to_owned().unwrap();
                self.dropped.push((watch, guest));
                if self.dropped.len() > 6 {
                    let (over, still) = std::mem::take(&mut self.dropped)
                        .into_iter()
                        .partition(|(watch, _)| readable(watch, 0));
                    self.dropped = still;
                    check_dropped(over);
                }
            }
            2 => {
                let until = self.dice.below(job.progress().total_bytes);
                while job.progress().done_bytes < until && !job.is_over() && priority != Priority::Background
                {
                    thread::yield_now();
                }
                job.cancel();
                self.end(job, &guest);
            }
            3 => {
                let other = job.clone();
                let cancel = thread::spawn(move || other.cancel());
                self.end(job, &guest);
                cancel.join().unwrap();
            }
            4 => {
                let waiters = [job.clone(), job.clone()].map(|job| thread::spawn(move || job.wait()));
                let own = self.wait(&job, priority);
                for waiter in waiters {
                    let others = waiter.join().unwrap();
                    assert!(std::ptr::eq(report(&own).1, report(&others).1), "two reports of one job");
                }
                self.end(job, &guest);
            }
            5 => {
                if priority == Priority::Background {
                    job.cancel();
                }
                assert!(readable(job.completion_fd().unwrap(), -1));
                assert!(job.is_over(), "readable and not over");
                self.end(job, &guest);
            }
            _ => {
                let _ = self.wait(&job, priority);
                self.end(job, &guest);
            }
        }
    }

    /// Waits for the end. Background work may be paused: it is not waited for for ever.
    fn wait(&mut self, job: &Job, priority: Priority) -> Result<Arc<Report>, JobError> {
        if priority == Priority::Background {
            let patience = Duration::from_millis(self.dice.below(10));
            if let Some(end) = job.wait_timeout(patience) {
                return end;
            }
            job.cancel();
        }
        job.wait()
    }

    /// The end of a job: its memory is what the report says, and the job keeps none of it.
    fn end(&self, job: Job, guest: &Guest) {
        let end = job.wait();
        assert!(job.is_over() && readable(job.completion_fd().unwrap(), -1));
        let (how, report) = report(&end);
        guest.check(report);
        *self.house.ends.lock().unwrap().entry(how).or_default() += 1;
        assert_eq!(job.progress().total_bytes, report.total_bytes);
        if how != "stalled" {
            assert_eq!(job.progress().done_bytes, report.zero_bytes());
            assert_eq!(Arc::strong_count(&guest.memory), 1, "the job keeps its memory");
        }
    }

    /// A raw range: when the handle is dropped the memory is somebody else's.
    fn host_range(&mut self) {
        let len = (1 + self.dice.below(2 * MIB / PAGE)) * PAGE;
        let memory = Arc::new(Mapped::anonymous(len));
        memory.fill(0, len, 0x5a);
        let job = self.house.service().submit(ZeroRequest::host([memory.host_range(0, len)])).unwrap();
        for _ in 0..self.dice.below(3) {
            thread::yield_now();
        }
        drop(job);
        memory.fill(0, len, 0xa5);
        self.reused.push((memory, len));
    }

    /// When all services are gone.
    fn close(self) {
        for (job, guest) in &self.left {
            assert!(job.is_over(), "a job outlives its service");
            self.end(job.clone(), guest);
        }
        check_dropped(self.dropped);
        for (memory, len) in &self.reused {
            assert!(memory.holds(0, *len, 0xa5), "stored after the end");
        }
    }
}

#[test]
fn everything_at_once() {
    run_child("everything_at_once_child");
}

#[test]
#[ignore = "a part of everything_at_once"]
fn everything_at_once_child() {
    if !is_child() {
        return;
    }
    never_hang();
    let given = std::env::var("VM_ZEROING_STRESS_SEED").ok().map(|seed| seed.parse().unwrap());
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let seed: u64 = given.unwrap_or(now.as_nanos() as u64);
    println!("VM_ZEROING_STRESS_SEED={seed}");
    let count = |folder| std::fs::read_dir(folder).unwrap().count();
    let counts = || (count("/proc/self/fd"), count("/proc/self/task"));
    let before = counts();

    let mut dice = Dice(seed);
    let house = House { service: Mutex::default(), ends: Mutex::default() };
    house.renew(&mut dice);
    let house = &house;
    let drivers: Vec<Driver> = thread::scope(|scope| {
        let drive = |dice| {
            let (left, dropped, reused) = Default::default();
            let mut driver = Driver { house, dice, left, dropped, reused };
            (0..ROUNDS).for_each(|_| driver.round());
            driver
        };
        let drivers: Vec<_> =
            (0..DRIVERS).map(|_| Dice(dice.next())).map(|dice| scope.spawn(move || drive(dice))).collect();
        drivers.into_iter().map(|driver| driver.join().unwrap()).collect()
    });
    let last = house.service.lock().unwrap().take();
    drop(Arc::into_inner(last.unwrap()).unwrap());
    drivers.into_iter().for_each(Driver::close);
    let ends = house.ends.lock().unwrap();
    println!("{ends:?}");
    for how in ["zero", "cancelled", "late", "closed"] {
        assert!(ends.contains_key(how), "no job was {how}: this tests less than it should");
    }
    // A joined thread may be listed for a moment longer.
    let late = Instant::now() + Duration::from_secs(60);
    while counts() != before {
        assert!(Instant::now() < late, "{:?} where it was {before:?}", counts());
        thread::yield_now();
    }
}
