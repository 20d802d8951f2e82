//! Guest memory as KVM slots: what is refused, what is kept alive, and what a teardown proves.
#![cfg(feature = "kvm")]
#![allow(
    unsafe_code,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "tests; memory types of their own"
)]

#[path = "common/pool.rs"]
mod common;

use std::sync::{Arc, Weak};

use common::*;
use kvm_ioctls::{Kvm, VmFd};
use vm_memory::bitmap::{BS, Bitmap};
use vm_memory::{
    Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryError, GuestMemoryMmap, GuestMemoryRegion,
    GuestMemoryRegionBytes, GuestRegionMmap, GuestUsize, MemoryRegionAddress, VolatileSlice,
};
use vm_zeroing::{KeepsMapped, KvmSlots, LeasedMemory, LeasedRegion, Quiesced, RecycleError, SlotError};

const SLAB: u64 = 64 * KIB;

/// KVM and a VM; says aloud if there is none.
fn vm() -> Option<(Kvm, Arc<VmFd>)> {
    let made = Kvm::new().and_then(|kvm| Ok((kvm.create_vm()?, kvm)));
    match made {
        Ok((vm, kvm)) => Some((kvm, Arc::new(vm))),
        Err(error) => {
            println!("skipped: needs /dev/kvm: {error}");
            None
        }
    }
}

fn ram(ranges: &[(u64, usize)]) -> Arc<GuestMemoryMmap> {
    let ranges: Vec<_> = ranges.iter().map(|&(start, len)| (GuestAddress(start), len)).collect();
    Arc::new(GuestMemoryMmap::from_ranges(&ranges).unwrap())
}

/// Whether the VM has no slot of these numbers and nothing at these guest addresses: others can be registered.
fn is_vacant(vm: &Arc<VmFd>, first: u32, ranges: &[(u64, usize)]) -> bool {
    KvmSlots::register(vm, &ram(ranges), first).is_ok()
}

#[test]
fn slots_are_numbered_one_a_region() {
    let _alone = alone();
    let Some((_kvm, vm)) = vm() else { return };
    let (service, layout) = (service(), [(GuestAddress(0), SLAB), (GuestAddress(4 * GIB), 2 * SLAB)]);
    let pool = pool(&service, 3, SLAB);
    let memory = Arc::new(lease(&pool, 3 * SLAB).into_memory::<()>(layout).unwrap());
    let slots = KvmSlots::register(&vm, &memory, 5).unwrap();
    assert_eq!(slots.numbers().collect::<Vec<_>>(), [5, 6, 7]);
    for number in 5..8 {
        assert!(!is_vacant(&vm, number, &[(8 * GIB, 4096)]), "slot {number} is in use");
    }
    assert!(is_vacant(&vm, 4, &[(8 * GIB, 4096)]));
    assert!(is_vacant(&vm, 8, &[(8 * GIB, 4096)]));
    for guest in [0, SLAB - 4096, 4 * GIB, 4 * GIB + SLAB, 4 * GIB + 2 * SLAB - 4096] {
        assert!(!is_vacant(&vm, 20, &[(guest, 4096)]), "{guest:#x} is in use");
    }
}

