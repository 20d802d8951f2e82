//! All of it at once, on sizes so small that nothing is measured but that it works; tables, documents and the
//! plot of figures made up.

use clap::{CommandFactory, Parser};
use serde_json::Value;
use vm_zeroing::{CpuDescription, Method};

use crate::args::{Args, Command};
use crate::contestant::{Kind, State};
use crate::machine::Machine;
use crate::made_up::{made_up, made_up_contend, made_up_machine, made_up_mmap};
use crate::stats::Stats;
use crate::{Document, Failure, calibrate, contend, memset, mmap, plot, tables};

fn parse(line: &str) -> Result<Args, clap::Error> {
    Args::try_parse_from(std::iter::once("zero_bench").chain(line.split_whitespace()))
}

macro_rules! options {
    ($command:ident, $line:expr) => {
        match parse($line).unwrap().command {
            Command::$command(options) => options,
            other => panic!("{other:?}"),
        }
    };
}

fn machine() -> Machine {
    Machine::here().unwrap()
}

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

/// The cells of the row of a table that holds all of `words`.
fn row(text: &str, words: &[&str]) -> Vec<String> {
    let line = text.lines().find(|line| words.iter().all(|word| line.contains(word)));
    let line = line.unwrap_or_else(|| panic!("no row with {words:?} in\n{text}"));
    let cells = line.split(['│', '┆']).map(|cell| cell.trim().to_owned());
    cells.filter(|cell| !cell.is_empty()).collect()
}

#[test]
fn defaults_are_those_of_the_manual() {
    Args::command().debug_assert();
    let options = options!(Memset, "memset");
    assert_eq!((options.sizes.0.len(), options.runs, options.threads), (10, 10, 1));
    assert!(!options.hot && options.methods.is_empty() && options.plot.is_none());
    assert_eq!(options!(Mmap, "mmap --fault populate,demand --page-size 2m,1g").fault.len(), 2);
    assert_eq!(options!(Contend, "contend").threads, None);
    assert_eq!(options!(Calibrate, "calibrate").calibration.budget.0.as_millis(), 50);
    assert_eq!(options!(Calibrate, "calibrate --budget 2s").calibration.budget.0.as_millis(), 2000);
    assert!(parse("memset --json").unwrap().json && parse("--json memset").unwrap().json);
}

#[test]
fn nonsense_is_refused_and_named() {
    for (line, named) in [
        ("", "Usage"),
        ("memset --sizes 4K..1X", "\"X\" is no unit"),
        ("memset --sizes 1G..4K", "ends before it begins"),
        ("memset --sizes 0", "0 bytes"),
        ("memset --runs 0", "at least one is needed"),
        ("memset --threads 0", "at least one is needed"),
        ("memset --threads -1", "unexpected argument"),
        ("memset --threads x", "it is no whole number"),
        ("memset --methods rep-movsb", "the methods are rep-stosb"),
        ("memset --page-size 3m", "4k, thp, 2m, 1g"),
        ("memset --hot --cold", "cannot be used with"),
        ("contend --methods memset", "no clearing method is called"),
        ("contend --reader 1Q", "\"Q\" is no unit"),
        ("mmap --bytes 100", "100 bytes are no whole number"),
        ("mmap --fault none", "demand, populate"),
        ("calibrate --budget 50", "write 50ms or 2s"),
        ("calibrate --budget 0ms", "more than nothing"),
        ("calibrate --budget 9999999s", "more than an hour"),
        ("calibrate --load a --save b", "cannot be used with"),
        ("calibrate --force", "--load"),
    ] {
        let error = parse(line).expect_err(line);
        assert_eq!(error.exit_code(), 2, "{line}");
        assert!(error.to_string().contains(named), "{line}: {error}");
    }
}

#[test]
fn a_method_that_the_cpu_lacks_is_bad_input_and_named_with_those_it_has() {
    let cpu = CpuDescription::detect();
    let Some(lacking) = Method::ALL.into_iter().find(|method| cpu.supports(*method).is_err()) else {
        println!("skipped: this CPU has every method");
        return;
    };
    let asked = format!("--methods {lacking} --runs 1");
    // Found before the memory is looked for.
    let memset = memset::run(&options!(Memset, &format!("memset --sizes 64T {asked}")), &machine()).map(drop);
    let contend = contend::run(&options!(Contend, &format!("contend {asked}")), &machine()).map(drop);
    for result in [memset, contend] {
        let Err(Failure::Input(error)) = result else { panic!("{result:?}") };
        let error = error.to_string();
        assert!(error.contains(lacking.name()) && error.contains("this CPU offers rep-stosb"), "{error}");
    }
}

