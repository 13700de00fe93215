//! `sigmascale verify`: which scales an engine would use, and which the weights need.

use super::export::ServingArgs;
use super::html::{Made, Page, Tone};
use super::model::{Model, files};
use super::named::named;
use super::output::{OutputArgs, write_file};
use super::progress;
use super::table::{Table, range, wrapped};
use clap::ValueEnum;
use serde::Serialize;
use sigmascale::serving::{self, Audit, AuditEntry, Engine, Outcome, ScaleVerdict};
use sigmascale::{Error, Result};
use std::path::PathBuf;

/// Audit the FP8 attention scales of a checkpoint: can they overflow, and does the engine load them?
///
/// Exit codes: 0 safe, 1 not safe or unknown, 2 wrong usage, 3 the checkpoint cannot be read or bounded.
#[derive(clap::Args)]
pub struct Args {
    /// Checkpoint folder
    checkpoint: String,
    /// Engine whose loading rules apply [default: the one exported for, else vllm; the others are summarized]
    #[arg(long = "for", value_parser = named::<Engine>(), value_name = "ENGINE")]
    engine: Option<Engine>,
    #[command(flatten)]
    serving: ServingArgs,
    /// Exit with 0 where nothing is wrong and something is unknown
    #[arg(long, value_enum, value_name = "WHAT")]
    allow: Option<Allowed>,
    /// Also write the result as an HTML page to FILE
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    #[command(flatten)]
    output: OutputArgs,
}

/// What may be accepted.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Allowed {
    /// What the audit does not know
    Unknown,
}

/// The audit that was asked for, and those of the other engines.
#[derive(Serialize)]
pub struct Report {
    #[serde(skip)]
    pub folder: String,
    #[serde(flatten)]
    pub audit: Audit,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<Audit>,
}

/// Runs the command; whether the checkpoint is safe, or as good as was asked for.
pub fn run(args: Args, made: &Made) -> Result<bool> {
    args.output.check()?;
    if let Some(file) = &args.html {
        args.output.check_other("--html", file)?;
    }
    let options = args.serving.read()?;
    let model = Model::open(&args.checkpoint)?;
    args.output.check_not_read(("--html", args.html.as_deref()), &files(&args.checkpoint, &model))?;
    let Model::Checkpoint(checkpoint) = model else {
        return Err(Error::argument(format_args!(
            "verify needs weights, but {} has none: pass a checkpoint folder",
            args.checkpoint
        )));
    };
    let mut engines: Vec<Engine> = args.engine.into_iter().collect();
    if engines.is_empty() {
        let first = Engine::of_export(checkpoint.path()).unwrap_or(Engine::Vllm);
        engines.push(first);
        engines.extend(Engine::ALL.into_iter().filter(|engine| *engine != first));
    }
    let bar = progress::bar(checkpoint.spec().layers.len(), "{msg}: layer {pos}/{len}", "verify");
    let mut each = || {
        bar.inc(1);
        Ok(())
    };
    let mut audits = serving::verify(&checkpoint, &engines, &options, &mut each)?.into_iter();
    bar.finish_and_clear();
    let audit = audits.next().ok_or_else(|| Error::argument("no engine was named"))?;
    let report = Report { folder: args.checkpoint, audit, others: audits.collect() };
    if let Some(file) = &args.html {
        write_file(file, page(&report, made).as_bytes())?;
    }
    args.output.write(&report, table)?;
    let accepted = args.allow == Some(Allowed::Unknown) && report.audit.outcome == Outcome::Unknown;
    Ok(report.audit.safe || accepted)
}

/// The result in a sentence.
fn summary(audit: &Audit) -> String {
    let total = audit.layers.iter().flat_map(|layer| layer.entries()).count();
    let faults = audit.faults();
    let kinds = [
        (ScaleVerdict::Invalid, "no scales (NaN, infinite, 0 or negative)"),
        (ScaleVerdict::Mismatch, "read with another scale than written with"),
        (ScaleVerdict::Overflow, "can overflow"),
        (ScaleVerdict::NotLoaded, "never loaded"),
        (ScaleVerdict::Missing, "missing"),
        (ScaleVerdict::Unknown, "unknown"),
    ];
    let counted = kinds.iter().filter_map(|(verdict, words)| {
        let count = faults.iter().filter(|(_, _, entry)| entry.verdict == *verdict).count();
        (count > 0).then(|| format!("{count} {words}"))
    });
    let mut list: Vec<String> = counted.collect();
    if !audit.unjudged.is_empty() {
        list.push(format!("{} kinds of tensors or files were not judged", audit.unjudged.len()));
    }
    let (engine, list) = (audit.engine, list.join(", "));
    match audit.outcome {
        Outcome::Safe => format!("{engine}: safe. No normalized input can overflow with any of the {total} scales."),
        Outcome::Unknown => format!("{engine}: UNKNOWN. Of {total} scales: {list}."),
        Outcome::NotProven => format!(
            "{engine}: not proven safe at 1.0. Of {total} scales: {list}. Nothing is stored for them, and whether a text reaches \
             the bounds is not known."
        ),
        Outcome::NotSafe => format!("{engine}: NOT SAFE. Of {total} scales: {list}."),
    }
}