#[test]
fn a_teardown_is_enough_to_recycle_at_once() {
    let _alone = alone();
    let Some((_kvm, vm)) = vm() else { return };
    let service = service();
    let pool = pool(&service, 4, SLAB);
    for round in 0..3 {
        // The second piece lies over three slabs: three slots at adjacent addresses.
        let layout = [(GuestAddress(0), SLAB / 2), (GuestAddress(4 * GIB), SLAB * 5 / 2)];
        let memory = Arc::new(lease(&pool, 3 * SLAB).into_memory::<()>(layout).unwrap());
        assert!(is_all(&*memory, 0));
        let slots = KvmSlots::register(&vm, &memory, 0).unwrap();
        assert_eq!(slots.numbers().count(), 4);
        let vcpu = vm.create_vcpu(round).unwrap();
        fill(&*memory, 0x99);
        let (id, hosts) = (memory.lease(), memory.host_ranges().collect::<Vec<_>>());
        let quiet = slots.teardown([vcpu]).unwrap().and_nobody_else();
        let job = Arc::unwrap_or_clone(memory).recycle(quiet).unwrap();
        assert!(!pool.vm_is_gone(id), "no address is kept for a VM that cannot reach it");
        for host in hosts {
            assert_ne!(permissions_at(host.start).as_deref(), Some("rw-s"));
        }
        job.wait().unwrap();
        assert!(is_vacant(&vm, 0, &[(0, 4096)]) && is_vacant(&vm, 3, &[(4 * GIB, 4096)]));
    }
}

#[test]
fn slots_keep_their_memory_alive() {
    let _alone = alone();
    let Some((_kvm, vm)) = vm() else { return };
    let memory = ram(&[(0, 0x10000)]);
    let (weak, host): (Weak<_>, _) = (Arc::downgrade(&memory), hosts(&*memory)[0].clone());
    let slots = KvmSlots::register(&vm, &memory, 0).unwrap();
    drop(memory);
    assert!(weak.upgrade().is_some() && is_readable(&host));
    let quiet = slots.teardown([]).unwrap();
    assert!(weak.upgrade().is_none(), "let go of with the slots");
    drop(quiet);

    let service = service();
    let pool = pool(&service, 1, SLAB);
    let memory = Arc::new(memory_of(&pool));
    let slots = KvmSlots::register(&vm, &memory, 0).unwrap();
    let failure = Arc::unwrap_or_clone(memory).recycle(Quiesced::on_callers_word()).unwrap_err();
    assert!(matches!(failure.error, RecycleError::StillMapped { others: 1 }), "{failure}");
    let quiet = slots.teardown([]).unwrap().and_nobody_else();
    failure.memory.unwrap().recycle(quiet).unwrap().wait().unwrap();
}

fn memory_of(pool: &vm_zeroing::HugepagePool) -> LeasedMemory {
    memory(pool, SLAB)
}

#[test]
fn dropped_slots_are_deleted_too() {
    let _alone = alone();
    let Some((_kvm, vm)) = vm() else { return };
    let memory = ram(&[(0, 0x10000), (GIB, 0x10000)]);
    let weak = Arc::downgrade(&memory);
    let slots = KvmSlots::register(&vm, &memory, 2).unwrap();
    drop(memory);
    // Of another length: the same slot at the same address again would be nothing new to KVM.
    let smaller = [(0, 0x8000), (GIB, 0x8000)];
    assert!(!is_vacant(&vm, 2, &smaller));
    drop(slots);
    assert!(weak.upgrade().is_none());
    assert!(is_vacant(&vm, 2, &smaller));
}

#[test]
fn a_statement_is_about_the_slots_that_were_deleted() {
    let _alone = alone();
    let Some((kvm, vm_a)) = vm() else { return };
    let vm_b = Arc::new(kvm.create_vm().unwrap());
    let service = service();
    let pool = pool(&service, 2, SLAB);
    let (a, b) = (Arc::new(memory_of(&pool)), Arc::new(memory_of(&pool)));
    let slots_a = KvmSlots::register(&vm_a, &a, 0).unwrap();
    let slots_b = KvmSlots::register(&vm_b, &b, 0).unwrap();
    let quiet_b = slots_b.teardown([]).unwrap().and_nobody_else();
    let host_a = a.host_ranges().next().unwrap();
    // A's own slots are a holder as well; without them, the statement is what counts.
    let quiet_a = slots_a.teardown([]).unwrap().and_nobody_else();
    let failure = Arc::unwrap_or_clone(a).recycle(quiet_b).unwrap_err();
    assert!(
        matches!(&failure.error, RecycleError::NotCovered { uncovered } if *uncovered == host_a),
        "{failure}"
    );
    let a = failure.memory.expect("the lease goes on");
    a.write_obj(1u8, GuestAddress(0)).unwrap();
    a.recycle(quiet_a).unwrap().wait().unwrap();
    drop(b);
}

