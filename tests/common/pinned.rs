//! Pages held by the kernel for somebody else, as a device's mapping would.
#![allow(unsafe_code)]

use std::io::{PipeReader, PipeWriter, Read};
use std::os::fd::AsRawFd;

/// Pages in a pipe (`vmsplice(2)`): not copies, the pages themselves.
#[derive(Debug)]
pub struct Pinned {
    len: usize,
    reader: PipeReader,
    _writer: PipeWriter,
}

impl Pinned {
    pub fn pages(base: u64, len: u64) -> Self {
        let (reader, writer) = std::io::pipe().unwrap();
        let range = libc::iovec { iov_base: base as *mut libc::c_void, iov_len: len as usize };
        // SAFETY: a range of the test's own memory; without SPLICE_F_GIFT the pages stay ours too.
        let taken =
            unsafe { libc::vmsplice(writer.as_raw_fd(), &raw const range, 1, libc::SPLICE_F_NONBLOCK) };
        assert_eq!(taken, len as isize, "{}", std::io::Error::last_os_error());
        Self { len: len as usize, reader, _writer: writer }
    }

    /// What the pages hold now.
    pub fn bytes(mut self) -> Vec<u8> {
        let mut found = vec![0xee; self.len];
        self.reader.read_exact(&mut found).unwrap();
        found
    }
}
