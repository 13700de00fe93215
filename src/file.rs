//! Folders that are written whole or not at all.

use crate::error::{Error, Result};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Makes a folder that appears whole or not at all: `fill` gets a temporary folder beside it, which is renamed at the end.
///
/// # Errors
/// `is_argument` if something other than an empty folder is there; `is_io` if its parent is not there or nothing can be written;
/// those of `fill`, and then nothing is left.
pub fn write_folder<T>(path: &Path, fill: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
    let empty = std::fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none());
    if path.symlink_metadata().is_ok() && !empty {
        return Err(Error::argument(format_args!(
            "{} already exists: expected a new or an empty folder",
            path.display()
        )));
    }
    let target = place_of(path);
    if target.file_name().is_none() || !target.parent().is_some_and(Path::is_dir) {
        let kind = std::io::ErrorKind::NotFound;
        return Err(Error::io(path, "create", std::io::Error::new(kind, "its parent folder does not exist")));
    }
    let temporary = temporary_beside(&target).map_err(|e| Error::io(path, "create", e))?;
    let made = fill(&temporary)
        .and_then(|made| std::fs::rename(&temporary, &target).map_err(|e| Error::io(path, "create", e)).map(|()| made));
    if made.is_err() {
        // The first error is the one to tell.
        let _ = std::fs::remove_dir_all(&temporary);
    }
    made
}

/// Writes a new file down to the disk.
///
/// # Errors
/// `is_io`, with the path.
pub fn write_new(path: &Path, bytes: &[u8]) -> Result<()> {
    let made = std::fs::File::create_new(path);
    let written = made.and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()));
    written.map_err(|error| Error::io(path, "write", error))
}

/// Where a file is or will be.
pub fn place_of(file: &Path) -> PathBuf {
    if let Ok(place) = file.canonicalize() {
        return place;
    }
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    file.file_name().map_or_else(|| folder.clone(), |name| folder.join(name))
}

/// A new folder under the first free name beside the target.
fn temporary_beside(target: &Path) -> std::io::Result<PathBuf> {
    let mut attempt = 0u32;
    loop {
        let temporary = target.with_file_name(format!(".sigmascale-{}-{attempt}.tmp", std::process::id()));
        match std::fs::create_dir(&temporary) {
            Ok(()) => return Ok(temporary),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists && attempt < 100 => attempt += 1,
            Err(error) => return Err(error),
        }
    }
}

/// 64-bit FNV-1a: finds damage, not malice.
pub(crate) fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, b| (hash ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_appear_whole_or_not_at_all() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("out");
        let fill = |place: &Path| write_new(&place.join("a"), b"one");
        let failed = write_folder(&folder, |place| fill(place).and_then(|()| Err::<(), _>(Error::argument("no"))));
        assert!(failed.unwrap_err().is_argument());
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0);
        write_folder(&folder, fill).unwrap();
        assert_eq!(std::fs::read(folder.join("a")).unwrap(), b"one");
        let error = write_folder(&folder, fill).unwrap_err();
        assert!(error.is_argument() && error.to_string().contains("already exists"), "{error}");
        std::fs::create_dir(parent.path().join("empty")).unwrap();
        write_folder(&parent.path().join("empty"), fill).unwrap();
        assert!(write_folder(&parent.path().join("no/such"), fill).unwrap_err().is_io());
        // Of two that write at once, the first to finish has the folder.
        let raced = parent.path().join("raced");
        let error = write_folder(&raced, |place| {
            write_folder(&raced, fill)?;
            write_new(&place.join("b"), b"two")
        })
        .unwrap_err();
        assert!(error.is_io() && error.to_string().contains("raced"), "{error}");
        assert!(raced.join("a").is_file() && !raced.join("b").exists());
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 3);
    }
}
