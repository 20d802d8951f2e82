//! What the tests of nodes share: the emulated machine's description, where pages and threads are, and guest
//! memory that tells who worked on it.
#![allow(
    dead_code,
    unsafe_code,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "helpers of tests are tests, and each test file uses its share of them"
)]

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io;
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use vm_memory::bitmap::{Bitmap, BitmapSlice, WithBitmapSlice};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{
    Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryError, GuestMemoryMmap, GuestRegionMmap,
};
use vm_zeroing::{Intent, Job, NodeId, Topology, ZeroingService};

pub const MIB: u64 = 1 << 20;
pub const PAGE: u64 = 4096;
pub const HUGE: u64 = 2 << 20;
/// What a worker claims at once, if that takes no longer than a millisecond.
pub const CHUNK: u64 = 4 << 20;
/// However long that takes, no less than this.
pub const LEAST: u64 = 64 << 10;

/// How long a test waits for what must happen, before it fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// A machine as `tests/machines/run` describes it to its guest.
#[derive(Debug)]
pub struct Described {
    /// Number, CPUs, MiB of memory.
    pub nodes: Vec<(u32, Vec<u32>, u64)>,
    distances: BTreeMap<(u32, u32), u32>,
}

impl Described {
    pub fn distance(&self, from: u32, to: u32) -> u32 {
        let asked = if from == to { Some(&10) } else { self.distances.get(&(from, to)) };
        asked.copied().unwrap_or(20)
    }
}

/// The description of the emulated machine this runs in, if it does.
pub fn described() -> Option<Described> {
    let nodes = std::env::var("VM_ZEROING_NODES").ok()?;
    let nodes = nodes.split(';').map(|node| {
        let mut fields = node.split(':');
        let id = fields.next().unwrap().parse().unwrap();
        let mib = fields.clone().nth(1).filter(|mib| !mib.is_empty()).map_or(0, |mib| mib.parse().unwrap());
        (id, list(fields.next().unwrap()), mib)
    });
    let mut distances = BTreeMap::new();
    let far = std::env::var("VM_ZEROING_DISTANCES").unwrap_or_default();
    for distance in far.split(';').filter(|distance| !distance.is_empty()) {
        let (pair, value) = distance.split_once(':').unwrap();
        let (from, to) = pair.split_once('-').unwrap();
        let (from, to) = (from.parse().unwrap(), to.parse().unwrap());
        distances.insert((from, to), value.parse().unwrap());
        distances.insert((to, from), value.parse().unwrap());
    }
    Some(Described { nodes: nodes.collect(), distances })
}

/// Numbers as the kernel lists them.
pub fn list(text: &str) -> Vec<u32> {
    let parts = text.trim().split(',').filter(|part| !part.is_empty());
    let ends = parts.map(|part| part.split_once('-').unwrap_or((part, part)));
    ends.flat_map(|(first, last)| first.parse::<u32>().unwrap()..=last.parse().unwrap()).collect()
}

/// The list behind a key of a status file of procfs.
pub fn status_list(file: &str, key: &str) -> Vec<u32> {
    let status = fs::read_to_string(file).unwrap();
    list(status.lines().find_map(|line| line.strip_prefix(key)).unwrap())
}

/// The nodes that the kernel lists in a file of `/sys/devices/system/node`; none where there is no such file.
fn kernel_nodes(file: &str) -> Vec<u32> {
    fs::read_to_string(format!("/sys/devices/system/node/{file}")).map_or(Vec::new(), |text| list(&text))
}

/// The nodes whose memory this process may use.
pub fn memory_nodes() -> Vec<NodeId> {
    let allowed = status_list("/proc/self/status", "Mems_allowed_list:");
    kernel_nodes("has_memory").into_iter().filter(|node| allowed.contains(node)).map(NodeId).collect()
}

