//! All of this program's `unsafe`: its own memory, and stores that the library does not offer.
#![allow(unsafe_code)]

use std::io;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use vm_zeroing::{Clearer, HostRange, Method, RequestError, Reuse};

/// What memory is filled with before it is cleared.
const STALE: u8 = 0xA5;
const STALE_WORD: u64 = u64::from_ne_bytes([STALE; 8]);

/// What the kernel is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    /// More flags for `mmap`.
    pub flags: libc::c_int,
    /// Advice for all of it, before its first page.
    pub advice: Option<libc::c_int>,
    /// Begins at a multiple of this power of two.
    pub align: usize,
}

/// An anonymous mapping, unmapped when dropped.
#[derive(Debug)]
struct Mapping {
    /// What was mapped: what is used begins somewhere in it.
    whole: (usize, usize),
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: made by `Memory::map` and unmapped nowhere else; whoever uses an address of it holds a
        // `Memory`, a borrow of one, or a clone of the `Arc` that is being dropped now.
        unsafe { libc::munmap(self.whole.0 as *mut _, self.whole.1) };
    }
}

/// Private anonymous memory, whole pages, of which nobody has a reference.
#[derive(Debug)]
pub struct Memory {
    mapping: Arc<Mapping>,
    range: HostRange,
}

impl Memory {
    /// `len` bytes (whole pages of the kind) that have no page yet.
    pub fn map(kind: Kind, len: usize) -> io::Result<Self> {
        // The kernel aligns a mapping to small pages, or to its hugepages if it is made of them.
        let slack = if kind.flags & libc::MAP_HUGETLB == 0 { kind.align } else { 0 };
        let asked = len.checked_add(slack).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | kind.flags;
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let start = unsafe {
            libc::mmap(std::ptr::null_mut(), asked, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let mapping = Arc::new(Mapping { whole: (start as usize, asked) });
        let used = (start as usize).next_multiple_of(kind.align);
        if let Some(advice) = kind.advice {
            // SAFETY: advice about the size of pages changes no byte of the mapping, which is ours.
            if unsafe { libc::madvise(used as *mut _, len, advice) } != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        // SAFETY: the range lies in the mapping (`slack` made room to align it), which is readable and
        // writable until the last clone of the `Arc` is dropped. Nothing here makes a reference to its bytes,
        // nor remaps them.
        let range = unsafe { HostRange::new(used as *mut u8, len, Arc::clone(&mapping) as Arc<_>) };
        Ok(Self { mapping, range: range.map_err(io::Error::other)? })
    }

    pub fn len(&self) -> u64 {
        self.range.len()
    }

    pub fn start(&self) -> u64 {
        self.range.base()
    }

    /// For the service. Its job keeps the mapping until it is over.
    pub fn range(&self) -> HostRange {
        self.range.clone()
    }

    /// Waits until no job holds the mapping any more, so that dropping this unmaps it.
    pub fn wait_until_unshared(&self) {
        // One is ours and one is in our range.
        while Arc::strong_count(&self.mapping) > 2 {
            std::thread::yield_now();
        }
    }

    /// Equal parts for so many threads; `part` bytes each, which must fit.
    pub fn parts(&mut self, count: usize, part: u64) -> Vec<Part<'_>> {
        let fits = self.len() / part.max(1);
        let part_at = |index| Part {
            range: self.range.clone(),
            start: index * part,
            len: part,
            _exclusive: PhantomData,
        };
        (0..fits.min(count as u64)).map(part_at).collect()
    }
}

/// A part of a memory that nobody else works in.
#[derive(Debug)]
pub struct Part<'a> {
    range: HostRange,
    start: u64,
    len: u64,
    _exclusive: PhantomData<&'a mut Memory>,
}

impl Part<'_> {
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The address and the length of a run; shortened at the end of the part.
    fn run(&self, at: u64, len: u64) -> (*mut u8, usize) {
        let at = at.min(self.len);
        let len = len.min(self.len - at);
        ((self.range.base() + self.start + at) as *mut u8, len as usize)
    }

    /// Clears a run by the library.
    pub fn clear(
        &mut self,
        clearer: &Clearer,
        at: u64,
        len: u64,
        reuse: Reuse,
    ) -> Result<Method, RequestError> {
        let at = at.min(self.len);
        clearer.clear(&self.range, self.start + at, len.min(self.len - at), reuse)
    }

    /// Clears a run by the C library.
    pub fn memset(&mut self, at: u64, len: u64) {
        let (at, len) = self.run(at, len);
        // SAFETY: the run lies in this part, which is mapped, writable and used through `self` alone.
        unsafe { libc::memset(at.cast(), 0, len) };
    }

