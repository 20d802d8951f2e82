//! R16 for pools: a page that goes bad takes its slab out of use for good; the rest of the pool goes on.
#![allow(unsafe_code, clippy::unwrap_used, clippy::expect_used, reason = "tests; madvise")]

mod common;
#[path = "common/pool.rs"]
mod pools;

use common::uffd::Userfaultfd;
use pools::*;
use vm_memory::GuestAddress;
use vm_zeroing::{
    Cause, HugepagePool, JobError, LeaseError, NodePolicy, Outcome, PageSize, PageState, Quiesced,
};

/// A pool of two slabs of four pages; page 2 of the first one is poisoned while it is lent.
fn a_poisoned_page_is_quarantined(size: PageSize) {
    let (service, page) = (service(), size.bytes());
    let (node, slab) = (node(&service), 4 * page);
    let builder = HugepagePool::builder(&service).page_size(size).capacity(node, 2 * slab).slab_bytes(slab);
    let pool = builder.build().unwrap();
    let memory = lease(&pool, slab).into_memory::<()>([(GuestAddress(0), slab)]).unwrap();
    fill(&memory, 0xa5);
    let bad = pools_own_mappings(&memory)[0].start + 2 * page;
    // SAFETY: the pool's own view of the page is emptied, not the page.
    let emptied = unsafe { libc::madvise(bad as *mut libc::c_void, page as usize, libc::MADV_DONTNEED) };
    assert_eq!(emptied, 0);
    let Some(uffd) = Userfaultfd::register(bad, page) else { return };
    if uffd.poison(bad, page).is_none() {
        return;
    }

    let error = memory.recycle(Quiesced::on_callers_word()).unwrap().wait().unwrap_err();
    let JobError::Failed { start, len, cause: Cause::Poisoned, report } = &error else { panic!("{error}") };
    // The chunk that met it first: the page, or a part of it where clearing a whole hugepage takes long.
    let whole = (*start, *len) == (2 * page, page);
    let part = size != PageSize::Base && 2 * page <= *start && *start + *len <= 3 * page;
    assert!(whole || part, "an offset in the pool: {start:#x} + {len:#x}");
    assert_eq!(report.erased_bytes, 3 * page, "the rest was cleared");
    let failed: Vec<_> = report.ranges.iter().filter(|range| range.outcome != Outcome::Erased).collect();
    let [failed] = failed[..] else { panic!("{failed:?}") };
    assert_eq!((failed.start, failed.len), (2 * page, page), "all of the page, and nothing else");
    assert_eq!(failed.outcome, Outcome::Failed(Cause::Poisoned));

    let states: Vec<_> = (0..8).map(|page| pool.frames().state(page).unwrap()).collect();
    let mut expected = [PageState::Zero; 8];
    expected[2] = PageState::Quarantined;
    assert_eq!(states, expected);
    let usage = pool.usage(node);
    assert_eq!((usage.quarantined_bytes, usage.zero_bytes), (slab, slab));
    assert_eq!(pool.zero_stale().unwrap().wait().unwrap().total_bytes, 0, "it does not come back");
    let error = pool.lease(2 * slab, NodePolicy::Any).unwrap_err();
    assert!(matches!(&error, LeaseError::Exhausted { quarantined, .. } if *quarantined == slab), "{error}");
    let other = lease(&pool, slab).into_memory::<()>([(GuestAddress(0), slab)]).unwrap();
    assert!(is_all(&other, 0) && files_are_zero(&other));
}

#[test]
fn a_poisoned_base_page() {
    a_poisoned_page_is_quarantined(PageSize::Base);
}

#[test]
fn a_poisoned_hugepage() {
    let Some(_host) = Hugepages::reserve(2 * MIB, 8) else { return };
    a_poisoned_page_is_quarantined(PageSize::Huge2M);
}
