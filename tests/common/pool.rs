//! What the tests of pools, leases and slots share: small pools, bytes of leased memory, addresses that may
//! hold nothing, and a gate that keeps every worker of a service busy.
#![allow(
    dead_code,
    unsafe_code,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "helpers of tests are tests, and each test file uses its share of them"
)]

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use vm_memory::bitmap::{BS, Bitmap};
use vm_memory::{
    Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryError, GuestMemoryRegion, GuestMemoryRegionBytes,
    GuestRegionMmap, GuestUsize, MemoryRegionAddress, VolatileSlice,
};
use vm_zeroing::{
    HugepagePool, Intent, Job, Lease, LeasedMemory, NodeId, NodePolicy, PageSize, Topology, ZeroingService,
};

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;

/// One test of the binary at a time: for those that look at what else the process has, or has no more.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn service() -> ZeroingService {
    ZeroingService::builder().small_job(0).build().unwrap()
}

/// The node whose memory the tests take.
pub fn node(service: &ZeroingService) -> NodeId {
    service.topology().default_memory_nodes()[0]
}

/// A pool of base pages.
pub fn pool(service: &ZeroingService, slabs: u64, slab_bytes: u64) -> HugepagePool {
    let builder = HugepagePool::builder(service).page_size(PageSize::Base);
    builder.capacity(node(service), slabs * slab_bytes).slab_bytes(slab_bytes).build().unwrap()
}

pub fn lease(pool: &HugepagePool, bytes: u64) -> Lease {
    pool.lease(bytes, NodePolicy::Any).unwrap()
}

/// A lease as guest memory from guest address 0 on.
pub fn memory(pool: &HugepagePool, bytes: u64) -> LeasedMemory {
    lease(pool, bytes).into_memory([(GuestAddress(0), bytes)]).unwrap()
}

/// Writes a byte everywhere.
pub fn fill(memory: &impl GuestMemoryBackend, byte: u8) {
    let block = vec![byte; MIB as usize];
    for region in memory.iter() {
        for at in (0..region.len()).step_by(block.len()) {
            let len = (region.len() - at).min(MIB) as usize;
            memory.write_slice(&block[..len], GuestAddress(region.start_addr().0 + at)).unwrap();
        }
    }
}

/// Whether every byte is `byte`, read through the mapping.
pub fn is_all(memory: &impl GuestMemoryBackend, byte: u8) -> bool {
    let (expected, mut found) = (vec![byte; MIB as usize], vec![!byte; MIB as usize]);
    memory.iter().all(|region| {
        (0..region.len()).step_by(MIB as usize).all(|at| {
            let len = (region.len() - at).min(MIB) as usize;
            memory.read_slice(&mut found[..len], GuestAddress(region.start_addr().0 + at)).unwrap();
            found[..len] == expected[..len]
        })
    })
}

/// Whether every byte of the files behind the memory is zero, read by descriptor: the mapping plays no part.
pub fn files_are_zero(memory: &impl GuestMemoryBackend) -> bool {
    let (zeros, mut found) = (vec![0; MIB as usize], vec![1; MIB as usize]);
    memory.iter().all(|region| {
        let file = region.file_offset().expect("leased memory has files");
        (0..region.len()).step_by(MIB as usize).all(|at| {
            let len = (region.len() - at).min(MIB) as usize;
            file.file().read_exact_at(&mut found[..len], file.start() + at).unwrap();
            found[..len] == zeros[..len]
        })
    })
}

/// (inode, offset, length) of every region.
pub fn pieces(memory: &impl GuestMemoryBackend) -> Vec<(u64, u64, u64)> {
    memory
        .iter()
        .map(|region| {
            let file = region.file_offset().expect("leased memory has files");
            (file.file().metadata().unwrap().ino(), file.start(), region.len())
        })
        .collect()
}

/// Host addresses of every region.
pub fn hosts(memory: &impl GuestMemoryBackend) -> Vec<Range<u64>> {
    let address = |region: &dyn Fn() -> *mut u8| region() as u64;
    memory
        .iter()
        .map(|region| {
            let start = address(&|| region.get_host_address(MemoryRegionAddress(0)).unwrap());
            start..start + region.len()
        })
        .collect()
}

