//! Which small jobs the thread that submits them does itself.
#![allow(unsafe_code, clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::sync::Arc;
use std::thread;

use common::{MIB, fill, is_zero, one_node, set_policy};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};
use vm_zeroing::{Intent, ZeroingService};

type Memory = GuestMemoryMmap<()>;

fn service() -> ZeroingService {
    ZeroingService::builder().topology(one_node()).workers_per_node(1).build().unwrap()
}

fn present(file: Option<std::fs::File>) -> Arc<Memory> {
    let file = file.map(|file| FileOffset::new(file, 0));
    let memory = Memory::from_ranges_with_files([(GuestAddress(0), MIB as usize, file)]).unwrap();
    fill(&memory, 0, MIB);
    Arc::new(memory)
}

/// Whether the calling thread did it.
fn is_done_here(service: &ZeroingService, memory: &Arc<Memory>) -> bool {
    let report = service.zero(memory, Intent::Teardown).unwrap().wait().unwrap();
    assert!(report.is_all_zero() && is_zero(&**memory, 0, MIB));
    let most = report.workers.iter().max_by_key(|share| share.bytes).unwrap();
    assert_eq!(most.bytes, MIB, "one thread does all of it");
    most.worker.is_none()
}

fn kernel_tells() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut parts = release.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    let tells = (parts.next().unwrap(), parts.next().unwrap()) >= (6, 11);
    if !tells {
        println!("skipped: PROCMAP_QUERY needs Linux 6.11, so workers do all jobs");
    }
    tells
}

#[test]
fn memory_that_is_there_needs_no_worker() {
    let service = service();
    for file in [None, Some(common::memfd(MIB))] {
        assert_eq!(is_done_here(&service, &present(file)), kernel_tells());
    }
}

/// It would hold the lock of the address space for as long as it is kept from running.
#[test]
fn a_thread_of_low_policy_leaves_it_to_a_worker() {
    let service = service();
    for policy in [libc::SCHED_IDLE, libc::SCHED_BATCH] {
        let memory = present(None);
        let done_here = thread::scope(|scope| {
            let low = || {
                set_policy(0, policy).unwrap();
                is_done_here(&service, &memory)
            };
            scope.spawn(low).join().unwrap()
        });
        assert!(!done_here);
    }
}

/// A store to a page that was only read may wait for the file system: a program, or frozen.
#[test]
fn a_file_is_left_to_a_worker() {
    let path = std::env::current_exe().unwrap().with_file_name(format!("small-job-{}", std::process::id()));
    let file = std::fs::File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    file.set_len(MIB).unwrap();
    assert!(!is_done_here(&service(), &present(Some(file))));
}
