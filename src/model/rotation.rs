//! The rotary position embedding of every layer: layout, rotated share, attention factor and angles.
//!
//! Bounds need the first three. The angles are for a forward and centers, and are left out where they depend on the
//! length of the sequence (dynamic scaling, LongRoPE); `range` then says how fast a pair turns at most.

use super::families::{Count, Family, Pattern, RopeLayers, RopeRule, RotaryShare, TemperatureRule};
use super::keys::{Keys, MAX_D_MODEL, MAX_LAYERS, MAX_POSITIONS, refuse, shorten};
use super::spec::{Rope, RopeRange};
use crate::error::{Error, Result};
use serde_json::{Map, Value};
use std::f64::consts::PI;

impl<'a> Keys<'a> {
    /// The rotation of each layer.
    pub fn rope(
        &self,
        family: &Family,
        layers: usize,
        (d_head, full_width): (usize, usize),
        max_positions: Option<usize>,
    ) -> Result<Vec<Option<Rope>>> {
        let RopeRule::Rotary { layout, theta_keys, theta, share, layers: rule, longrope_names } = &family.rope else {
            return Ok(vec![None; layers]);
        };
        let nested = |kind: &str| -> Result<Option<Keys<'a>>> {
            let Some(map) = self.object("rope_parameters")? else { return Ok(None) };
            let all = Keys { map, file: self.file };
            Ok(all.object(kind)?.map(|map| Keys { map, file: self.file }))
        };
        // The settings of one kind of layer: the nested set, else the common one, else `rope_scaling`.
        let common = match self.object("rope_parameters")? {
            Some(map) => Some(map),
            None => self.object("rope_scaling")?,
        };
        let common = common.map(|map| Keys { map, file: self.file });
        let known_growth = |settings: &Map<String, Value>| {
            let beta = "llama_4_scaling_beta";
            if settings.get(beta).is_some_and(|beta| !beta.is_null())
                && family.temperature != TemperatureRule::Ministral3
            {
                let rule = format_args!("`{beta}` is refused: no query scaling is known for this family");
                return Err(refuse(self.file, rule));
            }
            Ok(())
        };
        let mut base = None;
        for key in theta_keys.iter().chain(&["rope_theta"]) {
            if base.is_none() && !self.get(key).is_some_and(Value::is_object) {
                base = self.positive(key)?;
            }
        }
        let with_base = |settings: Option<Keys<'a>>, base: Option<f64>, d_head: usize| -> Result<Rope> {
            let dims = self.rotated(settings, share, d_head)?;
            for &dim in &dims {
                if dim == 0 || !dim.is_multiple_of(2) || dim > d_head {
                    return Err(Error::format(
                        self.file,
                        format_args!("the number of rotated channels must be even and from 2 to {d_head}, got {dim}"),
                    ));
                }
            }
            let rotary_dim = dims[0];
            for key in ["rotary_dim", "attn_rotary_emb"] {
                if let Some(stated) = self.count(key, MAX_D_MODEL)?
                    && stated != rotary_dim
                {
                    let rule =
                        format_args!("`{key}` is {stated}, but the other keys give {rotary_dim} rotated channels");
                    return Err(Error::format(self.file, rule));
                }
            }
            let angles = Angles { base, rotary_dim, max_positions };
            let mut scaled = match settings {
                Some(settings) => {
                    known_growth(settings.map)?;
                    angles.scaled(settings, *self, longrope_names)?
                }
                None => Scaled::exact(1.0, angles.plain()),
            };
            // Releases differ on which of the two keys counts, or update one by the other: the largest factor covers all.
            for map in self.other_readings(settings)? {
                let other = Keys { map: &map, file: self.file };
                known_growth(&map)?;
                let dims_of_other = self.rotated(Some(other), share, d_head)?;
                if dims_of_other != dims {
                    let rule = format_args!(
                        "`rope_parameters` rotates {rotary_dim} channels, but `rope_scaling` {}",
                        dims_of_other[0]
                    );
                    return Err(Error::format(self.file, rule));
                }
                let base = other.positive("rope_theta")?.or(base);
                scaled = scaled.or(Angles { base, ..angles }.scaled(other, *self, longrope_names)?);
            }
            if scaled.factor != 1.0 && dims.len() > 1 {
                let rule = "a scaled rotation is refused if keys disagree on the number of rotated channels";
                return Err(refuse(self.file, rule));
            }
            if scaled.angles.iter().chain(&scaled.fastest).flatten().any(|angle| !angle.is_finite()) {
                return Err(Error::format(self.file, "the RoPE base and factors give angles that are not finite"));
            }
            let (attention_factor, range) = (scaled.factor, scaled.range());
            let other_dims = dims[1..].to_vec();
            Ok(Rope { rotary_dim, other_dims, layout: *layout, attention_factor, inv_freq: scaled.angles, range })
        };
        let wide = |settings: Option<Keys<'a>>, base: Option<f64>, d_head: usize| -> Result<Rope> {
            let inner = settings.map_or(Ok(None), |s| s.positive("rope_theta"))?;
            with_base(settings, inner.or(base), d_head)
        };
        let make = |settings: Option<Keys<'a>>, base: Option<f64>| wide(settings, base, d_head);
        let perhaps = |rope: &Rope| match rule {
            RopeLayers::Perhaps => {
                let range = rope.range.clone().map(|range| RopeRange { least_factor: 1.0, ..range });
                either(rope, &Rope { attention_factor: 1.0, range, ..rope.clone() })
            }
            _ => rope.clone(),
        };
        let nested_sets = (nested("full_attention")?, nested("sliding_attention")?);
        let is_nested = nested_sets.0.is_some() || nested_sets.1.is_some();
        let common_base = base.or(*theta);
        match rule {
            RopeLayers::ByType { pattern, local_theta } => {
                let mut readings = self.full_layer_readings(layers, pattern)?;
                if family.global_heads {
                    readings.iter_mut().filter_map(|types| types.last_mut()).for_each(|last| *last = true);
                }
                let local = match local_theta {
                    Some((key, default)) => Some(self.positive(key)?.unwrap_or(*default)),
                    None => common_base,
                };
                let mut full = wide(if is_nested { nested_sets.0 } else { common }, common_base, full_width)?;
                let flat = !is_nested && self.object("rope_parameters")?.is_some_and(|map| !map.is_empty());
                if flat {
                    // Some releases do not read these settings.
                    full = either(&full, &with_base(None, common_base, full_width)?);
                }
                let sliding = make(nested_sets.1, local)?;
                let of = |layer: usize| {
                    let one = |types: &Vec<bool>| if types[layer] { full.clone() } else { sliding.clone() };
                    readings.iter().map(one).reduce(|a, b| either(&a, &b))
                };
                Ok((0..layers).map(of).collect())
            }
            _ if is_nested => {
                let types = self.layer_types(layers)?.ok_or_else(|| {
                    Error::format(self.file, "`rope_parameters` differ by layer type, but `layer_types` is missing")
                })?;
                if !matches!(rule, RopeLayers::Same | RopeLayers::Perhaps) {
                    return Err(refuse(
                        self.file,
                        "`rope_parameters` by layer type are refused in a model that also has layers without rotation",
                    ));
                }
                let (full, sliding) = (make(nested_sets.0, common_base)?, make(nested_sets.1, common_base)?);
                Ok(types.iter().map(|is_full| Some(perhaps(if *is_full { &full } else { &sliding }))).collect())
            }
            RopeLayers::If(key, value) if self.text(key)? != Some(value) => Ok(vec![None; layers]),
            RopeLayers::Same | RopeLayers::Perhaps | RopeLayers::If(..) => {
                Ok(vec![Some(perhaps(&make(common, common_base)?)); layers])
            }
            RopeLayers::Bases(key) => {
                let Some(list) = self.array(key)? else { return Ok(vec![Some(make(common, common_base)?); layers]) };
                if list.len() != layers {
                    let rule = format_args!("`{key}` has {} entries for {layers} layers", list.len());
                    return Err(Error::format(self.file, rule));
                }
                let rope = |base: &Value| match base.as_f64() {
                    Some(0.0) => Ok(None),
                    Some(base) if base > 0.0 => with_base(common, Some(base), d_head).map(Some),
                    _ => Err(self.wrong(key, "a list of non-negative numbers", base)),
                };
                list.iter().map(rope).collect()
            }
            RopeLayers::Sliding { pattern, or_all } => {
                let rope = make(common, common_base)?;
                if *or_all && self.map.get("sliding_window").is_some_and(Value::is_null) {
                    return Ok(vec![Some(rope); layers]);
                }
                let full = self.full_layers(layers, pattern)?;
                Ok(full.into_iter().map(|full| (!full).then(|| rope.clone())).collect())
            }
            RopeLayers::NoRope { interval: (key, default) } => {
                let rope = make(common, common_base)?;
                let rotated: Vec<bool> = match self.array("no_rope_layers")?.filter(|list| !list.is_empty()) {
                    Some(list) => {
                        if list.len() < layers {
                            return Err(Error::format(
                                self.file,
                                format_args!("`no_rope_layers` has {} entries for {layers} layers", list.len()),
                            ));
                        }
                        let bit = |v: &Value| match v.as_u64() {
                            Some(bit @ (0 | 1)) => Ok(bit == 1),
                            _ => Err(self.wrong("no_rope_layers", "a list of 0 and 1", v)),
                        };
                        list[..layers].iter().map(bit).collect::<Result<_>>()?
                    }
                    None => {
                        let every = self.count(key, MAX_LAYERS)?.unwrap_or(*default);
                        (0..layers).map(|layer| (layer + 1) % every != 0).collect()
                    }
                };
                Ok(rotated.into_iter().map(|yes| yes.then(|| rope.clone())).collect())
            }
        }
    }

    /// What else the rotation's settings may be where both generations of keys are there: the other dictionary alone, or
    /// either updated by the other.
    fn other_readings(&self, settings: Option<Keys<'_>>) -> Result<Vec<Map<String, Value>>> {
        let (Some(_), Some(scaling)) = (self.object("rope_parameters")?, self.object("rope_scaling")?) else {
            return Ok(vec![]);
        };
        let own = settings.map(|settings| settings.map.clone()).unwrap_or_default();
        let updated = |mut base: Map<String, Value>, by: &Map<String, Value>| {
            base.extend(by.clone());
            base
        };
        Ok(vec![scaling.clone(), updated(own.clone(), scaling), updated(scaling.clone(), &own)])
    }

    /// Rotated channels of a head, by each reading of the keys; the first is the model's own.
    fn rotated(&self, settings: Option<Keys<'_>>, rule: &RotaryShare, d_head: usize) -> Result<Vec<usize>> {
        const COMMON: &str = "partial_rotary_factor";
        // Of a whole head's pairs the later ones turn by nothing.
        if settings.is_some_and(|s| s.map.get("rope_type").is_some_and(|kind| kind == "proportional")) {
            return Ok(vec![d_head]);
        }
        let (keys, default): (&[&str], f64) = match rule {
            RotaryShare::Fixed => return Ok(vec![d_head]),
            RotaryShare::Whole => (&[COMMON], 1.0),
            RotaryShare::Part(keys, default) => (keys, *default),
            RotaryShare::Channels(key, default) => {
                let default = if self.map.contains_key(*key) { d_head } else { *default };
                let count = self.count(key, MAX_D_MODEL)?.unwrap_or(default);
                if count > d_head {
                    let rule =
                        format_args!("`{key}` is {count} ({default} by default), but a head has {d_head} channels");
                    return Err(Error::format(self.file, rule));
                }
                let nested = settings.map_or(Ok(None), |settings| settings.positive(COMMON))?;
                let shared = match nested.or(self.positive(COMMON)?) {
                    Some(_) => self.rotated(settings, &RotaryShare::Part(&[COMMON], 1.0), d_head)?,
                    None => vec![],
                };
                return Ok(distinct([count].into_iter().chain(shared)));
            }
            RotaryShare::ChannelsOrShare(key) => {
                let counted = self.count(key, MAX_D_MODEL)?;
                let shared = self.rotated(settings, &RotaryShare::Part(&[COMMON], 1.0), d_head)?;
                return Ok(distinct(counted.into_iter().chain(shared).chain([d_head])));
            }
        };
        let mut share = settings.map_or(Ok(None), |settings| settings.positive(COMMON))?;
        if let Some(key) = keys.first().filter(|_| share.is_none()) {
            share = self.positive(key)?;
        }
        // For some releases null is the whole head, for others the default.
        let null = |key: &&&str| self.map.get(**key).is_some_and(Value::is_null);
        if let Some(key) = keys.iter().find(null).filter(|_| share.is_none() && default != 1.0) {
            return Err(Error::format(self.file, format_args!("`{key}` must not be null")));
        }
        if let (RotaryShare::Part([], _), Some(stated)) = (rule, self.positive(COMMON)?)
            && stated != share.unwrap_or(default)
        {
            let rule = format_args!("`{COMMON}`: expected {default} (fixed in this family), got {stated}");
            return Err(refuse(self.file, rule));
        }
        let mut shares = vec![share.unwrap_or(default)];
        for key in keys {
            shares.extend(self.positive(key)?);
        }
        if let Some(share) = shares.iter().find(|share| **share > 1.0) {
            return Err(Error::format(
                self.file,
                format_args!("the rotated share of a head must be at most 1, got {share}"),
            ));
        }
        if matches!(rule, RotaryShare::Whole)
            && let Some(share) = shares.iter().find(|share| **share != 1.0)
        {
            return Err(refuse(
                self.file,
                format_args!("the rotated share of a head must be 1 in this family, got {share}"),
            ));
        }
        // Truncated towards zero, as the reference implementation does.
        Ok(distinct(shares.into_iter().map(|share| (d_head as f64 * share) as usize)))
    }

    /// By each key of the pattern: the first or its default, and every other that is there.
    fn full_layer_readings(&self, layers: usize, pattern: &Pattern) -> Result<Vec<Vec<bool>>> {
        let keys = pattern.keys;
        let mut readings = vec![self.full_layers(layers, &Pattern { keys: &keys[..keys.len().min(1)], ..*pattern })?];
        for key in keys.iter().skip(1).filter(|key| self.get(key).is_some()) {
            readings.push(self.full_layers(layers, &Pattern { keys: std::slice::from_ref(key), ..*pattern })?);
        }
        Ok(readings)
    }

    /// Which layers are full ones: `layer_types`, else one of so many.
    pub(super) fn full_layers(&self, layers: usize, pattern: &Pattern) -> Result<Vec<bool>> {
        if let Some(types) = self.layer_types(layers)? {
            return Ok(types);
        }
        let every = self.size(&Count { keys: pattern.keys, default: Some(pattern.every) }, MAX_LAYERS)?;
        Ok((0..layers).map(|layer| layer % every == if pattern.first { 0 } else { every - 1 }).collect())
    }
}

