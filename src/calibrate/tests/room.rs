//! How much memory may be taken, from made-up files.

use std::fs;
use std::path::{Path, PathBuf};

use super::super::room::room;

const MIB: u64 = 1 << 20;

/// A root folder of its own, gone at the end.
struct Root(PathBuf);

impl Root {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("vm-zeroing-room-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    fn file(&self, path: &str, text: impl ToString) -> &Self {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text.to_string()).unwrap();
        self
    }

    /// MiB that rings may take.
    fn room(&self) -> u64 {
        room(&self.0) / MIB
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn an_eighth_of_what_is_available() {
    let root = Root::new("host");
    assert_eq!(root.room(), u64::MAX / MIB, "nothing is known");
    for nonsense in ["", "MemAvailable:", "MemAvailable: much kB", "MemAvailable: 99999999999999999999 kB"] {
        assert_eq!(root.file("proc/meminfo", nonsense).room(), u64::MAX / MIB);
    }
    root.file("proc/meminfo", "MemTotal: 900000 kB\nMemFree: 10 kB\nMemAvailable:     819200 kB\n");
    assert_eq!(root.room(), 100);
    assert!(room(Path::new("/")) < u64::MAX, "this machine says it");
}

/// The tightest of our cgroup and those above it; files that can be dropped are room.
#[test]
fn version_2_cgroups() {
    let root = Root::new("v2");
    root.file("proc/meminfo", "MemAvailable: 819200 kB\n")
        .file("proc/self/mounts", "proc /proc proc rw 0 0\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n")
        .file("proc/self/cgroup", "5:memory:/elsewhere\n0::/a/b\n");
    let of = |path: &str, max: &str, current: u64, dropped: u64| {
        let folder = format!("sys/fs/cgroup/unified/{path}");
        root.file(&format!("{folder}/memory.max"), max)
            .file(&format!("{folder}/memory.current"), current * MIB)
            .file(
                &format!("{folder}/memory.stat"),
                format!("anon 1\ninactive_file {}\nfile 7\n", dropped * MIB),
            );
        root.room()
    };
    assert_eq!(of("a/b", "max\n", 900, 0), 100);
    assert_eq!(of("a/b", &(500 * MIB).to_string(), 460, 0), 5);
    assert_eq!(of("a/b", &(500 * MIB).to_string(), 500, 400), 50);
    assert_eq!(of("a", &(64 * MIB).to_string(), 48, 0), 2, "the one above");
    assert_eq!(of("", &(64 * MIB).to_string(), 64, 8), 1, "the mounted one");
    assert_eq!(of("a", &(64 * MIB).to_string(), 70, 0), 0, "over its limit");
    // In a container, the path that we are told may not exist.
    root.file("proc/self/cgroup", "0::/../../outside\n");
    assert_eq!(root.room(), 1);
}

#[test]
fn version_1_cgroups() {
    let root = Root::new("v1");
    root.file(
        "proc/self/mounts",
        "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\ncgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n",
    )
    .file("proc/self/cgroup", "9:cpu,cpuacct:/x\n5:memory:/vm\n0::/a/b\n")
    .file("sys/fs/cgroup/memory/vm/memory.limit_in_bytes", 80 * MIB)
    .file("sys/fs/cgroup/memory/vm/memory.usage_in_bytes", 80 * MIB)
    .file("sys/fs/cgroup/memory/vm/memory.stat", format!("inactive_file 5\ntotal_inactive_file {}\n", 40 * MIB));
    assert_eq!(root.room(), 5);
    root.file("sys/fs/cgroup/memory/memory.limit_in_bytes", 9_223_372_036_854_771_712u64)
        .file("sys/fs/cgroup/memory/memory.usage_in_bytes", 0);
    assert_eq!(root.room(), 5);
    root.file("proc/meminfo", "MemAvailable: 16384 kB\n");
    assert_eq!(root.room(), 2);
}
