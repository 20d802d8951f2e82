//! setrlimit(2), and who is bound by it.
#![allow(unsafe_code)]

use std::io;

/// A soft limit of this process, as it was when dropped.
#[derive(Debug)]
pub struct Limit {
    resource: libc::__rlimit_resource_t,
    before: libc::rlimit,
}

impl Limit {
    pub fn lower(resource: libc::__rlimit_resource_t, to: u64) -> Self {
        let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: fills the struct, which outlives the call.
        assert_eq!(unsafe { libc::getrlimit(resource, &raw mut before) }, 0);
        let limit = Self { resource, before };
        limit.set(libc::rlimit { rlim_cur: to.min(before.rlim_max), ..before });
        limit
    }

    fn set(&self, limit: libc::rlimit) {
        // SAFETY: reads the struct, which outlives the call.
        let answer = unsafe { libc::setrlimit(self.resource, &raw const limit) };
        assert_eq!(answer, 0, "{}", io::Error::last_os_error());
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        self.set(self.before);
    }
}

/// Makes this process an ordinary user's, who has no other processes, where it may; says aloud why not.
/// There is no way back: for a process of its own.
pub fn become_ordinary_user() -> Option<()> {
    let user = 60_000 + std::process::id() % 5_000;
    // SAFETY: numbers only; the C library changes all threads.
    let refused = unsafe {
        libc::setgroups(0, std::ptr::null()) != 0 || libc::setgid(user) != 0 || libc::setuid(user) != 0
    };
    if refused {
        println!("skipped: cannot become another user (root can): {}", io::Error::last_os_error());
        return None;
    }
    Some(())
}

/// Ends this process by SIGALRM should it hang: it is not a good end, and says so.
pub fn never_hang() {
    // SAFETY: numbers only; a test has no handler for it.
    unsafe { libc::alarm(120) };
}
