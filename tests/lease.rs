//! The life of a lease: lent zero, used, recycled, lent again; and every way it can go otherwise.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

#[path = "common/pool.rs"]
mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::*;
use vm_memory::bitmap::{AtomicBitmap, Bitmap};
use vm_memory::{
    Bytes, GuestAddress, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryBackend, GuestMemoryRegion,
};
use vm_zeroing::{
    Intent, JobError, LayoutError, LeaseError, LeasedMemory, NodeId, NodePolicy, PageState, Quiesced,
    RecycleError, RequestError,
};

const SLAB: u64 = 64 * KIB;

fn word() -> Quiesced {
    Quiesced::on_callers_word()
}

#[test]
fn the_next_lease_gets_the_same_pages_all_zero() {
    let service = service();
    let pool = pool(&service, 1, MIB);
    let node = node(&service);
    let mut before = None;
    for _ in 0..5 {
        let lease = lease(&pool, MIB);
        let id = lease.id();
        assert_eq!(lease.bytes(), MIB);
        let memory = lease.into_memory::<()>([(GuestAddress(0), MIB)]).unwrap();
        assert_eq!((memory.lease(), memory.bytes(), memory.page_size()), (id, MIB, pool.page_bytes()));
        assert!(is_all(&memory, 0) && files_are_zero(&memory));
        let pieces = pieces(&memory);
        assert_eq!(*before.get_or_insert_with(|| pieces.clone()), pieces, "other pages than before");
        fill(&memory, 0xa5);
        assert_eq!(pool.usage(node).leased_bytes, MIB);
        let report = memory.recycle(word()).unwrap().wait().unwrap();
        assert_eq!((report.erased_bytes, report.total_bytes), (MIB, MIB), "every byte was overwritten");
        assert_eq!(pool.usage(node).zero_bytes, MIB);
        assert!(pool.vm_is_gone(id));
    }
}

#[test]
fn a_piece_that_crosses_slabs_is_several_regions_at_adjacent_addresses() {
    let service = service();
    let pool = pool(&service, 4, SLAB);
    // One and a half slabs below the hole, two and a half above it.
    let (low, high) = (SLAB * 3 / 2, SLAB * 5 / 2);
    let layout = [(GuestAddress(0), low), (GuestAddress(4 * GIB), high)];
    let memory = lease(&pool, 4 * SLAB).into_memory::<()>(layout).unwrap();

    let guest: Vec<(u64, u64)> = memory.iter().map(|r| (r.start_addr().0, r.len())).collect();
    let half = SLAB / 2;
    let expected =
        [(0, SLAB), (SLAB, half), (4 * GIB, half), (4 * GIB + half, SLAB), (4 * GIB + half + SLAB, SLAB)];
    assert_eq!(guest, expected);
    assert_eq!(memory.num_regions(), 5);
    let offsets: Vec<u64> = pieces(&memory).iter().map(|piece| piece.1).collect();
    assert_eq!(offsets, [0, 0, half, 0, 0]);
    let inodes: Vec<u64> = pieces(&memory).iter().map(|piece| piece.0).collect();
    assert_eq!(inodes[1], inodes[2], "the second slab lies on both sides of the hole");
    let distinct: std::collections::BTreeSet<u64> = inodes.iter().copied().collect();
    assert_eq!(distinct.len(), 4);

    let hosts = hosts(&memory);
    assert_eq!(hosts[0].end, hosts[1].start);
    assert_eq!((hosts[2].end, hosts[3].end), (hosts[3].start, hosts[4].start));
    let whole: Vec<_> = memory.host_ranges().collect();
    assert_eq!(whole, [hosts[0].start..hosts[1].end, hosts[2].start..hosts[4].end]);

    // Every byte of the mapping is that byte of the region's file, and nothing is mapped twice.
    for (number, region) in memory.iter().enumerate() {
        let byte = number as u8 + 1;
        memory.write_slice(&vec![byte; region.len() as usize], region.start_addr()).unwrap();
    }
    for (number, region) in memory.iter().enumerate() {
        let file = region.file_offset().unwrap();
        let mut found = vec![0; region.len() as usize];
        std::os::unix::fs::FileExt::read_exact_at(file.file(), &mut found, file.start()).unwrap();
        assert!(found.iter().all(|byte| *byte == number as u8 + 1), "region {number}");
    }
    // Accesses run over the border of two slabs.
    let across = GuestAddress(4 * GIB + half - 4);
    memory.write_obj(0x1122_3344_5566_7788_u64, across).unwrap();
    assert_eq!(memory.read_obj::<u64>(across).unwrap(), 0x1122_3344_5566_7788);
    // The hole and what lies behind the end are not memory.
    for outside in [low, 4 * GIB - 1, 4 * GIB + high] {
        assert!(memory.find_region(GuestAddress(outside)).is_none(), "{outside:#x}");
        assert!(memory.write_obj(1u8, GuestAddress(outside)).is_err());
    }
    let last = memory.iter().last().unwrap();
    assert!(last.get_slice(vm_memory::MemoryRegionAddress(1), SLAB as usize).is_err());
    assert!(last.get_slice(vm_memory::MemoryRegionAddress(u64::MAX), 2).is_err());
    assert_eq!(last.is_hugetlbfs(), Some(false));

    memory.recycle(word()).unwrap().wait().unwrap();
    assert_eq!(pool.usage(node(&service)).zero_bytes, 4 * SLAB);
}

