//! The crate's one error type.
//!
//! Callers act on predicates ([`Error::is_unsupported`], [`Error::is_non_finite`], ...); people read the message, which
//! is one sentence that names the file, tensor or argument and the rule that was broken.

use std::fmt;
use std::path::Path;

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation could not be done. Opaque: use the predicates.
///
/// ```
/// use sigmascale::Descale;
/// let error = Descale::new(0.0).unwrap_err();
/// assert!(error.is_argument());
/// assert_eq!(error.to_string(), "descale 0 must be finite and greater than zero");
/// ```
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    kind: Kind,
    message: String,
    #[source]
    source: Option<Box<dyn std::error::Error + Send + Sync + 'static>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Io,
    Format,
    Unsupported,
    NonFinite,
    Argument,
    Mismatch,
    Cuda,
}

impl Error {
    fn new(kind: Kind, message: impl fmt::Display) -> Self {
        Self { kind, message: message.to_string(), source: None }
    }

    /// A file could not be opened, read, mapped or written.
    pub fn io(path: &Path, doing: &str, source: std::io::Error) -> Self {
        Self {
            kind: Kind::Io,
            message: format!("{}: cannot {doing}: {source}", path.display()),
            source: Some(Box::new(source)),
        }
    }

    /// A file's content breaks a rule of its format.
    pub fn format(file: &Path, rule: impl fmt::Display) -> Self {
        Self::new(Kind::Format, format_args!("{}: {rule}", file.display()))
    }

    /// Something well formed that this crate cannot bound, and why.
    pub fn unsupported(what: impl fmt::Display) -> Self {
        Self::new(Kind::Unsupported, what)
    }

    /// A NaN or an infinity where a finite number is required.
    pub fn non_finite(what: impl fmt::Display) -> Self {
        Self::new(Kind::NonFinite, what)
    }

    /// An argument breaks its rule.
    pub fn argument(what: impl fmt::Display) -> Self {
        Self::new(Kind::Argument, what)
    }

    /// Two things that must agree (a saved state and a model, two shapes) do not.
    pub fn mismatch(what: impl fmt::Display) -> Self {
        Self::new(Kind::Mismatch, what)
    }

    /// A CUDA library, device, compilation or launch failed.
    pub fn cuda(what: impl fmt::Display) -> Self {
        Self::new(Kind::Cuda, what)
    }

    /// The same error with the place it happened put in front.
    pub fn within(mut self, place: impl fmt::Display) -> Self {
        self.message = format!("{place}: {}", self.message);
        self
    }

    /// True when the operating system refused a file.
    pub fn is_io(&self) -> bool {
        self.kind == Kind::Io
    }
    /// True when a file's content is malformed.
    pub fn is_format(&self) -> bool {
        self.kind == Kind::Format
    }
    /// True for valid input that this crate does not support.
    pub fn is_unsupported(&self) -> bool {
        self.kind == Kind::Unsupported
    }
    /// True when a value is NaN or infinite.
    pub fn is_non_finite(&self) -> bool {
        self.kind == Kind::NonFinite
    }
    /// True when an argument breaks its rule.
    pub fn is_argument(&self) -> bool {
        self.kind == Kind::Argument
    }
    /// True when a state, plan or shape belongs to something else.
    pub fn is_mismatch(&self) -> bool {
        self.kind == Kind::Mismatch
    }
    /// True when CUDA failed or is absent.
    pub fn is_cuda(&self) -> bool {
        self.kind == Kind::Cuda
    }
}
