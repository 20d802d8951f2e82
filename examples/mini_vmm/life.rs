//! What happens to one memory: VM A, teardown, VM B, and again.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Instant;

use vm_memory::GuestAddress;
use vm_zeroing::{
    HugepagePool, Job, KvmSlots, LeasedMemory, NodePolicy, PageSize, Quiesced, Report, ZeroingService,
};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use crate::Failure;
use crate::args::{Args, PageSizeArg};
use crate::guest::{Guest, GuestError, Machine};
use crate::identity::Identity;
use crate::progress::Progress;
use crate::report::{Cycle, Phase, Sample, gb_per_s};

/// RAM keeps clear of the GiB below 4 GiB, where devices have their registers.
const HOLE: std::ops::Range<u64> = 3 << 30..4 << 30;

/// Milliseconds between two looks at a job's progress.
const TICK: i32 = 20;

type Memory = Arc<LeasedMemory>;
type RunningGuest<'m> = Guest<'m, LeasedMemory, KvmSlots<LeasedMemory>>;

/// What one memory went through.
#[derive(Debug, Default)]
pub struct Life {
    /// One entry for each cycle.
    pub cycles: Vec<Cycle>,
    /// One entry for each phase of each cycle.
    pub samples: Vec<Sample>,
}

/// Bytes that all VMs together scan, write and clear.
pub fn work(args: &Args) -> u64 {
    // Two scans, a fill, and a teardown for each lease.
    let phases = if args.no_zeroing { 4 } else { 5 };
    args.memory.saturating_mul(phases * u64::from(args.cycles) * u64::from(args.vms))
}

/// A pool that holds one VM's memory, in one slab: whoever leases it next gets the same pages.
pub fn pool(args: &Args, service: &ZeroingService) -> Result<HugepagePool, Failure> {
    let nodes = service.topology().default_memory_nodes();
    let node = *nodes.first().ok_or("no node of this machine has memory for guests")?;
    let builder = HugepagePool::builder(service).capacity(node, args.memory).slab_bytes(args.memory);
    let builder = match args.page_size {
        PageSizeArg::Small => builder.page_size(PageSize::Base),
        PageSizeArg::Huge2M => builder.page_size(PageSize::Huge2M),
        PageSizeArg::Huge1G => builder.page_size(PageSize::Huge1G),
        PageSizeArg::Auto => builder,
    };
    Ok(builder.build()?)
}

/// All cycles of one memory.
pub fn live(
    args: &Args,
    pool: &HugepagePool,
    machine: &Machine,
    vm: u32,
    progress: &Progress,
) -> Result<Life, Failure> {
    let mut life = Life::default();
    for cycle in 0..args.cycles {
        let mut stage = Stage { args, pool, machine, vm, cycle, progress, samples: &mut life.samples };
        let cycle = stage.cycle()?;
        life.cycles.push(cycle);
    }
    Ok(life)
}

/// One cycle of one memory.
struct Stage<'a> {
    args: &'a Args,
    pool: &'a HugepagePool,
    machine: &'a Machine,
    vm: u32,
    cycle: u32,
    progress: &'a Progress,
    samples: &'a mut Vec<Sample>,
}

