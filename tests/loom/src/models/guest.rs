//! A job of the models: two chunks of guest memory, and what becomes of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use loom::cell::UnsafeCell;
use loom::thread;

use super::bell::Bell;
use super::course::{Course, StopReason, Subject};
use super::tally::Held;
use crate::extent::Extent;
use crate::sync::Instant;

/// Memory that loom watches: who touches it must know, through the protocol, of everybody who did so before.
#[derive(Debug)]
pub(crate) struct Chunk {
    touched: UnsafeCell<()>,
    stale: AtomicBool,
}

impl Chunk {
    fn new() -> Self {
        Self { touched: UnsafeCell::new(()), stale: AtomicBool::new(true) }
    }

    pub(crate) fn store(&self) {
        self.touched.with_mut(|_| self.stale.store(false, Ordering::Relaxed));
    }

    pub(crate) fn is_stale(&self) -> bool {
        self.touched.with(|_| self.stale.load(Ordering::Relaxed))
    }
}

/// The kernel's part: what was done before the signal is seen by whoever finds it readable.
#[derive(Debug)]
pub(crate) struct Eventfd(loom::sync::atomic::AtomicBool);

impl Eventfd {
    fn signal(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub(crate) fn is_readable(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// What is written down meanwhile: the chunks that were dealt with.
pub(crate) type Notes = Vec<u64>;

/// What comes of a job.
#[derive(Debug, Clone)]
pub(crate) struct Ended {
    pub(crate) stopped: Option<StopReason>,
    pub(crate) erased: Vec<u64>,
    pub(crate) in_flight: Vec<u64>,
}

pub(crate) fn extent(chunk: u64) -> Extent {
    Extent { region: 0, start: chunk, len: 1 }
}

/// A job with its memory.
#[derive(Debug)]
pub(crate) struct Job {
    pub(super) course: Course<Notes, Ended>,
    pub(crate) chunks: Vec<Chunk>,
    /// Stored to when the memory is let go.
    pub(crate) let_go: Chunk,
    bell: Bell<Eventfd>,
    concluded: AtomicBool,
}

impl Subject<Notes, Ended> for Job {
    fn conclude(&self, notes: &mut Notes, stopped: Option<StopReason>, held: &[Held]) -> Ended {
        assert!(!self.concluded.swap(true, Ordering::Relaxed), "ended twice");
        let in_flight = held.iter().map(|held| held.extent.start).collect();
        Ended { stopped, erased: std::mem::take(notes), in_flight }
    }

    fn let_go(&self, _: Notes) {
        self.let_go.store();
    }

    fn tell(&self, _: &[Held]) {
        if let Some(descriptor) = self.bell.ring() {
            descriptor.signal();
        }
    }

    fn be_looked_at(&self, _: Instant) {
        // There is no warden: who waits must do.
    }
}

impl Job {
    pub(crate) fn new(chunks: u64) -> Arc<Self> {
        Arc::new(Self {
            course: Course::new(chunks, None, Vec::new()),
            chunks: (0..chunks).map(|_| Chunk::new()).collect(),
            let_go: Chunk::new(),
            bell: Bell::new(),
            concluded: AtomicBool::new(false),
        })
    }

    /// A worker's claim.
    pub(crate) fn claim(&self, chunk: u64) -> bool {
        self.course.claim(self, extent(chunk), chunk as u32, |_| Some(())).is_some()
    }

    /// The second half of a worker's turn, after it has made the chunk ready.
    pub(crate) fn perform(&self, chunk: u64, store: impl FnOnce(&Chunk)) {
        let may_store = self.course.confirm(chunk as u32);
        if may_store {
            store(&self.chunks[chunk as usize]);
        }
        self.course.close(self, chunk as u32, may_store, |notes| notes.extend(may_store.then_some(chunk)));
    }

    /// One chunk from claim to settlement.
    pub(crate) fn work_on(&self, chunk: u64) {
        if self.claim(chunk) {
            self.perform(chunk, Chunk::store);
        }
    }

    pub(crate) fn stop(&self, reason: StopReason) {
        self.course.stop(self, reason);
    }

    pub(crate) fn wait(&self) -> Ended {
        self.course.wait_until(self, None).expect("there is no time limit")
    }

    /// The descriptor, made when it is asked for.
    pub(crate) fn descriptor(&self) -> Arc<Eventfd> {
        let descriptor = Arc::new(Eventfd(loom::sync::atomic::AtomicBool::new(false)));
        if !self.bell.hang(&descriptor) {
            descriptor.signal();
        }
        descriptor
    }

    /// Holds what the result says against the memory, which from here on is the caller's.
    pub(crate) fn check(&self, ended: &Ended) {
        assert!(!self.let_go.is_stale(), "the memory is still held");
        for (number, chunk) in (0..).zip(&self.chunks) {
            assert_eq!(ended.erased.contains(&number), !chunk.is_stale(), "{ended:?} of chunk {number}");
            assert!(!ended.erased.contains(&number) || !ended.in_flight.contains(&number), "{ended:?}");
            // The next guest's: whoever stores now is caught.
            chunk.store();
        }
        let all = ended.erased.len() == self.chunks.len();
        assert!(all || ended.stopped.is_some(), "ended too early: {ended:?}");
    }
}

/// A non-temporal store: it leaves the core when it likes, and the fence waits for it.
pub(crate) fn stream(job: &Arc<Job>, chunk: u64) {
    let own = Arc::clone(job);
    let buffer = thread::spawn(move || own.chunks[chunk as usize].store());
    let fence = || buffer.join().expect("it stores");
    fence();
}