#[test]
fn a_plot_that_cannot_be_written_is_found_before_anything_is_measured() {
    let options = options!(Memset, "memset --sizes 64T --plot /nonexistent/a.svg");
    let Err(Failure::Input(error)) = memset::run(&options, &machine()) else {
        panic!("it was not looked for")
    };
    assert!(error.to_string().contains("/nonexistent/a.svg"), "{error}");
}

#[test]
fn more_memory_than_there_is_is_an_error_that_says_how_much() {
    let Err(Failure::Run(error)) = memset::run(&options!(Memset, "memset --sizes 64T"), &machine()) else {
        panic!("64 TiB")
    };
    assert!(error.to_string().starts_with("64 TiB are needed and "), "{error}");
    let Err(Failure::Run(error)) = mmap::run(&options!(Mmap, "mmap --bytes 64T"), &machine()) else {
        panic!("64 TiB")
    };
    assert!(error.to_string().starts_with("64 TiB are needed and "), "{error}");
}

#[test]
fn memset_runs_cold_and_hot_with_one_thread_and_with_more_than_there_are_cpus() {
    let machine = machine();
    for more in ["", "--hot", "--threads 3", "--hot --threads 3"] {
        let line = format!("memset --sizes 4K,100K,1M --reading 256K --runs 1 --page-size 4k {more}");
        let data =
            memset::run(&options!(Memset, &line), &machine).unwrap_or_else(|error| panic!("{error:?}"));
        assert_eq!(data.sizes.len(), 3, "{more}");
        for size in &data.sizes {
            // Every method here, two that are not ours, four times Auto.
            assert_eq!(size.lines.len(), machine.methods.len() + 6, "{more}");
            assert!(size.lines.iter().all(|line| line.gb_per_s.min > 0.0), "{more}");
            assert!(machine.methods.contains(&size.best), "{more}: {}", size.best);
        }
        assert!(tables::choices(&data).contains("100 KiB"));
    }
    let few = options!(Memset, "memset --sizes 4K --reading 64K --runs 1 --page-size 4k --methods memset");
    let names: Vec<String> =
        memset::run(&few, &machine).unwrap().sizes[0].lines.iter().map(|line| line.name.clone()).collect();
    assert_eq!(names, [crate::contestant::yardstick().name(), "libc::memset"]);
}

#[test]
fn mmap_runs_with_both_faults() {
    for (line, ways) in [("", 5), ("--fault demand", 3), ("--chunk 64K --fault populate --threads 2", 3)] {
        let line = format!("mmap --bytes 4M --runs 1 --page-size 4k {line}");
        let data = mmap::run(&options!(Mmap, &line), &machine()).unwrap_or_else(|error| panic!("{error:?}"));
        assert_eq!(data.pages[0].lines.len(), ways, "{line}");
        assert!(data.pages[0].lines.iter().all(|line| line.gb_per_s.min > 0.0));
        assert!(data.show().contains("service, the same pages in place"));
    }
}

#[test]
fn contend_runs_with_a_reader_where_there_are_two_cpus() {
    let machine = machine();
    let line = "contend --threads 2 --bytes 1M --call 64K --runs 1 --page-size 4k --reader 16K,64K --methods rep-stosq,portable";
    let line = if cfg!(target_arch = "x86_64") { line } else { "contend --bytes 1M --runs 1 --page-size 4k" };
    let data = contend::run(&options!(Contend, line), &machine).unwrap_or_else(|error| panic!("{error:?}"));
    assert!(data.at_once.iter().all(|count| count.lines.iter().all(|line| line.per_thread > 0.0)));
    assert_eq!(data.readers.len(), if machine.cpus > 1 { 2 } else { 0 });
    assert!(data.readers.iter().all(|of| of.beside.iter().all(|beside| beside.slowdown > 0.0)));
    // One CPU alone cannot clear beside itself.
    let single = Machine { cpu_list: machine.cpu_list[..1].to_vec(), cpus: 1, ..machine };
    let data = contend::run(&options!(Contend, &line.replace("--threads 2", "")), &single);
    assert!(data.unwrap_or_else(|error| panic!("{error:?}")).show(100).contains("there is one CPU"));
}

