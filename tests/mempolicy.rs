//! R30: the calls about memory policy are refused, as containers do it. The work is done without them, each
//! refusal is said once; an answer that means a mistake of ours is not swallowed. On a tree of two nodes, whatever
//! the machine has.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::sync::Arc;

use common::events;
use common::seccomp::{Refusal, Scope, refuse};
use common::{MIB, all_zero, assert_exact, fill, is_child, run_child, two_nodes};
use tracing::Level;
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vm_zeroing::{HugepagePool, Intent, NodeId, PageSize, PoolError, Report, ZeroingService};

const LEN: u64 = 24 * MIB;
const CALLS: [(&str, libc::c_long); 3] = [
    ("move_pages", libc::SYS_move_pages),
    ("get_mempolicy", libc::SYS_get_mempolicy),
    ("mbind", libc::SYS_mbind),
];

/// Two jobs over several chunks each.
fn jobs(service: &ZeroingService) -> [Arc<Report>; 2] {
    [Intent::Boot, Intent::Teardown].map(|intent| {
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), LEN as usize)]).unwrap();
        let memory = Arc::new(memory);
        // Fresh pages have no node before they are there.
        fill(&*memory, 0, if intent == Intent::Boot { LEN / 2 } else { LEN });
        let report = all_zero(&service.zero(&memory, intent).unwrap());
        assert_exact(&*memory, &report, &[(0, LEN)]);
        report
    })
}

fn build_pool(service: &ZeroingService) -> Result<HugepagePool, PoolError> {
    HugepagePool::builder(service).page_size(PageSize::Base).capacity(NodeId(0), MIB).build()
}

/// The levels from which on a person looks.
fn said() -> (Vec<String>, Vec<String>) {
    (events::at(Level::WARN), events::at(Level::ERROR))
}

#[test]
fn refused_by_a_container() {
    ["refused_with_eperm", "refused_with_enosys", "refused_with_eacces"].into_iter().for_each(run_child);
}

fn refused_with(errno: i32) {
    if !is_child() {
        return;
    }
    events::collect();
    let service = ZeroingService::builder().topology(two_nodes()).build().unwrap();
    let refusals = CALLS.map(|(_, number)| Refusal::new(number, errno));
    let Some(()) = refuse(Scope::Process, &refusals) else { return };
    for report in [jobs(&service), jobs(&service)].concat() {
        assert_eq!((report.node_local_bytes, report.node_remote_bytes), (0, 0), "nobody knows: not claimed");
    }
    build_pool(&service).unwrap();
    build_pool(&service).unwrap();
    let (warnings, errors) = said();
    assert_eq!(errors, [] as [&str; 0]);
    assert_eq!(warnings.len(), CALLS.len(), "one for each call: {warnings:#?}");
    for (name, _) in CALLS {
        let of_call = warnings.iter().filter(|said| said.contains(&format!("call={name:?}"))).count();
        assert_eq!(of_call, 1, "{name}: {warnings:#?}");
    }
    assert!(warnings.iter().all(|said| said.contains(&format!("errno={errno}"))), "{warnings:#?}");
}

#[test]
#[ignore = "a part of refused_by_a_container"]
fn refused_with_eperm() {
    refused_with(libc::EPERM);
}

#[test]
#[ignore = "a part of refused_by_a_container"]
fn refused_with_enosys() {
    refused_with(libc::ENOSYS);
}

#[test]
#[ignore = "a part of refused_by_a_container"]
fn refused_with_eacces() {
    refused_with(libc::EACCES);
}

/// A host that answers is asked, and nothing is said.
#[test]
fn a_healthy_host_is_asked() {
    run_child("a_healthy_host_is_asked_child");
}

#[test]
#[ignore = "a part of a_healthy_host_is_asked"]
fn a_healthy_host_is_asked_child() {
    if !is_child() {
        return;
    }
    // Containers refuse the question to everybody: then this host is not a healthy one.
    #[allow(unsafe_code)]
    // SAFETY: a question about no page at all.
    if unsafe { libc::syscall(libc::SYS_move_pages, 0, 0, 0, 0, 0, 0) } != 0 {
        println!("skipped: move_pages is refused here: {}", std::io::Error::last_os_error());
        return;
    }
    events::collect();
    let service = ZeroingService::builder().topology(two_nodes()).build().unwrap();
    let [_, report] = jobs(&service);
    assert_eq!(report.node_local_bytes + report.node_remote_bytes, LEN, "{report:?}");
    build_pool(&service).unwrap();
    assert_eq!(said(), (vec![], vec![]));
}

/// EINVAL means that we asked wrongly.
#[test]
fn einval_is_not_swallowed() {
    run_child("einval_is_not_swallowed_child");
}

#[test]
#[ignore = "a part of einval_is_not_swallowed"]
fn einval_is_not_swallowed_child() {
    if !is_child() {
        return;
    }
    events::collect();
    let service = ZeroingService::builder().topology(two_nodes()).build().unwrap();
    let refusals = CALLS.map(|(_, number)| Refusal::new(number, libc::EINVAL));
    let Some(()) = refuse(Scope::Process, &refusals) else { return };
    // Bytes are zero all the same: where they are is another question.
    jobs(&service);
    let (warnings, errors) = said();
    assert_eq!(warnings, [] as [&str; 0]);
    for name in ["move_pages", "get_mempolicy"] {
        assert!(errors.iter().any(|said| said.contains(name)), "{name}: {errors:#?}");
    }
    let error = build_pool(&service).unwrap_err();
    let PoolError::System { call: "mbind", node: NodeId(0), source, .. } = &error else { panic!("{error}") };
    assert_eq!(source.raw_os_error(), Some(libc::EINVAL));
}
