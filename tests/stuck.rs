//! R17: workers that hang in a page fault which nobody answers. The job ends all the same, with or without
//! somebody who waits; stand-ins take over; and whoever comes back stores nothing.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::limits::never_hang;
use common::uffd::Userfaultfd;
use common::{MIB, is_child, readable, run_child, service_with};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vm_zeroing::{Intent, Job, JobError, ZeroRequest, ZeroingService};

/// Long enough for whatever ends a job by itself.
const LONG_MS: i32 = 5000;

fn anonymous(len: u64) -> Arc<GuestMemoryMmap<()>> {
    Arc::new(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), len as usize)]).unwrap())
}

/// A job whose only worker stands before a page that nobody brings.
fn stuck(service: &ZeroingService, deadline: Duration) -> Option<(Job, Userfaultfd)> {
    let memory = anonymous(MIB);
    let base = memory.get_host_address(GuestAddress(0)).unwrap() as u64;
    let handler = Userfaultfd::register(base, MIB)?;
    let job = service.submit(ZeroRequest::new(&memory).deadline(Instant::now() + deadline)).unwrap();
    handler.wait_for_a_fault();
    Some((job, handler))
}

#[test]
fn the_descriptor_tells_of_a_deadline_that_nobody_waits_for() {
    run_child("the_descriptor_tells_of_a_deadline_child");
}

#[test]
#[ignore = "a part of the_descriptor_tells_of_a_deadline_that_nobody_waits_for"]
fn the_descriptor_tells_of_a_deadline_child() {
    if !is_child() {
        return;
    }
    never_hang();
    let service = service_with(1);
    let Some((job, handler)) = stuck(&service, Duration::from_millis(200)) else { return };
    let told = readable(job.completion_fd(), LONG_MS);
    drop(handler);
    assert!(told, "the deadline passed and nobody was told");
    assert!(matches!(job.wait(), Err(JobError::Stalled { in_flight_bytes: MIB, .. })));
}

#[test]
fn a_stuck_worker_is_replaced() {
    run_child("a_stuck_worker_is_replaced_child");
}

#[test]
#[ignore = "a part of a_stuck_worker_is_replaced"]
fn a_stuck_worker_is_replaced_child() {
    if !is_child() {
        return;
    }
    never_hang();
    let service = service_with(1);
    let Some((job, handler)) = stuck(&service, Duration::from_millis(200)) else { return };
    let error = job.wait().unwrap_err();
    let other = service.zero(&anonymous(MIB), Intent::Teardown).unwrap();
    let ended = readable(other.completion_fd(), LONG_MS);
    drop(handler);
    assert!(ended, "nobody works any more after: {error}");
}
