//! What the figures were measured on.

use std::fs;
use std::path::Path;

use serde::Serialize;
use vm_zeroing::{CpuDescription, Topology, TopologyError};

use crate::raw::libc_version;
use crate::sizes::show;

/// A machine, as far as the figures depend on it.
#[derive(Debug, Clone, Serialize)]
pub struct Machine {
    /// The CPU's model name.
    pub cpu: String,
    pub family: u32,
    pub model: u32,
    /// Methods that it offers.
    pub methods: Vec<String>,
    /// CPUs that this process may use.
    pub cpus: usize,
    pub l2_bytes: Option<u64>,
    /// The last cache, as the CPU shows it: in a virtual machine perhaps all of the host's.
    pub llc_bytes: Option<u64>,
    /// CPUs that share it here.
    pub llc_cpus: usize,
    pub kernel: String,
    pub libc: String,
    /// `/proc/loadavg` before the run: other work spoils figures.
    pub load: String,
    #[serde(skip)]
    pub cpu_list: Vec<u32>,
}

/// A level 2 cache where none is shown.
const ASSUMED_L2: u64 = 1 << 20;

impl Machine {
    pub fn here() -> Result<Self, TopologyError> {
        let topology = Topology::detect()?;
        let cpu_list: Vec<u32> =
            topology.nodes().iter().flat_map(|node| node.allowed_cpus().iter().copied()).collect();
        let cpu = CpuDescription::detect();
        let first = cpu_list.first().copied().unwrap_or(0);
        let caches = caches(Path::new(&format!("/sys/devices/system/cpu/cpu{first}/cache")));
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        let names = read("/proc/cpuinfo");
        let name = names.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        Ok(Self {
            cpu: name.map_or("unknown", |(_, name)| name).to_owned(),
            family: cpu.family,
            model: cpu.model,
            methods: cpu.methods().iter().map(ToString::to_string).collect(),
            cpus: cpu_list.len(),
            l2_bytes: caches.iter().find(|cache| cache.level == 2).map(|cache| cache.bytes),
            llc_bytes: cpu.llc_bytes.filter(|bytes| *bytes > 0),
            llc_cpus: caches
                .iter()
                .max_by_key(|cache| cache.level)
                .map_or(cpu_list.len(), |cache| cache.cpus)
                .max(1),
            // The version; who built it is nobody's business.
            kernel: read("/proc/sys/kernel/osrelease").split('-').next().unwrap_or_default().to_owned(),
            libc: libc_version(),
            load: read("/proc/loadavg"),
            cpu_list,
        })
    }

    pub fn l2(&self) -> u64 {
        self.l2_bytes.unwrap_or(ASSUMED_L2)
    }

    /// Two lines.
    pub fn show(&self) -> String {
        let cache = |bytes: Option<u64>| bytes.map_or("not shown".to_owned(), show);
        format!(
            "{} (family {} model {}), {} CPUs, L2 {}, last cache {} for {} CPUs\nLinux {}, {}, load before {}",
            self.cpu,
            self.family,
            self.model,
            self.cpus,
            cache(self.l2_bytes),
            cache(self.llc_bytes),
            self.llc_cpus,
            self.kernel,
            self.libc,
            self.load.split(' ').next().unwrap_or("unknown"),
        )
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cache {
    level: u32,
    bytes: u64,
    cpus: usize,
}

/// The data caches that sysfs lists for a CPU.
fn caches(folder: &Path) -> Vec<Cache> {
    let one = |index: u32| {
        let read = |name: &str| fs::read_to_string(folder.join(format!("index{index}")).join(name)).ok();
        let kind = read("type")?;
        let size = read("size")?;
        let bytes = crate::sizes::parse_size(size.trim()).ok()?;
        let cpus = read("shared_cpu_list").map_or(1, |list| count(list.trim()));
        (kind.trim() != "Instruction").then_some(Cache {
            level: read("level")?.trim().parse().ok()?,
            bytes,
            cpus,
        })
    };
    (0..16).filter_map(one).collect()
}

/// How many CPUs a list like `0-3,8` names.
fn count(list: &str) -> usize {
    let one = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(last.parse::<usize>().ok()?.checked_sub(first.parse().ok()?)? + 1)
    };
    list.split(',').filter_map(one).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caches_are_read_from_sysfs() {
        let root = vmm_sys_util::tempdir::TempDir::new().unwrap();
        for (index, level, kind, size, cpus) in [
            (0, "1", "Data", "48K", "0"),
            (1, "1", "Instruction", "32K", "0"),
            (2, "2", "Unified", "1024K", "0"),
            (3, "3", "Unified", "32768K", "0-1,8-9"),
        ] {
            let folder = root.as_path().join(format!("index{index}"));
            fs::create_dir(&folder).unwrap();
            for (name, text) in [("level", level), ("type", kind), ("size", size), ("shared_cpu_list", cpus)]
            {
                fs::write(folder.join(name), format!("{text}\n")).unwrap();
            }
        }
        assert_eq!(
            caches(root.as_path()),
            [
                Cache { level: 1, bytes: 48 << 10, cpus: 1 },
                Cache { level: 2, bytes: 1 << 20, cpus: 1 },
                Cache { level: 3, bytes: 32 << 20, cpus: 4 },
            ]
        );
        assert_eq!(caches(Path::new("/nonexistent")), []);
    }
}
