//! Floor 3: a submitted request, its handle, and the report of what is zero and what is not.

mod bell;
mod claim;
mod core;
mod course;
mod drain;
mod meter;
mod outcome;
mod report;
mod tally;
#[cfg(test)]
mod tests;
mod token;
mod work;

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

pub(crate) use self::claim::Claim;
pub use self::core::Priority;
pub(crate) use self::core::{JobCore, Surroundings, Terms, Warden};
pub(crate) use course::StopReason;
pub(crate) use outcome::Outcomes;
pub use outcome::{Cause, Outcome};
pub use report::{NodeProgress, Progress, RangeReport, Report, WorkerShare};
pub(crate) use token::Unseen;
pub(crate) use work::{Hand, Piece, Prepared, Work, WorkRegion};

use crate::error::JobError;
use crate::sys::{CompletionFd, process_id};

/// The handle of a submitted request. Clones are handles of the same job.
///
/// Dropping the last handle of a job over guest memory lets the job finish (it keeps the memory alive
/// itself); over [`HostRange`](crate::HostRange)s it cancels the job and waits for it.
#[derive(Debug, Clone)]
pub struct Job {
    handle: Arc<Handle>,
}

#[derive(Debug)]
struct Handle {
    core: Arc<JobCore>,
    /// Made when it is first asked for: most jobs are waited for without.
    completion: OnceLock<Arc<CompletionFd>>,
    cancel_on_drop: bool,
    /// The process the workers live in.
    process: u32,
}

impl Job {
    /// `process`: the one that the job was submitted in.
    pub(crate) fn new(core: Arc<JobCore>, cancel_on_drop: bool, process: u32) -> Self {
        Self { handle: Arc::new(Handle { core, completion: OnceLock::new(), cancel_on_drop, process }) }
    }

    /// Waits until the job is over. May be called any number of times, from any thread.
    ///
    /// Of many queued jobs that one thread waits for in turn, it hears of the later ends some 0.2 ms late (and the timer
    /// slack of the thread): it naps now and then, instead of having a worker wake it for each.
    ///
    /// # Errors
    ///
    /// [`JobError`] if not every byte is zero; it carries the report that says which are.
    pub fn wait(&self) -> Result<Arc<Report>, JobError> {
        self.handle.check_before_waiting()?;
        loop {
            if let Some(result) = self.handle.core.wait_until(None) {
                return result;
            }
        }
    }

    /// Waits until the job is over, for `timeout` at most; `None` if it is not over by then.
    pub fn wait_timeout(&self, timeout: Duration) -> Option<Result<Arc<Report>, JobError>> {
        if let Err(error) = self.handle.check_before_waiting() {
            return Some(Err(error));
        }
        match Instant::now().checked_add(timeout) {
            Some(until) => self.handle.core.wait_until(Some(until)),
            None => Some(self.wait()),
        }
    }

    /// Whether the job is over. A forked child is told whether it was over before the fork.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.handle.core.is_over()
    }

    /// Asks the job to stop: every worker stops after the chunk it holds (about 1 ms). What was not
    /// reached stays stale. Cancelling it again, or when it is over, changes nothing, nor does a forked child's
    /// cancelling its parent's job.
    pub fn cancel(&self) {
        if self.handle.check_process().is_ok() {
            self.handle.core.stop(StopReason::Cancelled);
        }
    }

    /// How far the job is. Never decreases. A forked child is told how far it was at the fork.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.handle.core.progress()
    }

    /// How far the job is on each node of the machine, ascending by node. Together as far as
    /// [`progress`](Job::progress) when the job is over, less what has no page and so no node and was dealt with
    /// by a thread of the caller's, whose node is not asked for.
    #[must_use]
    pub fn progress_by_node(&self) -> Vec<NodeProgress> {
        self.handle.core.progress_by_node()
    }

    /// A descriptor for `epoll` or `poll` that becomes readable when the job is over and stays so. It
    /// need not be read. [`wait`](Job::wait) then returns at once.
    ///
    /// It is made when it is first asked for, and closed with the last handle, when the job is over.
    ///
    /// # Errors
    ///
    /// No eventfd could be had (`EMFILE`: raise `RLIMIT_NOFILE`). The job goes on, and can be waited for. Or a forked
    /// child asks about a job that was not over before the fork ([`JobError::ForkedChild`] is the error's source).
    pub fn completion_fd(&self) -> io::Result<BorrowedFd<'_>> {
        self.handle.check_before_waiting().map_err(io::Error::other)?;
        let Handle { core, completion, .. } = self.handle.as_ref();
        let fd = match completion.get() {
            Some(fd) => fd,
            None => {
                let fd = Arc::new(CompletionFd::new()?);
                completion.get_or_init(|| fd)
            }
        };
        core.tell_by(fd);
        Ok(fd.as_fd())
    }
}

impl Handle {
    /// What is over can be told anywhere, and without asking the kernel.
    fn check_before_waiting(&self) -> Result<(), JobError> {
        if self.core.result().is_some() { Ok(()) } else { self.check_process() }
    }

    /// A forked child holds a copy of the books, perhaps locked, and the very descriptor of its parent:
    /// it must neither wait for workers that it lacks nor end the job.
    fn check_process(&self) -> Result<(), JobError> {
        match process_id() {
            own if own == self.process => Ok(()),
            waited_in => Err(JobError::ForkedChild { submitted_in: self.process, waited_in }),
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.cancel_on_drop && self.check_process().is_ok() {
            self.core.stop(StopReason::Cancelled);
            while self.core.wait_until(None).is_none() {}
        }
    }
}
