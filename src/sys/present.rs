//! Asking whether the pages of a range are there already, which is cheaper than asking for them.
//!
//! `MADV_POPULATE_WRITE` takes some 160 ns for a base page that is present (Zen 5, Linux 6.18), three times
//! as long as clearing it; `PAGEMAP_SCAN` takes 12 ns. Hugepages do not need this: they are few.
//!
//! # What is proved
//!
//! That a store meets a page, and so neither a signal nor a handler of somebody else:
//! - what holds for a whole mapping (it may be written, by this thread, and is no device) is asked of the
//!   kernel by populating one page of each mapping;
//! - the mapping is private anonymous memory, or a shared one of the kernel's own shmem mount (memfds, shared
//!   anonymous memory), of base pages: no file system has a say in a store to a page that is there;
//! - every page is present and neither the zero page, nor write-protected by a userfaultfd, nor part of a
//!   hugepage. Swapped, poisoned, truncated and not yet faulted pages are not present.
//!
//! Anything else, and any answer that is not understood, proves nothing. As with populate, what another
//! thread or process changes afterwards is not covered. A page shared by fork or KSM is copied at the
//! store; if there is no memory at all for that, the kernel's OOM killer comes, as it does under populate.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;

use super::memfd::sealed_memfd;

/// The process's own `maps` and `pagemap`. Answers about the process that first asked.
#[derive(Debug, Default)]
pub(crate) struct Presence {
    view: OnceLock<Option<View>>,
}

#[derive(Debug)]
struct View {
    maps: File,
    pagemap: File,
    /// Device number, major and minor, of the kernel's shmem mount.
    shmem: (u32, u32),
}

impl Presence {
    /// Whether all pages of `start .. end` (whole pages) are proved to be there; `probe` populates one page.
    pub(super) fn proves(
        &self,
        start: usize,
        end: usize,
        page: usize,
        probe: impl Fn(usize) -> Result<(), i32>,
    ) -> Result<bool, i32> {
        let Some(view) = self.view.get_or_init(|| View::open(page).ok()) else { return Ok(false) };
        let mut at = start;
        while at < end {
            match view.mapping(at) {
                Some(mapping) if view.is_plain_memory(&mapping, page) => {
                    probe(at)?;
                    at = mapping.vma_end as usize;
                }
                _ => return Ok(false),
            }
        }
        Ok(view.all_present(start, end))
    }
}

impl View {
    fn open(page: usize) -> io::Result<Self> {
        let device = sealed_memfd(c"vm-zeroing-probe", page as u64, None)?.metadata()?.dev();
        Ok(Self {
            maps: File::open("/proc/self/maps")?,
            pagemap: File::open("/proc/self/pagemap")?,
            shmem: (libc::major(device), libc::minor(device)),
        })
    }

    /// The mapping that holds an address (`PROCMAP_QUERY`, Linux 6.11).
    fn mapping(&self, address: usize) -> Option<ProcmapQuery> {
        let mut query = ProcmapQuery {
            size: size_of::<ProcmapQuery>() as u64,
            query_addr: address as u64,
            ..Default::default()
        };
        // SAFETY: the kernel reads and writes `size` bytes at the given struct, which lives and is laid out as
        // `struct procmap_query` of `linux/fs.h`; it asks for no name, so no other memory is written.
        let answer = unsafe { libc::ioctl(self.maps.as_raw_fd(), PROCMAP_QUERY, &raw mut query) };
        (answer == 0 && query.vma_end > address as u64).then_some(query)
    }

    fn is_plain_memory(&self, mapping: &ProcmapQuery, page: usize) -> bool {
        let has = |flag| mapping.vma_flags & flag != 0;
        let anonymous = mapping.inode == 0 && !has(VMA_SHARED);
        let shmem = has(VMA_SHARED) && (mapping.dev_major, mapping.dev_minor) == self.shmem;
        has(VMA_WRITABLE) && mapping.vma_page_size == page as u64 && (anonymous || shmem)
    }

