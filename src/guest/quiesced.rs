//! The statement that nobody else can write to a guest's memory.

use std::ops::Range;

/// The statement that nobody else can write to a lease's memory any more.
///
/// It comes in two ways. [`KvmSlots::teardown`](crate::KvmSlots::teardown) makes KVM's share of it a
/// fact, to be completed by [`and_nobody_else`](crate::KvmQuiesced::and_nobody_else). Without it, all of
/// it is the caller's word: [`on_callers_word`](Quiesced::on_callers_word).
///
/// The duties behind the word, from `docs/trust.md`:
/// - every vCPU thread has left `KVM_RUN` for good and is joined;
/// - the memory slots are deleted, or the VM's descriptor and all its copies are closed;
/// - VFIO and IOMMU mappings of the memory are removed, and devices reset;
/// - vhost and vhost-user peers have let go of it and unmapped it;
/// - io_uring buffers in it are unregistered, and requests that name it are finished;
/// - old snapshots of the address space are dropped, and no thread of the VMM holds a pointer into it.
#[derive(Debug)]
#[must_use = "the statement is to be handed to whoever recycles the memory"]
pub struct Quiesced {
    scope: Scope,
}

#[derive(Debug)]
enum Scope {
    /// Whatever memory it is handed with.
    Everything,
    /// Host address ranges whose memory slots were deleted.
    SlotsDeleted(Vec<Range<u64>>),
}

impl Quiesced {
    /// All of it on the caller's word; see the type for the duties.
    ///
    /// The memory's host addresses stay reserved, without memory, until
    /// [`HugepagePool::vm_is_gone`](crate::HugepagePool::vm_is_gone): a VM that was not closed after
    /// all finds nothing there.
    pub fn on_callers_word() -> Self {
        Self { scope: Scope::Everything }
    }

    #[cfg(feature = "kvm")]
    pub(crate) fn slots_deleted(ranges: Vec<Range<u64>>) -> Self {
        Self { scope: Scope::SlotsDeleted(ranges) }
    }

    /// Whether the statement is about `range` (host addresses).
    pub(crate) fn covers(&self, range: &Range<u64>) -> bool {
        match &self.scope {
            Scope::Everything => true,
            Scope::SlotsDeleted(ranges) => {
                ranges.iter().any(|own| own.start <= range.start && range.end <= own.end)
            }
        }
    }

    /// Whether it is a fact that no memory slot of a VM holds the addresses any more.
    pub(crate) fn slots_are_gone(&self) -> bool {
        matches!(self.scope, Scope::SlotsDeleted(_))
    }
}
