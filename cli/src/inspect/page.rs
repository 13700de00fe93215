//! The page of a checkpoint: sigma per layer and head, as the paper's Figure 1, and the numbers behind it.

use crate::html::{Figure, Made, Page, Tone, table};
use crate::model::headline;
use crate::svg::{Anchor, Axis, Cell, Map, Svg, extremes, label};
use crate::table::{brief, short};
use crate::terminal::toned;
use sigmascale::calibrate::{HeadInspection as Head, Inspection, LayerInspection as Layer};
use std::fmt::Write;

/// What tells the two bounds apart.
pub const BOUNDS: &str = "exact bound: largest |logit| of any normalized input in exact arithmetic. worst-case bound: the \
                          same with the rounding of a forward pass; logit descales come from it.";

/// The profile in a few sentences.
pub fn summary(inspection: &Inspection) -> String {
    let layers = &inspection.layers;
    let heads = || layers.iter().flat_map(|layer| layer.heads.iter().map(move |head| (layer, head)));
    let count = heads().count();
    let largest = |value: fn(&Head) -> Option<f64>| {
        heads().filter_map(|(l, h)| Some((value(h)?, l.number, h.head))).max_by(|a, b| a.0.total_cmp(&b.0))
    };
    let place = |(value, layer, head): (f64, usize, usize)| format!("{} (layer {layer}, head {head})", short(value));
    let Some(top) = largest(|head| head.sigma) else {
        let bound = largest(|head| head.bound_exact).map(place).unwrap_or_default();
        if inspection.model.mla.is_some() {
            return format!(
                "Latent attention (MLA): the logits of {count} heads are bounded through both projections of a head at once. In \
                 exact arithmetic the bound is at most {bound}."
            );
        }
        return format!(
            "q and k of all {count} heads are normalized after the projection, so the norms of the weights do not bound \
             the logits. The gains do: in exact arithmetic the bound is at most {bound}."
        );
    };
    let sigmas: Vec<f64> = heads().filter_map(|(_, head)| head.sigma).collect();
    let low = sigmas.iter().copied().fold(f64::INFINITY, f64::min);
    let mean = sigmas.iter().sum::<f64>() / sigmas.len() as f64;
    let mut out = format!(
        "Sigma of {count} heads in {} layers ranges from {} to {}, mean {}.",
        layers.len(),
        short(low),
        place(top),
        short(mean)
    );
    let folded: Vec<f64> =
        layers.iter().filter_map(|l| Some(l.sigma?.max / l.sigma_raw?.max)).filter(|ratio| ratio.is_finite()).collect();
    if folded.iter().any(|ratio| (ratio - 1.0).abs() > 1e-6) {
        let (low, high) = extremes(&folded);
        let _ = write!(out, " The norm's gain multiplies a layer's sigma by {} to {}.", short(low), short(high));
    }
    if let Some(top) = largest(|head| head.rope_ratio).filter(|top| top.0 > 1.0 + 1e-6) {
        let _ = write!(out, " Rotation can multiply a head's sigma by at most {}.", place(top));
    }
    let sums: Vec<f64> = layers.iter().filter_map(|l| Some(l.sigma_sum? / l.sigma_raw?.max)).collect();
    if !sums.is_empty() && sums.iter().all(|ratio| ratio.is_finite()) {
        let (low, high) = extremes(&sums);
        let _ = write!(
            out,
            " The paper's summed norm is {} to {} times that of the largest raw head.",
            short(low),
            short(high)
        );
    }
    out
}

/// The |logit| from which `diagnose` raises an alarm where q and k are in BF16 or FP8.
fn limit() -> f64 {
    sigmascale_lab::diagnose::Options::default().logit_limit
}

/// Every head that has a worst-case bound, with its layer; the largest first.
fn by_bound(inspection: &Inspection) -> Vec<(&Layer, &Head, f64)> {
    let heads = inspection.layers.iter().flat_map(|layer| layer.heads.iter().map(move |head| (layer, head)));
    let mut heads: Vec<_> = heads.filter_map(|(layer, head)| Some((layer, head, head.bound_rounded?))).collect();
    heads.sort_by(|a, b| b.2.total_cmp(&a.2));
    heads
}

/// How many heads can have logits that are too large for 8 and 16 bits, in a sentence.
pub fn verdict(inspection: &Inspection) -> Option<(Tone, String)> {
    let heads = by_bound(inspection);
    let (layer, head, bound) = heads.first()?;
    let (limit, place) = (limit(), format!("(layer {}, head {})", layer.number, head.head));
    let above = heads.iter().filter(|head| head.2 > limit).count();
    let (limit, bound, all) = (short(limit), short(*bound), heads.len());
    Some(match above {
        0 => (Tone::Good, format!("No normalized input gives a |logit| above {bound} {place}.")),
        _ => (
            Tone::Plain,
            format!(
                "{above} of {all} heads have a bound above {limit}, the |logit| from which BF16 and FP8 do not resolve logits. The \
                 largest is {bound} {place}. Whether a text reaches the bounds is not known."
            ),
        ),
    })
}

