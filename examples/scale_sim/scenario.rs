//! What is out of the ordinary, and everybody's way of coping with it.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::Serialize;
use vm_zeroing::Topology;

use crate::Failure;
use crate::args::{Args, Scenario, Slowed};
use crate::host::{Host, HostError, Speeds, memory_nodes};
use crate::ideal::{Ideal, ideal};
use crate::layout::{Layout, Plot};
use crate::machine::{Grain, Locality};
use crate::pool::{self, BACKGROUND, NORMAL, Settings};
use crate::run::{Finish, Run};
use crate::split::{self, CAP};

/// Everybody's way through one scenario.
#[derive(Debug, Serialize)]
pub struct Outcome {
    pub scenario: String,
    pub what: String,
    pub bytes: u64,
    pub regions: usize,
    pub ideal_seconds: f64,
    pub ideal_local_seconds: f64,
    pub runs: Vec<Line>,
    /// What simulating took.
    pub simulated_in_seconds: f64,
}

/// A run, and what is derived from it.
#[derive(Debug, Serialize)]
pub struct Line {
    #[serde(flatten)]
    pub run: Run,
    pub of_ideal: f64,
    pub local_share: f64,
    pub finish_min: f64,
    pub finish_median: f64,
    pub finish_max: f64,
    pub finished: Vec<Finish>,
}

/// The scenarios that were asked for.
pub fn asked(args: &Args) -> Vec<Scenario> {
    use Scenario::{BusyNode, Even, OneNode, Skew, SlowNode, StolenCpu};
    match args.scenario {
        Scenario::All => vec![Even, OneNode, SlowNode, BusyNode, StolenCpu, Skew],
        one => vec![one],
    }
}

/// The arguments with what the scenario adds.
fn added(scenario: Scenario, args: &Args, topology: &Topology) -> Args {
    let mut args = args.clone();
    let nodes = topology.nodes();
    let has_cpus = |node: &usize| !nodes[*node].allowed_cpus().is_empty();
    let with_memory = memory_nodes(topology);
    let with_cpus: Vec<usize> = (0..nodes.len()).filter(has_cpus).collect();
    let id = |node: Option<&usize>| node.map_or(0, |node| nodes[*node].id().0);
    let half_of_the_middle = |among: &[usize]| half(id(among.get(among.len() / 2)));
    match scenario {
        Scenario::OneNode => {
            let first = with_memory.iter().find(|node| has_cpus(node)).or(with_memory.first());
            args.on_node = Some(args.on_node.unwrap_or(id(first)));
            args.skew = None;
        }
        Scenario::SlowNode if args.slow_node.is_empty() => args.slow_node = half_of_the_middle(&with_memory),
        Scenario::BusyNode if args.busy_node.is_empty() => args.busy_node = half_of_the_middle(&with_cpus),
        Scenario::StolenCpu if args.slow_worker.is_empty() => args.slow_worker = half(0),
        Scenario::Skew => {
            args.skew = Some(args.skew.unwrap_or(4.0));
            args.on_node = None;
        }
        _ => {}
    }
    args
}

fn half(number: u32) -> Vec<Slowed> {
    vec![Slowed { number, part: 0.5 }]
}

fn speeds(args: &Args) -> Speeds {
    let by_node = |slowed: &[Slowed]| -> BTreeMap<u32, f64> {
        slowed.iter().map(|slowed| (slowed.number, slowed.part)).collect()
    };
    Speeds {
        node: args.node_gbps * 1e9,
        core: args.core_gbps * 1e9,
        remote_penalty: args.remote_penalty,
        link: args.link_gbps.map_or(f64::INFINITY, |link| link * 1e9),
        slow_nodes: by_node(&args.slow_node),
        busy_nodes: by_node(&args.busy_node),
        slow_workers: args.slow_worker.iter().map(|slowed| (slowed.number as usize, slowed.part)).collect(),
    }
}

/// The machine as the arguments have it.
pub fn host(args: &Args, topology: &Topology) -> Result<Host, Failure> {
    Host::new(topology.clone(), args.workers_per_node as usize, speeds(args)).map_err(Failure::input)
}

fn layout(scenario: Scenario, args: &Args, host: &Host, chunk: u64) -> Result<Layout, Failure> {
    let holders = memory_nodes(&host.topology);
    if holders.is_empty() {
        return Err(Failure::input("no node of this machine has memory for guests; give another --tree"));
    }
    let memory = args.memory.unwrap_or(holders.len() as u64 * (64 << 30));
    let (memory, weights) = match args.on_node {
        Some(asked) => {
            let node = host.index(asked).map_err(Failure::input)?;
            if !holders.contains(&node) {
                let remedy = "name a node with memory of the machine's own";
                return Err(Failure::input(HostError::Lacks {
                    node: asked,
                    lacks: "memory for guests",
                    remedy,
                }));
            }
            let each = (memory / holders.len() as u64).next_multiple_of(4096);
            (if scenario == Scenario::OneNode { each } else { memory }, vec![(node, 1.0)])
        }
        None => {
            let skew = args.skew.unwrap_or(1.0);
            let steps = (holders.len() - 1).max(1) as f64;
            let weight = |rank: usize| 1.0 + (skew - 1.0) * rank as f64 / steps;
            // Full and empty ones in no order.
            let mut ranks: Vec<usize> = (0..holders.len()).collect();
            ranks.sort_by_key(|rank| crate::layout::mixed(args.seed ^ crate::layout::mixed(*rank as u64)));
            (memory, holders.into_iter().zip(ranks.into_iter().map(weight)).collect())
        }
    };
    let Args { regions_per_node, unknown, misplaced, seed, .. } = *args;
    Ok(Layout::new(host, &Plot { memory, weights, regions_per_node, unknown, misplaced, seed, chunk }))
}

