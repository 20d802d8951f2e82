//! The descriptor that tells an event loop that a job is over.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// An eventfd that becomes readable once and is never read by us: readable means over.
#[derive(Debug)]
pub(crate) struct CompletionFd(EventFd);

impl CompletionFd {
    pub(crate) fn new() -> io::Result<Self> {
        EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).map(Self)
    }

    /// Makes the descriptor readable.
    pub(crate) fn signal(&self) {
        if let Err(error) = self.0.write(1) {
            // Only a counter at its maximum can refuse, and then the descriptor is readable already.
            tracing::warn!(%error, "the completion eventfd refused its signal");
        }
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open and owned by `self`, which the returned borrow keeps.
        unsafe { BorrowedFd::borrow_raw(self.0.as_raw_fd()) }
    }
}
