//! The record of a training run, which `diagnose` reads: JSON Lines, one object per line, appended while the run goes
//! on.
//!
//! ```text
//! {"kind": "run", "format": 1, "source": "monitor", "layers": [{"layer": 0, "heads": 12, "width": 768, ..}]}
//! {"kind": "step", "step": 10, "loss": 4.1, "grad_norm": 0.8, "lr": 6e-4, "loss_scale": 65536.0, "skipped": false}
//! {"kind": "layer", "step": 10, "layer": 0, "sigma": [..], "w_q": [..], "bound": [..], "logit_max": [..], ..}
//! {"kind": "event", "step": 12, "name": "alarm", "alarm": "growth", "layer": 0, "head": 8, "message": ".."}
//! ```
//!
//! A quantity that was not measured is left out. Values that JSON cannot hold are written as `null` and read as NaN.
//! Vectors of a layer have one entry per query head. A last line that was cut short by the end of the run is ignored.

use serde::{Deserialize, Deserializer, Serialize};
use sigmascale::{Error, Result};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;

/// Version of the format that this crate writes and reads.
pub const FORMAT: u32 = 1;

/// One line of the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Record {
    /// The first line.
    Run(RunInfo),
    /// What the optimizer saw in one step.
    Step(StepRecord),
    /// What one layer showed in one step.
    Layer(LayerRecord),
    /// Something that happened once.
    Event(Event),
}

impl Record {
    /// Reads one line.
    ///
    /// # Errors
    /// `is_format` if it is no record.
    pub fn parse(line: &str) -> Result<Self> {
        serde_json::from_str(line)
            .map_err(|e| Error::format(Path::new("record of a run"), format_args!("a line is no record: {e}")))
    }
}

/// What was recorded, and of which layers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunInfo {
    /// [`FORMAT`].
    pub format: u32,
    /// What wrote the file: `monitor`, `lab` or `checkpoints`.
    pub source: String,
    /// Name of the run or the model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Version of the package that wrote the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    /// Layers with attention, in the model's order.
    pub layers: Vec<LayerInfo>,
}

/// One layer's attention.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LayerInfo {
    /// The model's own number of the layer.
    pub layer: usize,
    /// Query heads.
    pub heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Channels per head of Q and K.
    pub head_dim: usize,
    /// Channels of the layer's input: the columns of W_Q. The growth of W_Q cannot be judged without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub width: Option<usize>,
    /// Format of Q and K in Q K^T; FP8 or BF16 where it is not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operands: Option<OperandFormat>,
}

/// Format of Q and K in Q K^T.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OperandFormat {
    /// E4M3 or E5M2.
    Fp8,
    /// 8 significant bits.
    Bf16,
    /// 11 significant bits.
    F16,
    /// 24 significant bits.
    F32,
}

impl OperandFormat {
    /// How much finer than BF16 logits of one size are resolved. FP8 counts as BF16: see `docs/diagnose.md`.
    pub fn resolution(self) -> f64 {
        match self {
            Self::Fp8 | Self::Bf16 => 1.0,
            Self::F16 => 8.0,
            Self::F32 => 65536.0,
        }
    }
}

/// What the optimizer saw in one step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Number of the step.
    pub step: u64,
    /// Training loss.
    #[serde(default, deserialize_with = "number", skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,
    /// Norm of all gradients before clipping.
    #[serde(default, deserialize_with = "number", skip_serializing_if = "Option::is_none")]
    pub grad_norm: Option<f64>,
    /// Learning rate.
    #[serde(default, deserialize_with = "number", skip_serializing_if = "Option::is_none")]
    pub lr: Option<f64>,
    /// Loss scale of mixed precision.
    #[serde(default, deserialize_with = "number", skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// True if the optimizer left the weights as they were.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub skipped: bool,
}