/// Headers of [`ranked`].
pub const RANKED: [&str; 8] =
    ["layer", "head", "worst case", "x median", "sigma", "x median", "stable rank", "RoPE ratio"];
/// Heads that are ranked.
const HEADS: usize = 10;

/// The heads with the largest bounds, and what makes them large: sigma relative to the model's median, and the rotation.
pub fn ranked(inspection: &Inspection) -> Vec<[String; 8]> {
    let heads = by_bound(inspection);
    let middle = |value: fn(&Head) -> Option<f64>| {
        let mut values: Vec<f64> = heads.iter().filter_map(|head| value(head.1)).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied()
    };
    let (bounds, sigmas) = (middle(|head| head.bound_rounded), middle(|head| head.sigma));
    let times = |value: Option<f64>, median: Option<f64>| {
        value
            .zip(median)
            .filter(|(_, median)| *median > 0.0)
            .map_or("-".to_owned(), |(value, median)| brief(value / median))
    };
    let row = |(layer, head, bound): &(&Layer, &Head, f64)| {
        let worst = if *bound > limit() { toned(Tone::Plain, &short(*bound)) } else { short(*bound) };
        [
            layer.number.to_string(),
            head.head.to_string(),
            worst,
            times(Some(*bound), bounds),
            short(head.sigma),
            times(head.sigma, sigmas),
            short(head.stable_rank),
            short(head.rope_ratio),
        ]
    };
    heads.iter().take(HEADS).map(row).collect()
}

/// The page.
pub fn render(inspection: &Inspection, made: &Made) -> String {
    let name = inspection.model.name.as_str();
    let line = headline(&inspection.model);
    let line = line.trim().strip_prefix(name).unwrap_or(&line).trim_start_matches([':', ' ']);
    let mut page = Page::new(&format!("Spectral profile of {name}"), line, &summary(inspection));
    let layers = &inspection.layers;
    if let Some((tone, text)) = verdict(inspection) {
        page.verdict(tone, &text);
    }
    let ranking = Figure::new(
        "Heads by worst-case bound",
        format!("The largest |logit| of any normalized input, rounding included; above {} in color.", short(limit())),
        table("", &RANKED, ranked(inspection).into_iter()),
    );
    let bounds = Figure::new(
        "Worst-case bound by layer and head",
        "Of |logit|. The scale is below the map.",
        heat_map(layers, |head| head.bound_rounded),
    );
    page.figures(&[ranking, bounds]);
    let has_sigma = layers.iter().any(|layer| layer.sigma.is_some());
    if has_sigma {
        page.figures(&[
            Figure::new(
                "Sigma by layer",
                "Filled: each head, with the norm's gain. Bar: their mean. Hollow: raw weights.",
                strip(layers, |head| head.sigma, |head| head.sigma_raw),
            ),
            Figure::new("Sigma by layer and head", "With the norm's gain.", heat_map(layers, |head| head.sigma)),
        ]);
        let mut more = vec![Figure::new(
            "Stable rank",
            "||M||_F^2 / ||M||^2 of M = W_Q W_K^T: 1 for a rank-one head.",
            heat_map(layers, |head| head.stable_rank),
        )];
        if inspection.model.rope.is_some() {
            more.push(Figure::new(
                "RoPE ratio",
                "Bound on the norm under rotation, divided by sigma: by how much RoPE can raise it.",
                heat_map(layers, |head| head.rope_ratio),
            ));
        }
        page.figures(&more);
    } else {
        page.figures(&[
            Figure::new(
                "Bound in exact arithmetic by layer",
                match inspection.model.mla {
                    Some(_) => "Each head. Bar: mean.",
                    None => "Each head, from the gains of its q and k norms. Bar: mean.",
                },
                strip(layers, |head| head.bound_exact, |_| None),
            ),
            Figure::new(
                "Bound in exact arithmetic by layer and head",
                "In exact arithmetic.",
                heat_map(layers, |head| head.bound_exact),
            ),
        ]);
    }
    let caption = format!("Over the heads of a layer. {BOUNDS}");
    page.figures(&[Figure::new("Numbers by layer", caption, numbers(layers))]);
    page.render(made)
}

