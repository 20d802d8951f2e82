//! The simulator against what can be worked out by hand, and the pool's decisions against what is promised.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::{CommandFactory, Parser};
use proptest::prelude::*;
use serde_json::Value;
use vmm_sys_util::tempdir::TempDir;

use crate::args::{Args, Scenario, parse_size};
use crate::report::{Document, Machine, table};
use crate::scenario::{Line, Outcome};
use crate::{Failure, scenario, topology, tree};

fn parse(line: &str) -> Result<Args, clap::Error> {
    Args::try_parse_from(std::iter::once("scale_sim").chain(line.split_whitespace()))
}

fn play(line: &str) -> Result<Outcome, Failure> {
    let args = parse(line).unwrap();
    scenario::play(args.scenario, &args, &topology(&args)?)
}

fn outcome(line: &str) -> Outcome {
    play(line).unwrap_or_else(|failure| panic!("{line}: {failure:?}"))
}

fn pool(outcome: &Outcome) -> &Line {
    &outcome.runs[0]
}

fn pinned(outcome: &Outcome) -> &Line {
    let line = &outcome.runs[1];
    assert_eq!(line.run.name, "static, pinned");
    line
}

#[track_caller]
fn about(found: f64, expected: f64) {
    assert!((found - expected).abs() <= 1e-9 * expected, "{found}, expected {expected}");
}

/// Everything but the clearing costs nothing.
const FREE: &str = "--wake-us 0 --steal-us 0 --look-ns 0 --lock-ns 0";

#[test]
fn defaults_are_those_of_the_manual() {
    Args::command().debug_assert();
    let args = parse("").unwrap();
    assert_eq!((args.nodes, args.cpus_per_node, args.workers_per_node), (108, 16, 8));
    assert_eq!((args.scenario, args.memory, args.chunk), (Scenario::Even, None, 4 << 20));
    assert_eq!((args.node_gbps, args.core_gbps, args.remote_penalty), (40.0, 5.0, 1.5));
}

#[test]
fn nonsense_is_refused_and_named() {
    for (line, named) in [
        ("--nodes 0", "at least one is needed"),
        ("--nodes 1025", "Linux knows 1024 nodes at most"),
        ("--nodes x", "it is no whole number"),
        ("--nodes -1", "unexpected argument"),
        ("--memory 7X", "\"X\" is no unit"),
        ("--memory 0", "0 bytes"),
        ("--memory", "a value is required"),
        ("--memory 1.5T", "\".5T\" is no unit"),
        ("--memory 100", "100 bytes are no whole number of 4096-byte pages"),
        ("--memory 99999999999T", "more than 64 PiB"),
        ("--chunk T", "does not begin with a number"),
        ("--remote-penalty 0.5", "give 1 (no difference) or more"),
        ("--remote-penalty nan", "no finite number"),
        ("--node-gbps 0", "give 0.001 to 1000000 GB/s"),
        ("--node-gbps inf", "no finite number"),
        ("--core-gbps x", "it is no number"),
        ("--link-gbps -3", "unexpected argument"),
        ("--misplaced 2", "give 0 (none) to 1 (all)"),
        ("--skew 0", "give 1 (no difference) or more"),
        ("--skew 2 --on-node 1", "cannot be used with"),
        ("--slow-node 3", "write 3=0.5"),
        ("--slow-node a=0.5", "\"a\" is no whole number"),
        ("--slow-node 3=0", "more than 0 and at most 1"),
        ("--busy-node 3=2", "more than 0 and at most 1"),
        ("--slow-worker 3=x", "\"x\" is no number"),
        ("--workers-per-node 0", "0 is not in 1..=4096"),
        ("--regions-per-node 0", "0 is not in 1..=4096"),
        ("--tree a --nodes 3", "cannot be used with"),
        ("--scenario odd", "possible values: even, one-node, slow-node, busy-node, stolen-cpu, skew, all"),
        ("--lock-ns=-1", "give 0 or more"),
    ] {
        let error = parse(line).expect_err(line);
        assert_eq!(error.exit_code(), 2, "{line}");
        assert!(error.to_string().contains(named), "{line}: {error}");
    }
}

