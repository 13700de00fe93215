//! `sigmascale stress`: what every scaling policy does when the weights move, as table, JSON or page.

mod page;
#[cfg(feature = "train")]
mod training;
mod words;

use super::model::Model;
use super::output::OutputArgs;
use super::progress;
use super::table::{Table, brief};
use clap::ValueEnum;
use serde::Serialize;
use sigmascale::cuda;
use sigmascale::file::write_atomically;
use sigmascale::policy::{PolicyConfig, PolicyKind};
use sigmascale::stress::{
    Mode, PolicySummary, Scenario, StressModel, StressOptions, StressResult, TokenFile, Trace, replay,
    run as run_scenario,
};
use sigmascale::{Error, Result};
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// All six policies side by side under a checkpoint load, a weight spike, a refit or recorded maxima
#[derive(clap::Args)]
#[command(allow_negative_numbers = true)]
pub struct Args {
    /// What happens to the weights
    #[arg(value_enum)]
    scenario: Choice,
    /// Preset name or config.json (synthetic weights), .safetensors file or checkpoint folder; replay needs none
    #[arg(long)]
    model: Option<String>,
    /// What is cast to E4M3
    #[arg(long, value_enum, default_value = "logit")]
    mode: Cast,
    /// Comma-separated; delayed stands for both of its presets [default: all six]
    #[arg(long, value_name = "A,B,..")]
    policies: Option<String>,
    /// The first N layers [default: all; 4 of synthetic weights where there are several steps]
    #[arg(long, value_name = "N")]
    layers: Option<usize>,
    /// Tokens of a sequence [default: 256; 64, which is the most, for resume and lr-spike]
    #[arg(long, value_name = "N")]
    seq_len: Option<usize>,
    /// Steps [default: 1 for checkpoint-load, 330 for resume, 150 for lr-spike, otherwise 30]
    #[arg(long, value_name = "N")]
    steps: Option<usize>,
    /// Text that runs through the model's own forward, instead of generated tokens: token ids as a JSON list
    /// where it is called FILE.json, bytes of any other file for a model that reads bytes
    #[arg(long, value_name = "FILE")]
    tokens: Option<PathBuf>,
    /// Checkpoints of the same training after MODEL, in order and comma-separated: refit takes one a step
    #[arg(long, value_name = "A,B,..", value_delimiter = ',')]
    path: Vec<PathBuf>,
    /// Seed of synthetic weights and of tokens
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// For resume and lr-spike: what a value out of range becomes
    #[arg(long, value_enum)]
    casts: Option<CastKind>,
    /// Where spectra and bounds are computed; attention runs on the CPU
    #[arg(long, value_enum, default_value = "cpu")]
    device: Device,
    /// Recorded maxima, for replay and all
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Also write a page with the pictures to FILE
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Choice {
    /// A trained model under policies that have seen nothing
    CheckpointLoad,
    /// Weights and biases of q, k and v times 4 at step 10
    WeightSpike,
    /// Weights replaced at every step: by the checkpoints of --path, else 5 % larger
    Refit,
    /// Recorded maxima through the policies that need no weights
    Replay,
    /// Training that stops and resumes (feature `train`)
    Resume,
    /// Training under a learning-rate spike (feature `train`)
    LrSpike,
    /// Every scenario that this build and the arguments allow
    All,
}

#[derive(Clone, Copy, ValueEnum)]
enum Cast {
    /// The logits alone, as in the paper
    Logit,
    /// q, k, v and P, as fused kernels do
    Operands,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum CastKind {
    /// 448 with its sign
    Saturating,
    /// NaN, which reaches the loss
    Nan,
    /// Each in runs of its own [default]
    Both,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Device {
    /// This machine's cores
    Cpu,
    /// The first GPU, by the scale engine
    Cuda,
}

/// One scenario.
#[derive(Serialize)]
struct Run {
    #[serde(flatten)]
    stress: StressResult,
    #[cfg(feature = "train")]
    #[serde(skip_serializing_if = "Option::is_none")]
    training: Option<sigmascale::train::Training>,
}

impl Run {
    /// The step at which training stopped or its rate rose.
    fn transition(&self) -> Option<usize> {
        #[cfg(feature = "train")]
        return self.training.as_ref().map(|training| training.transition);
        #[cfg(not(feature = "train"))]
        None
    }
}

impl From<StressResult> for Run {
    fn from(stress: StressResult) -> Self {
        Self {
            stress,
            #[cfg(feature = "train")]
            training: None,
        }
    }
}

/// What is written: one run as it is, several in a list.
#[derive(Serialize)]
#[serde(untagged)]
enum Results {
    One(Box<Run>),
    All { runs: Vec<Run>, left_out: Vec<LeftOut> },
}

impl Results {
    fn runs(&self) -> &[Run] {
        match self {
            Self::One(run) => std::slice::from_ref(run),
            Self::All { runs, .. } => runs,
        }
    }

    fn left_out(&self) -> &[LeftOut] {
        match self {
            Self::One(_) => &[],
            Self::All { left_out, .. } => left_out,
        }
    }
}

/// A scenario that `all` did not run.
#[derive(Serialize)]
struct LeftOut {
    scenario: &'static str,
    reason: &'static str,
}

/// Why the scenarios on training models are refused or left out.
#[cfg(not(feature = "train"))]
const NEEDS_TRAIN: &str = "it trains a model, which needs the cargo feature `train`, and this build is without it";
#[cfg(feature = "train")]
const NEEDS_TRAIN: &str = "it trains a model of its own: --model tiny-llama-train or tiny-gpt2-train";

impl Args {
    /// Checks what can be checked before any work.
    fn options(&self) -> Result<StressOptions> {
        let refuse = |what: &str| Err(Error::argument(what));
        let name = self.scenario.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
        if matches!(self.scenario, Choice::Resume | Choice::LrSpike) && !self.trains() {
            return Err(Error::argument(format_args!("{name}: {NEEDS_TRAIN}")));
        }
        if !self.trains() && self.scenario != Choice::Replay && self.names_training_model() {
            return Err(Error::argument(format_args!(
                "{name} needs weights: resume and lr-spike train models of this name"
            )));
        }
        if self.trains() && self.layers.is_some() {
            return refuse("--layers: a model that is trained is trained whole");
        }
        if self.trains() && (self.tokens.is_some() || !self.path.is_empty() || self.device == Device::Cuda) {
            return refuse(
                "--tokens, --path and --device cuda: a model that is trained has its own text, weights and the CPU",
            );
        }
        if self.casts.is_some() && !self.trains() {
            return refuse("--casts is for resume and lr-spike: the other scenarios saturate");
        }
        if self.device == Device::Cuda {
            if self.scenario == Choice::Replay {
                return refuse("a replay has no weights: --device cuda computes bounds from weights");
            }
            cuda::require().map_err(|error| error.within("--device cuda"))?;
        }
        if self.scenario == Choice::Replay && self.tokens.is_some() {
            return refuse("a replay has recorded maxima: leave --tokens out");
        }
        if !self.path.is_empty() && !matches!(self.scenario, Choice::Refit | Choice::All) {
            return Err(Error::argument(format_args!("--path is for refit and all, not for {name}")));
        }
        match (self.scenario, &self.model, &self.trace) {
            (Choice::Replay, _, None) => return refuse("replay needs --trace FILE"),
            (Choice::Replay, ..) if self.layers.is_some() || self.steps.is_some() => {
                return refuse("a replay runs every layer and step of its trace: leave --layers and --steps out");
            }
            (Choice::Replay, Some(_), _) => return refuse("a replay has no weights: leave --model out"),
            (Choice::Replay, ..) if self.seq_len.is_some() => {
                return refuse("a replay has the tokens of its trace: leave --seq-len out");
            }
            (Choice::Replay | Choice::All, ..) => {}
            (.., Some(_)) => {
                return Err(Error::argument(format_args!("--trace is for replay and all, not for {name}")));
            }
            _ => {}
        }
        if self.scenario != Choice::Replay && self.model.is_none() {
            return Err(Error::argument(format_args!("{name} needs --model MODEL")));
        }
        let policies = match &self.policies {
            Some(list) => PolicyKind::parse_list(list)?,
            None => PolicyKind::ALL.to_vec(),
        };
        let policies = policies.into_iter().map(PolicyConfig::from).collect();
        let mode = match self.mode {
            Cast::Logit => Mode::Logit,
            Cast::Operands => Mode::Operands,
        };
        Ok(StressOptions {
            mode,
            policies,
            layers: self.layers,
            seq_len: self.seq_len.unwrap_or(StressOptions::default().seq_len),
            tokens: self.tokens.as_deref().map(TokenFile::read).transpose()?,
            steps: self.steps,
            seed: self.seed,
            bounds_on_gpu: self.device == Device::Cuda,
            ..StressOptions::default()
        })
    }
}

impl Args {
    /// Files that are read, those of models as far as they open.
    fn read(&self) -> Vec<PathBuf> {
        let paths = self.path.iter().map(|path| path.to_string_lossy().into_owned());
        let models = self.model.iter().filter(|_| !self.trains()).cloned().chain(paths);
        let models = models.filter_map(|name| Some(super::model::files(&name, &Model::open(&name).ok()?)));
        models.flatten().chain(self.tokens.clone()).chain(self.trace.clone()).collect()
    }

    /// Whether the model is one that is trained here.
    #[cfg(feature = "train")]
    fn trains(&self) -> bool {
        self.names_training_model() && matches!(self.scenario, Choice::Resume | Choice::LrSpike | Choice::All)
    }

    #[cfg(feature = "train")]
    fn names_training_model(&self) -> bool {
        self.model.as_deref().and_then(sigmascale::train::ModelKind::of).is_some()
    }

    #[cfg(not(feature = "train"))]
    fn trains(&self) -> bool {
        false
    }

    #[cfg(not(feature = "train"))]
    fn names_training_model(&self) -> bool {
        false
    }
}

/// Runs the command.
pub fn run(args: Args) -> Result<()> {
    let options = args.options()?;
    args.output.check()?;
    if let Some(file) = &args.html {
        args.output.check_other("--html", file)?;
    }
    args.output.check_not_read(("--html", args.html.as_deref()), &args.read())?;
    // Read first: a broken trace shall not end an hour of work.
    let trace = args.trace.as_deref().map(|file| Ok::<_, Error>((file, Trace::read(file)?))).transpose()?;
    let model = match args.model.as_deref().filter(|_| args.scenario != Choice::Replay && !args.trains()) {
        Some(name) => Some(open(name, &args.path, options.seed)?),
        None => None,
    };
    let scenarios: &[Scenario] = match args.scenario {
        Choice::CheckpointLoad => &[Scenario::CheckpointLoad],
        Choice::WeightSpike => &[Scenario::WeightSpike],
        Choice::Refit => &[Scenario::Refit],
        Choice::All => &[Scenario::CheckpointLoad, Scenario::WeightSpike, Scenario::Refit],
        Choice::Replay | Choice::Resume | Choice::LrSpike => &[],
    };
    let bar = progress::spinner();
    let mut runs = Vec::new();
    for &scenario in scenarios {
        let Some(model) = &model else { break };
        bar.set_message(scenario.name());
        // The steps asked for are those of a spike and of generated growth; a load and a recorded path have their own.
        let own = scenario == Scenario::CheckpointLoad || scenario == Scenario::Refit && !args.path.is_empty();
        let steps = if args.scenario == Choice::All && own { None } else { options.steps };
        runs.push(Run::from(run_scenario(scenario, model, &StressOptions { steps, ..options.clone() })?));
    }
    #[cfg(feature = "train")]
    if args.trains() {
        runs.extend(training::run(&args, &options, &bar)?);
    }
    if let Some((file, trace)) = &trace {
        runs.push(replay(&trace_name(file), trace, &options)?.into());
    }
    bar.finish_and_clear();
    let results = match args.scenario {
        Choice::All => {
            let left = |names: &[&'static str], reason| {
                names.iter().map(move |scenario| LeftOut { scenario, reason }).collect()
            };
            let mut left_out: Vec<LeftOut> = match args.trains() {
                true => left(&["checkpoint-load", "weight-spike", "refit"], "a model that is trained starts at random"),
                false => left(&["resume", "lr-spike"], NEEDS_TRAIN),
            };
            if trace.is_none() {
                left_out.insert(0, LeftOut { scenario: "replay", reason: "it needs --trace FILE" });
            }
            Results::All { runs, left_out }
        }
        _ => match runs.pop() {
            Some(run) => Results::One(Box::new(run)),
            None => return Err(Error::argument("nothing was run")),
        },
    };
    if let Some(file) = &args.html {
        write_atomically(file, page::render(&results).as_bytes())?;
    }
    args.output.write(&results, table)
}

/// Weights of a checkpoint as they are; random ones where there is a config alone.
fn open(name: &str, path: &[PathBuf], seed: u64) -> Result<StressModel> {
    match Model::open(name)? {
        Model::Config(_) if !path.is_empty() => {
            Err(Error::argument(format_args!("--path needs a checkpoint as its model, and {name} has no weights")))
        }
        Model::Config(spec) => StressModel::synthetic(&spec, seed),
        Model::Checkpoint(_) => {
            let first = [PathBuf::from(name)];
            StressModel::open_path(&first.iter().chain(path).collect::<Vec<_>>())
        }
    }
}

/// The name of a trace: that of its file.
fn trace_name(file: &Path) -> String {
    file.file_stem().unwrap_or(file.as_os_str()).to_string_lossy().into_owned()
}

/// Cells of one policy, the same on the terminal and on the page.
fn cells(run: &StressResult, policy: &PolicySummary) -> [String; 9] {
    let decibels = |db: Option<f64>| db.map_or("-".to_owned(), |db| format!("{db:.1}"));
    let nats = |kl: Option<f64>| kl.map_or("-".to_owned(), brief);
    let over = policy.overflow_values > 0;
    let (sqnr, kl) = words::where_it_overflowed(run, policy);
    let first = policy.first_bad_step.filter(|_| run.steps > 1).map_or(String::new(), |step| format!(", first {step}"));
    let utilisation = [policy.utilisation.p10, policy.utilisation.median, policy.utilisation.p90];
    [
        policy.policy.name().to_owned(),
        format!("{} of {}", policy.overflow_layers, policy.layers),
        format!("{} of {}{first}", policy.overflow_steps, run.steps),
        words::percent(policy.overflow_values, policy.values),
        match &policy.overshoot {
            Some(q) => format!("{} / {}", brief(q.median), brief(policy.max_scaled / words::RANGE)),
            None => "-".to_owned(),
        },
        utilisation.map(|share| brief(100.0 * share)).join(" / "),
        decibels(policy.sqnr_db),
        nats(policy.softmax_kl),
        if over && sqnr.is_some() { format!("{} / {}", decibels(sqnr), nats(kl)) } else { "-".to_owned() },
    ]
}

/// Heads of [`cells`].
const HEADS: [&str; 9] = [
    "policy",
    "layers over",
    "steps over",
    "values over",
    "overshoot med / max",
    "used % p10 / med / p90",
    "SQNR dB",
    "softmax KL",
    "both where over",
];

/// The readable form.
fn table(results: &Results) -> String {
    let mut out = String::new();
    for (place, whole) in results.runs().iter().enumerate() {
        if place > 0 {
            out.push('\n');
        }
        let run = &whole.stress;
        let _ = writeln!(out, "{}", words::headline(run));
        let mut table = Table::new(HEADS);
        for policy in &run.policies {
            table.row(cells(run, policy));
        }
        let _ = writeln!(out, "\n{}", table.left().render());
        for paragraph in words::framing(run) {
            out.push_str(&words::wrapped(&paragraph, "- ", 118));
        }
        #[cfg(feature = "train")]
        if let Some(training) = &whole.training {
            out.push_str(&training::table(run, training));
        }
    }
    if !results.left_out().is_empty() {
        out.push('\n');
    }
    for left_out in results.left_out() {
        let _ = writeln!(out, "left out: {}: {}", left_out.scenario, left_out.reason);
    }
    out
}
