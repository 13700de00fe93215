//! What each scaling policy does when the weights move.
//!
//! A scenario drives one [`Runtime`](sigmascale::runtime::Runtime) per policy through the same weights and tokens and reports the
//! results side by side.
//!
//! | scenario | steps | weights |
//! |---|---|---|
//! | `checkpoint-load` | 1 | loaded before the first step; no policy has seen anything |
//! | `weight-spike` | 30 | weights and biases of q, k and v times 4 at step 10 |
//! | `refit` | 30 | replaced at every step: by the next checkpoint of a recorded path, or 5 % larger (logits: 10 %) |
//! | [`replay`] | recorded | none: recorded amax through `delayed-paper`, `delayed-te` and `current` |
//!
//! **Modes.** `logit` casts only the logits to E4M3, with everything else in f32 (the paper's Algorithm 1): an overflow is
//! a logit that saturates. `operands` casts q, k, v and P, as fused FP8 kernels do: an overflow is an operand that
//! saturates, often by little. Counts of the two modes are not comparable, and a count alone says nothing of the damage:
//! SQNR, the bias of the output and softmax KL stand beside it.
//!
//! **Tokens** are new at every step. Generated ones are isotropic and every layer gets its own. Those of a
//! [`TokenFile`] run through the model's own forward in f32, with the weights of that step: behind a spike or a refit
//! every layer sees what the changed layers below it made of the text. What a policy's casts lose stays in its layer, so
//! that all policies see the same operands.
//!
//! ```
//! use sigmascale::policy::PolicyKind;
//! use sigmascale_lab::stress::{Mode, Scenario, StressModel, StressOptions, run};
//!
//! let model = StressModel::open("../data/tiny-llama".as_ref())?;
//! let options = StressOptions { mode: Mode::Operands, layers: Some(1), seq_len: 32, ..StressOptions::default() };
//! let result = run(Scenario::CheckpointLoad, &model, &options)?;
//! let geometry = result.policies.iter().find(|summary| summary.policy == PolicyKind::Geometry);
//! assert_eq!(geometry.expect("all policies run by default").overflow_values, 0);
//! # Ok::<(), sigmascale::Error>(())
//! ```

mod ablate;
mod bounds;
mod calls;
mod conditions;
mod lab;
mod low_precision;
mod metrics;
mod model;
mod observed;
mod options;
mod replay;
mod result;
mod run;
mod tokenizer;
mod tokens;

pub use ablate::{AblationRow, Parameter, ablate};
pub use conditions::{Conditions, HeadConditions, conditions};
#[cfg(feature = "train")]
pub(crate) use lab::{Seen, Tally, identity, look, row};
pub use low_precision::{
    Arithmetic, LowPrecisionOptions, LowPrecisionRun, LowPrecisionSummary, Remedy, RemedyVerdict, low_precision,
    verdicts,
};
#[cfg(feature = "train")]
pub(crate) use metrics::{Divergence, Quality};
pub use metrics::{Quantiles, median, output_bias, sqnr_db};
pub use model::StressModel;
pub use observed::{LayerMaxima, Observed, observe};
#[cfg(feature = "train")]
pub(crate) use options::auto_c;
pub use options::{Mode, Progress, SPIKE, SPIKE_STEP, Scenario, StressOptions};
pub use replay::{ReplayStep, Trace, replay};
pub use result::{PlanDescales, PolicySummary, StressResult, TensorSlack, TraceRow, Unavailable};
pub use run::{run, run_with_progress};
pub use tokens::{TokenFile, TokenSummary};

#[cfg(test)]
mod tests;