#[test]
fn a_calibration_is_saved_and_read_and_refused_on_another_cpu_unless_forced() {
    let folder = vmm_sys_util::tempdir::TempDir::new().unwrap();
    let path = folder.as_path().join("calibration.json");
    let shown = path.display().to_string();
    let line = format!("calibrate --budget 2ms --save {shown}");
    let saved = calibrate::run(&options!(Calibrate, &line)).unwrap_or_else(|error| panic!("{error:?}"));
    let line = format!("calibrate --load {shown}");
    let read = calibrate::run(&options!(Calibrate, &line)).unwrap_or_else(|error| panic!("{error:?}"));
    assert_eq!(saved.calibration, read.calibration);
    assert!(read.show(100).contains("workers a node that are enough"));

    let mut other: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    other["cpu"]["model"] = 4095.into();
    std::fs::write(&path, other.to_string()).unwrap();
    let Err(Failure::Input(error)) = calibrate::run(&options!(Calibrate, &line)) else {
        panic!("not refused")
    };
    assert!(error.to_string().contains("model 4095") && error.to_string().contains(&shown), "{error}");
    let forced = format!("{line} --force");
    assert_eq!(calibrate::run(&options!(Calibrate, &forced)).unwrap().calibration.cpu().model, 4095);
    let memset = options!(Memset, &format!("memset --load {shown}"));
    assert!(matches!(memset::run(&memset, &machine()), Err(Failure::Input(_))));

    std::fs::write(&path, "{}").unwrap();
    let Err(Failure::Input(error)) = calibrate::run(&options!(Calibrate, &line)) else {
        panic!("not refused")
    };
    assert!(error.to_string().contains("holds no calibration"), "{error}");
    let nowhere = options!(Calibrate, "calibrate --load /nonexistent/c.json");
    let Err(Failure::Input(error)) = calibrate::run(&nowhere) else { panic!("not refused") };
    assert!(error.to_string().contains("cannot read /nonexistent/c.json"), "{error}");
}

#[test]
fn ratios_are_to_the_yardstick_and_to_the_best_single_method() {
    let data = made_up(State::Cold);
    let [small, large] = data.sizes.as_slice() else { panic!("two sizes") };
    // memset is faster, but none of ours.
    assert_eq!((small.best.as_str(), large.best.as_str()), ("clzero", "clzero"));
    let calibrated = large.line(Kind::Calibrated).unwrap();
    assert_eq!((calibrated.relative, calibrated.of_best), (90.0 / 40.0, 0.9));
    assert_eq!(large.line(Kind::AutoWrongHint).unwrap().of_best, 0.4);
    assert_eq!(large.line(Kind::Auto).unwrap().non_temporal, Some(true));
    assert_eq!(large.line(Kind::Foreign).unwrap().non_temporal, None);
}

#[test]
fn tables_say_what_was_measured() {
    let text = made_up(State::Cold).show(100);
    assert!(
        text.contains("cold memory on 2 MiB pages, threads: 1, runs: 3\nGB/s (10^9 bytes a second)"),
        "{text}"
    );
    assert_eq!(row(&text, &["clzero", "±"])[1..], ["50.0 ± 1.0  1.25x", "100.0 ± 1.0  2.50x"]);
    assert_eq!(
        row(&text, &["64 MiB", "clzero"])[1..],
        ["clzero 100.0", "clzero 1.00", "clzero 0.90", "rep-stosb 0.40", "rep-stosb 0.40"]
    );
    // One size a table where there is no room for two.
    assert_eq!(made_up(State::Cold).show(60).matches("libc::memset").count(), 2);
    assert!(made_up(State::Hot).show(100).starts_with("hot memory"));
    let aligned = |text: &str| {
        let rows = text.lines().filter(|line| line.starts_with('│'));
        rows.map(|line| line.chars().count()).collect::<std::collections::BTreeSet<_>>().len()
    };
    assert_eq!(aligned(&tables::choices(&made_up(State::Cold))), 1);
}

#[test]
fn tables_of_the_other_commands_say_what_was_measured() {
    let text = made_up_mmap().show();
    assert!(text.contains("1 GiB a reading, 4 KiB a call, 50 % huge"), "{text}");
    assert_eq!(row(&text, &["service"]), ["service", "2", "40.0", "40.0", "4.00x"]);
    let text = made_up_contend().show(100);
    assert_eq!(row(&text, &["avx2", "each"])[1..], ["80.0   40.0 each"]);
    assert_eq!(row(&text, &["rep-stosb"]), ["rep-stosb", "cached", "30.00  3.00x", "33.0"]);
    assert!(
        text.contains("reader of 8 MiB: 3.00x as long beside cached stores, 1.50x beside non-temporal ones"),
        "{text}"
    );
}