fn settings(args: &Args) -> Settings {
    Settings {
        locality: if args.local_only { Locality::LocalOnly } else { Locality::PreferLocal },
        chunk: longest(args.chunk),
        lane: if args.background_rate.is_some() { BACKGROUND } else { NORMAL },
        rate: args.background_rate,
        wake: args.wake_us * 1e-6,
        steal: args.steal_us * 1e-6,
        look: args.look_ns * 1e-9,
        lock: args.lock_ns * 1e-9,
    }
}

/// The longest chunk that the pool makes of what it is told.
fn longest(chunk: u64) -> u64 {
    Grain::new(chunk).next(None)
}

/// Lets everybody clear the same memory on the same machine.
pub fn play(scenario: Scenario, args: &Args, topology: &Topology) -> Result<Outcome, Failure> {
    let begun = Instant::now();
    let args = added(scenario, args, topology);
    let host = host(&args, topology)?;
    let settings = settings(&args);
    let layout = layout(scenario, &args, &host, settings.chunk)?;
    let plan = pool::plan(&host, settings.locality);
    let Ideal { local, anywhere } = ideal(&host, &plan, &layout.bytes_by_node(), settings.rate);
    let mut runs = vec![pool::clear(&host, &layout, &plan, &settings, "the pool").map_err(Failure::run)?];
    let all = host.workers.len();
    if settings.rate.is_none() {
        runs.push(split::clear(&host, &layout, &split::pinned(&host, &layout), "static, pinned"));
        let mut free = |threads: usize| {
            runs.push(split::clear(
                &host,
                &layout,
                &split::unpinned(&host, threads, args.seed),
                "static, unpinned",
            ));
        };
        free(all);
        if all > CAP {
            free(CAP);
        }
    }
    let lines = runs.into_iter().map(|run| line(run, anywhere, topology)).collect();
    Ok(Outcome {
        scenario: name(scenario),
        what: what(&args),
        bytes: layout.bytes(),
        regions: layout.regions().count(),
        ideal_seconds: anywhere,
        ideal_local_seconds: local,
        runs: lines,
        simulated_in_seconds: begun.elapsed().as_secs_f64(),
    })
}

fn line(run: Run, ideal: f64, topology: &Topology) -> Line {
    let [finish_min, finish_median, finish_max] = run.finish();
    Line {
        of_ideal: run.seconds / ideal,
        local_share: run.local_share(),
        finish_min,
        finish_median,
        finish_max,
        finished: run.finished_by_node(topology),
        run,
    }
}

fn name(scenario: Scenario) -> String {
    clap::ValueEnum::to_possible_value(&scenario).map_or(String::new(), |value| value.get_name().to_owned())
}

/// What is out of the ordinary, in words.
fn what(args: &Args) -> String {
    let percent = |part: f64| format!("{:.0} %", part * 100.0);
    let each = |slowed: &[Slowed], what: fn(u32) -> String, left: &str| -> Vec<String> {
        slowed
            .iter()
            .map(|slowed| format!("{} has {} {left}", what(slowed.number), percent(slowed.part)))
            .collect()
    };
    let mut said = match (args.on_node, args.skew) {
        (Some(node), _) => vec![format!("all memory on node {node}")],
        (None, Some(skew)) => vec![format!("the fullest node holds {skew} times what the emptiest does")],
        (None, None) => vec!["as much memory on each node".to_owned()],
    };
    said.extend(each(&args.slow_node, |node| format!("the memory of node {node}"), "of its bandwidth"));
    said.extend(each(&args.busy_node, |node| format!("each CPU of node {node}"), "of its time for us"));
    said.extend(each(
        &args.slow_worker,
        |worker| format!("the CPU of worker {worker}"),
        "of its time for us",
    ));
    if args.unknown {
        said.push("one region whose policy names no node".to_owned());
    }
    if args.misplaced > 0.0 {
        said.push(format!("{} of the chunks misplaced", percent(args.misplaced)));
    }
    if let Some(rate) = args.background_rate {
        said.push(format!("in the background, {:.1} GB/s", rate as f64 / 1e9));
    }
    if args.local_only {
        said.push("local only".to_owned());
    }
    said.join("; ")
}
