//! How often the service's workers were woken. Workers are known by their names, so a test that counts has a process
//! of its own.

use std::thread;

use super::worker_threads;

/// How often the workers were put on a CPU, and whether all of them sleep now.
fn wakeups() -> (u64, bool) {
    let read = |thread, file| std::fs::read_to_string(format!("/proc/self/task/{thread}/{file}")).unwrap();
    let mut switches = 0;
    let mut asleep = true;
    for (thread, _) in worker_threads() {
        let status = read(thread, "status");
        let numbers = status.lines().filter(|line| line.contains("ctxt_switches"));
        switches += numbers
            .map(|line| line.rsplit(char::is_whitespace).next().unwrap().parse::<u64>().unwrap())
            .sum::<u64>();
        asleep &= status.lines().any(|line| line.starts_with("State:") && line.contains("S (sleeping)"));
    }
    (switches, asleep)
}

/// Waits until the workers have been asleep for a while; how often they were put on a CPU so far.
pub fn asleep() -> u64 {
    let mut last = wakeups();
    let mut calm = 0;
    while calm < 100 {
        thread::yield_now();
        let now = wakeups();
        calm = if now.1 && now == last { calm + 1 } else { 0 };
        last = now;
    }
    last.0
}
