//! What centers change, as a table.

use super::named::named;
use super::table::{Table, range, short, wrapped};
use sigmascale::Descale;
use sigmascale::calibrate::CenterProfile;
use sigmascale::plan::{CenterPolicy, CenterSource};

/// The options of centers.
#[derive(clap::Args)]
pub struct CenterArgs {
    /// Where the constant comes from that is subtracted from keys before their cast
    #[arg(long, value_parser = named::<CenterSource>(), default_value = CenterSource::Weights.name())]
    pub center_keys: CenterSource,
    /// Where the constant comes from that is subtracted from values
    #[arg(long, value_parser = named::<CenterSource>(), default_value = CenterSource::None.name())]
    pub center_values: CenterSource,
}

impl CenterArgs {
    pub fn policy(&self) -> CenterPolicy {
        CenterPolicy { k: self.center_keys, v: self.center_values, ..CenterPolicy::CACHE }
    }
}

/// The table, with what it is; empty without layers.
pub fn table<'a>(source: CenterSource, layers: impl Iterator<Item = (usize, &'a CenterProfile)>) -> String {
    let mut table = Table::new([
        "layer",
        "bias share",
        "k bound",
        "at positions",
        "k - c bound",
        "ratio",
        "heads centered",
        "k - c descale",
        "v bound",
        "v - m bound",
    ]);
    let mut positions = None;
    let mut rows = 0;
    for (number, center) in layers {
        let ratios = center.k_position_bound.iter().zip(&center.k_centered_bound);
        let ratios = ratios.filter(|(k, _)| **k > 0.0).map(|(k, centered)| centered / k);
        let centered = center.c.iter().flatten().filter(|row| row.iter().any(|c| *c != 0.0)).count();
        let largest = |row: &[f64]| short(row.iter().copied().fold(0.0, f64::max));
        let values = |row: &Option<Vec<f64>>| row.as_deref().map_or_else(|| "-".to_owned(), largest);
        table.row([
            number.to_string(),
            range(center.bias_share.iter().copied()),
            largest(&center.k_bound),
            largest(&center.k_position_bound),
            largest(&center.k_centered_bound),
            range(ratios),
            format!("{centered} of {}", center.k_bound.len()),
            range(center.k_centered_descale.iter().map(|descale: &Descale| f64::from(descale.get()))),
            values(&center.v_bound),
            values(&center.v_centered_bound),
        ]);
        positions = center.positions;
        rows += 1;
    }
    if rows == 0 {
        return String::new();
    }
    let (from, what) = match source {
        CenterSource::None => ("none", "keys have a bias, and nothing is subtracted from them"),
        CenterSource::Minimax => ("minimax", "c gives the least bound"),
        CenterSource::Weights | CenterSource::Mean => ("weights", "c is the mean of the rotated bias over positions"),
    };
    let within = positions.map_or_else(|| "all".to_owned(), |positions| format!("those below {positions}"));
    let lines = [
        "attention over k - c and v - m is exact; k descale covers k, k - c descale what is left",
        "bias share: largest constant of a rotation pair relative to the k bound, which holds at any position",
        &format!(
            "positions: {within}; bounds in exact arithmetic, the largest of the heads; ratio to the bound at positions, min..max"
        ),
    ];
    let lines: String = lines.iter().map(|line| wrapped(line, "  ")).collect();
    format!("\n{}{lines}\n{}", wrapped(&format!("centers of keys: {from}; {what}"), ""), table.render())
}