/// Each of them once, in order.
fn distinct(dims: impl IntoIterator<Item = usize>) -> Vec<usize> {
    let mut out = Vec::new();
    for dim in dims {
        if !out.contains(&dim) {
            out.push(dim);
        }
    }
    out
}

/// A rotation that bounds either of two: they turn the same channels. The largest factor counts.
fn either(a: &Rope, b: &Rope) -> Rope {
    let scaled = Scaled::of(a).or(Scaled::of(b));
    let range = scaled.range();
    Rope { attention_factor: scaled.factor, inv_freq: scaled.angles, range, ..a.clone() }
}

/// A rotation as a forward takes it, and what else it may be by other readings of the config or at other lengths.
struct Scaled {
    /// Attention factor, the largest, and the smallest.
    factor: f64,
    least: f64,
    /// Angles per position, where there is one set; the largest that they can be, where that is known.
    angles: Option<Vec<f64>>,
    fastest: Option<Vec<f64>>,
    /// How many times `max_position_embeddings` engines take for the longest sequence.
    stretch: f64,
}

impl Scaled {
    fn exact(factor: f64, angles: Option<Vec<f64>>) -> Self {
        Self { factor, least: factor, fastest: angles.clone(), angles, stretch: 1.0 }
    }

    fn of(rope: &Rope) -> Self {
        let exact = Self::exact(rope.attention_factor, rope.inv_freq.clone());
        match rope.range.clone() {
            None => exact,
            Some(RopeRange { fastest, least_factor, stretch }) => {
                Self { fastest, least: least_factor, stretch, ..exact }
            }
        }
    }