/// What one layer showed in one step. Vectors have one entry per query head.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LayerRecord {
    /// Number of the step.
    pub step: u64,
    /// The model's own number of the layer.
    pub layer: usize,
    /// Certified sigma_max(W_Q^T W_K) of each head, without the softmax scale.
    #[serde(default, deserialize_with = "numbers", skip_serializing_if = "Vec::is_empty")]
    pub sigma: Vec<f64>,
    /// The same of W_Q^T R W_K over every rotation R between two positions, at least `sigma`.
    #[serde(default, deserialize_with = "numbers", skip_serializing_if = "Vec::is_empty")]
    pub sigma_rope: Vec<f64>,
    /// Certified spectral norm of each head's W_Q.
    #[serde(default, deserialize_with = "numbers", skip_serializing_if = "Vec::is_empty")]
    pub w_q: Vec<f64>,
    /// Certified bound on |logit|.
    #[serde(default, deserialize_with = "numbers", skip_serializing_if = "Vec::is_empty")]
    pub bound: Vec<f64>,
    /// Largest |logit| seen.
    #[serde(default, deserialize_with = "numbers", skip_serializing_if = "Vec::is_empty")]
    pub logit_max: Vec<f64>,
    /// Share of rows whose maximum occurs more than once.
    #[serde(default, deserialize_with = "numbers", skip_serializing_if = "Vec::is_empty")]
    pub repeated: Vec<f64>,
    /// Share of rows whose maximum occurs more than once within one key tile.
    #[serde(default, deserialize_with = "numbers", skip_serializing_if = "Vec::is_empty")]
    pub repeated_in_tile: Vec<f64>,
    /// Sum over sampled rows of delta as computed minus delta of an exact output, in units of the sum of |delta|.
    #[serde(default, deserialize_with = "numbers", skip_serializing_if = "Vec::is_empty")]
    pub delta_bias: Vec<f64>,
    /// Correlation of the sign of dO with that of the output's error, over the values of sampled rows.
    #[serde(default, deserialize_with = "numbers", skip_serializing_if = "Vec::is_empty")]
    pub error_sign: Vec<f64>,
    /// Mean entropy of the attention weights over sampled rows, in nats.
    #[serde(default, deserialize_with = "numbers", skip_serializing_if = "Vec::is_empty")]
    pub entropy: Vec<f64>,
    /// Largest of amax / (448 * descale) over Q, K and V of the head: the part of the format's range in use.
    #[serde(default, deserialize_with = "numbers", skip_serializing_if = "Vec::is_empty")]
    pub utilization: Vec<f64>,
    /// Share of the values of Q, K and V that left the format's range.
    #[serde(default, deserialize_with = "numbers", skip_serializing_if = "Vec::is_empty")]
    pub saturated: Vec<f64>,
}

/// Something that happened once: an alarm, a restored checkpoint, a changed rate.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// Number of the step.
    pub step: u64,
    /// `alarm`, `clear`, `skip`, `restore`, `lower-rate`, or a name of the user's own.
    pub name: String,
    /// The model's own number of the layer, if it concerns one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer: Option<usize>,
    /// Query head, if it concerns one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head: Option<usize>,
    /// Kind of the alarm, for `alarm` and `clear`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alarm: Option<String>,
    /// One sentence.
    #[serde(default)]
    pub message: String,
}

/// `null` is a number that JSON cannot hold.
fn number<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<Option<f64>, D::Error> {
    Ok(Some(Option::<f64>::deserialize(from)?.unwrap_or(f64::NAN)))
}

fn numbers<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<Vec<f64>, D::Error> {
    let read = Vec::<Option<f64>>::deserialize(from)?;
    Ok(read.into_iter().map(|value| value.unwrap_or(f64::NAN)).collect())
}

/// A whole file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct History {
    /// The first line.
    pub run: RunInfo,
    /// Steps in the order of the file.
    pub steps: Vec<StepRecord>,
    /// Layers in the order of the file.
    pub layers: Vec<LayerRecord>,
    /// Events in the order of the file.
    pub events: Vec<Event>,
}