#[test]
fn what_is_not_on_the_machine_is_named_with_what_is() {
    for (line, named) in [
        ("--nodes 4 --slow-node 4=0.5", "there is no node 4; the nodes are 0, 1, 2, 3"),
        ("--nodes 20 --busy-node 99=0.5", "there is no node 99; the nodes are 0 to 19"),
        ("--nodes 4 --on-node 9", "there is no node 9"),
        ("--nodes 2 --slow-worker 16=0.5", "there is no worker 16; the 16 workers have the numbers 0 to 15"),
        ("--nodes 2 --memory-only-nodes 1 --busy-node 2=0.5", "node 2 has no CPUs"),
        ("--nodes 2 --cpus-per-node 0", "no node has CPUs, so nobody can clear; give --cpus-per-node"),
        ("--cpus-per-node 0 --memory-only-nodes 3", "no node has CPUs"),
        ("--tree /nonexistent", "/nonexistent is not there; give the folder"),
    ] {
        let Err(Failure::Input(error)) = play(line) else { panic!("{line}") };
        assert!(error.to_string().contains(named), "{line}: {error}");
    }
}

#[test]
fn sizes_are_bytes_or_carry_a_unit() {
    for (text, bytes) in [("4096", 4096), (" 64 KiB ", 65_536), ("7T", 7 << 40), ("1pb", 1 << 50)] {
        assert_eq!(parse_size(text), Ok(bytes), "{text}");
    }
}

/// One worker takes as long as its bytes take, and not a hair longer.
#[test]
fn one_worker_takes_what_its_bytes_take() {
    let seconds = (1u64 << 30) as f64 / 5e9;
    let alone = outcome(&format!("--nodes 1 --cpus-per-node 1 --memory 1G {FREE}"));
    about(pool(&alone).run.seconds, seconds);
    about(alone.ideal_seconds, seconds);
    about(alone.ideal_local_seconds, seconds);
    assert_eq!((pool(&alone).run.chunks, pool(&alone).run.wakes), (256, 1));
    about(pinned(&alone).run.seconds, seconds);
    assert_eq!(alone.runs.len(), 3, "no more than 16 threads: once");
    let slow_memory = outcome(&format!("--nodes 1 --cpus-per-node 1 --memory 1G --node-gbps 2 {FREE}"));
    about(pool(&slow_memory).run.seconds, (1u64 << 30) as f64 / 2e9);
    let half = outcome(&format!("--nodes 1 --cpus-per-node 1 --memory 1G --slow-worker 0=0.5 {FREE}"));
    about(pool(&half).run.seconds, 2.0 * seconds);
}

/// 8 MiB in two chunks. The wake; a look for urgent work (its own deque, the node's queue, its stand-in's deque;
/// the count of arrivals; once more), and for this job (own, node); two holds of the lock; the chunk; one hold.
/// Then the count of the urgent lane, and its own deque; and so on. The last hold ends it.
#[test]
fn each_step_costs_what_it_is_said_to() {
    let line = "--nodes 1 --cpus-per-node 1 --memory 8M --wake-us 1000 --steal-us 7000 --look-ns 1000000 --lock-ns 100000000";
    let chunk = (4u64 << 20) as f64 / 5e9;
    let looks = (3.0 + 1.0 + 3.0 + 2.0) + (1.0 + 1.0);
    about(pool(&outcome(line)).run.seconds, 0.001 + looks * 0.001 + 6.0 * 0.1 + 2.0 * chunk);
}

/// Node 2 hangs on node 0, whose worker clears it at distance 20; the other one at distance 22.
#[test]
fn memory_without_cpus_is_cleared_at_the_price_of_its_distance() {
    let line = format!("--nodes 2 --cpus-per-node 1 --memory-only-nodes 1 --on-node 2 --memory 1G {FREE}");
    let bytes = (1u64 << 30) as f64;
    let both = outcome(&line);
    about(both.ideal_local_seconds, bytes / (5e9 / 1.5));
    about(both.ideal_seconds, bytes / (5e9 / 1.5 + 5e9 / 1.6));
    assert!(pool(&both).of_ideal < 1.01 && pool(&both).local_share == 0.0);
    let local = outcome(&format!("{line} --local-only"));
    about(pool(&local).run.seconds, bytes / (5e9 / 1.5));
    let linked = outcome(&format!("{line} --link-gbps 2"));
    about(linked.ideal_seconds, bytes / 2e9);
    about(linked.ideal_local_seconds, bytes / 2e9);
    assert!(pool(&linked).of_ideal < 1.01);
}

