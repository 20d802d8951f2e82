//! Memory to be cleared: which pages it is made of, and what to do where the host has none.

use std::path::Path;
use std::{fmt, fs, io};

use clap::ValueEnum;

use crate::raw::{Kind, Memory};
use crate::sizes::show;

/// Pages that memory is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Pages {
    /// Base pages: transparent hugepages advised against
    #[value(name = "4k")]
    Base,
    /// Transparent hugepages, as far as the kernel has them
    #[value(name = "thp")]
    Transparent,
    /// Reserved hugepages of 2 MiB
    #[value(name = "2m")]
    Huge2M,
    /// Reserved hugepages of 1 GiB
    #[value(name = "1g")]
    Huge1G,
}

/// Memory that cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    #[error(
        "{wanted} pages of {} are needed and {free} are free; reserve them: echo {reserve} > {file} (and read it back: fragmented memory gives fewer, then reserve at boot: hugepagesz={} hugepages={reserve})", show(*page), short(*page)
    )]
    TooFewHugepages { wanted: u64, free: u64, page: u64, reserve: u64, file: String },
    #[error(
        "the kernel has no pages of {} ({folder} is not there): boot with hugepagesz={} on a CPU that has them, or take another --page-size",
        show(*page), short(*page)
    )]
    NoSuchPages { page: u64, folder: String },
    #[error(
        "transparent hugepages are switched off: echo madvise > {THP_ENABLED}, or take another --page-size"
    )]
    NoTransparent,
    #[error("{} are needed and {} are available ({limit}); take smaller sizes or fewer threads", show(*wanted), show(*available))]
    TooLittle { wanted: u64, available: u64, limit: String },
    #[error("the kernel gave no memory of {} on {pages}: {source}; {}", show(*wanted), pages.remedy())]
    Refused { wanted: u64, pages: Pages, source: io::Error },
}

/// As the kernel's command line wants it.
fn short(page: u64) -> &'static str {
    if page == 1 << 30 { "1G" } else { "2M" }
}

const THP_ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

impl Pages {
    /// What the kernel counts in; for transparent hugepages the small page, of which the rest is made.
    pub fn bytes(self) -> u64 {
        match self {
            Pages::Base | Pages::Transparent => 4 << 10,
            Pages::Huge2M => 2 << 20,
            Pages::Huge1G => 1 << 30,
        }
    }

    fn kind(self) -> Kind {
        let huge = |log: libc::c_int| libc::MAP_HUGETLB | log << libc::MAP_HUGE_SHIFT;
        let (flags, advice, align) = match self {
            Pages::Base => (0, Some(libc::MADV_NOHUGEPAGE), 2 << 20),
            Pages::Transparent => (0, Some(libc::MADV_HUGEPAGE), 2 << 20),
            Pages::Huge2M => (huge(21), None, 2 << 20),
            Pages::Huge1G => (huge(30), None, 1 << 30),
        };
        Kind { flags, advice, align }
    }

    fn remedy(self) -> &'static str {
        match self {
            Pages::Base | Pages::Transparent => {
                "look at ulimit -v, vm.overcommit_memory and the memory cgroup"
            }
            Pages::Huge2M | Pages::Huge1G => {
                "look at the hugetlb cgroup and at who else takes hugepages (grep Huge /proc/meminfo)"
            }
        }
    }

    /// At least `len` bytes of such memory, without pages yet. Looks first whether the host can have them.
    pub fn map(self, len: u64) -> Result<Memory, MemoryError> {
        self.map_on(Path::new("/"), len)
    }

    /// As [`map`](Self::map), the host's files read below `root`.
    pub fn map_on(self, root: &Path, len: u64) -> Result<Memory, MemoryError> {
        let len = len.next_multiple_of(self.bytes());
        self.look_for(root, len)?;
        self.map_unseen(len)
    }

    /// As [`map`](Self::map), without looking: the pages were there a moment ago.
    pub fn map_unseen(self, len: u64) -> Result<Memory, MemoryError> {
        let refused = |source| MemoryError::Refused { wanted: len, pages: self, source };
        let bytes = usize::try_from(len).map_err(|_| refused(io::Error::from_raw_os_error(libc::ENOMEM)))?;
        Memory::map(self.kind(), bytes).map_err(refused)
    }

    pub fn refused(self, wanted: u64, source: io::Error) -> MemoryError {
        MemoryError::Refused { wanted, pages: self, source }
    }

    fn look_for(self, root: &Path, len: u64) -> Result<(), MemoryError> {
        match self {
            Pages::Base => room(root, len),
            Pages::Transparent => {
                let enabled = fs::read_to_string(root.join(&THP_ENABLED[1..])).unwrap_or_default();
                if enabled.is_empty() || enabled.contains("[never]") {
                    return Err(MemoryError::NoTransparent);
                }
                room(root, len)
            }
            Pages::Huge2M | Pages::Huge1G => hugepages(root, self.bytes(), len),
        }
    }

    /// Which part of a present memory is made of hugepages; `None` where there was no choice, or nobody says.
    pub fn huge_share(self, memory: &Memory) -> Option<f64> {
        if self != Pages::Transparent {
            return None;
        }
        let smaps = fs::read_to_string("/proc/self/smaps").ok()?;
        Some(anon_huge(&smaps, memory.start())? as f64 / memory.len() as f64)
    }
}

