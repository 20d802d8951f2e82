//! Which pages are fresh: not there yet, so that the kernel will hand them out zeroed. Derived from
//! proof, never believed; whatever is not proved is overwritten.
//!
//! Two things count as proof, both only where no userfaultfd is registered (its handler decides the bytes):
//! - private anonymous memory whose pagemap entry is empty: neither present nor swapped
//!   (`Documentation/admin-guide/mm/pagemap.rst`);
//! - a hole (`SEEK_DATA`, lseek(2)) of a shared mapping of a tmpfs file or memfd, on Linux 6.6 or newer:
//!   older kernels could show a hole where khugepaged was collapsing shmem pages.
//!
//! A private mapping of a file proves nothing (it may hold its own copies of a punched page), nor does
//! an absent hugetlb page of a shared file (the file may hold it).

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};

use vm_memory::FileOffset;

use crate::extent::Extent;
use crate::sys::{Chunk, first_data, is_tmpfs, kernel_is_at_least, page_size, reopen};

/// What may be believed of the pages of a request that are not there yet. By default nothing.
#[derive(Debug, Default)]
pub(crate) struct Freshness {
    /// Host address ranges of private anonymous memory without a userfaultfd.
    anonymous: Vec<Range<u64>>,
    /// Shared mappings without a userfaultfd.
    shared: Vec<Mapping>,
    /// Per region: the tmpfs file, opened again so that seeking does not move the caller's offset.
    files: Vec<Option<Backing>>,
    pagemap: Option<File>,
    /// All pages are fresh by the way they were made.
    by_construction: bool,
}

impl Freshness {
    /// For pages of files that we have just created and nobody else has seen.
    pub(crate) fn by_construction() -> Self {
        Self { by_construction: true, ..Self::default() }
    }

    /// Looks the process's mappings up, for regions backed by `files`. What cannot be looked up is not believed.
    pub(crate) fn of_process<'f>(files: impl Iterator<Item = Option<&'f FileOffset>>) -> Self {
        let Ok(smaps) = std::fs::read_to_string("/proc/self/smaps") else { return Self::default() };
        let mut found = Self { pagemap: File::open("/proc/self/pagemap").ok(), ..Self::default() };
        for mapping in parse_smaps(&smaps).filter(|mapping| !mapping.userfaultfd) {
            match (mapping.shared, mapping.anonymous) {
                (false, true) => found.anonymous.push(mapping.range),
                (true, _) => found.shared.push(mapping),
                (false, false) => {}
            }
        }
        let holes_can_be_trusted = kernel_is_at_least(6, 6);
        found.files = files
            .map(|file| {
                let named = file.filter(|file| holes_can_be_trusted && is_tmpfs(file.file()))?;
                let (file, identity) = (reopen(named.file()).ok()?, identity(named.file()).ok()?);
                Some(Backing { file, identity, start: named.start() })
            })
            .collect();
        found
    }

    /// Whether every page that the chunk touches is proved fresh.
    pub(crate) fn proves(&self, chunk: &Chunk<'_>, extent: Extent) -> bool {
        if self.by_construction {
            return true;
        }
        let page = page_size();
        let start = chunk.ptr() as u64 & !(page - 1);
        let Some(end) = (chunk.ptr() as u64 + chunk.len() as u64).checked_next_multiple_of(page) else {
            return false;
        };
        if self.anonymous.iter().any(|range| range.start <= start && end <= range.end) {
            return self.pagemap_is_empty(start / page, end / page).unwrap_or(false);
        }
        let Some(Some(backing)) = self.files.get(extent.region as usize) else { return false };
        let Some(first) = backing.start.checked_add(extent.start).map(|offset| offset & !(page - 1)) else {
            return false;
        };
        if !self.shared.iter().any(|mapping| mapping.shows(start..end, backing, first)) {
            return false;
        }
        // No data behind `first` at all, or none before the last page's end.
        first_data(&backing.file, first)
            .is_ok_and(|data| data.is_none_or(|data| data.saturating_sub(first) >= end - start))
    }

    fn pagemap_is_empty(&self, first: u64, end: u64) -> io::Result<bool> {
        /// Soft-dirty says nothing about content, and is set for pages that never were.
        const SOFT_DIRTY: u64 = 1 << 55;
        let Some(pagemap) = &self.pagemap else { return Ok(false) };
        let mut entries = [0u8; 4096];
        let mut at = first * 8;
        while at < end * 8 {
            let want = entries.len().min((end * 8 - at) as usize);
            let buffer = &mut entries[..want];
            pagemap.read_exact_at(buffer, at)?;
            let mut words = buffer
                .chunks_exact(8)
                .map(|word| word.iter().rev().fold(0u64, |sum, b| sum << 8 | u64::from(*b)));
            if words.any(|entry| entry & !SOFT_DIRTY != 0) {
                return Ok(false);
            }
            at += want as u64;
        }
        Ok(true)
    }
}

/// A file behind a region, as the region says.
#[derive(Debug)]
struct Backing {
    file: File,
    identity: Identity,
    /// Where in the file the region begins.
    start: u64,
}

/// Device (major, minor) and inode.
type Identity = (u32, u32, u64);

fn identity(file: &File) -> io::Result<Identity> {
    let found = file.metadata()?;
    Ok((libc::major(found.dev()), libc::minor(found.dev()), found.ino()))
}

