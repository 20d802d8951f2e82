//! Files that are not what they were.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};

use super::{fill, memfd, memfd_with};

/// Guest memory over a file that was cut after it was mapped and filled.
pub fn truncated(len: u64, to: u64) -> (Arc<GuestMemoryMmap<()>>, File) {
    let file = memfd(len);
    let offset = FileOffset::new(file.try_clone().unwrap(), 0);
    let memory =
        GuestMemoryMmap::from_ranges_with_files([(GuestAddress(0), len as usize, Some(offset))]).unwrap();
    fill(&memory, 0, to);
    file.set_len(to).unwrap();
    (Arc::new(memory), file)
}

/// A memory file that can be sealed.
pub fn sealable(len: u64) -> File {
    let file = memfd_with(libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING).unwrap();
    file.set_len(len).unwrap();
    file
}

/// Seals a file (`F_ADD_SEALS`, fcntl(2)).
pub fn seal(file: &File, seals: i32) {
    // SAFETY: numbers only.
    let answer = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) };
    assert_eq!(answer, 0, "{}", std::io::Error::last_os_error());
}

pub fn seals(file: &File) -> i32 {
    // SAFETY: numbers only.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) }
}
