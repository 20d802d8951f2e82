//! How much memory may be taken without harm: a part of what the host and our cgroups have free.

use std::fs;
use std::path::{Path, PathBuf};

/// Of what is free, this part at most is taken.
const PART: u64 = 8;

/// Bytes that all rings together may take. `root` stands for "/". What cannot be read limits nothing.
pub(super) fn room(root: &Path) -> u64 {
    let host = text(&root.join("proc/meminfo")).and_then(|text| {
        let kilobytes = field(&text, "MemAvailable:")?;
        kilobytes.checked_mul(1024)
    });
    let limits = host.into_iter().chain(unified(root)).chain(version_1(root));
    limits.min().map_or(u64::MAX, |free| free / PART)
}

/// The least free room of our cgroup and those above it, version 2 (`memory.max`).
fn unified(root: &Path) -> Option<u64> {
    let free = |folder: &Path| {
        let most: u64 = text(&folder.join("memory.max"))?.trim().parse().ok()?;
        let used: u64 = text(&folder.join("memory.current"))?.trim().parse().ok()?;
        Some(most.saturating_sub(used.saturating_sub(file_pages(folder, "inactive_file"))))
    };
    let mounted = mounted(root, |kind, _| kind == "cgroup2")?;
    least(&mounted, &own_path(root, |controllers| controllers.is_empty())?, free)
}

/// The same, version 1 (`memory.limit_in_bytes`).
fn version_1(root: &Path) -> Option<u64> {
    let is_memory = |names: &str| names.split(',').any(|name| name == "memory");
    let free = |folder: &Path| {
        let most: u64 = text(&folder.join("memory.limit_in_bytes"))?.trim().parse().ok()?;
        let used: u64 = text(&folder.join("memory.usage_in_bytes"))?.trim().parse().ok()?;
        Some(most.saturating_sub(used.saturating_sub(file_pages(folder, "total_inactive_file"))))
    };
    let mounted = mounted(root, |kind, options| kind == "cgroup" && is_memory(options))?;
    least(&mounted, &own_path(root, is_memory)?, free)
}

/// Bytes of files that the kernel drops before it runs out of room.
fn file_pages(folder: &Path, name: &str) -> u64 {
    text(&folder.join("memory.stat")).and_then(|text| field(&text, name)).unwrap_or(0)
}

/// Of a cgroup and those above it up to the mounted one.
fn least(mounted: &Path, own: &str, free: impl Fn(&Path) -> Option<u64>) -> Option<u64> {
    let own = own.trim_start_matches('/');
    // In a container, what is mounted may begin below the path that the process is told.
    let deepest = Some(mounted.join(own)).filter(|folder| folder.exists()).unwrap_or(mounted.to_owned());
    deepest.ancestors().take_while(|folder| folder.starts_with(mounted)).filter_map(free).min()
}

/// Where a cgroup file system is mounted: chosen by its kind and options.
fn mounted(root: &Path, is_it: impl Fn(&str, &str) -> bool) -> Option<PathBuf> {
    let mounts = text(&root.join("proc/self/mounts"))?;
    mounts.lines().find_map(|line| {
        let [_, folder, kind, options, ..] = line.split(' ').collect::<Vec<_>>()[..] else { return None };
        is_it(kind, options).then(|| root.join(folder.trim_start_matches('/')))
    })
}

/// Our own place in the hierarchy whose controllers are the wanted ones.
fn own_path(root: &Path, is_it: impl Fn(&str) -> bool) -> Option<String> {
    let own = text(&root.join("proc/self/cgroup"))?;
    own.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        is_it(parts.next()?).then(|| parts.next().map(str::to_owned))?
    })
}

/// The number after a word at the start of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some(name)).then(|| words.next()?.parse().ok())?
    })
}

fn text(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok()
}
