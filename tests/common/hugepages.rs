//! Hugepages of 2 MiB, taken from the host for a test and given back.

use std::fs::{File, OpenOptions};

use vm_zeroing::Topology;

use super::memfd_with;

pub const HUGE: u64 = 2 << 20;
/// More than this no test takes.
const MOST: u64 = 64;
const FOLDER: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

/// Hugepages that nobody else uses while this lives: on one node, the first with memory for us, so that a pool there
/// finds all of them.
#[derive(Debug)]
pub struct Hugepages {
    folder: String,
    before: u64,
    /// One test at a time changes the host's numbers, whichever binary it is in.
    _lock: File,
}

fn read(folder: &str, name: &str) -> Option<u64> {
    std::fs::read_to_string(format!("{folder}/{name}")).ok()?.trim().parse().ok()
}

/// The first node's numbers, or the machine's where the kernel knows no nodes.
fn folder_of_the_first_node() -> String {
    let node = Topology::detect().unwrap().default_memory_nodes()[0];
    let folder = format!("/sys/devices/system/node/node{}/hugepages/hugepages-2048kB", node.0);
    if std::path::Path::new(&folder).is_dir() { folder } else { FOLDER.to_owned() }
}

/// Pages that are neither used nor reserved.
pub fn available() -> u64 {
    let [free, reserved] = ["free_hugepages", "resv_hugepages"].map(|name| read(FOLDER, name).unwrap_or(0));
    free.saturating_sub(reserved)
}

impl Hugepages {
    /// Adds this many pages to the host's; says aloud why not.
    pub fn reserve(pages: u64) -> Option<Self> {
        assert!(pages <= MOST);
        let path = std::env::temp_dir().join("vm-zeroing-hugepages.lock");
        let lock = OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .and_then(|file| file.lock().map(|()| file));
        let lock = match lock {
            Ok(lock) => lock,
            Err(error) => {
                println!("skipped: no lock for the host's hugepages: {error}");
                return None;
            }
        };
        let folder = folder_of_the_first_node();
        let Some(before) = read(&folder, "nr_hugepages") else {
            println!("skipped: this kernel has no hugepages of 2 MiB");
            return None;
        };
        let wanted = available() + pages;
        let taken = Self { folder, before, _lock: lock };
        if let Err(error) = taken.set(before + pages) {
            println!("skipped: cannot reserve {pages} hugepages (root can): {error}");
            return None;
        }
        if available() < wanted {
            println!("skipped: the host has no {pages} hugepages to spare");
            return None;
        }
        Some(taken)
    }

    fn set(&self, pages: u64) -> std::io::Result<()> {
        std::fs::write(format!("{}/nr_hugepages", self.folder), pages.to_string())
    }
}

impl Drop for Hugepages {
    fn drop(&mut self) {
        let _ = self.set(self.before);
    }
}

/// A memory file of hugepages.
pub fn hugetlb_memfd(pages: u64) -> File {
    let file = memfd_with(libc::MFD_CLOEXEC | libc::MFD_HUGETLB | libc::MFD_HUGE_2MB).unwrap();
    file.set_len(pages * HUGE).unwrap();
    file
}
