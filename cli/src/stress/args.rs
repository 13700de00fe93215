//! Options of `sigmascale stress`, and what they ask of the library.

use super::policies::PolicyArgs;
use crate::model::{Model, files};
use crate::named::named;
use crate::numbers::{count, real, whole};
use crate::output::OutputArgs;
use clap::ValueEnum;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use sigmascale::fp8::{Format, OnOverflow};
use sigmascale::names::Named;
use sigmascale::spectral::{Estimator, Iterations};
use sigmascale::{Error, Result};
use sigmascale_lab::stress::{Mode, Scenario, StressOptions, TokenFile};
use std::path::PathBuf;

/// What `stress` runs policies through.
#[derive(clap::Args)]
#[command(allow_negative_numbers = true)]
pub struct Args {
    /// What happens to the weights
    #[arg(value_parser = Choice::parser(), required = true)]
    scenario: Option<Choice>,
    /// Preset name or config.json (synthetic weights), .safetensors file or checkpoint folder, or tiny-llama-train or
    /// tiny-gpt2-train, which are trained on the spot; not for replay
    #[arg(long)]
    pub model: Option<String>,
    /// What is cast to E4M3
    #[arg(long, value_parser = named::<Mode>(), default_value = Mode::Operands.name())]
    pub mode: Mode,
    /// Run the first N layers [default: all; with synthetic weights 4 in runs of several steps]
    #[arg(long, value_name = "N", value_parser = count)]
    pub layers: Option<usize>,
    /// Tokens per sequence, at most 16384 [default: 256; 64 for resume and lr-spike, at most 64]
    #[arg(long, value_name = "N", value_parser = count)]
    pub seq_len: Option<usize>,
    /// Steps [default: 1 for checkpoint-load, 330 for resume, 150 for lr-spike, otherwise 30]
    #[arg(long, value_name = "N", value_parser = count)]
    pub steps: Option<usize>,
    /// Run this text through the whole model instead of generated tokens, using the tokenizer.json of the checkpoint;
    /// FILE.json is a JSON list of token ids
    #[arg(long, value_name = "FILE")]
    pub tokens: Option<PathBuf>,
    /// Later checkpoints of the same training run, comma-separated and in order: refit loads one per step
    #[arg(long, value_name = "A,B,..", value_delimiter = ',')]
    pub checkpoints: Vec<PathBuf>,
    /// Seed of synthetic weights and of tokens
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole)]
    pub seed: u64,
    /// What a value outside the range becomes, for resume and lr-spike [default: both, in separate runs]
    #[arg(long, value_parser = named::<OnOverflow>())]
    pub casts: Option<OnOverflow>,
    /// FP8 format of q, k and v, for resume and lr-spike in mode operands [default: e4m3]
    #[arg(long, value_parser = named::<Format>())]
    pub fp8: Option<Format>,
    /// Round q, k and v up or down at random, for resume and lr-spike in mode operands
    #[arg(long)]
    pub stochastic: bool,
    /// Where bounds are computed; attention runs on the CPU in any case
    #[arg(long, value_enum, default_value = "cpu")]
    pub device: Device,
    /// Where norms come from, for policies that plan from bounds
    #[arg(long, value_parser = named::<Estimator>(), default_value = Estimator::Gram.name())]
    pub estimator: Estimator,
    /// Iterations of power and power-summed: in the first step, and in each later one
    #[arg(long, value_name = "COLD,WARM", default_value = "5,1")]
    pub iterations: Iterations,
    /// Recorded maxima, for replay and all
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Also write the result as an HTML page with figures to FILE
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    #[command(flatten)]
    pub policies: PolicyArgs,
    /// Failure probability of geometry-c-star over all layers, tokens and steps of the run
    #[arg(long, default_value = "1e-6", value_parser = real, help_heading = "Policy parameters")]
    pub delta: f64,
    #[command(flatten)]
    pub output: OutputArgs,
}

/// One scenario, or every one that this build and the arguments allow.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    One(Scenario),
    All,
}