#[test]
fn leased_memory_is_an_ordinary_vm_memory_backend() {
    let service = service();
    let pool = pool(&service, 2, SLAB);
    let layout = [(GuestAddress(0), SLAB), (GuestAddress(GIB), SLAB)];
    let memory = lease(&pool, 2 * SLAB).into_memory::<AtomicBitmap>(layout).unwrap();
    let atomic = GuestMemoryAtomic::new(memory);
    let snapshot = atomic.memory();
    snapshot.store(7u32, GuestAddress(GIB + 0x2000), Ordering::Relaxed).unwrap();
    assert_eq!(snapshot.load::<u32>(GuestAddress(GIB + 0x2000), Ordering::Relaxed).unwrap(), 7);
    snapshot.write_slice(&[1; 16], GuestAddress(0xfff8)).unwrap_err();
    let dirty = |at: u64| {
        let region = snapshot.find_region(GuestAddress(at)).unwrap();
        region.bitmap().dirty_at((at - region.start_addr().0) as usize)
    };
    assert!(dirty(GIB + 0x2000) && dirty(GIB + 0x2fff) && !dirty(GIB + 0x3000) && !dirty(GIB + 0x1fff));
    assert!(!dirty(0x2000), "each region has a bitmap of its own");

    // A job of the service over it marks what it writes.
    service.zero(&atomic, Intent::Teardown).unwrap().wait().unwrap();
    assert!(dirty(0) && dirty(GIB + SLAB - 1));
    assert!(is_all(&*snapshot, 0));
    assert_eq!(snapshot.last_addr(), GuestAddress(GIB + SLAB - 1));
}

#[test]
fn clones_keep_the_lease_and_the_memory_comes_back_usable() {
    let service = service();
    let pool = pool(&service, 1, SLAB);
    let memory = memory(&pool, SLAB);
    let address = memory.host_ranges().next().unwrap();
    let (one, two) = (memory.clone(), memory.clone());
    let failure = memory.recycle(word()).unwrap_err();
    assert!(matches!(failure.error, RecycleError::StillMapped { others: 2 }), "{failure}");
    let memory = failure.memory.expect("the lease goes on");
    memory.write_obj(0x55u8, GuestAddress(9)).unwrap();
    assert_eq!(two.read_obj::<u8>(GuestAddress(9)).unwrap(), 0x55);
    assert!(is_readable(&address));
    assert_eq!(pool.usage(node(&service)).leased_bytes, SLAB);
    drop((one, two));
    memory.recycle(word()).unwrap().wait().unwrap();
    assert!(!is_readable(&address), "revoked");
    assert_eq!(permissions_at(address.start).as_deref(), Some("---p"), "and kept");
}

#[test]
fn an_arc_and_a_snapshot_are_holders() {
    let service = service();
    let pool = pool(&service, 1, SLAB);
    let atomic = GuestMemoryAtomic::new(memory(&pool, SLAB));
    let old = atomic.memory();
    let failure = (*old).clone().recycle(word()).unwrap_err();
    assert!(matches!(failure.error, RecycleError::StillMapped { others: 1 }), "{failure}");
    drop((failure, atomic));
    let memory = Arc::unwrap_or_clone(old.into_inner());
    memory.recycle(word()).unwrap().wait().unwrap();
}