    /// Whether one run of pages that a store may go to covers the range (`PAGEMAP_SCAN`, Linux 6.7).
    fn all_present(&self, start: usize, end: usize) -> bool {
        let mut found = PageRegion::default();
        let mut scan = PmScan {
            size: size_of::<PmScan>() as u64,
            start: start as u64,
            end: end as u64,
            vec: (&raw mut found).expose_provenance() as u64,
            vec_len: 1,
            category_mask: PRESENT | WRITTEN | ZERO_PAGE | HUGE,
            category_inverted: ZERO_PAGE | HUGE,
            return_mask: PRESENT,
            ..Default::default()
        };
        // SAFETY: the kernel reads and writes `size` bytes at `scan`, laid out as `struct pm_scan_arg` of
        // `linux/fs.h`, and writes at most `vec_len` regions at `vec`; both live. No flag asks it to
        // write-protect anything.
        let answer = unsafe { libc::ioctl(self.pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut scan) };
        answer == 1 && found.start == start as u64 && found.end == end as u64
    }
}

const VMA_WRITABLE: u64 = 1 << 1;
const VMA_SHARED: u64 = 1 << 3;

/// `PAGE_IS_PRESENT`.
const PRESENT: u64 = 1 << 3;
/// `PAGE_IS_WRITTEN`: not write-protected by a userfaultfd.
const WRITTEN: u64 = 1 << 1;
/// `PAGE_IS_PFNZERO`.
const ZERO_PAGE: u64 = 1 << 5;
/// `PAGE_IS_HUGE`.
const HUGE: u64 = 1 << 6;

/// `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: libc::Ioctl = both_ways(17, size_of::<ProcmapQuery>());
/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::Ioctl = both_ways(16, size_of::<PmScan>());

const fn both_ways(number: u32, size: usize) -> libc::Ioctl {
    (3 << 30 | (size as u32) << 16 | (b'f' as u32) << 8 | number) as libc::Ioctl
}

/// `struct procmap_query` of `linux/fs.h`.
#[repr(C)]
#[derive(Debug, Default)]
struct ProcmapQuery {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    vma_start: u64,
    vma_end: u64,
    vma_flags: u64,
    vma_page_size: u64,
    vma_offset: u64,
    inode: u64,
    dev_major: u32,
    dev_minor: u32,
    vma_name_size: u32,
    build_id_size: u32,
    vma_name_addr: u64,
    build_id_addr: u64,
}

