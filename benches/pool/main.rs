//! What the pool adds to the stores, or spares: each table against its yardstick, in turns within one run.
//! x86-64 Linux; as root for hugepages. What the stores themselves are worth is the business of `speed`.
//!
//! - all workers against plain threads with equal shares, alone and with one CPU shared with a busy thread;
//! - many jobs against one;
//! - one small job against the bare clear;
//! - what submitting and cancelling take;
//! - how long another thread of the process waits for its memory-management calls meanwhile;
//! - what a service costs that does nothing.
//!
//! Where a goal is set it is printed beside the figure. It is meant for a quiet machine: nothing here fails,
//! because a timed assertion on a shared machine tells of the neighbours.
//!
//! `cargo bench --bench pool`, with `-- jobs cancel` only these tables. Without `--bench` (`cargo test --benches`)
//! it is a short rehearsal.
#![allow(unsafe_code, clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

#[cfg(not(target_arch = "x86_64"))]
fn main() {
    println!("the yardsticks of this bench are x86-64 machine code; nothing was measured");
}

#[cfg(target_arch = "x86_64")]
#[path = "../speed/contest.rs"]
mod contest;
#[cfg(target_arch = "x86_64")]
mod host;
#[cfg(target_arch = "x86_64")]
mod latency;
#[cfg(target_arch = "x86_64")]
#[path = "../speed/memory.rs"]
mod memory;
#[cfg(target_arch = "x86_64")]
#[path = "../speed/print.rs"]
mod print;
#[cfg(target_arch = "x86_64")]
mod small;
#[cfg(target_arch = "x86_64")]
mod submit;
#[cfg(target_arch = "x86_64")]
mod throughput;
#[cfg(target_arch = "x86_64")]
#[path = "../speed/yardstick.rs"]
#[allow(dead_code, reason = "the other bench uses the rest")]
mod yardstick;

#[cfg(target_arch = "x86_64")]
fn main() {
    use memory::{Hugepages, Pages};

    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let rehearsal = !arguments.iter().any(|argument| argument == "--bench");
    let wanted: Vec<&String> = arguments.iter().filter(|argument| !argument.starts_with("--")).collect();
    let asked_for = |table: &str| wanted.is_empty() || wanted.iter().any(|wanted| *wanted == table);

    let most: usize = if rehearsal { 64 << 20 } else { 4 << 30 };
    let rounds = if rehearsal { 1 } else { 15 };
    print::machine();
    let reserve = |bytes: usize| (bytes, Hugepages::reserve(bytes.max(small::RING) as u64));
    let fitting = [most, most / 2, most / 4].into_iter().map(reserve);
    let (bytes, hugepages) =
        fitting.into_iter().find(|(_, reserved)| reserved.is_ok()).unwrap_or_else(|| {
            println!("NO HUGEPAGES: on 4 KiB pages instead.");
            (most, Err(String::new()))
        });
    let best = if hugepages.is_ok() { Pages::Huge2M } else { Pages::File4K };
    if asked_for("workers") {
        throughput::all_workers(best, bytes, rounds);
        throughput::all_workers(Pages::File4K, bytes, rounds);
    }
    if asked_for("hog") {
        throughput::beside_a_hog(best, bytes, rounds);
        throughput::beside_a_hog(Pages::File4K, bytes, rounds);
    }
    if asked_for("jobs") {
        throughput::many_jobs(best, bytes, if rehearsal { 100 } else { 10_000 }, rounds.min(9));
    }
    if asked_for("cancel") {
        submit::cancelling(best, bytes, if rehearsal { 3 } else { 100 });
        submit::cancelling(Pages::File4K, bytes, if rehearsal { 3 } else { 100 });
    }
    if asked_for("small") {
        small::present(best, if rehearsal { 20 } else { 3000 });
        small::absent(if rehearsal { 20 } else { 1000 });
    }
    drop(hugepages);
    if asked_for("submit") {
        submit::submitting(if rehearsal { 3 } else { 200 });
    }
    if asked_for("mmap") {
        let (bytes, rounds) = if rehearsal { (8 << 20, 1) } else { (bytes, 5) };
        latency::of_mmap(bytes, rounds);
    }
    if asked_for("service") {
        host::service(if rehearsal { 5 } else { 200 });
    }
}
