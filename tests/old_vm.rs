//! R45: a VM whose descriptor stays open after its lease has ended runs again, and sees and reaches not one
//! byte of the VM that has its pages now.
#![cfg(all(feature = "kvm", target_arch = "x86_64"))]
#![allow(
    unsafe_code,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "tests; slots registered by hand"
)]

#[path = "../examples/mini_vmm/boot.rs"]
#[allow(dead_code, reason = "the example's own tests use the rest")]
mod boot;
#[path = "common/pool.rs"]
mod common;
#[path = "../examples/mini_vmm/kvm_guest.rs"]
#[allow(dead_code, reason = "the example uses the rest")]
mod kvm_guest;
#[path = "../examples/mini_vmm/payload.rs"]
mod payload;

/// What the example's guest says went wrong.
mod guest {
    use std::io;

    use crate::boot::BootError;

    #[derive(Debug)]
    #[allow(dead_code, reason = "looked at when a test fails")]
    pub enum GuestError {
        Kvm { what: &'static str, source: io::Error },
        NotBacked,
        Exit(String),
        Unfinished { pieces: usize },
        BootSlot(vm_memory::mmap::MmapRegionError),
        Memory(vm_memory::GuestMemoryError),
        Ram(BootError),
    }

    impl From<BootError> for GuestError {
        fn from(error: BootError) -> Self {
            Self::Ram(error)
        }
    }
}

use std::sync::Arc;
use std::sync::mpsc;

use boot::RamRange;
use common::*;
use guest::GuestError;
use kvm_bindings::kvm_userspace_memory_region;
use kvm_guest::KvmGuest;
use kvm_ioctls::{Kvm, VmFd};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion};
use vm_zeroing::{HugepagePool, KvmSlots, LeasedMemory, Quiesced, ZeroingService};

const PIECE: u64 = 2 * MIB;
const SLAB: u64 = MIB;
/// Two pieces of RAM, each over two slabs; a guest that has only the first one boots at 4 GiB.
const LAYOUT: [(GuestAddress, u64); 2] = [(GuestAddress(0), PIECE), (GuestAddress(8 * GIB), PIECE)];
const RAM: u64 = 2 * PIECE;
const SECRET_A: u8 = 0x41;
const SECRET_B: u8 = 0x5e;

fn kvm() -> Option<Kvm> {
    match Kvm::new().and_then(|kvm| kvm.create_vm().map(|_| kvm)) {
        Ok(kvm) => Some(kvm),
        Err(error) => {
            println!("skipped: needs /dev/kvm: {error}");
            None
        }
    }
}

fn pool_of_one(service: &ZeroingService) -> HugepagePool {
    pool(service, RAM / SLAB, SLAB)
}

fn leased(pool: &HugepagePool) -> LeasedMemory {
    lease(pool, RAM).into_memory(LAYOUT).unwrap()
}

fn words(byte: u8) -> u64 {
    u64::from_ne_bytes([byte; 8])
}

/// Shows memory to a VM behind the library's back.
fn register_by_hand(vm: &VmFd, memory: &LeasedMemory) {
    for (slot, (region, host)) in (0..).zip(memory.iter().zip(hosts(memory))) {
        let region = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: region.start_addr().0,
            memory_size: region.len(),
            userspace_addr: host.start,
        };
        // SAFETY: the addresses are mapped now; what becomes of the slots afterwards is what is tested, and
        // no Rust reference to the memory exists.
        unsafe { vm.set_user_memory_region(region) }.unwrap();
    }
}

