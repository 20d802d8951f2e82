//! The statement that nobody else can write to a guest's memory.

use std::ops::Range;

/// The statement that nobody else can write to a lease's memory any more.
///
/// It comes in two ways. `KvmSlots::teardown` (feature `kvm`) makes KVM's share of it a fact, to be
/// completed by `KvmQuiesced::and_nobody_else`. Without it, all of it is the caller's word:
/// [`on_callers_word`](Quiesced::on_callers_word).
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
    /// Host address ranges whose memory slots were deleted; `None`: whatever memory it is handed with.
    slots_deleted: Option<Vec<Range<u64>>>,
}

impl Quiesced {
    /// All of it on the caller's word; see the type for the duties.
    ///
    /// The memory's host addresses stay reserved, without memory, until
    /// [`HugepagePool::vm_is_gone`](crate::HugepagePool::vm_is_gone): a VM that was not closed after
    /// all finds nothing there.
    pub fn on_callers_word() -> Self {
        Self { slots_deleted: None }
    }

    /// On the fact that the memory slots over these host addresses are deleted. Slots side by side cover
    /// what lies across their border.
    #[cfg(feature = "kvm")]
    pub(crate) fn slots_deleted(mut ranges: Vec<Range<u64>>) -> Self {
        ranges.sort_unstable_by_key(|range| range.start);
        ranges.dedup_by(|next, last| {
            let adjacent = next.start <= last.end;
            if adjacent {
                last.end = last.end.max(next.end);
            }
            adjacent
        });
        Self { slots_deleted: Some(ranges) }
    }

    /// Whether the statement is about `range` (host addresses).
    pub(crate) fn covers(&self, range: &Range<u64>) -> bool {
        let own = |own: &Range<u64>| own.start <= range.start && range.end <= own.end;
        self.slots_deleted.as_ref().is_none_or(|ranges| ranges.iter().any(own))
    }

    /// Whether it is a fact that no memory slot of a VM holds the addresses any more.
    pub(crate) fn slots_are_gone(&self) -> bool {
        self.slots_deleted.is_some()
    }
}

#[cfg(all(test, feature = "kvm"))]
mod tests {
    use super::*;

    #[test]
    fn slots_side_by_side_cover_what_lies_across_them() {
        let quiet = Quiesced::slots_deleted(vec![0x4000..0x5000, 0x1000..0x2000, 0x2000..0x3000]);
        for (range, covered) in [
            (0x1000..0x3000, true),
            (0x1800..0x2800, true),
            (0x4000..0x5000, true),
            (0x2000..0x4800, false),
            (0..0x1000, false),
        ] {
            assert_eq!(quiet.covers(&range), covered, "{range:#x?}");
        }
        assert!(Quiesced::on_callers_word().covers(&(0..u64::MAX)));
    }
}
