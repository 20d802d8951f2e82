//! A small VMM that lends the same memory to VM after VM.

use std::error::Error;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use clap::Parser;
use vm_zeroing::{HugepagePool, ZeroingService};

use args::Args;
use guest::Machine;
use life::Life;
use progress::Progress;
use report::{Cycle, Summary};

mod args;
mod boot;
mod guest;
mod identity;
mod kvm_guest;
mod life;
mod payload;
mod progress;
mod report;
#[cfg(test)]
mod tests;
mod thread_guest;

/// Anything that ends the program with status 2.
type Failure = Box<dyn Error + Send + Sync>;

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            say(&error);
            ExitCode::from(2)
        }
    }
}

/// Tells people what no program reads. Nothing can be done where standard error is closed.
fn say(text: impl std::fmt::Display) {
    let _ = writeln!(io::stderr(), "mini_vmm: {text}");
}

/// Runs all VMs, prints what came out and returns the words that leaked.
fn run(args: &Args) -> Result<u64, Failure> {
    let machine = Machine::new(args.guest, guest::DEV_KVM, |error| {
        say(format_args!("host threads play the guests, because: {error}"));
    })?;
    let mut builder = ZeroingService::builder();
    if args.method != "auto" {
        builder = builder.method(args.method.parse()?);
    }
    let service = builder.build()?;
    let pools: Vec<HugepagePool> =
        (0..args.vms).map(|_| life::pool(args, &service)).collect::<Result<_, _>>()?;
    let progress = Progress::new(life::work(args), !args.json && io::stderr().is_terminal());
    let lives: Vec<Result<Life, Failure>> = std::thread::scope(|scope| {
        let (machine, progress) = (&machine, &progress);
        let threads: Vec<_> = (0..)
            .zip(&pools)
            .map(|(vm, pool)| scope.spawn(move || life::live(args, pool, machine, vm, progress)))
            .collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|_| Err("a VM's thread panicked".into()))
        };
        threads.into_iter().map(join).collect()
    });
    progress.finish();
    let lives: Vec<Life> = lives.into_iter().collect::<Result<_, _>>()?;

    let cycles: Vec<Cycle> = lives.iter().flat_map(|life| life.cycles.iter().cloned()).collect();
    let samples: Vec<_> = lives.iter().flat_map(|life| life.samples.iter().cloned()).collect();
    let hugetlb = pools.iter().all(HugepagePool::is_hugetlb);
    let leaked_words = cycles.iter().map(Cycle::leaked_words).sum();
    let mut stdout = io::stdout();
    if args.json {
        let summary = Summary {
            guest: machine.name().to_owned(),
            memory_bytes: args.memory,
            page_size: pools.first().map_or(0, HugepagePool::page_bytes),
            backing: if hugetlb { "hugetlb memfd" } else { "memfd" }.to_owned(),
            method: service.method_for(args.memory).to_string(),
            cycles,
            leaked_words,
        };
        writeln!(stdout, "{}", serde_json::to_string_pretty(&summary)?)?;
    } else {
        writeln!(stdout, "{}", report::table(&samples))?;
        let same = cycles.iter().filter(|cycle| cycle.same_pages).count();
        writeln!(
            stdout,
            "VM B got VM A's pages in {same} of {} cycles (guests: {})",
            cycles.len(),
            machine.name()
        )?;
        writeln!(stdout, "words that a guest saw and that were not zero: {leaked_words}")?;
    }
    Ok(leaked_words)
}