/// The CPUs of a node that this process may use.
pub fn cpus_of(node: NodeId) -> Vec<u32> {
    let allowed = status_list("/proc/self/status", "Cpus_allowed_list:");
    let cpus = fs::read_to_string(format!("/sys/devices/system/node/node{}/cpulist", node.0));
    let cpus = cpus.map_or(Vec::new(), |text| list(&text));
    cpus.into_iter().filter(|cpu| allowed.contains(cpu)).collect()
}

/// The nodes with CPUs that this process may use.
pub fn cpu_nodes() -> Vec<NodeId> {
    kernel_nodes("online").into_iter().map(NodeId).filter(|node| !cpus_of(*node).is_empty()).collect()
}

/// The node of a CPU.
pub fn node_of_cpu(cpu: u32) -> NodeId {
    cpu_nodes().into_iter().find(|node| cpus_of(*node).contains(&cpu)).unwrap()
}

/// Nodes with CPUs and memory, if there are two at least.
pub fn several_nodes() -> Option<Vec<NodeId>> {
    let memory = memory_nodes();
    let both: Vec<NodeId> = cpu_nodes().into_iter().filter(|node| memory.contains(node)).collect();
    if both.len() < 2 {
        println!("skipped: this machine has fewer than two nodes with CPUs and memory for us");
        return None;
    }
    Some(both)
}

/// The node of each page, or the kernel's negated error number (`-ENOENT`: not present).
pub fn nodes_of(start: *const u8, bytes: u64, page: u64) -> Vec<i32> {
    let pages: Vec<usize> =
        (0..bytes).step_by(page as usize).map(|at| start as usize + at as usize).collect();
    let mut status = vec![0i32; pages.len()];
    // SAFETY: as many addresses and statuses as is said, alive during the call; without targets nothing moves.
    let answer = unsafe {
        libc::syscall(libc::SYS_move_pages, 0, pages.len(), pages.as_ptr(), 0usize, status.as_mut_ptr(), 0)
    };
    assert_eq!(answer, 0, "move_pages: {}", io::Error::last_os_error());
    status
}

/// All pages are there and on this node.
pub fn assert_on(node: NodeId, start: *const u8, bytes: u64, page: u64) {
    let found = nodes_of(start, bytes, page);
    let wrong = found.iter().filter(|found| **found != node.0 as i32).count();
    assert_eq!(wrong, 0, "pages of {} not on {node}: {found:?}", found.len());
}

/// Binds the pages to come to a node.
pub fn bind(start: *const u8, bytes: u64, node: NodeId) {
    let mask = 1u64 << node.0;
    // SAFETY: sets the policy of a mapping; touches no byte. The mask outlives the call, and the kernel reads
    // one bit fewer than it is told.
    let answer =
        unsafe { libc::syscall(libc::SYS_mbind, start, bytes, libc::MPOL_BIND, &raw const mask, 65, 0) };
    assert_eq!(answer, 0, "mbind: {}", io::Error::last_os_error());
}

/// Base pages only, so that a page made present does not bring its neighbours with it.
pub fn without_huge_pages(start: *const u8, bytes: u64) {
    // SAFETY: advice about a mapping of guest memory; changes no byte.
    let answer = unsafe { libc::madvise(start.cast_mut().cast(), bytes as usize, libc::MADV_NOHUGEPAGE) };
    assert_eq!(answer, 0, "{}", io::Error::last_os_error());
}

/// The host address of a guest address.
pub fn host(memory: &impl GuestMemoryBackend, at: u64) -> *mut u8 {
    memory.get_host_address(GuestAddress(at)).unwrap()
}

/// What a page of the previous guest holds: never zero.
pub fn fill(memory: &impl Bytes<GuestAddress, E = GuestMemoryError>, start: u64, bytes: u64) {
    let block: Vec<u8> = (0..MIB).map(|at| (at % 251) as u8 + 1).collect();
    for at in (start..start + bytes).step_by(MIB as usize) {
        let part = MIB.min(start + bytes - at) as usize;
        memory.write_slice(&block[..part], GuestAddress(at)).unwrap();
    }
}

