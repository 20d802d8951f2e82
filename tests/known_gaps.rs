//! `tests/known-gaps.md` is true and only shrinks: what it lists fails, what it does not list works.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::cgroup::{self, Cgroup};
use common::limits::{Limit, become_ordinary_user, never_hang};
use common::uffd::Userfaultfd;
use common::{MIB, child, is_child, readable, service, service_with};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vm_zeroing::{Intent, Job, ZeroRequest, ZeroingService};

const LIST: &str = include_str!("known-gaps.md");

/// All gaps that were ever listed. None is added: what does not work any more is a defect.
const KNOWN: [&str; 4] =
    ["R17 end without a waiter", "R17 stuck worker replaced", "R19 caller alone", "R20 limit seen ahead"];

fn listed() -> Vec<(&'static str, &'static str)> {
    let rows = LIST.lines().filter(|line| line.starts_with("| R"));
    rows.map(|row| {
        let [_, gap, missing, _] = row.split('|').map(str::trim).collect::<Vec<_>>()[..] else {
            panic!("{row}")
        };
        (gap, missing)
    })
    .collect()
}

#[test]
fn the_list_only_shrinks() {
    let listed = listed();
    let names: BTreeSet<_> = listed.iter().map(|(gap, _)| *gap).collect();
    assert_eq!(names.len(), listed.len(), "listed twice");
    for (gap, missing) in listed {
        assert!(KNOWN.contains(&gap), "{gap}: a new gap is a defect, to be mended and not listed");
        assert!(missing.len() > 20, "{gap}: say what is missing");
    }
}

/// What became of a gap's test.
#[derive(Debug, PartialEq)]
enum Found {
    Open,
    Closed,
    Unknown,
}

/// A gap is open if its test fails, in a process of its own. Where the test can be had at all.
fn assert_as_listed(gap: &str, mut test: std::process::Command) {
    assert!(KNOWN.contains(&gap));
    let output = test.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let found = match output.status.success() {
        _ if said.contains("skipped") => Found::Unknown,
        true if said.contains("1 passed") => Found::Closed,
        true => panic!("{gap}: no test ran: {said}"),
        false => Found::Open,
    };
    println!("{gap}: {found:?}\n{said}\n{}", String::from_utf8_lossy(&output.stderr));
    match listed().iter().any(|(name, _)| *name == gap) {
        true => assert_ne!(found, Found::Closed, "{gap}: works now; strike it from tests/known-gaps.md"),
        false => assert_ne!(found, Found::Open, "{gap}: worked once"),
    }
}

fn anonymous(len: u64) -> Arc<GuestMemoryMmap<()>> {
    Arc::new(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), len as usize)]).unwrap())
}

/// Long enough for whatever ends a job by itself.
const LONG_MS: i32 = 5000;

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
fn r17_end_without_a_waiter() {
    assert_as_listed("R17 end without a waiter", child("r17_the_descriptor_tells"));
}

#[test]
#[ignore = "a part of r17_end_without_a_waiter"]
fn r17_the_descriptor_tells() {
    if !is_child() {
        return;
    }
    never_hang();
    let service = service_with(1);
    let Some((job, handler)) = stuck(&service, Duration::from_secs(2)) else { return };
    let told = readable(job.completion_fd(), LONG_MS);
    drop(handler);
    assert!(told, "the deadline passed and nobody was told");
}

#[test]
fn r17_stuck_worker_replaced() {
    assert_as_listed("R17 stuck worker replaced", child("r17_another_job_ends"));
}

#[test]
#[ignore = "a part of r17_stuck_worker_replaced"]
fn r17_another_job_ends() {
    if !is_child() {
        return;
    }
    never_hang();
    let service = service_with(1);
    let Some((job, handler)) = stuck(&service, Duration::from_secs(2)) else { return };
    let error = job.wait().unwrap_err();
    let other = service.zero(&anonymous(MIB), Intent::Teardown).unwrap();
    let ended = readable(other.completion_fd(), LONG_MS);
    drop(handler);
    assert!(ended, "nobody works any more after: {error}");
}

#[test]
fn r19_caller_alone() {
    assert_as_listed("R19 caller alone", child("r19_no_thread_can_be_had"));
}

#[test]
#[ignore = "a part of r19_caller_alone"]
fn r19_no_thread_can_be_had() {
    if !is_child() {
        return;
    }
    never_hang();
    let Some(()) = become_ordinary_user() else { return };
    let _limit = Limit::lower(libc::RLIMIT_NPROC, 1);
    let service = ZeroingService::builder().build().unwrap();
    let memory = anonymous(16 * MIB);
    assert!(service.zero(&memory, Intent::Teardown).unwrap().wait().unwrap().is_all_zero());
}

#[test]
fn r20_limit_seen_ahead() {
    let Some(cgroup) = Cgroup::new("memory") else { return };
    let Some(()) = cgroup.set("memory.limit_in_bytes", "memory.max", 128 * MIB) else { return };
    assert_as_listed("R20 limit seen ahead", cgroup.child("r20_an_error_before_populating"));
}

#[test]
#[ignore = "a part of r20_limit_seen_ahead"]
fn r20_an_error_before_populating() {
    if !is_child() {
        return;
    }
    never_hang();
    cgroup::enter();
    let memory = anonymous(256 * MIB);
    let refused = match service().zero(&memory, Intent::Boot) {
        Ok(job) => job.wait().unwrap_err().to_string(),
        Err(error) => error.to_string(),
    };
    // The limit and the need.
    assert!(
        refused.contains(&(128 * MIB).to_string()) && refused.contains(&(256 * MIB).to_string()),
        "{refused}"
    );
}
