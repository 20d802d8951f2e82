//! Bad input: an error value that names the thing and the remedy; never a panic, never a partial "ok".
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::hooked::{Answer, HookedMemory, hooked_memory};
use common::mapped::Mapped;
use common::{MIB, PAGE, Tree, all_zero, assert_exact, fill, is_pattern, outcome_at, service};
use vm_memory::bitmap::BS;
use vm_memory::guest_memory::{GuestMemorySliceIterator, Result as MemoryResult};
use vm_memory::{
    GuestAddress, GuestMemory, GuestMemoryError, GuestMemoryMmap, GuestMemoryRegion, GuestMemoryRegionBytes,
    GuestRegionCollection, MemoryRegionAddress, Permissions, VolatileSlice,
};
use vm_zeroing::{
    BuildError, Cause, CpuDescription, HostRange, HugepagePool, Intent, JobError, LeaseError, Method,
    MethodError, NodeId, NodePolicy, Outcome, PageSize, RequestError, Topology, TopologyError, Vendor,
    ZeroRequest, ZeroingService,
};

type Memory = GuestMemoryMmap<()>;

fn memory(len: u64) -> Arc<Memory> {
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), len as usize)]).unwrap();
    fill(&memory, 0, len);
    Arc::new(memory)
}

#[test]
fn ranges_outside_guest_memory() {
    let (service, memory) = (service(), memory(4 * PAGE));
    for (start, len, hole) in [(0, 4 * PAGE + 1, 4 * PAGE), (4 * PAGE, 1, 4 * PAGE), (1 << 40, PAGE, 1 << 40)]
    {
        let ranges = [(GuestAddress(start), len)];
        let error = service.submit(ZeroRequest::new(&memory).ranges(ranges)).unwrap_err();
        assert!(error.to_string().contains(&format!("{hole:#x}")), "{error}");
        let RequestError::NotGuestMemory { hole: named, .. } = error else { panic!("{error}") };
        assert_eq!(named, hole);
    }
    // Host ranges have no guest addresses.
    let mapped = Arc::new(Mapped::anonymous(PAGE));
    let request = ZeroRequest::host([mapped.host_range(0, PAGE)]).ranges([(GuestAddress(0), PAGE)]);
    assert!(matches!(service.submit(request), Err(RequestError::NotGuestMemory { .. })));
    assert!(is_pattern(&*memory, 0, 4 * PAGE), "nothing was touched");
}

#[test]
#[allow(unsafe_code)]
fn host_ranges_that_are_not_whole_pages() {
    let mapped = Arc::new(Mapped::anonymous(4 * PAGE));
    let base = mapped.base() as usize;
    for (offset, len) in [(1, PAGE), (0, PAGE + 1), (64, 64), (PAGE - 1, 1)] {
        let at = (base + offset as usize) as *mut u8;
        // SAFETY: inside a mapping that is kept alive; and the range is refused anyway.
        let error = unsafe { HostRange::new(at, len as usize, mapped.clone()) }.unwrap_err();
        let RequestError::Misaligned { start, len: named, alignment } = error else { panic!("{error}") };
        assert_eq!((start, named, alignment), (base as u64 + offset, len, PAGE));
    }
    let last_page = usize::MAX - PAGE as usize + 1;
    for len in [PAGE as usize, usize::MAX - PAGE as usize + 1] {
        // SAFETY: the range is refused; nobody stores there.
        let error = unsafe { HostRange::new(last_page as *mut u8, len, Arc::new(())) }.unwrap_err();
        assert!(
            matches!(error, RequestError::Overflow { start, .. } if start == last_page as u64),
            "{error}"
        );
    }
}

/// Memory behind an IOMMU that is in use: its addresses mean nothing to us.
#[derive(Debug, Clone)]
struct IommuView(Arc<Memory>);

impl GuestMemory for IommuView {
    type PhysicalMemory = Memory;
    type Bitmap = ();

    fn check_range(&self, addr: GuestAddress, count: usize, access: Permissions) -> bool {
        GuestMemory::check_range(&*self.0, addr, count, access)
    }

    fn get_slices<'a>(
        &'a self,
        addr: GuestAddress,
        count: usize,
        access: Permissions,
    ) -> MemoryResult<impl GuestMemorySliceIterator<'a, BS<'a, ()>>> {
        GuestMemory::get_slices(&*self.0, addr, count, access)
    }
}

#[test]
fn an_iommu_view() {
    let physical = memory(PAGE);
    let view = Arc::new(IommuView(Arc::clone(&physical)));
    let service = service();
    let error = service.zero(&view, Intent::Teardown).unwrap_err();
    assert!(matches!(error, RequestError::IommuView), "{error}");
    let request = ZeroRequest::new(&view).ranges([(GuestAddress(0), 1)]);
    assert!(matches!(service.submit(request), Err(RequestError::IommuView)));
    assert!(is_pattern(&*physical, 0, PAGE));
    all_zero(&service.zero(&physical, Intent::Teardown).unwrap());
}