#[test]
fn a_file_handle_is_a_holder() {
    let service = service();
    let pool = pool(&service, 2, SLAB);
    // Both slabs lie on both sides of a border.
    let layout = [(GuestAddress(0), SLAB / 2), (GuestAddress(GIB), SLAB), (GuestAddress(2 * GIB), SLAB / 2)];
    let memory = lease(&pool, 2 * SLAB).into_memory::<()>(layout).unwrap();
    let peer = memory.iter().last().unwrap().file_offset().unwrap().clone();
    let failure = memory.recycle(word()).unwrap_err();
    assert!(matches!(failure.error, RecycleError::StillMapped { others: 1 }), "{failure}");
    let memory = failure.memory.expect("the lease goes on");
    memory.write_obj(1u8, GuestAddress(0)).unwrap();
    drop(peer);
    memory.recycle(word()).unwrap().wait().unwrap();
}

#[test]
fn a_running_job_is_a_holder_and_a_finished_one_is_not() {
    let service = service();
    let pool = pool(&service, 1, SLAB);
    let memory = Arc::new(memory(&pool, SLAB));
    let gate = Gate::shut(&service);
    let job = service.zero(&memory, Intent::Teardown).unwrap();
    let failure = Arc::unwrap_or_clone(memory).recycle(word()).unwrap_err();
    assert!(matches!(failure.error, RecycleError::StillMapped { others: 1 }), "{failure}");
    gate.open();
    job.wait().unwrap();
    let memory = failure.memory.unwrap();
    memory.recycle(word()).unwrap().wait().unwrap();
    assert!(job.is_over(), "its handle is still here");
}

#[test]
fn dropped_memory_is_parked_until_it_is_reclaimed() {
    let service = service();
    let pool = pool(&service, 2, SLAB);
    let node = node(&service);
    let memory = memory(&pool, 2 * SLAB);
    let (id, host) = (memory.lease(), memory.host_ranges().next().unwrap());
    fill(&memory, 0x5a);
    drop(memory);
    assert_eq!((pool.parked(), pool.usage(node).parked_bytes), (vec![id], 2 * SLAB));
    assert!(!is_readable(&host), "a device that still has the address finds nothing");
    assert_eq!(permissions_at(host.start).as_deref(), Some("---p"));

    let error = pool.lease(SLAB, NodePolicy::Any).unwrap_err();
    let LeaseError::Exhausted { needed, zero, stale, parked, remedy, .. } = &error else { panic!("{error}") };
    assert_eq!((*needed, *zero, *stale, *parked), (SLAB, 0, 0, 2 * SLAB));
    assert!(remedy.contains("reclaim"), "{remedy}");
    // Zeroing what is stale leaves them alone: somebody may still write.
    assert_eq!(pool.zero_stale().unwrap().wait().unwrap().total_bytes, 0);
    assert_eq!(pool.parked(), [id]);

    let report = pool.reclaim(id, word()).unwrap().wait().unwrap();
    assert_eq!(report.erased_bytes, 2 * SLAB);
    let again = lease(&pool, 2 * SLAB).into_memory::<()>([(GuestAddress(0), 2 * SLAB)]).unwrap();
    assert!(is_all(&again, 0) && files_are_zero(&again));
    assert_ne!(again.host_ranges().next().unwrap(), host, "the VM is not said to be gone");
    assert!(matches!(pool.reclaim(id, word()), Err(RecycleError::NotParked { .. })), "only once");
    assert!(pool.vm_is_gone(id));
    assert!(!pool.vm_is_gone(id));
}

#[test]
fn a_lease_of_another_pool_is_nobody_here() {
    let service = service();
    let (one, two) = (pool(&service, 1, SLAB), pool(&service, 1, SLAB));
    let (first, second) = (memory(&one, SLAB), memory(&two, SLAB));
    let (own, foreign) = (first.lease(), second.lease());
    assert_ne!(own, foreign, "two pools gave the same number");
    let host = first.host_ranges().next().unwrap();
    drop((first, second));
    let error = one.reclaim(foreign, word()).unwrap_err();
    assert!(
        matches!(&error, RecycleError::NotParked { lease, parked } if *lease == foreign && *parked == [own]),
        "{error}"
    );
    assert!(!one.vm_is_gone(foreign));
    assert_eq!(permissions_at(host.start).as_deref(), Some("---p"));
    let live = one.reclaim(own, word()).unwrap();
    live.wait().unwrap();
}

#[test]
fn a_live_lease_is_neither_parked_nor_gone() {
    let service = service();
    let pool = pool(&service, 1, SLAB);
    let memory = memory(&pool, SLAB);
    assert!(matches!(pool.reclaim(memory.lease(), word()), Err(RecycleError::NotParked { .. })));
    assert!(!pool.vm_is_gone(memory.lease()));
    memory.write_obj(1u8, GuestAddress(0)).unwrap();
}

