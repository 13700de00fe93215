//! Every policy side by side on one model.
//!
//! `cargo run --release --example stress -- gpt2-xl weight-spike operands 2`: a preset or a checkpoint folder, a scenario
//! (`checkpoint-load`, `weight-spike`, `refit`), a mode (`logit`, `operands`) and a number of layers. With `replay` the
//! first argument is a trace file.

use sigmascale::model::preset;
use sigmascale::{Error, Result};
use sigmascale_lab::stress::{Mode, Scenario, StressModel, StressOptions, Trace, replay, run};
use std::path::Path;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let arg = |at: usize, default: &'static str| args.get(at).map_or(default, String::as_str).to_owned();
    let (name, scenario, mode) = (arg(0, "gpt2-xl"), arg(1, "checkpoint-load"), arg(2, "logit"));
    let options = StressOptions {
        mode: if mode == "operands" { Mode::Operands } else { Mode::Logit },
        layers: args.get(3).and_then(|layers| layers.parse().ok()),
        ..StressOptions::default()
    };
    let known = [Scenario::CheckpointLoad, Scenario::WeightSpike, Scenario::Refit, Scenario::Replay];
    let Some(scenario) = known.into_iter().find(|known| known.name() == scenario) else {
        return Err(Error::argument(format_args!("unknown scenario {scenario}")));
    };
    let result = if scenario == Scenario::Replay {
        replay(&name, &Trace::read(Path::new(&name))?, &options)?
    } else {
        let model = match preset(&name) {
            Some(spec) => StressModel::synthetic(&spec, options.seed)?,
            None => StressModel::open(Path::new(&name))?,
        };
        run(scenario, &model, &options)?
    };
    println!("{} {mode}, {} layers, {} steps", scenario.name(), result.model_layers, result.steps);
    println!("policy           layers  steps  first    values  max scaled  overshoot  util med   SQNR dB   softmax KL");
    for p in &result.policies {
        println!(
            "{:16} {:>6} {:>6} {:>6} {:>9} {:>11.1} {:>10} {:>9.4} {:>9.2} {:>12.3e}",
            p.policy.name(),
            p.overflow_layers,
            p.overflow_steps,
            p.first_bad_step.map_or("-".into(), |step| step.to_string()),
            p.overflow_values,
            p.max_scaled,
            p.overshoot.map_or("-".into(), |q| format!("{:.2}", q.median)),
            p.utilization.median,
            p.sqnr_db.unwrap_or(f64::NAN),
            p.softmax_kl.unwrap_or(f64::NAN),
        );
    }
    for left_out in &result.unavailable {
        println!("{}: {}", left_out.policy, left_out.reason);
    }
    for note in result.policies.iter().filter_map(|p| p.assumption).map(str::to_owned).chain(result.notes) {
        println!("note: {note}");
    }
    Ok(())
}
