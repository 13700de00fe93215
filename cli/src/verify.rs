//! `sigmascale verify`: which scales an engine would use, and which the weights need.

use super::annotations;
use super::export::ServingArgs;
use super::html::{Made, Page, Tone};
use super::model::{Model, files, without_tokenizer};
use super::named::named;
use super::numbers::count;
use super::output::{Format, OutputArgs, write_file};
use super::progress;
use super::report::Report;
use super::table::{Table, noted, range, short, wrapped};
use super::terminal::toned;
use clap::ValueEnum;
use sigmascale::bound::E4M3_MAX;
use sigmascale::model::local_path;
use sigmascale::serving::{self, Audit, AuditEntry, Engine, KvFormat, Outcome, ScaleVerdict, Serving, Step};
use sigmascale::{Error, Result};
use sigmascale_lab::stress::{Observed, StressModel, TokenFile, observe};
use std::path::{Path, PathBuf};

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
    /// Type of the cache (nvfp4: vLLM only; an export's scales cover it too)
    #[arg(long, value_parser = named::<KvFormat>(), value_name = "TYPE", default_value = KvFormat::Fp8.name())]
    kv: KvFormat,
    /// Run this text through the model and print what it reaches beside the bounds (a .json file holds token ids)
    #[arg(long, value_name = "FILE")]
    tokens: Option<PathBuf>,
    /// Tokens of a sequence of the text [default: 256, or what the text has]
    #[arg(long, value_name = "N", requires = "tokens", value_parser = count)]
    seq_len: Option<usize>,
    /// Exit with 0 where nothing is wrong and something is unknown
    #[arg(long, value_enum, value_name = "WHAT")]
    allow: Option<Allowed>,
    /// Print what is not safe alone
    #[arg(long)]
    problems_only: bool,
    /// Also write the result as an HTML page to FILE
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    #[command(flatten)]
    output: OutputArgs<AuditFormat>,
}

/// Formats of an audit.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum AuditFormat {
    /// Text for people
    Table,
    /// JSON for scripts
    Json,
    /// Problems alone, as annotations of a GitHub workflow
    Github,
    /// Problems alone, as SARIF 2.1.0
    Sarif,
}

impl From<AuditFormat> for Format {
    fn from(format: AuditFormat) -> Self {
        if format == AuditFormat::Table { Self::Table } else { Self::Json }
    }
}

/// What may be accepted.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Allowed {
    /// What the audit does not know
    Unknown,
}

/// Runs the command; whether the checkpoint is safe, or as good as was asked for.
pub fn run(args: Args, made: &Made) -> Result<bool> {
    args.output.check()?;
    if let Some(file) = &args.html {
        args.output.check_other("--html", file)?;
    }
    let options = Serving { kv: args.kv, ..args.serving.read()? };
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
    let observed = args.tokens.as_deref().map(|file| observed(checkpoint.path(), file, args.seq_len)).transpose()?;
    let mut report = Report { folder: args.checkpoint, audit, observed, others: audits.collect() };
    if let Some(file) = &args.html {
        write_file(file, page(&report, made).as_bytes())?;
    }
    let accepted = args.allow == Some(Allowed::Unknown) && report.audit.outcome == Outcome::Unknown;
    let good = report.audit.safe || accepted;
    match args.output.format() {
        Some(AuditFormat::Github) => args.output.write_text(&annotations::github(&report))?,
        Some(AuditFormat::Sarif) => args.output.write_json(&annotations::sarif(&report))?,
        Some(AuditFormat::Table) => {
            args.output.write(&report, |report| table(report, args.output.most_rows(), args.problems_only))?;
        }
        _ => {
            if args.problems_only {
                for audit in std::iter::once(&mut report.audit).chain(&mut report.others) {
                    audit.layers.retain(|layer| layer.entries().any(|(_, entry)| entry.verdict != ScaleVerdict::Safe));
                }
            }
            args.output.write_json(&report)?;
        }
    }
    Ok(good)
}

/// What a text reaches in the model's own forward.
fn observed(checkpoint: &Path, file: &Path, seq_len: Option<usize>) -> Result<Observed> {
    let tokens = TokenFile::read(file)?;
    let model = StressModel::open(checkpoint)?;
    let bar = progress::bar(model.spec().layers.len(), "{msg}: layer {pos}/{len}", "text");
    let mut each = || {
        bar.inc(1);
        Ok(())
    };
    let observed = observe(&model, &tokens, seq_len, &mut each)?;
    bar.finish_and_clear();
    Ok(observed)
}

/// The largest value of a text in an operand of a layer, over 448.
fn reached(observed: &Observed, layer: usize, operand: char) -> Option<f64> {
    let own = observed.layers.iter().find(|own| own.layer == layer)?;
    let largest = match operand {
        'q' => own.q,
        'k' => own.k,
        _ => own.v,
    };
    Some(f64::from(largest) / E4M3_MAX)
}

