//! Files that appear whole or not at all.

use crate::error::{Error, Result};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Writes a file so that it appears whole or not at all: a temporary file in the same folder, then a rename. A target
/// that is no regular file (a pipe, a device) is written to directly.
///
/// # Errors
/// `is_io`, with the target's path.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    if std::fs::metadata(path).is_ok_and(|metadata| !metadata.is_file() && !metadata.is_dir()) {
        let result = OpenOptions::new().write(true).open(path).and_then(|mut file| file.write_all(bytes));
        return result.map_err(|e| Error::io(path, "write", e));
    }
    check_target(path)?;
    // Behind a link, so that the link stays one.
    let target = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let (temporary, mut file) = temporary_beside(&target).map_err(|e| Error::io(path, "create", e))?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all());
    drop(file);
    written.and_then(|()| std::fs::rename(&temporary, &target)).map_err(|e| {
        // The first error is the one to tell.
        let _ = std::fs::remove_file(&temporary);
        Error::io(path, "write", e)
    })
}

/// Whether a file can stand at this path: its folder exists and it is no folder itself.
///
/// # Errors
/// `is_io`, with the path.
pub fn check_target(path: &Path) -> Result<()> {
    let refuse = |kind, why: &str| Err(Error::io(path, "write", std::io::Error::new(kind, why.to_owned())));
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if path.is_dir() {
        return refuse(std::io::ErrorKind::IsADirectory, "it is a folder");
    }
    if path.file_name().is_none() || !parent.is_dir() {
        return refuse(std::io::ErrorKind::NotFound, "its folder does not exist");
    }
    Ok(())
}

/// A new file with a name of its own in the target's folder.
fn temporary_beside(target: &Path) -> std::io::Result<(PathBuf, File)> {
    let name = target.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut attempt = 0u32;
    loop {
        let temporary = target.with_file_name(format!(".{name}.{}-{attempt}.tmp", std::process::id()));
        match OpenOptions::new().write(true).create_new(true).open(&temporary) {
            Ok(file) => return Ok((temporary, file)),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists && attempt < 100 => attempt += 1,
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_appear_whole_and_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out");
        write_atomically(&path, b"one").unwrap();
        write_atomically(&path, b"two").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"two");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        assert!(write_atomically(folder.path(), b"x").unwrap_err().is_io());
        assert!(write_atomically(&folder.path().join("no/file"), b"x").unwrap_err().is_io());
        if cfg!(unix) {
            write_atomically(Path::new("/dev/null"), b"x").unwrap();
            assert!(!Path::new("/dev/null").is_file());
        }
    }
}
