//! The kernel refuses to take memory from its addresses (here by a seccomp filter on one thread): nobody gets
//! the pages as long as somebody may still have them.
#![cfg(all(target_os = "linux", target_endian = "little"))]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "helpers of tests are tests"
)]

#[path = "common/pool.rs"]
mod common;
#[allow(dead_code, reason = "other tests use the rest")]
#[path = "common/seccomp.rs"]
mod seccomp;

use common::*;
use seccomp::{Refusal, Scope, refuse};
use vm_zeroing::{LeaseError, NodePolicy, Quiesced, RecycleError};

const SLAB: u64 = 64 * KIB;

/// Runs `work` on a thread on which `mmap(…, PROT_NONE, MAP_FIXED…)` answers ENOMEM; `None` where such a
/// filter cannot be had, said aloud.
fn without_revoking<T: Send>(work: impl FnOnce() -> T + Send) -> Option<T> {
    let revoking = Refusal::new(libc::SYS_mmap, libc::ENOMEM)
        .if_equal(2, libc::PROT_NONE as u32)
        .if_set(3, libc::MAP_FIXED as u32);
    let filtered = || refuse(Scope::Thread, &[revoking]).map(|()| work());
    std::thread::scope(|scope| scope.spawn(filtered).join().unwrap())
}

#[test]
fn parked_memory_that_is_still_mapped_is_revoked_before_it_is_lent() {
    let _alone = alone();
    let service = service();
    let pool = pool(&service, 1, SLAB);
    let memory = memory(&pool, SLAB);
    let (id, host) = (memory.lease(), hosts(&memory)[0].clone());
    fill(&memory, 0x5a);
    let Some(()) = without_revoking(|| drop(memory)) else { return };
    assert!(is_readable(&host), "the filter did its part");
    assert_eq!(pool.parked(), [id]);
    assert!(matches!(pool.lease(SLAB, NodePolicy::Any), Err(LeaseError::Exhausted { parked: SLAB, .. })));

    let error = without_revoking(|| pool.reclaim(id, Quiesced::on_callers_word())).unwrap().unwrap_err();
    assert!(
        matches!(&error, RecycleError::Revoke(source) if source.raw_os_error() == Some(libc::ENOMEM)),
        "{error}"
    );
    assert_eq!(pool.parked(), [id], "it stays parked");

    pool.reclaim(id, Quiesced::on_callers_word()).unwrap().wait().unwrap();
    assert!(!is_readable(&host), "the old VM's addresses lead to the next one's memory");
    let next = common::memory(&pool, SLAB);
    assert!(is_all(&next, 0) && files_are_zero(&next));
}

#[test]
fn recycling_that_cannot_revoke_parks() {
    let _alone = alone();
    let service = service();
    let pool = pool(&service, 2, SLAB);
    for told in [false, true] {
        let memory = memory(&pool, 2 * SLAB);
        let (id, host) = (memory.lease(), memory.host_ranges().next().unwrap());
        fill(&memory, 0x5a);
        let recycled = without_revoking(|| memory.recycle(Quiesced::on_callers_word()));
        let Some(recycled) = recycled else { return };
        let failure = recycled.unwrap_err();
        assert!(matches!(failure.error, RecycleError::Revoke(_)), "{failure}");
        assert!(failure.memory.is_none());
        assert_eq!((pool.parked(), pool.usage(node(&service)).parked_bytes), (vec![id], 2 * SLAB));
        // Told that the VM is gone, the pool gives its addresses back, whatever was mapped there.
        assert!(!told || pool.vm_is_gone(id));
        pool.reclaim(id, Quiesced::on_callers_word()).unwrap().wait().unwrap();
        assert_ne!(permissions_at(host.start).as_deref(), Some("rw-s"));
        assert!(is_all(&common::memory(&pool, 2 * SLAB), 0), "told: {told}");
        let [parked] = pool.parked()[..] else { panic!("the lease of the line above is parked") };
        pool.reclaim(parked, Quiesced::on_callers_word()).unwrap().wait().unwrap();
    }
}