/// A region of guest_memfd: it has addresses for the guest, and none for the host.
struct Private(u64);

impl GuestMemoryRegion for Private {
    type B = ();

    fn len(&self) -> u64 {
        PAGE
    }

    fn start_addr(&self) -> GuestAddress {
        GuestAddress(self.0)
    }

    fn bitmap(&self) {}

    fn get_slice(&self, _: MemoryRegionAddress, _: usize) -> MemoryResult<VolatileSlice<'_, ()>> {
        Err(GuestMemoryError::HostAddressNotAvailable)
    }
}

impl GuestMemoryRegionBytes for Private {}

#[test]
fn a_region_without_host_address() {
    let regions = vec![Private(0), Private(0x8000)];
    let memory = Arc::new(GuestRegionCollection::from_regions(regions).unwrap());
    let service = service();
    let error = service.zero(&memory, Intent::Boot).unwrap_err();
    assert!(matches!(error, RequestError::NoHostAddress { address: 0 }), "{error}");
    let request = ZeroRequest::new(&memory).ranges([(GuestAddress(0x8010), 1)]);
    let error = service.submit(request).unwrap_err();
    assert!(matches!(error, RequestError::NoHostAddress { address: 0x8010 }), "{error}");
}

/// Memory objects that hand out less than was asked, or nothing, only when the job runs.
fn assert_no_host_address(memory: &Arc<HookedMemory>, len: u64, bad: (u64, u64)) {
    fill(&**memory, 0, len);
    let error = service().zero(memory, Intent::Teardown).unwrap().wait().unwrap_err();
    let report = error.report().unwrap();
    assert_exact(&**memory, report, &[(0, len)]);
    for range in &report.ranges {
        let is_bad = bad.0 <= range.start && range.start + range.len <= bad.0 + bad.1;
        let expected = if is_bad { Outcome::Failed(Cause::NoHostAddress) } else { Outcome::Erased };
        assert_eq!(range.outcome, expected, "{range:?}");
    }
    assert!(is_pattern(&**memory, bad.0, bad.1), "nothing is stored where nothing is claimed");
    assert_eq!(report.erased_bytes, len - bad.1);
    let JobError::Failed { start, cause, .. } = error else { panic!("{error}") };
    assert!(bad.0 <= start && start < bad.0 + bad.1);
    assert_eq!(cause, Cause::NoHostAddress);
}

#[test]
fn a_slice_that_is_too_short() {
    let len = 9 * MIB;
    for missing in [1, 100, PAGE as usize - 1] {
        assert_no_host_address(
            &hooked_memory(len, move |_, asked| Answer::Short(asked - missing)),
            len,
            (0, len),
        );
    }
    assert_no_host_address(&hooked_memory(len, |_, _| Answer::Short(0)), len, (0, len));
    // Only one page of it: the rest is cleared, and the bad page is named exactly.
    let bad = 5 * MIB + 3 * PAGE;
    let short =
        hooked_memory(len, move |offset, asked| match (offset..offset + asked as u64).contains(&bad) {
            true => Answer::Short(asked - 1),
            false => Answer::AsAsked,
        });
    assert_no_host_address(&short, len, (bad, PAGE));
}

#[test]
fn a_slice_that_is_refused_or_too_long() {
    let len = 9 * MIB;
    let bad = 4 * MIB - PAGE;
    let refused =
        hooked_memory(len, move |offset, asked| match (offset..offset + asked as u64).contains(&bad) {
            true => Answer::Refused,
            false => Answer::AsAsked,
        });
    assert_no_host_address(&refused, len, (bad, PAGE));
    let long = hooked_memory(len, |offset, asked| match offset + asked as u64 {
        end if end < 9 * MIB => Answer::Short(asked + 1),
        _ => Answer::Short(asked - 1),
    });
    assert_no_host_address(&long, len, (0, len));
}

#[test]
fn method_names() {
    for method in Method::ALL {
        assert_eq!(method.name().to_uppercase().parse::<Method>().unwrap(), method);
    }
    for junk in ["", "memset", "avx", "avx 2", "clzero ", "rep_stosb"] {
        let error = junk.parse::<Method>().unwrap_err();
        assert!(error.to_string().contains("clzero"), "names what there is: {error}");
        let MethodError::Unknown { asked, known } = error else { panic!("{error}") };
        assert_eq!((asked.as_str(), known.split(", ").count()), (junk, Method::ALL.len()));
    }
}