    /// Either of two.
    fn or(self, other: Self) -> Self {
        let largest = |(a, b): (Vec<f64>, Vec<f64>)| a.into_iter().zip(b).map(|(a, b)| a.max(b)).collect();
        Self {
            factor: self.factor.max(other.factor),
            least: self.least.min(other.least),
            angles: self.angles.filter(|angles| other.angles.as_ref() == Some(angles)),
            fastest: self.fastest.zip(other.fastest).map(largest),
            stretch: self.stretch.max(other.stretch),
        }
    }

    fn range(&self) -> Option<RopeRange> {
        let exact = self.angles == self.fastest && self.least == self.factor && self.stretch == 1.0;
        let range = RopeRange { fastest: self.fastest.clone(), least_factor: self.least, stretch: self.stretch };
        (!exact).then_some(range)
    }
}

/// What the angles of a rotation come from.
#[derive(Clone, Copy)]
struct Angles {
    base: Option<f64>,
    rotary_dim: usize,
    max_positions: Option<usize>,
}

impl Angles {
    /// base^(-2b / rotary_dim).
    fn plain(&self) -> Option<Vec<f64>> {
        let base = self.base?;
        let dim = self.rotary_dim as f64;
        Some((0..self.rotary_dim / 2).map(|b| base.powf(-2.0 * b as f64 / dim)).collect())
    }

