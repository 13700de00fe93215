//! What an audit says: a verdict for each scale, what was not judged, and what follows for the whole.

use super::engine::{Engine, Operand, quoted};
use super::options::Serving;
use crate::named;
use serde::Serialize;
use std::fmt;

named! {
    /// What is said of a scale.
    pub enum ScaleVerdict is "verdict" {
        /// NaN, infinite, 0 or negative: no scale. Engines cast with it, use 1.0 in its place, or do not start.
        Invalid = "invalid",
        /// A cache is written with one scale and read with another.
        Mismatch = "mismatch",
        /// A normalized input can overflow it.
        Overflow = "overflow",
        /// Stored, and never loaded by this engine: the index, the name, the shape or the config is not what it reads.
        NotLoaded = "not-loaded",
        /// Other layers have one, this has none: the engine uses 1.0. Or none has one, and 1.0 does not cover the bound.
        Missing = "missing",
        /// Not known: what the engine loads, or how large the operand gets.
        Unknown = "unknown",
        /// No value can overflow under it.
        Safe = "safe",
    }
}

/// One scale that the engine would use.
#[derive(Clone, Debug, Serialize)]
pub struct AuditEntry {
    /// What the engine casts with; NaN, null in JSON, where that is stored, and where it does not cast.
    pub scale: f32,
    /// The worst-case bound over 448; null without one.
    pub needed: Option<f32>,
    /// What is said of it.
    pub verdict: ScaleVerdict,
    /// How many times too large a value can get, or is read; null where it fits or that is not known.
    pub factor: Option<f32>,
    /// What is stored, before the engine's rounding and reductions; null where it casts at 1.0.
    pub stored: Option<f32>,
    /// The reason, for people.
    pub why: String,
}

impl AuditEntry {
    pub(super) fn new(
        scale: f32,
        needed: Option<f32>,
        verdict: ScaleVerdict,
        stored: Option<f32>,
        why: String,
    ) -> Self {
        let factor = needed.map(|needed| needed / scale).filter(|factor| factor.is_finite() && *factor > 1.0);
        Self { scale, needed, verdict, factor, stored, why }
    }
}

/// The scales of one layer: an entry a tensor, or one a KV head.
#[derive(Clone, Debug, Serialize)]
pub struct LayerAudit {
    /// The model's own number.
    pub layer: usize,
    /// Queries.
    pub q: Vec<AuditEntry>,
    /// Keys.
    pub k: Vec<AuditEntry>,
    /// Values.
    pub v: Vec<AuditEntry>,
}

impl LayerAudit {
    /// All entries, with their operand.
    pub fn entries(&self) -> impl Iterator<Item = (char, &AuditEntry)> {
        [('q', &self.q), ('k', &self.k), ('v', &self.v)]
            .into_iter()
            .flat_map(|(letter, row)| row.iter().map(move |entry| (letter, entry)))
    }

    pub(super) fn row(&self, operand: Operand) -> &[AuditEntry] {
        match operand {
            Operand::Q => &self.q,
            Operand::K => &self.k,
            Operand::V => &self.v,
        }
    }

    pub(super) fn row_mut(&mut self, operand: Operand) -> &mut [AuditEntry] {
        match operand {
            Operand::Q => &mut self.q,
            Operand::K => &mut self.k,
            Operand::V => &mut self.v,
        }
    }
}

/// Something that attention reads, or may read, and that was not judged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Unjudged {
    /// Tensors or files.
    pub what: String,
    /// The reason.
    pub why: String,
}

named! {
    /// What follows for the whole checkpoint.
    pub enum Outcome is "outcome" {
        /// Nothing can overflow, and everything was judged.
        Safe = "safe",
        /// No scale is wrong, and not everything was judged.
        Unknown = "unknown",
        /// Nothing is stored that is wrong; operands that are cast at 1.0 have bounds above it, which no text may reach.
        NotProven = "not-proven",
        /// A scale is wrong.
        NotSafe = "not-safe",
    }
}

impl Outcome {
    pub(super) fn of(layers: &[LayerAudit], unjudged: &[Unjudged]) -> Self {
        let mut worst = if unjudged.is_empty() { Self::Safe } else { Self::Unknown };
        for (_, entry) in layers.iter().flat_map(LayerAudit::entries) {
            let own = match entry.verdict {
                ScaleVerdict::Safe => Self::Safe,
                ScaleVerdict::Unknown => Self::Unknown,
                ScaleVerdict::Overflow | ScaleVerdict::Missing if entry.stored.is_none() && entry.scale == 1.0 => {
                    Self::NotProven
                }
                _ => Self::NotSafe,
            };
            if own as u8 > worst as u8 {
                worst = own;
            }
        }
        // One layer without a scale among others that have one is a fault of the checkpoint.
        let stored = layers.iter().flat_map(LayerAudit::entries).any(|(_, entry)| entry.stored.is_some());
        let missing =
            layers.iter().flat_map(LayerAudit::entries).any(|(_, entry)| entry.verdict == ScaleVerdict::Missing);
        if worst == Self::NotProven && stored && missing { Self::NotSafe } else { worst }
    }
}