impl Stage<'_> {
    fn cycle(&mut self) -> Result<Cycle, Failure> {
        let advance = |bytes| self.progress.advance(bytes);
        // A secret of its own for each memory and cycle, with no word of it zero.
        let secret = 0x5ec2_e700_0000_0001 | u64::from(self.vm) << 32 | u64::from(self.cycle) << 1;

        let memory_a = self.lease()?;
        let mut a = self.boot(&memory_a)?;
        let first = self.timed(Phase::FirstScan, self.machine.scans_by(), || a.scan(&advance))?;
        self.timed(Phase::Fill, self.machine.fills_by(), || a.fill(secret, &advance))?;
        let identity = Identity::of(&*memory_a)?;
        let quiet = stop(a)?;

        let (memory_b, zeroed) = if self.args.no_zeroing {
            // The negative control: VM B boots on VM A's own lease, before that lease ends.
            (memory_a, None)
        } else {
            let report = self.teardown(memory_a, quiet)?;
            self.samples.push(Sample {
                phase: Phase::Zero,
                bytes: report.zero_bytes(),
                seconds: report.duration.as_secs_f64(),
                method: report.method.map_or_else(|| "-".to_owned(), |method| method.to_string()),
                node_local_share: Some(report.node_local_share()),
            });
            (self.lease()?, Some(report))
        };

        let mut b = self.boot(&memory_b)?;
        let reuse = self.timed(Phase::ReuseScan, self.machine.scans_by(), || b.scan(&advance))?;
        let same_pages = identity.same_pages(&Identity::of(&*memory_b)?);
        let quiet = stop(b)?;
        self.teardown(memory_b, quiet)?;

        let bytes = zeroed.as_ref().map_or(0, |report| report.zero_bytes());
        let seconds = zeroed.as_ref().map_or(0.0, |report| report.duration.as_secs_f64());
        Ok(Cycle {
            vm: self.vm,
            first_scan_nonzero_words: first,
            reuse_scan_nonzero_words: reuse,
            zero_bytes: bytes,
            zero_seconds: seconds,
            zero_gb_per_s: gb_per_s(bytes, seconds),
            node_local_share: zeroed.as_ref().map(|report| report.node_local_share()),
            same_pages,
        })
    }

    /// Zero pages, laid out around the hole.
    fn lease(&self) -> Result<Memory, Failure> {
        let low = self.args.memory.min(HOLE.start);
        let high = self.args.memory - low;
        let layout = [(GuestAddress(0), low), (GuestAddress(HOLE.end), high)];
        let lease = self.pool.lease(self.args.memory, NodePolicy::Any)?;
        Ok(Arc::new(lease.into_memory(layout.into_iter().filter(|(_, len)| *len > 0))?))
    }

    fn boot<'m>(&self, memory: &'m Memory) -> Result<RunningGuest<'m>, GuestError> {
        Guest::start(self.machine, &**memory, |vm| KvmSlots::register(vm, memory, 0))
    }

    /// Ends a lease; an event loop waits for its pages to be zero.
    fn teardown(&self, memory: Memory, quiet: Quiesced) -> Result<Arc<Report>, Failure> {
        self.announce(Phase::Zero);
        let lease = memory.lease();
        let job = Arc::unwrap_or_clone(memory).recycle(quiet).map_err(|failure| failure.error)?;
        wait_in_event_loop(&job, self.progress)?;
        let report = job.wait()?;
        // Its VM was closed in `stop`.
        self.pool.vm_is_gone(lease);
        Ok(report)
    }

    fn timed<T>(
        &mut self,
        phase: Phase,
        by: &str,
        work: impl FnOnce() -> Result<T, GuestError>,
    ) -> Result<T, GuestError> {
        self.announce(phase);
        let start = Instant::now();
        let found = work()?;
        let seconds = start.elapsed().as_secs_f64();
        let (bytes, method) = (self.args.memory, by.to_owned());
        self.samples.push(Sample { phase, bytes, seconds, method, node_local_share: None });
        Ok(found)
    }

    fn announce(&self, phase: Phase) {
        let whose = if self.args.vms == 1 { String::new() } else { format!("memory {}, ", self.vm) };
        self.progress.phase(format!("{whose}cycle {}: {phase}", self.cycle + 1));
    }
}

/// Stops a guest and closes its VM: what this returns is why its memory may be recycled.
fn stop(guest: RunningGuest<'_>) -> Result<Quiesced, Failure> {
    match guest {
        Guest::Kvm(guest) => {
            let (vcpu, slots, shell) = guest.stop();
            let kvm = slots.teardown([vcpu]).map_err(|failure| failure.error)?;
            drop(shell);
            // No device, no vhost peer, no io_uring in this VMM.
            Ok(kvm.and_nobody_else())
        }
        // The guest was this very thread.
        Guest::Thread(_) => Ok(Quiesced::on_callers_word()),
    }
}

/// What a VMM's event loop does, between its other events, when the job's descriptor becomes readable.
fn wait_in_event_loop(job: &Job, progress: &Progress) -> Result<(), Failure> {
    let epoll = Epoll::new()?;
    let fd = job.completion_fd()?.as_raw_fd();
    epoll.ctl(ControlOperation::Add, fd, EpollEvent::new(EventSet::IN, 0))?;
    let mut events = [EpollEvent::default()];
    let mut shown = 0;
    loop {
        let ready = match epoll.wait(TICK, &mut events) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => 0,
            ready => ready?,
        };
        let done = job.progress().done_bytes;
        progress.advance(done - shown);
        shown = done;
        if ready > 0 {
            return Ok(());
        }
    }
}
