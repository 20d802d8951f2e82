//! A small VMM that lends the same memory to VM after VM.

use std::error::Error;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};

use args::Args;
use guest::{Guest, Machine};
use identity::Identity;
use progress::Progress;
use report::{Cycle, Phase, Sample, Summary, gb_per_s};
use thread_guest::ThreadGuest;

mod args;
mod boot;
mod guest;
mod identity;
mod kvm_guest;
mod payload;
mod progress;
mod report;
mod slots;
#[cfg(test)]
mod tests;
mod thread_guest;

type Failure = Box<dyn Error + Send + Sync>;

fn main() -> ExitCode {
    let args = Args::parse();
    let mut stderr = io::stderr();
    match run(&args) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            let _ = writeln!(stderr, "mini_vmm: {error}");
            ExitCode::from(2)
        }
    }
}

fn run(args: &Args) -> Result<u64, Failure> {
    let machine = Machine::new(args.guest, |error| {
        let _ = writeln!(io::stderr(), "mini_vmm: host threads play the guests, because: {error}");
    })?;
    let phases = if args.no_zeroing { 3 } else { 4 };
    let bytes = args.memory * phases * u64::from(args.cycles) * u64::from(args.vms);
    let progress = Progress::new(bytes, !args.json && io::stderr().is_terminal());
    let results: Vec<Result<Vec<(Cycle, Vec<Sample>)>, Failure>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..args.vms)
            .map(|vm| {
                scope.spawn({
                    let (machine, progress) = (&machine, &progress);
                    move || life(args, machine, vm, progress)
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|t| t.join().unwrap_or_else(|_| Err("a VM's thread panicked".into())))
            .collect()
    });
    progress.finish();
    let mut cycles = Vec::new();
    let mut samples = Vec::new();
    for result in results {
        for (cycle, of_cycle) in result? {
            cycles.push(cycle);
            samples.extend(of_cycle);
        }
    }
    let leaked_words = cycles.iter().map(Cycle::leaked_words).sum();
    let mut stdout = io::stdout();
    if args.json {
        let summary = Summary {
            guest: machine.name().to_owned(),
            memory_bytes: args.memory,
            page_size: 4096,
            backing: "memfd".to_owned(),
            method: args.method.clone(),
            cycles,
            leaked_words,
        };
        writeln!(stdout, "{}", serde_json::to_string_pretty(&summary)?)?;
    } else {
        writeln!(stdout, "{}", report::table(&samples))?;
        writeln!(stdout, "{leaked_words} words that were not zero reached a guest")?;
    }
    Ok(leaked_words)
}

fn life(
    args: &Args,
    machine: &Machine,
    vm: u32,
    progress: &Progress,
) -> Result<Vec<(Cycle, Vec<Sample>)>, Failure> {
    let memory = memory(args.memory)?;
    let advance = |bytes| progress.advance(bytes);
    (0..args.cycles)
        .map(|cycle| {
            let mut samples = Vec::new();
            let mut timed =
                |phase, method: &str, work: &mut dyn FnMut() -> Result<u64, guest::GuestError>| {
                    progress.phase(format!("VM {vm}, cycle {cycle}: {phase}"));
                    let start = Instant::now();
                    let found = work()?;
                    samples.push(Sample {
                        phase,
                        bytes: args.memory,
                        seconds: start.elapsed().as_secs_f64(),
                        method: method.to_owned(),
                        node_local_share: None,
                    });
                    Ok::<u64, Failure>(found)
                };
            // SAFETY: `memory` outlives both guests.
            #[allow(unsafe_code)]
            let register =
                |vm: &std::sync::Arc<kvm_ioctls::VmFd>| unsafe { slots::register_ram(vm, &memory) };
            let mut a = Guest::start(machine, &memory, register)?;
            let first = timed(Phase::FirstScan, "guest", &mut || a.scan(&advance))?;
            timed(Phase::Fill, "guest", &mut || {
                a.fill(0x5ec2_e75e_c2e7_0001 + u64::from(cycle), &advance).map(|()| 0)
            })?;
            let identity_a = Identity::of(&memory)?;
            drop(a);
            if !args.no_zeroing {
                timed(Phase::Zero, "write_slice", &mut || {
                    ThreadGuest::new(&memory).fill(0, &advance).map(|()| 0)
                })?;
            }
            let mut b = Guest::start(machine, &memory, register)?;
            let reuse = timed(Phase::ReuseScan, "guest", &mut || b.scan(&advance))?;
            let same_pages = identity_a.same_pages(&Identity::of(&memory)?);
            let zero = samples.iter().find(|s| s.phase == Phase::Zero);
            let (zero_bytes, zero_seconds) = zero.map_or((0, 0.0), |s| (s.bytes, s.seconds));
            Ok((
                Cycle {
                    vm,
                    first_scan_nonzero_words: first,
                    reuse_scan_nonzero_words: reuse,
                    zero_bytes,
                    zero_seconds,
                    zero_gb_per_s: gb_per_s(zero_bytes, zero_seconds),
                    node_local_share: None,
                    same_pages,
                },
                samples,
            ))
        })
        .collect()
}

#[allow(unsafe_code)]
fn memory(bytes: u64) -> Result<GuestMemoryMmap, Failure> {
    use std::os::fd::FromRawFd;
    // SAFETY: a valid name; the descriptor is new and nobody else's.
    let file = unsafe {
        let fd = libc::memfd_create(c"mini_vmm".as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 {
            return Err(io::Error::last_os_error().into());
        }
        std::fs::File::from_raw_fd(fd)
    };
    file.set_len(bytes)?;
    const HOLE: u64 = 3 << 30;
    let file = std::sync::Arc::new(file);
    let mut ranges =
        vec![(GuestAddress(0), bytes.min(HOLE) as usize, Some(FileOffset::from_arc(file.clone(), 0)))];
    if bytes > HOLE {
        ranges.push((GuestAddress(4 << 30), (bytes - HOLE) as usize, Some(FileOffset::from_arc(file, HOLE))));
    }
    Ok(GuestMemoryMmap::from_ranges_with_files(ranges)?)
}