/// As promised by `--help`.
#[test]
fn documents_have_the_promised_keys() {
    fn document<T: serde::Serialize>(command: &'static str, result: &T) -> Value {
        let machine = made_up_machine();
        let notes = ["loud".to_owned()];
        serde_json::to_value(Document { command, machine: &machine, notes: &notes, result }).unwrap()
    }
    let sorted = |text: &str| {
        let mut words: Vec<String> = text.split(' ').map(str::to_owned).collect();
        words.sort();
        words
    };
    let check = |value: &Value, promised: &str| assert_eq!(keys(value), sorted(promised));
    let value = document("memset", &made_up(State::Cold));
    check(&value, "command machine notes result");
    assert_eq!((&value["command"], &value["notes"][0]), (&"memset".into(), &"loud".into()));
    check(&value["machine"], "cpu family model methods cpus l2_bytes llc_bytes llc_cpus kernel libc load");
    let result = &value["result"];
    check(result, "state page_size huge_share threads runs yardstick sizes crossovers");
    check(&result["sizes"][0], "size_bytes call_bytes reading_bytes best lines");
    let line = &result["sizes"][1]["lines"][1];
    check(line, "name kind method non_temporal gb_per_s relative of_best");
    check(&line["gb_per_s"], "mean stdev median min max runs");
    assert_eq!((&line["gb_per_s"]["median"], &line["relative"]), (&100.0.into(), &2.5.into()));
    assert_eq!(
        result["crossovers"][0],
        serde_json::json!({"chooser": "Auto", "from_bytes": 65536, "before": "rep-stosb", "after": "clzero"})
    );
    let kinds: Vec<&str> =
        result["sizes"][0]["lines"].as_array().unwrap().iter().map(|l| l["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds[1..4], ["method", "foreign", "auto"]);

    let result = &document("mmap", &made_up_mmap())["result"];
    check(result, "runs pages");
    check(&result["pages"][0], "page_size huge_share bytes chunk_bytes lines");
    check(&result["pages"][0]["lines"][0], "name threads gb_per_s relative");
    let result = &document("contend", &made_up_contend())["result"];
    check(result, "page_size runs call_bytes at_once readers");
    check(&result["at_once"][0]["lines"][0], "method non_temporal gb_per_s per_thread");
    check(&result["readers"][0], "buffer_bytes clearing_threads alone_ns beside");
    check(&result["readers"][0]["beside"][0], "method non_temporal ns_per_load slowdown gb_per_s");
    let help = Args::command().render_long_help().to_string();
    for promised in ["size_bytes", "ns_per_load", "huge_share", "of_best", "calibration"] {
        assert!(help.contains(promised), "{promised}");
    }
}

/// Each tag closed in order, attributes quoted, no bare `<` or `&`.
fn assert_well_formed(svg: &str) {
    let mut open: Vec<&str> = Vec::new();
    let mut rest = svg;
    while let Some((text, tail)) = rest.split_once('<') {
        let entities = text.split('&').skip(1);
        assert!(
            entities
                .clone()
                .all(|e| ["lt;", "gt;", "amp;", "quot;", "apos;"].iter().any(|k| e.starts_with(k)))
        );
        let (tag, after) = tail.split_once('>').expect("a tag that ends");
        assert!(tag.matches('"').count() % 2 == 0 && !tag.contains('<'), "{tag}");
        let name = tag.split_whitespace().next().unwrap_or_default();
        match (name.strip_prefix('/'), tag.ends_with('/') || tag.starts_with(['?', '!'])) {
            (Some(name), _) => assert_eq!(open.pop(), Some(name)),
            (None, true) => (),
            (None, false) => open.push(name),
        }
        rest = after;
    }
    assert!(open.is_empty() && svg.trim_end().ends_with("</svg>"), "{open:?}");
}

#[test]
fn the_plot_is_svg_with_a_line_for_each_method_and_the_marks() {
    let machine = made_up_machine();
    let svg = plot::draw(&made_up(State::Cold), &machine).unwrap_or_else(|error| panic!("{error:?}"));
    assert_well_formed(&svg);
    for name in [
        "rep-stosb",
        "clzero",
        "libc::memset",
        "Auto, calibrated",
        "last cache 32 MiB",
        "Auto: clzero from 64 KiB",
        "GB/s (10^9 bytes a second)",
        "bytes cleared in a call",
        "Model &lt;&amp;&gt; 9",
        // What Auto took at the two sizes.
        "rep-stosb, clzero",
        "standard deviation",
    ] {
        assert!(svg.contains(name), "{name}");
    }
    assert!(!svg.contains("wrong hint") && !svg.contains("NaN") && !svg.contains("inf"));
    // One size, one run, no cache shown, nothing chosen: still a plot.
    let mut least = made_up(State::Hot);
    least.sizes.truncate(1);
    least.crossovers.clear();
    for line in &mut least.sizes[0].lines {
        line.gb_per_s = Stats::of(vec![1e-3]);
    }
    let svg = plot::draw(&least, &Machine { llc_bytes: None, ..machine })
        .unwrap_or_else(|error| panic!("{error:?}"));
    assert_well_formed(&svg);
    assert!(!svg.contains("last cache") && !svg.contains("NaN"));
}