fn numbers(layers: &[Layer]) -> String {
    let heads = [
        "layer",
        "sigma min",
        "mean",
        "max",
        "raw max",
        "stable rank mean",
        "RoPE ratio max",
        "sigma_sum",
        "exact bound",
        "worst-case bound",
    ];
    let row = |layer: &Layer| {
        [
            layer.number.to_string(),
            short(layer.sigma.map(|s| s.min)),
            short(layer.sigma.map(|s| s.mean)),
            short(layer.sigma.map(|s| s.max)),
            short(layer.sigma_raw.map(|s| s.max)),
            short(layer.stable_rank.map(|s| s.mean)),
            short(layer.rope_ratio.map(|s| s.max)),
            short(layer.sigma_sum),
            short(layer.bound_exact),
            short(layer.bound_rounded),
        ]
    };
    table("", &heads, layers.iter().map(row))
}

/// Every number of a head, for the tooltip.
fn details(layer: &Layer, head: &Head) -> String {
    let mut out = format!("layer {}, head {} (KV head {})", layer.number, head.head, head.kv_head);
    for (name, value) in [
        ("sigma", head.sigma),
        ("raw", head.sigma_raw),
        ("over rotations", head.sigma_rope),
        ("stable rank", head.stable_rank),
        ("exact bound", head.bound_exact),
        ("worst-case bound", head.bound_rounded),
    ] {
        if let Some(value) = value {
            let _ = write!(out, "\n{name} {value:.6}");
        }
    }
    out
}

/// Heads as dots over their layer, with the range and mean of the first series.
fn strip(layers: &[Layer], first: fn(&Head) -> Option<f64>, second: fn(&Head) -> Option<f64>) -> String {
    let values = layers.iter().flat_map(|l| &l.heads).flat_map(|h| [first(h), second(h)]).flatten();
    let axis = Axis::new(values, Some(0.0));
    let (left, top, height) = (44.0, 10.0, 250.0);
    let step = (540.0 / layers.len() as f64).clamp(15.0, 44.0);
    let width = left + step * layers.len() as f64 + 8.0;
    let y = |value: f64| top + height * (1.0 - axis.place(value));
    let mut svg = Svg::new(width, top + height + 38.0, "Values of every head by layer");
    svg.rows(&axis, (left, width), y);
    let every = (24.0 / step).ceil() as usize;
    for (place, layer) in layers.iter().enumerate() {
        let x = left + step * (place as f64 + 0.5);
        if place % every == 0 {
            svg.text((x, top + height + 16.0), Anchor::Middle, &layer.number.to_string());
        }
        let values: Vec<f64> = layer.heads.iter().filter_map(first).collect();
        if values.is_empty() {
            continue;
        }
        let (low, high) = extremes(&values);
        let mean = y(values.iter().sum::<f64>() / values.len() as f64);
        let (side, offset) = (step * 0.26, step * 0.12);
        svg.line("span", (x - offset, y(low)), (x - offset, y(high)));
        svg.line("mean", (x - offset - side, mean), (x - offset + side, mean));
        for head in &layer.heads {
            let about = details(layer, head);
            for (class, value, x) in [("second", second(head), x + offset), ("first", first(head), x - offset)] {
                if let Some(value) = value {
                    svg.dot(class, (x, y(value)), 3.0, &about);
                }
            }
        }
    }
    let scale = if axis.log { "layer; values on a log scale" } else { "layer" };
    svg.text((left, top + height + 32.0), Anchor::Start, scale);
    svg.finish()
}

/// One cell per head, layers downwards.
fn heat_map(layers: &[Layer], value: fn(&Head) -> Option<f64>) -> String {
    let axis = Axis::new(layers.iter().flat_map(|l| &l.heads).filter_map(value), None);
    let columns = layers.iter().map(|layer| layer.heads.len()).max().unwrap_or(0);
    let shade = |value: f64| 0.08 + 0.92 * axis.place(value);
    let ticks = axis.ticks().into_iter().map(|value| (label(value), shade(value))).collect();
    let map = Map {
        name: "A value for every layer and head",
        note: (32.0, "head"),
        rows: layers.iter().map(|layer| layer.number.to_string()).collect(),
        columns: (0..columns).map(|head| [String::new(), head.to_string()]).collect(),
        cell: (
            (470.0 / columns.max(1) as f64).clamp(10.0, 62.0),
            (480.0 / layers.len().max(1) as f64).clamp(10.0, 30.0),
        ),
        scale: ticks,
    };
    map.draw(|row, column| {
        let layer = &layers[row];
        let head = layer.heads.get(column)?;
        let value = value(head)?;
        Some(Cell { class: "cell", shade: shade(value), label: short(value), about: details(layer, head) })
    })
}
