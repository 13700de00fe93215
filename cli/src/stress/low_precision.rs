//! `sigmascale stress low-precision`: the failure of BF16 flash attention, and what averts it.

use crate::chart::{Frame, Line, legend, lines};
use crate::html::{Figure, Made, Page, Tone};
use crate::named::named;
use crate::numbers::{count, real, whole};
use crate::output::{OutputArgs, write_file};
use crate::progress;
use crate::svg::Axis;
use crate::table::{Table, brief, wrapped};
use rayon::prelude::*;
use serde::Serialize;
use sigmascale::{Error, Result};
use sigmascale_lab::history::{History, LayerRecord};
use sigmascale_lab::stress::{
    Arithmetic, LowPrecisionOptions, LowPrecisionSummary, Remedy, RemedyVerdict, low_precision, verdicts,
};
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Reproduce the divergence of training with BF16 flash attention in one small layer, with and without remedies
#[derive(clap::Args)]
#[command(allow_negative_numbers = true)]
pub struct Args {
    /// Seeds of tokens, targets and batches, comma-separated; each remedy runs once per seed
    #[arg(long, value_name = "A,B,..", value_delimiter = ',', default_value = "0", value_parser = whole)]
    seeds: Vec<u64>,
    /// Optimizer steps
    #[arg(long, value_name = "N", default_value_t = LowPrecisionOptions::default().steps, value_parser = whole)]
    steps: u64,
    /// Whose casts: the paper's BF16, a fused BF16 kernel's, or those of this package's FP8 kernel in training
    #[arg(long, value_parser = named::<Arithmetic>(), default_value = Arithmetic::Bf16.name())]
    arithmetic: Arithmetic,
    /// Remedies to run, comma-separated [default: all that change something]
    #[arg(long, value_name = "LIST", value_parser = named::<Remedy>(), value_delimiter = ',')]
    remedies: Vec<Remedy>,
    /// Shift of the shifted softmax on rows whose maximum repeats: m = beta max
    #[arg(long, default_value_t = 2.0, value_parser = real)]
    beta: f64,
    /// Logits within this distance of the maximum count as repeating it, in nats
    #[arg(long, default_value_t = 1e-3, value_parser = real)]
    epsilon: f64,
    /// Keys per tile; with --arithmetic bf16 the output is rounded after each. A divisor of 64, the length of a sequence
    #[arg(long, value_name = "KEYS", default_value_t = 64, value_parser = count)]
    tile: usize,
    /// Heads of the layer
    #[arg(long, value_name = "N", default_value_t = LowPrecisionOptions::default().heads, value_parser = count)]
    heads: usize,
    /// Head whose values have one sign (the one that fails), or `none`
    #[arg(long, value_name = "HEAD", default_value = "2", value_parser = head)]
    head: Head,
    /// Head that the remedies f32-head and f32-w-q compute in f32 [default: that of --head, or 0]
    #[arg(long, value_name = "HEAD", value_parser = whole)]
    f32_head: Option<u64>,
    /// How often a repeated token occurs; with 1, 2 or 4 the sums of P V have no rounding ties
    #[arg(long, value_name = "N", default_value_t = LowPrecisionOptions::default().copies, value_parser = count)]
    copies: usize,
    /// Learning rate, after 100 steps of warm-up
    #[arg(long, default_value_t = 1e-3, value_parser = real)]
    lr: f64,
    /// Write the record of every run, REMEDY-seedN.jsonl, to FOLDER, which must exist
    #[arg(long, value_name = "FOLDER")]
    record: Option<PathBuf>,
    /// Also write the result as an HTML page with figures to FILE
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Clone, Copy)]
struct Head(Option<usize>);

fn head(text: &str) -> std::result::Result<Head, String> {
    match text {
        "none" => Ok(Head(None)),
        _ => text.parse().map(|head| Head(Some(head))).map_err(|_| "expected a head's number, or none".to_owned()),
    }
}

