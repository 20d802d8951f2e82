//! The threads of this process, and what a service takes of the host.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use vm_zeroing::{Intent, ZeroingService};

use super::contest::median_of;
use super::memory::{Memory, Pages};

/// The CPUs that this thread may run on.
pub fn allowed_cpus() -> Vec<usize> {
    // SAFETY: the kernel writes to the set and to nothing else; zeros are a valid one.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        assert_eq!(libc::sched_getaffinity(0, size_of_val(&set), &raw mut set), 0);
        set
    };
    // SAFETY: the number is below the size of the set.
    (0..libc::CPU_SETSIZE as usize).filter(|cpu| unsafe { libc::CPU_ISSET(*cpu, &set) }).collect()
}

/// Keeps this thread to some CPUs.
pub fn pin_to(cpus: &[usize]) {
    // SAFETY: the set is on the stack, and the call changes this thread's affinity only.
    let answer = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        cpus.iter().for_each(|cpu| libc::CPU_SET(*cpu, &mut set));
        libc::sched_setaffinity(0, size_of_val(&set), &raw const set)
    };
    assert_eq!(answer, 0, "sched_setaffinity: {}", std::io::Error::last_os_error());
}

/// A thread that is always busy, at normal priority, until it is dropped: a vCPU, say.
pub struct Hog {
    enough: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Hog {
    pub fn on(cpu: usize) -> Self {
        let enough = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&enough);
        let thread = thread::spawn(move || {
            pin_to(&[cpu]);
            while !until.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        Self { enough, thread: Some(thread) }
    }
}

impl Drop for Hog {
    fn drop(&mut self) {
        self.enough.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// What a service costs that does nothing.
pub fn service(builds: usize) {
    let two_workers = || ZeroingService::builder().workers_per_node(2).build().unwrap();
    let build = median_of(builds, || {
        let start = Instant::now();
        let service = two_workers();
        let time = start.elapsed();
        drop(service);
        time
    });
    let service = two_workers();
    let memory = Memory::new(Pages::Anonymous4K, 64 << 20);
    service.zero(&memory.guest, Intent::Teardown).unwrap().wait().unwrap();
    // The last worker may still be on its way to sleep.
    thread::sleep(Duration::from_millis(20));
    let before = cpu_time_of_workers();
    thread::sleep(Duration::from_secs(1));
    let used = cpu_time_of_workers() - before;
    println!("\n| a service with {} workers | |\n|---|---|", service.workers());
    println!("| build(), median of {builds} | {build:.0?} |");
    println!("| CPU time of its threads in one idle second, after a job | {used:?} |");
}

/// Run time of all threads that carry a name of the service's, by the scheduler's own account.
fn cpu_time_of_workers() -> Duration {
    let own = fs::read_dir("/proc/self/task").unwrap().filter_map(|task| {
        let task = task.ok()?.path();
        fs::read_to_string(task.join("comm")).ok()?.starts_with("vmz-").then_some(task)
    });
    let times = own.map(|task| {
        let account = fs::read_to_string(task.join("schedstat")).expect("the kernel keeps schedstat");
        account
            .split_whitespace()
            .next()
            .and_then(|run| run.parse::<u64>().ok())
            .expect("nanoseconds of run time")
    });
    Duration::from_nanos(times.sum())
}