#[test]
fn an_unused_lease_goes_back_by_itself() {
    let service = service();
    let pool = pool(&service, 1, SLAB);
    let gate = Gate::shut(&service);
    drop(lease(&pool, SLAB));
    let usage = pool.usage(node(&service));
    assert_eq!((usage.zeroing_bytes, usage.parked_bytes), (SLAB, 0));
    gate.open();
    // A job behind it on the same workers: the workers are idle when both are over.
    while pool.usage(node(&service)).zeroing_bytes > 0 {
        std::thread::yield_now();
    }
    let _again = lease(&pool, SLAB);
}

#[test]
fn a_refused_layout_ends_the_lease_and_its_pages_come_back() {
    let service = service();
    let pool = pool(&service, 2, SLAB);
    let page = pool.page_bytes();
    let refuse = |layout: &[(u64, u64)]| {
        let layout = layout.iter().map(|&(guest, len)| (GuestAddress(guest), len));
        let error = lease(&pool, 2 * SLAB).into_memory::<()>(layout).unwrap_err();
        assert!(pool.parked().is_empty(), "nobody has ever seen the addresses: {error}");
        while pool.usage(node(&service)).zeroing_bytes > 0 {
            std::thread::yield_now();
        }
        assert_eq!(pool.usage(node(&service)).zero_bytes, 2 * SLAB, "{error}");
        error
    };
    let all = 2 * SLAB;
    assert!(matches!(refuse(&[]), LayoutError::WrongSum { laid_out: 0, leased } if leased == all));
    assert!(matches!(refuse(&[(0, SLAB)]), LayoutError::WrongSum { laid_out: SLAB, .. }));
    assert!(matches!(refuse(&[(0, all), (GIB, page)]), LayoutError::WrongSum { .. }));
    let half = page / 2;
    assert!(
        matches!(refuse(&[(0, all - half), (GIB, half)]), LayoutError::NotWholePages { guest: 0, page: p, .. } if p == page)
    );
    assert!(matches!(refuse(&[(half, all)]), LayoutError::NotWholePages { guest, .. } if guest == half));
    assert!(matches!(refuse(&[(0, all), (GIB, 0)]), LayoutError::NotWholePages { len: 0, .. }));
    let top = 0u64.wrapping_sub(SLAB);
    assert!(matches!(refuse(&[(0, SLAB), (top, SLAB)]), LayoutError::Overflow { guest, .. } if guest == top));
    assert!(matches!(refuse(&[(GIB, SLAB), (0, SLAB)]), LayoutError::Regions(_)), "not ascending");
    assert!(matches!(refuse(&[(0, SLAB), (page, SLAB)]), LayoutError::Regions(_)), "overlapping");
    // A length nobody has: the sum of the others wraps round to the lease's.
    assert!(matches!(
        refuse(&[(0, top), (top, SLAB), (GIB, all)]),
        LayoutError::Overflow { .. } | LayoutError::WrongSum { .. }
    ));
}

#[test]
fn leases_are_whole_pages_of_nodes_that_exist() {
    let service = service();
    let (pool, node) = (pool(&service, 2, SLAB), node(&service));
    let page = pool.page_bytes();
    for bytes in [0, 1, page - 1, page + 1, u64::MAX] {
        let error = pool.lease(bytes, NodePolicy::Any).unwrap_err();
        assert!(
            matches!(error, LeaseError::NotWholePages { bytes: b, page: p } if (b, p) == (bytes, page)),
            "{error}"
        );
    }
    let none = NodeId(1022);
    for policy in [NodePolicy::Strict(none), NodePolicy::Prefer(none)] {
        let error = pool.lease(page, policy).unwrap_err();
        assert!(
            matches!(&error, LeaseError::NoMemoryOn { node: n, known } if *n == none && *known == [node]),
            "{error}"
        );
    }
    for policy in [NodePolicy::Strict(node), NodePolicy::Prefer(node), NodePolicy::Any] {
        // More than there is, as much as 64 bits hold.
        let error = pool.lease(u64::MAX - page + 1, policy).unwrap_err();
        assert!(
            matches!(&error, LeaseError::Exhausted { zero, nodes, .. } if *zero == 2 * SLAB && *nodes == [node])
        );
        assert!(error.to_string().contains("capacity"), "{error}");
        // A lease of one page takes a slab, and no more.
        let small = pool.lease(page, policy).unwrap();
        assert_eq!(pool.usage(node).leased_bytes, SLAB);
        let memory = small.into_memory::<()>([(GuestAddress(0), page)]).unwrap();
        assert_eq!((memory.bytes(), memory.num_regions()), (page, 1));
        let report = memory.recycle(word()).unwrap().wait().unwrap();
        assert_eq!(report.erased_bytes, SLAB, "the whole slab is zeroed again");
    }
}

