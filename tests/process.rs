//! What pools leave in their process, and in its forked children. One test at a time: they count what the
//! process holds, and what is inherited.
#![allow(unsafe_code, clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, reason = "tests; fork")]

#[path = "common/pool.rs"]
mod common;

use std::fs::File;
use std::path::PathBuf;

use common::*;
use vm_memory::GuestAddress;
use vm_zeroing::{
    HugepagePool, LayoutError, LeaseError, NodeId, NodePolicy, PageSize, PoolError, Quiesced, RequestError,
    ZeroingService,
};

const SLAB: u64 = 64 * KIB;

/// Memory files of pools that this process holds, by descriptor and by mapping.
fn slabs_held() -> usize {
    let named = |path: &PathBuf| path.to_string_lossy().contains("vm-zeroing-slab");
    let links = std::fs::read_dir("/proc/self/fd").unwrap();
    let files = links.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok()).filter(named).count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    files + maps.lines().filter(|line| line.contains("vm-zeroing-slab")).count()
}

/// Runs `child` in a forked child and says how it ended.
fn in_forked_child(child: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child runs `child` and leaves by `_exit`. It may allocate: the C library keeps its
    // allocator usable across fork; the other threads of the test hold no lock that it takes.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: a child that hangs is ended by the default action.
            unsafe { libc::alarm(60) };
            let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(99);
            // SAFETY: ends the child without the parent's exit handlers.
            unsafe { libc::_exit(code) }
        }
        child => {
            let mut status = 0;
            // SAFETY: waits for our own child, the status outlives the call.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { 256 + libc::WTERMSIG(status) }
        }
    }
}

#[test]
fn a_forked_child_has_none_of_it_and_harms_nobody() {
    let _alone = alone();
    let service = service();
    let pool = pool(&service, 3, SLAB);
    let (memory, unmapped) = (memory(&pool, SLAB), lease(&pool, SLAB));
    fill(&memory, 0x3c);
    let (host, own) = (hosts(&memory)[0].clone(), pools_own_mappings(&memory));
    assert!(is_readable(&host) && own.iter().all(is_readable));
    let code = in_forked_child(|| {
        if is_readable(&host) || own.iter().any(is_readable) {
            return 1;
        }
        // The kernel may put other things of the child there.
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        for range in own.iter().chain([&host]) {
            let (at, len) = (range.start as *mut libc::c_void, (range.end - range.start) as usize);
            // SAFETY: nothing is there, or the call fails.
            let mapped = unsafe { libc::mmap(at, len, protection, flags, -1, 0) };
            if mapped != at {
                return 2;
            }
            // SAFETY: mapped right above.
            unsafe { at.cast::<u8>().write_volatile(0x7e) };
        }
        if !matches!(
            pool.lease(SLAB, NodePolicy::Any),
            Err(LeaseError::Request(RequestError::ForkedChild { .. }))
        ) {
            return 3;
        }
        let layout = [(GuestAddress(0), SLAB)];
        if !matches!(
            unmapped.into_memory::<()>(layout),
            Err(LayoutError::Request(RequestError::ForkedChild { .. }))
        ) {
            return 4;
        }
        let failure = memory.recycle(Quiesced::on_callers_word());
        if failure.is_ok() {
            return 5;
        }
        drop((failure, pool, service));
        for range in own.iter().chain([&host]) {
            // SAFETY: mapped above; if the drops took it away, the child dies of it.
            if unsafe { (range.start as *const u8).read_volatile() } != 0x7e {
                return 6;
            }
        }
        0
    });
    assert_eq!(code, 0);
}

#[test]
fn the_parent_goes_on_after_a_fork() {
    let _alone = alone();
    let service = service();
    let pool = pool(&service, 1, SLAB);
    let memory = memory(&pool, SLAB);
    fill(&memory, 0x3c);
    assert_eq!(in_forked_child(|| 0), 0);
    assert!(is_all(&memory, 0x3c));
    memory.recycle(Quiesced::on_callers_word()).unwrap().wait().unwrap();
    assert!(is_all(&common::memory(&pool, SLAB), 0));
}

#[test]
fn a_node_that_the_kernel_does_not_know_is_an_error_and_nothing_is_kept() {
    let _alone = alone();
    if File::open("/sys/devices/system/node/node1/meminfo").is_ok() {
        println!("skipped: this machine has a node 1");
        return;
    }
    let before = slabs_held();
    let service = ZeroingService::builder().topology(two_nodes()).build().unwrap();
    let builder = HugepagePool::builder(&service).page_size(PageSize::Base);
    let builder = builder.capacity(NodeId(0), 2 * SLAB).capacity(NodeId(1), SLAB).slab_bytes(SLAB);
    let error = builder.build().unwrap_err();
    assert!(
        matches!(error, PoolError::System { call: "mbind", node: NodeId(1), bytes: SLAB, .. }),
        "{error}"
    );
    assert_eq!(slabs_held(), before);
}

#[test]
fn a_pool_that_is_gone_leaves_nothing_behind() {
    let _alone = alone();
    let (service, before) = (service(), slabs_held());
    let pool = pool(&service, 4, SLAB);
    let (used, kept) = (memory(&pool, SLAB), memory(&pool, SLAB));
    assert_eq!(slabs_held(), before + 4 + 4 + 2, "a file and a mapping a slab, a mapping a lease");
    let id = used.lease();
    used.recycle(Quiesced::on_callers_word()).unwrap().wait().unwrap();
    pool.vm_is_gone(id);
    drop(pool);
    assert_eq!(slabs_held(), before + 4 + 4 + 1, "a lease keeps its pool");
    drop(kept);
    assert_eq!(slabs_held(), before);
}

#[test]
fn addresses_are_given_back_when_the_vm_is_gone() {
    let _alone = alone();
    let service = service();
    let pool = pool(&service, 2, SLAB);
    // The test runner may start a thread just then and put its stack there: not every time.
    let given_back = (0..5).any(|_| {
        let (recycled, dropped) = (memory(&pool, SLAB), memory(&pool, SLAB));
        let ended = [recycled.lease(), dropped.lease()];
        let hosts = [hosts(&recycled)[0].clone(), hosts(&dropped)[0].clone()];
        recycled.recycle(Quiesced::on_callers_word()).unwrap().wait().unwrap();
        drop(dropped);
        assert!(hosts.iter().all(|host| permissions_at(host.start).as_deref() == Some("---p")));
        assert!(ended.iter().all(|id| pool.vm_is_gone(*id)));
        let free = hosts.iter().all(|host| permissions_at(host.start).is_none());
        assert_eq!(pool.parked(), [ended[1]], "that the VM is gone is not the whole statement");
        pool.reclaim(ended[1], Quiesced::on_callers_word()).unwrap().wait().unwrap();
        free
    });
    assert!(given_back);
}