/// `struct pm_scan_arg` of `linux/fs.h`.
#[repr(C)]
#[derive(Debug, Default)]
struct PmScan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region` of `linux/fs.h`.
#[repr(C)]
#[derive(Debug, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

#[cfg(test)]
mod tests {
    use super::super::{Chunk, page_size, populate};
    use super::*;

    const PAGES: usize = 64;

    /// A mapping of `PAGES` base pages, all of them written to.
    struct Memory(*mut libc::c_void, usize);

    impl Memory {
        fn new(flags: libc::c_int, file: Option<&File>) -> Self {
            let len = PAGES * page_size() as usize;
            let (fd, flags) =
                file.map_or((-1, flags | libc::MAP_ANONYMOUS), |file| (file.as_raw_fd(), flags));
            // SAFETY: a new mapping at an address of the kernel's choosing, written to in its whole length.
            unsafe {
                let rw = libc::PROT_READ | libc::PROT_WRITE;
                let at = libc::mmap(std::ptr::null_mut(), len, rw, flags, fd, 0);
                assert_ne!(at, libc::MAP_FAILED);
                libc::madvise(at, len, libc::MADV_NOHUGEPAGE);
                at.cast::<u8>().write_bytes(0xA5, len);
                Self(at, len)
            }
        }

        fn page(&self, index: usize) -> *mut libc::c_void {
            self.0.wrapping_byte_add(index * page_size() as usize)
        }

        fn is_proved(&self) -> Result<bool, i32> {
            let start = self.0 as usize;
            let probe = |at| {
                // SAFETY: inside a mapping that lives; a probe changes no byte.
                let page = unsafe { Chunk::from_raw(at as *mut u8, 1) };
                populate(&page, None)
            };
            Presence::default().proves(start, start + self.1, page_size() as usize, probe)
        }

        fn populate(&self) -> Result<(), i32> {
            // SAFETY: the mapping lives, and no reference to its bytes does.
            populate(&unsafe { Chunk::from_raw(self.0.cast(), self.1) }, Some(&Presence::default()))
        }
    }

    impl Drop for Memory {
        fn drop(&mut self) {
            // SAFETY: the test's own mapping, unused from here on.
            unsafe { libc::munmap(self.0, self.1) };
        }
    }

    fn file() -> File {
        sealed_memfd(c"present", PAGES as u64 * page_size(), None).unwrap()
    }

    fn kernel_answers() -> bool {
        let answers = super::super::kernel_is_at_least(6, 11);
        if !answers {
            println!("SKIPPED: PROCMAP_QUERY needs Linux 6.11");
        }
        answers
    }

    #[test]
    fn memory_that_was_written_is_there() {
        if kernel_answers() {
            assert_eq!(Memory::new(libc::MAP_PRIVATE, None).is_proved(), Ok(true), "anonymous");
            assert_eq!(Memory::new(libc::MAP_SHARED, None).is_proved(), Ok(true), "shared anonymous");
            assert_eq!(Memory::new(libc::MAP_SHARED, Some(&file())).is_proved(), Ok(true), "memfd");
        }
    }

    #[test]
    fn a_page_that_is_not_there_is_never_proved() {
        for index in [1, PAGES / 2, PAGES - 1] {
            let memory = Memory::new(libc::MAP_PRIVATE, None);
            // SAFETY: drops a page of the test's own mapping.
            unsafe { libc::madvise(memory.page(index), page_size() as usize, libc::MADV_DONTNEED) };
            assert_eq!(memory.is_proved(), Ok(false), "absent");
            // SAFETY: reads a byte of the test's own mapping, which brings the zero page in.
            assert_eq!(unsafe { memory.page(index).cast::<u8>().read_volatile() }, 0);
            assert_eq!(memory.is_proved(), Ok(false), "the zero page");
            assert_eq!(memory.populate(), Ok(()));
            assert_eq!(memory.is_proved(), Ok(kernel_answers()));
        }
    }

    #[test]
    fn a_private_mapping_of_a_file_is_not_believed() {
        assert_eq!(Memory::new(libc::MAP_PRIVATE, Some(&file())).is_proved(), Ok(false));
    }

    #[test]
    fn a_page_that_may_not_be_written_is_an_error() {
        let memory = Memory::new(libc::MAP_SHARED, Some(&file()));
        // SAFETY: takes a right from the test's own mapping.
        unsafe { libc::mprotect(memory.page(PAGES / 2), page_size() as usize, libc::PROT_READ) };
        assert!(memory.populate().is_err());
    }

    #[test]
    fn a_hole_between_mappings_is_an_error() {
        let memory = Memory::new(libc::MAP_PRIVATE, None);
        // SAFETY: a page of the test's own mapping; nobody maps there before it is unmapped again as a whole.
        unsafe {
            let nothing = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            libc::mmap(memory.page(PAGES / 2), page_size() as usize, libc::PROT_NONE, nothing, -1, 0);
        }
        assert!(memory.populate().is_err());
    }

    #[test]
    fn a_file_cut_short_is_an_error() {
        // SAFETY: a name and no memory.
        let file = unsafe {
            use std::os::fd::FromRawFd;
            File::from_raw_fd(libc::memfd_create(c"cut".as_ptr(), libc::MFD_CLOEXEC))
        };
        file.set_len(PAGES as u64 * page_size()).unwrap();
        let memory = Memory::new(libc::MAP_SHARED, Some(&file));
        file.set_len((PAGES as u64 - 1) * page_size()).unwrap();
        assert_eq!(memory.populate(), Err(libc::EFAULT));
    }
}
