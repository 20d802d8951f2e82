//! The command line.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Parser, ValueEnum};

/// Simulates the pool on a machine that is described: how long it takes at best, how long the pool takes and
/// how much of it stays on its node, and what a static split takes as peers do it.
///
/// The decisions are those of the library: the same code. What memory and workers do is simple physics: a node's
/// memory has a bandwidth that all who clear there share equally, and nobody stores faster than a core can.
/// Every run with the same arguments has the same result.
///
/// Exit status: 0, 1 if something failed, 2 for input that cannot be used.
#[derive(Debug, Clone, Parser)]
#[command(name = "scale_sim", after_long_help = JSON)]
pub struct Args {
    /// What is out of the ordinary, with the defaults in brackets unless the options below say otherwise
    #[arg(long, value_enum, default_value = "even")]
    pub scenario: Scenario,

    /// Nodes with CPUs and memory
    #[arg(long, value_name = "N", default_value = "108", value_parser = nodes)]
    pub nodes: u32,

    /// CPUs of each node
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(..=4096))]
    pub cpus_per_node: u32,

    /// Nodes with memory and no CPUs, besides
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=1024))]
    pub memory_only_nodes: u32,

    /// A captured machine instead: the folder that stands for / (with sys in it), or an archive of it
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["nodes", "cpus_per_node", "memory_only_nodes"])]
    pub tree: Option<PathBuf>,

    /// Memory to clear in all [64G a node]. K, M, G and T are powers of 1024
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub memory: Option<u64>,

    /// Regions of the job on each node
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub regions_per_node: u32,

    /// The fullest node holds so many times what the emptiest does; those between them in even steps
    #[arg(long, value_name = "RATIO", value_parser = at_least_one)]
    pub skew: Option<f64>,

    /// All memory is on this node
    #[arg(long, value_name = "NODE", conflicts_with = "skew")]
    pub on_node: Option<u32>,

    /// One region over all nodes, whose memory policy names none: each chunk is sent home when it is found
    #[arg(long)]
    pub unknown: bool,

    /// This part of the chunks lies on another node than the policy says
    #[arg(long, value_name = "PART", default_value_t = 0.0, value_parser = part_or_none)]
    pub misplaced: f64,

    /// Workers of each node, as the library's builder has it
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub workers_per_node: u32,

    /// Workers serve their own node only
    #[arg(long)]
    pub local_only: bool,

    /// The longest chunk
    #[arg(long, value_name = "SIZE", default_value = "4M", value_parser = parse_size)]
    pub chunk: u64,

    /// A background job that keeps to so many bytes a second
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub background_rate: Option<u64>,

    /// GB/s (10^9 bytes) that the memory of a node takes
    #[arg(long, value_name = "GB/S", default_value_t = 40.0, value_parser = positive)]
    pub node_gbps: f64,

    /// GB/s that one worker stores to its own node's memory
    #[arg(long, value_name = "GB/S", default_value_t = 5.0, value_parser = positive)]
    pub core_gbps: f64,

    /// A worker is so many times slower at distance 20, and at other distances in proportion
    #[arg(long, value_name = "RATIO", default_value_t = 1.5, value_parser = at_least_one)]
    pub remote_penalty: f64,

    /// GB/s that all remote workers together store to one node [no bound]
    #[arg(long, value_name = "GB/S", value_parser = positive)]
    pub link_gbps: Option<f64>,

    /// The memory of this node has only so much of its bandwidth; may be repeated
    #[arg(long, value_name = "NODE=PART")]
    pub slow_node: Vec<Slowed>,

    /// The CPUs of this node have only so much time for us; may be repeated
    #[arg(long, value_name = "NODE=PART")]
    pub busy_node: Vec<Slowed>,

    /// The CPU of this worker has only so much time for us; may be repeated. The first worker of each node comes
    /// first, then the second of each
    #[arg(long, value_name = "WORKER=PART")]
    pub slow_worker: Vec<Slowed>,

    /// From a wake until the worker looks for work, in microseconds
    #[arg(long, value_name = "US", default_value_t = 50.0, value_parser = not_negative)]
    pub wake_us: f64,

    /// Taking a task from another worker, in microseconds
    #[arg(long, value_name = "US", default_value_t = 1.0, value_parser = not_negative)]
    pub steal_us: f64,

    /// A look at a queue, in nanoseconds
    #[arg(long, value_name = "NS", default_value_t = 20.0, value_parser = not_negative)]
    pub look_ns: f64,

    /// How long each of a chunk's three passages holds the lock of the job's books, in nanoseconds
    #[arg(long, value_name = "NS", default_value_t = 100.0, value_parser = not_negative)]
    pub lock_ns: f64,

    /// For what is left to chance: which chunks are misplaced, where unpinned threads run
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,

    /// Print one JSON document instead of tables (its keys: scale_sim --help)
    #[arg(long)]
    pub json: bool,
}

