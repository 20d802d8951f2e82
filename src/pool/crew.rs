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

    /// At most 15 bytes, as the kernel wants it.
    pub(crate) fn name(&self) -> String {
        let name = match (self.node, self.worker) {
            (Some(node), Some(number)) => format!("vmz-n{}-w{number}", node.0),
            _ => "vmz-watchdog".to_owned(),
        };
        name.chars().take(15).collect()
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
    // The second look is for a cpuset that was changed after the first.
    let pinned = pin_within_allowed(cpus).or_else(|_| pin_within_allowed(cpus));
    if let Err(error) = pinned {
        tracing::warn!(?node, ?cpus, %error, "cannot pin a worker to its node; it runs where it may");
    }
}

/// The topology may be the caller's own: narrows what the operator gave us, never widens it.
fn pin_within_allowed(cpus: &[u32]) -> io::Result<()> {
    let allowed = allowed_cpus().unwrap_or_else(|_| cpus.to_vec());
    let own: Vec<u32> = cpus.iter().copied().filter(|cpu| allowed.contains(cpu)).collect();
    if own.is_empty() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    pin_current_thread(&own)
}