impl Choice {
    fn name(self) -> &'static str {
        match self {
            Self::One(scenario) => scenario.name(),
            Self::All => "all",
        }
    }

    fn parser() -> impl TypedValueParser<Value = Self> {
        let one = |scenario: &Scenario| PossibleValue::new(scenario.name()).help(scenario.help());
        let all = PossibleValue::new("all").help("Every scenario that this build and the arguments allow");
        PossibleValuesParser::new(Scenario::ALL.iter().map(one).chain([all])).try_map(|name| match name.as_str() {
            "all" => Ok(Self::All),
            name => name.parse().map(Self::One),
        })
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Device {
    /// The CPU
    Cpu,
    /// The first GPU
    Cuda,
}

/// Why a model that is trained is needed.
#[cfg(feature = "train")]
pub const NEEDS_TRAIN: &str = "it trains a model of its own: --model tiny-llama-train or tiny-gpt2-train";
#[cfg(not(feature = "train"))]
pub const NEEDS_TRAIN: &str = "it trains a model, and this build lacks the cargo feature `train`";

impl Args {
    /// What happens to the weights. The parser asks for it unless there is a subcommand.
    pub fn scenario(&self) -> Choice {
        self.scenario.unwrap_or(Choice::All)
    }

    /// Checks what can be checked before any work.
    pub fn options(&self) -> Result<StressOptions> {
        let name = self.name();
        let refuse = |what: &str| Err(Error::argument(format_args!("{name}: {what}")));
        let training = matches!(self.scenario(), Choice::One(Scenario::Resume | Scenario::LrSpike));
        if training && !self.trains() {
            return refuse(NEEDS_TRAIN);
        }
        if self.trains() && self.layers.is_some() {
            return refuse("remove --layers, a model that is trained has them all");
        }
        if self.trains() && (self.tokens.is_some() || !self.checkpoints.is_empty() || self.device == Device::Cuda) {
            return refuse(
                "remove --tokens, --checkpoints and --device cuda, training has its own text and weights on the CPU",
            );
        }
        if self.casts.is_some() && !self.trains() {
            return refuse("remove --casts, which is for resume and lr-spike; the other scenarios saturate");
        }
        if (self.fp8.is_some() || self.stochastic) && !self.trains() {
            return refuse("remove --fp8 and --stochastic, which are for resume and lr-spike");
        }
        if !self.checkpoints.is_empty() && !matches!(self.scenario(), Choice::One(Scenario::Refit) | Choice::All) {
            return refuse("remove --checkpoints, which is for refit and all");
        }
        if self.scenario() == Choice::One(Scenario::Replay) {
            self.check_replay(&refuse)?;
        } else if self.model.is_none() {
            return refuse("--model MODEL is required");
        } else if self.trace.is_some() && self.scenario() != Choice::All {
            return refuse("remove --trace, which is for replay and all");
        }
        if self.device == Device::Cuda {
            #[cfg(feature = "cuda")]
            sigmascale::cuda::require().map_err(|error| error.within("--device cuda"))?;
        }
        Ok(StressOptions {
            mode: self.mode,
            policies: self.policies.configs()?,
            layers: self.layers,
            seq_len: self.seq_len.unwrap_or(StressOptions::default().seq_len),
            tokens: self.tokens.as_deref().map(TokenFile::read).transpose()?,
            steps: self.steps,
            seed: self.seed,
            delta: self.delta,
            bounds_on_gpu: self.device == Device::Cuda,
            estimator: self.estimator,
            iterations: self.iterations,
        })
    }

    /// A trace says everything but the policies.
    fn check_replay(&self, refuse: &dyn Fn(&str) -> Result<StressOptions>) -> Result<()> {
        let given = [
            ("--model", self.model.is_some()),
            ("--tokens", self.tokens.is_some()),
            ("--layers", self.layers.is_some()),
            ("--steps", self.steps.is_some()),
            ("--seq-len", self.seq_len.is_some()),
            ("--device cuda", self.device == Device::Cuda),
        ];
        if let Some((option, _)) = given.into_iter().find(|(_, given)| *given) {
            refuse(&format!("remove {option}, a trace has its own layers, steps and tokens and no weights"))?;
        }
        if self.trace.is_none() {
            refuse("--trace FILE is required")?;
        }
        Ok(())
    }

    /// The scenario's name.
    fn name(&self) -> &'static str {
        self.scenario().name()
    }

    /// Files that are read, those of models as far as they open.
    pub fn read(&self) -> Vec<PathBuf> {
        let paths = self.checkpoints.iter().map(|path| path.to_string_lossy().into_owned());
        let models = self.model.iter().filter(|_| !self.names_training_model()).cloned().chain(paths);
        let models = models.filter_map(|name| Some(files(&name, &Model::open(&name).ok()?)));
        models.flatten().chain(self.tokens.clone()).chain(self.trace.clone()).collect()
    }

    /// Whether the model is one that is trained here.
    pub fn trains(&self) -> bool {
        self.names_training_model()
            && matches!(self.scenario(), Choice::One(Scenario::Resume | Scenario::LrSpike) | Choice::All)
    }

    #[cfg(feature = "train")]
    pub fn names_training_model(&self) -> bool {
        self.model.as_deref().is_some_and(|name| name.parse::<sigmascale_lab::train::ModelKind>().is_ok())
    }

    #[cfg(not(feature = "train"))]
    pub fn names_training_model(&self) -> bool {
        false
    }
}
