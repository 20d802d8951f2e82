//! Page state transitions of whole ranges, and what one page's descriptor says.
//!
//! A transition works in two rounds. The first goes up the range and compare-and-swaps each descriptor
//! from "in the right state" to the same with the held bit; the first refusal takes the bits away again.
//! Only when all frames are held does the second round write the new states. A frame therefore never
//! shows a state it is then taken back from: if recycling 512 pages failed at the last one and the first
//! had been `Stale` for a moment, another worker could already be clearing it under its guest.
//!
//! Whoever meets a held frame waits: its holder is between its first round and its last store, or waits
//! itself for a frame further up. All go upwards, so somebody is always at work and nobody waits in a circle.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam::utils::Backoff;

use super::FrameError;
use super::state::{Descriptor, PageState};
use super::table::FrameTable;
use crate::topology::NodeId;

impl FrameTable {
    /// Takes all frames of a range from one state to another; after an error not one has changed, and no
    /// one has seen one change. Sections that are not ready are initialised first. An empty range is `Ok`.
    ///
    /// `generation`, if given, is the one every frame must be in ([`PageFrame::generation`]): ending a lease
    /// with the generation read when it began refuses a handle that is older than the current lease.
    /// `Leased → Stale` begins a new generation.
    ///
    /// Each frame changes by itself: while the call runs, others may see frames of the range in `to` and
    /// frames still in `from`, and may take on those in `to`. What was written before the call is seen by
    /// whoever finds a frame in `to`; non-temporal stores have to be fenced by the thread that made them.
    ///
    /// # Errors
    ///
    /// The step is not legal ([`PageState::may_become`]); a frame is in no span; the first frame that is in
    /// another state or generation; a pinned frame that would go from `Leased` to `Stale`.
    pub fn transition(
        &self,
        frames: Range<u64>,
        from: PageState,
        to: PageState,
        generation: Option<u32>,
    ) -> Result<(), FrameError> {
        if !from.may_become(to) {
            return Err(FrameError::IllegalTransition { from, to });
        }
        self.check(&frames)?;
        for run in self.runs(frames.clone()) {
            for (frame, descriptor) in (run.first..).zip(run.descriptors) {
                let held = update(descriptor, |found| {
                    admit(frame, found, from, to, generation)?;
                    Ok(found.held())
                });
                if let Err(refused) = held {
                    self.rewrite_held(frames.start..frame, Descriptor::let_go);
                    return Err(refused);
                }
            }
        }
        for run in self.runs(frames.clone()) {
            run.counts.moved(from, to, run.descriptors.len() as u64);
        }
        self.rewrite_held(frames, |held| held.changed_to(to).let_go());
        Ok(())
    }

    /// Writes frames that this thread holds. Nobody else changes a held descriptor, so a store is enough.
    fn rewrite_held(&self, frames: Range<u64>, new: impl Fn(Descriptor) -> Descriptor) {
        for run in self.runs(frames) {
            for descriptor in run.descriptors {
                let held = Descriptor(descriptor.load(Ordering::Relaxed));
                descriptor.store(new(held).0, Ordering::Release);
            }
        }
    }
}

/// Whether a frame that was found so may make the step.
fn admit(
    frame: u64,
    found: Descriptor,
    from: PageState,
    to: PageState,
    generation: Option<u32>,
) -> Result<(), FrameError> {
    expect_state(frame, found, from)?;
    if let Some(expected) = generation {
        expect_generation(frame, found, expected)?;
    }
    if found.pins() > 0 && to != PageState::Quarantined {
        return Err(FrameError::Pinned { frame, pins: found.pins() });
    }
    Ok(())
}

fn expect_state(frame: u64, found: Descriptor, expected: PageState) -> Result<(), FrameError> {
    let found = found.state();
    if found == expected { Ok(()) } else { Err(FrameError::WrongState { frame, expected, found }) }
}

fn expect_generation(frame: u64, found: Descriptor, expected: u32) -> Result<(), FrameError> {
    let found = found.generation();
    if found == expected { Ok(()) } else { Err(FrameError::WrongGeneration { frame, expected, found }) }
}

/// Compare-and-swaps a descriptor that nobody holds, until it worked or `change` refuses.
pub(super) fn update(
    descriptor: &AtomicU64,
    change: impl Fn(Descriptor) -> Result<Descriptor, FrameError>,
) -> Result<(), FrameError> {
    let backoff = Backoff::new();
    let mut found = Descriptor(descriptor.load(Ordering::Acquire));
    loop {
        if found.is_held() {
            backoff.snooze();
            found = Descriptor(descriptor.load(Ordering::Acquire));
            continue;
        }
        let new = change(found)?;
        match descriptor.compare_exchange_weak(found.0, new.0, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return Ok(()),
            Err(other) => found = Descriptor(other),
        }
    }
}

/// One page's descriptor. Each question is answered by what is there at that moment.
pub struct PageFrame<'t> {
    frame: u64,
    descriptor: &'t AtomicU64,
}

impl<'t> PageFrame<'t> {
    pub(super) fn new(frame: u64, descriptor: &'t AtomicU64) -> Self {
        Self { frame, descriptor }
    }

    /// The frame's number.
    pub fn number(&self) -> u64 {
        self.frame
    }

    /// The page's state. A frame that a transition has secured is still in its old state.
    pub fn state(&self) -> PageState {
        self.read().state()
    }

    /// The node of the span the frame is in.
    pub fn node(&self) -> NodeId {
        self.read().node()
    }

    /// How often the page has come back from a lease, modulo 2³². The same during the whole of a lease.
    pub fn generation(&self) -> u32 {
        self.read().generation()
    }

    /// How many device mappings may still write to the page.
    pub fn pins(&self) -> u32 {
        self.read().pins()
    }

    /// Notes that a device may write to the page from now on. Until it is unpinned as often as it was
    /// pinned, the page cannot go from `Leased` to `Stale`, only into quarantine.
    ///
    /// # Errors
    ///
    /// The page is not `Leased`, its lease is of another generation, or it has 262143 pins already.
    pub fn pin(&self, generation: u32) -> Result<(), FrameError> {
        update(self.descriptor, |found| {
            expect_state(self.frame, found, PageState::Leased)?;
            expect_generation(self.frame, found, generation)?;
            if found.pins() == Descriptor::PINS_MAX {
                return Err(FrameError::Pinned { frame: self.frame, pins: found.pins() });
            }
            Ok(found.with_pins(found.pins() + 1))
        })
    }

    /// Takes one pin back: the device cannot reach the page any more.
    ///
    /// # Errors
    ///
    /// The page is not pinned.
    pub fn unpin(&self) -> Result<(), FrameError> {
        update(self.descriptor, |found| match found.pins().checked_sub(1) {
            Some(pins) => Ok(found.with_pins(pins)),
            None => Err(FrameError::NotPinned { frame: self.frame }),
        })
    }

    fn read(&self) -> Descriptor {
        Descriptor(self.descriptor.load(Ordering::Acquire))
    }
}

impl fmt::Debug for PageFrame<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let now = self.read();
        f.debug_struct("PageFrame")
            .field("frame", &self.frame)
            .field("state", &now.state())
            .field("node", &now.node())
            .field("generation", &now.generation())
            .field("pins", &now.pins())
            .finish()
    }
}
