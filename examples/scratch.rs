use sigmascale::{geometry::*, model::*, spectral::*};
use std::time::Instant;
fn main() {
    let name = std::env::args().nth(1).unwrap();
    let spec = preset(&name).unwrap();
    let m = SyntheticModel::new(&spec, 1, SyntheticOptions::default()).unwrap();
    let t = Instant::now();
    let l = m.layer(0).unwrap();
    println!("make {:?}", t.elapsed());
    let g = LayerGeometry::new(&spec, l.weights()).unwrap();
    for _ in 0..2 {
        let t = Instant::now();
        let c = layer_channels(&g).unwrap();
        println!("channels {:?}", t.elapsed());
        let t = Instant::now();
        let s = summed_norm(&g);
        println!("summed {:?} {s}", t.elapsed());
        let t = Instant::now();
        let _: Vec<Gram> = { use rayon::prelude::*; g.q.par_iter().zip(&c[0]).chain(g.k.par_iter().zip(&c[1])).map(|(h, c)| Gram::effective(h, c)).collect() };
        let e = t.elapsed().as_secs_f64();
        let fl = 2.0 * spec.d_model as f64 * (spec.d_head as f64).powi(2) * (spec.n_q_heads + spec.n_kv_heads) as f64;
        println!("grams {e:.3} s = {:.1} GF/s", fl / e / 1e9);
        let t = Instant::now();
        let _ = GramEngine.layer(&g).unwrap();
        println!("layer {:?}", t.elapsed());
    }
}
