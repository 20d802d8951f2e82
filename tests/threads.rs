//! The service's threads: how they are called, who they say they are, what the embedder does at their start, and that
//! none is left. Threads are counted, so each test has a process of its own.
#![allow(unsafe_code, clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use common::hooked::{Answer, hooked_memory};
use common::seccomp::{self, Refusal, Scope};
use common::uffd::Userfaultfd;
use common::{
    MIB, PAGE, Tree, all_zero, allowed_cpus, assert_exact, cpus_of, exactly, fill, in_children, list,
    one_node, policy_of, set_policy,
};
use tracing::Level;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vm_zeroing::{
    BuildError, Intent, ThreadInfo, ThreadKind, Topology, ZeroRequest, ZeroingService, ZeroingServiceBuilder,
};

/// Threads of this process by number, with their names.
fn tasks() -> BTreeMap<u32, String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks
        .filter_map(|task| {
            let task = task.ok()?.path();
            let name = std::fs::read_to_string(task.join("comm")).ok()?;
            Some((task.file_name()?.to_str()?.parse().ok()?, name.trim_end().to_owned()))
        })
        .collect()
}

/// Waits until the threads are these; one that was joined may be listed for a moment longer.
fn until_tasks_are(expected: &BTreeMap<u32, String>) {
    let late = Instant::now() + Duration::from_secs(60);
    while tasks() != *expected {
        assert!(Instant::now() < late, "{:?} where it was {expected:?}", tasks());
        thread::yield_now();
    }
}

fn own_id() -> u32 {
    // SAFETY: gettid takes nothing and cannot fail.
    unsafe { libc::gettid() }.unsigned_abs()
}

fn ours(service: &ZeroingService) -> BTreeMap<u32, String> {
    let name = |thread: &ThreadInfo| match (thread.kind, thread.node, thread.worker) {
        (ThreadKind::Worker, Some(node), Some(number)) => format!("vmz-n{}-w{number}", node.0),
        (ThreadKind::Watchdog, None, None) => "vmz-watchdog".to_owned(),
        _ => panic!("{thread:?}"),
    };
    service.threads().iter().map(|thread| (thread.tid, name(thread))).collect()
}

/// Two nodes; the CPUs that we have are on the first one, and on the second one as far as there are two.
fn two_nodes_with_cpus() -> Topology {
    let allowed = allowed_cpus();
    let (near, far) = allowed.split_at(allowed.len().div_ceil(2));
    let tree = Tree::new();
    tree.file("sys/devices/system/cpu/online", &list(&allowed));
    for (id, cpus, distance) in [(0, near, "10 20"), (999, far, "20 10")] {
        let folder = format!("sys/devices/system/node/node{id}");
        tree.file(&format!("{folder}/cpulist"), &list(cpus));
        tree.file(&format!("{folder}/meminfo"), &format!("Node {id} MemTotal: 1048576 kB"));
        tree.file(&format!("{folder}/distance"), distance);
    }
    Topology::read(&tree.0).unwrap()
}

