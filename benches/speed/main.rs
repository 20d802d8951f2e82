//! The speed this crate promises, as ratios of medians within one run. x86-64 Linux; as root for hugepages.
//!
//! A plain program and not criterion: criterion measures one contestant after the other, for seconds each,
//! and what a virtual machine's neighbours take meanwhile would land on one side of a ratio. Here all
//! contestants of a table take turns within every round, each on memory freshly filled with 0xA5 around
//! the caches, and every result is read back. Ratios are medians of the rounds' own ratios.
//! What a change did to one kernel is the business of `clear`, which criterion does; what the pool adds to the
//! stores, of `pool`.
//!
//! `cargo bench --bench speed`. Without `--bench` (`cargo test --benches`) it is a short rehearsal.
#![allow(unsafe_code, clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

#[cfg(not(target_arch = "x86_64"))]
fn main() {
    println!("the yardsticks of this bench are x86-64 machine code; nothing was measured");
}

#[cfg(target_arch = "x86_64")]
mod contest;
#[cfg(target_arch = "x86_64")]
mod memory;
#[cfg(target_arch = "x86_64")]
mod print;
#[cfg(target_arch = "x86_64")]
mod tables;
#[cfg(target_arch = "x86_64")]
mod yardstick;

#[cfg(target_arch = "x86_64")]
fn main() {
    use memory::{Hugepages, Pages};

    let rehearsal = !std::env::args().any(|argument| argument == "--bench");
    let (bytes, rounds) = if rehearsal { (64 << 20, 1) } else { (1 << 30, 15) };
    print::machine();
    println!("{} MiB of memory holding 0xA5, cold; medians of {rounds} interleaved rounds", bytes >> 20);
    let hugepages = Hugepages::reserve(2 * bytes as u64);
    if let Err(reason) = &hugepages {
        println!("\nNO HUGEPAGES ({reason}): the tables that need them are measured on 4 KiB pages instead.");
    }
    let best = if hugepages.is_ok() { Pages::Huge2M } else { Pages::File4K };
    tables::one_thread(best, bytes, rounds);
    tables::all_workers(best, bytes, rounds);
    tables::teardown(best, bytes, rounds);
    tables::all_workers(Pages::File4K, bytes, rounds);
    tables::all_workers(Pages::Anonymous4K, bytes, rounds);
}
