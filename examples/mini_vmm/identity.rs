//! Are two VMs' memories made of the same pages?

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};

use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

/// A run of bytes of a file that guest memory maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Run {
    device: u64,
    inode: u64,
    offset: u64,
    len: u64,
}

/// Which pages a guest memory is made of, wherever the guest sees them.
///
/// Equal for two memories that map the same bytes of the same files and, where the kernel tells
/// (CAP_SYS_ADMIN), lie on the same page frames.
#[derive(Debug, Clone)]
pub struct Identity {
    /// Sorted, neighbours joined. `None`: some of the memory maps no file.
    runs: Option<Vec<Run>>,
    /// Sorted page frame numbers. `None`: hidden from this user, or some page is not present.
    frames: Option<Vec<u64>>,
}

impl Identity {
    /// What `memory` is made of now. Pages that nobody has touched through this mapping have no frame
    /// yet: ask after the guest has scanned its RAM.
    ///
    /// # Errors
    ///
    /// A region's file cannot be asked for its inode, or its bytes have no host address.
    pub fn of<M: GuestMemoryBackend>(memory: &M) -> io::Result<Self> {
        let mut runs = Some(Vec::new());
        let mut frames = File::open("/proc/self/pagemap").ok().map(|pagemap| (pagemap, Vec::new()));
        for region in memory.iter() {
            match (region.file_offset(), &mut runs) {
                (Some(place), Some(runs)) => {
                    let file = place.file().metadata()?;
                    let (device, inode, offset) = (file.dev(), file.ino(), place.start());
                    runs.push(Run { device, inode, offset, len: region.len() });
                }
                _ => runs = None,
            }
            let slice = region.as_volatile_slice().map_err(io::Error::other)?;
            let (address, len) = (slice.ptr_guard().as_ptr() as u64, slice.len() as u64);
            frames = frames.and_then(|(pagemap, mut known)| {
                known.extend(frames_of(&pagemap, address, len)?);
                Some((pagemap, known))
            });
        }
        let frames = frames.map(|(_, mut known)| {
            known.sort_unstable();
            known
        });
        Ok(Self { runs: runs.map(join), frames })
    }

    /// `true` only if the pages are proved to be the same: by file and offset where both map files,
    /// by page frame where both are known, and by at least one of the two.
    pub fn same_pages(&self, other: &Self) -> bool {
        let by_file = self.runs.as_ref().zip(other.runs.as_ref()).map(|(a, b)| a == b);
        let by_frame = self.frames.as_ref().zip(other.frames.as_ref()).map(|(a, b)| a == b);
        match (by_file, by_frame) {
            (None, None) => false,
            (file, frame) => file.unwrap_or(true) && frame.unwrap_or(true),
        }
    }
}

/// Sorts runs and joins those that touch.
fn join(mut runs: Vec<Run>) -> Vec<Run> {
    runs.sort_unstable();
    let mut joined: Vec<Run> = Vec::with_capacity(runs.len());
    for run in runs {
        match joined.last_mut() {
            Some(last)
                if (last.device, last.inode, last.offset + last.len)
                    == (run.device, run.inode, run.offset) =>
            {
                last.len += run.len;
            }
            _ => joined.push(run),
        }
    }
    joined
}

/// The frames behind `len` bytes at `address`; `None` if any is absent or hidden.
///
/// Format: Documentation/admin-guide/mm/pagemap.rst, one 64-bit word per page: bit 63 present, bits
/// 0..54 the page frame number, which reads 0 without CAP_SYS_ADMIN.
fn frames_of(pagemap: &File, address: u64, len: u64) -> Option<Vec<u64>> {
    const PRESENT: u64 = 1 << 63;
    const NUMBER: u64 = (1 << 55) - 1;
    const PAGE: u64 = 4096;
    if !cfg!(target_arch = "x86_64") {
        return None; // pagemap may count in other pages there
    }
    let mut bytes = vec![0; usize::try_from(len.div_ceil(PAGE) * 8).ok()?];
    pagemap.read_exact_at(&mut bytes, address / PAGE * 8).ok()?;
    let entries = bytes.chunks_exact(8).map(|entry| {
        let entry = entry.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        (entry & PRESENT != 0 && entry & NUMBER != 0).then_some(entry & NUMBER)
    });
    entries.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(offset: Option<u64>, frame: Option<u64>) -> Identity {
        let runs = offset.map(|offset| vec![Run { device: 1, inode: 2, offset, len: 4096 }]);
        Identity { runs, frames: frame.map(|frame| vec![frame]) }
    }

    #[test]
    fn what_is_known_of_both_must_agree_and_something_must_be_known() {
        let same = |a: (Option<u64>, Option<u64>), b: (Option<u64>, Option<u64>)| {
            identity(a.0, a.1).same_pages(&identity(b.0, b.1))
        };
        let (zero, one) = (Some(0), Some(1));
        assert!(same((zero, one), (zero, one)));
        assert!(same((zero, None), (zero, one)), "an ordinary user sees no frames");
        assert!(same((None, one), (None, one)));
        assert!(!same((zero, one), (one, one)));
        assert!(!same((zero, one), (zero, zero)), "the file's pages were replaced");
        assert!(!same((zero, None), (one, None)));
        assert!(!same((None, None), (None, None)), "nothing is proved");
        assert!(!same((zero, None), (None, one)), "nothing is comparable");
    }
}
