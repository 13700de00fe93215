//! `sigmascale verify`: which scales an engine would use, and which the weights need.

use super::html::{Made, Page, Tone};
use super::model::{Model, files};
use super::named::named;
use super::output::{OutputArgs, write_file};
use super::progress;
use super::table::{Table, range, wrapped};
use serde::Serialize;
use sigmascale::serving::{self, Audit, AuditEntry, Engine, ScaleVerdict};
use sigmascale::{Error, Result};
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Audit the FP8 attention scales of a checkpoint: can they overflow, and does the engine load them?
///
/// Exit codes: 0 safe, 1 not safe, 2 wrong usage, 3 the checkpoint cannot be read or bounded.
#[derive(clap::Args)]
pub struct Args {
    /// Checkpoint folder
    checkpoint: String,
    /// Engine whose loading rules apply [default: the one exported for, else vllm; the others are summarized]
    #[arg(long = "for", value_parser = named::<Engine>(), value_name = "ENGINE")]
    engine: Option<Engine>,
    /// Same as --format json
    #[arg(long)]
    json: bool,
    /// Also write the result as an HTML page to FILE
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    #[command(flatten)]
    output: OutputArgs,
}

/// The audit that was asked for, and those of the other engines.
#[derive(Serialize)]
pub struct Report {
    #[serde(flatten)]
    pub audit: Audit,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<Audit>,
}

/// Runs the command; whether the checkpoint is safe.
pub fn run(mut args: Args, made: &Made) -> Result<bool> {
    if args.json {
        args.output.ask_for_json();
    }
    args.output.check()?;
    if let Some(file) = &args.html {
        args.output.check_other("--html", file)?;
    }
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
        let first = Engine::of_export(Path::new(&args.checkpoint)).unwrap_or(Engine::Vllm);
        engines.push(first);
        engines.extend(Engine::ALL.into_iter().filter(|engine| *engine != first));
    }
    let bar = progress::bar(checkpoint.spec().layers.len(), "{msg}: layer {pos}/{len}", "verify");
    let mut each = || {
        bar.inc(1);
        Ok(())
    };
    let mut audits = serving::verify(&checkpoint, &engines, &mut each)?.into_iter();
    bar.finish_and_clear();
    let audit = audits.next().ok_or_else(|| Error::argument("no engine was named"))?;
    let report = Report { audit, others: audits.collect() };
    if let Some(file) = &args.html {
        write_file(file, page(&report, made).as_bytes())?;
    }
    args.output.write(&report, table)?;
    Ok(report.audit.safe)
}

/// The result in a sentence.
fn summary(audit: &Audit) -> String {
    let total = audit.layers.iter().flat_map(|layer| layer.entries()).count();
    let bad: Vec<&AuditEntry> = audit
        .layers
        .iter()
        .flat_map(|layer| layer.entries())
        .map(|(_, entry)| entry)
        .filter(|e| e.verdict != ScaleVerdict::Safe)
        .collect();
    if bad.is_empty() {
        return format!("{}: safe. No normalized input can overflow with any of the {total} scales.", audit.engine);
    }
    let kinds = [
        (ScaleVerdict::Overflow, "can overflow"),
        (ScaleVerdict::Missing, "missing"),
        (ScaleVerdict::Default, "stored as 1.0"),
        (ScaleVerdict::RoundedBelow, "rounded below the bound"),
        (ScaleVerdict::Foreign, "of other weights"),
        (ScaleVerdict::Invalid, "no scales (NaN, infinite, 0 or negative)"),
        (ScaleVerdict::NotLoaded, "never loaded"),
        (ScaleVerdict::Unbounded, "without a bound"),
    ];
    let counted = kinds.iter().filter_map(|(verdict, words)| {
        let count = bad.iter().filter(|entry| entry.verdict == *verdict).count();
        (count > 0).then(|| format!("{count} {words}"))
    });
    let list = counted.collect::<Vec<_>>().join(", ");
    format!("{}: NOT SAFE. Of {total} scales: {list}.", audit.engine)
}

const HEADS: [&str; 6] = ["layer", "operand", "scale", "needed", "verdict", "reason"];

/// The cells of a row: scales, what is needed, the worst verdict and its reason.
fn rows(audit: &Audit) -> Vec<[String; 6]> {
    let row = |number: usize, name: char, entries: &[AuditEntry]| {
        let scales = range(entries.iter().map(|entry| f64::from(entry.scale)));
        let needed = range(entries.iter().filter_map(|entry| entry.needed.map(f64::from)));
        let worst = entries.iter().find(|entry| entry.verdict != ScaleVerdict::Safe).or(entries.first());
        let (verdict, why) = worst.map_or(("-", String::new()), |entry| (entry.verdict.name(), entry.why.clone()));
        [number.to_string(), name.to_string(), scales, needed, verdict.to_owned(), why]
    };
    let layers = audit.layers.iter();
    layers.flat_map(|l| [row(l.layer, 'q', &l.q), row(l.layer, 'k', &l.k), row(l.layer, 'v', &l.v)]).collect()
}

fn table(report: &Report) -> String {
    let audit = &report.audit;
    let mut out = format!("{}\n{}\n", audit.model, summary(audit));
    for note in &audit.notes {
        out.push_str(&wrapped(note, "  ", 118));
    }
    out.push('\n');
    let mut table = Table::new(HEADS);
    rows(audit).into_iter().for_each(|row| table.row(row));
    out.push_str(&table.left_last().render());
    out.push_str("needed: worst-case bound, including rounding, divided by 448\n");
    if !report.others.is_empty() {
        out.push_str("\nother engines (--for):\n");
        report.others.iter().for_each(|other| {
            let _ = writeln!(out, "  {}", summary(other));
        });
    }
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
        page.list(&audit.notes);
        page.table("reasons", &HEADS, rows(audit).into_iter());
        page.end_section();
    }
    page.render(made)
}
