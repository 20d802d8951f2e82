//! Guest memory of a region type of our own, whose every access by a worker the test can watch, hold up,
//! refuse, shorten or end in a panic.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use vm_memory::bitmap::{BS, Bitmap};
use vm_memory::guest_memory::Result;
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryError, GuestMemoryRegion, GuestMemoryRegionBytes,
    GuestRegionCollection, GuestRegionMmap, GuestUsize, MemoryRegionAddress, MmapRegion, VolatileSlice,
};

/// What a worker gets when it asks for a slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    AsAsked,
    /// Fewer bytes, as a broken memory object would hand out.
    Short(usize),
    Refused,
}

/// Called with offset and length whenever a worker (not the test's own threads) asks for a slice: twice a
/// chunk, before it makes it present and before it stores.
pub type Hook = Arc<dyn Fn(u64, usize) -> Answer + Send + Sync>;

pub struct HookedRegion<B: Bitmap = ()> {
    inner: GuestRegionMmap<B>,
    hook: Hook,
    /// What the region says about its file, true or not.
    pub file: Option<FileOffset>,
    /// Calls the hook on the test's own threads too.
    pub on_all_threads: bool,
}

pub type HookedMemory<B = ()> = GuestRegionCollection<HookedRegion<B>>;

impl<B: Bitmap> HookedRegion<B> {
    pub fn over(
        mapping: MmapRegion<B>,
        start: u64,
        hook: impl Fn(u64, usize) -> Answer + Send + Sync + 'static,
    ) -> Self {
        let file = mapping.file_offset().cloned();
        Self {
            inner: GuestRegionMmap::new(mapping, GuestAddress(start)).unwrap(),
            hook: Arc::new(hook),
            file,
            on_all_threads: false,
        }
    }
}

/// One region of private anonymous memory.
pub fn hooked(
    start: u64,
    len: u64,
    hook: impl Fn(u64, usize) -> Answer + Send + Sync + 'static,
) -> HookedRegion {
    HookedRegion::over(MmapRegion::new(len as usize).unwrap(), start, hook)
}

/// A memory of one such region.
pub fn hooked_memory(
    len: u64,
    hook: impl Fn(u64, usize) -> Answer + Send + Sync + 'static,
) -> Arc<HookedMemory> {
    memory_of(vec![hooked(0, len, hook)])
}

pub fn memory_of<B: Bitmap>(regions: Vec<HookedRegion<B>>) -> Arc<HookedMemory<B>> {
    Arc::new(GuestRegionCollection::from_regions(regions).unwrap())
}

impl<B: Bitmap> GuestMemoryRegion for HookedRegion<B> {
    type B = B;

    fn len(&self) -> GuestUsize {
        self.inner.len()
    }

    fn start_addr(&self) -> GuestAddress {
        self.inner.start_addr()
    }

    fn bitmap(&self) -> BS<'_, B> {
        GuestMemoryRegion::bitmap(&self.inner)
    }

    fn file_offset(&self) -> Option<&FileOffset> {
        self.file.as_ref()
    }

    fn get_slice(&self, offset: MemoryRegionAddress, count: usize) -> Result<VolatileSlice<'_, BS<'_, B>>> {
        let by_worker = std::thread::current().name().is_some_and(|name| name.starts_with("vmz-"));
        match if by_worker || self.on_all_threads { (self.hook)(offset.0, count) } else { Answer::AsAsked } {
            Answer::AsAsked => GuestMemoryRegion::get_slice(&self.inner, offset, count),
            Answer::Short(len) => GuestMemoryRegion::get_slice(&self.inner, offset, len),
            Answer::Refused => Err(GuestMemoryError::HostAddressNotAvailable),
        }
    }
}

impl<B: Bitmap> GuestMemoryRegionBytes for HookedRegion<B> {}

/// Lets the first workers through and holds the others up until it is opened.
#[derive(Debug)]
pub struct Gate {
    free: usize,
    passed: AtomicUsize,
    state: Mutex<(bool, usize)>,
    changed: Condvar,
}

impl Gate {
    /// Lets `free` passages through, then closes.
    pub fn after(free: usize) -> Arc<Self> {
        Arc::new(Self { free, passed: AtomicUsize::new(0), state: Mutex::default(), changed: Condvar::new() })
    }

    /// Passes, or waits until the gate is open.
    pub fn pass(&self) {
        if self.passed.fetch_add(1, Ordering::SeqCst) < self.free {
            return;
        }
        let mut state = self.state.lock().unwrap();
        state.1 += 1;
        self.changed.notify_all();
        while !state.0 {
            state = self.changed.wait(state).unwrap();
        }
    }

    /// A hook that passes the gate, and answers as asked.
    pub fn hook(self: &Arc<Self>) -> impl Fn(u64, usize) -> Answer + Send + Sync + 'static {
        let gate = Arc::clone(self);
        move |_, _| {
            gate.pass();
            Answer::AsAsked
        }
    }

    /// Waits until somebody stands before the gate.
    pub fn wait_for_somebody(&self) {
        let state = self.state.lock().unwrap();
        drop(self.changed.wait_while(state, |(_, came)| *came == 0).unwrap());
    }

    pub fn open(&self) {
        self.state.lock().unwrap().0 = true;
        self.changed.notify_all();
    }
}
