//! R34: a kernel without `MADV_POPULATE_WRITE` (before Linux 5.14). Pages are touched instead, which is said once;
//! other answers to the same call are not taken for an old kernel.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::sync::Arc;

use common::events;
use common::mapped::Mapped;
use common::seccomp::{Refusal, Scope, refuse};
use common::{MIB, PAGE, all_zero, assert_exact, fill, is_child, memfd, run_child, service};
use tracing::Level;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};
use vm_zeroing::{Cause, Intent, JobError, ZeroRequest};

const LEN: u64 = 13 * MIB;

fn answer(errno: i32) -> Option<()> {
    let populate = Refusal::new(libc::SYS_madvise, errno).if_equal(2, libc::MADV_POPULATE_WRITE as u32);
    refuse(Scope::Process, &[populate])
}

fn memory(file: bool) -> Arc<GuestMemoryMmap<()>> {
    let file = file.then(|| FileOffset::new(memfd(LEN), 0));
    let memory = GuestMemoryMmap::from_ranges_with_files([(GuestAddress(0), LEN as usize, file)]).unwrap();
    fill(&memory, 0, LEN / 2);
    Arc::new(memory)
}

#[test]
fn pages_are_touched() {
    run_child("pages_are_touched_child");
}

#[test]
#[ignore = "a part of pages_are_touched"]
fn pages_are_touched_child() {
    if !is_child() {
        return;
    }
    events::collect();
    let Some(()) = answer(libc::EINVAL) else { return };
    for _ in 0..2 {
        let service = service();
        for intent in [Intent::Boot, Intent::Teardown] {
            for memory in [memory(false), memory(true)] {
                let report = all_zero(&service.zero(&memory, intent).unwrap());
                assert_exact(&*memory, &report, &[(0, LEN)]);
            }
        }
        // Present afterwards, fresh pages too, and ranges that begin and end inside pages.
        let mapped = Arc::new(Mapped::anonymous(LEN));
        let range = mapped.host_range(0, LEN);
        all_zero(&service.submit(ZeroRequest::host([range]).intent(Intent::Boot)).unwrap());
        assert_eq!(mapped.present_pages() as u64, LEN / PAGE);
        let memory = memory(false);
        let asked = (PAGE - 1, 5 * PAGE + 2);
        let request = ZeroRequest::new(&memory).ranges([(GuestAddress(asked.0), asked.1)]);
        assert_exact(&*memory, &all_zero(&service.submit(request).unwrap()), &[asked]);
    }
    let warnings = events::at(Level::WARN);
    assert_eq!(warnings.len(), 1, "{warnings:#?}");
    assert!(warnings[0].contains("MADV_POPULATE_WRITE") && warnings[0].contains("5.14"), "{warnings:#?}");
}

#[test]
fn other_refusals_are_passed_on() {
    ["eperm_is_passed_on", "enomem_is_passed_on", "einval_for_one_mapping_is_passed_on"]
        .into_iter()
        .for_each(run_child);
}

/// Every page is refused: nothing is stored, nothing is called zero.
fn passed_on(errno: i32) -> Option<Cause> {
    events::collect();
    answer(errno)?;
    let memory = memory(false);
    fill(&*memory, 0, LEN);
    let error = service().zero(&memory, Intent::Teardown).unwrap().wait().unwrap_err();
    let JobError::Failed { cause, report, .. } = error else { panic!("{error}") };
    assert_eq!(report.zero_bytes(), 0);
    assert!(common::is_pattern(&*memory, 0, LEN), "stored into pages that the kernel refused");
    assert_eq!(events::at(Level::WARN), [] as [&str; 0], "not taken for an old kernel");
    Some(cause)
}

#[test]
#[ignore = "a part of other_refusals_are_passed_on"]
fn eperm_is_passed_on() {
    if is_child()
        && let Some(cause) = passed_on(libc::EPERM)
    {
        assert!(matches!(cause, Cause::System { errno: libc::EPERM, .. }), "{cause}");
    }
}

#[test]
#[ignore = "a part of other_refusals_are_passed_on"]
fn enomem_is_passed_on() {
    if is_child()
        && let Some(cause) = passed_on(libc::ENOMEM)
    {
        assert_eq!(cause, Cause::Shortage { errno: libc::ENOMEM });
    }
}

/// A mapping that answers EINVAL by itself does not make the kernel an old one.
#[test]
#[ignore = "a part of other_refusals_are_passed_on"]
fn einval_for_one_mapping_is_passed_on() {
    if !is_child() {
        return;
    }
    events::collect();
    let service = service();
    let refused = Arc::new(Mapped::shared_read_only(&memfd(LEN), LEN));
    let error = service.submit(ZeroRequest::host([refused.host_range(0, LEN)])).unwrap().wait().unwrap_err();
    assert!(
        matches!(&error, JobError::Failed { cause: Cause::System { errno: libc::EINVAL, .. }, .. }),
        "{error}"
    );
    // Still populated and not touched: a truncated file is an error, not a SIGBUS.
    let (memory, _file) = common::files::truncated(LEN, PAGE);
    let error = service.zero(&memory, Intent::Teardown).unwrap().wait().unwrap_err();
    assert!(matches!(&error, JobError::Failed { cause: Cause::Truncated, .. }), "{error}");
    assert_eq!(events::at(Level::WARN), [] as [&str; 0]);
}
