//! Which policies run, and their parameters.

use crate::named::named;
use crate::numbers::{count, real};
use sigmascale::policy::{
    AmaxAlgorithm, AutoCConfig, DelayedPaperConfig, DelayedTeConfig, PolicyConfig, PolicyKind, PolicyShape, Pooling,
};
use sigmascale::{Error, Result};

/// Options of the policies; absent ones keep the policy's default.
#[derive(clap::Args)]
#[command(next_help_heading = "Policy parameters")]
pub struct PolicyArgs {
    /// Policies to run, comma-separated; delayed means delayed-paper and delayed-te [default: all six]
    #[arg(long, value_name = "A,B,..")]
    policies: Option<String>,
    /// Steps of the burn-in, after which the ratio is fixed [default: 100; a quarter of the steps in runs of at most 100]
    #[arg(long, value_name = "N", value_parser = count)]
    auto_c_burn_in: Option<usize>,
    /// Quantile of the observed ratios that is used [default: 0.9999]
    #[arg(long, value_name = "Q", value_parser = real)]
    auto_c_quantile: Option<f64>,
    /// Safety factor on the observed ratio, at least 1 [default: 1.5]
    #[arg(long, value_name = "K", value_parser = real)]
    auto_c_kappa: Option<f64>,
    /// Which heads share a ratio [default: layer]
    #[arg(long, value_parser = named::<Pooling>(), value_name = "POOLING")]
    auto_c_pooling: Option<Pooling>,
    /// Length of the amax history in steps [default: 16]
    #[arg(long, value_name = "N", value_parser = count)]
    delayed_paper_history: Option<usize>,
    /// Share of the range that the largest value of the history is mapped onto [default: 0.9]
    #[arg(long, value_name = "SHARE", value_parser = real)]
    delayed_paper_margin: Option<f64>,
    /// Length of the amax history in steps [default: 1024]
    #[arg(long, value_name = "N", value_parser = count)]
    delayed_te_history: Option<usize>,
    /// How the amax history is reduced [default: max]
    #[arg(long, value_parser = named::<AmaxAlgorithm>(), value_name = "ALGORITHM")]
    delayed_te_algorithm: Option<AmaxAlgorithm>,
    /// The amax is mapped onto 448 / 2^M [default: 0]
    #[arg(long, value_name = "M")]
    delayed_te_margin: Option<i32>,
}

impl PolicyArgs {
    /// The policies with their parameters, checked.
    pub fn configs(&self) -> Result<Vec<PolicyConfig>> {
        let kinds = match &self.policies {
            Some(list) => PolicyKind::parse_list(list)?,
            None => PolicyKind::ALL.to_vec(),
        };
        let idle = |(option, kind): &(&str, PolicyKind)| {
            Error::argument(format_args!("{option} is for {kind}, which --policies does not name"))
        };
        if let Some(error) = self.given().iter().find(|(_, kind)| !kinds.contains(kind)).map(idle) {
            return Err(error);
        }
        let checked = |kind: PolicyKind| {
            let config = self.config(kind);
            config.build(PolicyShape::uniform(1, 1, 1)).map_err(|error| error.within(kind))?;
            Ok(config)
        };
        kinds.into_iter().map(checked).collect()
    }

    /// The parameters that were given, and whose they are.
    fn given(&self) -> Vec<(&'static str, PolicyKind)> {
        let (auto, paper, te) = (PolicyKind::AutoC, PolicyKind::DelayedPaper, PolicyKind::DelayedTe);
        let all = [
            ("--auto-c-burn-in", auto, self.auto_c_burn_in.is_some()),
            ("--auto-c-quantile", auto, self.auto_c_quantile.is_some()),
            ("--auto-c-kappa", auto, self.auto_c_kappa.is_some()),
            ("--auto-c-pooling", auto, self.auto_c_pooling.is_some()),
            ("--delayed-paper-history", paper, self.delayed_paper_history.is_some()),
            ("--delayed-paper-margin", paper, self.delayed_paper_margin.is_some()),
            ("--delayed-te-history", te, self.delayed_te_history.is_some()),
            ("--delayed-te-algorithm", te, self.delayed_te_algorithm.is_some()),
            ("--delayed-te-margin", te, self.delayed_te_margin.is_some()),
        ];
        all.into_iter().filter(|(.., given)| *given).map(|(option, kind, _)| (option, kind)).collect()
    }

    fn config(&self, kind: PolicyKind) -> PolicyConfig {
        match kind {
            PolicyKind::AutoC => {
                let base = AutoCConfig::default();
                PolicyConfig::AutoC(AutoCConfig {
                    // Longer than any run is as long as any run.
                    burn_in: self.auto_c_burn_in.map_or(base.burn_in, |steps| u32::try_from(steps).unwrap_or(u32::MAX)),
                    quantile: self.auto_c_quantile.unwrap_or(base.quantile),
                    kappa: self.auto_c_kappa.unwrap_or(base.kappa),
                    pooling: self.auto_c_pooling.unwrap_or(base.pooling),
                    ..base
                })
            }
            PolicyKind::DelayedPaper => {
                let base = DelayedPaperConfig::default();
                PolicyConfig::DelayedPaper(DelayedPaperConfig {
                    history: self.delayed_paper_history.unwrap_or(base.history),
                    margin: self.delayed_paper_margin.unwrap_or(base.margin),
                    ..base
                })
            }
            PolicyKind::DelayedTe => {
                let base = DelayedTeConfig::default();
                PolicyConfig::DelayedTe(DelayedTeConfig {
                    history: self.delayed_te_history.unwrap_or(base.history),
                    algorithm: self.delayed_te_algorithm.unwrap_or(base.algorithm),
                    margin: self.delayed_te_margin.unwrap_or(base.margin),
                    ..base
                })
            }
            PolicyKind::Geometry | PolicyKind::GeometryCStar | PolicyKind::Current => kind.into(),
        }
    }
}
