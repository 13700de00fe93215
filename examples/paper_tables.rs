//! The paper's Tables 2 and 3 with the printed numbers beside ours: `cargo run --example paper_tables`.

use sigmascale::bound::Tail;
use sigmascale::model::preset;

/// Model, gamma of Table 2, alpha* (here `c_star`) of Table 3, and the constant that the paper then used.
const PRINTED: [(&str, f64, f64, f64); 4] = [
    ("gpt2-xl", 2.98, 0.074, 0.08),
    ("mistral-7b", 2.26, 0.035, 0.04),
    ("llama-2-13b", 2.28, 0.028, 0.03),
    ("llama-2-70b", 2.32, 0.018, 0.02),
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let tail = Tail::default();
    println!("Sequence length {}, delta {:e}.\n", tail.seq_len, tail.delta);
    println!("Table 2: improvement of the tail exponent, d / (gamma r)\n");
    println!("{:<12} {:>6} {:>5} {:>9} {:>9} {:>12}", "model", "d", "r", "gamma", "printed", "improvement");
    for (name, gamma, _, _) in PRINTED {
        let spec = preset(name).ok_or(name)?;
        let c = tail.c_star(&spec)?;
        println!(
            "{name:<12} {:>6} {:>5} {:>9.4} {gamma:>9.2} {:>12.4}",
            spec.d_model, spec.d_head, c.gamma, c.improvement
        );
    }
    println!("\nTable 3: the calibration constant\n");
    println!("{:<12} {:>6} {:>5} {:>6} {:>9} {:>9} {:>9}", "model", "d", "r", "heads", "c_star", "printed", "used");
    for (name, _, c_star, used) in PRINTED {
        let spec = preset(name).ok_or(name)?;
        let c = tail.c_star(&spec)?;
        println!(
            "{name:<12} {:>6} {:>5} {:>6} {:>9.6} {c_star:>9.3} {used:>9.2}",
            spec.d_model,
            spec.d_head,
            spec.n_q_heads * spec.layers,
            c.c_star
        );
    }
    println!("\nThe same with 8 sequences a step over 3000 steps, which the paper leaves out of the union:\n");
    for (name, ..) in PRINTED {
        let spec = preset(name).ok_or(name)?;
        let c = Tail { batch: 8, steps: 3000, ..tail }.c_star(&spec)?;
        println!("{name:<12} c_star {:.4}", c.c_star);
    }
    Ok(())
}