#[test]
fn methods_that_this_cpu_lacks() {
    let offered = CpuDescription::detect().methods();
    let lacking: Vec<Method> = Method::ALL.into_iter().filter(|method| !offered.contains(method)).collect();
    println!("this CPU lacks {lacking:?}");
    // Not even one that claims everything makes the real CPU have them.
    let mut boast = CpuDescription::detect();
    boast.vendor = Vendor::Amd;
    (boast.clzero, boast.movdir64b, boast.avx2, boast.avx512f) = (true, true, true, true);
    (boast.osxsave, boast.xcr0) = (true, u64::MAX);
    for method in lacking {
        for builder in [ZeroingService::builder(), ZeroingService::builder().cpu(boast.clone())] {
            let error = builder.method(method).build().unwrap_err();
            let BuildError::Method(MethodError::Unavailable { asked, reason, offered: named }) = error else {
                panic!("{error}")
            };
            assert_eq!(asked, method);
            assert!(!reason.is_empty());
            for method in &offered {
                assert!(named.split(", ").any(|name| name == method.name()), "{named} lacks {method}");
            }
        }
    }
    // And a description takes away what the real CPU has.
    let bare = ZeroingService::builder().cpu(CpuDescription::bare()).method(Method::Avx2);
    assert!(matches!(
        bare.build(),
        Err(BuildError::Method(MethodError::Unavailable { asked: Method::Avx2, .. }))
    ));
}

#[test]
fn an_unreadable_sysfs() {
    let tree = Tree::new();
    tree.file("sys/devices/system/cpu/online", "0-1");
    tree.file("sys/devices/system/node/node0/cpulist", "0-1");
    assert!(Topology::read(&tree.0).is_ok());
    tree.file("sys/devices/system/node/node0/cpulist", "zero and one");
    let error = Topology::read(&tree.0).unwrap_err();
    let TopologyError::Malformed { path, found, .. } = &error else { panic!("{error}") };
    assert!(path.ends_with("node0/cpulist") && found.contains("zero and one"), "{error}");
    // A folder where a file should be cannot be read.
    std::fs::remove_file(tree.0.join("sys/devices/system/node/node0/cpulist")).unwrap();
    std::fs::create_dir(tree.0.join("sys/devices/system/node/node0/cpulist")).unwrap();
    let error = Topology::read(&tree.0).unwrap_err();
    assert!(matches!(&error, TopologyError::Unreadable { path, .. } if path.ends_with("cpulist")), "{error}");
    let error = Topology::read(&tree.0.join("nowhere")).unwrap_err();
    assert!(matches!(&error, TopologyError::NoCpu { .. }), "{error}");
}

#[test]
fn absurd_settings() {
    let error = ZeroingService::builder().chunk(0).build().unwrap_err();
    assert!(matches!(error, BuildError::NoChunk) && error.to_string().contains("0 bytes"), "{error}");
    let none = ZeroingService::builder().workers_per_node(0).build().unwrap();
    assert_eq!((none.workers(), none.threads().len()), (0, 0), "the caller's thread does it all");
    let many = ZeroingService::builder().workers_per_node(usize::MAX).build().unwrap();
    assert!((1..=common::allowed_cpus().len()).contains(&many.workers()));
    // No CPU at all: of nobody's, and of none that is there.
    let topology = common::one_node();
    for cpus in [&[][..], &[60_000]] {
        let error = topology.clone().restrict_cpus(cpus).unwrap_err();
        let TopologyError::NoAllowedCpu { allowed, .. } = &error else { panic!("{error}") };
        assert_eq!(allowed, cpus);
    }
    // A node that nobody has: no pool on it, and no lease from it.
    let service = service();
    let pool = |node| HugepagePool::builder(&service).page_size(PageSize::Base).capacity(node, MIB).build();
    let error = pool(NodeId(77)).unwrap_err();
    assert!(error.to_string().contains("77"), "{error}");
    let node = service.topology().default_memory_nodes()[0];
    for policy in [NodePolicy::Strict(NodeId(77)), NodePolicy::Prefer(NodeId(77))] {
        let error = pool(node).unwrap().lease(MIB, policy).unwrap_err();
        assert!(matches!(&error, LeaseError::NoMemoryOn { node: NodeId(77), .. }), "{error}");
    }
}

/// Runs `body` in a forked child; 0 if it says yes, 1 if no. The child allocates nothing that matters and ends by `_exit`.
#[allow(unsafe_code)]
fn in_forked_child(body: impl FnOnce() -> bool) -> i32 {
    // SAFETY: the child runs one closure of the test and leaves by `_exit`: no destructor, no test harness.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let good = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
        // SAFETY: ends the child at once.
        unsafe {
            libc::_exit(match good {
                Ok(true) => 0,
                Ok(false) => 1,
                Err(_) => 2,
            })
        };
    }
    let mut status = 0;
    // SAFETY: our own child; the status outlives the call.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { -1 }
}

