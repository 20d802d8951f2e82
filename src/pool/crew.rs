//! The threads of a pool: started, pinned, named, introduced to the embedder.

use std::fmt;
use std::io;
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};

use crate::error::BuildError;
use crate::sys::{
    allowed_cpus, block_asynchronous_signals, pin_current_thread, thread_id, use_normal_policy,
};
use crate::topology::{NodeId, Topology};

/// Said outright, or std would ask the environment. The deepest a worker goes is a page-by-page search for
/// a bad page and the memory object's own code.
pub(crate) const STACK: usize = 512 << 10;

/// What a thread of the service is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ThreadKind {
    /// Zeroes memory; pinned to the CPUs of its node.
    Worker,
    /// Looks after deadlines and stuck workers, for which nobody need wait; sleeps all the rest of the time.
    Watchdog,
}

/// A thread of the service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct ThreadInfo {
    /// Its number in the system, as in `/proc/self/task`.
    pub tid: u32,
    /// What it is for.
    pub kind: ThreadKind,
    /// The node it is pinned to; `None` for the watchdog.
    pub node: Option<NodeId>,
    /// A worker's number, as in its name and in reports; `None` for the watchdog.
    pub worker: Option<u32>,
}

/// The embedder's part in a thread's start.
pub(crate) type OnThreadStart = dyn Fn(&ThreadInfo) -> io::Result<()> + Send + Sync;

/// How threads of a pool are started.
#[derive(Clone)]
pub(crate) struct Crew {
    on_start: Option<Arc<OnThreadStart>>,
}

impl fmt::Debug for Crew {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Crew").field("on_start", &self.on_start.is_some()).finish()
    }
}

/// A thread that runs and waits for its duty.
pub(crate) struct Recruit<D> {
    pub(crate) info: ThreadInfo,
    pub(crate) thread: JoinHandle<()>,
    duty: mpsc::Sender<D>,
}

impl<D> Recruit<D> {
    /// Lets the thread go without a duty, and waits for its end.
    pub(crate) fn dismiss(self) {
        let Self { thread, duty, .. } = self;
        drop(duty);
        let _ = thread.join();
    }

    /// Gives the thread what it is to do.
    pub(crate) fn begin(self, duty: D) -> (ThreadInfo, JoinHandle<()>) {
        // It waits for it.
        let _ = self.duty.send(duty);
        (self.info, self.thread)
    }
}

/// Why there is no thread.
#[derive(Debug)]
pub(crate) enum NoThread {
    /// The host started none.
    Refused(io::Error),
    /// It ran, and the embedder's function failed on it.
    Start(io::Error),
}

/// What a thread is to be.
#[derive(Debug, Clone)]
pub(crate) struct Post {
    pub(crate) kind: ThreadKind,
    pub(crate) worker: Option<u32>,
    pub(crate) node: Option<NodeId>,
    /// Where to pin it; empty: nowhere.
    pub(crate) cpus: Vec<u32>,
}

impl Post {
    pub(crate) fn worker(number: usize, node: NodeId, topology: &Topology) -> Self {
        let cpus = topology.cpus_serving(node).to_vec();
        Self { kind: ThreadKind::Worker, worker: Some(number as u32), node: Some(node), cpus }
    }

    pub(crate) fn watchdog() -> Self {
        Self { kind: ThreadKind::Watchdog, worker: None, node: None, cpus: Vec::new() }
    }

    /// At most 15 bytes, as the kernel wants it: letters give way to digits. With node and number below 65536, as
    /// those of a machine are, it is whole and no other thread's; what is longer yet is cut.
    pub(crate) fn name(&self) -> String {
        const MOST: usize = 15;
        let mut name = match (self.node, self.worker) {
            (Some(node), Some(number)) => {
                let name = format!("vmz-n{}-w{number}", node.0);
                if name.len() <= MOST { name } else { format!("vmz-{}-{number}", node.0) }
            }
            _ => "vmz-watchdog".to_owned(),
        };
        name.truncate(MOST);
        name
    }
}