/// One mapping of `/proc/<pid>/smaps` (proc_pid_smaps(5)).
#[derive(Debug, Clone, PartialEq, Eq)]
struct Mapping {
    range: Range<u64>,
    /// What is mapped, and from where in it on.
    identity: Identity,
    offset: u64,
    shared: bool,
    /// No file behind it.
    anonymous: bool,
    userfaultfd: bool,
}

impl Mapping {
    /// Whether these addresses show the file from `offset` on. A region's word for it is not enough: holes of
    /// another file, or of another part of this one, say nothing about the bytes behind the addresses.
    fn shows(&self, addresses: Range<u64>, backing: &Backing, offset: u64) -> bool {
        self.range.start <= addresses.start
            && addresses.end <= self.range.end
            && self.identity == backing.identity
            && self.offset.checked_add(addresses.start - self.range.start) == Some(offset)
    }
}

/// The mappings whose flags are known; others are left out, and so not believed.
fn parse_smaps(text: &str) -> impl Iterator<Item = Mapping> {
    let mut current: Option<Mapping> = None;
    text.lines().filter_map(move |line| {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            let mut mapping = current.take()?;
            mapping.userfaultfd =
                flags.split_ascii_whitespace().any(|flag| matches!(flag, "um" | "uw" | "ui"));
            return Some(mapping);
        }
        if let Some(header) = parse_header(line) {
            current = Some(header);
        }
        None
    })
}

/// `start-end perms offset dev inode [path]`, hexadecimal addresses.
fn parse_header(line: &str) -> Option<Mapping> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let range = u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?;
    let permissions = words.next()?;
    let offset = u64::from_str_radix(words.next()?, 16).ok()?;
    let (major, minor) = words.next()?.split_once(':')?;
    let inode: u64 = words.next()?.parse().ok()?;
    let identity = (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?, inode);
    let path = words.next().unwrap_or("");
    let shared = match permissions.as_bytes().get(3)? {
        b's' => true,
        b'p' => false,
        _ => return None,
    };
    // Named anonymous mappings show as [anon:name]; [heap] and [stack] are anonymous as well.
    let anonymous = inode == 0 && (path.is_empty() || path.starts_with('['));
    Some(Mapping { range, identity, offset, shared, anonymous, userfaultfd: true })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
7f0000000000-7f0000200000 rw-p 00000000 00:00 0
Size:               2048 kB
VmFlags: rd wr mr mw me ac
7f0000200000-7f0000400000 rw-p 00000000 00:00 0                          [anon:guest]
VmFlags: rd wr mr mw me um
7f0000400000-7f0000600000 rw-s 00000000 00:01 77                         /memfd:ram (deleted)
VmFlags: rd wr sh mr mw me ms
7f0000600000-7f0000800000 rw-p 00000000 00:01 77                         /memfd:ram (deleted)
VmFlags: rd wr mr mw me
7f0000800000-7f0000a00000 rw-p 00000000 00:0f 78                         /anon_hugepage (deleted)
VmFlags: rd wr mr mw me ht
7f0000a00000-7f0000c00000 rw-p 00000000 00:00 0
Rss: 0 kB
";

    #[test]
    fn smaps_tell_kind_and_userfaultfd() {
        let found: Vec<_> = parse_smaps(SMAPS)
            .map(|m| (m.range.start >> 20 & 0xf, m.shared, m.anonymous, m.userfaultfd))
            .collect();
        let expected = [
            (0, false, true, false),
            (2, false, true, true),
            (4, true, false, false),
            (6, false, false, false),
            (8, false, false, false),
        ];
        assert_eq!(found, expected, "and the mapping without flags is left out");
    }

    /// Entries as the kernel writes them (`Documentation/admin-guide/mm/pagemap.rst`): only one that says
    /// nothing, or no more than soft-dirty, is empty.
    #[test]
    fn pagemap_entries() {
        let path = std::env::temp_dir().join(format!("vm-zeroing-pagemap-{}", std::process::id()));
        let words = |bits: &[u64]| bits.iter().flat_map(|bit| bit.to_ne_bytes()).collect::<Vec<u8>>();
        let empty_after = |entries: &[u64]| {
            std::fs::write(&path, words(entries)).unwrap();
            let freshness = Freshness { pagemap: File::open(&path).ok(), ..Freshness::default() };
            freshness.pagemap_is_empty(1, entries.len() as u64).unwrap()
        };
        let (present, swapped, shared, exclusive, soft_dirty) = (1 << 63, 1 << 62, 1 << 61, 1 << 56, 1 << 55);
        assert!(empty_after(&[present, 0, soft_dirty, 0]), "from the second on");
        for one in [present, swapped, shared, exclusive, 1, swapped | soft_dirty, present | 0x1234] {
            assert!(!empty_after(&[0, 0, one, 0]), "{one:#x}");
        }
        // More entries than are read at once, the last one not empty.
        let mut many = vec![0; 1300];
        assert!(empty_after(&many));
        many[1299] = swapped;
        assert!(!empty_after(&many));
        // A pagemap that ends early proves nothing.
        let freshness = Freshness { pagemap: File::open(&path).ok(), ..Freshness::default() };
        assert!(freshness.pagemap_is_empty(0, 1301).is_err());
        assert!(!Freshness::default().pagemap_is_empty(0, 1).unwrap(), "nor does one that cannot be read");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn junk_is_no_mapping() {
        for junk in ["", "VmFlags: rd", "zz-yy rw-p 0 0 0", "1-2", "7f00-8000 rw 0 0 0 0", "-"] {
            assert_eq!(parse_smaps(junk).count(), 0, "{junk}");
        }
    }
}
