//! Guest RAM as KVM memory slots.
#![allow(unsafe_code)]

use std::error::Error;

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion};

/// Registers each region of `memory` with `vm`, in slots 0, 1, ...
///
/// # Safety
///
/// `memory` stays mapped until the VM is closed.
pub unsafe fn register_ram<M: GuestMemoryBackend>(
    vm: &VmFd,
    memory: &M,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    for (slot, region) in (0..).zip(memory.iter()) {
        let slot = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: region.start_addr().raw_value(),
            memory_size: region.len(),
            userspace_addr: region.as_volatile_slice()?.ptr_guard_mut().as_ptr() as u64,
        };
        // SAFETY: the slice is `memory_size` mapped bytes; the caller keeps them mapped.
        unsafe { vm.set_user_memory_region(slot) }?;
    }
    Ok(())
}
