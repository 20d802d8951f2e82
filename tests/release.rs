//! How a job lets go of memory: its destructor may own the job or the service, and may panic.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use common::mapped::Mapped;
use common::{MIB, all_zero, readable, service_with};
use vm_zeroing::{HostRange, Job, ZeroRequest, ZeroingService};

const LEN: u64 = 24 * MIB;

/// Memory with something that goes when the memory does.
struct Guest<T: Send> {
    memory: Arc<Mapped>,
    owned: Arc<Mutex<Option<T>>>,
}

impl<T: Send + 'static> Guest<T> {
    fn new() -> Self {
        Self { memory: Arc::new(Mapped::anonymous(LEN)), owned: Arc::default() }
    }

    /// A range whose keep-alive is the only owner of what is put into `owned` later.
    fn range(&self) -> HostRange {
        let keep_alive = Arc::new((Arc::clone(&self.memory), Keeper(Arc::clone(&self.owned))));
        self.memory.host_range_kept_by(0, LEN, keep_alive)
    }
}

/// Drops what it keeps when it is dropped itself.
struct Keeper<T>(Arc<Mutex<Option<T>>>);

impl<T> Drop for Keeper<T> {
    fn drop(&mut self) {
        let owned = self.0.lock().unwrap().take();
        drop(owned);
    }
}

#[test]
fn memory_that_owns_its_job() {
    let service = service_with(2);
    for _ in 0..20 {
        let guest = Guest::<Job>::new();
        let job = service.submit(ZeroRequest::host([guest.range()])).unwrap();
        let watch = job.completion_fd().unwrap().try_clone_to_owned().unwrap();
        // From here on the memory alone holds the job: whoever ends it drops its last handle.
        *guest.owned.lock().unwrap() = Some(job);
        assert!(readable(&watch, -1));
        assert!(guest.memory.holds(0, LEN, 0));
    }
    assert_eq!(service.workers(), 2);
}

#[test]
fn memory_that_owns_the_service() {
    for workers in [1, 2] {
        let guest = Guest::<ZeroingService>::new();
        let service = service_with(workers);
        let job = service.submit(ZeroRequest::host([guest.range()])).unwrap();
        *guest.owned.lock().unwrap() = Some(service);
        // The service may have been moved there too late to be dropped by a worker; either way it ends.
        match job.wait() {
            Ok(report) => assert!(report.is_all_zero() && guest.memory.holds(0, LEN, 0)),
            Err(error) => panic!("{error}"),
        }
    }
}

/// Waits for its job when it is dropped, as the memory of a VM might.
struct Waits(Arc<Mutex<Option<Job>>>, Arc<AtomicUsize>);

impl Drop for Waits {
    fn drop(&mut self) {
        let job = self.0.lock().unwrap().take();
        if let Some(job) = job {
            assert!(job.wait().unwrap().is_all_zero());
            self.1.fetch_add(1, Ordering::SeqCst);
        }
    }
}

#[test]
fn memory_whose_destructor_waits_for_the_job() {
    let service = service_with(2);
    let waited = Arc::new(AtomicUsize::new(0));
    for _ in 0..20 {
        let memory = Arc::new(Mapped::anonymous(LEN));
        let owned: Arc<Mutex<Option<Job>>> = Arc::default();
        let keep_alive = Arc::new((Arc::clone(&memory), Waits(Arc::clone(&owned), Arc::clone(&waited))));
        let job = {
            // Held until the job is in its place, so that the destructor finds it.
            let mut place = owned.lock().unwrap();
            let job =
                service.submit(ZeroRequest::host([memory.host_range_kept_by(0, LEN, keep_alive)])).unwrap();
            *place = Some(job.clone());
            job
        };
        all_zero(&job);
    }
    assert_eq!(waited.load(Ordering::SeqCst), 20);
}

/// Counts how often it was dropped, and panics.
struct Panics(Arc<AtomicUsize>);

impl Drop for Panics {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
        panic!("this panic is part of the test");
    }
}

#[test]
fn memory_whose_destructor_panics() {
    let service = service_with(2);
    let dropped = Arc::new(AtomicUsize::new(0));
    for turn in 1..=3 {
        let memory = Arc::new(Mapped::anonymous(LEN));
        let range =
            memory.host_range_kept_by(0, LEN, Arc::new((Arc::clone(&memory), Panics(Arc::clone(&dropped)))));
        let job = service.submit(ZeroRequest::host([range])).unwrap();
        all_zero(&job);
        assert_eq!(dropped.load(Ordering::SeqCst), turn, "let go of before `wait` returns");
        assert_eq!(job.progress().done_bytes, LEN);
    }
    assert_eq!(service.workers(), 2);
}
