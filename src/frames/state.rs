//! Page and section states, the legal steps between them, and the 64 bits of a descriptor. All pure.

use crate::topology::NodeId;

/// What a page may hold and who may touch it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum PageState {
    /// May hold another guest's bytes. The state of every frame nobody has said anything about.
    Stale = 0,
    /// Being made zero by the one who brought it here; nobody else may take it.
    Zeroing = 1,
    /// Proved zero and written by nobody since; may be leased.
    Zero = 2,
    /// Belongs to one lease.
    Leased = 3,
    /// Bad (poisoned, truncated, not to be recovered). Never used again.
    Quarantined = 4,
}

impl PageState {
    /// Every state, in the order of their numbers.
    pub const ALL: [Self; 5] = [Self::Stale, Self::Zeroing, Self::Zero, Self::Leased, Self::Quarantined];

    /// Whether a page may go from this state to `to` in one step.
    ///
    /// The round is `Stale → Zeroing → Zero → Leased → Stale`. `Zeroing → Stale` is a clear that was
    /// cancelled or failed. Everything may be quarantined, and nothing comes back from there. There is no
    /// step from `Stale` to `Zero`: a page the kernel has just made fresh is preset
    /// ([`FrameTable::preset`](crate::FrameTable::preset)), or is `Zeroing` while the kernel does it.
    pub const fn may_become(self, to: Self) -> bool {
        use PageState::{Leased, Quarantined, Stale, Zero, Zeroing};
        matches!(
            (self, to),
            (Stale, Zeroing)
                | (Zeroing, Zero | Stale)
                | (Zero, Leased)
                | (Leased, Stale)
                | (Stale | Zeroing | Zero | Leased, Quarantined)
        )
    }
}

/// How far a section of the frame table is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SectionState {
    /// It has no descriptors yet; each of its frames counts as what it was preset to, else as stale.
    Pending,
    /// One thread is making its descriptors; whoever asks for one of its frames waits.
    Initialising,
    /// Its descriptors exist.
    Ready,
}

/// One page's descriptor: 64 bits, changed by compare-and-swap as a whole.
///
/// | bits | meaning |
/// |---|---|
/// | 0..3 | page state |
/// | 3 | held: a transition has secured this frame and has not changed it yet |
/// | 4..14 | node (Linux has at most 1024) |
/// | 14..32 | pins: device mappings that may still write to the page |
/// | 32..64 | generation: how often the page has come back from a lease, modulo 2³² |
///
/// All bits zero: stale, node 0, no pins, generation 0. So memory that nobody initialised could not
/// claim to be zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Descriptor(pub(super) u64);

const STATE: u64 = 0b111;
const HELD: u64 = 1 << 3;
const NODE_SHIFT: u32 = 4;
const NODE_MAX: u32 = (1 << 10) - 1;
const PINS_SHIFT: u32 = 14;
const GENERATION_SHIFT: u32 = 32;

impl Descriptor {
    /// The most pins a frame can carry.
    pub(super) const PINS_MAX: u32 = (1 << 18) - 1;

    /// A frame of `node` in `state`, never leased; `None` if the node's number does not fit.
    pub(super) fn new(state: PageState, node: NodeId) -> Option<Self> {
        (node.0 <= NODE_MAX).then(|| Self(state as u64 | u64::from(node.0) << NODE_SHIFT))
    }

    pub(super) fn state(self) -> PageState {
        match self.0 & STATE {
            0 => PageState::Stale,
            1 => PageState::Zeroing,
            2 => PageState::Zero,
            3 => PageState::Leased,
            // 5..=7 are never written; if memory went bad, the page must not be used.
            _ => PageState::Quarantined,
        }
    }

    pub(super) fn is_held(self) -> bool {
        self.0 & HELD != 0
    }

    pub(super) fn node(self) -> NodeId {
        NodeId((self.0 >> NODE_SHIFT) as u32 & NODE_MAX)
    }

    pub(super) fn pins(self) -> u32 {
        (self.0 >> PINS_SHIFT) as u32 & Self::PINS_MAX
    }

    pub(super) fn generation(self) -> u32 {
        (self.0 >> GENERATION_SHIFT) as u32
    }

    pub(super) fn held(self) -> Self {
        Self(self.0 | HELD)
    }

    pub(super) fn let_go(self) -> Self {
        Self(self.0 & !HELD)
    }

    pub(super) fn with_pins(self, pins: u32) -> Self {
        let mask = u64::from(Self::PINS_MAX) << PINS_SHIFT;
        Self(self.0 & !mask | u64::from(pins) << PINS_SHIFT & mask)
    }

    /// The same frame in `to`; coming back from a lease starts a new generation.
    pub(super) fn changed_to(self, to: PageState) -> Self {
        let changed = Self(self.0 & !STATE | to as u64);
        if self.state() == PageState::Leased && to == PageState::Stale {
            // The generation is on top: what overflows falls off the end.
            Self(changed.0.wrapping_add(1 << GENERATION_SHIFT))
        } else {
            changed
        }
    }
}