    /// A scaled rotation.
    fn scaled(&self, settings: Keys<'_>, config: Keys<'_>, longrope_names: &[&str]) -> Result<Scaled> {
        let kind = match settings.text("rope_type")? {
            Some(kind) => kind,
            None => settings.text("type")?.unwrap_or("default"),
        };
        let kind = if longrope_names.contains(&kind) { "longrope" } else { kind };
        let mut scaled = self.scaled_by(kind, settings, config)?;
        if kind != "default" {
            // Phi-MoE: one within the original length, the other beyond it. In other families some engines take them and some
            // do not. The largest covers all.
            let scales = [settings.positive("short_mscale")?, settings.positive("long_mscale")?];
            for factor in scales.into_iter().flatten() {
                (scaled.factor, scaled.least) = (scaled.factor.max(factor), scaled.least.min(factor));
            }
            scaled.angles = scaled.angles.filter(|_| scales[0] == scales[1]);
        }
        // Pairs that turn by different axes of a position have no one set of angles; bounds hold for any.
        let several_axes = settings.get("mrope_section").is_some();
        scaled.angles = scaled.angles.filter(|_| !several_axes);
        checked(settings, scaled.factor)?;
        Ok(scaled)
    }

    fn scaled_by(&self, kind: &str, settings: Keys<'_>, config: Keys<'_>) -> Result<Scaled> {
        match kind {
            "mrope" if settings.get("mrope_section").is_some() => Ok(Scaled::exact(1.0, self.plain())),
            "default" => Ok(Scaled::exact(1.0, self.plain())),
            "linear" => {
                let factor = required(settings, "factor")?;
                let angles = self.plain().map(|angles| angles.into_iter().map(|w| w / factor).collect());
                Ok(Scaled { stretch: factor.max(1.0), ..Scaled::exact(1.0, angles) })
            }
            "proportional" => {
                let share = settings.positive("partial_rotary_factor")?.unwrap_or(1.0);
                let factor = settings.positive("factor")?.unwrap_or(1.0);
                let turned = (share * self.rotary_dim as f64 / 2.0).floor() as usize;
                let angle = |(b, w): (usize, f64)| if b < turned { w / factor } else { 0.0 };
                let angles = self.plain().map(|angles| angles.into_iter().enumerate().map(angle).collect());
                Ok(Scaled { stretch: factor.max(1.0), ..Scaled::exact(1.0, angles) })
            }
            "dynamic" => match settings.positive("alpha")? {
                // HunYuan: one larger base for every length.
                Some(alpha) => {
                    let dim = self.rotary_dim as f64;
                    let base = self.base.map(|base| base * alpha.powf(dim / (dim - 2.0)));
                    let stretch = settings.positive("factor")?.unwrap_or(1.0).max(1.0);
                    Ok(Scaled { stretch, ..Scaled::exact(1.0, Self { base, ..*self }.plain()) })
                }
                // The base grows with the length of the sequence, so there is no one set of angles.
                None => {
                    let stretch = settings.positive("factor")?.unwrap_or(1.0).max(1.0);
                    Ok(Scaled { angles: None, stretch, ..Scaled::exact(1.0, self.plain()) })
                }
            },
            "llama3" => {
                let angles = self.llama3(settings, config)?;
                Ok(Scaled { fastest: angles.clone().or_else(|| self.plain()), ..Scaled::exact(1.0, angles) })
            }
            "yarn" => self.yarn(settings, config),
            "longrope" => {
                let (factor, least) = self.longrope_factor(settings, config)?;
                Ok(Scaled { least, ..Scaled::exact(factor, None) })
            }
            other => {
                let rule = format_args!(
                    "unknown `rope_type` `{}`: expected default, linear, proportional, dynamic, llama3, yarn, longrope, \
                     or mrope with `mrope_section`",
                    shorten(other)
                );
                Err(refuse(settings.file, rule))
            }
        }
    }

