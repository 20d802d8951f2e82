//! Which absent pages read zero. Derived from proof, never believed; whatever is not proved is overwritten.
//!
//! Two things count as proof, both only where no userfaultfd is registered (its handler decides the bytes)
//! and only in mappings that may be read and written (elsewhere nobody can clear, and it must be said):
//! - private anonymous memory that is absent: neither present nor swapped
//!   (`Documentation/admin-guide/mm/pagemap.rst`). Such memory has no other place for bytes, and the next
//!   fault gets a zeroed page;
//! - a hole (`SEEK_DATA`, lseek(2)) of a shared mapping of a tmpfs file or memfd, on Linux 6.6 or newer:
//!   older kernels could show a hole where khugepaged was collapsing shmem pages.
//!
//! A private mapping of a file proves nothing (it may hold its own copies of a punched page), nor does
//! an absent hugetlb page of a shared file (the file may hold it).
//!
//! Only `/proc/self/smaps` tells of a userfaultfd. The kernel walks the page tables of the whole process for
//! it, so it is read by the first worker that meets an absent page, and not at all where none is met.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;

use crate::sys::{FileKind, file_holes, file_kind, kernel_is_at_least, reopen};

/// What may be believed of the absent pages of a job.
#[derive(Debug)]
pub(crate) enum Freshness {
    /// Nothing: every page is overwritten.
    Nothing,
    /// Everything: the files are new and nobody else has seen them. Of use once, to make their pages present.
    ByConstruction,
    /// What can be proved of them.
    ByProof(OnceLock<Known>),
}

impl Freshness {
    pub(crate) fn by_proof() -> Self {
        Self::ByProof(OnceLock::new())
    }

    /// The addresses that read zero among `absent` ones (whole pages), in ascending order. `files` are those
    /// that the regions of the job say they map.
    pub(crate) fn holes<'f>(
        &self,
        absent: &[Range<u64>],
        files: impl Iterator<Item = &'f File>,
    ) -> Vec<Range<u64>> {
        match self {
            Self::ByProof(known) if !absent.is_empty() => {
                known.get_or_init(|| Known::of_process(files)).holes(absent)
            }
            _ => Vec::new(),
        }
    }
}

/// What was found out about the mappings of the process.
#[derive(Debug, Default)]
pub(crate) struct Known {
    /// Those that can prove something, ascending by address.
    mappings: Vec<Mapping>,
    files: Vec<Backing>,
}

impl Known {
    /// What cannot be looked up is not believed.
    fn of_process<'f>(files: impl Iterator<Item = &'f File>) -> Self {
        let holes_can_be_trusted = kernel_is_at_least(6, 6);
        let mut backings: Vec<Backing> = Vec::new();
        let is_tmpfs = |file: &File| file_kind(file).is_ok_and(|kind| kind == FileKind::Tmpfs);
        // Never a device node: opening one again may do anything.
        for file in files.filter(|file| holes_can_be_trusted && is_tmpfs(file)) {
            let Ok(identity) = identity(file) else { continue };
            if backings.iter().all(|known| known.identity != identity)
                && let Ok(file) = reopen(file)
            {
                backings.push(Backing { file, identity });
            }
        }
        let smaps = std::fs::read("/proc/self/smaps").unwrap_or_else(|error| {
            tracing::warn!(%error, "/proc/self/smaps cannot be read; sparse memory is made present and overwritten");
            Vec::new()
        });
        // Names of mapped files need not be UTF-8.
        let smaps = String::from_utf8_lossy(&smaps);
        let mappings = parse_smaps(&smaps).filter(|mapping| mapping.usable && !mapping.userfaultfd);
        let mappings = mappings.filter(|mapping| mapping.shared || mapping.anonymous).collect();
        Self { mappings, files: backings }
    }

    fn holes(&self, absent: &[Range<u64>]) -> Vec<Range<u64>> {
        let mut holes = Vec::new();
        for run in absent {
            let first = self.mappings.partition_point(|mapping| mapping.range.end <= run.start);
            let meets = |mapping: &&Mapping| mapping.range.start < run.end;
            for mapping in self.mappings.iter().skip(first).take_while(meets) {
                let part = run.start.max(mapping.range.start)..run.end.min(mapping.range.end);
                if mapping.shared {
                    holes.extend(self.file_holes(mapping, part).unwrap_or_default());
                } else {
                    holes.push(part);
                }
            }
        }
        holes
    }

    /// Addresses of a part of a shared mapping behind which its file has a hole. What is mapped there, and from
    /// where in it on, the kernel says: a region may be wrong about its file.
    fn file_holes(&self, mapping: &Mapping, part: Range<u64>) -> Option<Vec<Range<u64>>> {
        let backing = self.files.iter().find(|file| file.identity == mapping.identity)?;
        let from = mapping.offset.checked_add(part.start - mapping.range.start)?;
        let to = from.checked_add(part.end - part.start)?;
        let holes = file_holes(&backing.file, from..to).ok()?;
        let address = |offset: u64| part.start + (offset - from);
        Some(holes.into_iter().map(|hole| address(hole.start)..address(hole.end)).collect())
    }
}

