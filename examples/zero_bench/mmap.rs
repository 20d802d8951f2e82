//! `zero_bench mmap`: the kernel clears the pages it hands out; how fast, and how fast is it to keep them.

use std::time::Instant;

use serde::Serialize;
use vm_zeroing::{Topology, ZeroRequest, ZeroingService};

use crate::Failure;
use crate::args::{Fault, MmapArgs};
use crate::machine::Machine;
use crate::measure::{ReadingError, from_first_to_last, gb_per_s, make_present, on_threads, take_turns};
use crate::memory::Pages;
use crate::progress::Progress;
use crate::raw::Memory;
use crate::sizes::show;
use crate::stats::Stats;
use crate::tables;

/// All that came out.
#[derive(Debug, Clone, Serialize)]
pub struct Mmap {
    pub runs: usize,
    pub pages: Vec<OfPages>,
}

/// What came out for one kind of pages.
#[derive(Debug, Clone, Serialize)]
pub struct OfPages {
    pub page_size: String,
    /// Transparent hugepages: which part the kernel really gave.
    pub huge_share: Option<f64>,
    /// Bytes cleared in a reading.
    pub bytes: u64,
    /// What a thread asks the kernel for at a time.
    pub chunk_bytes: u64,
    /// The kernel's ways, then the service.
    pub lines: Vec<Line>,
}

/// One way.
#[derive(Debug, Clone, Serialize)]
pub struct Line {
    pub name: String,
    pub threads: usize,
    pub gb_per_s: Stats,
    /// Times as fast as the first line.
    pub relative: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// The pages are given back before, and fresh ones faulted in.
    Kernel { fault: Fault, give_back_counts: bool },
    /// The pages stay.
    Service,
}

impl Way {
    fn name(self) -> String {
        match self {
            Way::Kernel { fault, give_back_counts: false } => format!("kernel, {fault}"),
            Way::Kernel { fault, give_back_counts: true } => format!("kernel, munmap and {fault}"),
            Way::Service => "service, the same pages in place".to_owned(),
        }
    }
}

/// Where it all happens: one mapping at a time.
struct Place<'a> {
    pages: Pages,
    cpus: &'a [u32],
    threads: usize,
    part: u64,
    chunk: u64,
    service: &'a ZeroingService,
    memory: Option<Memory>,
}

pub fn run(args: &MmapArgs, machine: &Machine) -> Result<Mmap, Failure> {
    let faults =
        if args.fault.is_empty() { vec![Fault::Demand, Fault::Populate] } else { args.fault.clone() };
    let mut ways: Vec<Way> = Vec::new();
    for fault in faults {
        ways.extend([false, true].map(|give_back_counts| Way::Kernel { fault, give_back_counts }));
    }
    ways.push(Way::Service);
    let own: Vec<u32> = machine.cpu_list.iter().copied().take(args.threads).collect();
    let service = ZeroingService::builder()
        .topology(Topology::detect()?.restrict_cpus(&own)?)
        .workers_per_node(args.threads)
        .build()?;
    let shapes: Vec<(Pages, u64)> = args
        .page_size
        .iter()
        .map(|pages| {
            (*pages, args.bytes.div_ceil(args.threads as u64).next_multiple_of(pages.bytes().max(2 << 20)))
        })
        .collect();
    // What one of them cannot have is found before the first is measured.
    for (pages, part) in &shapes {
        drop(pages.map(part.saturating_mul(args.threads as u64))?);
    }

    let progress = Progress::new(shapes.len() * ways.len() * (args.runs + 1));
    let mut all = Vec::new();
    for (pages, part) in shapes {
        let chunk = args.chunk.map_or(part, |chunk| chunk.next_multiple_of(pages.bytes()).min(part));
        let mut place = Place {
            pages,
            cpus: &machine.cpu_list,
            threads: args.threads,
            part,
            chunk,
            service: &service,
            memory: None,
        };
        let stats = take_turns(ways.len(), args.runs, |index| {
            let way = ways[index];
            progress.say(format!("{pages}: {}", way.name()));
            let rate = place.reading(way);
            progress.advance();
            rate
        })?;
        all.push(of_pages(&place, &ways, stats));
    }
    Ok(Mmap { runs: args.runs, pages: all })
}