    /// The length before it was stretched. It stands among the rotation's settings or beside them, and releases differ on
    /// which counts.
    fn originals(&self, settings: Keys<'_>, config: Keys<'_>) -> Result<Vec<usize>> {
        let [own, beside] = [settings.count(ORIGINAL, MAX_POSITIONS)?, config.count(ORIGINAL, MAX_POSITIONS)?];
        Ok(own.into_iter().chain(beside.filter(|length| own != Some(*length))).collect())
    }

    fn llama3(&self, settings: Keys<'_>, config: Keys<'_>) -> Result<Option<Vec<f64>>> {
        let factor = required(settings, "factor")?;
        let low = required(settings, "low_freq_factor")?;
        let high = required(settings, "high_freq_factor")?;
        if high <= low {
            return Err(Error::format(settings.file, "`high_freq_factor` must be greater than `low_freq_factor`"));
        }
        let original = match self.originals(settings, config)?[..] {
            [] => required(settings, ORIGINAL)?,
            [original] => original as f64,
            _ => return Ok(None),
        };
        let scale = |w: f64| {
            // Turns within the original length: few turns are stretched, many are kept, between the two is a blend.
            let turns = original * w / (2.0 * PI);
            let keep = ((turns - low) / (high - low)).clamp(0.0, 1.0);
            w * keep + w / factor * (1.0 - keep)
        };
        Ok(self.plain().map(|angles| angles.into_iter().map(scale).collect()))
    }

