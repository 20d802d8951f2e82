//! What happens to one memory: VM A, teardown, VM B, and again.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::FromRawFd;
use std::sync::Arc;
use std::time::Instant;

use kvm_ioctls::VmFd;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};

use crate::Failure;
use crate::args::{Args, PageSizeArg};
use crate::guest::{Guest, GuestError, Machine};
use crate::identity::Identity;
use crate::progress::Progress;
use crate::report::{Cycle, Phase, Sample, gb_per_s};
use crate::thread_guest::ThreadGuest;

/// RAM keeps clear of the GiB below 4 GiB, where devices have their registers.
const HOLE: std::ops::Range<u64> = 3 << 30..4 << 30;

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
    let phases = if args.no_zeroing { 3 } else { 4 };
    args.memory.saturating_mul(phases * u64::from(args.cycles) * u64::from(args.vms))
}

/// All cycles of one memory.
pub fn live(args: &Args, machine: &Machine, vm: u32, progress: &Progress) -> Result<Life, Failure> {
    let memory = memory(args.memory, args.page_size)?;
    let mut life = Life::default();
    for cycle in 0..args.cycles {
        let advance = |bytes| progress.advance(bytes);
        let mut timed = |phase: Phase, by: &str, work: &mut dyn FnMut() -> Result<u64, GuestError>| {
            let whose = if args.vms == 1 { String::new() } else { format!("memory {vm}, ") };
            progress.phase(format!("{whose}cycle {}: {phase}", cycle + 1));
            let start = Instant::now();
            let found = work()?;
            let seconds = start.elapsed().as_secs_f64();
            let method = by.to_owned();
            life.samples.push(Sample { phase, bytes: args.memory, seconds, method, node_local_share: None });
            Ok::<_, GuestError>(found)
        };
        // A secret of its own for each memory and cycle, with no word of it zero.
        let secret = 0x5ec2_e700_0000_0001 | u64::from(vm) << 32 | u64::from(cycle) << 1;

        // SAFETY: both guests end, and their VMs with them, before `memory` does.
        let register = |vm: &Arc<VmFd>| unsafe { crate::slots::register_ram(vm, &memory) };
        let mut a = Guest::start(machine, &memory, register)?;
        let first = timed(Phase::FirstScan, machine.scans_by(), &mut || a.scan(&advance))?;
        timed(Phase::Fill, machine.fills_by(), &mut || a.fill(secret, &advance).map(|()| 0))?;
        let identity = Identity::of(&memory)?;
        if let Guest::Kvm(guest) = a {
            let (vcpu, (), shell) = guest.stop();
            drop((vcpu, shell));
        }
        let mut zero = (0, 0.0);
        if !args.no_zeroing {
            let start = Instant::now();
            timed(Phase::Zero, "write", &mut || ThreadGuest::new(&memory).fill(0, &advance).map(|()| 0))?;
            zero = (args.memory, start.elapsed().as_secs_f64());
        }
        let mut b = Guest::start(machine, &memory, register)?;
        let reuse = timed(Phase::ReuseScan, machine.scans_by(), &mut || b.scan(&advance))?;
        life.cycles.push(Cycle {
            vm,
            first_scan_nonzero_words: first,
            reuse_scan_nonzero_words: reuse,
            zero_bytes: zero.0,
            zero_seconds: zero.1,
            zero_gb_per_s: gb_per_s(zero.0, zero.1),
            node_local_share: None,
            same_pages: identity.same_pages(&Identity::of(&memory)?),
        });
    }
    Ok(life)
}

/// Guest memory on a memfd, around the hole.
fn memory(bytes: u64, page_size: PageSizeArg) -> Result<GuestMemoryMmap, Failure> {
    let huge = match page_size {
        PageSizeArg::Small | PageSizeArg::Auto => 0,
        PageSizeArg::Huge2M => libc::MFD_HUGETLB | libc::MFD_HUGE_2MB,
        PageSizeArg::Huge1G => libc::MFD_HUGETLB | libc::MFD_HUGE_1GB,
    };
    // SAFETY: the name is a C string; the call touches no other memory of ours.
    let fd = unsafe { libc::memfd_create(c"mini_vmm".as_ptr(), libc::MFD_CLOEXEC | huge) };
    if fd < 0 {
        return Err(io::Error::last_os_error().into());
    }
    // SAFETY: the descriptor is new and nobody else's.
    let file = Arc::new(unsafe { File::from_raw_fd(fd) });
    file.set_len(bytes)?;
    let low = bytes.min(HOLE.start);
    let mut ranges = vec![(GuestAddress(0), low as usize, Some(FileOffset::from_arc(file.clone(), 0)))];
    if bytes > low {
        let place = FileOffset::from_arc(file, low);
        ranges.push((GuestAddress(HOLE.end), (bytes - low) as usize, Some(place)));
    }
    Ok(GuestMemoryMmap::from_ranges_with_files(ranges)?)
}
