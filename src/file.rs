//! Files that are written whole or not at all.

use crate::error::{Error, Result};
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
    let temporary =
        first_free(&target, |place| std::fs::create_dir(place)).map_err(|e| Error::io(path, "create", e))?.0;
    let made = fill(&temporary)
        .and_then(|made| std::fs::rename(&temporary, &target).map_err(|e| Error::io(path, "create", e)).map(|()| made));
    if made.is_err() {
        // The first error is the one to tell.
        let _ = std::fs::remove_dir_all(&temporary);
    }
    made
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

/// Refuses a target that is one of the files which are read for what goes there, whatever the paths to it look like.
///
/// # Errors
/// `is_argument`, with `what` and the path.
pub fn check_not_read(what: &str, target: &Path, read: impl IntoIterator<Item = PathBuf>) -> Result<()> {
    let place = place_of(target);
    if read.into_iter().any(|file| place_of(&file) == place) {
        return Err(Error::argument(format_args!(
            "{what} names {}, which is read here: it would be replaced",
            target.display()
        )));
    }
    Ok(())
}

/// Refuses a target that a later read of its folder would take for part of the model there: a config, weights, their index.
///
/// # Errors
/// `is_argument`, with `what` and the path.
pub fn check_not_of_model(what: &str, target: &Path) -> Result<()> {
    let place = behind_links(target)?;
    let folder = place.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let lower = |name: &std::ffi::OsStr| name.to_string_lossy().to_lowercase();
    let names: Vec<String> =
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| lower(&entry.file_name())).collect();
    let is_index = |name: &str| name.ends_with(".safetensors.index.json");
    let of_model = |name: &str| name == "config.json" || name.ends_with(".safetensors") || is_index(name);
    let name = place.file_name().map(lower).unwrap_or_default();
    let taken = match name.rsplit_once('.') {
        // An index says which files are weights. Without one, engines load every such file.
        Some((stem, "safetensors")) => {
            stem.starts_with("model") || stem.starts_with("consolidated") || !names.iter().any(|name| is_index(name))
        }
        Some((_, "json")) => {
            let others = ["tokenizer.json", "vocab.json", "params.json", "sigmascale.json"];
            is_index(&name) || name.ends_with("config.json") || others.contains(&name.as_str())
        }
        Some((_, ending)) => ["bin", "pt", "pth", "gguf"].contains(&ending),
        None => false,
    };
    if taken && names.iter().any(|name| of_model(name)) {
        return Err(Error::argument(format_args!(
            "{what} names {}, which would be read as part of the model in that folder: choose another name or folder",
            target.display()
        )));
    }
    Ok(())
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

/// What a path stands for if it is a link, also one to a file that is not there yet.
fn behind_links(path: &Path) -> Result<PathBuf> {
    let mut target = path.to_owned();
    for _ in 0..40 {
        match std::fs::read_link(&target) {
            Ok(next) => target = target.parent().unwrap_or(Path::new("")).join(next),
            Err(_) => return Ok(target),
        }
    }
    Err(Error::io(path, "write", std::io::Error::other("its symbolic links form a cycle")))
}

/// A new file with a name of its own in the target's folder.
fn temporary_beside(target: &Path) -> std::io::Result<(PathBuf, File)> {
    first_free(target, |place| OpenOptions::new().write(true).create_new(true).open(place))
}

/// What `make` makes under the first name in the target's folder that is free.
fn first_free<T>(target: &Path, make: impl Fn(&Path) -> std::io::Result<T>) -> std::io::Result<(PathBuf, T)> {
    let mut attempt = 0u32;
    loop {
        let temporary = target.with_file_name(format!(".sigmascale-{}-{attempt}.tmp", std::process::id()));
        match make(&temporary) {
            Ok(made) => return Ok((temporary, made)),
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

    #[test]
    fn folders_appear_whole_or_not_at_all() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("out");
        let fill = |place: &Path| write_atomically(&place.join("a"), b"one");
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
            write_atomically(&place.join("b"), b"two")
        })
        .unwrap_err();
        assert!(error.is_io() && error.to_string().contains("raced"), "{error}");
        assert!(raced.join("a").is_file() && !raced.join("b").exists());
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 3);
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

    #[test]
    fn what_is_read_is_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("model");
        std::fs::write(&model, b"weights").unwrap();
        let other = folder.path().join(".").join("model");
        assert!(check_not_read("-o", &other, [model.clone()]).unwrap_err().is_argument());
        check_not_read("-o", &folder.path().join("new"), [model]).unwrap();
    }

    #[test]
    fn no_output_becomes_part_of_a_model() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let refused = |name: &str| check_not_of_model("-o", &at(name)).is_err_and(|error| error.is_argument());
        let weights = ["model.safetensors", "Model-00001-of-00002.safetensors", "consolidated.00.safetensors"];
        let others = [
            "config.json",
            "model.safetensors.index.json",
            "pytorch_model.bin",
            "adapter_config.json",
            "tokenizer.json",
        ];
        let harmless = ["scales.json", "page.html", "out", "README.md"];
        // Nothing is a model's where no model is.
        assert!(weights.iter().chain(&others).chain(&harmless).all(|name| !refused(name)));
        std::fs::write(at("config.json"), b"{}").unwrap();
        assert!(weights.iter().chain(&others).all(|name| refused(name)));
        assert!(harmless.iter().all(|name| !refused(name)));
        // Engines load every such file, unless an index says which.
        assert!(refused("scales.safetensors"));
        std::fs::write(at("model.safetensors.index.json"), b"{}").unwrap();
        assert!(!refused("scales.safetensors") && refused("model.safetensors"));
        #[cfg(unix)]
        {
            let other = tempfile::tempdir().unwrap();
            let link = other.path().join("link");
            std::os::unix::fs::symlink(at("model.safetensors"), &link).unwrap();
            assert!(check_not_of_model("-o", &link).is_err(), "through a link too");
        }
    }
}
