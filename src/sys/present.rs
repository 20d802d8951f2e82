//! Asking which pages of a range are there already, which is cheaper than asking for them.
//!
//! `MADV_POPULATE_WRITE` takes some 160 ns for a base page that is present (Zen 5, Linux 6.18), three times
//! as long as clearing it; `PAGEMAP_SCAN` takes 12 ns. Hugepages do not need this: they are few.
//!
//! # What a survey says
//!
//! Which pages are *absent*: mapped, and neither present nor swapped. Pages under migration, poisoned ones and
//! guard regions count as swapped. For a shared mapping that is no more than this mapping's view: the file
//! may hold the page. What absence proves about bytes is argued in `guest/fresh.rs`.
//!
//! # What makes populating needless
//!
//! That a store meets a page, and so neither a signal nor a handler of somebody else:
//! - every page is present and neither the zero page, nor write-protected by a userfaultfd, nor part of a
//!   hugepage. Swapped, poisoned, truncated and not yet faulted pages are not present;
//! - the mapping is private anonymous memory, or a shared one of the kernel's own shmem mount (memfds, shared
//!   anonymous memory), of base pages: no file system has a say in a store to a page that is there;
//! - what holds for a whole mapping (it may be written, by this thread, and is no device) is asked of the
//!   kernel by populating one page of each mapping, one that is there.
//!
//! Anything else, and any answer that is not understood, proves nothing. As with populate, what another
//! thread or process changes afterwards is not covered. A page shared by fork or KSM is copied at the
//! store; if there is no memory at all for that, the kernel's OOM killer comes, as it does under populate.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::OnceLock;

use super::memfd::sealed_memfd;
use super::populate::populate_write;
use super::{Chunk, page_size};

/// Fewer base pages than this are populated sooner than asked about.
const ASK_FROM_PAGES: usize = 16;

/// The process's own `maps` and `pagemap`. Answers about the process that first asked.
#[derive(Debug, Default)]
pub(crate) struct Presence {
    pagemap: OnceLock<Option<File>>,
    mappings: OnceLock<Option<Mappings>>,
}

/// Which pages of a range were there. By default nothing is known.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Survey {
    /// Addresses of absent pages: whole pages, ascending, disjoint. Where nothing is mapped, they mean nothing.
    pub(crate) absent: Vec<Range<u64>>,
    /// All pages are there, in such a way that a store may go to them if their mapping lets it.
    all_plain: bool,
    /// All pages are there, hugepages among them but not the zero page, and no userfaultfd write-protects one.
    all_present: bool,
}

impl Survey {
    fn add_absent(&mut self, range: Range<u64>) {
        match self.absent.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => self.absent.push(range),
        }
    }
}

impl Presence {
    /// Which of the pages that `chunk` touches are there.
    pub(crate) fn survey(&self, chunk: &Chunk<'_>) -> Survey {
        let pagemap = self.pagemap.get_or_init(|| {
            let open = File::open("/proc/self/pagemap");
            open.inspect_err(|error| {
                tracing::warn!(%error, "/proc/self/pagemap cannot be read; sparse memory is made present and overwritten");
            })
            .ok()
        });
        let (Some(pagemap), Some(pages)) = (pagemap, chunk.pages()) else { return Survey::default() };
        let pages = pages.start as u64..pages.end as u64;
        scan(pagemap, pages.clone())
            .unwrap_or_else(|| read_entries(pagemap, pages, page_size()).unwrap_or_default())
    }

