//! The parameters of the spectral-bounds paper, one at a time: what each value costs and whether anything overflows.
//!
//! | parameter | policies | what it changes |
//! |---|---|---|
//! | `eta` | `geometry`, `geometry-c-star` | share of 448 that a logit bound is mapped onto |
//! | `delta` | `geometry-c-star` | failure probability behind `c_star` |
//! | `seq-len` | `geometry`, `geometry-c-star` | tokens of a sequence, in the run and behind `c_star` |
//! | `kappa` | `auto-c` | safety factor on the observed ratio |
//! | `quantile` | `auto-c` | share of the observed ratios that the constant covers |
//!
//! Every value is a run of `checkpoint-load` with the same weights and tokens, all other parameters at their defaults. The
//! weights do not move, as in the steady state that the paper's section 5.4 measures.

use super::metrics::Quantiles;
use super::model::StressModel;
use super::options::{Scenario, StressOptions};
use super::result::StressResult;
use super::run::run;
use serde::Serialize;
use sigmascale::Result;
use sigmascale::bound::Tail;
use sigmascale::policy::{AutoCConfig, GeometryConfig, PolicyConfig, PolicyKind};

sigmascale::named! {
    /// A parameter.
    pub enum Parameter is "parameter" {
        /// Share of 448 that a logit bound is mapped onto.
        Eta = "eta",
        /// Failure probability.
        Delta = "delta",
        /// Tokens of a sequence.
        SeqLen = "seq-len",
        /// Safety factor of `auto-c`.
        Kappa = "kappa",
        /// Quantile of `auto-c`.
        Quantile = "quantile",
    }
}

impl Parameter {
    /// The values that are run.
    pub fn values(self) -> &'static [f64] {
        match self {
            Self::Eta => &[0.4, 0.8, 0.9, 1.0],
            Self::Delta => &[1e-3, 1e-6, 1e-9, 1e-12],
            Self::SeqLen => &[32.0, 64.0, 128.0, 256.0],
            Self::Kappa => &[1.0, 1.5, 2.0, 3.0],
            Self::Quantile => &[0.5, 0.9, 0.99, 0.9999],
        }
    }

    /// The paper's value; it has none for the length, since it counts 1024 tokens everywhere.
    pub fn of_the_paper(self) -> Option<f64> {
        match self {
            Self::Eta => Some(0.8),
            Self::Delta => Some(1e-6),
            Self::SeqLen => None,
            Self::Kappa => Some(1.0),
            Self::Quantile => Some(0.9999),
        }
    }

    /// `geometry` runs along with `auto-c`, whose constant is the ratio of their descales.
    fn run(self, value: f64, options: &StressOptions) -> StressOptions {
        let mut options = options.clone();
        let geometry = |eta| GeometryConfig { eta, ..GeometryConfig::default() };
        let both = |config| vec![PolicyConfig::Geometry(config), PolicyConfig::GeometryCStar(config)];
        let auto_c = |config| vec![PolicyKind::Geometry.into(), PolicyConfig::AutoC(config)];
        options.policies = match self {
            Self::Eta => both(geometry(value)),
            Self::Delta => vec![PolicyKind::GeometryCStar.into()],
            Self::SeqLen => both(GeometryConfig::default()),
            Self::Kappa => auto_c(AutoCConfig { kappa: value, ..AutoCConfig::default() }),
            Self::Quantile => auto_c(AutoCConfig { quantile: value, kappa: 1.0, ..AutoCConfig::default() }),
        };
        match self {
            Self::Delta => options.delta = value,
            Self::SeqLen => options.seq_len = value as usize,
            _ => {}
        }
        options
    }

    /// Policies whose rows are of interest.
    fn reports(self, policy: PolicyKind) -> bool {
        policy != PolicyKind::Geometry || !matches!(self, Self::Kappa | Self::Quantile)
    }
}

/// One value under one policy.
#[derive(Clone, Debug, Serialize)]
pub struct AblationRow {
    /// Which parameter.
    pub parameter: Parameter,
    /// Its value.
    pub value: f64,
    /// Policy.
    pub policy: PolicyKind,
    /// What the worst-case bound is multiplied by: 1 for `geometry`, `c_star`, or the largest constant of `auto-c`.
    pub constant: f64,
    /// Values that overflowed.
    pub overflow_values: u64,
    /// All values that were cast.
    pub values: u64,
    /// Largest |x / descale| / 448.
    pub largest: f64,
    /// |x / descale| / 448 of one head, layer and step.
    pub utilization: Quantiles,
    /// See [`PolicySummary::sqnr_db`](super::PolicySummary::sqnr_db).
    pub sqnr_db: Option<f64>,
    /// See [`PolicySummary::softmax_kl`](super::PolicySummary::softmax_kl).
    pub softmax_kl: Option<f64>,
}

/// Runs every value of these parameters. `options.policies` are not looked at; `progress` gets the number of runs done and
/// of all runs.
///
/// # Errors
/// As [`run`](super::run()).
pub fn ablate(
    model: &StressModel,
    options: &StressOptions,
    parameters: &[Parameter],
    mut progress: impl FnMut(usize, usize),
) -> Result<Vec<AblationRow>> {
    let runs: Vec<(Parameter, f64)> =
        parameters.iter().flat_map(|parameter| parameter.values().iter().map(|value| (*parameter, *value))).collect();
    let mut rows = Vec::new();
    for (done, &(parameter, value)) in runs.iter().enumerate() {
        let options = parameter.run(value, options);
        let result = run(Scenario::CheckpointLoad, model, &options)?;
        let tail = Tail { delta: options.delta, seq_len: options.seq_len, batch: 1, steps: result.steps };
        let c_star = tail.c_star(model.spec())?.c_star;
        for summary in result.policies.iter().filter(|summary| parameter.reports(summary.policy)) {
            rows.push(AblationRow {
                parameter,
                value,
                policy: summary.policy,
                constant: match summary.policy {
                    PolicyKind::Geometry => 1.0,
                    PolicyKind::GeometryCStar => c_star,
                    _ => constant(&result, summary.policy),
                },
                overflow_values: summary.overflow_values,
                values: summary.values,
                largest: summary.max_scaled / 448.0,
                utilization: summary.utilization,
                sqnr_db: summary.sqnr_db,
                softmax_kl: summary.softmax_kl,
            });
        }
        progress(done + 1, runs.len());
    }
    Ok(rows)
}

/// Largest ratio of a policy's logit descale to geometry's in the last step, over the layers.
fn constant(result: &StressResult, policy: PolicyKind) -> f64 {
    let last = result.steps - 1;
    let descales = |policy: PolicyKind| {
        let rows = result.trace.iter().filter(move |row| row.step == last && row.policy == policy);
        rows.map(|row| row.descales.logit_descale.unwrap_or(f64::NAN))
    };
    descales(policy).zip(descales(PolicyKind::Geometry)).map(|(own, full)| own / full).fold(0.0, f64::max)
}
