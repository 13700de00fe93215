//! The tables of `docs/attention-numerics.md`:
//! `cargo run --release --example attention_bias -- output|gradients|fp8-gradients [KEYS..]`.
//!
//! `output` prints the bias of the attention output for each way to sum P V, by default with 1k, 4k, 16k and 64k keys;
//! `gradients` prints errors of dQ, dK and dV for each source of delta, by default with 2048 tokens; `fp8-gradients` with products of
//! the backward in FP8.

mod measure;

use measure::{Case, Kind, MEANS, SETTINGS, Way};
use sigmascale::attention::Precision;
use sigmascale::{Error, Result};

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let keys = |default: &[usize]| -> Result<Vec<usize>> {
        let given = args.iter().skip(1).map(|keys| {
            let keys = keys.parse().ok().filter(|keys| (1..=1 << 20).contains(keys));
            keys.ok_or_else(|| Error::argument("KEYS must be numbers between 1 and 1048576"))
        });
        let given = given.collect::<Result<Vec<_>>>()?;
        Ok(if given.is_empty() { default.to_vec() } else { given })
    };
    match args.first().map_or("output", String::as_str) {
        "output" => output(&keys(&[1 << 10, 1 << 12, 1 << 14, 1 << 16])?),
        "gradients" => {
            let ways = [
                Way::PROMOTE_2048,
                Way::PROMOTE_2048_IN_F32,
                Way::INFERENCE,
                Way::TRAINING,
                Way::EXACT_OUTPUT,
                Way::PROBABILITIES,
                Way::KERNEL,
                Way::BASELINE,
            ];
            gradients(&ways, &keys(&[2048])?)
        }
        "fp8-gradients" => {
            let ways = [
                Way::BASELINE,
                Way::KERNEL,
                Way::FP8_DQ,
                Way::FP8_DQ_8,
                Way::FP8_DQ_64,
                Way::FP8_DP,
                Way::FP8_DQ_DP,
                Way::FP8_DQ_DP_8,
            ];
            gradients(&ways, &keys(&[1024, 2048, 4096, 8192])?)
        }
        other => Err(Error::argument(format_args!("{other}: the tables are output, gradients and fp8-gradients"))),
    }
}

fn output(keys: &[usize]) -> Result<()> {
    println!(
        "Bias of the output in percent of its mean size (16 queries, d_head 64, V ~ N(mean, 1), all keys visible)\n"
    );
    print!("| keys | mean of V |");
    SETTINGS.iter().for_each(|setting| print!(" {setting} |"));
    println!("\n|---|---|{}", "---|".repeat(SETTINGS.len()));
    for &keys in keys {
        for mean in MEANS {
            let case = Case::with_mean(mean, 16, keys, 64, 1)?;
            print!("| {keys} | {mean} |");
            for setting in SETTINGS {
                let [bias, _] = case.output_bias(&Precision::hopper(setting))?;
                print!(" {:.2} |", 100.0 * bias);
            }
            println!();
        }
    }
    Ok(())
}

fn gradients(ways: &[Way], keys: &[usize]) -> Result<()> {
    for &len in keys {
        println!(
            "Relative error / bias factor, {len} tokens, causal, d_head 128 (all bias: {:.0})\n",
            (len as f64).sqrt()
        );
        println!(
            "| delta from | gradient | {} |",
            Kind::ALL.map(|kind| format!("{kind:?}").to_lowercase()).join(" | ")
        );
        println!("|---|---|{}", "---|".repeat(Kind::ALL.len()));
        let cases = Kind::ALL.into_iter().map(|kind| Case::of(kind, len, 128, 1)).collect::<Result<Vec<_>>>()?;
        let exact = cases.iter().map(Case::exact_gradients).collect::<Result<Vec<_>>>()?;
        for way in ways {
            let all = cases.iter().zip(&exact);
            let errors = all.map(|(case, exact)| case.gradients(way, exact)).collect::<Result<Vec<_>>>()?;
            for (gradient, name) in ["dQ", "dK", "dV"].into_iter().enumerate() {
                print!("| {} | {name} |", way.name);
                errors.iter().for_each(|e| print!(" {:.1e} / {:.1} |", e[gradient].relative, e[gradient].bias));
                println!();
            }
        }
        println!();
    }
    Ok(())
}
