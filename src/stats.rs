//! What an attention call reports back.

mod step_words;

pub use step_words::{CastWords, LogitWords, StepWords, ordered, stats_words, unordered};

use serde::{Deserialize, Serialize};

/// Statistics of one attention call in one layer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepStats {
    /// Logits before the softmax, per query head (`n_q`).
    pub logits: Vec<LogitStats>,
    /// Queries per query head (`n_q`).
    pub q: Vec<CastStats>,
    /// Keys per KV head (`n_kv`).
    pub k: Vec<CastStats>,
    /// Values per KV head (`n_kv`).
    pub v: Vec<CastStats>,
    /// Output per query head (`n_q`).
    pub o: Vec<CastStats>,
}

/// One tensor's share of one head, seen at its cast to FP8.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CastStats {
    /// Largest |x| before scaling (NaN if any x is NaN).
    pub amax: f32,
    /// Values with |x / descale| above the format's maximum (448): overflow.
    pub overflow: u64,
    /// Values with |x / descale| past the last rounding boundary (464): they leave the format even by rounding.
    pub beyond_rounding: u64,
    /// NaN or infinite values.
    pub non_finite: u64,
    /// Values cast.
    pub count: u64,
}

/// Logits of one query head that the mask kept.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LogitStats {
    /// Largest logit; `-inf` when there was none.
    pub max: f32,
    /// Smallest logit; `+inf` when there was none.
    pub min: f32,
    /// Largest logit before the soft-cap; `max` without one.
    #[serde(default = "lowest")]
    pub raw_max: f32,
    /// Smallest logit before the soft-cap; `min` without one.
    #[serde(default = "highest")]
    pub raw_min: f32,
    /// Logits with |x / descale| > 448 (0 unless logits pass through E4M3 or counting was asked for).
    pub overflow: u64,
    /// Logits with |x / descale| > 464.
    pub beyond_rounding: u64,
    /// NaN or infinite logits.
    pub non_finite: u64,
    /// Logits that the mask kept.
    pub count: u64,
}

/// Sums over tokens of the keys and values of one call, before anything is subtracted: `d` values of each KV head.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct KvSums {
    /// Tokens summed.
    pub tokens: u64,
    /// Of keys.
    pub k: Vec<Vec<f64>>,
    /// Of values.
    pub v: Vec<Vec<f64>>,
}

fn lowest() -> f32 {
    f32::NEG_INFINITY
}

fn highest() -> f32 {
    f32::INFINITY
}

impl Default for LogitStats {
    fn default() -> Self {
        Self {
            max: f32::NEG_INFINITY,
            min: f32::INFINITY,
            raw_max: f32::NEG_INFINITY,
            raw_min: f32::INFINITY,
            overflow: 0,
            beyond_rounding: 0,
            non_finite: 0,
            count: 0,
        }
    }
}

impl LogitStats {
    /// Largest |logit|; 0 when there was none.
    pub fn amax(&self) -> f32 {
        if self.count == 0 { 0.0 } else { self.max.abs().max(self.min.abs()) }
    }
}

impl From<&StepWords> for StepStats {
    /// What a call on a GPU left in device memory. It does not count values: an entry has 1 where something was seen, and
    /// 0 otherwise. NaN and infinite logits are not counted either.
    fn from(words: &StepWords) -> Self {
        let cast = |w: &CastWords| CastStats {
            amax: f32::from_bits(w.amax),
            overflow: w.overflow.into(),
            beyond_rounding: w.beyond_rounding.into(),
            non_finite: w.non_finite.into(),
            count: u64::from(*w != CastWords::default()),
        };
        let row = |heads: &[CastWords]| heads.iter().map(cast).collect();
        Self {
            logits: words
                .logits
                .iter()
                .map(|w| match w.max {
                    0 => LogitStats { overflow: w.overflow.into(), ..LogitStats::default() },
                    max => LogitStats {
                        max: unordered(max),
                        min: unordered(!w.min),
                        raw_max: unordered(max),
                        raw_min: unordered(!w.min),
                        overflow: w.overflow.into(),
                        count: 1,
                        ..LogitStats::default()
                    },
                })
                .collect(),
            q: row(&words.q),
            k: row(&words.k),
            v: row(&words.v),
            o: words.logits.iter().map(|w| cast(&CastWords { amax: w.amax_o, ..CastWords::default() })).collect(),
        }
    }
}
