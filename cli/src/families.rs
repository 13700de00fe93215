//! `sigmascale families`: model types that have bounds, and those that are refused.

use super::output::OutputArgs;
use super::table::wrapped;
use serde::Serialize;
use sigmascale::Result;
use sigmascale::model::{KnownFamily, Support, known_families};
use std::collections::BTreeMap;

/// List the model types that are supported, and those that are refused with the reason
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Serialize)]
struct Families {
    families: Vec<KnownFamily>,
}

/// Runs the command.
pub fn run(args: Args) -> Result<()> {
    args.output.check()?;
    args.output.write(&Families { families: known_families() }, table)
}

fn table(known: &Families) -> String {
    let (mut read, mut refused) = (Vec::new(), BTreeMap::<&str, Vec<&str>>::new());
    for known in &known.families {
        match known.support {
            Support::Family(_) => read.push(known.model_type),
            Support::Refused(why) => refused.entry(why).or_default().push(known.model_type),
        }
    }
    let mut out = format!("{} values of `model_type` are supported:\n", read.len());
    out.push_str(&wrapped(&read.join(", "), "  "));
    let count: usize = refused.values().map(Vec::len).sum();
    let refusal = format!("{count} are refused, because their logits cannot be bounded here:");
    out.push_str(&format!("\n{}", wrapped(&refusal, "")));
    for (why, types) in refused {
        out.push_str(&wrapped(&format!("{}: {why}", types.join(", ")), "- "));
    }
    out.push_str("\nAny other model type is refused as unknown.\n");
    out
}