/// A guest that looks at one of the pieces of RAM only; its slots are the caller's business.
fn guest_on(kvm: &Kvm, vm: &Arc<VmFd>, piece: usize) -> KvmGuest<()> {
    let (base, len) = LAYOUT[piece];
    KvmGuest::new(kvm, Arc::clone(vm), (), &[RamRange { base: base.0, len }]).unwrap()
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum End {
    /// Slots registered by hand, and the caller's word, which is not true.
    CallersWord,
    /// Slots registered by hand, memory dropped, reclaimed on the caller's word.
    DroppedAndReclaimed,
    /// `KvmSlots`, torn down without the vCPU.
    Teardown,
    /// `KvmSlots`, dropped, and the caller's word.
    SlotsDropped,
}

/// VM A lives and its lease ends; VM B gets the pages; A runs again.
fn an_old_vm_sees_nothing(end: End, piece: usize) {
    let Some(kvm) = kvm() else { return };
    let service = service();
    let pool = pool_of_one(&service);
    let vm = Arc::new(kvm.create_vm().unwrap());

    let memory_a = leased(&pool);
    let (id, hosts_a, pages_a) = (memory_a.lease(), hosts(&memory_a), pieces(&memory_a));
    let memory_a = Arc::new(memory_a);
    let slots = match end {
        End::CallersWord | End::DroppedAndReclaimed => {
            register_by_hand(&vm, &memory_a);
            None
        }
        End::Teardown | End::SlotsDropped => Some(KvmSlots::register(&vm, &memory_a, 0).unwrap()),
    };
    let mut a = guest_on(&kvm, &vm, piece);
    assert_eq!(a.scan(&|_| {}).unwrap(), 0, "A's memory was zero");
    a.fill(words(SECRET_A), &|_| {}).unwrap();
    assert_eq!(a.scan(&|_| {}).unwrap(), PIECE / 8, "A sees what it wrote");

    let job = match end {
        End::DroppedAndReclaimed => {
            drop(memory_a);
            assert!(matches!(a.scan(&|_| {}), Err(GuestError::NotBacked)), "parked");
            pool.reclaim(id, Quiesced::on_callers_word()).unwrap()
        }
        End::CallersWord => Arc::unwrap_or_clone(memory_a).recycle(Quiesced::on_callers_word()).unwrap(),
        End::Teardown => {
            let quiet = slots.unwrap().teardown([]).unwrap().and_nobody_else();
            Arc::unwrap_or_clone(memory_a).recycle(quiet).unwrap()
        }
        End::SlotsDropped => {
            drop(slots);
            Arc::unwrap_or_clone(memory_a).recycle(Quiesced::on_callers_word()).unwrap()
        }
    };
    job.wait().unwrap();

    let memory_b = leased(&pool);
    assert_eq!(pieces(&memory_b), pages_a, "B has A's pages");
    assert!(is_all(&memory_b, 0));
    fill(&memory_b, SECRET_B);
    if end != End::Teardown {
        for host in hosts(&memory_b) {
            let apart = |a: &std::ops::Range<u64>| a.end <= host.start || host.end <= a.start;
            assert!(hosts_a.iter().all(apart), "B lies where A's slots point");
        }
    }

    let seen = std::cell::Cell::new(0);
    let saw = a.scan(&|bytes| seen.set(seen.get() + bytes));
    let nothing = |answer: &Result<(), GuestError>| match (end, answer) {
        (End::CallersWord | End::DroppedAndReclaimed, Err(GuestError::NotBacked)) => true,
        (End::Teardown | End::SlotsDropped, Err(GuestError::Exit(exit))) => exit.contains("Mmio"),
        _ => false,
    };
    let answer = saw.map(|words| panic!("A read all its RAM and found {words} words of B"));
    assert!(nothing(&answer), "{answer:?}");
    assert_eq!(seen.get(), 0);
    let answer = a.fill(words(SECRET_A), &|_| {});
    assert!(nothing(&answer), "{answer:?}");
    assert!(is_all(&memory_b, SECRET_B), "A reached B's memory");

    // Only now A is gone.
    drop((a, vm));
    assert_eq!(pool.vm_is_gone(id), end != End::Teardown);
    assert!(is_all(&memory_b, SECRET_B));
}

#[test]
fn on_the_callers_word() {
    (0..2).for_each(|piece| an_old_vm_sees_nothing(End::CallersWord, piece));
}

#[test]
fn after_its_memory_was_dropped_and_reclaimed() {
    (0..2).for_each(|piece| an_old_vm_sees_nothing(End::DroppedAndReclaimed, piece));
}

#[test]
fn after_a_teardown() {
    (0..2).for_each(|piece| an_old_vm_sees_nothing(End::Teardown, piece));
}

#[test]
fn after_its_slots_were_dropped() {
    (0..2).for_each(|piece| an_old_vm_sees_nothing(End::SlotsDropped, piece));
}

/// The caller's word is a lie: A's vCPU writes all the while its lease is recycled. It writes to the piece
/// that is zeroed first, and has the time that the second one takes.
#[test]
fn a_running_vm_loses_its_memory_before_it_is_zeroed() {
    let Some(kvm) = kvm() else { return };
    // One worker, so that A has a CPU of its own where there are two.
    let service = ZeroingService::builder().workers_per_node(1).build().unwrap();
    let all = PIECE + 64 * MIB;
    let pool = pool(&service, all / SLAB, SLAB);
    let layout = [LAYOUT[0], (LAYOUT[1].0, 64 * MIB)];
    for _ in 0..3 {
        let vm = Arc::new(kvm.create_vm().unwrap());
        let memory_a: LeasedMemory = lease(&pool, all).into_memory(layout).unwrap();
        let id = memory_a.lease();
        register_by_hand(&vm, &memory_a);
        let mut a = guest_on(&kvm, &vm, 0);
        let (wrote, writes) = mpsc::channel();
        let writer = std::thread::spawn(move || {
            loop {
                match a.fill(words(SECRET_A), &|_| {}) {
                    Ok(()) => drop(wrote.send(())),
                    Err(error) => return error,
                }
            }
        });
        writes.recv().unwrap();
        memory_a.recycle(Quiesced::on_callers_word()).unwrap().wait().unwrap();
        let memory_b: LeasedMemory = lease(&pool, all).into_memory(layout).unwrap();
        assert!(is_all(&memory_b, 0) && files_are_zero(&memory_b), "A wrote after the zeroing");
        fill(&memory_b, SECRET_B);
        assert!(matches!(writer.join().unwrap(), GuestError::NotBacked));
        assert!(is_all(&memory_b, SECRET_B));
        drop(vm);
        assert!(pool.vm_is_gone(id));
        let id = memory_b.lease();
        memory_b.recycle(Quiesced::on_callers_word()).unwrap().wait().unwrap();
        assert!(pool.vm_is_gone(id));
    }
}