/// How near the text comes to the end of a scale, at its nearest, and what the bound is there.
fn slack(audit: &Audit, observed: &Observed) -> Option<String> {
    let entries =
        audit.layers.iter().flat_map(|layer| layer.entries().map(move |(name, entry)| (layer.layer, name, entry)));
    let load = |(layer, operand, entry): (usize, char, &AuditEntry)| {
        let reached = reached(observed, layer, operand)? / f64::from(entry.scale);
        reached.is_finite().then_some((reached, layer, operand, entry.needed))
    };
    let (load, layer, operand, needed) = entries.filter_map(load).max_by(|a, b| a.0.total_cmp(&b.0))?;
    let tokens = observed.sequences * observed.seq_len;
    let bound = needed
        .map_or("without a bound".to_owned(), |needed| format!("where the bound is {}", short(f64::from(needed))));
    let fits = if load <= 1.0 { "fits" } else { "OVERFLOWS" };
    Some(format!(
        "{} ({tokens} tokens) {fits}: it reaches at most {} of what the scales in use hold, in {operand} of layer {layer}, {bound}.",
        observed.tokens.file,
        short(load)
    ))
}

/// The result in a sentence.
fn summary(audit: &Audit) -> String {
    let entries = || audit.layers.iter().flat_map(|layer| layer.entries());
    let total = entries().count();
    let stored = entries().filter(|(_, entry)| entry.stored.is_some()).count();
    let faults = audit.faults();
    let kinds = [
        (ScaleVerdict::Invalid, "no scales (NaN, infinite, 0 or negative)"),
        (ScaleVerdict::Mismatch, "read with another scale than written with"),
        (ScaleVerdict::Overflow, "can overflow"),
        (ScaleVerdict::NotLoaded, "never loaded"),
        (ScaleVerdict::Missing, "without a scale and not covered by 1.0"),
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
    let at_one = match stored {
        0 => "No scale is stored, so the engine casts at 1.0",
        _ if stored < total => "Where no scale is stored, the engine casts at 1.0",
        _ => "",
    };
    match audit.outcome {
        Outcome::Safe if stored == 0 => {
            format!("{engine}: safe. {at_one}, which covers the bounds of all {total} operands.")
        }
        Outcome::Safe if stored < total => {
            format!(
                "{engine}: safe. No normalized input can overflow with any of the {stored} scales. {at_one}, which covers the rest."
            )
        }
        Outcome::Safe => format!("{engine}: safe. No normalized input can overflow with any of the {total} scales."),
        Outcome::Unknown => format!("{engine}: UNKNOWN. Of {total} operands: {list}."),
        Outcome::NotProven => format!(
            "{engine}: not proven safe at 1.0. {at_one}. Of {total} operands: {list}. Whether a text reaches the bounds is not \
             known."
        ),
        Outcome::NotSafe => format!("{engine}: NOT SAFE. Of {total} operands: {list}."),
    }
}

const HEADS: [&str; 7] = ["layer", "operand", "scale", "needed", "text", "verdict", "reason"];

/// The cells of a row: scales, what is needed, the worst verdict and its reason; and whether it is safe. The worst rows come
/// first.
fn rows(audit: &Audit, observed: Option<&Observed>) -> Vec<(bool, [String; 7])> {
    let row = |number: usize, name: char, entries: &[AuditEntry]| {
        let scales = range(entries.iter().map(|entry| f64::from(entry.scale)));
        let needed = range(entries.iter().filter_map(|entry| entry.needed.map(f64::from)));
        let worst = entries.iter().find(|entry| entry.verdict != ScaleVerdict::Safe).or(entries.first());
        let (verdict, why) =
            worst.map_or((ScaleVerdict::Unknown, String::new()), |entry| (entry.verdict, entry.why.clone()));
        let text = short(observed.and_then(|observed| reached(observed, number, name)));
        let tone = match verdict {
            ScaleVerdict::Safe => Tone::Good,
            ScaleVerdict::Missing | ScaleVerdict::Unknown => Tone::Plain,
            _ => Tone::Bad,
        };
        let cells = [number.to_string(), name.to_string(), scales, needed, text, toned(tone, verdict.name()), why];
        (verdict == ScaleVerdict::Safe, cells)
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

/// Cells without the column of a text.
fn without_text<T>([layer, operand, scale, needed, _, verdict, reason]: [T; 7]) -> [T; 6] {
    [layer, operand, scale, needed, verdict, reason]
}

/// What was not judged, a line each.
fn unjudged(audit: &Audit) -> Vec<String> {
    audit.unjudged.iter().map(|one| format!("Not judged: {}: {}.", one.what, one.why)).collect()
}

fn table(report: &Report, most: usize, problems_only: bool) -> String {
    let audit = &report.audit;
    let mut out = wrapped(&format!("{}, for {} {}", audit.model, audit.engine, audit.version), "") + "\n";
    let mut rows = rows(audit, report.observed.as_ref());
    if problems_only {
        rows.retain(|(safe, _)| !safe);
    }
    let hidden = rows.get(most..).unwrap_or_default();
    // A screen has no room for where a scale that is safe is stored.
    let shown = rows.iter().take(most).cloned().map(|(safe, mut cells)| {
        if safe {
            cells[6] = cells[6].split(" (").next().unwrap_or_default().to_owned();
        }
        cells
    });
    let table = match report.observed {
        Some(_) => shown.fold(Table::new(HEADS), Table::with),
        None => shown.map(without_text).fold(Table::new(without_text(HEADS)), Table::with),
    };
    out.push_str(&table.left_last().render());
    if !hidden.is_empty() {
        let bad = hidden.iter().filter(|(safe, _)| !safe).count();
        let what = if bad == 0 { "all safe".to_owned() } else { format!("{bad} of them not safe") };
        out.push_str(&format!("{} more rows, {what} (--all prints them)\n", hidden.len()));
    }
    out.push_str("needed: worst-case bound, including rounding, divided by 448\n");
    if report.observed.is_some() {
        let text = "text: largest value that the text reaches in the model's own forward (f32), divided by 448";
        out.push_str(&wrapped(text, ""));
    }
    out.push('\n');
    let slack = report.observed.as_ref().and_then(|observed| slack(audit, observed));
    for note in audit.notes.iter().cloned().chain(unjudged(audit)).chain(slack) {
        out.push_str(&noted(&note, ""));
    }
    if let Some(rule) = without_tokenizer(&local_path(&report.folder), audit.engine).filter(|_| audit.safe) {
        out.push_str(&wrapped(rule, ""));
    }
    let mend = audit.mend(&report.folder);
    if !mend.is_empty() {
        out.push_str("What to do:\n");
        for step in &mend {
            // A command is copied: it has a line of its own.
            match &step.command {
                Some(command) => out.push_str(&format!("{}    {command}\n", wrapped(&format!("{}:", step.what), "  "))),
                None => out.push_str(&wrapped(&step.what, "  ")),
            }
        }
    }
    if !report.others.is_empty() {
        out.push_str("\nOther engines (--for):\n");
        report.others.iter().for_each(|other| out.push_str(&wrapped(&summary(other), "  ")));
    }
    out.push_str(&format!("\n{}", toned(tone(audit), &wrapped(&summary(audit), ""))));
    let next = audit.next(&report.folder).map_or(String::new(), |command| format!("Next: {command}\n"));
    out + &next
}

/// The page: the verdict, what is wrong, and the rest folded away.
pub fn page(report: &Report, made: &Made) -> String {
    let mut page = Page::new(
        &format!("Audit of the FP8 attention scales of {}", report.audit.model),
        "The scales that an engine would use, compared with the worst-case bounds of the weights",
        "",
    );
    page.verdict(tone(&report.audit), &summary(&report.audit));
    if let Some(command) = report.audit.next(&report.folder) {
        page.next(&command);
    }
    for (place, audit) in std::iter::once(&report.audit).chain(&report.others).enumerate() {
        page.section(&audit.engine.to_string());
        if place > 0 {
            page.paragraph(&summary(audit));
        }
        let step = |Step { what, command }| match command {
            Some(command) => format!("{what}: `{command}`"),
            None => what,
        };
        let steps = audit.mend(&report.folder).into_iter().map(step).collect();
        let slack = report.observed.iter().filter_map(|observed| slack(audit, observed)).collect();
        page.list(&[audit.notes.clone(), unjudged(audit), slack, steps].concat());
        let (safe, wrong): (Vec<_>, Vec<_>) =
            rows(audit, report.observed.as_ref()).into_iter().partition(|(safe, _)| *safe);
        if !wrong.is_empty() {
            rows_of(&mut page, report, wrong);
            page.note(
                "needed: worst-case bound, including rounding, divided by 448. A smaller scale can overflow for some \
                 normalized input; whether it does depends on the text.",
            );
        }
        if !safe.is_empty() {
            let title = format!("{} of {} operands are safe", safe.len(), safe.len() + audit.faults().len());
            page.fold(&title, |page| rows_of(page, report, safe));
        }
        page.end_section();
    }
    page.render(made)
}

/// A table of these rows, with a column for the text where one was run.
fn rows_of(page: &mut Page, report: &Report, rows: Vec<(bool, [String; 7])>) {
    let cells = rows.into_iter().map(|(_, cells)| cells);
    match report.observed {
        Some(_) => page.table("reasons", &HEADS, cells),
        None => page.table("reasons", &without_text(HEADS), cells.map(without_text)),
    }
}

/// The color of an audit's verdict.
fn tone(audit: &Audit) -> Tone {
    match audit.outcome {
        Outcome::Safe => Tone::Good,
        Outcome::NotSafe => Tone::Bad,
        Outcome::Unknown | Outcome::NotProven => Tone::Plain,
    }
}