/// Bounds worked out by hand, for 1 GiB on each of four nodes of a socket (distance 12, so penalty 1.1).
#[test]
fn the_ideal_is_what_is_worked_out_by_hand() {
    let node = (1u64 << 30) as f64;
    let ideal = |more: &str| {
        let found = outcome(&format!("--nodes 4 --memory 4G {FREE} {more}"));
        (found.ideal_seconds, found.ideal_local_seconds)
    };
    let even = ideal("");
    about(even.0, node / 40e9);
    about(even.1, node / 40e9);
    // Eight workers with 2 GB/s use 16 of 40; the 24 others bring 48 / 1.1.
    let one = ideal("--scenario one-node --core-gbps 2");
    about(one.0, node / 40e9);
    about(one.1, node / 16e9);
    let one = ideal("--scenario one-node --core-gbps 1");
    about(one.0, node / (8e9 + 24e9 / 1.1));
    let slow = ideal("--slow-node 2=0.5");
    about(slow.0, node / 20e9);
    about(slow.1, node / 20e9);
    // In T the three others have 3 (40 T - 1) to spare for the 1 - 20 T that node 2 cannot do itself.
    let busy = ideal("--busy-node 2=0.5");
    about(busy.0, node / 1e9 * (1.0 + 3.0 / 1.1) / (20.0 + 120.0 / 1.1));
    about(busy.1, node / 20e9);
    let stolen = ideal("--slow-worker 3=0.2 --core-gbps 4");
    about(stolen.1, node / (28e9 + 0.8e9));
    let rate = outcome("--nodes 2 --memory 1G --background-rate 100M");
    about(rate.ideal_seconds, 10.24);
}

#[test]
fn a_static_split_takes_what_its_slowest_thread_takes() {
    let bytes = (64u64 << 30) as f64;
    // 32 threads with 2 GiB each, a core's 5 GB/s each, and the CPU of one has a quarter of its time.
    let stolen = outcome("--nodes 4 --memory 64G --slow-worker 5=0.25");
    about(pinned(&stolen).run.seconds, bytes / 32.0 / 1.25e9);
    assert_eq!((pinned(&stolen).run.threads, pinned(&stolen).local_share), (32, 1.0));
    // 16 threads of 4 GiB, unpinned, not on that CPU; all memory is nearer than distance 12: 5 or 5 / 1.1 GB/s.
    let unpinned = &stolen.runs[3].run;
    assert_eq!((unpinned.name.as_str(), unpinned.threads), ("static, unpinned", 16));
    about(unpinned.seconds, bytes / 16.0 / (5e9 / 1.1));
    // A node that holds a third of the memory is shared by a third of the threads.
    let uneven = outcome("--nodes 2 --cpus-per-node 3 --memory 6G --node-gbps 4 --scenario skew --skew 2");
    about(pinned(&uneven).run.seconds, (4u64 << 30) as f64 / 4e9);
}

#[test]
fn every_byte_is_cleared_once_and_on_the_node_it_lies_on() {
    let each = "--nodes 6 --cpus-per-node 4 --memory 6G";
    for more in
        ["", "--misplaced 0.3", "--unknown", "--unknown --misplaced 0.2", "--regions-per-node 7", "--skew 9"]
    {
        let found = outcome(&format!("{each} {more}"));
        for line in &found.runs {
            let run = &line.run;
            assert_eq!(run.local_bytes + run.remote_bytes, 6 << 30, "{more}: {run:?}");
            assert!(run.seconds >= found.ideal_seconds * (1.0 - 1e-9), "{more}: {run:?}");
            assert_eq!(line.finished.len(), 6, "{more}: {run:?}");
            let last = line.finished.iter().map(|finish| finish.seconds).fold(0.0, f64::max);
            assert_eq!((last, line.finish_max), (run.seconds, run.seconds), "{more}");
            assert!(line.finish_min <= line.finish_median && line.finish_median <= line.finish_max);
        }
        let sent = pool(&found).run.sent_home;
        assert_eq!(sent > 0, more.contains("misplaced") || more.contains("unknown"), "{more}: {sent}");
    }
    let all = outcome(&format!("{each} --misplaced 1"));
    assert_eq!(pool(&all).run.sent_home, 6 << 8, "each chunk once");
}