#[test]
fn parked_memory_is_reclaimed_by_a_statement_about_it() {
    let _alone = alone();
    let Some((_kvm, vm)) = vm() else { return };
    let service = service();
    let pool = pool(&service, 2, SLAB);
    let (a, b) = (Arc::new(memory_of(&pool)), Arc::new(memory_of(&pool)));
    let (id, host) = (a.lease(), a.host_ranges().next().unwrap());
    let quiet_a = KvmSlots::register(&vm, &a, 0).unwrap().teardown([]).unwrap().and_nobody_else();
    let quiet_b = KvmSlots::register(&vm, &b, 0).unwrap().teardown([]).unwrap().and_nobody_else();
    drop(a);
    let error = pool.reclaim(id, quiet_b).unwrap_err();
    assert!(matches!(&error, RecycleError::NotCovered { uncovered } if *uncovered == host), "{error}");
    assert_eq!(pool.parked(), [id], "it stays parked");
    pool.reclaim(id, quiet_a).unwrap().wait().unwrap();
}

#[test]
fn memory_with_more_than_the_slots_is_not_covered() {
    let _alone = alone();
    let Some((_kvm, vm)) = vm() else { return };
    let service = service();
    let pool = pool(&service, 2, SLAB);
    let layout = [(GuestAddress(0), SLAB), (GuestAddress(GIB), SLAB)];
    let memory: Arc<LeasedMemory> = Arc::new(lease(&pool, 2 * SLAB).into_memory(layout).unwrap());
    // The VM has only a part of it, through a memory type of the VMM's own.
    let part = Arc::new(FirstRegion((*memory).clone()));
    let slots = KvmSlots::register(&vm, &part, 0).unwrap();
    let quiet = slots.teardown([]).unwrap().and_nobody_else();
    drop(part);
    let second = hosts(&*memory)[1].clone();
    let failure = Arc::unwrap_or_clone(memory).recycle(quiet).unwrap_err();
    assert!(
        matches!(&failure.error, RecycleError::NotCovered { uncovered } if *uncovered == second),
        "{failure}"
    );
}

#[test]
fn what_kvm_cannot_show_is_refused_by_name() {
    let _alone = alone();
    let Some((kvm, vm)) = vm() else { return };
    let refused = |ranges: &[(u64, usize)], first| KvmSlots::register(&vm, &ram(ranges), first).unwrap_err();

    let error = refused(&[(0, 0x10000), (GIB, 0x1800)], 0);
    assert!(
        matches!(error, SlotError::Misaligned { guest: GIB, len: 0x1800, alignment: 0x1000, .. }),
        "{error}"
    );
    let error = refused(&[(0x800, 0x1000)], 0);
    assert!(matches!(error, SlotError::Misaligned { guest: 0x800, .. }), "{error}");

    let available = kvm.get_nr_memslots() as u32;
    for first in [available - 1, available, u32::MAX - 1, u32::MAX] {
        let error = refused(&[(0, 0x1000), (GIB, 0x1000)], first);
        assert!(
            matches!(error, SlotError::NotEnoughSlots { first: f, needed: 2, available: a } if (f, a) == (first, available)),
            "{error}"
        );
    }
    let overlapping = own(vec![OwnRegion::shown(0, 0x2000), OwnRegion::shown(0x1000, 0x2000)]);
    let error = KvmSlots::register(&vm, &overlapping, 0).unwrap_err();
    assert!(matches!(error, SlotError::Overlap { first: 0, second: 0x1000 }), "{error}");
    let hidden = own(vec![OwnRegion::shown(0, 0x1000), OwnRegion { guest: GIB, len: 0x1000, shown: None }]);
    let error = KvmSlots::register(&vm, &hidden, 0).unwrap_err();
    assert!(matches!(error, SlotError::NoHostAddress { guest: GIB }), "{error}");
    assert!(is_vacant(&vm, 0, &[(0, 0x10000), (GIB, 0x10000)]), "nothing was left registered");
    // No region, no slot.
    assert_eq!(KvmSlots::register(&vm, &own(vec![]), 0).unwrap().numbers().count(), 0);
}