    /// Whether it is proved, from a survey of the chunk, that populating it would change nothing.
    ///
    /// An error is that of [`populate`](super::populate()).
    pub(crate) fn is_populated(&self, chunk: &Chunk<'_>, survey: &Survey) -> Result<bool, i32> {
        let (page, Some(pages)) = (page_size() as usize, chunk.pages()) else { return Ok(false) };
        if !survey.all_plain || pages.len() < ASK_FROM_PAGES * page {
            return Ok(false);
        }
        let Some(mappings) = self.mappings() else { return Ok(false) };
        let mut at = pages.start;
        while at < pages.end {
            match mappings.holding(at) {
                Some(mapping) if mappings.is_plain_memory(&mapping, page) => {
                    populate_write(at, page)?;
                    at = mapping.vma_end as usize;
                }
                _ => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Whether, by a survey of the chunk, a store to any page waits for nobody (`is_memory`: it is known already that
    /// no file system has a say there): neither for a userfaultfd's handler
    /// nor for a file system, which may hold up the first store to a page that was only read (it may be frozen, or
    /// somebody else's program). What another thread or process changes afterwards is not covered; a page shared by
    /// fork or KSM is copied at the store.
    pub(crate) fn waits_for_nobody(&self, chunk: &Chunk<'_>, survey: &Survey, is_memory: bool) -> bool {
        let (true, Some(pages)) = (survey.all_present, chunk.pages()) else { return false };
        if is_memory {
            return true;
        }
        let Some(mappings) = self.mappings() else { return false };
        let mut at = pages.start;
        while at < pages.end {
            match mappings.holding(at) {
                Some(mapping) if mappings.is_memory_only(&mapping) => at = mapping.vma_end as usize,
                _ => return false,
            }
        }
        true
    }

    fn mappings(&self) -> Option<&Mappings> {
        self.mappings.get_or_init(|| Mappings::open(page_size() as usize).ok()).as_ref()
    }
}

/// Asks by `PAGEMAP_SCAN` (Linux 6.7); `None` where it is not to be had.
fn scan(pagemap: &File, pages: Range<u64>) -> Option<Survey> {
    let mut found = [const { PageRegion::new() }; 64];
    let mut survey = Survey::default();
    let (mut at, mut plain_up_to, mut present_up_to) = (pages.start, pages.start, pages.start);
    while at < pages.end {
        let mut scan = PmScan {
            size: size_of::<PmScan>() as u64,
            start: at,
            end: pages.end,
            vec: found.as_mut_ptr().expose_provenance() as u64,
            vec_len: found.len() as u64,
            // All of them, and what they are.
            category_mask: 0,
            return_mask: PRESENT | SWAPPED | WRITTEN | ZERO_PAGE | HUGE,
            ..Default::default()
        };
        // SAFETY: the kernel reads and writes `size` bytes at `scan`, laid out as `struct pm_scan_arg` of
        // `linux/fs.h`, and writes at most `vec_len` regions at `vec`; both live. No flag asks it to
        // write-protect anything.
        let count = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut scan) };
        for region in found.get(..usize::try_from(count).ok()?)? {
            if region.categories & (PRESENT | SWAPPED) == 0 {
                survey.add_absent(region.start..region.end);
            }
            if region.start == plain_up_to && region.categories == PRESENT | WRITTEN {
                plain_up_to = region.end;
            }
            if region.start == present_up_to
                && region.categories & (PRESENT | WRITTEN | ZERO_PAGE) == PRESENT | WRITTEN
            {
                present_up_to = region.end;
            }
        }
        if scan.walk_end <= at {
            return None;
        }
        at = scan.walk_end;
    }
    survey.all_plain = plain_up_to == pages.end;
    survey.all_present = present_up_to == pages.end;
    Some(survey)
}

/// Asks by the entries of the pagemap (`Documentation/admin-guide/mm/pagemap.rst`).
fn read_entries(pagemap: &File, pages: Range<u64>, page: u64) -> io::Result<Survey> {
    /// Says nothing about content, and is set for pages that never were.
    const SOFT_DIRTY: u64 = 1 << 55;
    let mut survey = Survey::default();
    let mut entries = [0u8; 4096];
    let (mut at, end) = (pages.start / page, pages.end / page);
    while at < end {
        let want = entries.len().min((end - at) as usize * 8);
        let buffer = &mut entries[..want];
        pagemap.read_exact_at(buffer, at * 8)?;
        for word in buffer.chunks_exact(8) {
            let entry = word.iter().rev().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte));
            if entry & !SOFT_DIRTY == 0 {
                survey.add_absent(at * page..(at + 1) * page);
            }
            at += 1;
        }
    }
    Ok(survey)
}

/// The process's own `maps`.
#[derive(Debug)]
struct Mappings {
    maps: File,
    /// Device number, major and minor, of the kernel's shmem mount.
    shmem: (u32, u32),
}

impl Mappings {
    fn open(page: usize) -> io::Result<Self> {
        let device = sealed_memfd(c"vm-zeroing-probe", page as u64, None)?.metadata()?.dev();
        let maps = File::open("/proc/self/maps")?;
        Ok(Self { maps, shmem: (libc::major(device), libc::minor(device)) })
    }

    /// The mapping that holds an address (`PROCMAP_QUERY`, Linux 6.11).
    fn holding(&self, address: usize) -> Option<ProcmapQuery> {
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
        let shared_shmem = has(VMA_SHARED) && self.is_shmem(mapping);
        let is_of_base_pages = mapping.vma_page_size == page as u64;
        has(VMA_WRITABLE) && is_of_base_pages && (is_private_anonymous(mapping) || shared_shmem)
    }

    /// Anonymous memory, memory files, hugetlb: no file system has a say in a store.
    fn is_memory_only(&self, mapping: &ProcmapQuery) -> bool {
        let hugetlb = mapping.vma_page_size > page_size();
        is_private_anonymous(mapping) || self.is_shmem(mapping) || hugetlb
    }

    fn is_shmem(&self, mapping: &ProcmapQuery) -> bool {
        (mapping.dev_major, mapping.dev_minor) == self.shmem
    }
}

fn is_private_anonymous(mapping: &ProcmapQuery) -> bool {
    mapping.inode == 0 && mapping.vma_flags & VMA_SHARED == 0
}

const VMA_WRITABLE: u64 = 1 << 1;
const VMA_SHARED: u64 = 1 << 3;

/// `PAGE_IS_PRESENT`.
const PRESENT: u64 = 1 << 3;
/// `PAGE_IS_SWAPPED`: swapped, or anything else that is neither present nor absent.
const SWAPPED: u64 = 1 << 4;
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

impl PageRegion {
    const fn new() -> Self {
        Self { start: 0, end: 0, categories: 0 }
    }
}

#[cfg(test)]
mod tests;