in_children! {
    /// `threads` is what the system says, by number and by name.
    threads_are_what_the_system_says => what_the_system_says_child {
        let before = tasks();
        let builders: [fn() -> ZeroingServiceBuilder; 4] = [
            ZeroingService::builder,
            || exactly(1),
            || exactly(12),
            || ZeroingService::builder().topology(two_nodes_with_cpus()),
        ];
        for builder in builders {
            let service = builder().build().unwrap();
            let mut expected = before.clone();
            expected.extend(ours(&service));
            assert_eq!(tasks(), expected);
            let names: BTreeSet<String> = ours(&service).into_values().collect();
            assert_eq!(names.len(), service.threads().len(), "each has its own name");
            let threads = service.threads();
            let of_kind = |kind| threads.iter().filter(|thread| thread.kind == kind).count();
            assert_eq!((of_kind(ThreadKind::Worker), of_kind(ThreadKind::Watchdog)), (service.workers(), 1));
            let mut numbers: Vec<u32> = threads.iter().filter_map(|thread| thread.worker).collect();
            numbers.sort_unstable();
            assert_eq!(numbers, (0..service.workers() as u32).collect::<Vec<_>>());
            // Work changes nothing, and the report names the same workers.
            let memory = hooked_memory(24 * MIB, |_, _| Answer::AsAsked);
            fill(&*memory, 0, 24 * MIB);
            let report = all_zero(&service.zero(&memory, Intent::Teardown).unwrap());
            for share in &report.workers {
                assert!(threads.iter().any(|thread| thread.worker == share.worker && thread.node == share.node));
            }
            assert_eq!((service.threads(), tasks()), (threads, expected));
            drop(service);
            until_tasks_are(&before);
        }
    }

    /// On each thread, once, when it is where it belongs and before anybody works.
    the_embedders_part => embedders_part_child {
        static WORKED: AtomicUsize = AtomicUsize::new(0);
        type Seen = (ThreadInfo, u32, String, Vec<u32>, usize);
        let seen: Arc<Mutex<Vec<Seen>>> = Arc::default();
        let builder = ZeroingService::builder().topology(two_nodes_with_cpus()).small_job(0);
        let service = builder
            .on_thread_start({
                let seen = Arc::clone(&seen);
                move |info| {
                    let name = std::fs::read_to_string("/proc/thread-self/comm").unwrap();
                    let cpus = cpus_of("/proc/thread-self/status");
                    let worked = WORKED.load(Ordering::SeqCst);
                    seen.lock().unwrap().push((*info, own_id(), name.trim().to_owned(), cpus, worked));
                    Ok(())
                }
            })
            .build()
            .unwrap();
        let seen_at_build = seen.lock().unwrap().clone();
        assert_eq!(seen_at_build.len(), service.workers() + 1);
        let memory = hooked_memory(24 * MIB, |_, _| {
            WORKED.fetch_add(1, Ordering::SeqCst);
            Answer::AsAsked
        });
        fill(&*memory, 0, 24 * MIB);
        all_zero(&service.zero(&memory, Intent::Teardown).unwrap());
        assert!(WORKED.load(Ordering::SeqCst) > 0);
        let mut infos = Vec::new();
        for (info, tid, name, cpus, worked) in &seen_at_build {
            assert_eq!((info.tid, *worked), (*tid, 0), "before work");
            assert_eq!(ours(&service)[tid], *name, "its name is its own already");
            if let Some(node) = info.node {
                assert_eq!(cpus, service.topology().node(node).unwrap().allowed_cpus(), "pinned already");
            }
            infos.push(*info);
        }
        let by_number = |info: &ThreadInfo| info.tid;
        infos.sort_by_key(by_number);
        let mut threads = service.threads();
        threads.sort_by_key(by_number);
        assert_eq!(infos, threads);
        assert_eq!(seen.lock().unwrap().len(), seen_at_build.len(), "once");
    }

    /// All threads start at once: one that waits for another in its start is not waited for in vain.
    threads_start_together => start_together_child {
        let together = Arc::new(Barrier::new(3));
        let service = exactly(3)
            .on_thread_start(move |info| {
                if info.kind == ThreadKind::Worker {
                    together.wait();
                }
                Ok(())
            })
            .build()
            .unwrap();
        assert_eq!(service.workers(), 3);
    }

    /// An error or a panic on any one of them ends `build`, names the thread, and leaves none.
    a_thread_that_fails_at_its_start => fails_at_its_start_child {
        let before = tasks();
        for name in ["vmz-n0-w0", "vmz-n0-w2", "vmz-n0-w3", "vmz-watchdog"] {
            for panics in [false, true] {
                let started = Arc::new(AtomicUsize::new(0));
                let counted = Arc::clone(&started);
                let result = exactly(4)
                    .on_thread_start(move |_| {
                        counted.fetch_add(1, Ordering::SeqCst);
                        let own = std::fs::read_to_string("/proc/thread-self/comm").unwrap();
                        if own.trim() == name {
                            assert!(!panics, "this panic is part of the test");
                            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
                        }
                        Ok(())
                    })
                    .build();
                let error = result.unwrap_err();
                let BuildError::ThreadStart { thread, source } = &error else { panic!("{error}") };
                assert_eq!((thread.as_str(), source.raw_os_error()), (name, (!panics).then_some(libc::ENOSPC)));
                let said = error.to_string();
                assert!(said.contains("on_thread_start") && said.contains(name), "{said}");
                assert!(!panics || said.contains("panicked"), "{said}");
                assert!(started.load(Ordering::SeqCst) >= 4);
                until_tasks_are(&before);
                assert_eq!(Arc::strong_count(&started), 1, "nor is the function kept");
            }
        }
        // It is the embedder's function that failed, not the host.
        let service = exactly(4).on_thread_start(|_| Ok(())).build().unwrap();
        assert_eq!(service.threads().len(), 5);
    }

    /// Signals that are the VMM's do not land on them; what the embedder is shown is so already.
    signals_are_blocked_on_all_of_them => signals_child {
        let blocked = |status: &str| {
            let status = std::fs::read_to_string(status).unwrap();
            let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap().trim().to_owned();
            u64::from_str_radix(&mask, 16).unwrap()
        };
        let asynchronous = [libc::SIGTERM, libc::SIGUSR1, libc::SIGALRM, libc::SIGCHLD, libc::SIGINT];
        let own = [libc::SIGSEGV, libc::SIGBUS, libc::SIGSYS];
        let is_right = move |mask: u64| {
            asynchronous.iter().all(|signal| mask >> (signal - 1) & 1 == 1)
                && own.iter().all(|signal| mask >> (signal - 1) & 1 == 0)
        };
        let service = exactly(2)
            .on_thread_start(move |_| {
                assert!(is_right(blocked("/proc/thread-self/status")));
                Ok(())
            })
            .build()
            .unwrap();
        for thread in service.threads() {
            assert!(is_right(blocked(&format!("/proc/self/task/{}/status", thread.tid))), "{thread:?}");
        }
    }

    /// Whatever the policy of the thread that builds the service, or of the watchdog when it starts a stand-in: all run
    /// at the normal one, and the embedder is shown them so.
    they_leave_a_low_policy => low_policy_child {
        for policy in [libc::SCHED_IDLE, libc::SCHED_BATCH] {
            let may_leave = move || set_policy(0, policy).and_then(|()| set_policy(0, libc::SCHED_OTHER));
            if let Err(error) = thread::spawn(may_leave).join().unwrap() {
                println!("skipped: this user may not leave the policy {policy}: {error}");
                continue;
            }
            let seen: Arc<Mutex<Vec<(u32, i32)>>> = Arc::default();
            let builder = exactly(2).on_thread_start({
                let seen = Arc::clone(&seen);
                move |info| {
                    seen.lock().unwrap().push((info.tid, policy_of(0)));
                    Ok(())
                }
            });
            let build = move || {
                set_policy(0, policy).unwrap();
                let service = builder.build().unwrap();
                assert_eq!(policy_of(0), policy, "the caller's is its own");
                service
            };
            let service = thread::spawn(build).join().unwrap();
            let are_normal = |count: usize| {
                let threads = service.threads();
                assert_eq!(threads.len(), count);
                for ThreadInfo { tid, .. } in &threads {
                    assert_eq!(policy_of(*tid), libc::SCHED_OTHER, "from {policy}: {threads:?}");
                    assert!(seen.lock().unwrap().contains(&(*tid, libc::SCHED_OTHER)), "{seen:?}");
                }
                threads
            };
            let threads = are_normal(3);
            let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), PAGE as usize)]).unwrap();
            let base = memory.get_host_address(GuestAddress(0)).unwrap() as u64;
            let Some(handler) = Userfaultfd::register(base, PAGE) else { continue };
            let watchdog = threads.iter().find(|thread| thread.kind == ThreadKind::Watchdog).unwrap().tid;
            set_policy(watchdog, policy).unwrap();
            let job = service.zero(&Arc::new(memory), Intent::Teardown).unwrap();
            handler.wait_for_a_fault();
            job.cancel();
            assert!(job.wait().is_err());
            while service.threads().len() < 4 {
                thread::yield_now();
            }
            set_policy(watchdog, libc::SCHED_OTHER).unwrap();
            are_normal(4);
            drop(handler);
        }
    }

    /// R32: where a sandbox refuses to pin threads, each says so once and runs where it may.
    they_cannot_be_pinned => not_pinned_child {
        common::events::collect();
        let own = cpus_of("/proc/thread-self/status");
        let build = || {
            seccomp::refuse(Scope::Thread, &[Refusal::new(libc::SYS_sched_setaffinity, libc::EPERM)])?;
            Some(ZeroingService::builder().topology(two_nodes_with_cpus()).small_job(0).build().unwrap())
        };
        let Some(service) = thread::spawn(build).join().unwrap() else { return };
        let warnings = || {
            let all = common::events::at(Level::WARN).into_iter();
            all.filter(|warning| warning.contains("cannot pin a worker")).collect::<Vec<_>>()
        };
        assert_eq!(warnings().len(), service.workers(), "{:?}", warnings());
        for thread in service.threads() {
            assert_eq!(cpus_of(&format!("/proc/self/task/{}/status", thread.tid)), own);
        }
        let memory = hooked_memory(24 * MIB, |_, _| Answer::AsAsked);
        for intent in [Intent::Teardown, Intent::Background] {
            fill(&*memory, 0, 24 * MIB);
            let report = all_zero(&service.zero(&memory, intent).unwrap());
            assert_exact(&*memory, &report, &[(0, 24 * MIB)]);
        }
        assert_eq!(warnings().len(), service.workers(), "once");
    }

    /// A thousand lives, one after the other and several at once, with work and without.
    nothing_is_left => nothing_is_left_child {
        let before = tasks();
        for turn in 0..100 {
            let services = [exactly(1), exactly(3), ZeroingService::builder().topology(one_node())];
            let services = services.map(|builder| builder.build().unwrap());
            let tids: Vec<u32> = services.iter().flat_map(ZeroingService::threads).map(|info| info.tid).collect();
            assert_eq!(tids.iter().collect::<BTreeSet<_>>().len(), tids.len());
            if turn % 3 == 0 {
                let memory = hooked_memory(MIB, |_, _| Answer::AsAsked);
                let jobs = services.each_ref().map(|service| {
                    let far = Instant::now() + Duration::from_secs(3600);
                    service.submit(ZeroRequest::new(&memory).deadline(far)).unwrap()
                });
                jobs.iter().take(turn % 4).for_each(|job| drop(job.wait()));
            }
        }
        until_tasks_are(&before);
    }

    /// Nobody wakes up who has nothing to do: neither workers after throttled work nor the watchdog after jobs that
    /// it looked after.
    an_idle_service_sleeps => idle_child {
        let service = exactly(2).background_rate(200 * MIB).build().unwrap();
        let memory = hooked_memory(4 * MIB, |_, _| Answer::AsAsked);
        fill(&*memory, 0, 4 * MIB);
        for intent in [Intent::Background, Intent::Teardown] {
            let request = ZeroRequest::new(&memory).intent(intent);
            let deadline = Instant::now() + Duration::from_millis(300);
            let _ = service.submit(request.deadline(deadline)).unwrap().wait();
        }
        let cancelled = service.zero(&memory, Intent::Background).unwrap();
        cancelled.cancel();
        let _ = cancelled.wait();
        let switches = || {
            let of = |tid: u32| {
                let status = std::fs::read_to_string(format!("/proc/self/task/{tid}/status")).unwrap();
                let lines = status.lines().filter(|line| line.contains("ctxt_switches"));
                lines.map(|line| line.rsplit('\t').next().unwrap().parse::<u64>().unwrap()).sum::<u64>()
            };
            service.threads().iter().map(|thread| of(thread.tid)).collect::<Vec<_>>()
        };
        assert_eq!(switches().len(), 3);
        // The watchdog keeps the appointments that it was given: the deadlines, and half a second after the cancel.
        thread::sleep(Duration::from_millis(600));
        let quiet = (0..30).any(|_| {
            let before = switches();
            thread::sleep(Duration::from_millis(100));
            switches() == before
        });
        assert!(quiet, "somebody wakes up again and again");
    }
}