/// The result.
#[derive(Serialize)]
struct Results {
    scenario: &'static str,
    verdicts: Vec<RemedyVerdict>,
    runs: Vec<LowPrecisionSummary>,
    #[serde(skip)]
    histories: Vec<History>,
}

impl Args {
    fn options(&self) -> Result<Vec<LowPrecisionOptions>> {
        let applying = || Remedy::ALL.into_iter().filter(|remedy| remedy.is_for(self.arithmetic));
        let all = if self.remedies.is_empty() { applying().collect() } else { self.remedies.clone() };
        let base = LowPrecisionOptions {
            arithmetic: self.arithmetic,
            steps: self.steps,
            heads: self.heads,
            head: self.head.0,
            f32_head: self.f32_head.map_or(self.head.0.unwrap_or(0), |head| head as usize),
            rate: self.lr as f32,
            copies: self.copies,
            tile: self.tile,
            beta: self.beta as f32,
            epsilon: self.epsilon as f32,
            ..LowPrecisionOptions::default()
        };
        base.check()?;
        let duplicate = |what: String| Err(Error::argument(format_args!("duplicate {what}")));
        if let Some(at) = (1..all.len()).find(|&at| all[..at].contains(&all[at])) {
            return duplicate(format!("remedy {}", all[at].name()));
        }
        if let Some(at) = (1..self.seeds.len()).find(|&at| self.seeds[..at].contains(&self.seeds[at])) {
            return duplicate(format!("seed {}", self.seeds[at]));
        }
        let of = |&remedy: &Remedy| self.seeds.iter().map(move |&seed| LowPrecisionOptions { remedy, seed, ..base });
        let options: Vec<_> = all.iter().flat_map(of).collect();
        options.iter().try_for_each(LowPrecisionOptions::check)?;
        Ok(options)
    }
}

/// Runs the command.
pub fn run(args: Args, made: &Made) -> Result<()> {
    let options = args.options()?;
    args.output.check()?;
    if let Some(file) = &args.html {
        args.output.check_other("--html", file)?;
    }
    if let Some(folder) = args.record.as_deref().filter(|folder| !folder.is_dir()) {
        let missing = std::io::Error::new(std::io::ErrorKind::NotFound, "--record needs a folder that exists");
        return Err(Error::io(folder, "open", missing));
    }
    let steps: u64 = options.iter().map(|options| options.steps).sum();
    let bar = progress::bar(steps as usize, "{msg}: step {pos}/{len} of all runs", "low-precision");
    let one = |options: &LowPrecisionOptions| -> Result<(LowPrecisionSummary, History)> {
        let run = low_precision(options, |_| bar.inc(1))?;
        if let Some(folder) = &args.record {
            run.history.write(&record(folder, options))?;
        }
        Ok((LowPrecisionSummary::of(options, &run), run.history))
    };
    let done = options.par_iter().map(one).collect::<Result<Vec<_>>>();
    bar.finish_and_clear();
    let (runs, histories): (Vec<_>, Vec<_>) = done?.into_iter().unzip();
    let results = Results { scenario: "low-precision", verdicts: verdicts(&runs), runs, histories };
    if let Some(file) = &args.html {
        write_file(file, page(&results, made).as_bytes())?;
    }
    args.output.write(&results, table)
}

fn record(folder: &Path, options: &LowPrecisionOptions) -> PathBuf {
    folder.join(format!("{}-seed{}.jsonl", options.remedy.name(), options.seed))
}

fn headline(results: &Results) -> String {
    let Some(options) = results.runs.first().map(|run| run.options) else { return String::new() };
    let seeds = results.runs.iter().filter(|run| run.options.remedy == options.remedy).count();
    let planted = match options.head {
        Some(head) => format!("V of one sign in head {head}"),
        None => "no head with V of one sign".to_owned(),
    };
    format!(
        "low-precision: one layer, arithmetic {}, {} heads, {} steps, {seeds} {}; {planted}, {} copies, tiles of {} keys",
        options.arithmetic.name(),
        options.heads,
        options.steps,
        if seeds == 1 { "seed" } else { "seeds" },
        options.copies,
        options.tile
    )
}

