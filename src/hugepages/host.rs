//! What the host says about its hugepages. Read only to explain a refusal, never to decide.

use std::fs;
use std::path::Path;

use crate::topology::NodeId;

/// The hugepage sizes in bytes that the kernel offers, ascending.
pub(super) fn hugepage_sizes() -> Vec<u64> {
    let mut sizes: Vec<u64> = fs::read_dir("/sys/kernel/mm/hugepages")
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let name = entry.ok()?.file_name().into_string().ok()?;
            let kilobytes: u64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
            kilobytes.checked_mul(1024)
        })
        .collect();
    sizes.sort_unstable();
    sizes
}

/// Free hugepages of a size on a node, less those that others have reserved as far as that is known: the
/// kernel counts reservations for the whole host only.
pub(super) fn free_hugepages(node: NodeId, page: u64) -> u64 {
    let of_host = host_folder(page);
    let free = read_count(&format!("{of_host}/free_hugepages")).unwrap_or(0);
    let unreserved = free.saturating_sub(read_count(&format!("{of_host}/resv_hugepages")).unwrap_or(0));
    read_count(&format!("{}/free_hugepages", node_folder(node, page)))
        .map_or(unreserved, |free| free.min(unreserved))
}

/// The file that sets how many hugepages of a size a node has.
pub(super) fn reservation_file(node: NodeId, page: u64) -> String {
    let of_node = node_folder(node, page);
    let folder = if Path::new(&of_node).exists() { of_node } else { host_folder(page) };
    format!("{folder}/nr_hugepages")
}

fn host_folder(page: u64) -> String {
    format!("/sys/kernel/mm/hugepages/hugepages-{}kB", page / 1024)
}

fn node_folder(node: NodeId, page: u64) -> String {
    format!("/sys/devices/system/node/node{}/hugepages/hugepages-{}kB", node.0, page / 1024)
}

fn read_count(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}