#[test]
fn whoever_keeps_to_its_node_does() {
    let found = outcome("--nodes 6 --cpus-per-node 4 --memory 6G --scenario skew --local-only");
    assert_eq!((pool(&found).run.remote_bytes, pool(&found).run.steals_far), (0, 0));
    assert!(pool(&found).run.seconds < 1.02 * found.ideal_local_seconds);
}

#[test]
fn background_work_keeps_to_its_rate() {
    let found = outcome("--nodes 2 --cpus-per-node 2 --memory 1G --background-rate 500M");
    assert_eq!(found.runs.len(), 1, "nobody else has a rate");
    // The last chunk is paid for when it begins, and not waited for.
    assert!((0.99..1.02).contains(&pool(&found).of_ideal), "{}", pool(&found).of_ideal);
}

#[test]
fn the_same_arguments_have_the_same_result() {
    let line = "--nodes 6 --cpus-per-node 4 --memory 6G --misplaced 0.1 --scenario skew";
    let runs = |line: &str| outcome(line).runs.into_iter().map(|line| line.run).collect::<Vec<_>>();
    assert_eq!(runs(line), runs(line));
    assert_ne!(runs(line), runs(&format!("{line} --seed 2")));
}

/// README, "At scale", on sixteen nodes with 16 GiB each: at most 1.02 times the ideal and 99 % local where memory is
/// even, and 1.10 times where something is not. (`.ci/run` has the table's 108 nodes.)
#[test]
fn what_is_promised_is_reached() {
    let found = |scenario: &str, more: &str| {
        outcome(&format!("--nodes 16 --memory 256G --scenario {scenario} {more}"))
    };
    let even = found("even", "");
    assert!(pool(&even).of_ideal <= 1.02, "{}", table(&even));
    assert!(pool(&even).local_share >= 0.99, "{}", table(&even));
    // Where the node's own workers use up its memory, and where they use less than a half.
    for more in ["", "--core-gbps 2", "--core-gbps 1 --remote-penalty 3"] {
        let one = found("one-node", more);
        assert!(pool(&one).of_ideal <= 1.10, "{}", table(&one));
    }
    for (scenario, splits) in [("slow-node", 1.0), ("busy-node", 1.9), ("stolen-cpu", 1.9)] {
        let one = found(scenario, "");
        assert!(pool(&one).of_ideal <= 1.10, "{}", table(&one));
        assert!(pinned(&one).of_ideal >= splits, "{}", table(&one));
        // Nor do the peers' 16 unpinned threads come near.
        let as_peers = one.runs.last().unwrap();
        assert_eq!(as_peers.run.threads, 16);
        assert!(as_peers.of_ideal >= 2.0, "{}", table(&one));
    }
    // A CPU that is stolen for more than a half: the pool stays where it is, the equal share does not.
    let stolen = found("stolen-cpu", "--slow-worker 0=0.4");
    assert!(pool(&stolen).of_ideal <= 1.10, "{}", table(&stolen));
    assert!(pinned(&stolen).of_ideal >= 2.0, "{}", table(&stolen));
    let skew = found("skew", "");
    assert!(pool(&skew).of_ideal <= 1.10, "{}", table(&skew));
}

