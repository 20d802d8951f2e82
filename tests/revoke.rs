//! The kernel refuses to take memory from its addresses (here by a seccomp filter on one thread): nobody gets
//! the pages as long as somebody may still have them.
#![cfg(all(target_os = "linux", target_endian = "little"))]
#![allow(
    unsafe_code,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "tests; installs a seccomp filter"
)]

#[path = "common/pool.rs"]
mod common;

use std::io;

use common::*;
use vm_zeroing::{LeaseError, NodePolicy, Quiesced, RecycleError};

const SLAB: u64 = 64 * KIB;

/// Runs `work` on a thread on which `mmap(…, PROT_NONE, MAP_FIXED…)` answers ENOMEM; `None` where such a
/// filter cannot be had, said aloud.
fn without_revoking<T: Send>(work: impl FnOnce() -> T + Send) -> Option<T> {
    std::thread::scope(|scope| scope.spawn(|| forbid().map(|()| work())).join().unwrap())
}

fn forbid() -> Option<()> {
    let step = |code: u32, jt, jf, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    let (load, equal, set, answer) = (
        libc::BPF_LD | libc::BPF_W | libc::BPF_ABS,
        libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
        libc::BPF_JMP | libc::BPF_JSET | libc::BPF_K,
        libc::BPF_RET | libc::BPF_K,
    );
    // struct seccomp_data: the number at 0, arguments of 8 bytes from 16 on.
    let mut program = [
        step(load, 0, 0, 0),
        step(equal, 0, 5, libc::SYS_mmap as u32),
        step(load, 0, 0, 16 + 2 * 8),
        step(equal, 0, 3, libc::PROT_NONE as u32),
        step(load, 0, 0, 16 + 3 * 8),
        step(set, 0, 1, libc::MAP_FIXED as u32),
        step(answer, 0, 0, libc::SECCOMP_RET_ERRNO | libc::ENOMEM as u32),
        step(answer, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: both concern this thread only; the program outlives the call, which copies it.
    let answer = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter, 0, 0)
    };
    if answer < 0 {
        println!("skipped: no seccomp filter: {}", io::Error::last_os_error());
        return None;
    }
    Some(())
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
