//! What the layers of a scenario read: isotropic tokens, or the model's own hidden states on a file's text.

use super::calls::token_seed;
use super::model::StressModel;
use crate::error::{Error, Result};
use crate::forward::{Stream, Tokens};
use crate::model::{AttentionSpec, Body, LayerWeights};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Largest token file that is read.
const MAX_FILE: u64 = 64 << 20;

/// Most values of the residual streams that a run keeps: 1 GiB.
const MAX_STREAM: usize = 1 << 28;

/// Vocabulary of a model that reads bytes.
const BYTES: usize = 256;

/// Files beside a checkpoint that say its tokens are not bytes.
const TOKENIZERS: [&str; 4] = ["tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"];

/// The tokens of a file: a JSON list of ids (`FILE.json`), or any other file for a model whose vocabulary is bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenFile {
    path: PathBuf,
    ids: Vec<u32>,
    bytes: bool,
}

/// How a JSON file holds ids.
#[derive(Deserialize)]
#[serde(untagged)]
enum Ids {
    List(Vec<u32>),
    Encoded { input_ids: Vec<u32> },
}

impl TokenFile {
    /// Reads `[ids]` or `{"input_ids": [ids]}` from a file whose name ends in `.json`, the bytes of any other.
    ///
    /// # Errors
    /// `is_io` if it cannot be read; `is_format` if it is empty, larger than 64 MiB, or JSON of another form.
    pub fn read(path: &Path) -> Result<Self> {
        let io = |error| Error::io(path, "read the tokens", error);
        let metadata = std::fs::metadata(path).map_err(io)?;
        if !metadata.is_file() {
            return Err(Error::format(path, "tokens are read from a regular file"));
        }
        if metadata.len() > MAX_FILE {
            let size = metadata.len();
            return Err(Error::format(
                path,
                format_args!("a token file has at most {MAX_FILE} bytes, this has {size}"),
            ));
        }
        let content = std::fs::read(path).map_err(io)?;
        let bytes = path.extension().is_none_or(|extension| !extension.eq_ignore_ascii_case("json"));
        let ids = if bytes {
            content.into_iter().map(u32::from).collect()
        } else {
            match serde_json::from_slice(&content) {
                Ok(Ids::List(ids) | Ids::Encoded { input_ids: ids }) => ids,
                Err(_) => {
                    let rule = "token ids are a JSON list of whole numbers, or an object with one as `input_ids`";
                    return Err(Error::format(path, rule));
                }
            }
        };
        if ids.is_empty() {
            return Err(Error::format(path, "the file holds no tokens"));
        }
        Ok(Self { path: path.to_owned(), ids, bytes })
    }

    /// Number of tokens.
    pub fn count(&self) -> usize {
        self.ids.len()
    }

    /// The file's name, for people.
    pub fn name(&self) -> String {
        self.path.file_name().unwrap_or(self.path.as_os_str()).to_string_lossy().into_owned()
    }

    /// Whether the tokens can be those of a model.
    fn check(&self, spec: &AttentionSpec, body: &Body<'_>, seq_len: usize) -> Result<()> {
        let vocabulary = body.tokens.shape().0;
        let refuse = |rule: String| Err(Error::argument(format_args!("{}: {rule}", self.path.display())));
        let instead = "give its token ids as a JSON list in a file that ends in .json";
        if self.bytes && vocabulary != BYTES {
            let name = &spec.name;
            return refuse(format!("the vocabulary of {name} is {vocabulary} tokens and not the 256 bytes: {instead}"));
        }
        let folder = if body.path().is_dir() { body.path() } else { body.path().parent().unwrap_or(Path::new("")) };
        let beside = |name: &&&str| folder.join(name).exists();
        if let Some(tokenizer) = TOKENIZERS.iter().find(beside).filter(|_| self.bytes) {
            return refuse(format!("{} has a {tokenizer}, so its tokens are not bytes: {instead}", spec.name));
        }
        if let Some(id) = self.ids.iter().find(|id| **id as usize >= vocabulary) {
            let rule = format_args!("token id {id} is not below {vocabulary}, the vocabulary of {}", spec.name);
            return Err(Error::format(&self.path, rule));
        }
        if self.ids.len() < seq_len {
            let count = self.ids.len();
            return refuse(format!(
                "{count} tokens are fewer than one sequence of {seq_len}: lower seq_len or add text"
            ));
        }
        Ok(())
    }

    fn windows(&self, seq_len: usize) -> usize {
        self.ids.len() / seq_len
    }
}

/// What was run through the model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TokenSummary {
    /// File name.
    pub file: String,
    /// Tokens in it.
    pub tokens: usize,
    /// Sequences in it; step n takes the n-th, and the first again after the last.
    pub sequences: usize,
}

