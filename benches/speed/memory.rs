//! Guest memory to be cleared, and the hugepages for it.

use std::ffi::CStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::FromRawFd;
use std::sync::Arc;

use vm_memory::{FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

/// What guest memory is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pages {
    Huge2M,
    File4K,
    Anonymous4K,
}

impl Pages {
    pub fn name(self) -> &'static str {
        match self {
            Pages::Huge2M => "2 MiB pages (memfd)",
            Pages::File4K => "4 KiB pages (memfd)",
            Pages::Anonymous4K => "4 KiB pages (anonymous)",
        }
    }
}

/// One region of guest memory, all of it present.
pub struct Memory {
    pub guest: Arc<GuestMemoryMmap>,
    pub file: Option<File>,
    pub start: usize,
    pub len: usize,
}

impl Memory {
    pub fn new(pages: Pages, len: usize) -> Self {
        let file = match pages {
            Pages::Huge2M => Some(memfd(c"speed-2m", libc::MFD_HUGETLB | libc::MFD_HUGE_2MB, len)),
            Pages::File4K => Some(memfd(c"speed-4k", 0, len)),
            Pages::Anonymous4K => None,
        };
        let offset = file.as_ref().map(|file| FileOffset::new(file.try_clone().unwrap(), 0));
        let guest = GuestMemoryMmap::from_ranges_with_files([(GuestAddress(0), len, offset)]).unwrap();
        let start = guest.get_host_address(GuestAddress(0)).unwrap() as usize;
        let memory = Self { guest: Arc::new(guest), file, start, len };
        if pages != Pages::Huge2M {
            // SAFETY: the advice changes no byte of our own mapping.
            assert_eq!(unsafe { libc::madvise(start as *mut _, len, libc::MADV_NOHUGEPAGE) }, 0);
        }
        fill(start, len);
        memory
    }

    /// The shares of `count` threads: equal, on page boundaries.
    pub fn shares(&self, count: usize) -> Vec<(usize, usize)> {
        let share = (self.len / count) & !((2 << 20) - 1);
        (0..count)
            .map(|index| {
                let len = if index + 1 == count { self.len - share * index } else { share };
                (self.start + share * index, len)
            })
            .collect()
    }
}

/// Fills memory with 0xA5 by non-temporal stores, so that no line of it is left in a cache.
pub fn fill(start: usize, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_set1_epi8, _mm_sfence, _mm_stream_si128};
    // SAFETY: all of it is a mapping of ours, whole pages, in which nobody else works now.
    unsafe {
        let pattern = _mm_set1_epi8(0xA5u8 as i8);
        for at in (start..start + len).step_by(16) {
            _mm_stream_si128(at as *mut __m128i, pattern);
        }
        _mm_sfence();
    }
}

pub fn is_zero(start: usize, len: usize) -> bool {
    // SAFETY: a mapping of ours, whole pages, and nobody stores to it now.
    let words = unsafe { std::slice::from_raw_parts(start as *const u64, len / 8) };
    words.chunks(512).all(|block| block.iter().fold(0, |seen, word| seen | word) == 0)
}

fn memfd(name: &CStr, flags: libc::c_uint, len: usize) -> File {
    // SAFETY: the name is a C string, and the descriptor is new.
    let file = unsafe {
        let fd = libc::memfd_create(name.as_ptr(), flags | libc::MFD_CLOEXEC);
        assert!(fd >= 0, "memfd_create: {}", io::Error::last_os_error());
        File::from_raw_fd(fd)
    };
    file.set_len(len as u64).unwrap();
    file
}

const NR_HUGEPAGES: &str = "/proc/sys/vm/nr_hugepages";
const FREE_HUGEPAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";

/// Free hugepages of 2 MiB, given back to the host when dropped.
pub struct Hugepages {
    added: u64,
}

impl Hugepages {
    pub fn reserve(bytes: u64) -> Result<Self, String> {
        let needed = bytes / (2 << 20) + 8;
        let missing = needed.saturating_sub(number_in(FREE_HUGEPAGES)?);
        let before = number_in(NR_HUGEPAGES)?;
        if missing > 0 {
            fs::write(NR_HUGEPAGES, (before + missing).to_string())
                .map_err(|error| format!("{missing} more are needed, and {NR_HUGEPAGES} answers: {error}"))?;
        }
        let own = Self { added: number_in(NR_HUGEPAGES)?.saturating_sub(before) };
        match number_in(FREE_HUGEPAGES)? {
            free if free < needed => Err(format!("{needed} are needed, and the host has {free}")),
            _ => Ok(own),
        }
    }
}

impl Drop for Hugepages {
    fn drop(&mut self) {
        // Not back to the old number: others may have added theirs meanwhile.
        if self.added > 0
            && let Ok(now) = number_in(NR_HUGEPAGES)
        {
            let _ = fs::write(NR_HUGEPAGES, now.saturating_sub(self.added).to_string());
        }
    }
}

fn number_in(path: &str) -> Result<u64, String> {
    let text = fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
    text.trim().parse().map_err(|error| format!("{path}: {error}"))
}
