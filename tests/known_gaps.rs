//! `tests/known-gaps.md` is true and only shrinks: what it lists fails, what it does not list works.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::collections::BTreeSet;
use std::sync::Arc;

use common::cgroup::{self, Cgroup};
use common::limits::never_hang;
use common::{MIB, is_child, service};
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vm_zeroing::Intent;

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
