//! Building pools: hugepages of both sizes, what is said when the host lacks them, and how private the memory is.
#![allow(
    unsafe_code,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "tests; fcntl"
)]

#[path = "common/pool.rs"]
mod common;

use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

use common::*;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};
use vm_zeroing::{
    HugepagePool, LeaseError, NodeId, NodePolicy, PageSize, PageState, PoolError, Quiesced, ZeroingService,
};

const HUGE: u64 = 2 * MIB;
const SLAB: u64 = 64 * KIB;

#[test]
fn hugepages_are_lent_zeroed_and_lent_again() {
    let Some(host) = Hugepages::reserve(HUGE, 8) else { return };
    let (service, before) = (service(), host.available());
    let node = node(&service);
    let builder = HugepagePool::builder(&service).page_size(PageSize::Huge2M);
    let pool = builder.capacity(node, 8 * HUGE).slab_bytes(2 * HUGE).build().unwrap();
    assert!(pool.is_hugetlb());
    assert_eq!((pool.page_bytes(), host.available()), (HUGE, before - 8), "present from the beginning");
    let mut same = None;
    for _ in 0..3 {
        // Two and a half slabs, around a hole.
        let layout = [(GuestAddress(0), 3 * HUGE), (GuestAddress(4 * GIB), 2 * HUGE)];
        let memory = lease(&pool, 5 * HUGE).into_memory::<()>(layout).unwrap();
        assert!(is_all(&memory, 0) && files_are_zero(&memory));
        let pieces = pieces(&memory);
        assert_eq!(*same.get_or_insert_with(|| pieces.clone()), pieces);
        assert!(memory.iter().all(|region| region.is_hugetlbfs() == Some(true)));
        assert!(hosts(&memory).iter().all(|host| host.start.is_multiple_of(HUGE)));
        assert_eq!(
            memory.iter().next().unwrap().file_offset().unwrap().file().metadata().unwrap().blksize(),
            HUGE
        );
        fill(&memory, 0xd7);
        assert_eq!(host.available(), before - 8, "the lease maps the pool's pages and takes none");
        let (id, hosts) = (memory.lease(), hosts(&memory));
        let report = memory.recycle(Quiesced::on_callers_word()).unwrap().wait().unwrap();
        assert_eq!(report.erased_bytes, 6 * HUGE);
        assert!(hosts.iter().all(|host| !is_readable(host)));
        assert!(pool.vm_is_gone(id));
    }
    drop(pool);
    assert_eq!(host.available(), before, "the host has its pages back");
}

#[test]
fn a_page_of_a_gibibyte_that_is_half_zeroed_is_stale() {
    let Some(host) = Hugepages::reserve(GIB, 1) else { return };
    let (service, before) = (service(), host.available());
    let node = node(&service);
    let builder = HugepagePool::builder(&service).page_size(PageSize::Huge1G);
    let pool = builder.capacity(node, GIB).build().unwrap();
    assert_eq!(pool.page_bytes(), GIB);
    let mut cancelled = false;
    // A job may be over before it hears of the cancelling: not every time.
    for _ in 0..20 {
        let memory = memory(&pool, GIB);
        assert!(hosts(&memory)[0].start.is_multiple_of(GIB));
        for at in (0..GIB).step_by(MIB as usize) {
            memory.write_obj(0x6b_u8, GuestAddress(at + at % 4096)).unwrap();
        }
        let job = memory.recycle(Quiesced::on_callers_word()).unwrap();
        while job.progress().done_bytes == 0 {
            std::hint::spin_loop();
        }
        job.cancel();
        if let Err(error) = job.wait() {
            let zero = error.report().unwrap().zero_bytes();
            assert!(0 < zero && zero < GIB, "{error}");
            assert_eq!(pool.frames().state(0).unwrap(), PageState::Stale, "{zero} bytes are zero");
            assert!(matches!(
                pool.lease(GIB, NodePolicy::Any),
                Err(LeaseError::Exhausted { stale: GIB, .. })
            ));
            pool.zero_stale().unwrap().wait().unwrap();
            cancelled = true;
            break;
        }
    }
    assert!(cancelled, "no job could be cancelled in its middle");
    assert!(is_all(&memory(&pool, GIB), 0));
    drop(pool);
    assert_eq!(host.available(), before);
}

