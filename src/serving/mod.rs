//! Scales where serving engines read them: checkpoints that load with them ([`export`]), an audit of checkpoints that have some
//! ([`verify`]), and scales of weights that arrive tensor by tensor ([`ScaleStream`]).
//!
//! A stored scale is the worst-case bound over 448, rounded up to BF16 and stored in f32, so that a loader that rounds
//! scales to BF16 keeps it. An engine that casts an operand at 1.0 gets a certificate in place of a scale: whether 1.0 covers the
//! bound, or by how much it does not.
//!
//! Names, shapes and configs are those of vLLM 0.32 and 0.33, SGLang 0.5.23, TensorRT-LLM and mistral.rs of August 2026
//! ([`Engine::version`]). They are data, and what the data do not tell is reported as unknown, never as safe.

mod audit;
mod built;
mod census;
mod centers;
mod certificate;
mod description;
mod engine;
mod export;
mod folder;
mod names;
mod needs;
mod options;
mod scales;
mod settings;
mod stream;
mod unjudged;
mod verify;

pub use audit::{Audit, AuditEntry, LayerAudit, Outcome, ScaleVerdict, Step, Unjudged};
pub use certificate::{
    CenterCertificate, Certificate, ExportOptions, LayerCenters, LayerCertificate, OperandCertificate,
};
pub use engine::{Engine, Operand};
pub use export::{Export, SCALES_FILE, export};
pub use options::{KvFormat, Serving, SkipLayers};
pub use scales::LayerScales;
pub use stream::{Refit, ScaleStream, refit};
pub use verify::verify;
