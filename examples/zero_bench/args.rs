//! The command line.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args as Group, Parser, Subcommand, ValueEnum};
use vm_zeroing::Method;

use crate::contestant::Entrant;
use crate::memory::Pages;
use crate::sizes::{Sizes, parse_size, parse_sizes};

/// Measures how fast this machine's memory can be made zero, by whom, and at whose cost.
///
/// GB/s are 10^9 bytes a second. Contestants take turns within every run, every run begins with another, one
/// run before does not count; all that was cleared is looked at, outside of the timed part. Threads are bound
/// to CPUs of their own.
///
/// Exit status: 0, 1 if something failed, 2 for input that cannot be used.
#[derive(Debug, Clone, Parser)]
#[command(name = "zero_bench", after_long_help = JSON)]
pub struct Args {
    #[command(subcommand)]
    pub command: Command,

    /// Print one JSON document instead of tables (its keys: zero_bench --help)
    #[arg(long, global = true)]
    pub json: bool,
}

const JSON: &str = "\
JSON: one object.
  command, machine {cpu, family, model, methods, cpus, l2_bytes, llc_bytes, llc_cpus, kernel, libc, load},
  notes, and result, by command:
  memset     state, page_size, huge_share, threads, runs, yardstick,
             sizes [{size_bytes, call_bytes, reading_bytes, best,
                     lines [{name, kind, method, non_temporal, gb_per_s, relative, of_best}]}],
             crossovers [{chooser, from_bytes, before, after}]
  mmap       runs, pages [{page_size, huge_share, bytes, chunk_bytes, lines [{name, threads, gb_per_s, relative}]}]
  contend    page_size, runs, call_bytes,
             at_once [{threads, lines [{method, non_temporal, gb_per_s, per_thread}]}],
             readers [{buffer_bytes, clearing_threads, alone_ns,
                       beside [{method, non_temporal, ns_per_load, slowdown, gb_per_s}]}]
  calibrate  calibration, as the library saves it
gb_per_s, alone_ns and ns_per_load are {mean, stdev, median, min, max, runs [one a run]}; ratios (relative,
of_best, slowdown) are medians of the runs' own ratios.";

#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// GB/s of every method, of libc::memset and of ptr::write_bytes, over the length of a call
    Memset(MemsetArgs),
    /// The kernel's clearing of fresh pages against clearing the same pages in place
    Mmap(MmapArgs),
    /// Several threads at once, and a reader whose cache is at stake beside them
    Contend(ContendArgs),
    /// What the library chooses on this machine, and why
    Calibrate(CalibrateArgs),
}

#[derive(Debug, Clone, Group)]
pub struct MemsetArgs {
    /// Lengths of a call: 4K..1G (by fours), 4K..1G*2 (by twos), or a list. K, M, G and T are powers of 1024
    #[arg(long, value_name = "SIZES", default_value = "4K..1G", value_parser = parse_sizes)]
    pub sizes: Sizes,

    /// Memory on these pages
    #[arg(long, value_enum, default_value_t = Pages::Transparent)]
    pub page_size: Pages,

    /// Stale bytes were just written through the caches
    #[arg(long, conflicts_with = "cold")]
    pub hot: bool,

    /// Stale bytes are in no cache (the default)
    #[arg(long)]
    pub cold: bool,

    #[arg(long, value_name = "N", default_value = "10", value_parser = count, help = RUNS)]
    pub runs: usize,

    /// Only these: method names, memset, write-bytes, auto; separated by commas. The yardstick is always there
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub methods: Vec<Entrant>,

    /// Threads that share the memory equally; their calls are shorter where a share is
    #[arg(long, value_name = "N", default_value = "1", value_parser = count)]
    pub threads: usize,

    /// What a reading clears at least (twice the last cache, within 64M and 256M, unless given)
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub reading: Option<u64>,

    #[command(flatten)]
    pub calibration: CalibrationArgs,

    /// Draw GB/s over size to this file
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,
}

const RUNS: &str = "How often everybody is measured";