/// A machine of two nodes, the second of which this one need not have.
pub fn two_nodes() -> Topology {
    let root = std::env::temp_dir().join(format!("vm-zeroing-two-nodes-{}", std::process::id()));
    let write = |path: &str, text: &str| {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    let cpu = Topology::detect()
        .unwrap()
        .nodes()
        .iter()
        .find_map(|node| node.allowed_cpus().first().copied())
        .unwrap();
    write("sys/devices/system/cpu/online", &format!("{cpu}\n"));
    write("sys/devices/system/node/online", "0-1\n");
    write("sys/devices/system/node/node0/cpulist", &format!("{cpu}\n"));
    write("sys/devices/system/node/node1/cpulist", "\n");
    let topology = Topology::read(&root).unwrap();
    std::fs::remove_dir_all(root).unwrap();
    assert_eq!(topology.nodes().len(), 2);
    topology
}

/// Where the pool itself has the slabs of this memory mapped, in the order of their addresses.
pub fn pools_own_mappings(memory: &impl GuestMemoryBackend) -> Vec<Range<u64>> {
    let inodes: BTreeSet<String> = pieces(memory).iter().map(|piece| piece.0.to_string()).collect();
    let lent = hosts(memory);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let found = maps.lines().filter_map(|line| {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let (start, end) = words[0].split_once('-')?;
        let range = u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?;
        let is_of_slab = line.contains("vm-zeroing-slab") && inodes.contains(words[4]);
        (is_of_slab && !lent.contains(&range)).then_some(range)
    });
    let found: Vec<_> = found.collect();
    assert_eq!(found.len(), inodes.len());
    found
}

/// Whether the first and last byte of the range can be read, without touching them ourselves: the kernel
/// copies them into a pipe, or answers EFAULT.
pub fn is_readable(range: &Range<u64>) -> bool {
    let answers = [range.start, range.end - 1].map(|address| {
        let (reader, writer) = io::pipe().unwrap();
        use std::os::fd::AsRawFd;
        // SAFETY: write(2) reads one byte at the address if it is there, and answers EFAULT if not.
        let wrote = unsafe { libc::write(writer.as_raw_fd(), address as *const libc::c_void, 1) };
        drop(reader);
        match wrote {
            1 => true,
            _ => {
                assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::EFAULT));
                false
            }
        }
    });
    assert_eq!(answers[0], answers[1], "half of {range:x?} is there");
    answers[0]
}

/// The permissions ("rw-s", "---p") of the mapping that holds an address; `None` where nothing is mapped.
pub fn permissions_at(address: u64) -> Option<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
        (start <= address && address < end).then(|| words.next().unwrap().to_owned())
    })
}

/// Hugepages taken from the host for a test, and given back.
#[derive(Debug)]
pub struct Hugepages {
    pub page: u64,
    /// How many the host was given.
    added: u64,
    /// One test at a time changes the host's numbers, whichever binary it is in.
    _lock: File,
}

impl Hugepages {
    /// The host's hugepages of this size to oneself, `pages` of them free at least; says aloud why not.
    pub fn reserve(page: u64, pages: u64) -> Option<Self> {
        let path = std::env::temp_dir().join("vm-zeroing-hugepages.lock");
        let lock = OpenOptions::new().create(true).append(true).open(path);
        let lock = match lock.and_then(|file| file.lock().map(|()| file)) {
            Ok(lock) => lock,
            Err(error) => {
                println!("skipped: no lock for the host's hugepages: {error}");
                return None;
            }
        };
        let mut taken = Self { page, added: 0, _lock: lock };
        let Some(before) = taken.read("nr_hugepages") else {
            println!("skipped: this kernel has no hugepages of {page} bytes");
            return None;
        };
        if taken.available() < pages {
            if let Err(error) = taken.write(before + pages) {
                println!("skipped: cannot reserve {pages} hugepages of {page} bytes (root can): {error}");
                return None;
            }
            taken.added = taken.read("nr_hugepages").unwrap_or(before).saturating_sub(before);
        }
        if taken.available() < pages {
            println!("skipped: the host has no {pages} hugepages of {page} bytes to spare");
            return None;
        }
        Some(taken)
    }