impl TokenSummary {
    /// What a reader has to know of the tokens of a run. `weights_change`: between its steps.
    pub(super) fn note(&self, seq_len: usize, steps: usize, weights_change: bool) -> String {
        let Self { file, tokens, sequences } = self;
        let mut note = format!("text: {file}, {tokens} tokens, run through the model's own forward in f32");
        if steps > *sequences {
            note.push_str(&format!("; {steps} steps take its {sequences} sequences of {seq_len} again in turn"));
        }
        if weights_change {
            note.push_str(
                "; a step's forward has that step's weights, so what a layer reads changes with those below it",
            );
        }
        note
    }
}

/// Inputs of a run's layers.
pub(super) enum Source<'a> {
    Isotropic { seed: u64, seq_len: usize },
    Text(Text<'a>),
}

/// The residual streams of all steps, between two layers.
pub(super) struct Text<'a> {
    streams: Vec<Stream>,
    /// One a step along a recorded path, one for all otherwise.
    bodies: Vec<Body<'a>>,
    summary: TokenSummary,
}

impl<'a> Source<'a> {
    /// The sequences of `steps` steps, embedded.
    pub(super) fn text(
        model: &'a StressModel,
        file: &TokenFile,
        steps: usize,
        seq_len: usize,
        recorded: bool,
    ) -> Result<Self> {
        let spec = model.spec();
        let values = seq_len.checked_mul(spec.d_model).and_then(|n| n.checked_mul(steps));
        if values.is_none_or(|n| n > MAX_STREAM) {
            return Err(Error::argument(format_args!(
                "{steps} steps of {seq_len} tokens of {} are more than {MAX_STREAM} values: take fewer of either",
                spec.d_model
            )));
        }
        let bodies = (0..if recorded { steps } else { 1 }).map(|at| model.body(at)).collect::<Result<Vec<_>>>()?;
        bodies.iter().try_for_each(|body| file.check(spec, body, seq_len))?;
        let sequences = file.windows(seq_len);
        let streams = (0..steps)
            .map(|step| {
                let ids = &file.ids[step % sequences * seq_len..][..seq_len];
                Stream::embed(spec, &bodies[step.min(bodies.len() - 1)], ids)
            })
            .collect::<Result<_>>()?;
        let summary = TokenSummary { file: file.name(), tokens: file.count(), sequences };
        Ok(Self::Text(Text { streams, bodies, summary }))
    }

    /// What a layer's projections read at a step.
    pub(super) fn tokens(&self, spec: &AttentionSpec, layer: usize, step: usize) -> Tokens {
        match self {
            Self::Isotropic { seed, seq_len } => Tokens::isotropic(spec, *seq_len, token_seed(*seed, layer, step)),
            Self::Text(text) => text.streams[step].input(spec, text.body(step)),
        }
    }

    /// Takes in a layer's attention output, not quantised.
    pub(super) fn advance(
        &mut self,
        spec: &AttentionSpec,
        weights: &LayerWeights<'_>,
        step: usize,
        attention: &[f32],
    ) -> Result<()> {
        let Self::Text(text) = self else { return Ok(()) };
        let body = &text.bodies[step.min(text.bodies.len() - 1)];
        text.streams[step].advance(spec, body, weights, &body.block(weights.layer)?, attention)
    }

    pub(super) fn summary(&self) -> Option<TokenSummary> {
        match self {
            Self::Isotropic { .. } => None,
            Self::Text(text) => Some(text.summary.clone()),
        }
    }
}

impl<'a> Text<'a> {
    fn body(&self, step: usize) -> &Body<'a> {
        &self.bodies[step.min(self.bodies.len() - 1)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_read_from_bytes_and_from_both_forms_of_json() {
        let folder = tempfile::tempdir().unwrap();
        let read = |name: &str, content: &[u8]| {
            let path = folder.path().join(name);
            std::fs::write(&path, content).unwrap();
            TokenFile::read(&path)
        };
        assert_eq!(read("a.txt", &[0, 255, 7]).unwrap().ids, [0, 255, 7]);
        assert_eq!(read("b.json", b"[3, 70000]").unwrap().ids, [3, 70000]);
        assert_eq!(read("c.json", br#"{"attention_mask": [1], "input_ids": [5]}"#).unwrap().ids, [5]);
        for (name, content) in [
            ("d.txt", &b""[..]),
            ("e.json", b"[]"),
            ("f.json", b"[1, -2]"),
            ("g.json", b"[[1], [2]]"),
            ("h.json", b"text"),
            ("i.json", b"[4294967296]"),
        ] {
            let error = read(name, content).unwrap_err();
            assert!(error.is_format() && error.to_string().contains(name), "{error}");
        }
        assert!(TokenFile::read(folder.path()).unwrap_err().is_format());
        assert!(TokenFile::read(&folder.path().join("none")).unwrap_err().is_io());
    }
}