#[derive(Debug, Clone, Group)]
pub struct CalibrationArgs {
    /// How long to calibrate: 50ms, 2s
    #[arg(long, value_name = "TIME", default_value = "50ms")]
    pub budget: Budget,

    /// Take a saved calibration instead
    #[arg(long, value_name = "FILE", conflicts_with = "budget")]
    pub load: Option<PathBuf>,
}

#[derive(Debug, Clone, Group)]
pub struct CalibrateArgs {
    #[command(flatten)]
    pub calibration: CalibrationArgs,

    /// Take it even if it was saved on another CPU model
    #[arg(long, requires = "load")]
    pub force: bool,

    /// Save it to this file, as JSON
    #[arg(long, value_name = "FILE", conflicts_with = "load")]
    pub save: Option<PathBuf>,
}

#[derive(Debug, Clone, Group)]
pub struct MmapArgs {
    /// How the kernel is asked for pages; both unless given
    #[arg(long, value_enum, value_delimiter = ',')]
    pub fault: Vec<Fault>,

    /// Memory on these pages; several separated by commas
    #[arg(long, value_enum, value_delimiter = ',', default_value = "4k,thp")]
    pub page_size: Vec<Pages>,

    /// Memory cleared in a reading
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = parse_size)]
    pub bytes: u64,

    /// What a thread asks the kernel to populate at a time (its whole share unless given)
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub chunk: Option<u64>,

    /// Threads that share the memory equally, and workers of the service
    #[arg(long, value_name = "N", default_value = "1", value_parser = count)]
    pub threads: usize,

    #[arg(long, value_name = "N", default_value = "5", value_parser = count, help = RUNS)]
    pub runs: usize,
}

/// How pages come to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Fault {
    /// A store to each page
    Demand,
    /// MADV_POPULATE_WRITE
    Populate,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Fault::Demand => "demand faults",
            Fault::Populate => "populate",
        })
    }
}

#[derive(Debug, Clone, Group)]
pub struct ContendArgs {
    /// Up to so many threads at once (as many as there are CPUs unless given)
    #[arg(long, value_name = "N", value_parser = count)]
    pub threads: Option<usize>,

    /// What the reader beside them works on: its own cache and half of its share of the last one unless given
    #[arg(long, value_name = "SIZES", value_parser = parse_sizes)]
    pub reader: Option<Sizes>,

    /// Only these methods, separated by commas
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub methods: Vec<Method>,

    /// Length of a call
    #[arg(long, value_name = "SIZE", default_value = "4M", value_parser = parse_size)]
    pub call: u64,

    /// Memory cleared in a reading
    #[arg(long, value_name = "SIZE", default_value = "512M", value_parser = parse_size)]
    pub bytes: u64,

    /// Memory on these pages
    #[arg(long, value_enum, default_value_t = Pages::Transparent)]
    pub page_size: Pages,

    #[arg(long, value_name = "N", default_value = "5", value_parser = count, help = RUNS)]
    pub runs: usize,
}

/// How many threads or runs: at least one.
fn count(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("at least one is needed".to_owned()),
        Ok(count @ 1..=65_536) => Ok(count),
        Ok(_) => Err("more than 65536 are not supported".to_owned()),
        Err(_) => Err("it is no whole number".to_owned()),
    }
}

/// A time limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget(pub Duration);

impl std::str::FromStr for Budget {
    type Err = String;

    /// `50ms`, `2s`; a number alone is no time. At most an hour.
    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let (number, unit) = text.split_at(digits);
        let milliseconds = match (number.parse::<u64>(), unit.trim()) {
            (Ok(number), "ms") => Some(number),
            (Ok(number), "s") => number.checked_mul(1000),
            _ => return Err("it is no time; write 50ms or 2s".to_owned()),
        };
        match milliseconds {
            Some(0) => Err("it must be more than nothing".to_owned()),
            Some(milliseconds @ ..=3_600_000) => Ok(Self(Duration::from_millis(milliseconds))),
            _ => Err("it is more than an hour".to_owned()),
        }
    }
}
