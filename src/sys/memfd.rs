//! Memory files: sealed against resizing, so that no peer can cut pages away under us.

use std::cell::Cell;
use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd};
use std::ptr;
use std::sync::{Arc, Weak};

use super::page_size;

/// `HUGETLBFS_MAGIC` of `linux/magic.h`.
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;
/// `TMPFS_MAGIC` of `linux/magic.h`.
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// A new memory file of `len` bytes, close-on-exec, whose size is final.
///
/// `hugepage`: `None` for base pages, or the hugepage size in bytes, a power of two. A new file holds
/// no page, so all of it reads zero (`memfd_create(2)`).
pub(crate) fn sealed_memfd(name: &CStr, len: u64, hugepage: Option<u64>) -> io::Result<File> {
    let mut flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    if let Some(size) = hugepage {
        flags |= libc::MFD_HUGETLB | size.trailing_zeros() << libc::MFD_HUGE_SHIFT;
    }
    // SAFETY: `name` is a C string that outlives the call.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just gave us this descriptor, and nobody else knows it.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(len)?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: F_ADD_SEALS takes a number and touches no memory of ours.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(file)
}

/// What a file's pages are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileKind {
    /// Base pages of memory, or transparent hugepages: tmpfs, which memfds of base pages are made of.
    Tmpfs,
    /// Hugepages of so many bytes.
    Hugetlbfs(u64),
    /// A file system's, or not known.
    Other,
}

/// As [`file_kind`], asking the kernel only if this thread asked for another file last.
pub(crate) fn known_file_kind(file: &Arc<File>) -> FileKind {
    thread_local! {
        /// As long as there is a `Weak` of it, no other file is at the same address.
        static LAST: Cell<Option<(Weak<File>, FileKind)>> = const { Cell::new(None) };
    }
    let last = LAST.try_with(Cell::take).ok().flatten();
    let known = last.filter(|(known, _)| ptr::eq(known.as_ptr(), Arc::as_ptr(file)));
    let asked = || Some((Arc::downgrade(file), file_kind(file).ok()?));
    let Some(known) = known.or_else(asked) else { return FileKind::Other };
    let kind = known.1;
    let _ = LAST.try_with(|last| last.set(Some(known)));
    kind
}

/// Asks what a file's pages are.
pub(crate) fn file_kind(file: &File) -> io::Result<FileKind> {
    // Device nodes live on a tmpfs, too.
    if !file.metadata()?.is_file() {
        return Ok(FileKind::Other);
    }
    Ok(match filesystem(file)? {
        (TMPFS_MAGIC, _) => FileKind::Tmpfs,
        (HUGETLBFS_MAGIC, page) => FileKind::Hugetlbfs(page),
        _ => FileKind::Other,
    })
}

/// The kind of file system a file lives on and its block size in bytes (`fstatfs(2)`).
fn filesystem(file: &File) -> io::Result<(u64, u64)> {
    // SAFETY: an all-zero statfs is a valid value of that plain C struct, and the call fills it.
    let mut found: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open, and `found` outlives the call.
    if unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut found) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // The widths of these fields differ between C libraries.
    #[allow(clippy::unnecessary_cast)]
    Ok((found.f_type as u64, found.f_bsize as u64))
}

/// The same file opened anew, read-only, with an offset of its own.
pub(crate) fn reopen(file: &File) -> io::Result<File> {
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// The holes of `file` in a range of whole pages, in ascending order, up to the end of the file's last page:
/// behind it there is no memory. Moves the offset of `file` (`SEEK_DATA`, `SEEK_HOLE`, lseek(2)).
pub(crate) fn file_holes(file: &File, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    let page = page_size();
    let mut holes = Vec::new();
    let end = file.metadata()?.len().next_multiple_of(page).min(range.end);
    let mut at = range.start;
    while at < end {
        let data = seek(file, at, libc::SEEK_DATA)?.map_or(end, |data| (data & !(page - 1)).min(end));
        if at < data {
            holes.push(at..data);
        }
        if data == end {
            break;
        }
        // Behind its last byte a file is said to be a hole, be it in the middle of a page.
        at = seek(file, data, libc::SEEK_HOLE)?.map_or(end, |hole| hole.next_multiple_of(page));
    }
    Ok(holes)
}

/// The offset that lseek(2) finds; `None` if there is none up to the file's end.
fn seek(file: &File, from: u64, whence: libc::c_int) -> io::Result<Option<u64>> {
    let from = libc::off_t::try_from(from).map_err(|_| io::Error::from_raw_os_error(libc::EOVERFLOW))?;
    // SAFETY: lseek touches no memory of ours.
    let found = unsafe { libc::lseek(file.as_raw_fd(), from, whence) };
    match u64::try_from(found) {
        Ok(offset) => Ok(Some(offset)),
        Err(_) => match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
            error => Err(error),
        },
    }
}

/// Whether the running kernel is of this version or newer.
pub(crate) fn kernel_is_at_least(major: u32, minor: u32) -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers =
        release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse::<u32>().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (major, minor)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    /// By what a store may wait for: a device node is no memory, although it lives on a tmpfs.
    #[test]
    fn kinds_of_files() {
        let memfd = sealed_memfd(c"kind", page_size(), None).unwrap();
        assert_eq!(file_kind(&memfd).unwrap(), FileKind::Tmpfs);
        for path in ["/dev/null", "/proc/self/maps", "/"] {
            assert_eq!(file_kind(&File::open(path).unwrap()).unwrap(), FileKind::Other, "{path}");
        }
        // What one thread knows of one file it does not believe of another one.
        let (memfd, null) = (Arc::new(memfd), Arc::new(File::open("/dev/null").unwrap()));
        for _ in 0..2 {
            assert_eq!(known_file_kind(&memfd), FileKind::Tmpfs);
            assert_eq!(known_file_kind(&memfd), FileKind::Tmpfs);
            assert_eq!(known_file_kind(&null), FileKind::Other);
        }
        drop(null);
        for _ in 0..100 {
            let other = Arc::new(sealed_memfd(c"kind", page_size(), None).unwrap());
            assert_eq!(known_file_kind(&other), FileKind::Tmpfs, "perhaps at the address of the last one");
        }
    }

    /// Holes of a file, against the pages that were written to it; none lies behind its last page.
    #[test]
    fn holes_of_a_file() {
        let page = page_size();
        for len in [64 * page, 63 * page + 1, 60 * page + 100] {
            // SAFETY: a name and no memory.
            let file = unsafe {
                use std::os::fd::FromRawFd;
                File::from_raw_fd(libc::memfd_create(c"holes".as_ptr(), libc::MFD_CLOEXEC))
            };
            file.set_len(len).unwrap();
            let holes = |range: Range<u64>| -> Vec<u64> {
                let found = file_holes(&file, range.start * page..range.end * page).unwrap();
                found
                    .into_iter()
                    .flat_map(|hole| {
                        assert_eq!((hole.start % page, hole.end % page), (0, 0));
                        hole.start / page..hole.end / page
                    })
                    .collect()
            };
            let all = len.div_ceil(page);
            assert_eq!(holes(0..100), (0..all).collect::<Vec<_>>());
            let data = [0, 3, 4, 17, all - 1];
            for at in data {
                file.write_all_at(&[1], at * page).unwrap();
            }
            for range in [0..100, 1..18, 3..5, 5..17, 4..all, all - 1..all, all..100, 100..200] {
                let expected: Vec<u64> = range.clone().filter(|at| *at < all && !data.contains(at)).collect();
                assert_eq!(holes(range.clone()), expected, "{len} {range:?}");
            }
        }
    }
}
