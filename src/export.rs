//! Scales as files that other software loads.
//!
//! vLLM and mistral.rs read `model.layers.{i}.self_attn.{q,k,v}_scale`: one f32 scalar a tensor, in the dequant
//! convention (`value = code * scale`), which is [`Descale`]. The largest of the heads is written, so no head can
//! overflow. Outputs appear by rename: a file is whole or it is not there.

use crate::error::{Error, Result};
use crate::plan::{OperandDescales, ScalePlan};
use crate::scale::Descale;
use safetensors::tensor::{Dtype, TensorView};
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

/// One scale each for q, k and v of one layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TensorScales {
    /// Layer number.
    pub layer: usize,
    /// Queries, after rotation.
    pub q: Descale,
    /// Keys, after rotation.
    pub k: Descale,
    /// Values.
    pub v: Descale,
}

impl TensorScales {
    /// The largest descales over the heads of one layer.
    ///
    /// # Errors
    /// `is_unsupported` if the layer's values have no bound.
    ///
    /// ```
    /// use sigmascale::{Descale, export::TensorScales, plan::OperandDescales};
    /// let row = |a, b| -> sigmascale::Result<Vec<Descale>> { Ok(vec![Descale::new(a)?, Descale::new(b)?]) };
    /// let heads = OperandDescales { q: row(0.1, 0.2)?, k: row(0.4, 0.3)?, v: Some(row(0.5, 0.6)?), o: None };
    /// let scales = TensorScales::new(0, &heads)?;
    /// assert_eq!((scales.q.get(), scales.k.get(), scales.v.get()), (0.2, 0.4, 0.6));
    /// # Ok::<(), sigmascale::Error>(())
    /// ```
    pub fn new(layer: usize, operands: &OperandDescales) -> Result<Self> {
        let v = operands.v.as_deref().ok_or_else(|| {
            Error::unsupported(format_args!(
                "layer {layer}: v has no bound (no norm in front of its projection), so there is no v_scale to export"
            ))
        })?;
        Ok(Self {
            layer,
            q: ScalePlan::per_tensor(&operands.q),
            k: ScalePlan::per_tensor(&operands.k),
            v: ScalePlan::per_tensor(v),
        })
    }
}

/// The safetensors file of these scales.
///
/// # Errors
/// `is_argument` if a layer stands twice.
pub fn scales_safetensors(layers: &[TensorScales]) -> Result<Vec<u8>> {
    let mut values = Vec::with_capacity(3 * layers.len());
    for scales in layers {
        for (name, scale) in [("q", scales.q), ("k", scales.k), ("v", scales.v)] {
            values.push((
                format!("model.layers.{}.self_attn.{name}_scale", scales.layer),
                scale.get().to_le_bytes(),
            ));
        }
    }
    let mut names: Vec<&str> = values.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(Error::argument(format_args!("{} stands twice", twice[0])));
    }
    let broken = |e| Error::format(Path::new("scales"), format_args!("cannot be written as safetensors: {e}"));
    let tensors = values
        .iter()
        .map(|(name, bytes)| Ok((name, TensorView::new(Dtype::F32, Vec::new(), bytes).map_err(broken)?)))
        .collect::<Result<Vec<_>>>()?;
    let about = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    safetensors::serialize(tensors, Some(about)).map_err(broken)
}

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

    fn scales(layer: usize) -> TensorScales {
        let descale = |x| Descale::new(x).unwrap();
        TensorScales { layer, q: descale(0.5), k: descale(0.25), v: descale(0.125) }
    }

    #[test]
    fn scalars_have_an_empty_shape() {
        let bytes = scales_safetensors(&[scales(0), scales(11)]).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(file.len(), 6);
        let tensor = file.tensor("model.layers.11.self_attn.k_scale").unwrap();
        assert_eq!((tensor.dtype(), tensor.shape()), (Dtype::F32, &[][..]));
        assert_eq!(tensor.data(), 0.25f32.to_le_bytes());
        assert!(scales_safetensors(&[scales(3), scales(3)]).unwrap_err().is_argument());
    }

    #[test]
    fn values_without_a_bound_are_refused() {
        let one = vec![Descale::ONE];
        let operands = OperandDescales { q: one.clone(), k: one, v: None, o: None };
        let error = TensorScales::new(4, &operands).unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains("layer 4: v has no bound"));
    }

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