/// Who waits for the books learns nothing from it: chunks that become shorter would make the waiting longer.
#[test]
fn waiting_for_the_books_does_not_shorten_chunks() {
    let found = outcome("--nodes 16 --memory 64G --lock-ns 4000");
    // 16384 chunks with three holds each, one after the other, and little besides.
    let least = 16_384.0 * 3.0 * 4e-6;
    assert_eq!(pool(&found).run.chunks, 16_384);
    assert!(pool(&found).run.seconds < 1.05 * least, "{}", table(&found));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever the machine is like: all is cleared, nobody beats the bound, and nothing is slept through.
    #[test]
    fn any_machine_is_cleared(
        (nodes, cpus, memory_only) in (1u32..7, 1u32..7, 0u32..3),
        (workers, regions, memory) in (1u32..9, 1u32..4, 1u64..700),
        (node, core, penalty) in (1u32..50, 1u32..20, 10u32..40),
        (skew, misplaced, unknown) in (1u32..9, prop::sample::select(vec![0.0, 0.1, 1.0]), any::<bool>()),
        (look, lock, steal, wake) in (0u32..500, 0u32..5000, 0u32..50, 0u32..500),
        (link, chunk, local) in (prop::option::of(1u32..20), 1u32..5, any::<bool>()),
        (slow, seed) in (prop::option::of((0u32..6, 1u32..10)), any::<u32>()),
    ) {
        let mut line = format!(
            "--nodes {nodes} --cpus-per-node {cpus} --memory-only-nodes {memory_only} --workers-per-node {workers} \
             --regions-per-node {regions} --memory {}K --node-gbps {node} --core-gbps {core} --remote-penalty {} \
             --skew {skew} --misplaced {misplaced} --look-ns {look} --lock-ns {lock} --steal-us {steal} \
             --wake-us {wake} --chunk {chunk}M --seed {seed}",
            memory * 1028,
            f64::from(penalty) / 10.0,
        );
        let flags = [(unknown, " --unknown"), (local, " --local-only")];
        line.extend(flags.iter().filter(|flag| flag.0).map(|flag| flag.1));
        line.extend(link.map(|link| format!(" --link-gbps {link}")));
        if let Some((number, part)) = slow {
            line += &format!(" --slow-node {}=0.{part} --busy-node {}=0.{part}", number % nodes, (number + 1) % nodes);
        }
        let found = outcome(&line);
        for run in found.runs.iter().map(|line| &line.run) {
            prop_assert_eq!(run.local_bytes + run.remote_bytes, (memory * 1028) << 10);
        }
        // Unpinned threads may find better CPUs than the workers'.
        for run in found.runs.iter().take(2).map(|line| &line.run) {
            prop_assert!(run.seconds >= found.ideal_seconds * (1.0 - 1e-9), "{}: {:?}", line, run);
        }
    }
}

fn keys(value: &Value, into: &mut Vec<String>) {
    match value {
        Value::Object(object) => {
            into.extend(object.keys().cloned());
            object.values().for_each(|value| keys(value, into));
        }
        Value::Array(values) => values.iter().for_each(|value| keys(value, into)),
        _ => {}
    }
}

#[test]
fn the_document_has_the_keys_that_help_lists() {
    let args = parse("--nodes 2 --memory 1G").unwrap();
    let topology = topology(&args).unwrap();
    let machine = Machine::new(&scenario::host(&args, &topology).unwrap(), &args);
    let outcomes = [outcome("--nodes 2 --memory 1G")];
    let document = Document { machine: &machine, notes: &["a note".to_owned()], scenarios: &outcomes };
    let mut found = Vec::new();
    keys(&serde_json::to_value(&document).unwrap(), &mut found);
    found.sort();
    found.dedup();
    let help = Args::command().render_long_help().to_string();
    let (_, listed) = help.split_once("JSON: one object.").unwrap();
    let (listed, _) = listed.split_once("seconds are those").unwrap();
    let mut listed: Vec<&str> = listed
        .split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .filter(|word| !word.is_empty())
        .collect();
    listed.retain(|word| *word != "and");
    listed.sort_unstable();
    listed.dedup();
    assert_eq!(found, listed);
}

#[test]
fn tables_hold_what_was_found() {
    let found = outcome("--nodes 4 --memory 64G --scenario stolen-cpu");
    let text = table(&found);
    assert!(
        text.contains("stolen-cpu: as much memory on each node; the CPU of worker 0 has 50 % of its time"),
        "{text}"
    );
    assert!(text.contains("64.00 GiB in 4 regions"), "{text}");
    let row = text.lines().find(|line| line.contains("the pool")).unwrap();
    let cells: Vec<&str> = row.split(['│', '┆']).map(str::trim).filter(|cell| !cell.is_empty()).collect();
    assert_eq!(
        cells[1..4],
        ["32", &format!("{:.4}", pool(&found).run.seconds), &format!("{:.3}", pool(&found).of_ideal)]
    );
    assert!(text.lines().all(|line| line.chars().count() <= 112), "{text}");
}

