//! Files that are written whole or not at all.

use sigmascale::{Error, Result};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Writes a file so that it appears whole or not at all: a temporary file in the same folder, then a rename. A file that was there
/// leaves its permissions; a link stays one. A target that is no regular file (a pipe, a device) is written to directly.
///
/// # Errors
/// `is_io`, with the target's path.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    if std::fs::metadata(path).is_ok_and(|metadata| !metadata.is_file() && !metadata.is_dir()) {
        let result = OpenOptions::new().write(true).open(path).and_then(|mut file| file.write_all(bytes));
        return result.map_err(|e| Error::io(path, "write", e));
    }
    let target = behind_links(path)?;
    check_target(&target)?;
    let (temporary, mut file) = temporary_beside(&target).map_err(|e| Error::io(path, "create", e))?;
    let permitted = match std::fs::metadata(&target) {
        Ok(before) => file.set_permissions(before.permissions()),
        Err(_) => Ok(()),
    };
    let written = permitted.and_then(|()| file.write_all(bytes)).and_then(|()| file.sync_all());
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

/// What a path stands for if it is a link, also one to a file that is not there yet.
///
/// # Errors
/// `is_io` if links form a cycle.
pub fn behind_links(path: &Path) -> Result<PathBuf> {
    let mut target = path.to_owned();
    for _ in 0..40 {
        match std::fs::read_link(&target) {
            Ok(next) => target = target.parent().unwrap_or(Path::new("")).join(next),
            Err(_) => return Ok(target),
        }
    }
    Err(Error::io(path, "write", std::io::Error::other("its symbolic links form a cycle")))
}

/// A new file under the first free name in the target's folder.
fn temporary_beside(target: &Path) -> std::io::Result<(PathBuf, File)> {
    let mut attempt = 0u32;
    loop {
        let temporary = target.with_file_name(format!(".sigmascale-{}-{attempt}.tmp", std::process::id()));
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
        let longest = folder.path().join("n".repeat(255));
        write_atomically(&longest, b"long").unwrap();
        std::fs::remove_file(longest).unwrap();
        assert!(write_atomically(folder.path(), b"x").unwrap_err().is_io());
        assert!(write_atomically(&folder.path().join("no/file"), b"x").unwrap_err().is_io());
        if cfg!(unix) {
            write_atomically(Path::new("/dev/null"), b"x").unwrap();
            assert!(!Path::new("/dev/null").is_file());
        }
    }

    #[cfg(unix)]
    #[test]
    fn links_and_permissions_stay() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("secret"), b"old").unwrap();
        std::fs::set_permissions(at("secret"), std::fs::Permissions::from_mode(0o600)).unwrap();
        symlink("secret", at("link")).unwrap();
        symlink("later", at("dangling")).unwrap();
        symlink("round", at("round")).unwrap();
        write_atomically(&at("link"), b"new").unwrap();
        write_atomically(&at("dangling"), b"first").unwrap();
        assert_eq!(
            (std::fs::read(at("secret")).unwrap(), std::fs::read(at("later")).unwrap()),
            (b"new".into(), b"first".into())
        );
        assert_eq!(std::fs::metadata(at("secret")).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(at("link").is_symlink() && at("dangling").is_symlink());
        let error = write_atomically(&at("round"), b"x").unwrap_err();
        assert!(error.is_io() && error.to_string().contains("form a cycle"), "{error}");
    }
}
