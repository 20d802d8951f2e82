//! The table: spans, sections, and the initialisation that happens once for each section.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use super::FrameError;
use super::counts::{Counts, FrameCounts};
use super::state::{Descriptor, PageState, SectionState};
use super::transition::PageFrame;
use crate::clear::filled_words;
use crate::topology::NodeId;

/// A run of frames on one node. Between two spans there may be holes.
///
/// Frame numbers are the caller's own: physical frame numbers, or the index of a page in a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The node the frames are on.
    pub node: NodeId,
    /// The number of the first frame.
    pub first: u64,
    /// How many frames.
    pub frames: u64,
}

/// One descriptor per page, made section by section.
///
/// Building the table touches memory for its list of sections only (32 bytes each). A section's
/// descriptors (8 bytes a frame) are allocated and first written by the thread that initialises it: where the
/// allocator hands out untouched memory, they land on that thread's node.
pub struct FrameTable {
    /// Sorted by first frame, without overlap.
    spans: Box<[SpanEntry]>,
    /// The sections of all spans, span after span.
    sections: Box<[Section]>,
    /// How many sections are ready.
    ready: AtomicUsize,
    /// First frame → (end, state); disjoint. A section sets `started` before it looks here, and a preset
    /// looks at `started` while it holds this lock: so a preset is either kept or refused.
    presets: Mutex<BTreeMap<u64, (u64, PageState)>>,
}

struct SpanEntry {
    span: Span,
    end: u64,
    first_section: usize,
    /// Its frames' descriptor where nothing was preset.
    stale: Descriptor,
    counts: Counts,
}

#[derive(Default)]
struct Section {
    started: AtomicBool,
    descriptors: OnceLock<Box<[AtomicU64]>>,
}

/// Where a frame is.
struct Place<'t> {
    entry: &'t SpanEntry,
    section: usize,
    offset: usize,
}

/// Neighbouring frames of one section.
pub(super) struct Run<'t> {
    pub(super) first: u64,
    pub(super) descriptors: &'t [AtomicU64],
    pub(super) counts: &'t Counts,
}

impl FrameTable {
    /// Frames in a section (the last one of a span may have fewer; sections are counted from a span's start,
    /// wherever that is, and never reach over its end).
    ///
    /// 4096 descriptors are 32 KiB: whoever asks early waits some microseconds, the descriptors fit the
    /// first-level cache while they are written, 64 GiB in 2 MiB pages are eight sections to share out, and
    /// 12 TiB in 4 KiB pages cost 24 MiB of sections before the first one is initialised.
    pub const SECTION_FRAMES: u64 = 4096;

    /// A table over these spans (in any order), with every section pending and every frame stale.
    ///
    /// # Errors
    ///
    /// No spans, an empty span, one that ends past 2⁶⁴, two that overlap, a node number above 1023, or
    /// more sections than there is memory for.
    pub fn new(spans: &[Span]) -> Result<Self, FrameError> {
        if spans.is_empty() {
            return Err(FrameError::NoSpans);
        }
        let mut sorted = spans.to_vec();
        sorted.sort_by_key(|span| span.first);
        let mut entries: Vec<SpanEntry> = Vec::with_capacity(sorted.len());
        // Spans do not overlap and end below 2^64: neither sum can overflow.
        let (mut frames, mut sections) = (0u64, 0u64);
        for span in sorted {
            let entry = SpanEntry::new(span, sections as usize)?;
            if let Some(before) = entries.last().filter(|before| before.end > span.first) {
                return Err(FrameError::SpansOverlap { span: before.span, other: span });
            }
            frames += span.frames;
            sections += entry.sections() as u64;
            entries.push(entry);
        }
        let mut list = Vec::<Section>::new();
        let length = usize::try_from(sections).ok().filter(|length| list.try_reserve_exact(*length).is_ok());
        list.resize_with(length.ok_or(FrameError::TooManyFrames { frames, sections })?, Section::default);
        Ok(Self {
            spans: entries.into_boxed_slice(),
            sections: list.into_boxed_slice(),
            ready: AtomicUsize::new(0),
            presets: Mutex::new(BTreeMap::new()),
        })
    }

    /// The number of sections. They are numbered from 0, in the order of their frames.
    pub fn sections(&self) -> usize {
        self.sections.len()
    }

    /// How many sections are ready: grows from 0 to [`sections`](Self::sections), and may lag behind
    /// [`section_state`](Self::section_state) by those that have only just become so.
    pub fn ready_sections(&self) -> usize {
        self.ready.load(Ordering::Relaxed)
    }

    /// The section a frame belongs to.
    ///
    /// # Errors
    ///
    /// The frame is in no span.
    pub fn section_of(&self, frame: u64) -> Result<usize, FrameError> {
        self.place(frame).map(|place| place.section)
    }

    /// How far a section is. May be old by the time it is read, but only ever moves forward.
    ///
    /// # Errors
    ///
    /// There is no such section.
    pub fn section_state(&self, section: usize) -> Result<SectionState, FrameError> {
        let section = self.section(section)?;
        Ok(match (section.descriptors.get(), section.started.load(Ordering::Acquire)) {
            (Some(_), _) => SectionState::Ready,
            (None, true) => SectionState::Initialising,
            (None, false) => SectionState::Pending,
        })
    }