/// What a remedy came to, in a sentence.
fn sentence(verdict: &RemedyVerdict, runs: &[LowPrecisionSummary]) -> String {
    let own = || runs.iter().filter(|run| run.options.remedy == verdict.remedy);
    let growth = own().map(|run| run.fastest_head()).fold((0, 0.0), |a, b| if b.1 > a.1 { b } else { a });
    let growth = format!("norm of W_Q up to {} times its start (head {})", brief(growth.1), growth.0);
    let runs = if verdict.runs == 1 { "run" } else { "runs" };
    if verdict.failed == 0 {
        return format!("the loss did not double in {} {runs}; {growth}", verdict.runs);
    }
    let at: Vec<String> = own().filter_map(|run| run.failed_at).map(|step| step.to_string()).collect();
    format!(
        "FAILED in {} of {} {runs}: the loss doubled at step {}; {growth}",
        verdict.failed,
        verdict.runs,
        at.join(", ")
    )
}

const HEADS: [&str; 10] = [
    "remedy",
    "seed",
    "loss start",
    "loss end",
    "doubled at",
    "head",
    "W_Q start",
    "W_Q end",
    "rank one",
    "sum of delta's bias",
];

/// The row of a run: its fastest head.
fn cells(run: &LowPrecisionSummary) -> [String; 10] {
    let head = run.fastest_head().0;
    let at = |values: &[f64], digits: usize| values.get(head).map_or("-".to_owned(), |x| format!("{x:.digits$}"));
    [
        run.options.remedy.name().to_owned(),
        run.options.seed.to_string(),
        format!("{:.4}", run.loss_start),
        format!("{:.4}", run.loss_end),
        run.failed_at.map_or("-".to_owned(), |step| step.to_string()),
        head.to_string(),
        at(&run.w_q_start, 2),
        at(&run.w_q_end, 2),
        at(&run.rank_one, 2),
        at(&run.delta_bias, 4).replace("-0.0000", "0.0000"),
    ]
}

/// What to know before the numbers are read.
fn remarks() -> Vec<String> {
    vec![
        "A run failed if the mean loss of 50 steps is twice that of the first 50. The row of a run shows the head whose \
         norm of W_Q grew most; rank one is the share of W_Q's squared change in one singular direction."
            .to_owned(),
        "delta's bias is the sum over the rows of delta as computed minus delta of an exact output, in units of the sum of \
         |delta|; summed over every tenth step."
            .to_owned(),
        "The weights are chosen so that maxima repeat from the first step. Where this comes from in a training run is \
         not shown here: docs/low-precision-failure.md."
            .to_owned(),
    ]
}

fn table(results: &Results) -> String {
    let mut out = wrapped(&headline(results), "") + "\n";
    for verdict in &results.verdicts {
        let bullet = format!("  {:<21}  ", verdict.remedy.name());
        out.push_str(&wrapped(&sentence(verdict, &results.runs), &bullet));
    }
    let mut table = Table::new(HEADS);
    results.runs.iter().for_each(|run| table.row(cells(run)));
    let _ = writeln!(out, "\n{}", table.left().render());
    remarks().iter().for_each(|remark| out.push_str(&wrapped(remark, "- ")));
    out
}

