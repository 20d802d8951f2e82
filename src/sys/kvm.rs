//! KVM memory slots over guest memory that is kept mapped as long as they exist.

use std::io;
use std::sync::Arc;

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use vm_memory::bitmap::Bitmap;
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use crate::hugepages::LeasedMemory;

/// Guest memory that stays where it is for as long as it lives.
///
/// A memory slot outlives every borrow, so KVM's view is safe only over memory of this kind.
///
/// # Safety
///
/// While a value of the type lives, every region stays part of it, and what the region's
/// `as_volatile_slice` returned once stays mapped, readable and writable, at that address.
pub unsafe trait KeepsMapped: GuestMemoryBackend {}

// SAFETY: the collection is immutable, holds its regions by `Arc`, and an `MmapRegion` is unmapped only
// when it is dropped (one built from a raw pointer rests on the contract of that unsafe constructor).
unsafe impl<B: Bitmap> KeepsMapped for GuestMemoryMmap<B> {}

// SAFETY: the regions and their addresses are held by one `Arc`, of which every clone of the memory is a
// handle. Addresses are revoked only by whoever holds the last handle, and that consumes it (`recycle`, drop).
unsafe impl<B: Bitmap> KeepsMapped for LeasedMemory<B> {}

/// One registered slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slot {
    pub(crate) number: u32,
    pub(crate) guest: u64,
    pub(crate) host: u64,
    pub(crate) len: u64,
}

/// The slots of a VM that show `memory`, which is kept alive until they are deleted.
#[derive(Debug)]
pub(crate) struct SlotTable<M: KeepsMapped> {
    vm: Arc<VmFd>,
    /// `None` once the slots are deleted.
    memory: Option<Arc<M>>,
    slots: Vec<Slot>,
}

impl<M: KeepsMapped> SlotTable<M> {
    pub(crate) fn new(vm: Arc<VmFd>, memory: Arc<M>) -> Self {
        Self { vm, memory: Some(memory), slots: Vec::new() }
    }

    pub(crate) fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// What the slots of `memory` would be, numbered from `first` on; `None` for a region without a host address.
    pub(crate) fn plan(&self, first: u32) -> impl Iterator<Item = Result<Slot, u64>> {
        let regions = self.memory.iter().flat_map(|memory| memory.iter());
        regions.zip(first..=u32::MAX).map(|(region, number)| {
            let guest = region.start_addr().0;
            let slice = region.as_volatile_slice().map_err(|_| guest)?;
            let (host, found) = (slice.ptr_guard_mut().as_ptr() as u64, slice.len() as u64);
            if found == region.len() { Ok(Slot { number, guest, host, len: found }) } else { Err(guest) }
        })
    }

    /// Registers all regions, slots numbered from `first` on; the slot that was refused, and why.
    pub(crate) fn register(&mut self, first: u32) -> Result<(), (Slot, io::Error)> {
        let planned: Vec<Slot> = self.plan(first).filter_map(Result::ok).collect();
        for slot in planned {
            let region = kvm_userspace_memory_region {
                slot: slot.number,
                flags: 0,
                guest_phys_addr: slot.guest,
                memory_size: slot.len,
                userspace_addr: slot.host,
            };
            // SAFETY: `plan` took the address and length from the region's own slice, and `KeepsMapped`
            // says that they stay good while the memory lives. `memory` is held until `delete` has
            // taken the slot out of the VM again, or for ever if that fails.
            unsafe { self.vm.set_user_memory_region(region) }.map_err(|error| (slot, error.into()))?;
            self.slots.push(slot);
        }
        Ok(())
    }

    /// Deletes all slots, so that the VM cannot reach the memory any more; then lets go of the memory.
    /// KVM waits for vCPUs that are running in the guest to leave their old view.
    pub(crate) fn delete(&mut self) -> Result<(), (Slot, io::Error)> {
        while let Some(slot) = self.slots.last().copied() {
            let nothing = kvm_userspace_memory_region {
                slot: slot.number,
                flags: 0,
                guest_phys_addr: slot.guest,
                memory_size: 0,
                userspace_addr: slot.host,
            };
            // SAFETY: size 0 deletes a slot (KVM API, KVM_SET_USER_MEMORY_REGION) and shows no memory.
            match unsafe { self.vm.set_user_memory_region(nothing) } {
                // There is no such slot: somebody else deleted it. (The addresses are aligned, which KVM would
                // answer in the same way.)
                Err(error) if error.errno() == libc::EINVAL => {}
                deleted => deleted.map_err(|error| (slot, error.into()))?,
            }
            self.slots.pop();
        }
        self.memory = None;
        Ok(())
    }
}

impl<M: KeepsMapped> Drop for SlotTable<M> {
    fn drop(&mut self) {
        if let Err((slot, error)) = self.delete() {
            tracing::error!(slot = slot.number, %error, "a memory slot could not be deleted; its memory is kept for ever");
            std::mem::forget(self.memory.take());
        }
    }
}