#[test]
fn what_is_being_zeroed_is_not_lent() {
    let service = service();
    let (pool, node) = (pool(&service, 4, SLAB), node(&service));
    let kept = memory(&pool, SLAB);
    let memory = memory(&pool, 2 * SLAB);
    fill(&memory, 1);
    let gate = Gate::shut(&service);
    let job = memory.recycle(word()).unwrap();
    let error = pool.lease(2 * SLAB, NodePolicy::Strict(node)).unwrap_err();
    let LeaseError::Exhausted { needed, nodes, zero, stale, leased, parked, quarantined, remedy } = &error
    else {
        panic!("{error}")
    };
    assert_eq!((*needed, *zero, *stale), (2 * SLAB, SLAB, 2 * SLAB));
    assert_eq!((*leased, *parked, *quarantined), (SLAB, 0, 0));
    assert_eq!(*nodes, [node]);
    assert!(remedy.contains("wait"), "{remedy}");
    let text = error.to_string();
    assert!(text.contains(&(2 * SLAB).to_string()) && text.contains(remedy), "{text}");
    let error = pool.lease(4 * SLAB, NodePolicy::Strict(node)).unwrap_err();
    assert!(matches!(error, LeaseError::Exhausted { remedy, .. } if remedy.contains("recycle")));
    // What is zero is lent meanwhile.
    let other = lease(&pool, SLAB);
    gate.open();
    job.wait().unwrap();
    let again = lease(&pool, 2 * SLAB).into_memory::<()>([(GuestAddress(0), 2 * SLAB)]).unwrap();
    assert!(is_all(&again, 0) && files_are_zero(&again));
    drop((kept, other));
}

#[test]
fn a_cancelled_recycling_leaves_stale_pages_that_are_not_lent() {
    let service = service();
    let (pool, node) = (pool(&service, 1, MIB), node(&service));
    let memory = memory(&pool, MIB);
    let host = memory.host_ranges().next().unwrap();
    fill(&memory, 0x77);
    let gate = Gate::shut(&service);
    let job = memory.recycle(word()).unwrap();
    job.cancel();
    gate.open();
    let error = job.wait().unwrap_err();
    assert!(matches!(&error, JobError::Cancelled { report } if report.zero_bytes() == 0), "{error}");
    assert_eq!(pool.usage(node).stale_bytes, MIB);
    let pages = MIB / pool.page_bytes();
    for page in 0..pages {
        assert_eq!(pool.frames().state(page).unwrap(), PageState::Stale);
    }
    let error = pool.lease(MIB, NodePolicy::Any).unwrap_err();
    assert!(
        matches!(error, LeaseError::Exhausted { stale: MIB, remedy, .. } if remedy.contains("zero_stale"))
    );
    assert!(!is_readable(&host));

    assert_eq!(pool.zero_stale().unwrap().wait().unwrap().erased_bytes, MIB);
    let again = lease(&pool, MIB).into_memory::<()>([(GuestAddress(0), MIB)]).unwrap();
    assert!(is_all(&again, 0) && files_are_zero(&again));
}

#[test]
fn a_service_dropped_during_recycling_leaves_stale_pages() {
    let service = service();
    let (pool, node) = (pool(&service, 1, SLAB), node(&service));
    let memory = memory(&pool, SLAB);
    fill(&memory, 0x33);
    let gate = Gate::shut(&service);
    let job = memory.recycle(word()).unwrap();
    drop(service); // gives up on the workers behind the gate after a while
    assert!(job.is_over());
    let error = job.wait().unwrap_err();
    assert_eq!(error.report().unwrap().zero_bytes(), 0, "{error}");
    assert_eq!(pool.usage(node).stale_bytes, SLAB);
    assert!(matches!(pool.lease(SLAB, NodePolicy::Any), Err(LeaseError::Exhausted { .. })));
    assert!(matches!(pool.zero_stale(), Err(RequestError::Closed)));
    assert_eq!(pool.usage(node).stale_bytes, SLAB);
    gate.open();
}

