//! What the behaviour tests share: patterns, services, memory files, hugepages, mappings.
#![allow(
    dead_code,
    unused_macros,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "helpers of tests are tests, and each test file uses its share of them"
)]

pub mod calibration;
pub mod cgroup;
pub mod counting;
pub mod events;
pub mod files;
pub mod hooked;
pub mod hugepages;
pub mod limits;
pub mod mapped;
pub mod pinned;
pub mod seccomp;
pub mod uffd;
pub mod wakeups;

/// Tests count threads of their process and collect its log, and what hangs must not hang the rest: each has a process of
/// its own.
macro_rules! in_children {
    ($($(#[$doc:meta])* $name:ident => $child:ident $body:block)*) => {
        $(
            $(#[$doc])*
            #[test]
            fn $name() {
                $crate::common::run_child(stringify!($child));
            }

            #[test]
            #[ignore = "a part of the test of the same name"]
            fn $child() {
                if !$crate::common::is_child() {
                    return;
                }
                $crate::common::limits::never_hang();
                $body
            }
        )*
    };
}
#[allow(unused_imports, reason = "each test file uses its share")]
pub(crate) use in_children;

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, FromRawFd};
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use vm_memory::{Bytes, GuestAddress, GuestMemoryError};
use vm_zeroing::{Job, NodeId, Outcome, Report, Topology, ZeroingService, ZeroingServiceBuilder};

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;
pub const PAGE: u64 = 4096;

/// What a page of the previous guest holds at a guest address: never zero, and no period of a power of two.
pub const fn pattern(at: u64) -> u8 {
    (at % PERIOD) as u8 + 1
}

const PERIOD: u64 = 251;
const STEP: usize = 251 * 4096;

/// `len` bytes (`STEP` at most) of the pattern from `at` on.
fn pattern_block(at: u64, len: usize) -> &'static [u8] {
    static TABLE: OnceLock<Vec<u8>> = OnceLock::new();
    let table = TABLE.get_or_init(|| (0..STEP as u64 + PERIOD).map(pattern).collect());
    &table[(at % PERIOD) as usize..][..len]
}

/// Cuts a range into steps.
fn steps(start: u64, len: u64) -> impl Iterator<Item = (u64, usize)> {
    (start..start + len).step_by(STEP).map(move |at| (at, STEP.min((start + len - at) as usize)))
}

/// Any memory with guest addresses.
pub trait Ram: Bytes<GuestAddress, E = GuestMemoryError> {}
impl<T: Bytes<GuestAddress, E = GuestMemoryError>> Ram for T {}

/// Writes the pattern.
pub fn fill(memory: &impl Ram, start: u64, len: u64) {
    for (at, step) in steps(start, len) {
        memory.write_slice(pattern_block(at, step), GuestAddress(at)).unwrap();
    }
}

pub fn bytes(memory: &impl Ram, start: u64, len: u64) -> Vec<u8> {
    let mut found = vec![0xee; len as usize];
    memory.read_slice(&mut found, GuestAddress(start)).unwrap();
    found
}

pub fn is_zero(memory: &impl Ram, start: u64, len: u64) -> bool {
    static ZEROES: [u8; STEP] = [0; STEP];
    steps(start, len).all(|(at, step)| bytes(memory, at, step as u64) == ZEROES[..step])
}

pub fn is_pattern(memory: &impl Ram, start: u64, len: u64) -> bool {
    steps(start, len).all(|(at, step)| bytes(memory, at, step as u64) == pattern_block(at, step))
}

/// The report is exact about memory that held the pattern: its ranges are `asked` without gap, overlap or
/// two neighbours of the same outcome; what it calls zero reads zero; what it says nobody wrote is as it was.
pub fn assert_exact(memory: &impl Ram, report: &Report, asked: &[(u64, u64)]) {
    let mut ranges = report.ranges.iter();
    for &(start, len) in asked {
        let (mut at, mut before) = (start, None);
        while at < start + len {
            let range = ranges.next().expect("a range for every byte asked for");
            assert_eq!(range.start, at, "gap or overlap in {report:?}");
            assert_ne!(before, Some(&range.outcome), "not coalesced: {report:?}");
            match range.outcome {
                Outcome::Erased | Outcome::ReadsZero => {
                    assert!(is_zero(memory, at, range.len), "claimed zero: {range:?}");
                }
                Outcome::Untouched | Outcome::InFlight => {
                    assert!(is_pattern(memory, at, range.len), "written all the same: {range:?}");
                }
                _ => {}
            }
            (at, before) = (at + range.len, Some(&range.outcome));
        }
        assert_eq!(at, start + len, "more than was asked for in {report:?}");
    }
    assert_eq!(ranges.next(), None, "nobody asked for this");
    assert_eq!(report.total_bytes, asked.iter().map(|(_, len)| len).sum::<u64>());
    assert_eq!(report.erased_bytes, sum(report, |outcome| *outcome == Outcome::Erased));
    assert_eq!(report.reads_zero_bytes, sum(report, |outcome| *outcome == Outcome::ReadsZero));
    assert_eq!(report.is_all_zero(), report.zero_bytes() == report.total_bytes);
}

/// Bytes whose outcome is such.
pub fn sum(report: &Report, such: impl Fn(&Outcome) -> bool) -> u64 {
    report.ranges.iter().filter(|range| such(&range.outcome)).map(|range| range.len).sum()
}

/// The outcome of one byte.
pub fn outcome_at(report: &Report, address: u64) -> &Outcome {
    let holds =
        |range: &&vm_zeroing::RangeReport| range.start <= address && address < range.start + range.len;
    &report.ranges.iter().find(holds).expect("the byte was asked for").outcome
}

/// A service whose workers do all jobs, small ones too.
pub fn service() -> ZeroingService {
    ZeroingService::builder().small_job(0).build().unwrap()
}

/// A service with this many workers at most (fewer where fewer CPUs are allowed), all on one node.
pub fn service_with(workers: usize) -> ZeroingService {
    ZeroingService::builder().topology(one_node()).workers_per_node(workers).small_job(0).build().unwrap()
}

/// For a service with exactly this many workers on one node, whatever CPUs there are: they share what is allowed.
pub fn exactly(workers: usize) -> ZeroingServiceBuilder {
    let tree = Tree::new();
    tree.file("sys/devices/system/cpu/online", &format!("0-{}", workers.max(allowed_cpus().len()) + 1023));
    let topology = Topology::read(&tree.0).unwrap();
    ZeroingService::builder().topology(topology).workers_per_node(workers).small_job(0)
}

/// The allowed CPUs on one node.
pub fn one_node() -> Topology {
    let tree = Tree::new();
    tree.file("sys/devices/system/cpu/online", &list(&allowed_cpus()));
    let topology = Topology::read(&tree.0).unwrap();
    assert_eq!(topology.nodes().len(), 1);
    assert_eq!(topology.nodes()[0].id(), NodeId(0));
    topology
}

/// The allowed CPUs on node 0, and a node 1 that has only memory.
pub fn two_nodes() -> Topology {
    let tree = Tree::new();
    tree.file("sys/devices/system/cpu/online", &list(&allowed_cpus()));
    for (id, cpus, distance) in [(0, list(&allowed_cpus()), "10 20"), (1, String::new(), "20 10")] {
        let folder = format!("sys/devices/system/node/node{id}");
        tree.file(&format!("{folder}/cpulist"), &cpus);
        tree.file(&format!("{folder}/meminfo"), &format!("Node {id} MemTotal: 1048576 kB"));
        tree.file(&format!("{folder}/distance"), distance);
    }
    Topology::read(&tree.0).unwrap()
}

/// A folder that stands for "/", removed at the end.
pub struct Tree(pub PathBuf);

impl Tree {
    pub fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("vm-zeroing-tree-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub fn file(&self, path: &str, content: &str) {
        let path = self.0.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, format!("{content}\n")).unwrap();
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// CPUs as sysfs lists them.
pub fn list(cpus: &[u32]) -> String {
    cpus.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

/// The CPUs of a `Cpus_allowed_list:` line in a status file of procfs.
pub fn cpus_of(status: &str) -> Vec<u32> {
    let status = std::fs::read_to_string(status).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
    let parts = line.trim().split(',').map(|part| part.split_once('-').unwrap_or((part, part)));
    parts.flat_map(|(first, last)| first.parse::<u32>().unwrap()..=last.parse().unwrap()).collect()
}

/// What the process may use.
pub fn allowed_cpus() -> Vec<u32> {
    cpus_of("/proc/self/status")
}

/// Pins the calling thread to one CPU.
#[allow(unsafe_code)]
pub fn pin_to(cpu: u32) {
    // SAFETY: an all-zero set is a valid value; the calls read and write nothing else.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu as usize, &mut set);
        assert_eq!(libc::sched_setaffinity(0, size_of_val(&set), &raw const set), 0);
    }
}

/// Gives a thread, 0 for the calling one, a scheduling policy that knows no priorities.
#[allow(unsafe_code)]
pub fn set_policy(thread: u32, policy: i32) -> std::io::Result<()> {
    let priority: libc::c_int = 0;
    // The system calls themselves: musl's functions of these names refuse.
    // SAFETY: the kernel's sched_param is this one number, which outlives the call.
    match unsafe { libc::syscall(libc::SYS_sched_setscheduler, thread, policy, &raw const priority) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// The scheduling policy of a thread, 0 for the calling one.
#[allow(unsafe_code)]
pub fn policy_of(thread: u32) -> i32 {
    // SAFETY: a number in, a number out.
    let policy = unsafe { libc::syscall(libc::SYS_sched_getscheduler, thread) };
    assert!(policy >= 0, "{}", std::io::Error::last_os_error());
    policy as i32
}

/// The service's worker threads in this process: (thread id, name).
pub fn worker_threads() -> Vec<(u32, String)> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks
        .filter_map(|task| {
            let task = task.ok()?.path();
            // A thread may end while we look.
            let name = std::fs::read_to_string(task.join("comm")).ok()?.trim().to_owned();
            let id = task.file_name()?.to_str()?.parse().ok()?;
            name.starts_with("vmz-n").then_some((id, name))
        })
        .collect()
}

/// Whether the kernel is this one or a newer one; says aloud what it would be needed for.
pub fn kernel_is_at_least(version: (u32, u32), what_for: &str) -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers =
        release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse::<u32>().unwrap_or(0));
    let is_new = (numbers.next().unwrap(), numbers.next().unwrap()) >= version;
    if !is_new {
        println!("{what_for} on Linux {}", release.trim());
    }
    is_new
}

/// Whether holes of memory files are believed: since Linux 6.6.
pub fn holes_are_believed() -> bool {
    kernel_is_at_least((6, 6), "holes of memory files prove nothing")
}

/// A memory file of base pages.
pub fn memfd(len: u64) -> File {
    let file = memfd_with(libc::MFD_CLOEXEC).unwrap();
    file.set_len(len).unwrap();
    file
}

/// A memory file with these flags, empty.
#[allow(unsafe_code)]
pub fn memfd_with(flags: libc::c_uint) -> std::io::Result<File> {
    // SAFETY: the name is a C string.
    let fd = unsafe { libc::memfd_create(c"vm-zeroing-test".as_ptr(), flags) };
    if fd < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the kernel just gave us this descriptor.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// Whether a job's descriptor is readable now, or within `timeout_ms` (-1: for ever).
#[allow(unsafe_code)]
pub fn readable(fd: impl AsFd, timeout_ms: i32) -> bool {
    let mut poll = libc::pollfd { fd: fd.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd, alive during the call.
    let answer = unsafe { libc::poll(&raw mut poll, 1, timeout_ms) };
    assert!(answer >= 0, "{}", std::io::Error::last_os_error());
    answer == 1 && poll.revents & libc::POLLIN != 0
}

/// Waits for a job that must succeed.
pub fn all_zero(job: &Job) -> std::sync::Arc<Report> {
    let report = job.wait().unwrap();
    assert!(report.is_all_zero(), "{report:?}");
    report
}

/// What tells a test function that it runs in a process of its own.
const CHILD: &str = "VM_ZEROING_TEST_CHILD";

/// The command that runs one `#[ignore]`d test function of this binary in a process of its own.
pub fn child(name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--ignored", "--nocapture", "--test-threads=1"]).env(CHILD, name);
    command
}

/// Runs it to its end, which must be a good one.
pub fn run_child(name: &str) {
    ends_well(&mut child(name));
}

/// The same for a child's command that was added to.
pub fn ends_well(child: &mut Command) {
    let output = child.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    print!("{said}");
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.contains("1 passed"), "{child:?}: {}", output.status);
}

/// Whether this process was started by [`child`].
pub fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}
