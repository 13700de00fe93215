//! What the layers of a scenario read: isotropic tokens, or the model's own hidden states on the text of a file.

use super::calls::token_seed;
use super::model::StressModel;
use super::tokenizer::{self, Found};
use crate::forward::{Stream, Tokens};
use serde::{Deserialize, Serialize};
use sigmascale::model::{AttentionSpec, Body, LayerWeights, read_capped};
use sigmascale::{Error, Result};
use std::path::{Path, PathBuf};

/// Largest token file that is read.
const MAX_FILE: u64 = 64 << 20;

/// Most values of the residual streams that a run keeps: 1 GiB.
const MAX_STREAM: usize = 1 << 28;

/// Vocabulary of a model that reads bytes.
const BYTES: usize = 256;

/// What to do where a text cannot be turned into tokens.
const INSTEAD: &str = "give token ids as a JSON list in a file that ends in .json";

/// A file of tokens: a JSON list of ids (`FILE.json`), or text in any other file.
///
/// Text becomes tokens when a run starts, by the `tokenizer.json` beside the model's weights (cargo feature
/// `tokenizers`). Without a tokenizer, a model whose vocabulary is 256 tokens reads the bytes of the file.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenFile {
    path: PathBuf,
    content: Content,
}

/// What a file holds.
#[derive(Clone, Debug, PartialEq)]
enum Content {
    Ids(Vec<u32>),
    Text(Vec<u8>),
}

/// How a JSON file holds ids.
#[derive(Deserialize)]
#[serde(untagged)]
enum Ids {
    List(Vec<u32>),
    Encoded { input_ids: Vec<u32> },
}

impl TokenFile {
    /// Reads `[ids]` or `{"input_ids": [ids]}` from a file whose name ends in `.json`, and text from any other.
    ///
    /// # Errors
    /// `is_io` if it cannot be read; `is_format` if it is empty, larger than 64 MiB, or JSON of another form.
    pub fn read(path: &Path) -> Result<Self> {
        let content = read_capped(path, MAX_FILE, "a file of tokens")?;
        let json = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json"));
        let content = if json {
            match serde_json::from_slice(&content) {
                Ok(Ids::List(ids) | Ids::Encoded { input_ids: ids }) => Content::Ids(ids),
                Err(_) => {
                    let rule = "token ids are a JSON list of integers, or an object with one as `input_ids`";
                    return Err(Error::format(path, rule));
                }
            }
        } else {
            Content::Text(content)
        };
        if matches!(&content, Content::Ids(ids) if ids.is_empty()) {
            return Err(Error::format(path, "the list of token ids is empty"));
        }
        if matches!(&content, Content::Text(text) if text.is_empty()) {
            return Err(Error::format(path, "the text is empty"));
        }
        Ok(Self { path: path.to_owned(), content })
    }

    /// The file's name, for people.
    pub fn name(&self) -> String {
        self.path.file_name().unwrap_or(self.path.as_os_str()).to_string_lossy().into_owned()
    }

    /// How many tokens a model reads of it.
    pub(super) fn count(&self, spec: &AttentionSpec, body: &Body<'_>) -> Result<usize> {
        Ok(self.tokens(spec, body, 1)?.len())
    }

    /// The tokens that a model reads: at least one sequence of them, all of its vocabulary.
    fn tokens(&self, spec: &AttentionSpec, body: &Body<'_>, seq_len: usize) -> Result<Vec<u32>> {
        let vocabulary = body.tokens.shape().0;
        let refuse = |rule: String| Err(Error::argument(format_args!("{}: {rule}", self.path.display())));
        let (ids, source) = match &self.content {
            Content::Ids(ids) => (ids.clone(), self.path.clone()),
            Content::Text(text) => {
                let folder = if body.path().is_dir() { Some(body.path()) } else { body.path().parent() };
                match tokenizer::find(folder.unwrap_or(Path::new(""))) {
                    Found::Tokenizer(file) => {
                        let text = str::from_utf8(text).map_err(|error| {
                            let at = error.valid_up_to();
                            Error::format(
                                &self.path,
                                format_args!("text must be UTF-8, but byte {at} is not: {INSTEAD}"),
                            )
                        })?;
                        (tokenizer::encode(&file, text)?, file)
                    }
                    Found::Other(file) => {
                        return refuse(format!(
                            "text is read by a tokenizer.json, but {} has only a {file}: save the tokenizer again with \
                             transformers (AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)), or {INSTEAD}",
                            spec.name
                        ));
                    }
                    Found::None if vocabulary == BYTES => {
                        (text.iter().map(|byte| u32::from(*byte)).collect(), self.path.clone())
                    }
                    Found::None => {
                        return refuse(format!(
                            "text needs the model's tokenizer.json beside its weights, and {} has none: copy it there, \
                             or {INSTEAD}",
                            spec.name
                        ));
                    }
                }
            }
        };
        if let Some(id) = ids.iter().find(|id| **id as usize >= vocabulary) {
            let rule = format_args!("token id {id} is outside the vocabulary of {} ({vocabulary} ids)", spec.name);
            return Err(Error::format(&source, rule));
        }
        let count = ids.len();
        if count < seq_len {
            let tokens = if count == 1 { "token is" } else { "tokens are" };
            return refuse(format!("{count} {tokens} fewer than one sequence of {seq_len}: lower seq_len or add text"));
        }
        Ok(ids)
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
                "; a step's forward has that step's weights, so a layer's input changes with the layers below it",
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
    /// One per step along a recorded path, one for all otherwise.
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
        // The checkpoints of a path are of one training run, so the first one's tokenizer is that of all.
        let ids = file.tokens(spec, &bodies[0], seq_len)?;
        let sequences = ids.len() / seq_len;
        let streams = (0..steps)
            .map(|step| {
                let ids = &ids[step % sequences * seq_len..][..seq_len];
                Stream::embed(spec, &bodies[step.min(bodies.len() - 1)], ids)
            })
            .collect::<Result<_>>()?;
        let summary = TokenSummary { file: file.name(), tokens: ids.len(), sequences };
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
    fn text_is_kept_and_ids_are_read_from_both_forms_of_json() {
        let folder = tempfile::tempdir().unwrap();
        let read = |name: &str, content: &[u8]| {
            let path = folder.path().join(name);
            std::fs::write(&path, content).unwrap();
            TokenFile::read(&path)
        };
        assert_eq!(read("a.txt", &[0, 255, 7]).unwrap().content, Content::Text(vec![0, 255, 7]));
        assert_eq!(read("b.json", b"[3, 70000]").unwrap().content, Content::Ids(vec![3, 70000]));
        assert_eq!(
            read("c.json", br#"{"attention_mask": [1], "input_ids": [5]}"#).unwrap().content,
            Content::Ids(vec![5])
        );
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
