//! Tables for people, a document for programs.

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, Table};
use serde::Serialize;

use crate::args::Args;
use crate::host::{Host, memory_nodes};
use crate::scenario::Outcome;

/// The JSON document.
#[derive(Debug, Serialize)]
pub struct Document<'a> {
    pub machine: &'a Machine,
    /// What may mislead.
    pub notes: &'a [String],
    pub scenarios: &'a [Outcome],
}

/// The simulated machine.
#[derive(Debug, Serialize)]
pub struct Machine {
    pub nodes: usize,
    pub memory_nodes: usize,
    pub cpus: usize,
    pub workers: usize,
    pub node_gbps: f64,
    pub core_gbps: f64,
    pub remote_penalty: f64,
    pub link_gbps: Option<f64>,
    pub wake_us: f64,
    pub steal_us: f64,
    pub look_ns: f64,
    pub lock_ns: f64,
}

impl Machine {
    pub fn new(host: &Host, args: &Args) -> Self {
        Self {
            nodes: host.nodes(),
            memory_nodes: memory_nodes(&host.topology).len(),
            cpus: host.cpus().len(),
            workers: host.workers.len(),
            node_gbps: args.node_gbps,
            core_gbps: args.core_gbps,
            remote_penalty: args.remote_penalty,
            link_gbps: args.link_gbps,
            wake_us: args.wake_us,
            steal_us: args.steal_us,
            look_ns: args.look_ns,
            lock_ns: args.lock_ns,
        }
    }

    pub fn show(&self) -> String {
        let Self { nodes, memory_nodes, cpus, workers, node_gbps, core_gbps, remote_penalty, .. } = self;
        let Self { wake_us, steal_us, look_ns, lock_ns, .. } = self;
        let link = self.link_gbps.map_or(String::new(), |link| format!(", {link} GB/s from other nodes"));
        format!(
            "{nodes} nodes ({memory_nodes} with memory), {cpus} CPUs, {workers} workers\n\
             a node's memory takes {node_gbps} GB/s{link}; a core stores {core_gbps} GB/s, {remote_penalty} times \
             slower at distance 20\n\
             a wake takes {wake_us} us, a steal {steal_us} us, a look at a queue {look_ns} ns, each of a chunk's \
             three holds of its job's lock {lock_ns} ns"
        )
    }
}

/// In units of 1024, three digits or so: `7.00 TiB`.
pub fn size(bytes: u64) -> String {
    let units = [(50, "PiB"), (40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    match units.into_iter().find(|(shift, _)| bytes >> shift > 0) {
        Some((shift, unit)) => format!("{:.2} {unit}", bytes as f64 / (1u64 << shift) as f64),
        None => format!("{bytes} B"),
    }
}

/// One scenario: bounds, then everybody.
pub fn table(outcome: &Outcome) -> String {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED);
    table.set_header([
        "",
        "threads",
        "seconds",
        "x ideal",
        "GB/s",
        "local",
        "steals",
        "nodes done (min median max)",
    ]);
    for column in 1..8 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let gbps = |seconds: f64| format!("{:.1}", outcome.bytes as f64 / seconds / 1e9);
    let bounds = [("ideal", outcome.ideal_seconds), ("ideal, own node only", outcome.ideal_local_seconds)];
    for (name, seconds) in bounds {
        let ratio = format!("{:.3}", seconds / outcome.ideal_seconds);
        table.add_row([name, "", &format!("{seconds:.4}"), &ratio, &gbps(seconds), "", "", ""]);
    }
    for line in &outcome.runs {
        let run = &line.run;
        table.add_row([
            run.name.clone(),
            run.threads.to_string(),
            format!("{:.4}", run.seconds),
            format!("{:.3}", line.of_ideal),
            gbps(run.seconds),
            format!("{:.2} %", line.local_share * 100.0),
            (run.steals_near + run.steals_far).to_string(),
            format!("{:.4} {:.4} {:.4}", line.finish_min, line.finish_median, line.finish_max),
        ]);
    }
    let (regions, plural) = (outcome.regions, if outcome.regions == 1 { "" } else { "s" });
    format!(
        "{}: {}\n{} in {regions} region{plural}; simulated in {:.1} s\n{table}",
        outcome.scenario,
        outcome.what,
        size(outcome.bytes),
        outcome.simulated_in_seconds
    )
}