impl Crew {
    pub(crate) fn new(on_start: Option<Arc<OnThreadStart>>) -> Self {
        Self { on_start }
    }

    /// Starts one thread for each post, all at once; returns when every one of them is pinned and running. The
    /// first that the host refuses ends it: that thread's error comes with those that run.
    pub(crate) fn start<D: Send + 'static>(
        &self,
        posts: impl IntoIterator<Item = Post>,
        work: impl Fn(D) + Clone + Send + 'static,
    ) -> Result<(Vec<Recruit<D>>, Option<io::Error>), BuildError> {
        let mut started = Vec::new();
        let mut refused = None;
        for post in posts {
            match self.spawn(post.clone(), work.clone()) {
                Ok(running) => started.push((post, running)),
                Err(error) => {
                    refused = Some(error);
                    break;
                }
            }
        }
        let mut recruits = Vec::new();
        let mut failed = None;
        for (post, running) in started {
            match running() {
                Ok(recruit) => recruits.push(recruit),
                Err(source) => failed = Some(BuildError::ThreadStart { thread: post.name(), source }),
            }
        }
        match failed {
            None => Ok((recruits, refused)),
            Some(error) => {
                recruits.into_iter().for_each(Recruit::dismiss);
                Err(error)
            }
        }
    }

    /// Starts one thread.
    pub(crate) fn start_one<D: Send + 'static>(
        &self,
        post: Post,
        work: impl Fn(D) + Send + 'static,
    ) -> Result<Recruit<D>, NoThread> {
        self.spawn(post, work).map_err(NoThread::Refused)?().map_err(NoThread::Start)
    }

    /// Spawns a thread; what it returns waits until the thread has settled in.
    fn spawn<D: Send + 'static>(
        &self,
        post: Post,
        work: impl Fn(D) + Send + 'static,
    ) -> io::Result<impl FnOnce() -> io::Result<Recruit<D>>> {
        let (duty, duties) = mpsc::channel();
        let (ready, running) = mpsc::channel();
        let on_start = self.on_start.clone();
        let name = post.name();
        let thread = thread::Builder::new().name(name).stack_size(STACK).spawn(move || {
            settle_in(&post.cpus, post.node);
            let info = ThreadInfo { tid: thread_id(), kind: post.kind, node: post.node, worker: post.worker };
            let started = on_start.map_or(Ok(()), |on_start| on_start(&info));
            let failed = started.is_err();
            let _ = ready.send(started.map(|()| info));
            drop(ready);
            if failed {
                return;
            }
            if let Ok(duty) = duties.recv() {
                work(duty);
            }
        })?;
        Ok(move || match running.recv().unwrap_or_else(|_| Err(io::Error::other("it panicked"))) {
            Ok(info) => Ok(Recruit { info, thread, duty }),
            Err(error) => {
                let _ = thread.join();
                Err(error)
            }
        })
    }
}

/// Makes the calling thread one of ours: on its node's CPUs as far as the process may use them, at normal
/// scheduling policy, deaf to signals that are the VMM's. A refusal is worth a warning, not a failure.
pub(crate) fn settle_in(cpus: &[u32], node: Option<NodeId>) {
    block_asynchronous_signals();
    if let Err(error) = use_normal_policy() {
        tracing::warn!(%error, "a thread keeps the low scheduling policy of the thread that built the service");
    }
    if cpus.is_empty() {
        return;
    }
    if let Err(error) = pin_within(cpus, allowed_cpus, pin_current_thread) {
        tracing::warn!(?node, ?cpus, %error, "cannot pin a worker to its node; it runs where it may");
    }
}

