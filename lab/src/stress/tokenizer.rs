//! A model's own tokenizer, as its `tokenizer.json` defines it.
//!
//! The ids are those of `AutoTokenizer.from_pretrained(folder)(text)["input_ids"]` in Hugging Face transformers: special
//! tokens are added as the file's post-processor says, and truncation and padding that the file may ask for are off.

use sigmascale::{Error, Result};
use std::path::{Path, PathBuf};

/// The file that is read.
const FILE: &str = "tokenizer.json";

/// Largest file that is read; a vocabulary of 256k tokens takes 35 MB.
#[cfg(feature = "tokenizers")]
const MAX_FILE: u64 = 256 << 20;

/// Other files that define the tokens of a model.
const OTHERS: [&str; 4] = ["tokenizer.model", "tekken.json", "vocab.json", "vocab.txt"];

/// What a checkpoint folder says of the model's tokens.
pub(super) enum Found {
    /// A `tokenizer.json`.
    Tokenizer(PathBuf),
    /// A tokenizer in a form that is not read, by its file name.
    Other(&'static str),
    /// Nothing.
    None,
}

/// Looks for a tokenizer in a folder.
pub(super) fn find(folder: &Path) -> Found {
    let file = folder.join(FILE);
    if file.exists() {
        return Found::Tokenizer(file);
    }
    OTHERS.into_iter().find(|name| folder.join(name).exists()).map_or(Found::None, Found::Other)
}

/// The token ids of a text.
///
/// # Errors
/// `is_io` if the file cannot be read; `is_format` if it is no tokenizer or cannot encode the text.
#[cfg(feature = "tokenizers")]
pub(super) fn encode(file: &Path, text: &str) -> Result<Vec<u32>> {
    let content = sigmascale::model::read_capped(file, MAX_FILE, "a tokenizer")?;
    let broken = |error: tokenizers::Error| Error::format(file, format_args!("not a readable tokenizer: {error}"));
    let mut tokenizer = tokenizers::Tokenizer::from_bytes(content).map_err(broken)?;
    tokenizer.with_truncation(None).map_err(broken)?;
    tokenizer.with_padding(None);
    let encoding = tokenizer
        .encode_fast(text, true)
        .map_err(|error| Error::format(file, format_args!("this tokenizer cannot encode the text: {error}")))?;
    Ok(encoding.get_ids().to_vec())
}

/// Without the cargo feature.
#[cfg(not(feature = "tokenizers"))]
pub(super) fn encode(file: &Path, _text: &str) -> Result<Vec<u32>> {
    Err(Error::argument(format_args!(
        "{}: this build has no tokenizers: build with the cargo feature `tokenizers`, or give token ids as a JSON list \
         in a file that ends in .json",
        file.display()
    )))
}

#[cfg(all(test, feature = "tokenizers"))]
mod tests {
    use super::*;

    /// A byte-level BPE with a look-ahead in its pattern, a start token, truncation to 16 tokens and padding to 8.
    const TOKENIZER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/tokenizer.json");
    const TEXT: &str = "def attention(q, k):\n    return  q @ k.T  # it's 1234\n";
    /// What transformers 5.23 gives: `PreTrainedTokenizerFast(tokenizer_file=TOKENIZER)(TEXT)["input_ids"]`.
    #[rustfmt::skip]
    const IDS: [u32; 37] = [
        0, 118, 74, 123, 63, 83, 101, 6, 60, 10, 74, 54, 98, 77, 113, 74, 74, 60, 74, 24, 74, 54, 12, 38, 74, 74, 3, 124,
        63, 5, 62, 74, 15, 16, 17, 18, 73,
    ];

    #[test]
    fn ids_are_those_of_transformers() {
        assert_eq!(encode(TOKENIZER.as_ref(), TEXT).unwrap(), IDS);
        // Of the whole sample: 3146 tokens, compared by their sum.
        let sample = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../data/sample.py"));
        let ids = encode(TOKENIZER.as_ref(), sample).unwrap();
        assert_eq!((ids.len(), ids.iter().sum::<u32>()), (3146, 327_925));
    }

    #[test]
    fn a_file_that_is_no_tokenizer_is_a_format_error() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(FILE);
        for content in ["", "{}", "[1, 2]", r#"{"model": {"type": "BPE"}}"#] {
            std::fs::write(&file, content).unwrap();
            let error = encode(&file, TEXT).unwrap_err();
            assert!(error.is_format() && error.to_string().contains(FILE), "{error}");
        }
    }
}