/// A tmpfs file of the job, opened again so that seeking does not move the caller's offset.
#[derive(Debug)]
struct Backing {
    file: File,
    identity: Identity,
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
    /// May be read and written.
    usable: bool,
    userfaultfd: bool,
}

/// The mappings whose flags are known, ascending and disjoint; others are left out, and so not believed.
fn parse_smaps(text: &str) -> impl Iterator<Item = Mapping> {
    let mut current: Option<Mapping> = None;
    let mut told_up_to = 0;
    text.lines().filter_map(move |line| {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            let mut mapping = current.take()?;
            // The kernel writes the file in pieces. Mappings that merge between two of them are told of
            // again, as one that begins before what was told already.
            let again = told_up_to.clamp(mapping.range.start, mapping.range.end) - mapping.range.start;
            mapping.range.start += again;
            mapping.offset = mapping.offset.checked_add(again)?;
            told_up_to = told_up_to.max(mapping.range.end);
            mapping.userfaultfd =
                flags.split_ascii_whitespace().any(|flag| matches!(flag, "um" | "uw" | "ui"));
            return Some(mapping).filter(|mapping| !mapping.range.is_empty());
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
    let usable = permissions.starts_with("rw");
    Some(Mapping { range, identity, offset, shared, anonymous, usable, userfaultfd: true })
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "lists of one range are meant")]
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
7f0000a00000-7f0000c00000 r--p 00000000 00:00 0
VmFlags: rd mr mw me ac
7f0000c00000-7f0000e00000 rw-p 00000000 00:00 0
Rss: 0 kB
";

    #[test]
    fn smaps_tell_kind_and_use() {
        let found: Vec<_> = parse_smaps(SMAPS)
            .map(|m| (m.range.start >> 20 & 0xf, m.shared, m.anonymous, m.usable && !m.userfaultfd))
            .collect();
        let expected = [
            (0, false, true, true),
            (2, false, true, false),
            (4, true, false, true),
            (6, false, false, true),
            (8, false, false, true),
            (10, false, true, false),
        ];
        assert_eq!(found, expected, "and the mapping without flags is left out");
    }

    /// Absent pages count only inside of mappings that prove something, and are cut at their borders.
    #[test]
    fn absent_pages_across_mappings() {
        let mappings = parse_smaps(SMAPS).filter(|m| m.usable && !m.userfaultfd && m.anonymous).collect();
        let known = Known { mappings, files: Vec::new() };
        let at = |mib: u64| 0x7f00_0000_0000 + (mib << 20);
        assert_eq!(known.holes(&[at(0)..at(16)]), [at(0)..at(2)]);
        assert_eq!(known.holes(&[at(1)..at(3), at(9)..at(11), at(20)..at(21)]), [at(1)..at(2)]);
        // A shared mapping of a file that nobody named, and no mapping at all.
        let known = Known { mappings: parse_smaps(SMAPS).filter(|m| m.shared).collect(), files: Vec::new() };
        assert_eq!(known.holes(&[at(0)..at(16)]), []);
        assert_eq!(Known::default().holes(&[at(0)..at(16)]), []);
        assert_eq!(Freshness::Nothing.holes(&[at(0)..at(16)], [].into_iter()), []);
    }

    #[test]
    fn mappings_told_twice_are_told_once() {
        let smaps = "\
7f0000000000-7f0000200000 rw-s 00000000 00:01 77 /memfd:ram (deleted)
VmFlags: rd wr
7f0000000000-7f0000400000 rw-s 00000000 00:01 77 /memfd:ram (deleted)
VmFlags: rd wr
7f0000100000-7f0000300000 rw-s 00100000 00:01 77 /memfd:ram (deleted)
VmFlags: rd wr
7f0000400000-7f0000500000 rw-p 00000000 00:00 0
VmFlags: rd wr
";
        let told: Vec<_> = parse_smaps(smaps)
            .map(|mapping| {
                (mapping.range.start >> 20 & 0xf, mapping.range.end >> 20 & 0xf, mapping.offset >> 20)
            })
            .collect();
        assert_eq!(told, [(0, 2, 0), (2, 4, 2), (4, 5, 0)]);
    }

    #[test]
    fn junk_is_no_mapping() {
        for junk in ["", "VmFlags: rd", "zz-yy rw-p 0 0 0", "1-2", "7f00-8000 rw 0 0 0 0", "-"] {
            assert_eq!(parse_smaps(junk).count(), 0, "{junk}");
        }
    }
}