    /// Clears a run by Rust's own means.
    pub fn write_bytes(&mut self, at: u64, len: u64) {
        let (at, len) = self.run(at, len);
        // SAFETY: the run lies in this part, which is mapped, writable and used through `self` alone.
        unsafe { at.write_bytes(0, len) };
        // What is stored here nobody reads as far as the compiler can see.
        std::hint::black_box(at);
    }

    /// Stale bytes in memory, none of them in a cache.
    pub fn fill_cold(&mut self, at: u64, len: u64) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{__m128i, _mm_set1_epi8, _mm_sfence, _mm_stream_si128};
            let (start, len) = self.run(at, len);
            // SAFETY: the run lies in this part, which is mapped, writable and used through `self` alone; it is
            // made of whole lines, as everything that is cleared here. SSE2 is part of x86-64. The fence
            // orders these stores before all later ones of this thread.
            unsafe {
                let pattern = _mm_set1_epi8(STALE.cast_signed());
                for line in (0..len / 16).map(|index| start.cast::<__m128i>().add(index)) {
                    _mm_stream_si128(line, pattern);
                }
                _mm_sfence();
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        self.fill_hot(at, len);
    }

    /// Stale bytes by ordinary stores: in the caches, as far as they fit.
    pub fn fill_hot(&mut self, at: u64, len: u64) {
        let (start, len) = self.run(at, len);
        for index in 0..len / 8 {
            // SAFETY: the word lies in this part, which is mapped, writable and used through `self` alone; runs
            // begin at lines, so it is aligned. Volatile, so that no non-temporal `memset` is made of it.
            unsafe { start.cast::<u64>().add(index).write_volatile(STALE_WORD) };
        }
    }

    /// How far into the run the first word is that is not zero.
    pub fn first_stale(&self, at: u64, len: u64) -> Option<u64> {
        let (start, len) = self.run(at, len);
        let words = start.cast::<u64>();
        // SAFETY: the word lies in this part, which is mapped and used through `self` alone; runs begin at
        // lines, so it is aligned.
        let word = |index: usize| unsafe { words.add(index).read() };
        let end = len / 8;
        let mut block = 0;
        while block < end {
            let next = (block + 512).min(end);
            if (block..next).fold(0, |seen, index| seen | word(index)) != 0 {
                return (block..next).find(|index| word(*index) != 0).map(|index| at + index as u64 * 8);
            }
            block = next;
        }
        None
    }

    /// Stores a zero to one byte in every `step`, so that all pages of the run are there.
    pub fn touch(&mut self, at: u64, len: u64, step: usize) {
        let (start, len) = self.run(at, len);
        for offset in (0..len).step_by(step) {
            // SAFETY: the byte lies in this part, which is mapped, writable and used through `self` alone.
            unsafe { start.add(offset).write_volatile(0) };
        }
    }

    /// Has the kernel fault in a run of whole pages, as a store would.
    pub fn populate(&mut self, at: u64, len: u64) -> io::Result<()> {
        let (start, len) = self.run(at, len);
        loop {
            // SAFETY: makes pages of this part present and changes no byte of them.
            if unsafe { libc::madvise(start.cast(), len, libc::MADV_POPULATE_WRITE) } == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            if !matches!(error.kind(), io::ErrorKind::Interrupted)
                && error.raw_os_error() != Some(libc::EAGAIN)
            {
                return Err(error);
            }
        }
    }
}

/// Binds the calling thread to one CPU. A CPU that was taken away meanwhile leaves it where it may be.
pub fn pin(cpu: u32) {
    // SAFETY: a set of no CPUs is all zero bits.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    if cpu < libc::CPU_SETSIZE as u32 {
        // SAFETY: the CPU's bit lies in the set, as was just looked at.
        unsafe { libc::CPU_SET(cpu as usize, &mut set) };
        // SAFETY: reads the set of the given size; 0 is the calling thread.
        unsafe { libc::sched_setaffinity(0, size_of_val(&set), &set) };
    }
}

/// CPU time that the calling thread has used.
pub fn thread_cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes to `time` alone. Every Linux has the clock; if not, no time has passed.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// Which C library `memset` is from.
pub fn libc_version() -> String {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: answers a constant string of the C library.
        let version = unsafe { std::ffi::CStr::from_ptr(libc::gnu_get_libc_version()) };
        format!("glibc {}", version.to_string_lossy())
    }
    #[cfg(target_env = "musl")]
    return "musl (it tells no version)".to_owned();
    #[cfg(not(any(target_env = "gnu", target_env = "musl")))]
    return "a C library that tells no version".to_owned();
}
