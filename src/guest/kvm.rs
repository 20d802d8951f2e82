//! Guest memory as KVM memory slots, and KVM's share of `Quiesced` as a fact.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use kvm_ioctls::{Cap, VcpuFd, VmFd};

use super::Quiesced;
use crate::error::SlotError;
use crate::sys::{KeepsMapped, Slot, SlotTable, page_size};

/// A guest's memory, registered with its VM.
///
/// Keeps the memory alive while the slots exist. [`teardown`](Self::teardown) deletes them and gives
/// KVM's share of [`Quiesced`] as a fact. Dropped without it, the slots are deleted all the same, and
/// the memory is let go, but nothing is stated.
#[derive(Debug)]
pub struct KvmSlots<M: KeepsMapped> {
    table: SlotTable<M>,
    /// The host addresses of all slots, those already deleted included.
    ranges: Vec<Range<u64>>,
}

impl<M: KeepsMapped> KvmSlots<M> {
    /// Registers each region of `memory` with `vm`, in slots numbered from `first_slot` on.
    ///
    /// # Errors
    ///
    /// [`SlotError`]; no slot of this call is left in the VM then.
    pub fn register(vm: &Arc<VmFd>, memory: &Arc<M>, first_slot: u32) -> Result<Self, SlotError> {
        let mut table = SlotTable::new(Arc::clone(vm), Arc::clone(memory));
        let planned = table
            .plan(first_slot)
            .collect::<Result<Vec<Slot>, u64>>()
            .map_err(|guest| SlotError::NoHostAddress { guest })?;
        check(&planned)?;
        // KVM answers 0 for "not said"; every KVM has had 32.
        let available = u32::try_from(vm.check_extension_int(Cap::NrMemslots))
            .ok()
            .filter(|count| *count > 0)
            .unwrap_or(32);
        let needed = u32::try_from(planned.len()).unwrap_or(u32::MAX);
        // `zip` with the numbers ends where u32 does, so regions can be missing from the plan.
        if needed as usize != memory.num_regions()
            || first_slot.checked_add(needed).is_none_or(|end| end > available)
        {
            return Err(SlotError::NotEnoughSlots {
                first: first_slot,
                needed: memory.num_regions(),
                available,
            });
        }
        table.register(first_slot).map_err(|(slot, source)| SlotError::Refused {
            slot: slot.number,
            guest: slot.guest,
            len: slot.len,
            source,
        })?;
        let ranges = table.slots().iter().map(|slot| slot.host..slot.host + slot.len).collect();
        Ok(Self { table, ranges })
    }

    /// The slot numbers in use.
    pub fn numbers(&self) -> impl Iterator<Item = u32> {
        self.table.slots().iter().map(|slot| slot.number)
    }

    /// Deletes the slots. `vcpus` are those of the VM, back from their joined threads: what has been
    /// moved here cannot run any more. Afterwards the VM, even if its descriptor stays open, cannot reach
    /// the memory.
    ///
    /// # Errors
    ///
    /// KVM refused to delete a slot: the slots come back, to be tried again.
    pub fn teardown(
        mut self,
        vcpus: impl IntoIterator<Item = VcpuFd>,
    ) -> Result<KvmQuiesced, Box<TeardownFailure<M>>> {
        drop(vcpus.into_iter().collect::<Vec<_>>());
        match self.table.delete() {
            Ok(()) => Ok(KvmQuiesced { ranges: self.ranges }),
            Err((slot, source)) => {
                let error = SlotError::NotDeleted { slot: slot.number, source };
                Err(Box::new(TeardownFailure { slots: self, error }))
            }
        }
    }
}

/// Page alignment and overlap, which KVM would answer with a bare EINVAL or EEXIST.
fn check(planned: &[Slot]) -> Result<(), SlotError> {
    let page = page_size();
    if let Some(slot) =
        planned.iter().find(|slot| (slot.guest | slot.host | slot.len) % page != 0 || slot.len == 0)
    {
        return Err(SlotError::Misaligned {
            guest: slot.guest,
            host: slot.host,
            len: slot.len,
            alignment: page,
        });
    }
    let mut sorted: Vec<&Slot> = planned.iter().collect();
    sorted.sort_by_key(|slot| slot.guest);
    match sorted
        .windows(2)
        .find(|pair| pair[0].guest.checked_add(pair[0].len).is_none_or(|end| end > pair[1].guest))
    {
        Some(pair) => Err(SlotError::Overlap { first: pair[0].guest, second: pair[1].guest }),
        None => Ok(()),
    }
}

/// KVM's share of [`Quiesced`], a fact: the slots over these host addresses are deleted, and the vCPUs given up.
#[derive(Debug)]
#[must_use = "complete the statement with `and_nobody_else`"]
pub struct KvmQuiesced {
    ranges: Vec<Range<u64>>,
}

impl KvmQuiesced {
    /// Completes the statement with the caller's word for everything that KVM does not know:
    /// - VFIO and IOMMU mappings of the memory are removed, and the devices reset;
    /// - vhost and vhost-user peers have let go of it and unmapped it;
    /// - io_uring buffers in it are unregistered, and requests that name it are finished;
    /// - old snapshots of the address space are dropped, no thread of the VMM holds a pointer into it,
    ///   and the memory was not registered with any VM by other means.
    pub fn and_nobody_else(self) -> Quiesced {
        Quiesced::slots_deleted(self.ranges)
    }
}

/// Slots that KVM refused to delete, and why.
#[derive(Debug)]
pub struct TeardownFailure<M: KeepsMapped> {
    /// The slots that are left, to be tried again.
    pub slots: KvmSlots<M>,
    /// What KVM said.
    pub error: SlotError,
}

impl<M: KeepsMapped> fmt::Display for TeardownFailure<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<M: KeepsMapped + fmt::Debug> std::error::Error for TeardownFailure<M> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misaligned_and_overlapping_slots_are_named() {
        let slot = |number, guest, len| Slot { number, guest, host: 0x7f00_0000_0000, len };
        assert!(check(&[slot(0, 0, 0x1000), slot(1, 0x1000, 0x1000)]).is_ok());
        assert!(matches!(check(&[slot(0, 0x800, 0x1000)]), Err(SlotError::Misaligned { guest: 0x800, .. })));
        assert!(matches!(check(&[slot(0, 0, 0)]), Err(SlotError::Misaligned { .. })));
        let crossing = [slot(0, 0x2000, 0x1000), slot(1, 0, 0x3000)];
        assert!(matches!(check(&crossing), Err(SlotError::Overlap { first: 0, second: 0x2000 })));
        assert!(check(&[slot(0, !0xfff, 0x1000), slot(1, 0, 0x1000)]).is_ok());
    }
}
