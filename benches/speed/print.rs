//! What is printed, as Markdown.

use std::ffi::CStr;
use std::fs;
use std::time::Duration;

use super::contest::Score;
use super::memory::Pages;

pub fn machine() {
    // SAFETY: answers a constant string of the C library.
    #[cfg(target_env = "gnu")]
    let libc = unsafe { CStr::from_ptr(libc::gnu_get_libc_version()) }.to_string_lossy();
    #[cfg(target_env = "gnu")]
    let libc = format!("glibc {libc}");
    #[cfg(not(target_env = "gnu"))]
    let libc = "another libc";
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = cpu
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map_or("?", |(_, name)| name);
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    println!("{cpu}, {cpus} CPUs, Linux {}, {libc}; load before the run {}", kernel.trim(), load.trim());
}

/// Rates, and how many times as fast as the first.
pub fn rates(title: &str, pages: Pages, bytes: usize, scores: &[Score]) {
    println!(
        "\n| {title}, {} MiB of {} | GB/s | slowest .. fastest | ratio |\n|---|---|---|---|",
        bytes >> 20,
        pages.name()
    );
    let rate = |time: Duration| bytes as f64 / time.as_secs_f64() / 1e9;
    for score in scores {
        let (fastest, slowest) = score.fastest_and_slowest();
        println!(
            "| {} | {:.1} | {:.1} .. {:.1} | {:.2} |",
            score.name,
            rate(score.median()),
            rate(slowest),
            rate(fastest),
            score.speed_against(&scores[0])
        );
    }
}
