//! What configs say of multi-head latent attention.

use super::families::MlaRule;
use super::keys::{Keys, MAX_D_MODEL, refuse};
use super::mla::Mla;
use super::spec::RopeLayout;
use crate::error::{Error, Result};
use serde_json::Value;

impl Keys<'_> {
    /// The sizes of latent attention.
    pub(super) fn mla(&self, rule: &MlaRule, d_model: usize, heads: usize) -> Result<Mla> {
        let size = |key: &str, default: usize| Ok::<_, Error>(self.count(key, MAX_D_MODEL)?.unwrap_or(default));
        let none = self.map.get("q_lora_rank").is_some_and(Value::is_null);
        let q_rank = self.count("q_lora_rank", MAX_D_MODEL)?.or(rule.q_rank.filter(|_| !none));
        let kv_rank = size("kv_lora_rank", rule.kv_rank)?;
        let factor = |rank: usize| if rule.scaled_latents { (d_model as f64 / rank as f64).sqrt() } else { 1.0 };
        let mla = Mla {
            q_rank,
            kv_rank,
            d_nope: size("qk_nope_head_dim", rule.d_nope)?,
            d_rope: size("qk_rope_head_dim", rule.d_rope)?,
            d_value: size("v_head_dim", rule.d_value.unwrap_or(d_model / heads))?,
            q_factor: q_rank.map_or(1.0, factor),
            kv_factor: factor(kv_rank),
        };
        if !mla.d_rope.is_multiple_of(2) {
            let rule = format_args!("`qk_rope_head_dim` must be even, got {}", mla.d_rope);
            return Err(Error::format(self.file, rule));
        }
        mla.check().map_err(|rule| Error::format(self.file, rule))?;
        let width = mla.d_nope + mla.d_rope;
        match self.count("qk_head_dim", MAX_D_MODEL)? {
            Some(stated) if stated != width => {
                let rule = format_args!(
                    "`qk_head_dim`: expected {width} (`qk_nope_head_dim` + `qk_rope_head_dim`), got {stated}"
                );
                Err(Error::format(self.file, rule))
            }
            _ => Ok(mla),
        }
    }

    /// Which channels rotate together, where a key says so.
    pub(super) fn mla_layout(&self, rule: &MlaRule, layout: RopeLayout) -> Result<RopeLayout> {
        match self.flag("rope_interleave")? {
            Some(false) if rule.may_split => Ok(RopeLayout::HalfSplit),
            Some(stated) if stated != (layout == RopeLayout::Interleaved) => {
                let rule = format_args!(
                    "`rope_interleave` = {stated} is refused: it is unknown whether this family reads the key"
                );
                Err(refuse(self.file, rule))
            }
            _ => Ok(layout),
        }
    }

    /// What YaRN multiplies the softmax scale by: `(0.1 mscale_all_dim ln(factor) + 1)^2`.
    pub(super) fn yarn_scale(&self) -> Result<f64> {
        let mut largest: f64 = 1.0;
        for key in ["rope_parameters", "rope_scaling"] {
            let Some(map) = self.object(key)? else { continue };
            let settings = Keys { map, file: self.file };
            let kind = settings.text("rope_type")?.or(settings.text("type")?);
            let all = settings.number("mscale_all_dim")?.unwrap_or(0.0);
            if all == 0.0 || kind.is_none_or(|kind| kind == "default") {
                continue;
            }
            let missing =
                || Error::format(self.file, format_args!("`factor` is missing, which `mscale_all_dim` needs"));
            let factor = settings.positive("factor")?.ok_or_else(missing)?;
            // Where both generations of keys are there, the larger covers both.
            largest = largest.max((0.1 * all * factor.ln() + 1.0).powi(2));
        }
        Ok(largest)
    }
}
