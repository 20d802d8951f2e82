//! Limits by cgroup, version 1 or 2, on a child of the test. Making one needs root.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

const FOLDER: &str = "VM_ZEROING_TEST_CGROUP";

/// A cgroup of our own, removed at the end (its processes are gone by then).
#[derive(Debug)]
pub struct Cgroup {
    folder: PathBuf,
    is_v2: bool,
    /// The controller that was switched on for this, and where.
    switched_on: Option<(PathBuf, String)>,
    /// One test at a time switches controllers, whichever binary it is in.
    _lock: File,
}

impl Cgroup {
    /// Below our own place in the hierarchy of a controller; says aloud why not.
    pub fn new(controller: &str) -> Option<Self> {
        Self::make(controller)
            .inspect_err(|error| println!("skipped: no cgroup with the controller {controller}: {error}"))
            .ok()
    }

    fn make(controller: &str) -> io::Result<Self> {
        let path = std::env::temp_dir().join("vm-zeroing-cgroup.lock");
        let lock = OpenOptions::new().create(true).append(true).open(path)?;
        lock.lock()?;
        let name = format!("vm-zeroing-test-{}", std::process::id());
        if let Some(folder) = v1_folder(controller)? {
            let folder = folder.join(name);
            fs::create_dir(&folder)?;
            return Ok(Self { folder, is_v2: false, switched_on: None, _lock: lock });
        }
        let root = v2_root()?.ok_or(io::ErrorKind::NotFound)?;
        if !has_word(&root.join("cgroup.controllers"), controller)? {
            return Err(io::ErrorKind::NotFound.into());
        }
        let switch = root.join("cgroup.subtree_control");
        let mut switched_on = None;
        if !has_word(&switch, controller)? {
            fs::write(&switch, format!("+{controller}"))?;
            switched_on = Some((switch, format!("-{controller}")));
        }
        let made = Self { folder: root.join(name), is_v2: true, switched_on, _lock: lock };
        fs::create_dir(&made.folder)?;
        Ok(made)
    }

    /// Sets a limit by its file's name in each version; says aloud why not.
    pub fn set(&self, v1: &str, v2: &str, value: impl ToString) -> Option<()> {
        let path = self.folder.join(if self.is_v2 { v2 } else { v1 });
        fs::write(&path, value.to_string())
            .inspect_err(|error| println!("skipped: cannot write {}: {error}", path.display()))
            .ok()
    }

    pub fn read(&self, v1: &str, v2: &str) -> String {
        fs::read_to_string(self.folder.join(if self.is_v2 { v2 } else { v1 })).unwrap()
    }

    /// The command that runs one `#[ignore]`d test function of this binary, which calls [`enter`].
    pub fn child(&self, name: &str) -> Command {
        let mut command = super::child(name);
        command.env(FOLDER, &self.folder);
        command
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // What a dead child leaves goes a moment after it.
        for _ in 0..10_000 {
            match fs::remove_dir(&self.folder) {
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => std::thread::yield_now(),
                _ => break,
            }
        }
        if let Some((switch, off)) = &self.switched_on {
            let _ = fs::write(switch, off);
        }
    }
}

/// Puts the calling process into the cgroup of its parent's choice.
pub fn enter() -> PathBuf {
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    fs::write(folder.join("cgroup.procs"), "0").unwrap();
    folder
}

fn has_word(file: &Path, word: &str) -> io::Result<bool> {
    Ok(fs::read_to_string(file)?.split_whitespace().any(|known| known == word))
}

/// Our own cgroup in the version 1 hierarchy of a controller, if it is mounted.
fn v1_folder(controller: &str) -> io::Result<Option<PathBuf>> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let mounted = mounts.lines().find_map(|line| {
        let [_, folder, "cgroup", options, ..] = line.split(' ').collect::<Vec<_>>()[..] else { return None };
        options.split(',').any(|option| option == controller).then_some(folder)
    });
    let Some(mounted) = mounted else { return Ok(None) };
    let own = fs::read_to_string("/proc/self/cgroup")?;
    let own = own.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        parts.next()?.split(',').any(|name| name == controller).then(|| parts.next())?
    });
    let below = Path::new(mounted).join(own.unwrap_or("/").trim_start_matches('/'));
    // In a container, what is mounted may begin below the path that the process is told.
    Ok(Some(if below.exists() { below } else { mounted.into() }))
}

fn v2_root() -> io::Result<Option<PathBuf>> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    Ok(mounts.lines().find_map(|line| {
        let [_, folder, "cgroup2", ..] = line.split(' ').collect::<Vec<_>>()[..] else { return None };
        Some(PathBuf::from(folder))
    }))
}
