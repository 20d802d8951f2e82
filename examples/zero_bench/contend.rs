//! `zero_bench contend`: several clear at once, and somebody reads beside them.

use serde::Serialize;
use vm_zeroing::{CpuDescription, Method};

use crate::args::ContendArgs;
use crate::contestant::{Contestant, State};
use crate::machine::Machine;
use crate::measure::{ReadingError, Shape, present, reading, take_turns};
use crate::progress::Progress;
use crate::raw::Memory;
use crate::reader::{Chain, alone, beside};
use crate::sizes::show;
use crate::stats::{Stats, median};
use crate::{Failure, tables};

/// All that came out.
#[derive(Debug, Clone, Serialize)]
pub struct Contend {
    pub page_size: String,
    pub runs: usize,
    /// What each thread clears in a call.
    pub call_bytes: u64,
    pub at_once: Vec<AtOnce>,
    /// Empty where there is one CPU alone.
    pub readers: Vec<Reader>,
}

/// So many threads at once.
#[derive(Debug, Clone, Serialize)]
pub struct AtOnce {
    pub threads: usize,
    pub lines: Vec<Line>,
}

/// One method by so many threads.
#[derive(Debug, Clone, Serialize)]
pub struct Line {
    pub method: String,
    pub non_temporal: bool,
    /// All threads together.
    pub gb_per_s: Stats,
    /// The mean by the number of threads.
    pub per_thread: f64,
}

/// A reader of one buffer.
#[derive(Debug, Clone, Serialize)]
pub struct Reader {
    pub buffer_bytes: u64,
    /// Threads that clear beside it, on other CPUs.
    pub clearing_threads: usize,
    pub alone_ns: Stats,
    pub beside: Vec<Beside>,
}

/// The reader beside one method.
#[derive(Debug, Clone, Serialize)]
pub struct Beside {
    pub method: String,
    pub non_temporal: bool,
    pub ns_per_load: Stats,
    /// How many times as long a load takes as alone.
    pub slowdown: f64,
    /// What those reach who clear.
    pub gb_per_s: Stats,
}

/// No reader is given more by default: a virtual machine may be shown its host's last cache.
const LARGEST_BUFFER: u64 = 16 << 20;

/// Three quarters of the second cache, which is this CPU's own, and half of a CPU's share of the last one.
fn buffers(machine: &Machine) -> Vec<u64> {
    let shared = machine.llc_bytes.unwrap_or(0) / machine.llc_cpus as u64 / 2;
    let mut buffers = vec![machine.l2() / 4 * 3];
    buffers.extend(Some(shared.min(LARGEST_BUFFER) / 4096 * 4096).filter(|shared| *shared > machine.l2()));
    buffers
}

/// All up to eight, then powers of two, and the end itself.
pub fn thread_counts(most: usize) -> Vec<usize> {
    (1..=most).filter(|count| *count <= 8 || count.is_power_of_two() || *count == most).collect()
}

pub fn run(args: &ContendArgs, machine: &Machine) -> Result<Contend, Failure> {
    let methods =
        if args.methods.is_empty() { CpuDescription::detect().methods() } else { args.methods.clone() };
    let contestants: Vec<Contestant> =
        methods.iter().map(|method| Contestant::method(*method)).collect::<Result<_, _>>()?;
    let most = args.threads.unwrap_or(machine.cpus);
    let call = args.call.min(args.bytes);
    let shape = |threads| Shape::new(State::Cold, threads, call, args.bytes, 0);
    let counts = thread_counts(most);
    let mut memory = present(args.page_size, &machine.cpu_list, most, args.bytes.div_ceil(most as u64))?;

    let buffers = args.reader.as_ref().map_or_else(|| buffers(machine), |sizes| sizes.0.clone());
    let others = machine.cpu_list.get(1..).unwrap_or_default();
    let with_readers = if others.is_empty() { 0 } else { buffers.len() };
    let turns = counts.len() * contestants.len() + with_readers * (contestants.len() + 1);
    let progress = Progress::new(turns * (args.runs + 1));

    let mut at_once = Vec::new();
    for &threads in &counts {
        let stats = take_turns(contestants.len(), args.runs, |index| {
            let contestant = &contestants[index];
            progress.say(format!("{threads} at once, {}", contestant.name));
            let rate = reading(contestant, shape(threads), &mut memory, &machine.cpu_list);
            progress.advance();
            rate
        })?;
        let lines = methods.iter().zip(stats).map(|(method, gb_per_s)| Line {
            method: method.to_string(),
            non_temporal: method.is_non_temporal(),
            per_thread: gb_per_s.mean / threads as f64,
            gb_per_s,
        });
        at_once.push(AtOnce { threads, lines: lines.collect() });
    }
    let mut readers = Vec::new();
    for &buffer in buffers.iter().take(with_readers) {
        let shape = shape(most.min(others.len()));
        let reader =
            reader(args.runs, machine, buffer, shape, (&methods, &contestants), &mut memory, &progress)?;
        readers.push(reader);
    }
    Ok(Contend { page_size: args.page_size.to_string(), runs: args.runs, call_bytes: call, at_once, readers })
}