    /// The node of a section's frames: whoever runs there should initialise it.
    ///
    /// # Errors
    ///
    /// There is no such section.
    pub fn section_node(&self, section: usize) -> Result<NodeId, FrameError> {
        self.section(section)?;
        Ok(self.entry_of_section(section)?.span.node)
    }

    /// Makes a section ready: initialises it, or waits for whoever is at it. `true` if this call did it; each
    /// section is initialised by exactly one call, be it this one or one that asked for a frame.
    ///
    /// # Errors
    ///
    /// There is no such section.
    pub fn initialise_section(&self, section: usize) -> Result<bool, FrameError> {
        self.make_ready(section).map(|(_, did)| did)
    }

    /// The descriptor of one page, whose section is initialised now if it was not yet.
    ///
    /// # Errors
    ///
    /// The frame is in no span.
    pub fn frame(&self, frame: u64) -> Result<PageFrame<'_>, FrameError> {
        let place = self.place(frame)?;
        let (descriptors, _) = self.make_ready(place.section)?;
        let descriptor = descriptors.get(place.offset).ok_or(FrameError::NoSuchFrame { frame })?;
        Ok(PageFrame::new(frame, descriptor))
    }

    /// Says what frames of pending sections are, before their descriptors exist; initialisation keeps it.
    /// All of them or, after an error, none.
    ///
    /// `Zero` is a claim that needs proof: pages the kernel has made fresh and nobody has written since.
    /// `Leased` is for pages handed out before the table was built, `Quarantined` for pages known to be bad.
    ///
    /// # Errors
    ///
    /// Any other state, a frame in no span, a frame preset before, or a section that is not pending any more.
    pub fn preset(&self, frames: Range<u64>, state: PageState) -> Result<(), FrameError> {
        if !matches!(state, PageState::Zero | PageState::Leased | PageState::Quarantined) {
            return Err(FrameError::NotPresettable { state });
        }
        if frames.is_empty() {
            return Ok(());
        }
        self.check(&frames)?;
        let mut presets = self.presets();
        if let Some((first, (_, state))) = overlapping(&presets, &frames).next() {
            return Err(FrameError::PresetTwice { frame: first.max(frames.start), found: state });
        }
        let (first, last) = (self.section_of(frames.start)?, self.section_of(frames.end - 1)?);
        for section in first..=last {
            if self.section_state(section)? != SectionState::Pending {
                return Err(FrameError::PresetTooLate { section, frames });
            }
        }
        for (place, frames) in self.places(frames.clone()) {
            place.entry.counts.moved(PageState::Stale, state, frames.end - frames.start);
        }
        presets.insert(frames.start, (frames.end, state));
        Ok(())
    }

    /// How many frames of a node are in each state, `None` if the table has no frame on it. Exact while
    /// nothing is in transition; else each number is one that was true a moment ago.
    pub fn counts(&self, node: NodeId) -> Option<FrameCounts> {
        let mut spans = self.spans.iter().filter(|entry| entry.span.node == node).peekable();
        spans.peek()?;
        Some(spans.fold(FrameCounts::default(), |sum, entry| entry.counts.added_to(sum)))
    }

    /// The sections of each span with their node: what its workers are to initialise.
    pub(crate) fn section_runs(&self) -> impl Iterator<Item = (NodeId, Range<usize>)> {
        self.spans
            .iter()
            .map(|entry| (entry.span.node, entry.first_section..entry.first_section + entry.sections()))
    }

    /// The first section of every node, to be initialised before the table is used: the first frames that
    /// are asked for then wait for nobody.
    pub(crate) fn eager_sections(&self) -> impl Iterator<Item = usize> {
        let mut seen = BTreeSet::new();
        let first_of_node = self.spans.iter().filter(move |entry| seen.insert(entry.span.node));
        first_of_node.map(|entry| entry.first_section)
    }

    /// Initialises those of these sections that nobody has initialised yet; returns how many. Sections that
    /// another thread is at are not waited for, so this can return before all of them are ready.
    pub(crate) fn initialise(&self, sections: Range<usize>) -> Result<usize, FrameError> {
        let mut done = 0;
        for section in sections {
            if self.section_state(section)? == SectionState::Pending && self.initialise_section(section)? {
                done += 1;
            }
        }
        Ok(done)
    }

    /// Refuses a range with a frame that is in no span.
    pub(super) fn check(&self, frames: &Range<u64>) -> Result<(), FrameError> {
        let mut at = frames.start;
        while at < frames.end {
            at = self.place(at)?.entry.end;
        }
        Ok(())
    }

    /// The frames of a checked range, section by section, in ascending order; makes the sections ready.
    pub(super) fn runs(&self, frames: Range<u64>) -> impl Iterator<Item = Run<'_>> {
        self.places(frames).filter_map(|(place, frames)| {
            let (descriptors, _) = self.make_ready(place.section).ok()?;
            let end = place.offset + (frames.end - frames.start) as usize;
            let descriptors = descriptors.get(place.offset..end)?;
            Some(Run { first: frames.start, descriptors, counts: &place.entry.counts })
        })
    }

    /// A checked range cut at the borders of its sections.
    fn places(&self, frames: Range<u64>) -> impl Iterator<Item = (Place<'_>, Range<u64>)> {
        let mut at = frames.start;
        std::iter::from_fn(move || {
            let place = (at < frames.end).then(|| self.place(at).ok())??;
            let left = Self::SECTION_FRAMES - place.offset as u64;
            let end = frames.end.min(place.entry.end).min(at.saturating_add(left));
            Some((place, std::mem::replace(&mut at, end)..end))
        })
    }

    fn place(&self, frame: u64) -> Result<Place<'_>, FrameError> {
        let after = self.spans.partition_point(|entry| entry.span.first <= frame);
        let entry = after.checked_sub(1).and_then(|at| self.spans.get(at)).filter(|entry| frame < entry.end);
        let entry = entry.ok_or(FrameError::NoSuchFrame { frame })?;
        let index = frame - entry.span.first;
        Ok(Place {
            entry,
            section: entry.first_section + (index / Self::SECTION_FRAMES) as usize,
            offset: (index % Self::SECTION_FRAMES) as usize,
        })
    }

    fn section(&self, section: usize) -> Result<&Section, FrameError> {
        self.sections.get(section).ok_or(FrameError::NoSuchSection { section, sections: self.sections.len() })
    }

    fn entry_of_section(&self, section: usize) -> Result<&SpanEntry, FrameError> {
        let after = self.spans.partition_point(|entry| entry.first_section <= section);
        after
            .checked_sub(1)
            .and_then(|at| self.spans.get(at))
            .ok_or(FrameError::NoSuchSection { section, sections: self.sections.len() })
    }

    fn make_ready(&self, index: usize) -> Result<(&[AtomicU64], bool), FrameError> {
        let section = self.section(index)?;
        if let Some(descriptors) = section.descriptors.get() {
            return Ok((descriptors, false));
        }
        let entry = self.entry_of_section(index)?;
        let mut did = false;
        // The lock makes every other caller wait until the one that got here first has returned.
        let descriptors = section.descriptors.get_or_init(|| {
            did = true;
            section.started.store(true, Ordering::Release);
            self.describe(entry, index)
        });
        if did {
            self.ready.fetch_add(1, Ordering::Relaxed);
        }
        Ok((descriptors, did))
    }

    /// A section's first descriptors: stale, except what was preset.
    fn describe(&self, entry: &SpanEntry, section: usize) -> Box<[AtomicU64]> {
        let first = entry.span.first + (section - entry.first_section) as u64 * Self::SECTION_FRAMES;
        let frames = first..entry.end.min(first.saturating_add(Self::SECTION_FRAMES));
        let mut descriptors = filled_words((frames.end - frames.start) as usize, entry.stale.0);
        for (start, (end, state)) in overlapping(&self.presets(), &frames) {
            let start = start.max(frames.start) - frames.start;
            let end = end.min(frames.end) - frames.start;
            let preset = entry.stale.changed_to(state);
            for descriptor in descriptors.get_mut(start as usize..end as usize).into_iter().flatten() {
                *descriptor.get_mut() = preset.0;
            }
        }
        descriptors
    }

    pub(super) fn presets(&self) -> MutexGuard<'_, BTreeMap<u64, (u64, PageState)>> {
        // Nothing that can panic runs under the lock, and each change to the map is one insertion.
        self.presets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SpanEntry {
    fn new(span: Span, first_section: usize) -> Result<Self, FrameError> {
        if span.frames == 0 {
            return Err(FrameError::EmptySpan { span });
        }
        let end = span.first.checked_add(span.frames).ok_or(FrameError::SpanOverflow { span })?;
        let stale = Descriptor::new(PageState::Stale, span.node).ok_or(FrameError::NodeTooLarge { span })?;
        Ok(Self { span, end, first_section, stale, counts: Counts::all_stale(span.frames) })
    }

    fn sections(&self) -> usize {
        self.span.frames.div_ceil(FrameTable::SECTION_FRAMES) as usize
    }
}

/// The presets that share frames with `frames`, the last first.
fn overlapping(
    presets: &BTreeMap<u64, (u64, PageState)>,
    frames: &Range<u64>,
) -> impl Iterator<Item = (u64, (u64, PageState))> {
    let start = frames.start;
    let before = presets.range(..frames.end).rev().map(|(first, preset)| (*first, *preset));
    // They do not overlap one another: where one ends too early, so do all before it.
    before.take_while(move |(_, (end, _))| *end > start)
}

impl fmt::Debug for FrameTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spans: Vec<&Span> = self.spans.iter().map(|entry| &entry.span).collect();
        let sections = format_args!("{} of {} ready", self.ready_sections(), self.sections());
        f.debug_struct("FrameTable").field("spans", &spans).field("sections", &sections).finish()
    }
}