/// Something to do about a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// What.
    pub what: String,
    /// The command that does it, for a shell; none where it is for people.
    pub command: Option<String>,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.command {
            Some(command) => write!(f, "{}: {command}", self.what),
            None => f.write_str(&self.what),
        }
    }
}

/// What one engine would do with a checkpoint.
#[derive(Clone, Debug, Serialize)]
pub struct Audit {
    /// Engine.
    pub engine: Engine,
    /// The versions whose rules were applied.
    pub version: &'static str,
    /// Model.
    pub model: String,
    /// Whether no operand of any layer can overflow, and nothing that attention reads was left unjudged.
    pub safe: bool,
    /// The same in four steps.
    pub outcome: Outcome,
    /// What the server is started with.
    pub serving: Serving,
    /// What holds for the whole checkpoint.
    pub notes: Vec<String>,
    /// What attention reads, or may read, and was not judged.
    pub unjudged: Vec<Unjudged>,
    /// Layers with attention.
    pub layers: Vec<LayerAudit>,
}

impl Audit {
    /// Entries that are not safe, with layer and operand, the worst first.
    pub fn faults(&self) -> Vec<(usize, char, &AuditEntry)> {
        let all =
            self.layers.iter().flat_map(|layer| layer.entries().map(move |(name, entry)| (layer.layer, name, entry)));
        let mut faults: Vec<_> = all.filter(|(_, _, entry)| entry.verdict != ScaleVerdict::Safe).collect();
        let place = |verdict: ScaleVerdict| ScaleVerdict::ALL.iter().position(|own| *own == verdict);
        faults.sort_by(|(a, b, one), (c, d, other)| {
            let factor = other.factor.unwrap_or(0.0).total_cmp(&one.factor.unwrap_or(0.0));
            place(one.verdict).cmp(&place(other.verdict)).then(factor).then((a, b).cmp(&(c, d)))
        });
        faults
    }

    /// The command that comes next: the first that mends something, or that which serves a checkpoint that is safe.
    pub fn next(&self, folder: &str) -> Option<String> {
        match self.outcome {
            Outcome::Safe => Some(self.engine.command(folder, &self.serving)),
            _ => self.mend(folder).into_iter().find_map(|step| step.command),
        }
    }

    /// What to do about what is not safe; empty where nothing is to do.
    pub fn mend(&self, folder: &str) -> Vec<Step> {
        let mut steps = Vec::new();
        let step = |what: &str, command: String| Step { what: what.to_owned(), command: Some(command) };
        let say = |what: String| Step { what, command: None };
        let faults = self.faults();
        let description = self.engine.description();
        let read =
            |letter: char| Operand::ALL.iter().any(|o| o.letter() == letter && description.operands[*o as usize]);
        let stored = |entry: &AuditEntry| entry.stored.is_some() || entry.verdict == ScaleVerdict::Missing;
        let mut exported = false;
        let can_export = matches!(self.engine, Engine::Vllm | Engine::Sglang);
        if can_export && faults.iter().any(|(_, letter, entry)| read(*letter) && stored(entry)) {
            exported = true;
            steps.push(step("write scales that cover the weights", self.export(folder)));
        }
        let mut above: Vec<usize> = faults
            .iter()
            .filter(|(_, letter, entry)| {
                let at_one = entry.stored.is_none() && entry.needed.is_some_and(|needed| needed > 1.0);
                at_one && !(exported && read(*letter))
            })
            .map(|(layer, ..)| *layer)
            .collect();
        above.sort_unstable();
        above.dedup();
        if !above.is_empty() {
            if description.skips_layers {
                let mut serving = self.serving.clone();
                serving.skip.numbers.extend(above);
                let command = self.engine.command(folder, &serving);
                steps.push(step("keep the layers whose bounds pass 1.0 in the model's type", command));
            } else {
                let what = "serve with a cache in the model's type: leave the option that asks for FP8 away";
                steps.push(say(what.to_owned()));
            }
        }
        for unjudged in &self.unjudged {
            let what = &unjudged.what;
            steps.push(say(if what == "config.json" {
                "config.json: take the settings of the tool that wrote the weights, without its cache, and export".to_owned()
            } else if unjudged.why.contains("adapter") {
                format!("{what}: merge it into the weights, or move it away, and verify again")
            } else {
                format!(
                    "{what}: serve without it (no speculative decoding with a draft from this folder), or remove it; `--allow \
                     unknown` accepts it"
                )
            }));
        }
        steps
    }

    fn export(&self, folder: &str) -> String {
        let to = format!("{}-{}", folder.trim_end_matches('/'), self.engine.name());
        let mut line =
            format!("sigmascale export {} --to {} --for {}", quoted(folder), quoted(&to), self.engine.name());
        if let Some(context) = self.serving.context {
            line += &format!(" --context {context}");
        }
        if !self.serving.skip.is_empty() {
            line += &format!(" --skip-layers {}", self.serving.skip);
        }
        line
    }
}