const JSON: &str = "\
JSON: one object.
  machine {nodes, memory_nodes, cpus, workers, node_gbps, core_gbps, remote_penalty, link_gbps,
           wake_us, steal_us, look_ns, lock_ns}, notes, and
  scenarios [{scenario, what, bytes, regions, ideal_seconds, ideal_local_seconds,
              runs [{name, threads, seconds, of_ideal, local_share, local_bytes, remote_bytes, chunks,
                     steals_near, steals_far, helped_out, wakes, sent_home, finish_min, finish_median, finish_max,
                     finished [{node, seconds}]}],
              simulated_in_seconds}]
seconds are those of the simulated machine; simulated_in_seconds is what simulating all of it took here.
ideal_seconds is a bound that no schedule of the pool's workers beats, on whatever nodes they work (its formula:
examples/scale_sim/ideal.rs); ideal_local_seconds one for workers that serve their own node and the nodes without CPUs nearest to it. of_ideal is against ideal_seconds.";

/// `--scenario`
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Scenario {
    /// As much memory on each node
    Even,
    /// All memory on one node [--on-node: the first], as much as it has in `even`
    OneNode,
    /// One node's memory has half its bandwidth [--slow-node: that in the middle]
    SlowNode,
    /// One node's CPUs have half their time for us [--busy-node: that in the middle]
    BusyNode,
    /// One worker's CPU has half its time for us [--slow-worker 0=0.5]
    StolenCpu,
    /// Some nodes hold more than others [--skew 4]
    Skew,
    /// All of these, one after the other
    All,
}

/// What is left of something that has a number.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Slowed {
    pub number: u32,
    pub part: f64,
}

impl FromStr for Slowed {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (number, part) = text.split_once('=').ok_or("it has no =; write 3=0.5 for a half of number 3")?;
        let number = number.trim().parse().map_err(|_| format!("{number:?} is no whole number"))?;
        let part: f64 = part.trim().parse().map_err(|_| format!("{part:?} is no number"))?;
        if !(part > 0.0 && part <= 1.0) {
            return Err(format!("{part} is no part that can be left; give more than 0 and at most 1"));
        }
        Ok(Self { number, part })
    }
}

/// As many as Linux can number (`CONFIG_NODES_SHIFT` is 10 at most).
fn nodes(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(0) => Err("at least one is needed".to_owned()),
        Ok(count @ 1..=1024) => Ok(count),
        Ok(_) => Err("Linux knows 1024 nodes at most".to_owned()),
        Err(_) => Err("it is no whole number".to_owned()),
    }
}

fn number(text: &str) -> Result<f64, String> {
    let number: f64 = text.trim().parse().map_err(|_| "it is no number".to_owned())?;
    if number.is_finite() { Ok(number) } else { Err("it is no finite number".to_owned()) }
}

fn positive(text: &str) -> Result<f64, String> {
    // Far from where sums of seconds lose their last digits.
    match number(text)? {
        rate if (1e-3..=1e6).contains(&rate) => Ok(rate),
        _ => Err("give 0.001 to 1000000 GB/s".to_owned()),
    }
}

fn at_least_one(text: &str) -> Result<f64, String> {
    match number(text)? {
        ratio if (1.0..=1e6).contains(&ratio) => Ok(ratio),
        _ => Err("give 1 (no difference) or more, a million at most".to_owned()),
    }
}

fn part_or_none(text: &str) -> Result<f64, String> {
    match number(text)? {
        part if (0.0..=1.0).contains(&part) => Ok(part),
        _ => Err("give 0 (none) to 1 (all)".to_owned()),
    }
}

fn not_negative(text: &str) -> Result<f64, String> {
    match number(text)? {
        cost if (0.0..=1e9).contains(&cost) => Ok(cost),
        _ => Err("give 0 or more, 1000000000 at most".to_owned()),
    }
}

/// A size in bytes that is not one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    #[error("{0:?} does not begin with a number; write 512M or 536870912")]
    NoNumber(String),
    #[error("{0:?} is no unit; the units are K, M, G, T and P")]
    Unit(String),
    #[error("{0} is more than 64 PiB")]
    TooLarge(String),
    #[error("{0} bytes are no whole number of {PAGE}-byte pages (at least one)")]
    NotPages(u64),
}

/// Memory comes in whole small pages.
const PAGE: u64 = 4096;

/// `7T`, `512M`, `64 KiB`, `4096`: whole pages, 64 PiB at most.
pub fn parse_size(text: &str) -> Result<u64, SizeError> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    if number.is_empty() {
        return Err(SizeError::NoNumber(text.to_owned()));
    }
    let unit = unit.trim();
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        "p" | "pb" | "pib" => 50,
        _ => return Err(SizeError::Unit(unit.to_owned())),
    };
    let bytes = number.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift));
    let bytes = bytes.filter(|bytes| *bytes <= 64 << 50).ok_or(SizeError::TooLarge(text.to_owned()))?;
    if bytes == 0 || bytes % PAGE != 0 {
        return Err(SizeError::NotPages(bytes));
    }
    Ok(bytes)
}
