//! R4: the process is killed in the middle of a job. Nothing was called zero before it was, and the next
//! process takes nothing for granted.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::thread;

use common::hooked::{Gate, HookedMemory, HookedRegion, memory_of};
use common::hugepages::{HUGE, Hugepages};
use common::{MIB, all_zero, assert_exact, fill, is_child, memfd_with, outcome_at, service, service_with};
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, MmapRegion};
use vm_zeroing::{Intent, Outcome};

const FILE: &str = "VM_ZEROING_TEST_FD";
const LEN: u64 = 48 * MIB;

fn mapped(file: &File, len: u64) -> GuestMemoryMmap<()> {
    let file = FileOffset::new(file.try_clone().unwrap(), 0);
    GuestMemoryMmap::from_ranges_with_files([(GuestAddress(0), len as usize, Some(file))]).unwrap()
}

/// Killed when dropped, also when the test fails.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Kills a child in the middle of its job over the file, and looks at what it left behind.
fn kill_in_the_middle(file: &File, len: u64) {
    let memory = Arc::new(mapped(file, len));
    fill(&*memory, 0, len);
    // The descriptor was made without close-on-exec, so the child has it under the same number.
    let mut command = common::child("killed_child");
    let mut child =
        Killed(command.env(FILE, file.as_raw_fd().to_string()).stdout(Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
    let done = lines
        .find_map(|line| line.unwrap().split_once("MIDDLE ").map(|(_, bytes)| bytes.parse::<u64>().unwrap()))
        .unwrap();
    drop(child);
    assert!(lines.all(|line| !line.unwrap().contains("OVER")), "a job called over in the middle");

    // What it had counted as done is zero, and it was not through.
    let chunk = 4096;
    let zero =
        (0..len).step_by(chunk).filter(|at| common::is_zero(&*memory, *at, chunk as u64)).count() * chunk;
    let stale =
        (0..len).step_by(chunk).filter(|at| common::is_pattern(&*memory, *at, chunk as u64)).count() * chunk;
    assert!(done > 0 && done <= zero as u64, "{done} bytes counted, {zero} zero");
    assert!(stale > 0 && (zero + stale) as u64 <= len);
    drop(memory);

    // After the restart everything is stale: the new process believes neither the file nor its own fresh mapping.
    let memory = Arc::new(mapped(file, len));
    let report = all_zero(&service().zero(&memory, Intent::Boot).unwrap());
    assert_eq!((report.erased_bytes, report.reads_zero_bytes), (len, 0));
    assert_eq!(outcome_at(&report, 0), &Outcome::Erased);
    assert_exact(&*memory, &report, &[(0, len)]);
}

#[test]
fn killed_over_a_memory_file() {
    let file = memfd_with(0).unwrap();
    file.set_len(LEN).unwrap();
    kill_in_the_middle(&file, LEN);
}

#[test]
fn killed_over_hugepages() {
    let Some(_pages) = Hugepages::reserve(24) else { return };
    let file = memfd_with(libc::MFD_HUGETLB | libc::MFD_HUGE_2MB).unwrap();
    file.set_len(24 * HUGE).unwrap();
    kill_in_the_middle(&file, 24 * HUGE);
}

#[test]
#[ignore = "killed by the tests above"]
#[allow(unsafe_code)]
fn killed_child() {
    if !is_child() {
        return;
    }
    let fd = std::env::var(FILE).unwrap().parse().unwrap();
    // SAFETY: the parent passed the descriptor on, and nobody here closes it.
    let file = File::from(unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned().unwrap());
    let len = file.metadata().unwrap().len();
    let mapping = MmapRegion::<()>::from_file(FileOffset::new(file, 0), len as usize).unwrap();
    // Three chunks are made present and cleared; then every worker stands still.
    let gate = Gate::after(6);
    let region = HookedRegion::over(mapping, 0, gate.hook());
    let memory: Arc<HookedMemory> = memory_of(vec![region]);
    let service = service_with(2);
    let job = service.zero(&memory, Intent::Teardown).unwrap();
    thread::spawn({
        let job = job.clone();
        move || {
            let _ = job.wait();
            println!("OVER");
        }
    });
    gate.wait_for_somebody();
    while job.progress().done_bytes == 0 {
        thread::yield_now();
    }
    // A line of its own: the test harness has begun one.
    println!("\nMIDDLE {}", job.progress().done_bytes);
    std::io::stdout().flush().unwrap();
    loop {
        thread::park();
    }
}