/// A machine made by hand: nodes of four and of three CPUs, and one of memory alone behind a gap in the numbers.
fn three_nodes() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/scale_sim/three-nodes")
}

#[test]
fn a_folder_is_a_machine() {
    let line = format!("--tree {} --memory 6G", three_nodes().display());
    let found = outcome(&line);
    let run = &pool(&found).run;
    assert_eq!((run.threads, found.regions), (7, 3));
    let nodes: Vec<u32> = pool(&found).finished.iter().map(|finish| finish.node).collect();
    assert_eq!(nodes, [0, 1, 4]);
    // Nobody is at home on node 4.
    assert!(run.remote_bytes >= 2 << 30 && run.local_bytes > 0, "{}", table(&found));
    assert!(pool(&found).of_ideal <= 1.10, "{}", table(&found));
    // Node 0 is the nearest to node 4.
    let found = outcome(&format!("{line} --on-node 4 --local-only {FREE}"));
    about(found.ideal_local_seconds, (6u64 << 30) as f64 / (4.0 * 5e9 / 1.35));
}

/// Whether these are there; says aloud if not.
fn installed(tools: &[&str]) -> bool {
    let missing = tools.iter().find(|tool| Command::new(tool).arg("--version").output().is_err());
    missing.inspect(|tool| println!("skipped: {tool} is not installed")).is_none()
}

/// As an archive, whose name without its ending will do: as the folder it unpacks to.
#[test]
fn an_archive_is_a_machine() {
    if !installed(&["tar"]) {
        return;
    }
    let (folder, machine) = (TempDir::new().unwrap(), three_nodes());
    let mut tar = Command::new("tar");
    tar.arg("-cf").arg(folder.as_path().join("some.tar")).arg("-C").arg(machine.parent().unwrap());
    assert!(tar.arg(machine.file_name().unwrap()).status().unwrap().success());
    let runs = |tree: &Path| {
        let found = outcome(&format!("--tree {} --memory 6G", tree.display()));
        found.runs.into_iter().map(|line| line.run).collect::<Vec<_>>()
    };
    for name in ["some.tar", "some"] {
        assert_eq!(runs(&folder.as_path().join(name)), runs(&machine), "{name}");
    }
}

/// Every archive there is of a real machine, or none and a word about it.
fn captures() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/topologies");
    let Ok(entries) = fs::read_dir(&folder) else {
        println!("skipped: no captures in {}", folder.display());
        return Vec::new();
    };
    if !installed(&["tar", "bzip2"]) {
        return Vec::new();
    }
    let mut archives: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    archives.retain(|path| path.to_string_lossy().contains(".tar."));
    archives.sort();
    archives
}

#[test]
fn captured_machines_run() {
    for archive in captures() {
        let topology = tree::captured(&archive).unwrap();
        let args = parse("--memory 8G --scenario all").unwrap();
        for scenario in scenario::asked(&args) {
            let found = scenario::play(scenario, &args, &topology)
                .unwrap_or_else(|failure| panic!("{}: {scenario:?}: {failure:?}", archive.display()));
            for line in &found.runs {
                assert_eq!(
                    line.run.local_bytes + line.run.remote_bytes,
                    found.bytes,
                    "{}",
                    archive.display()
                );
            }
            // Nobody beats the bound, and nothing is far from it, whatever the machine is like.
            let of_ideal = pool(&found).of_ideal;
            assert!((1.0 - 1e-9..2.0).contains(&of_ideal), "{}: {}", archive.display(), table(&found));
        }
    }
}

/// The Itanium machine of the README.
#[test]
fn a_captured_machine_of_64_nodes() {
    let Some(archive) = captures().into_iter().find(|path| path.to_string_lossy().contains("256ia64")) else {
        return;
    };
    let found = outcome(&format!("--tree {} --memory 64G", archive.display()));
    assert_eq!(pool(&found).run.threads, 256);
    assert!(pool(&found).of_ideal <= 1.02 && pool(&found).local_share >= 0.99, "{}", table(&found));
}
