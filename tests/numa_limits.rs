//! The operator's limits on a machine with several nodes: a cpuset, a memory policy. The library stays inside.
//!
//! Each test starts itself again as a process under the limit. The cpusets need root and cgroup v2 with the cpuset
//! controller.
#![allow(unsafe_code, clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests are tests")]

mod machines;

use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::Command;

use machines::{
    CHUNK, MIB, PAGE, anonymous, assert_on, assert_zero, child, cpu_nodes, cpus_of, host, is_child,
    memory_nodes, run, several_nodes, status_list,
};
use vm_memory::GuestAddress;
use vm_zeroing::{
    HugepagePool, Intent, LeasedMemory, NodeId, NodePolicy, PageSize, PoolError, Quiesced, Topology,
    ZeroingService,
};

/// A cgroup with a cpuset, removed at the end.
struct Cpuset(PathBuf);

impl Cpuset {
    fn new(name: &str, cpus: &[u32], memory: NodeId) -> io::Result<Self> {
        fs::write("/sys/fs/cgroup/cgroup.subtree_control", "+cpuset")?;
        let folder = PathBuf::from(format!("/sys/fs/cgroup/vm-zeroing-{}-{name}", std::process::id()));
        fs::create_dir(&folder)?;
        let set = Self(folder);
        let cpus: Vec<String> = cpus.iter().map(u32::to_string).collect();
        fs::write(set.0.join("cpuset.cpus"), cpus.join(","))?;
        fs::write(set.0.join("cpuset.mems"), memory.0.to_string())?;
        Ok(set)
    }

    /// The same command, run inside.
    fn wrap(&self, inner: &Command) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", r#"echo $$ >"$0/cgroup.procs" && exec "$@""#]).arg(&self.0);
        command.arg(inner.get_program()).args(inner.get_args());
        for (key, value) in inner.get_envs() {
            command.env(key, value.unwrap());
        }
        command
    }
}

impl Drop for Cpuset {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// CPUs of one node, memory of the same or of another one.
#[test]
fn a_cpuset_is_honoured() {
    let Some(nodes) = several_nodes() else { return };
    for (name, cpus, memory) in [("near", nodes[1], nodes[1]), ("far", nodes[0], nodes[1])] {
        let set = match Cpuset::new(name, &cpus_of(cpus), memory) {
            Ok(set) => set,
            Err(error) => {
                println!("skipped: no cpuset can be made below /sys/fs/cgroup: {error}");
                return;
            }
        };
        run(set.wrap(child("inside_a_cpuset").env("OTHER_NODE", nodes[0].0.to_string())));
    }
}

#[test]
#[ignore = "a child of a_cpuset_is_honoured"]
fn inside_a_cpuset() {
    assert!(is_child());
    let other = NodeId(std::env::var("OTHER_NODE").unwrap().parse().unwrap());
    let (cpus, memory) = (cpu_nodes(), memory_nodes());
    let ([cpus], [memory]) = (cpus.as_slice(), memory.as_slice()) else {
        panic!("not confined: {cpus:?} {memory:?}")
    };
    println!("confined to the CPUs of {cpus} and the memory of {memory}");

    let topology = Topology::detect().unwrap();
    for node in topology.nodes() {
        let own = if node.id() == *cpus { cpus_of(*cpus) } else { Vec::new() };
        assert_eq!(node.allowed_cpus(), own);
        assert_eq!(node.memory_allowed(), node.id() == *memory);
        assert_eq!(topology.cpus_serving(node.id()), cpus_of(*cpus));
    }
    let service = ZeroingService::builder().build().unwrap();
    assert_eq!(service.workers(), cpus_of(*cpus).len());
    for task in fs::read_dir("/proc/self/task").unwrap() {
        let allowed =
            status_list(task.unwrap().path().join("status").to_str().unwrap(), "Cpus_allowed_list:");
        assert_eq!(allowed, cpus_of(*cpus));
    }

    let refused = HugepagePool::builder(&service).page_size(PageSize::Base).capacity(other, 4 * MIB).build();
    match refused.unwrap_err() {
        PoolError::UnknownNode { node, known } => assert_eq!((node, known), (other, vec![*memory])),
        error => panic!("{error:?}"),
    }
    let pool =
        HugepagePool::builder(&service).page_size(PageSize::Base).capacity(*memory, 4 * MIB).build().unwrap();
    let lease = pool.lease(4 * MIB, NodePolicy::Any).unwrap();
    let leased: LeasedMemory = lease.into_memory([(GuestAddress(0), 4 * MIB)]).unwrap();
    assert_zero(&leased, 0, 4 * MIB);
    assert_on(*memory, host(&leased, 0), 4 * MIB, PAGE);
    let report = leased.recycle(Quiesced::on_callers_word()).unwrap().wait().unwrap();
    let local = if cpus == memory { 4 * MIB } else { 0 };
    assert_eq!((report.node_local_bytes, report.node_remote_bytes), (local, 4 * MIB - local));

    let unbound = anonymous(4 * CHUNK);
    service.zero(&unbound, Intent::Boot).unwrap().wait().unwrap();
    assert_on(*memory, host(&*unbound, 0), 4 * CHUNK, PAGE);
}

/// The mode and the nodes of the calling thread's memory policy.
fn thread_policy() -> (libc::c_int, u64) {
    let (mut mode, mut mask) = (0, [0u64; 16]);
    // SAFETY: both outlive the call, and the mask holds as many bits as is said.
    let answer =
        unsafe { libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, mask.as_mut_ptr(), 1024, 0usize, 0) };
    assert_eq!(answer, 0, "{}", io::Error::last_os_error());
    (mode, mask[0])
}

fn set_thread_policy(mode: libc::c_int, mask: u64) {
    // SAFETY: sets the policy of this thread; the mask outlives the call, and the kernel reads one bit fewer than
    // it is told.
    let answer = unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, &raw const mask, 65) };
    assert_eq!(answer, 0, "{}", io::Error::last_os_error());
}

/// As under `numactl --membind`.
#[test]
fn a_memory_policy_is_honoured() {
    let Some(nodes) = several_nodes() else { return };
    for node in &nodes[..2] {
        set_thread_policy(libc::MPOL_BIND, 1 << node.0);
        let mut child = child("under_a_memory_policy");
        let output = child.env("ONLY_NODE", node.0.to_string()).output();
        set_thread_policy(libc::MPOL_DEFAULT, 0);
        let output = output.unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        print!("{said}{}", String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success() && said.contains("1 passed"), "{node}: {}", output.status);
    }
}

#[test]
#[ignore = "a child of a_memory_policy_is_honoured"]
fn under_a_memory_policy() {
    assert!(is_child());
    let only = NodeId(std::env::var("ONLY_NODE").unwrap().parse().unwrap());
    let policy = (libc::MPOL_BIND, 1 << only.0);
    assert_eq!(thread_policy(), policy);
    let service = ZeroingService::builder().build().unwrap();
    let memory = anonymous(16 * CHUNK);
    let report = service.zero(&memory, Intent::Boot).unwrap().wait().unwrap();
    assert_eq!(report.reads_zero_bytes, 16 * CHUNK);
    assert_on(only, host(&*memory, 0), 16 * CHUNK, PAGE);
    assert_eq!(thread_policy(), policy);
}
