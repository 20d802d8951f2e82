//! What `perf bench mem` is to the kernel's routines, for this library and user space.
//!
//! `zero_bench memset` compares the methods, the C library and Rust's own means over the length of a call;
//! `mmap` compares the kernel's clearing of fresh pages with clearing in place; `contend` lets several clear at
//! once, and somebody read beside them; `calibrate` prints what the library chooses here, and why.
//! `zero_bench --help` lists the keys of the JSON document.

use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use serde::Serialize;

use args::{Args, Command};
use machine::Machine;

mod args;
mod calibrate;
mod contend;
mod contestant;
mod machine;
#[cfg(test)]
mod made_up;
mod measure;
mod memory;
mod memset;
mod mmap;
mod output;
mod plot;
mod progress;
mod raw;
mod reader;
mod sizes;
mod stats;
mod tables;
#[cfg(test)]
mod tests;

/// What ends the program.
#[derive(Debug)]
enum Failure {
    /// Input that cannot be used here: status 2.
    Input(Box<dyn Error + Send + Sync>),
    /// Anything else: status 1.
    Run(Box<dyn Error + Send + Sync>),
}

impl Failure {
    fn input(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Input(error.into())
    }

    fn run(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Run(error.into())
    }
}

impl<E: Error + Send + Sync + 'static> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::run(error)
    }
}

/// The JSON document.
#[derive(Debug, Serialize)]
struct Document<'a, T> {
    command: &'static str,
    machine: &'a Machine,
    /// What may spoil the figures.
    notes: &'a [String],
    result: &'a T,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Input(error)) => {
            say(&error);
            ExitCode::from(2)
        }
        Err(Failure::Run(error)) => {
            say(&error);
            ExitCode::FAILURE
        }
    }
}

/// Tells people what no program reads. Nothing can be done where standard error is closed.
fn say(text: impl std::fmt::Display) {
    let _ = writeln!(io::stderr(), "zero_bench: {text}");
}

fn run(args: &Args) -> Result<(), Failure> {
    let machine = Machine::here()?;
    let notes = notes(&args.command, &machine);
    notes.iter().for_each(|note| say(format_args!("note: {note}")));
    let width = tables::width();
    let print = |text: String| Ok(writeln!(io::stdout(), "{text}")?);
    macro_rules! print {
        ($command:literal, $result:ident, $text:expr) => {
            if args.json {
                let document =
                    Document { command: $command, machine: &machine, notes: &notes, result: &$result };
                print(serde_json::to_string_pretty(&document)?)
            } else {
                print(format!("{}\n{}", machine.show(), $text))
            }
        };
    }
    match &args.command {
        Command::Memset(options) => {
            let result = memset::run(options, &machine)?;
            if let Some(path) = &options.plot {
                output::write(path, &plot::draw(&result, &machine)?)?;
            }
            print!("memset", result, result.show(width))
        }
        Command::Mmap(options) => {
            let result = mmap::run(options, &machine)?;
            print!("mmap", result, result.show())
        }
        Command::Contend(options) => {
            let result = contend::run(options, &machine)?;
            print!("contend", result, result.show(width))
        }
        Command::Calibrate(options) => {
            let result = calibrate::run(options)?;
            print!("calibrate", result, result.show(width))
        }
    }
}

/// What may spoil the figures.
fn notes(command: &Command, machine: &Machine) -> Vec<String> {
    let threads = match command {
        Command::Memset(options) => options.threads,
        Command::Mmap(options) => options.threads,
        Command::Contend(options) => options.threads.unwrap_or(1),
        Command::Calibrate(_) => 1,
    };
    let mut notes = Vec::new();
    if threads > machine.cpus {
        notes.push(format!("{threads} threads take turns on {} CPUs", machine.cpus));
    }
    let load = machine.load.split(' ').next().and_then(|load| load.parse::<f64>().ok());
    if let Some(load) = load.filter(|load| *load > machine.cpus as f64 / 2.0) {
        notes.push(format!("the load was {load} before: figures spread where other work goes on"));
    }
    if cfg!(debug_assertions) {
        notes.push("built without --release: the time between readings is long".to_owned());
    }
    notes
}
