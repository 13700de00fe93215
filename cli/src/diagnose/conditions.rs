//! `sigmascale diagnose --model`: which heads of a checkpoint have what the failure of BF16 attention needs.

use crate::output::OutputArgs;
use crate::progress;
use crate::table::{Table, brief, wrapped};
use sigmascale::Result;
use sigmascale_lab::stress::{Conditions, HeadConditions, StressModel, TokenFile, conditions};
use std::path::Path;

/// Runs the text, and writes what it showed.
pub fn run(folder: &Path, file: &Path, seq_len: Option<usize>, output: &OutputArgs) -> Result<()> {
    output.check_not_read(("-o", None), &[file.to_path_buf()])?;
    let tokens = TokenFile::read(file)?;
    let model = StressModel::open(folder)?;
    let bar = progress::bar(model.spec().layers.len(), "{msg}: layer {pos}/{len}", "diagnose");
    let found = conditions(&model, &tokens, seq_len, &mut || bar.inc(1))?;
    bar.finish_and_clear();
    output.write(&found, |found| table(found, output.most_rows()))
}

fn table(found: &Conditions, most: usize) -> String {
    let mut out =
        wrapped(&format!("{}: {} sequences of {} tokens", found.tokens.file, found.sequences, found.seq_len), "");
    out.push('\n');
    let mut heads: Vec<&HeadConditions> = found.heads.iter().collect();
    let similarity = |head: &HeadConditions| head.similarity.unwrap_or(-1.0);
    heads.sort_by(|a, b| b.ones.total_cmp(&a.ones).then(similarity(b).total_cmp(&similarity(a))));
    let mut table =
        Table::new(["layer", "head", "maximum repeats", "several P = 1", "error at P = 1", "error sign", "similarity"]);
    let share = |value: f64| format!("{:.1} %", 100.0 * value);
    for head in heads.iter().take(most) {
        table.row([
            head.layer.to_string(),
            head.head.to_string(),
            share(head.repeated),
            share(head.ones),
            head.error_at_ones.map_or("-".to_owned(), share),
            head.error_sign.map_or("-".to_owned(), brief),
            head.similarity.map_or("-".to_owned(), brief),
        ]);
    }
    out.push_str(&table.render());
    if heads.len() > most {
        out.push_str(&format!("{} more heads (--all prints them)\n", heads.len() - most));
    }
    out.push_str(&wrapped(
        "The failure needs all of it in one head: rows with several weights of exactly 1, a rounding error of P V that keeps its \
         sign there (1: always), and directions of W_Q's gradient that are alike from row to row (1: the same). None of it says \
         that training fails.",
        "",
    ));
    out
}
