//! What the cache of latent attention needs, as a table.

use super::table::{Table, range, short, wrapped};
use sigmascale::Descale;
use sigmascale::calibrate::MlaProfile;

/// A row per layer, by its number.
pub fn table<'p>(layers: impl Iterator<Item = (usize, &'p MlaProfile)>) -> String {
    let mut table =
        Table::new(["layer", "latent bound", "k_pe bound", "cache descale", "absorbed q descale", "safe at 1.0"]);
    for (number, mla) in layers {
        let value = |descale: &Descale| f64::from(descale.get());
        let safe: Vec<&str> = [
            ("cache", value(&mla.cache_descale) <= 1.0),
            ("q", mla.absorbed_q_descale.iter().all(|descale| value(descale) <= 1.0)),
        ]
        .into_iter()
        .filter_map(|(what, safe)| safe.then_some(what))
        .collect();
        table.row([
            number.to_string(),
            short(mla.latent_bound),
            short(mla.k_pe_bound),
            short(value(&mla.cache_descale)),
            range(mla.absorbed_q_descale.iter().map(value)),
            if safe.is_empty() { "-".to_owned() } else { safe.join(", ") },
        ]);
    }
    let heading = wrapped(
        "absorbed form (decoding), worst case, including rounding: one scale for a cached row [latent, k_pe], which the values \
         are part of",
        "",
    );
    let remark = "sigma is -: logits of latent attention (MLA) are bounded through both projections of a head at once.";
    format!("{heading}\n{}{}", table.render(), wrapped(remark, ""))
}