pub fn assert_zero(memory: &impl Bytes<GuestAddress, E = GuestMemoryError>, start: u64, bytes: u64) {
    let (mut found, zero) = (vec![0xee; MIB as usize], vec![0; MIB as usize]);
    for at in (start..start + bytes).step_by(MIB as usize) {
        let part = MIB.min(start + bytes - at) as usize;
        memory.read_slice(&mut found[..part], GuestAddress(at)).unwrap();
        assert!(found[..part] == zero[..part], "not zero within 1 MiB from {at:#x} on");
    }
}

pub fn anonymous(bytes: u64) -> Arc<GuestMemoryMmap> {
    Arc::new(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), bytes as usize)]).unwrap())
}

/// The topology of these nodes' CPUs alone.
pub fn topology_of(nodes: &[NodeId]) -> Topology {
    let cpus: Vec<u32> = nodes.iter().flat_map(|node| cpus_of(*node)).collect();
    Topology::detect().unwrap().restrict_cpus(&cpus).unwrap()
}

/// One worker on each of these nodes, none elsewhere. They take the least at a time, for tests that know chunks by
/// number.
pub fn one_worker_on_each(nodes: &[NodeId]) -> ZeroingService {
    let builder = ZeroingService::builder().topology(topology_of(nodes)).workers_per_node(1);
    let service = builder.chunk(LEAST).build().unwrap();
    assert_eq!(service.workers(), nodes.len());
    service
}

/// Something that is waited for, once.
#[derive(Default)]
pub struct Gate {
    open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    pub fn open(&self) {
        *self.open.lock().unwrap() = true;
        self.opened.notify_all();
    }

    pub fn pass(&self) {
        let open = self.open.lock().unwrap();
        let (_open, late) = self.opened.wait_timeout_while(open, PATIENCE, |open| !*open).unwrap();
        assert!(!late.timed_out(), "what was waited for did not happen");
    }
}

/// What a worker did with a piece of guest memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Deed {
    /// Asked for its address: before it makes it present, and before it stores.
    Asked,
    /// Has cleared this many bytes.
    Cleared(u64),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    pub offset: u64,
    pub deed: Deed,
    /// The CPU it ran on.
    pub cpu: u32,
}

type Hook = Arc<dyn Fn(&Event) + Send + Sync>;

/// A dirty bitmap that keeps a log of what workers do (nobody else), and calls a hook each time.
#[derive(Clone)]
pub struct Witness {
    log: Arc<Mutex<Vec<Event>>>,
    hook: Hook,
    base: usize,
}

impl Witness {
    pub fn new(hook: impl Fn(&Event) + Send + Sync + 'static) -> Self {
        Self { log: Arc::default(), hook: Arc::new(hook), base: 0 }
    }

    pub fn log(&self) -> Vec<Event> {
        self.log.lock().unwrap().clone()
    }

    /// Offset, bytes and CPU of what was cleared, in the order of time.
    pub fn cleared(&self) -> Vec<(u64, u64, u32)> {
        let cleared = |event: Event| match event.deed {
            Deed::Cleared(bytes) => Some((event.offset, bytes, event.cpu)),
            Deed::Asked => None,
        };
        self.log().into_iter().filter_map(cleared).collect()
    }

    fn note(&self, offset: usize, deed: Deed) {
        if !std::thread::current().name().is_some_and(|name| name.starts_with("vmz-")) {
            return;
        }
        // SAFETY: takes nothing and cannot fail on Linux.
        let cpu = unsafe { libc::sched_getcpu() } as u32;
        let event = Event { offset: (self.base + offset) as u64, deed, cpu };
        self.log.lock().unwrap().push(event.clone());
        (self.hook)(&event);
    }
}

impl fmt::Debug for Witness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Witness from {:#x}", self.base)
    }
}

