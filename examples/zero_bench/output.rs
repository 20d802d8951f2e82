//! Files that are written at the end of a long run, and looked at before it.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::Path;

/// A file that cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {path}: {source}; give a file in a folder that is there and that you may write to")]
pub struct OutputError {
    path: String,
    source: io::Error,
}

/// An error if the file could not be written now. Leaves what is there as it is, and nothing where nothing was.
pub fn look_whether_writable(path: &Path) -> Result<(), OutputError> {
    let tried = match OpenOptions::new().write(true).create_new(true).open(path) {
        Ok(_) => fs::remove_file(path),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            OpenOptions::new().write(true).open(path).map(drop)
        }
        Err(error) => Err(error),
    };
    tried.map_err(|source| OutputError { path: path.display().to_string(), source })
}

pub fn write(path: &Path, text: &str) -> Result<(), OutputError> {
    fs::write(path, text).map_err(|source| OutputError { path: path.display().to_string(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looking_leaves_everything_as_it_was() {
        let folder = vmm_sys_util::tempdir::TempDir::new().unwrap();
        let path = folder.as_path().join("plot.svg");
        look_whether_writable(&path).unwrap();
        assert!(!path.exists());
        write(&path, "old").unwrap();
        look_whether_writable(&path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
    }

    #[test]
    fn what_cannot_be_written_is_named() {
        let folder = vmm_sys_util::tempdir::TempDir::new().unwrap();
        for path in [folder.as_path().join("none/plot.svg"), folder.as_path().to_owned()] {
            let error = look_whether_writable(&path).unwrap_err().to_string();
            assert!(error.contains(&path.display().to_string()) && error.contains("folder"), "{error}");
        }
    }
}