impl fmt::Display for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Pages::Base => "4 KiB pages",
            Pages::Transparent => "transparent hugepages",
            Pages::Huge2M => "2 MiB pages",
            Pages::Huge1G => "1 GiB pages",
        })
    }
}

/// Bytes of hugepages in the mapping that begins at `start`, from `/proc/self/smaps`.
fn anon_huge(smaps: &str, start: u64) -> Option<u64> {
    let head = format!("{start:x}-");
    let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&head));
    lines.next()?;
    let line = lines.find_map(|line| line.strip_prefix("AnonHugePages:"))?;
    Some(line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()? << 10)
}

/// An error unless enough hugepages are free that nobody has reserved.
fn hugepages(root: &Path, page: u64, len: u64) -> Result<(), MemoryError> {
    let folder = format!("/sys/kernel/mm/hugepages/hugepages-{}kB", page >> 10);
    let number = |name: &str| {
        let text = fs::read_to_string(root.join(&folder[1..]).join(name)).ok()?;
        text.trim().parse::<u64>().ok()
    };
    let (Some(all), Some(free)) = (number("nr_hugepages"), number("free_hugepages")) else {
        return Err(MemoryError::NoSuchPages { page, folder });
    };
    let free = free.saturating_sub(number("resv_hugepages").unwrap_or(0));
    let wanted = len.div_ceil(page);
    if wanted > free {
        let file = format!("{folder}/nr_hugepages");
        return Err(MemoryError::TooFewHugepages { wanted, free, page, reserve: all + wanted - free, file });
    }
    Ok(())
}