#[test]
fn too_few_hugepages_are_named_and_none_is_kept() {
    let Some(host) = Hugepages::reserve(HUGE, 4) else { return };
    let service = service();
    let node = node(&service);
    // Others on this machine may change the numbers while we look: then once more.
    for attempt in 0.. {
        let (total, free) = (host.total(), host.available());
        let needed = free + 8;
        // Slab after slab succeeds before the first one fails.
        let slab = HUGE * (needed / 16).max(1);
        let builder = HugepagePool::builder(&service).page_size(PageSize::Huge2M);
        let error = builder.capacity(node, needed * HUGE).slab_bytes(slab).build().unwrap_err();
        let after = host.available();
        let PoolError::NotEnoughHugepages { node: of, page, needed: asked, free: found, file } = &error
        else {
            panic!("{error}")
        };
        assert_eq!((*of, *page, *asked), (node, HUGE, needed));
        assert!(std::fs::metadata(file).is_ok() && file.contains("2048kB"), "{file}");
        assert!(error.to_string().contains(&format!("need {needed} pages")), "{error}");
        if host.total() != total && attempt < 10 {
            continue;
        }
        assert_eq!((*found, after), (free, free));
        break;
    }
}

#[test]
fn without_enough_hugepages_the_pool_uses_base_pages() {
    let Some(host) = Hugepages::reserve(HUGE, 4) else { return };
    let service = service();
    let node = node(&service);
    let pool = HugepagePool::builder(&service).capacity(node, 2 * HUGE).build().unwrap();
    assert!(pool.is_hugetlb(), "the host has enough");
    drop(pool);
    // Not made of hugepages.
    let pool = HugepagePool::builder(&service).capacity(node, HUGE + 4096).build().unwrap();
    assert!(!pool.is_hugetlb());
    assert!(is_all(&memory(&pool, HUGE + 4096), 0));
    drop(pool);
    if host.available() < 512 {
        let pages = host.available() + 4;
        let pool = HugepagePool::builder(&service).capacity(node, pages * HUGE).build().unwrap();
        assert!(!pool.is_hugetlb());
    } else {
        println!("skipped in part: too many free hugepages to ask for more as base pages");
    }
}