/// Reads a file: its first line, and the records after it in their order.
///
/// # Errors
/// `is_io`; `is_format` with the line's number if a line other than an unfinished last one is no record, if the first
/// is not `run`, if the format is of a later version, or if a record names a layer or a number of heads that the first
/// line does not.
pub fn read_records(path: &Path) -> Result<(RunInfo, Vec<Record>)> {
    let file = std::fs::File::open(path).map_err(|e| Error::io(path, "read", e))?;
    let mut reader = BufReader::new(file);
    let mut run: Option<RunInfo> = None;
    let mut records = Vec::new();
    let mut line = String::new();
    for number in 1usize.. {
        line.clear();
        reader.read_line(&mut line).map_err(|e| Error::io(path, "read", e))?;
        if line.is_empty() {
            break;
        }
        if line.trim().is_empty() {
            continue;
        }
        let record = match serde_json::from_str::<Record>(&line) {
            Ok(record) => record,
            Err(_) if !line.ends_with('\n') && run.is_some() => break,
            Err(e) => {
                // Of what is no JSON object, serde names its own types.
                let why = if line.trim_start().starts_with('{') { format!(": {e}") } else { String::new() };
                return Err(Error::format(
                    path,
                    format_args!("line {number} is not a record of a run (JSON Lines, as Monitor writes it){why}"),
                ));
            }
        };
        match (&run, record) {
            (None, Record::Run(first)) if first.format == FORMAT => run = Some(first),
            (None, Record::Run(first)) => {
                return Err(Error::format(path, later(first.format)));
            }
            (None, _) => return Err(Error::format(path, r#"expected a first line of kind "run""#)),
            (Some(_), Record::Run(_)) => {
                return Err(Error::format(
                    path,
                    format_args!(
                        "line {number} is a second line of kind \"run\": split the file there, a record is of one run"
                    ),
                ));
            }
            (Some(run), record) => {
                if let Record::Layer(layer) = &record {
                    run.check(layer).map_err(|rule| Error::format(path, format_args!("line {number}: {rule}")))?;
                }
                records.push(record);
            }
        }
    }
    Ok((run.ok_or_else(|| Error::format(path, "the file is empty: expected a record of a run"))?, records))
}

/// What is wrong with a record in another format.
pub(crate) fn later(format: u32) -> String {
    format!(
        "expected format {FORMAT}, got {format}: read it with the version of sigmascale that wrote it, or a later one"
    )
}

impl History {
    /// Reads a file.
    ///
    /// # Errors
    /// As [`read_records`].
    pub fn read(path: &Path) -> Result<Self> {
        let (run, records) = read_records(path)?;
        Ok(Self::new(run, records))
    }

    /// Of a first line and the records after it.
    pub fn new(run: RunInfo, records: Vec<Record>) -> Self {
        let mut history = Self { run, ..Self::default() };
        for record in records {
            match record {
                Record::Step(step) => history.steps.push(step),
                Record::Layer(layer) => history.layers.push(layer),
                Record::Event(event) => history.events.push(event),
                Record::Run(_) => {}
            }
        }
        history
    }

    /// Writes the whole file, or nothing.
    ///
    /// # Errors
    /// `is_io`.
    pub fn write(&self, path: &Path) -> Result<()> {
        let mut bytes = Vec::new();
        let steps = self.steps.iter().cloned().map(|step| (step.step, Record::Step(step)));
        let layers = self.layers.iter().cloned().map(|layer| (layer.step, Record::Layer(layer)));
        let events = self.events.iter().cloned().map(|event| (event.step, Record::Event(event)));
        let mut records: Vec<_> = steps.chain(layers).chain(events).collect();
        records.sort_by_key(|(step, _)| *step);
        let records = records.into_iter().map(|(_, record)| record);
        for record in std::iter::once(Record::Run(self.run.clone())).chain(records) {
            serde_json::to_writer(&mut bytes, &record).expect("records are plain values");
            bytes.push(b'\n');
        }
        crate::file::write_atomically(path, &bytes)
    }
}

impl RunInfo {
    /// Whether the record is of one of the run's layers and has its number of heads; the broken rule otherwise.
    pub(crate) fn check(&self, record: &LayerRecord) -> std::result::Result<(), String> {
        let Some(info) = self.layers.iter().find(|info| info.layer == record.layer) else {
            return Err(format!("layer {} is not one of the run's layers", record.layer));
        };
        for (name, values) in record.columns() {
            if !values.is_empty() && values.len() != info.heads {
                let (layer, heads, got) = (record.layer, info.heads, values.len());
                return Err(format!("expected {heads} values of {name} for layer {layer}, got {got}"));
            }
        }
        Ok(())
    }
}

impl LayerRecord {
    /// Every vector with its name in the file.
    pub fn columns(&self) -> [(&'static str, &[f64]); 12] {
        [
            ("sigma", &self.sigma),
            ("sigma_rope", &self.sigma_rope),
            ("w_q", &self.w_q),
            ("bound", &self.bound),
            ("logit_max", &self.logit_max),
            ("repeated", &self.repeated),
            ("repeated_in_tile", &self.repeated_in_tile),
            ("delta_bias", &self.delta_bias),
            ("error_sign", &self.error_sign),
            ("entropy", &self.entropy),
            ("utilization", &self.utilization),
            ("saturated", &self.saturated),
        ]
    }
}

/// Appends records to a file line by line, so that a run that ends early leaves what it saw.
#[derive(Debug)]
pub struct Writer {
    path: std::path::PathBuf,
    file: std::fs::File,
}

impl Writer {
    /// Starts a new file, which must not exist yet.
    ///
    /// # Errors
    /// `is_io`.
    pub fn create(path: &Path, run: RunInfo) -> Result<Self> {
        let file = std::fs::File::create_new(path).map_err(|e| Error::io(path, "create", e))?;
        let mut writer = Self { path: path.to_path_buf(), file };
        writer.write(&Record::Run(run))?;
        Ok(writer)
    }

    /// Appends one record.
    ///
    /// # Errors
    /// `is_io`.
    pub fn write(&mut self, record: &Record) -> Result<()> {
        let mut line = serde_json::to_vec(record).expect("records are plain values");
        line.push(b'\n');
        self.file.write_all(&line).map_err(|e| Error::io(&self.path, "write", e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info() -> RunInfo {
        let layer = LayerInfo { layer: 3, heads: 2, kv_heads: 1, head_dim: 8, width: None, operands: None };
        RunInfo { format: FORMAT, source: "lab".into(), layers: vec![layer], ..RunInfo::default() }
    }

    #[test]
    fn a_file_reads_back_and_a_cut_last_line_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.jsonl");
        let step = StepRecord { step: 1, loss: Some(f64::NAN), skipped: true, ..StepRecord::default() };
        let layer = LayerRecord { step: 1, layer: 3, sigma: vec![1.5, f64::INFINITY], ..LayerRecord::default() };
        let event = Event { step: 1, name: "skip".into(), ..Event::default() };
        let mut writer = Writer::create(&path, info()).unwrap();
        for record in [Record::Step(step), Record::Layer(layer.clone()), Record::Event(event.clone())] {
            writer.write(&record).unwrap();
        }
        writer.file.write_all(b"{\"kind\": \"step\", \"st").unwrap();
        let read = History::read(&path).unwrap();
        assert_eq!((&read.run, &read.events), (&info(), &vec![event]));
        assert!(read.steps[0].loss.unwrap().is_nan() && read.steps[0].skipped && read.steps[0].lr.is_none());
        assert!(read.layers[0].sigma[0] == 1.5 && read.layers[0].sigma[1].is_nan());
        let copy = folder.path().join("copy.jsonl");
        read.write(&copy).unwrap();
        assert_eq!(History::read(&copy).unwrap().layers.len(), 1);
    }

    #[test]
    fn what_does_not_fit_the_first_line_is_refused_with_its_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.jsonl");
        let run = serde_json::to_string(&Record::Run(info())).unwrap();
        for (text, message) in [
            (String::new(), "empty"),
            ("{\"kind\": \"step\", \"step\": 1}\n".into(), "first line"),
            (run.replace("\"format\":1", "\"format\":2"), "expected format 1, got 2"),
            (format!("{run}\n{run}\n"), "line 2 is a second"),
            (format!("{run}\n{{\"kind\": \"layer\", \"step\": 1, \"layer\": 4}}\n"), "line 2: layer 4"),
            (
                format!("{run}\n{{\"kind\": \"layer\", \"step\": 1, \"layer\": 3, \"w_q\": [1]}}\n"),
                "expected 2 values of w_q",
            ),
            (format!("{run}\nnonsense\n"), "line 2 is not a record"),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = History::read(&path).unwrap_err();
            assert!(error.is_format() && error.to_string().contains(message), "{error}");
        }
    }
}