const HEADS: [&str; 6] = ["layer", "operand", "scale", "needed", "verdict", "reason"];

/// The cells of a row: scales, what is needed, the worst verdict and its reason. The worst rows come first.
fn rows(audit: &Audit) -> Vec<[String; 6]> {
    let row = |number: usize, name: char, entries: &[AuditEntry]| {
        let scales = range(entries.iter().map(|entry| f64::from(entry.scale)));
        let needed = range(entries.iter().filter_map(|entry| entry.needed.map(f64::from)));
        let worst = entries.iter().find(|entry| entry.verdict != ScaleVerdict::Safe).or(entries.first());
        let (verdict, why) = worst.map_or(("-", String::new()), |entry| (entry.verdict.name(), entry.why.clone()));
        [number.to_string(), name.to_string(), scales, needed, verdict.to_owned(), why]
    };
    let places: Vec<(usize, char)> = audit.faults().iter().map(|(layer, name, _)| (*layer, *name)).collect();
    let all = audit
        .layers
        .iter()
        .flat_map(|layer| [('q', &layer.q), ('k', &layer.k), ('v', &layer.v)].map(|row| (layer.layer, row)));
    let mut all: Vec<_> = all.collect();
    all.sort_by_key(|(layer, (name, _))| {
        places.iter().position(|place| *place == (*layer, *name)).unwrap_or(usize::MAX)
    });
    all.into_iter().map(|(layer, (name, entries))| row(layer, name, entries)).collect()
}

/// What was not judged, a line each.
fn unjudged(audit: &Audit) -> Vec<String> {
    audit.unjudged.iter().map(|one| format!("Not judged: {}: {}.", one.what, one.why)).collect()
}

fn table(report: &Report) -> String {
    let audit = &report.audit;
    let mut out = format!("{}, for {} {}\n\n", audit.model, audit.engine, audit.version);
    let mut table = Table::new(HEADS);
    rows(audit).into_iter().for_each(|row| table.row(row));
    out.push_str(&table.left_last().render());
    out.push_str("needed: worst-case bound, including rounding, divided by 448\n\n");
    for note in audit.notes.iter().cloned().chain(unjudged(audit)) {
        out.push_str(&wrapped(&note, ""));
    }
    let mend = audit.mend(&report.folder);
    if !mend.is_empty() {
        out.push_str("What to do:\n");
        mend.iter().for_each(|line| out.push_str(&format!("  {line}\n")));
    }
    if !report.others.is_empty() {
        out.push_str("\nOther engines (--for):\n");
        report.others.iter().for_each(|other| out.push_str(&format!("  {}\n", summary(other))));
    }
    out.push_str(&format!("\n{}\n", summary(audit)));
    out
}

/// The page.
pub fn page(report: &Report, made: &Made) -> String {
    let mut page = Page::new(
        &format!("Audit of the FP8 attention scales of {}", report.audit.model),
        "The scales that an engine would use, compared with the worst-case bounds of the weights",
        "needed: worst-case bound, including rounding, divided by 448. A smaller scale can overflow for some normalized \
         input; whether it does depends on the text.",
    );
    page.verdict(if report.audit.safe { Tone::Good } else { Tone::Bad }, &summary(&report.audit));
    for audit in std::iter::once(&report.audit).chain(&report.others) {
        page.section(&audit.engine.to_string());
        page.paragraph(&summary(audit));
        page.list(&[audit.notes.clone(), unjudged(audit), audit.mend(&report.folder)].concat());
        page.table("reasons", &HEADS, rows(audit).into_iter());
        page.end_section();
    }
    page.render(made)
}