#[test]
fn a_slot_that_kvm_refuses_takes_the_others_with_it() {
    let _alone = alone();
    let Some((_kvm, vm)) = vm() else { return };
    let other = ram(&[(2 * GIB, 0x10000)]);
    let _other_slots = KvmSlots::register(&vm, &other, 9).unwrap();
    let wanted = [(0, 0x10000), (GIB, 0x10000), (2 * GIB, 0x1000)];
    let memory = ram(&wanted);
    let weak = Arc::downgrade(&memory);
    let error = KvmSlots::register(&vm, &memory, 0).unwrap_err();
    assert!(matches!(&error, SlotError::Refused { slot: 2, guest, .. } if *guest == 2 * GIB), "{error}");
    drop(memory);
    assert!(weak.upgrade().is_none(), "not kept for slots that do not exist");
    assert!(is_vacant(&vm, 0, &wanted[..2]));
    // A number in use, by other memory.
    let error = KvmSlots::register(&vm, &ram(&[(0, 0x1000), (GIB, 0x1000)]), 8).unwrap_err();
    assert!(matches!(error, SlotError::Refused { slot: 9, .. }), "{error}");
    assert!(is_vacant(&vm, 8, &[(0, 0x1000)]));
}

/// A VMM's own memory type, which may be as odd as it likes.
#[derive(Debug)]
struct Own(Vec<OwnRegion>);

/// The first region of leased memory.
#[derive(Debug)]
struct FirstRegion(LeasedMemory);

// SAFETY: as `LeasedMemory`, of which it is a clone.
unsafe impl KeepsMapped for FirstRegion {}

impl GuestMemoryBackend for FirstRegion {
    type R = LeasedRegion;

    fn iter(&self) -> impl Iterator<Item = &LeasedRegion> {
        self.0.iter().take(1)
    }
}

#[derive(Debug)]
struct OwnRegion {
    guest: u64,
    len: u64,
    shown: Option<GuestRegionMmap>,
}

fn own(regions: Vec<OwnRegion>) -> Arc<Own> {
    Arc::new(Own(regions))
}

impl OwnRegion {
    fn shown(guest: u64, len: u64) -> Self {
        let shown = GuestRegionMmap::from_range(GuestAddress(guest), len as usize, None).unwrap();
        Self { guest, len, shown: Some(shown) }
    }
}

// SAFETY: regions are never taken out of an `Own`, and a `GuestRegionMmap` is unmapped only when dropped.
unsafe impl KeepsMapped for Own {}

impl GuestMemoryBackend for Own {
    type R = OwnRegion;

    fn iter(&self) -> impl Iterator<Item = &OwnRegion> {
        self.0.iter()
    }
}

impl GuestMemoryRegionBytes for OwnRegion {}

impl GuestMemoryRegion for OwnRegion {
    type B = ();

    fn len(&self) -> GuestUsize {
        self.len
    }

    fn start_addr(&self) -> GuestAddress {
        GuestAddress(self.guest)
    }

    fn bitmap(&self) -> BS<'_, ()> {
        ().slice_at(0)
    }

    fn get_slice(
        &self,
        offset: MemoryRegionAddress,
        count: usize,
    ) -> Result<VolatileSlice<'_, BS<'_, ()>>, GuestMemoryError> {
        let shown = self.shown.as_ref().ok_or(GuestMemoryError::HostAddressNotAvailable)?;
        shown.get_slice(offset, count)
    }
}