    /// Pages that are neither used nor reserved.
    pub fn available(&self) -> u64 {
        let read = |name| self.read(name).unwrap_or(0);
        read("free_hugepages").saturating_sub(read("resv_hugepages"))
    }

    /// How many there are in all: others on the machine may change it.
    pub fn total(&self) -> u64 {
        self.read("nr_hugepages").unwrap_or(0)
    }

    fn file(&self, name: &str) -> String {
        format!("/sys/kernel/mm/hugepages/hugepages-{}kB/{name}", self.page / KIB)
    }

    fn read(&self, name: &str) -> Option<u64> {
        std::fs::read_to_string(self.file(name)).ok()?.trim().parse().ok()
    }

    fn write(&self, pages: u64) -> io::Result<()> {
        std::fs::write(self.file("nr_hugepages"), pages.to_string())
    }
}

impl Drop for Hugepages {
    fn drop(&mut self) {
        if self.added > 0 {
            let _ = self.write(self.total().saturating_sub(self.added));
        }
    }
}

/// Every worker of a service waits here until the gate opens: what is submitted meanwhile stays queued.
#[derive(Debug)]
pub struct Gate {
    state: Arc<GateState>,
    job: Job,
}

#[derive(Debug, Default)]
struct GateState {
    /// Workers that wait or have waited, and whether the gate is open.
    inner: Mutex<(usize, bool)>,
    changed: Condvar,
}

impl Gate {
    pub fn shut(service: &ZeroingService) -> Self {
        let state = Arc::new(GateState::default());
        let region = |number: u64| GateRegion {
            inner: GuestRegionMmap::from_range(GuestAddress(number * 4096), 4096, None).unwrap(),
            state: Arc::clone(&state),
        };
        let memory = Arc::new(GateMemory((0..service.workers() as u64).map(region).collect()));
        let job = service.zero(&memory, Intent::Teardown).unwrap();
        let mut inner = state.inner.lock().unwrap();
        while inner.0 < service.workers() {
            inner = state.changed.wait(inner).unwrap();
        }
        drop(inner);
        Self { state, job }
    }

    /// Lets the workers go on; dropping the gate does too.
    pub fn open(&self) {
        self.state.inner.lock().unwrap().1 = true;
        self.state.changed.notify_all();
    }

    pub fn job(&self) -> &Job {
        &self.job
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.open();
    }
}

/// One page a worker.
#[derive(Debug)]
struct GateMemory(Vec<GateRegion>);

#[derive(Debug)]
struct GateRegion {
    inner: GuestRegionMmap,
    state: Arc<GateState>,
}

impl GuestMemoryRegion for GateRegion {
    type B = ();

    fn len(&self) -> GuestUsize {
        self.inner.len()
    }

    fn start_addr(&self) -> GuestAddress {
        self.inner.start_addr()
    }

    fn bitmap(&self) -> BS<'_, ()> {
        ().slice_at(0)
    }

    fn get_slice(
        &self,
        offset: MemoryRegionAddress,
        count: usize,
    ) -> Result<VolatileSlice<'_, BS<'_, ()>>, GuestMemoryError> {
        // Submitting looks at the first byte; a worker asks for all of it.
        if count == 4096 {
            let mut inner = self.state.inner.lock().unwrap();
            inner.0 += 1;
            self.state.changed.notify_all();
            while !inner.1 {
                inner = self.state.changed.wait(inner).unwrap();
            }
        }
        self.inner.get_slice(offset, count)
    }
}

impl GuestMemoryRegionBytes for GateRegion {}

impl GuestMemoryBackend for GateMemory {
    type R = GateRegion;

    fn iter(&self) -> impl Iterator<Item = &Self::R> {
        self.0.iter()
    }
}