fn of_pages(place: &Place<'_>, ways: &[Way], stats: Vec<Stats>) -> OfPages {
    let first = stats.first().cloned();
    let lines = ways.iter().zip(stats).map(|(way, stats)| Line {
        name: way.name(),
        threads: if *way == Way::Service { place.service.workers() } else { place.threads },
        relative: first.as_ref().map_or(0.0, |first| stats.against(first)),
        gb_per_s: stats,
    });
    OfPages {
        page_size: place.pages.to_string(),
        huge_share: place.memory.as_ref().and_then(|memory| place.pages.huge_share(memory)),
        bytes: place.bytes(),
        chunk_bytes: place.chunk,
        lines: lines.collect(),
    }
}

impl Place<'_> {
    fn bytes(&self) -> u64 {
        self.part * self.threads as u64
    }

    fn reading(&mut self, way: Way) -> Result<f64, Failure> {
        // Everybody finds pages that are there and stale: also those who give them back first.
        let mut memory = match self.memory.take() {
            Some(memory) => memory,
            None => self.pages.map_unseen(self.bytes())?,
        };
        make_present(self.pages, &mut memory, self.cpus, self.threads, self.part)
            .map_err(|error| self.explain(error))?;
        on_threads(self.cpus, memory.parts(self.threads, self.part), |part, _| {
            part.fill_cold(0, part.len());
            Ok(())
        })?;
        let (rate, memory) = match way {
            Way::Kernel { fault, give_back_counts } => self.by_kernel(memory, fault, give_back_counts)?,
            Way::Service => self.by_service(memory)?,
        };
        self.memory = Some(memory);
        Ok(rate)
    }

    fn by_kernel(
        &self,
        memory: Memory,
        fault: Fault,
        give_back_counts: bool,
    ) -> Result<(f64, Memory), Failure> {
        memory.wait_until_unshared();
        let start = Instant::now();
        drop(memory);
        let given_back = start.elapsed();
        let mut memory = self.pages.map_unseen(self.bytes())?;
        let step = self.pages.bytes() as usize;
        let times = on_threads(self.cpus, memory.parts(self.threads, self.part), |part, gate| {
            gate.wait();
            let start = Instant::now();
            for at in (0..part.len()).step_by(self.chunk as usize) {
                match fault {
                    Fault::Demand => part.touch(at, self.chunk, step),
                    Fault::Populate => part.populate(at, self.chunk).map_err(ReadingError::Populate)?,
                }
            }
            let end = Instant::now();
            match part.first_stale(0, part.len()) {
                None => Ok((start, end)),
                Some(at) => Err(ReadingError::NotZero { name: "the kernel".to_owned(), at }),
            }
        });
        let mut time = from_first_to_last(&times.map_err(|error| self.explain(error))?);
        if give_back_counts {
            time += given_back;
        }
        Ok((gb_per_s(self.bytes(), time), memory))
    }

    fn by_service(&self, mut memory: Memory) -> Result<(f64, Memory), Failure> {
        let request = ZeroRequest::host([memory.range()]);
        let start = Instant::now();
        self.service.submit(request)?.wait()?;
        let time = start.elapsed();
        on_threads(self.cpus, memory.parts(self.threads, self.part), |part, _| {
            match part.first_stale(0, part.len()) {
                None => Ok(()),
                Some(at) => Err(ReadingError::NotZero { name: "the service".to_owned(), at }),
            }
        })?;
        Ok((gb_per_s(self.bytes(), time), memory))
    }

    fn explain(&self, error: ReadingError) -> Failure {
        match error {
            ReadingError::Populate(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                Failure::run("MADV_POPULATE_WRITE needs Linux 5.14; take --fault demand")
            }
            ReadingError::Populate(source) => self.pages.refused(self.bytes(), source).into(),
            other => other.into(),
        }
    }
}

impl Mmap {
    pub fn show(&self) -> String {
        let each = self.pages.iter().map(|pages| {
            let share =
                pages.huge_share.map_or(String::new(), |share| format!(", {:.0} % huge", share * 100.0));
            let chunk = show(pages.chunk_bytes);
            format!("{}: {} a reading, {chunk} a call{share}", pages.page_size, show(pages.bytes))
        });
        format!(
            "runs: {}; GB/s (10^9 bytes a second): mean ± standard deviation\n{}\n{}",
            self.runs,
            each.collect::<Vec<_>>().join("\n"),
            tables::mmap(self)
        )
    }
}