#[test]
fn what_cannot_be_built_is_an_error_by_name() {
    let service = service();
    let (node, page) = (node(&service), PageSize::Base.bytes());
    let refuse = |size, set: fn(vm_zeroing::HugepagePoolBuilder, NodeId) -> _| {
        let builder: vm_zeroing::HugepagePoolBuilder =
            set(HugepagePool::builder(&service).page_size(size), node);
        builder.build().unwrap_err()
    };
    let base = PageSize::Base;
    assert!(matches!(refuse(base, |builder, _| builder), PoolError::NoCapacity));
    assert!(matches!(refuse(base, |builder, node| builder.capacity(node, 0)), PoolError::NoCapacity));
    let error = refuse(base, |builder, node| builder.capacity(node, 8192).capacity(NodeId(1022), 4096));
    assert!(
        matches!(&error, PoolError::UnknownNode { node: NodeId(1022), known } if known.contains(&node)),
        "{error}"
    );
    let error = refuse(base, |builder, node| builder.capacity(node, 4097));
    assert!(matches!(error, PoolError::NotWholePages { bytes: 4097, page: p } if p == page), "{error}");
    let error = refuse(base, |builder, node| builder.capacity(node, 65536).slab_bytes(5000));
    assert!(matches!(error, PoolError::NotWholePages { bytes: 5000, .. }), "{error}");
    let offers =
        |page: u64| std::fs::metadata(format!("/sys/kernel/mm/hugepages/hugepages-{}kB", page / KIB)).is_ok();
    for (size, bytes) in [(PageSize::Huge2M, HUGE), (PageSize::Huge1G, GIB)] {
        if offers(bytes) {
            let error = refuse(size, |builder, node| builder.capacity(node, MIB));
            assert!(
                matches!(error, PoolError::NotWholePages { bytes: MIB, page } if page == bytes),
                "{error}"
            );
        } else {
            let error = refuse(size, |builder, node| builder.capacity(node, GIB));
            assert!(
                matches!(&error, PoolError::NoSuchPageSize { asked, offered } if *asked == bytes && !offered.contains(asked)),
                "{error}"
            );
        }
    }
    // More base pages than there are: an error, and not the out-of-memory killer.
    for bytes in [1 << 50, u64::MAX - 4095] {
        let builder = HugepagePool::builder(&service).page_size(base).capacity(node, bytes);
        let error = builder.build().unwrap_err();
        assert!(
            matches!(error, PoolError::NotEnoughMemory { needed, total, .. } if needed == bytes && total < bytes)
                || matches!(error, PoolError::System { .. }),
            "{error}"
        );
    }
    // An unused setting is no hindrance.
    let builder = HugepagePool::builder(&service).page_size(base).capacity(NodeId(1022), 0);
    let pool = builder.capacity(node, 3 * page).slab_bytes(0).build();
    match pool {
        Ok(pool) => assert_eq!(pool.usage(node).zero_bytes, 3 * page),
        Err(error) => assert!(matches!(error, PoolError::UnknownNode { .. }), "{error}"),
    }
}

#[test]
fn capacities_that_do_not_add_up_are_an_error() {
    let service = ZeroingService::builder().topology(two_nodes()).build().unwrap();
    let builder = HugepagePool::builder(&service).page_size(PageSize::Base);
    let error = builder.capacity(NodeId(0), SLAB).capacity(NodeId(1), u64::MAX - 4095).build().unwrap_err();
    assert!(matches!(error, PoolError::NotEnoughMemory { node: NodeId(1), .. }), "{error}");
}

/// The flags of every mapping of a pool's files, from /proc/self/smaps, with the inode.
fn flags_of_slabs() -> Vec<(u64, String)> {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut inode = None;
    let mut found = Vec::new();
    for line in smaps.lines() {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            found.extend(inode.take().map(|inode| (inode, format!(" {} ", flags.trim()))));
        } else if words.len() >= 5 && words[0].contains('-') {
            inode = line.contains("vm-zeroing-slab").then(|| words[4].parse().unwrap());
        }
    }
    found
}

#[test]
fn files_are_sealed_and_mappings_are_private_to_the_process() {
    let service = service();
    let pool = pool(&service, 2, SLAB);
    let memory = memory(&pool, 2 * SLAB);
    let mut inodes = Vec::new();
    for region in memory.iter() {
        let file = region.file_offset().unwrap().file();
        // SAFETY: both commands take no memory.
        let (seals, flags) = unsafe {
            (libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS), libc::fcntl(file.as_raw_fd(), libc::F_GETFD))
        };
        let wanted = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        assert_eq!((seals & wanted, flags & libc::FD_CLOEXEC), (wanted, libc::FD_CLOEXEC));
        for len in [0, SLAB - 4096, SLAB + 4096] {
            assert_eq!(file.set_len(len).unwrap_err().raw_os_error(), Some(libc::EPERM), "{len}");
        }
        assert_eq!(file.metadata().unwrap().len(), SLAB);
        inodes.push(file.metadata().unwrap().ino());
    }
    let mappings: Vec<_> = flags_of_slabs().into_iter().filter(|(inode, _)| inodes.contains(inode)).collect();
    assert_eq!(mappings.len(), 4, "the pool's and the lease's mapping of both slabs: {mappings:?}");
    for (_, flags) in mappings {
        assert!(flags.contains(" dd ") && flags.contains(" dc "), "dumped or inherited: {flags}");
    }
}