impl WithBitmapSlice<'_> for Witness {
    type S = Self;
}

impl BitmapSlice for Witness {}

impl Bitmap for Witness {
    fn mark_dirty(&self, offset: usize, len: usize) {
        self.note(offset, Deed::Cleared(len as u64));
    }

    fn dirty_at(&self, _offset: usize) -> bool {
        false
    }

    fn slice_at(&self, offset: usize) -> Self {
        self.note(offset, Deed::Asked);
        Self { base: self.base + offset, ..self.clone() }
    }
}

/// Memory under a witness. Shared anonymous memory: nothing proves what its absent pages read, so workers
/// overwrite them, and place them by that.
pub fn witnessed(bytes: u64, witness: &Witness) -> Arc<GuestMemoryMmap<Witness>> {
    let region = MmapRegionBuilder::new_with_bitmap(bytes as usize, witness.clone())
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE)
        .build()
        .unwrap();
    let region = GuestRegionMmap::new(region, GuestAddress(0)).unwrap();
    Arc::new(GuestMemoryMmap::from_regions(vec![region]).unwrap())
}

/// A worker kept busy by a job of its own.
pub struct Busy {
    gate: Arc<Gate>,
    job: Job,
}

impl Busy {
    /// A job whose worker waits at this gate.
    pub fn new(gate: Arc<Gate>, job: Job) -> Self {
        Self { gate, job }
    }

    pub fn release(self) {
        self.gate.open();
        self.job.wait().unwrap();
    }
}

/// Keeps every worker of a service busy that has one on each node: by the node.
pub fn occupy(service: &ZeroingService) -> BTreeMap<NodeId, Busy> {
    let occupied = (0..service.workers()).map(|_| {
        let (gate, held) = (Arc::new(Gate::default()), Arc::new((Gate::default(), Mutex::new(0))));
        let witness = Witness::new({
            let (gate, held) = (Arc::clone(&gate), Arc::clone(&held));
            move |event| {
                if matches!(event.deed, Deed::Cleared(_)) {
                    *held.1.lock().unwrap() = event.cpu;
                    held.0.open();
                    gate.pass();
                }
            }
        });
        let memory = witnessed(PAGE, &witness);
        let job = service.zero(&memory, Intent::Teardown).unwrap();
        held.0.pass();
        let cpu = *held.1.lock().unwrap();
        (node_of_cpu(cpu), Busy { gate, job })
    });
    let occupied: BTreeMap<NodeId, Busy> = occupied.collect();
    assert_eq!(occupied.len(), service.workers(), "one on each node");
    occupied
}

/// Hugepages of 2 MiB on a node, as many as asked for; given back at the end.
pub struct NodeHugepages {
    file: String,
    before: String,
}

impl NodeHugepages {
    /// `None` where the node's number cannot be set (no root, no hugepages, no memory for them).
    pub fn set(node: NodeId, count: u64) -> Option<Self> {
        let file = format!("/sys/devices/system/node/node{}/hugepages/hugepages-2048kB/nr_hugepages", node.0);
        let before = fs::read_to_string(&file).ok()?;
        let guard = Self { file, before };
        fs::write(&guard.file, count.to_string()).ok()?;
        (fs::read_to_string(&guard.file).ok()?.trim() == count.to_string()).then_some(guard)
    }

    pub fn free(node: NodeId) -> u64 {
        let file =
            format!("/sys/devices/system/node/node{}/hugepages/hugepages-2048kB/free_hugepages", node.0);
        fs::read_to_string(file).unwrap().trim().parse().unwrap()
    }
}

impl Drop for NodeHugepages {
    fn drop(&mut self) {
        let _ = fs::write(&self.file, &self.before);
    }
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
pub fn run(mut child: Command) {
    let output = child.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    print!("{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.contains("1 passed"), "{child:?}: {}", output.status);
}

/// Whether this process was started by [`child`].
pub fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}