    fn yarn(&self, settings: Keys<'_>, config: Keys<'_>) -> Result<Scaled> {
        let stated = settings.positive("factor")?;
        let mut originals = self.originals(settings, config)?;
        if originals.is_empty() {
            originals.extend(self.max_positions);
        }
        let ratio = |original: &usize| Some(self.max_positions? as f64 / *original as f64);
        // Releases differ on whether `factor` or the ratio of the lengths counts: the largest covers all.
        let factors: Vec<f64> = stated.into_iter().chain(originals.iter().filter_map(ratio)).collect();
        let Some(&factor) = factors.first() else {
            return Err(Error::format(settings.file, "`factor` is missing from the YaRN settings"));
        };
        let magnitude = |factor: f64, m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 };
        // Zero switches these off, as absence does.
        let m = settings.number("mscale")?.filter(|m| *m != 0.0);
        let all = settings.number("mscale_all_dim")?.filter(|m| *m != 0.0);
        let by = |factor: &f64| match (m, all) {
            (Some(m), Some(all)) => magnitude(*factor, m) / magnitude(*factor, all),
            // Some engines take `mscale` by itself.
            (Some(m), None) => magnitude(*factor, m).max(magnitude(*factor, 1.0)),
            _ => magnitude(*factor, 1.0),
        };
        let (attention_factor, least) = match settings.positive("attention_factor")? {
            Some(factor) => (factor, factor),
            None => {
                let by = factors.iter().map(by).map(|factor| checked(settings, factor));
                by.collect::<Result<Vec<_>>>()?
                    .into_iter()
                    .fold((0.0, f64::INFINITY), |(most, least): (f64, f64), factor| {
                        (most.max(factor), least.min(factor))
                    })
            }
        };
        // By one factor or another a pair turns no faster than it did before.
        let stretching = factors.iter().all(|factor| *factor >= 1.0);
        let stretch = factors.iter().copied().fold(1.0, f64::max);
        let unsure = |angles: Option<Vec<f64>>| Scaled {
            fastest: self.plain().filter(|_| stretching),
            least,
            stretch,
            ..Scaled::exact(attention_factor, angles)
        };
        let (Some(angles), &[original]) = (self.plain(), &originals[..]) else { return Ok(unsure(None)) };
        let base = self.base.unwrap_or(1.0);
        let fast = settings.positive("beta_fast")?.unwrap_or(32.0);
        let slow = settings.positive("beta_slow")?.unwrap_or(1.0);
        let dim = self.rotary_dim as f64;
        // The pair that turns `turns` times within the original length.
        let pair = |turns: f64| dim * (original as f64 / (turns * 2.0 * PI)).ln() / (2.0 * base.ln());
        let (mut low, mut high) = (pair(fast), pair(slow));
        if settings.flag("truncate")?.unwrap_or(true) {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, mut high) = (low.max(0.0), high.min(dim - 1.0));
        if low == high {
            high += 0.001;
        }
        let scale = |(b, w): (usize, f64)| {
            let stretch = ((b as f64 - low) / (high - low)).clamp(0.0, 1.0);
            w / factor * stretch + w * (1.0 - stretch)
        };
        let angles: Vec<f64> = angles.into_iter().enumerate().map(scale).collect();
        // A base of 1 leaves no pair to interpolate between; the bounds do not need the angles.
        let angles = angles.iter().all(|w| w.is_finite()).then_some(angles);
        if factors.iter().any(|other| *other != factor) {
            return Ok(unsure(angles));
        }
        Ok(Scaled { stretch, ..Scaled::exact(attention_factor, angles) })
    }

    /// The largest and the smallest.
    fn longrope_factor(&self, settings: Keys<'_>, config: Keys<'_>) -> Result<(f64, f64)> {
        if let Some(factor) = settings.positive("attention_factor")? {
            return Ok((factor, factor));
        }
        let Some(max) = self.max_positions else {
            return Err(Error::format(settings.file, "`max_position_embeddings` is missing, which LongRoPE needs"));
        };
        let mut originals = self.originals(settings, config)?;
        let stated =
            if originals.is_empty() { Some(required(settings, "factor")?) } else { settings.positive("factor")? };
        if originals.is_empty() {
            originals.push(max);
        }
        let mut largest: f64 = 1.0;
        for original in originals {
            // Releases differ on whether `factor` or the ratio of the lengths counts: the larger covers both.
            let factor = (max as f64 / original as f64).max(stated.unwrap_or(1.0));
            if factor > 1.0 && original < 2 {
                return Err(Error::format(settings.file, format_args!("`{ORIGINAL}` must be at least 2")));
            }
            if factor > 1.0 {
                largest = largest.max((1.0 + factor.ln() / (original as f64).ln()).sqrt());
            }
        }
        // It may be that of no stretch.
        Ok((largest, 1.0))
    }
}

/// The length that a stretched rotation was trained at.
const ORIGINAL: &str = "original_max_position_embeddings";

/// An attention factor, refused where it scales by nothing that a bound could be multiplied by.
fn checked(settings: Keys<'_>, factor: f64) -> Result<f64> {
    if factor.is_finite() && factor > 0.0 {
        return Ok(factor);
    }
    let rule = format_args!("the attention factor of RoPE must be finite and greater than 0, got {factor}");
    Err(Error::format(settings.file, rule))
}

fn required(settings: Keys<'_>, key: &str) -> Result<f64> {
    settings
        .positive(key)?
        .ok_or_else(|| Error::format(settings.file, format_args!("`{key}` is missing from the RoPE settings")))
}
