//! The page of a checkpoint: sigma per layer and head, as the paper's Figure 1, and the numbers behind it.

use crate::html::{Figure, Made, Page, Tone, escape, scrolling};
use crate::model::headline;
use crate::svg::{Axis, extremes, label, open_svg};
use crate::table::short;
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

/// The page.
pub fn render(inspection: &Inspection, made: &Made) -> String {
    let name = inspection.model.name.as_str();
    let line = headline(&inspection.model);
    let line = line.trim().strip_prefix(name).unwrap_or(&line).trim_start_matches([':', ' ']);
    let mut page = Page::new(&format!("Spectral profile of {name}"), line, &summary(inspection));
    let layers = &inspection.layers;
    if let Some((bound, layer)) =
        layers.iter().filter_map(|layer| Some((layer.bound_rounded?, layer.number))).max_by(|a, b| a.0.total_cmp(&b.0))
    {
        let text =
            format!("No normalized input gives a |logit| above {}, rounding included (layer {layer}).", short(bound));
        page.verdict(Tone::Plain, &text);
    }
    let has_sigma = layers.iter().any(|layer| layer.sigma.is_some());
    if has_sigma {
        page.figures(&[
            Figure {
                title: "Sigma by layer".to_owned(),
                caption: "Filled: each head, with the norm's gain. Bar: their mean. Hollow: raw weights.".to_owned(),
                content: strip(layers, |head| head.sigma, |head| head.sigma_raw),
            },
            Figure {
                title: "Sigma by layer and head".to_owned(),
                caption: "With the norm's gain. A stronger color is a larger value.".to_owned(),
                content: heat_map(layers, |head| head.sigma),
            },
        ]);
        let mut more = vec![Figure {
            title: "Stable rank".to_owned(),
            caption: "||M||_F^2 / ||M||^2 of M = W_Q W_K^T: 1 for a rank-one head.".to_owned(),
            content: heat_map(layers, |head| head.stable_rank),
        }];
        if inspection.model.rope.is_some() {
            more.push(Figure {
                title: "RoPE ratio".to_owned(),
                caption: "Bound on the norm under rotation, divided by sigma: by how much RoPE can raise it."
                    .to_owned(),
                content: heat_map(layers, |head| head.rope_ratio),
            });
        }
        page.figures(&more);
    } else {
        page.figures(&[
            Figure {
                title: "Bound in exact arithmetic by layer".to_owned(),
                caption: match inspection.model.mla {
                    Some(_) => "Each head. Bar: mean.".to_owned(),
                    None => "Each head, from the gains of its q and k norms. Bar: mean.".to_owned(),
                },
                content: strip(layers, |head| head.bound_exact, |_| None),
            },
            Figure {
                title: "Bound in exact arithmetic by layer and head".to_owned(),
                caption: "A stronger color is a larger value.".to_owned(),
                content: heat_map(layers, |head| head.bound_exact),
            },
        ]);
    }
    page.figures(&[Figure {
        title: "Numbers by layer".to_owned(),
        caption: format!("Over the heads of a layer. {BOUNDS}"),
        content: numbers(layers),
    }]);
    page.render(made)
}