/// A reader of one buffer, beside each method in turn.
fn reader(
    runs: usize,
    machine: &Machine,
    buffer: u64,
    shape: Shape,
    (methods, contestants): (&[Method], &[Contestant]),
    memory: &mut Memory,
    progress: &Progress,
) -> Result<Reader, Failure> {
    let chain = Chain::new(buffer);
    let (Some(own), Some(others)) = (machine.cpu_list.first(), machine.cpu_list.get(1..)) else {
        return Err(Failure::run("there is no CPU beside the reader's"));
    };
    let mut rates = vec![Vec::new(); contestants.len()];
    // The first in turn is nobody.
    let stats = take_turns(contestants.len() + 1, runs, |index| {
        let who = index.checked_sub(1).and_then(|index| contestants.get(index));
        progress.say(format!("reader of {}, {}", show(buffer), who.map_or("alone", |who| &who.name)));
        let nanoseconds = match who {
            None => alone(&chain, *own)?,
            Some(who) => {
                let (nanoseconds, rate) = beside(&chain, (*own, others), who, shape, memory)?;
                if let Some(rates) = rates.get_mut(index - 1) {
                    rates.push(rate);
                }
                nanoseconds
            }
        };
        progress.advance();
        Ok::<f64, ReadingError>(nanoseconds)
    })?;
    let mut stats = stats.into_iter();
    let alone_ns = stats.next().unwrap_or_else(|| Stats::of(Vec::new()));
    let beside = methods.iter().zip(stats).zip(rates).map(|((method, ns_per_load), rates)| Beside {
        method: method.to_string(),
        non_temporal: method.is_non_temporal(),
        slowdown: ns_per_load.against(&alone_ns),
        ns_per_load,
        // The first is of the run that does not count.
        gb_per_s: Stats::of(rates.into_iter().skip(1).collect()),
    });
    Ok(Reader { buffer_bytes: buffer, clearing_threads: shape.threads, beside: beside.collect(), alone_ns })
}

impl Contend {
    pub fn show(&self, width: u16) -> String {
        let mut text = format!(
            "cold memory on {}, calls of {}, runs: {}\n\
             GB/s (10^9 bytes a second): mean ± standard deviation of all threads together, and of each\n{}",
            self.page_size,
            show(self.call_bytes),
            self.runs,
            tables::at_once(self, width)
        );
        let Some(first) = self.readers.first() else {
            return text + "\nNo reader beside them: there is one CPU, which they would share by turns.";
        };
        text += &format!(
            "\nA reader of lines that each name the next, alone and beside others that clear (threads: {})\n\
             ns of its CPU time a load: mean ± standard deviation, times as long as alone; GB/s cleared\n{}",
            first.clearing_threads,
            tables::readers(self, width)
        );
        for reader in &self.readers {
            let of = |non_temporal| {
                let slowdowns: Vec<f64> = reader
                    .beside
                    .iter()
                    .filter(|beside| beside.non_temporal == non_temporal)
                    .map(|beside| beside.slowdown)
                    .collect();
                if slowdowns.is_empty() { "-".to_owned() } else { format!("{:.2}x", median(&slowdowns)) }
            };
            text += &format!(
                "\nreader of {}: {} as long beside cached stores, {} beside non-temporal ones (medians)",
                show(reader.buffer_bytes),
                of(false),
                of(true)
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_counts_are_all_up_to_eight_then_powers_of_two_and_the_end() {
        assert_eq!(thread_counts(1), [1]);
        assert_eq!(thread_counts(3), [1, 2, 3]);
        assert_eq!(thread_counts(40), [1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 40]);
    }
}
