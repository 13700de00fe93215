//! `sigmascale stress`: what every scaling policy does when the weights move, as table, JSON or page.

mod ablate;
mod args;
mod curves;
mod low_precision;
mod open;
mod outcome;
pub mod page;
mod policies;
mod sentences;
mod table;
#[cfg(feature = "train")]
mod training;

pub use outcome::Results;
#[cfg(feature = "train")]
pub use outcome::Run;

use super::html::{Made, quoted};
use super::output::write_file;
use super::progress;
use args::{Choice, NEEDS_TRAIN};
use indicatif::ProgressBar;
use open::open;
use outcome::LeftOut;
#[cfg(not(feature = "train"))]
use outcome::Run;
use sigmascale::model::local_path;
use sigmascale::{Error, Result};
use sigmascale_lab::stress::{Progress, Scenario, StressOptions, Trace, replay, run_with_progress};
use std::path::Path;

/// Run six scaling policies side by side through a change of the weights, and report which overflow; or study a failure
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
#[group(skip)]
pub struct Args {
    #[command(subcommand)]
    study: Option<Study>,
    #[command(flatten)]
    run: args::Args,
}

/// Scenarios without policies and without a model of the user's.
#[derive(clap::Subcommand)]
enum Study {
    LowPrecision(low_precision::Args),
    Ablate(ablate::Args),
}

/// Runs the command.
pub fn run(args: Args, made: &Made) -> Result<()> {
    match args.study {
        Some(Study::LowPrecision(args)) => low_precision::run(args, made),
        Some(Study::Ablate(args)) => ablate::run(args),
        None => policies_under(args.run, made),
    }
}

/// The scenarios that run policies.
fn policies_under(args: args::Args, made: &Made) -> Result<()> {
    let options = args.options()?;
    args.output.check()?;
    if let Some(file) = &args.html {
        args.output.check_other("--html", file)?;
    }
    args.output.check_not_read(("--html", args.html.as_deref()), &args.read())?;
    // Read first: a broken trace shall not end an hour of work.
    let trace = args.trace.as_deref().map(|file| Ok::<_, Error>((file, Trace::read(file)?))).transpose()?;
    let model =
        match args.model.as_deref().filter(|_| args.scenario() != Choice::One(Scenario::Replay) && !args.trains()) {
            #[cfg(feature = "train")]
            Some(name) if args.names_training_model() => Some(training::trained(name, options.seed)?),
            Some(name) => Some(open(name, &args.checkpoints, options.seed)?),
            None => None,
        };
    let chosen = args.scenario();
    let scenarios: &[Scenario] = match chosen {
        Choice::All => &[Scenario::CheckpointLoad, Scenario::WeightSpike, Scenario::Refit],
        Choice::One(Scenario::Replay | Scenario::Resume | Scenario::LrSpike) => &[],
        Choice::One(ref scenario) => std::slice::from_ref(scenario),
    };
    let mut runs = Vec::new();
    for &scenario in scenarios {
        let Some(model) = &model else { break };
        // The steps asked for are those of a spike and of generated growth; a load and a recorded path have their own.
        let own = scenario == Scenario::CheckpointLoad || scenario == Scenario::Refit && !args.checkpoints.is_empty();
        let steps = if args.scenario() == Choice::All && own { None } else { options.steps };
        let bar = progress::bar(0, "{msg}", &format!("{}: the first step", scenario.name()));
        let options = StressOptions { steps, ..options.clone() };
        let result = run_with_progress(scenario, model, &options, |done| show(&bar, scenario, done));
        bar.finish_and_clear();
        runs.push(Run::from(result?));
    }
    #[cfg(feature = "train")]
    if args.trains() {
        runs.extend(training::run(&args, &options)?);
    }
    if let Some((file, trace)) = &trace {
        runs.push(replay(&trace_name(file), trace, &options)?.into());
    }
    let results = match args.scenario() {
        Choice::All => Results::All { runs, left_out: left_out(&args) },
        _ => match runs.pop() {
            Some(run) => Results::One(Box::new(run)),
            None => return Err(Error::argument("nothing was run")),
        },
    };
    if let Some(file) = &args.html {
        write_file(file, page::render(&results, made).as_bytes())?;
    }
    args.output.write(&results, |results| table::render(results, &next(&args)))
}

/// What a reader does next: export real weights, or run the same with them.
fn next(args: &args::Args) -> String {
    match args.model.as_deref().filter(|model| local_path(model).is_dir()) {
        Some(model) => format!("sigmascale export {} --to NEW --for vllm", quoted(model)),
        None => "sigmascale stress weight-spike --model FOLDER".to_owned(),
    }
}

/// The bar counts the steps of all layers, the message both.
fn show(bar: &ProgressBar, scenario: Scenario, done: Progress) {
    let Progress { layer, layers, step, steps } = done;
    bar.set_length((layers * steps) as u64);
    bar.set_position(((layer - 1) * steps + step) as u64);
    bar.set_message(format!("{}: layer {layer}/{layers}, step {step}/{steps}", scenario.name()));
}

/// Scenarios that `all` cannot run with these arguments.
fn left_out(args: &args::Args) -> Vec<LeftOut> {
    let left =
        |names: &[&'static str], reason| names.iter().map(move |scenario| LeftOut { scenario, reason }).collect();
    let mut left_out: Vec<LeftOut> = match args.trains() {
        true => left(&["checkpoint-load", "weight-spike", "refit"], "a model that is trained has no weights to load"),
        false => left(&["resume", "lr-spike"], NEEDS_TRAIN),
    };
    if args.trace.is_none() {
        left_out.insert(0, LeftOut { scenario: "replay", reason: "it needs --trace FILE" });
    }
    left_out
}

/// The name of a trace: that of its file.
fn trace_name(file: &Path) -> String {
    file.file_stem().unwrap_or(file.as_os_str()).to_string_lossy().into_owned()
}