#[test]
fn a_forked_child_cannot_submit_or_wait() {
    let (service, memory) = (service(), memory(4 * PAGE));
    let gate = common::hooked::Gate::after(0);
    let held_up = hooked_memory(PAGE, gate.hook());
    let over = service.submit(ZeroRequest::new(&memory).ranges([])).unwrap();
    all_zero(&over);
    let job = service.zero(&held_up, Intent::Teardown).unwrap();
    gate.wait_for_somebody();
    let parent = std::process::id();
    // In the child the same bytes are its own copy of the service.
    let mut service = Some(service);
    let status = in_forked_child(|| {
        let own = std::process::id();
        let refused = match service.as_ref().unwrap().zero(&memory, Intent::Teardown) {
            Err(RequestError::ForkedChild { built_in, called_in }) => (built_in, called_in) == (parent, own),
            _ => false,
        };
        // None of these waits for threads that are not here, or ends the parent's job.
        job.cancel();
        let is_forked = |error| matches!(error, JobError::ForkedChild { submitted_in, waited_in } if (submitted_in, waited_in) == (parent, own));
        let waits =
            [job.wait_timeout(Duration::from_secs(3600)), job.wait_timeout(Duration::MAX), Some(job.wait())];
        let waits = waits.into_iter().all(|result| result.is_some_and(|result| result.is_err_and(is_forked)));
        // It would be silent for ever.
        let silent = job.completion_fd().is_err_and(|error| {
            let source = error.into_inner().and_then(|source| source.downcast::<JobError>().ok());
            source.is_some_and(|source| is_forked(*source))
        });
        drop(job.clone());
        let none = service.as_ref().is_some_and(|service| service.threads().is_empty());
        service.as_ref().unwrap().set_background_rate(Some(1));
        drop(service.take());
        // What was over before the fork can be told.
        refused
            && waits
            && silent
            && common::readable(over.completion_fd().unwrap(), 0)
            && none
            && over.wait().is_ok()
            && over.wait_timeout(Duration::ZERO).is_some_and(|over| over.is_ok())
    });
    assert_eq!(status, 0);
    // What the child did to its copy of the job does not reach the parent's.
    assert!(!common::readable(job.completion_fd().unwrap(), 0), "a child ended its parent's job");
    gate.open();
    all_zero(&job);
    assert!(is_pattern(&*memory, 0, 4 * PAGE));
    drop(service);
}

#[test]
fn a_deadline_in_the_past() {
    let (service, memory) = (service(), memory(9 * MIB));
    for deadline in
        [Instant::now(), Instant::now().checked_sub(Duration::from_secs(5)).unwrap_or_else(Instant::now)]
    {
        let error = service.submit(ZeroRequest::new(&memory).deadline(deadline)).unwrap().wait().unwrap_err();
        let JobError::DeadlinePassed { report } = &error else { panic!("{error}") };
        assert_exact(&*memory, report, &[(0, 9 * MIB)]);
        assert_eq!(report.zero_bytes(), 0);
        assert!(is_pattern(&*memory, 0, 9 * MIB));
    }
    let far = Instant::now() + Duration::from_secs(86_400 * 365);
    all_zero(&service.submit(ZeroRequest::new(&memory).deadline(far)).unwrap());
}

#[test]
fn cancelling_and_waiting_twice() {
    let (service, memory) = (service(), memory(9 * MIB));
    let job = service.zero(&memory, Intent::Teardown).unwrap();
    let first = all_zero(&job);
    // Over is over.
    job.cancel();
    job.cancel();
    assert_eq!(*all_zero(&job), *first);
    assert_eq!(*all_zero(&job.clone()), *first);
    assert_eq!(*job.wait_timeout(Duration::ZERO).unwrap().unwrap(), *first);

    let gate = common::hooked::Gate::after(0);
    let held_up = hooked_memory(PAGE, gate.hook());
    let job = service.zero(&held_up, Intent::Teardown).unwrap();
    gate.wait_for_somebody();
    assert!(job.wait_timeout(Duration::ZERO).is_none(), "not over");
    job.cancel();
    job.clone().cancel();
    gate.open();
    let errors = [job.wait().unwrap_err(), job.clone().wait().unwrap_err()];
    for error in errors {
        assert!(matches!(&error, JobError::Cancelled { report } if report.ranges.len() == 1), "{error}");
        assert_eq!(outcome_at(error.report().unwrap(), 0), &Outcome::Untouched);
    }
}

#[test]
fn waiting_after_the_service_is_gone() {
    let memory = memory(MIB);
    let service = service();
    let job = service.zero(&memory, Intent::Teardown).unwrap();
    all_zero(&job);
    drop(service);
    all_zero(&job);
    job.cancel();
    all_zero(&job);
}