fn page(results: &Results, made: &Made) -> String {
    let mut page = Page::new("The failure of BF16 attention", &headline(results), &remarks()[0]);
    let failed = results.verdicts.iter().filter(|verdict| verdict.failed > 0);
    let failed: Vec<&str> = failed.map(|verdict| verdict.remedy.name()).collect();
    match failed.is_empty() {
        true => page.verdict(Tone::Good, "The loss did not double in any run."),
        false => page.verdict(Tone::Bad, &format!("The loss doubled with: {}.", failed.join(", "))),
    }
    let line = |verdict: &RemedyVerdict| format!("{}: {}", verdict.remedy.name(), sentence(verdict, &results.runs));
    page.lines(&results.verdicts.iter().map(line).collect::<Vec<_>>());
    page.table("words", &HEADS, results.runs.iter().map(cells));
    page.list(&remarks()[1..]);
    let Some(seed) = results.runs.first().map(|run| run.options.seed) else { return page.render(made) };
    let of_seed = || results.runs.iter().zip(&results.histories).filter(|(run, _)| run.options.seed == seed);
    let head = |run: &LowPrecisionSummary| run.options.head.unwrap_or(run.fastest_head().0);
    type Points<'a> = &'a dyn Fn(&History, usize) -> Vec<(usize, f64)>;
    // Of few remedies each has a color of its own.
    let by_remedy = |points: Points| -> Vec<Line> {
        let line = |(place, (run, history)): (usize, (&LowPrecisionSummary, &History))| Line {
            name: run.options.remedy.name().to_owned(),
            place: Some(place),
            points: points(history, head(run)),
        };
        of_seed().enumerate().map(line).collect()
    };
    page.section(&format!("Seed {seed}"));
    page.raw(&legend(&by_remedy(&|_, _| vec![])));
    let mut figures = vec![
        figure("Training loss", "Means of 20 steps.", &by_remedy(&|history, _| losses(history)), true),
        figure(
            "Norm of W_Q",
            "Of the head with V of one sign.",
            &by_remedy(&|history, head| column(history, |record| record.w_q[head])),
            true,
        ),
        figure(
            "Bias of delta, summed",
            "Of the same head, in units of |delta|: a level line is unbiased.",
            &by_remedy(&|history, head| summed(&column(history, |record| record.delta_bias[head]))),
            false,
        ),
        figure(
            "Largest |logit|",
            "Of the same head.",
            &by_remedy(&|history, head| column(history, |record| record.logit_max[head])),
            true,
        ),
    ];
    if let Some((run, history)) = of_seed().next() {
        let line = |head: usize| Line {
            name: format!("head {head}"),
            place: Some(head),
            points: column(history, |record| record.w_q[head]),
        };
        let heads: Vec<Line> = (0..run.options.heads).map(line).collect();
        let title = format!("Norm of W_Q per head, {}", run.options.remedy.name());
        let mut figure = figure(&title, "The first remedy of the list.", &heads, true);
        figure.content = legend(&heads) + &figure.content;
        figures.push(figure);
    }
    page.figures(&figures);
    page.end_section();
    page.render(made)
}

fn figure(title: &str, caption: &str, all: &[Line], positive: bool) -> Figure {
    let values = || all.iter().flat_map(|line| &line.points).map(|point| point.1);
    let last = all.iter().filter_map(|line| line.points.last()).map(|point| point.0).max().unwrap_or(1);
    let axis = if positive { Axis::new(values(), None) } else { Axis::linear(values()) };
    Figure::new(title, caption, lines(all, &Frame::of_steps(axis, last)))
}

fn losses(history: &History) -> Vec<(usize, f64)> {
    let mean = |(at, part): (usize, &[sigmascale_lab::history::StepRecord])| {
        let losses: Vec<f64> = part.iter().filter_map(|step| step.loss).filter(|loss| loss.is_finite()).collect();
        (!losses.is_empty()).then(|| (20 * at + 10, losses.iter().sum::<f64>() / losses.len() as f64))
    };
    history.steps.chunks(20).enumerate().filter_map(mean).collect()
}

fn column(history: &History, value: impl Fn(&LayerRecord) -> f64) -> Vec<(usize, f64)> {
    let points = history.layers.iter().map(|record| (record.step as usize, value(record)));
    points.filter(|point| point.1.is_finite()).collect()
}

fn summed(points: &[(usize, f64)]) -> Vec<(usize, f64)> {
    let sum = |so_far: &mut f64, &(step, value): &(usize, f64)| {
        *so_far += value;
        Some((step, *so_far))
    };
    points.iter().scan(0.0, sum).collect()
}