fn numbers(layers: &[Layer]) -> String {
    let head = [
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
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(layers.iter().map(|layer| {
        vec![
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
    }));
    scrolling("", &rows)
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
    escape(&out)
}

/// Heads as dots over their layer, with the range and mean of the first series.
fn strip(layers: &[Layer], first: fn(&Head) -> Option<f64>, second: fn(&Head) -> Option<f64>) -> String {
    let values = layers.iter().flat_map(|l| &l.heads).flat_map(|h| [first(h), second(h)]).flatten();
    let axis = Axis::new(values, Some(0.0));
    let (left, top, height) = (44.0, 10.0, 250.0);
    let step = (540.0 / layers.len() as f64).clamp(15.0, 44.0);
    let width = left + step * layers.len() as f64 + 8.0;
    let y = |value: f64| top + height * (1.0 - axis.place(value));
    let mut svg = open_svg(width, top + height + 38.0, "Sigma of every head by layer");
    for tick in axis.ticks() {
        let y = y(tick);
        let _ = write!(
            svg,
            "<line class=\"grid\" x1=\"{left}\" x2=\"{width:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            left - 6.0,
            y + 4.0,
            label(tick)
        );
    }
    let every = (24.0 / step).ceil() as usize;
    for (place, layer) in layers.iter().enumerate() {
        let x = left + step * (place as f64 + 0.5);
        if place % every == 0 {
            let _ = write!(
                svg,
                "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                top + height + 16.0,
                layer.number
            );
        }
        let values: Vec<f64> = layer.heads.iter().filter_map(first).collect();
        if values.is_empty() {
            continue;
        }
        let (low, high) = extremes(&values);
        let mean = y(values.iter().sum::<f64>() / values.len() as f64);
        let (side, offset) = (step * 0.26, step * 0.12);
        let _ = write!(
            svg,
            "<line class=\"span\" x1=\"{0:.1}\" x2=\"{0:.1}\" y1=\"{1:.1}\" y2=\"{2:.1}\"/>\
             <line class=\"mean\" x1=\"{3:.1}\" x2=\"{4:.1}\" y1=\"{mean:.1}\" y2=\"{mean:.1}\"/>",
            x - offset,
            y(low),
            y(high),
            x - offset - side,
            x - offset + side
        );
        for head in &layer.heads {
            let about = details(layer, head);
            for (class, value, x) in [("second", second(head), x + offset), ("first", first(head), x - offset)] {
                if let Some(value) = value {
                    let _ = write!(
                        svg,
                        "<circle class=\"{class}\" cx=\"{x:.1}\" cy=\"{:.1}\" r=\"3\"><title>{about}</title></circle>",
                        y(value)
                    );
                }
            }
        }
    }
    let scale = if axis.log { "layer; values on a log scale" } else { "layer" };
    let _ = write!(svg, "<text x=\"{left}\" y=\"{:.1}\">{scale}</text></svg>", top + height + 32.0);
    svg
}

/// One cell per head, layers downwards.
fn heat_map(layers: &[Layer], value: fn(&Head) -> Option<f64>) -> String {
    let axis = Axis::new(layers.iter().flat_map(|l| &l.heads).filter_map(value), None);
    let columns = layers.iter().map(|layer| layer.heads.len()).max().unwrap_or(0);
    let (left, top) = (32.0, 30.0);
    let width = (520.0 / columns.max(1) as f64).clamp(10.0, 62.0);
    let height = (480.0 / layers.len().max(1) as f64).clamp(10.0, 30.0);
    let (right, bottom) = (left + width * columns as f64, top + height * layers.len() as f64);
    let mut svg = open_svg(right + 8.0, bottom + 6.0, "A value for every layer and head");
    let every = |cell: f64, room: f64| (room / cell).ceil() as usize;
    let scale = if axis.log { ", log scale" } else { "" };
    let (low, high) = (short(axis.low), short(axis.high));
    let _ = write!(svg, "<text x=\"{left}\" y=\"11\">head; values {low} to {high}{scale}</text>");
    for column in (0..columns).step_by(every(width, 22.0)) {
        let x = left + width * (column as f64 + 0.5);
        let _ = write!(svg, "<text x=\"{x:.1}\" y=\"25\" text-anchor=\"middle\">{column}</text>");
    }
    for (place, layer) in layers.iter().enumerate() {
        let y = top + height * place as f64;
        if place % every(height, 14.0) == 0 {
            let _ = write!(
                svg,
                "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                left - 6.0,
                y + 0.5 * height + 4.0,
                layer.number
            );
        }
        for (column, head) in layer.heads.iter().enumerate() {
            let Some(value) = value(head) else { continue };
            let shade = axis.place(value);
            let x = left + width * column as f64;
            let _ = write!(
                svg,
                "<rect class=\"cell\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\" \
                 fill-opacity=\"{:.3}\"><title>{}</title></rect>",
                width - 1.0,
                height - 1.0,
                0.08 + 0.92 * shade,
                details(layer, head)
            );
            // The number itself where it fits.
            if width >= 46.0 && height >= 20.0 {
                let _ = write!(
                    svg,
                    "<text class=\"{}\" pointer-events=\"none\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                    if shade > 0.6 { "hi" } else { "lo" },
                    x + 0.5 * width,
                    y + 0.5 * height + 4.0,
                    short(value)
                );
            }
        }
    }
    svg.push_str("</svg>");
    svg
}