/// The topology may be the caller's own: narrows what the operator gave us, never widens it.
fn pin_within(
    cpus: &[u32],
    allowed: impl Fn() -> io::Result<Vec<u32>>,
    pin: impl Fn(&[u32]) -> io::Result<()>,
) -> io::Result<()> {
    let attempt = || {
        let allowed = allowed().unwrap_or_else(|_| cpus.to_vec());
        let own: Vec<u32> = cpus.iter().copied().filter(|cpu| allowed.contains(cpu)).collect();
        if own.is_empty() { Err(io::ErrorKind::InvalidInput.into()) } else { pin(&own) }
    };
    // The second look is for a cpuset that was changed after the first.
    attempt().or_else(|_| attempt())
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::collections::HashSet;

    use super::*;

    fn name(node: u32, worker: u32) -> String {
        let (node, worker) = (Some(NodeId(node)), Some(worker));
        Post { kind: ThreadKind::Worker, worker, node, cpus: Vec::new() }.name()
    }

    #[test]
    fn names_are_whole_and_nobody_elses() {
        assert_eq!((name(0, 3), name(999, 1023)), ("vmz-n0-w3".into(), "vmz-n999-w1023".into()));
        assert_eq!(name(1023, 16_383), "vmz-1023-16383");
        assert_eq!(name(65_535, 65_535), "vmz-65535-65535");
        assert_eq!(Post::watchdog().name(), "vmz-watchdog");
        // Around each place where one of them gets longer.
        let edges = [0, 1, 9, 10, 99, 100, 102, 999, 1000, 1023, 1024, 6553, 9999, 10_000, 16_383, 65_535];
        let mut seen = HashSet::from([Post::watchdog().name()]);
        for (node, worker) in edges.iter().flat_map(|node| edges.map(|worker| (*node, worker))) {
            let name = name(node, worker);
            assert!(name.len() <= 15 && name.starts_with("vmz-"), "{name}");
            assert!(name.contains(&node.to_string()) && name.ends_with(&worker.to_string()), "{name}");
            assert!(seen.insert(name.clone()), "{name} twice");
        }
        // No machine has these.
        assert_eq!(name(u32::MAX, u32::MAX), "vmz-4294967295-");
        assert_eq!(name(0, u32::MAX), "vmz-0-429496729");
    }

    /// R32: while a thread starts, the first two of its CPUs are taken away, and the other two given back.
    #[test]
    fn a_cpuset_that_changes_between_look_and_pinning() {
        let changed = Cell::new(false);
        let asked = RefCell::new(Vec::new());
        let allowed = || Ok(if changed.get() { vec![2, 3, 9] } else { vec![0, 1, 9] });
        let pin = |cpus: &[u32]| {
            asked.borrow_mut().push(cpus.to_vec());
            // As the kernel, if none of them is in the cpuset.
            if changed.replace(true) { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EINVAL)) }
        };
        pin_within(&[0, 1, 2, 3], allowed, pin).unwrap();
        assert_eq!(*asked.borrow(), [[0, 1], [2, 3]], "never wider than what is allowed");
    }

    #[test]
    fn what_cannot_be_pinned_is_tried_twice() {
        let tried = Cell::new(0);
        let refused = |_: &[u32]| {
            tried.set(tried.get() + 1);
            Err(io::Error::from_raw_os_error(libc::EPERM))
        };
        let error = pin_within(&[0], || Ok(vec![0]), refused).unwrap_err();
        assert_eq!((error.raw_os_error(), tried.take()), (Some(libc::EPERM), 2));
        // None of them is allowed: nothing to ask the kernel for.
        let error = pin_within(&[0], || Ok(vec![1]), refused).unwrap_err();
        assert_eq!((error.kind(), tried.take()), (io::ErrorKind::InvalidInput, 0));
        // Where nobody tells, the kernel narrows what it is asked for.
        let unknown = || Err(io::ErrorKind::PermissionDenied.into());
        pin_within(&[0, 1], unknown, |cpus| {
            assert_eq!(cpus, [0, 1]);
            Ok(())
        })
        .unwrap();
    }
}