/// An error unless so much memory is available; to find out by taking it would end in the OOM killer.
fn room(root: &Path, wanted: u64) -> Result<(), MemoryError> {
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
    let mut limits: Vec<(u64, String)> = Vec::new();
    let available = read("proc/meminfo").lines().find_map(|line| {
        line.strip_prefix("MemAvailable:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    });
    limits.extend(available.map(|kib| (kib << 10, "MemAvailable in /proc/meminfo".to_owned())));
    for line in read("proc/self/cgroup").lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let (mount, file) = match controllers {
            "" => ("sys/fs/cgroup", "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => {
                ("sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => continue,
        };
        // A limit above holds for all below.
        for group in Path::new(path.trim_start_matches('/')).ancestors() {
            let file = Path::new(mount).join(group).join(file);
            let limit = fs::read_to_string(root.join(&file)).ok();
            let limit = limit.and_then(|text| text.trim().parse::<u64>().ok());
            limits.extend(limit.map(|limit| (limit, format!("/{}", file.display()))));
        }
    }
    match limits.into_iter().min() {
        Some((available, limit)) if wanted > available => {
            Err(MemoryError::TooLittle { wanted, available, limit })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_sys_util::tempdir::TempDir;

    /// A host made of files.
    fn host(files: &[(&str, &str)]) -> TempDir {
        let root = TempDir::new().unwrap();
        for (path, text) in files {
            let path = root.as_path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn too_few_hugepages_name_the_file_and_the_number() {
        let folder = "sys/kernel/mm/hugepages/hugepages-2048kB";
        let root = host(&[
            (&format!("{folder}/nr_hugepages"), "100\n"),
            (&format!("{folder}/free_hugepages"), "40\n"),
            (&format!("{folder}/resv_hugepages"), "8\n"),
        ]);
        let error = Pages::Huge2M.map_on(root.as_path(), (1 << 30) - 5).unwrap_err().to_string();
        assert_eq!(
            error,
            "512 pages of 2 MiB are needed and 32 are free; reserve them: \
             echo 580 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages (and read it back: fragmented \
             memory gives fewer, then reserve at boot: hugepagesz=2M hugepages=580)"
        );
        let error = Pages::Huge1G.map_on(root.as_path(), 4096).unwrap_err().to_string();
        assert!(error.contains("no pages of 1 GiB") && error.contains("hugepagesz=1G"), "{error}");
    }

    #[test]
    fn switched_off_transparent_hugepages_are_an_error() {
        let root = host(&[("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")]);
        let error = Pages::Transparent.map_on(root.as_path(), 4096).unwrap_err().to_string();
        assert!(error.contains("echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"), "{error}");
    }

    #[test]
    fn memory_that_would_end_in_the_oom_killer_is_not_taken() {
        let meminfo = ("proc/meminfo", "MemTotal: 999 kB\nMemAvailable:    8388608 kB\n");
        let error = Pages::Base.map_on(host(&[meminfo]).as_path(), 9 << 30).unwrap_err().to_string();
        assert!(error.starts_with("9 GiB are needed and 8 GiB are available (MemAvailable"), "{error}");
        for (cgroup, limit) in [
            ("0::/a/b\n", "sys/fs/cgroup/a/memory.max"),
            ("5:cpu,memory:/a/b\n0::/\n", "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes"),
        ] {
            let root = host(&[meminfo, ("proc/self/cgroup", cgroup), (limit, "4096\n")]);
            assert!(Pages::Base.map_on(root.as_path(), 4096).is_ok());
            let error = Pages::Base.map_on(root.as_path(), 8192).unwrap_err().to_string();
            assert!(error.contains(&format!("4 KiB are available (/{limit})")), "{error}");
        }
        let root = host(&[meminfo, ("proc/self/cgroup", "0::/a\n"), ("sys/fs/cgroup/a/memory.max", "max\n")]);
        assert!(Pages::Base.map_on(root.as_path(), 1 << 20).is_ok());
    }

    #[test]
    fn hugepages_of_a_mapping_are_read_from_its_own_lines() {
        let smaps = "7f0000000000-7f0000400000 rw-p 00000000 00:00 0\nRss: 4096 kB\nAnonHugePages:      2048 kB\n\
                     7f0000400000-7f0000800000 rw-p 00000000 00:00 0\nAnonHugePages:      4096 kB\n";
        assert_eq!(anon_huge(smaps, 0x7f00_0040_0000), Some(4 << 20));
        assert_eq!(anon_huge(smaps, 0x7f00_0000_0000), Some(2 << 20));
        assert_eq!(anon_huge(smaps, 0x7f00_0100_0000), None);
    }

    #[test]
    fn parts_are_filled_cleared_and_looked_at_by_themselves() {
        let mut memory = Pages::Base.map(1 << 20).unwrap();
        assert_eq!(memory.start() % (2 << 20), 0);
        let mut parts = memory.parts(2, 512 << 10);
        let [left, right] = parts.as_mut_slice() else { panic!("two parts") };
        left.populate(0, 512 << 10).unwrap();
        left.fill_cold(0, 512 << 10);
        right.fill_hot(4096, 64);
        assert_eq!((left.first_stale(0, 512 << 10), right.first_stale(0, 512 << 10)), (Some(0), Some(4096)));
        left.memset(0, 256 << 10);
        assert_eq!(left.first_stale(0, 512 << 10), Some(256 << 10));
        left.write_bytes(256 << 10, 256 << 10);
        right.write_bytes(4096, 64);
        assert_eq!((left.first_stale(0, 512 << 10), right.first_stale(0, 512 << 10)), (None, None));
        // Beyond its end a part has nothing.
        left.fill_hot(512 << 10, 4096);
        assert_eq!(right.first_stale(0, 512 << 10), None);
    }
}
