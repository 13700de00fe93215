//! `sigmascale export`: a checkpoint that a serving engine loads with these scales.

use super::html::Tone;
use super::model::{Model, files, without_tokenizer};
use super::named::named;
use super::output::OutputArgs;
use super::progress;
use super::table::{Table, largest, range, short, wrapped};
use super::target::check_not_of_model;
use super::terminal::toned;
use sigmascale::serving::{self, Engine, ExportOptions, LayerCertificate, OperandCertificate, Serving, SkipLayers};
use sigmascale::{Error, Result};
use std::path::PathBuf;

/// Write a checkpoint that a serving engine loads with these scales
#[derive(clap::Args)]
pub struct Args {
    /// Checkpoint folder
    model: String,
    /// New folder to write
    #[arg(long, value_name = "DIR")]
    to: PathBuf,
    /// Engine that will load it (TensorRT-LLM reads no scales for an FP8 cache: verify --for trtllm)
    #[arg(long = "for", value_parser = named::<Engine>(), value_name = "ENGINE")]
    engine: Engine,
    #[command(flatten)]
    serving: ServingArgs,
    /// One scale per head (vLLM only; vLLM 0.32 cannot update the weights of such a model)
    #[arg(long)]
    per_head: bool,
    /// Copy the weights; by default files of 1 MiB and more become hard links
    #[arg(long)]
    copy: bool,
    #[command(flatten)]
    output: OutputArgs,
}

/// What the server is started with.
#[derive(clap::Args)]
pub struct ServingArgs {
    /// Longest sequence of the server (vLLM's --max-model-len) [default: that of the config]
    #[arg(long, value_name = "TOKENS")]
    context: Option<usize>,
    /// Layers that keep the model's type, as vLLM's --kv-cache-dtype-skip-layers: numbers, or sliding_window
    #[arg(long, value_name = "LAYER", num_args = 1..)]
    skip_layers: Vec<String>,
}

impl ServingArgs {
    /// The options.
    pub fn read(&self) -> Result<Serving> {
        Ok(Serving { context: self.context, skip: SkipLayers::parse(&self.skip_layers)?, ..Serving::default() })
    }
}

/// Runs the command.
pub fn run(args: Args) -> Result<()> {
    args.output.check()?;
    check_not_of_model("--to", &args.to)?;
    let model = Model::open(&args.model)?;
    args.output.check_not_read(("--to", Some(&args.to)), &files(&args.model, &model))?;
    let Model::Checkpoint(checkpoint) = model else {
        return Err(Error::argument(format_args!(
            "export needs weights, but {} has none: pass a checkpoint folder",
            args.model
        )));
    };
    let (engine, serving) = (args.engine, args.serving.read()?);
    let options = ExportOptions { engine, per_head: args.per_head, copy: args.copy, serving };
    let bar = progress::bar(checkpoint.spec().layers.len(), "{msg}: layer {pos}/{len}", "export");
    let mut each = || {
        bar.inc(1);
        Ok(())
    };
    let export = serving::export(&checkpoint, &args.to, &options, &mut each)?;
    bar.finish_and_clear();
    args.output.write(&export, |export| table(export, args.output.most_rows()))
}

fn table(export: &serving::Export, most: usize) -> String {
    let certificate = &export.certificate;
    let folder = export.folder.display();
    let mut out = wrapped(&format!("{folder}: {} for {}", certificate.model, certificate.engine), "");
    out.push_str(&wrapped(&format!("{} files linked, {} copied", export.linked, export.copied), "  "));
    if !export.left_out.is_empty() {
        let rule = "left out, since the engine would load them instead of the exported files:";
        out.push_str(&wrapped(&format!("{rule} {}", export.left_out.join(", ")), "  "));
    }
    out.push('\n');
    let mut table = Table::new(["layer", "q scale", "k scale", "v scale", "q worst", "k worst", "v worst"]);
    let scale = |operand: Option<&OperandCertificate>| {
        range(operand.into_iter().flat_map(|o| o.scale.iter().map(|scale| f64::from(*scale))))
    };
    let load = |operand: Option<&OperandCertificate>| operand.map(|o| f64::from(o.load));
    let worst = |layer: &LayerCertificate| {
        let loads = [load(Some(&layer.q)), load(Some(&layer.k)), load(layer.v.as_ref())];
        loads.into_iter().flatten().reduce(f64::max).filter(|_| !layer.kept)
    };
    let (shown, others) = largest(&certificate.layers, most, "worst cases", worst);
    for layer in shown {
        let (q, k, v) = (Some(&layer.q), Some(&layer.k), layer.v.as_ref());
        let cells = match layer.kept {
            true => ["kept", "kept", "kept", "-", "-", "-"].map(str::to_owned),
            false => [scale(q), scale(k), scale(v), short(load(q)), short(load(k)), short(load(v))],
        };
        let [a, b, c, d, e, f] = cells;
        table.row([layer.layer.to_string(), a, b, c, d, e, f]);
    }
    out.push_str(&table.render());
    out.push_str(&others);
    out.push_str(&wrapped("worst: worst-case bound / (448 x scale); up to 1 nothing can overflow", ""));
    out.push('\n');
    for note in &certificate.notes {
        out.push_str(&wrapped(note, ""));
    }
    for unjudged in &certificate.unjudged {
        out.push_str(&wrapped(&format!("Not judged: {}: {}.", unjudged.what, unjudged.why), ""));
    }
    if let Some(rule) = without_tokenizer(&export.folder, certificate.engine) {
        out.push_str(&wrapped(rule, ""));
    }
    let fits = |operand: Option<&OperandCertificate>| operand.is_some_and(|operand| operand.safe);
    let fits = certificate.layers.iter().all(|l| l.kept || fits(Some(&l.q)) && fits(Some(&l.k)) && fits(l.v.as_ref()));
    let (tone, verdict) = match (certificate.safe, fits) {
        (true, _) => (Tone::Good, "Certified: no operand can overflow."),
        (false, true) => (Tone::Plain, "NOT CERTIFIED: not everything that attention reads was judged."),
        (false, false) => (Tone::Bad, "NOT CERTIFIED: an operand can overflow."),
    };
    out.push_str(&toned(tone, &wrapped(verdict, "")));
    // A command is copied: it stays in one line.
    out + &format!("Serve it with: {}\n", export.command)
}