#[test]
fn recycling_without_a_service_ends_the_lease_stale() {
    let service = service();
    let (pool, node) = (pool(&service, 2, SLAB), node(&service));
    let (used, dropped) = (memory(&pool, SLAB), memory(&pool, SLAB));
    let host = used.host_ranges().next().unwrap();
    fill(&used, 0x44);
    drop(service);
    let failure = used.recycle(word()).unwrap_err();
    assert!(matches!(failure.error, RecycleError::Request(RequestError::Closed)), "{failure}");
    assert!(failure.memory.is_none(), "the lease has ended");
    assert!(!is_readable(&host));
    assert_eq!(pool.usage(node).stale_bytes, SLAB);
    let id = dropped.lease();
    drop(dropped);
    assert!(matches!(pool.reclaim(id, word()), Err(RecycleError::Request(_))));
    assert_eq!((pool.usage(node).stale_bytes, pool.parked().len()), (2 * SLAB, 0));
}

#[test]
fn a_pool_dropped_before_its_leases_changes_nothing_for_them() {
    let service = service();
    let pool = pool(&service, 2, SLAB);
    let (one, two) = (memory(&pool, SLAB), memory(&pool, SLAB));
    drop(pool);
    fill(&one, 0x66);
    assert!(is_all(&one, 0x66));
    let (first, second) = (one.host_ranges().next().unwrap(), two.host_ranges().next().unwrap());
    one.recycle(word()).unwrap().wait().unwrap();
    assert!(!is_readable(&first));
    drop(two);
    // Both VMs may still be there, and nobody is left to be told that they are gone.
    for host in [first, second] {
        assert_eq!(permissions_at(host.start).as_deref(), Some("---p"));
    }
}

#[test]
fn addresses_are_kept_until_the_vm_is_said_to_be_gone() {
    let service = service();
    let pool = pool(&service, 1, SLAB);
    let mut seen = Vec::new();
    for _ in 0..8 {
        let memory = memory(&pool, SLAB);
        let (id, host) = (memory.lease(), memory.host_ranges().next().unwrap());
        assert!(seen.iter().all(|(_, before)| *before != host), "an address was lent twice");
        memory.recycle(word()).unwrap().wait().unwrap();
        seen.push((id, host));
    }
    for (id, host) in seen {
        assert_eq!(permissions_at(host.start).as_deref(), Some("---p"));
        assert!(pool.vm_is_gone(id));
    }
}

/// The pool's pages never go to two leases, however many threads ask.
#[test]
fn threads_never_share_a_slab() {
    const SLABS: u64 = 6;
    let service = service();
    let pool = pool(&service, SLABS, SLAB);
    std::thread::scope(|scope| {
        for thread in 1..=4u8 {
            let pool = &pool;
            scope.spawn(move || {
                for round in 0..40u64 {
                    let bytes = SLAB * (1 + round % 3);
                    let lease = loop {
                        match pool.lease(bytes, NodePolicy::Any) {
                            Ok(lease) => break lease,
                            Err(LeaseError::Exhausted { .. }) => std::thread::yield_now(),
                            Err(error) => panic!("{error}"),
                        }
                    };
                    let memory: LeasedMemory = lease.into_memory([(GuestAddress(0), bytes)]).unwrap();
                    assert!(is_all(&memory, 0), "thread {thread} got bytes of another");
                    fill(&memory, thread);
                    std::thread::yield_now();
                    assert!(is_all(&memory, thread), "thread {thread} shares its lease");
                    let id = memory.lease();
                    let job = memory.recycle(Quiesced::on_callers_word()).unwrap();
                    pool.vm_is_gone(id);
                    if round % 2 == 0 {
                        job.wait().unwrap();
                    }
                }
            });
        }
    });
}

/// A job that was cancelled holds the memory no longer than its end.
#[test]
fn a_cancelled_job_lets_go_of_the_memory_when_it_is_over() {
    let service = service();
    let pool = pool(&service, 1, MIB);
    for _ in 0..200 {
        let memory = Arc::new(memory(&pool, MIB));
        let job = service.zero(&memory, Intent::Teardown).unwrap();
        job.cancel();
        let _ = job.wait();
        let id = memory.lease();
        match Arc::unwrap_or_clone(memory).recycle(word()) {
            Ok(recycling) => drop(recycling.wait().unwrap()),
            Err(failure) => panic!("the job is over and holds the memory: {failure}"),
        }
        pool.vm_is_gone(id);
    }
}
