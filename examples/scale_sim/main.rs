//! The pool on machines that nobody has at hand: a discrete-event simulation of the library's own scheduling
//! decisions on a described machine, against the ideal and against static splits.
//!
//! `scale_sim --help` says what is simulated and lists the keys of the JSON document.

use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::Parser;
use vm_zeroing::Topology;

use args::Args;
use report::{Document, Machine};
use tree::{Made, TreeError};

mod agenda;
mod args;
#[path = "../../src/extent/split.rs"]
#[allow(dead_code, reason = "the pool asks for more than the simulator does")]
mod extent;
mod host;
mod ideal;
mod layout;
mod machine;
mod memory;
mod pool;
mod queues;
mod report;
mod run;
mod scenario;
mod split;
#[cfg(test)]
mod tests;
mod tree;

/// What the pool's files expect here.
mod topology {
    pub(crate) use vm_zeroing::{NodeId, Topology};
}

/// What ends the program.
#[derive(Debug)]
enum Failure {
    /// Input that cannot be used: status 2.
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

impl From<TreeError> for Failure {
    fn from(error: TreeError) -> Self {
        match error {
            TreeError::Temporary(_) => Self::run(error),
            _ => Self::input(error),
        }
    }
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
    let _ = writeln!(io::stderr(), "scale_sim: {text}");
}

fn topology(args: &Args) -> Result<Topology, TreeError> {
    let Args { nodes, cpus_per_node, memory_only_nodes, .. } = *args;
    match &args.tree {
        Some(tree) => tree::captured(tree),
        None => Made { nodes, cpus_per_node, memory_only_nodes }.topology(),
    }
}

fn run(args: &Args) -> Result<(), Failure> {
    let topology = topology(args)?;
    let machine = Machine::new(&scenario::host(args, &topology)?, args);
    let mut notes = Vec::new();
    if cfg!(debug_assertions) {
        notes.push("built without --release: simulating takes ten times as long".to_owned());
    }
    notes.iter().for_each(|note| say(format_args!("note: {note}")));
    let mut out = io::stdout();
    if !args.json {
        writeln!(out, "{}", machine.show()).map_err(Failure::run)?;
    }
    let mut outcomes = Vec::new();
    for scenario in scenario::asked(args) {
        let outcome = scenario::play(scenario, args, &topology)?;
        if !args.json {
            writeln!(out, "\n{}", report::table(&outcome)).map_err(Failure::run)?;
        }
        outcomes.push(outcome);
    }
    if args.json {
        let document = Document { machine: &machine, notes: &notes, scenarios: &outcomes };
        let text = serde_json::to_string_pretty(&document).map_err(Failure::run)?;
        writeln!(out, "{text}").map_err(Failure::run)?;
    }
    Ok(())
}
