//! The paged cache: what is appended is what a dense call has, wherever the pages lie.

use super::*;
use crate::model::{Rope, RopeLayout};
use crate::plan::Center;
use rand::RngExt;
use rand::seq::SliceRandom;

const SHAPE: PageShape = PageShape { pages: 40, page_size: 16, n_kv_heads: 2, d_head: 32, d_v: 24 };

fn descales() -> OperandDescales {
    let row = |x: f32| vec![Descale::new(x).unwrap(), Descale::new(3.0 * x).unwrap()];
    OperandDescales { q: row(0.02), k: row(0.02), v: Some(row(0.05)), o: None }
}

fn rope() -> Rope {
    Rope {
        rotary_dim: 16,
        other_dims: vec![],
        layout: RopeLayout::HalfSplit,
        attention_factor: 1.0,
        inv_freq: Some((0..8).map(|i| 0.5f64.powi(i)).collect()),
        range: None,
    }
}

/// Shuffled pages for each of three sequences; entries past their needs are no pages.
fn shuffled(rng: &mut StdRng, longest: usize) -> Vec<i32> {
    let mut pages: Vec<i32> = (0..SHAPE.pages as i32).collect();
    pages.shuffle(rng);
    let each = longest.div_ceil(SHAPE.page_size);
    let row = |s: usize| pages[s * each..(s + 1) * each].iter().copied().chain([-1, i32::MAX]).collect::<Vec<_>>();
    (0..3).flat_map(row).collect()
}

fn over<'a>(pages: &'a [i32], lengths: &'a [usize]) -> BlockTable<'a> {
    BlockTable { pages, pages_per_sequence: pages.len() / 3, lengths }
}

fn draw(rng: &mut StdRng, n: usize) -> Vec<f32> {
    (0..n).map(|_| Distribution::<f32>::sample(&StandardNormal, rng)).collect()
}

/// Chunk by chunk or at once, each token is rotated by its own position, cast by its head's descale and read back from its
/// own row; what other rows hold is not read.
#[test]
fn appended_tokens_are_the_casts_of_rotated_ones() {
    let mut rng = StdRng::seed_from_u64(2);
    let lengths = [33, 0, 64];
    let pages = shuffled(&mut rng, 80);
    let total: usize = lengths.iter().sum();
    let (k, v) = (draw(&mut rng, total * 2 * 32), draw(&mut rng, total * 2 * 24));
    let mut cache = PagedKv::new(SHAPE).unwrap();
    // NaN in every row that nothing is written to.
    cache.k.fill(0x7f);
    cache.v.fill(0x7f);
    let mut have = vec![0; 3];
    let mut counts = 0;
    while have != lengths {
        // Some tokens more of every sequence.
        let step: Vec<usize> =
            have.iter().zip(lengths).map(|(have, all)| rng.random_range(0..=20usize).min(all - have)).collect();
        let mut cu_seqlens = vec![0];
        let (mut new_k, mut new_v) = (Vec::new(), Vec::new());
        for (s, n) in step.iter().enumerate() {
            let first = lengths[..s].iter().sum::<usize>() + have[s];
            new_k.extend(&k[first * 64..(first + n) * 64]);
            new_v.extend(&v[first * 48..(first + n) * 48]);
            cu_seqlens.push(cu_seqlens[s] + n);
        }
        let new = NewTokens { k: &new_k, v: &new_v, cu_seqlens: &cu_seqlens };
        let out =
            cache.append(&over(&pages, &have), &new, &descales(), (Some(&rope()), None), OnOverflow::Saturate).unwrap();
        counts += out.k[1].count;
        have = out.lengths;
    }
    assert_eq!(counts, (total * 32) as u64);
    let gathered = cache.gather(&over(&pages, &lengths), &descales(), None).unwrap();
    assert_eq!(gathered.cu_seqlens, [0, 33, 33, 97]);
    let cast = |x: f32, descale: f32| {
        Format::E4m3.round(x * Descale::new(descale).unwrap().quant_scale().get(), OnOverflow::Saturate) * descale
    };
    for (token, position) in (0..33).chain(0..64).enumerate() {
        for head in 0..2 {
            let own = |x: &[f32], d: usize| x[(token * 2 + head) * d..][..d].to_vec();
            let (mut want, scale) = (own(&k, 32), if head == 0 { 1.0 } else { 3.0 });
            for (c, angle) in rope().inv_freq.unwrap().into_iter().enumerate() {
                let (sin, cos) = (position as f64 * angle).sin_cos();
                let (x, y) = (want[c], want[c + 8]);
                (want[c], want[c + 8]) = (x * cos as f32 - y * sin as f32, x * sin as f32 + y * cos as f32);
            }
            let want: Vec<f32> = want.into_iter().map(|x| cast(x, 0.02 * scale)).collect();
            assert_eq!(own(&gathered.k, 32), want, "token {token}, head {head}");
            let want: Vec<f32> = own(&v, 24).into_iter().map(|x| cast(x, 0.05 * scale)).collect();
            assert_eq!(own(&gathered.v, 24), want);
        }
    }
}

/// Attention over gathered pages is attention over the dense operands, for decoding, speculative decoding and a prefill in
/// chunks.
#[test]
fn attention_over_pages_is_attention_over_rows() {
    let mut rng = StdRng::seed_from_u64(5);
    let lengths = [70usize, 17, 1];
    let total: usize = lengths.iter().sum();
    let pages = shuffled(&mut rng, 80);
    let (k, v) = (draw(&mut rng, total * 64), draw(&mut rng, total * 48));
    let cu_seqlens_k = [0, 70, 87, 88];
    let mut cache = PagedKv::new(SHAPE).unwrap();
    let new = NewTokens { k: &k, v: &v, cu_seqlens: &cu_seqlens_k };
    cache.append(&over(&pages, &[0; 3]), &new, &descales(), (None, None), OnOverflow::Saturate).unwrap();
    let gathered = cache.gather(&over(&pages, &lengths), &descales(), None).unwrap();
    assert_eq!(gathered.cu_seqlens, cu_seqlens_k);
    for cu_seqlens_q in [[0, 1, 2, 3], [0, 4, 8, 9], [0, 50, 67, 67]] {
        let shape = AttentionShape { d_v: 24, ..shape(4, 2, cu_seqlens_q[3], total, 32) };
        let sequences = Sequence::packed(&cu_seqlens_q, &gathered.cu_seqlens, None).unwrap();
        let sinks = [1.0, 0.0, -1.0, 2.0];
        let call = AttentionCall {
            mask: Mask::sliding(60),
            sequences: Some(&sequences),
            sinks: Some(&sinks),
            ..AttentionCall::causal(shape)
        };
        let q = draw(&mut rng, shape.q_elements());
        let dense = Inputs { q: &q, k: &k, v: &v };
        let plan =
            ScalePlan { layer: 0, logit_bound: None, logit_descale: vec![Descale::ONE; 4], operands: descales() };
        // Casting what was read from the cache gives its codes again.
        let paged = Inputs { k: &gathered.k, v: &gathered.v, ..dense };
        let [want, have] = [dense, paged].map(|x| Cpu.forward(&call, &x, &plan, &Precision::INFERENCE).unwrap());
        assert_eq!((&have.out, &have.lse), (&want.out, &want.lse));
        assert!(have.out.iter().any(|&x| x != 0.0));
    }
}

#[test]
fn what_breaks_a_rule_is_refused_and_nothing_is_written() {
    let mut cache = PagedKv::new(SHAPE).unwrap();
    let before = cache.clone();
    let (k, v) = (vec![1.0; 3 * 64], vec![1.0; 3 * 48]);
    let mut append = |pages: &[i32], lengths: &[usize], cu_seqlens: &[usize], k: &[f32], operands: &OperandDescales| {
        let table = BlockTable { pages, pages_per_sequence: 1, lengths };
        let new = NewTokens { k, v: &v, cu_seqlens };
        let error = cache.append(&table, &new, operands, (None, None), OnOverflow::Saturate).unwrap_err().to_string();
        assert_eq!(cache, before);
        error
    };
    let good = descales();
    let none = OperandDescales { v: None, ..good.clone() };
    let short = OperandDescales { k: good.k[..1].to_vec(), ..good.clone() };
    for (error, message) in [
        (append(&[40, 1], &[1, 0], &[0, 1, 3], &k, &good), "block_table[0][0] = 40 is not one of the cache's 40 pages"),
        (append(&[0, -1], &[0, 0], &[0, 1, 3], &k, &good), "block_table[1][0] = -1 is not one of the cache's 40 pages"),
        (
            append(&[0], &[0, 0], &[0, 1, 3], &k, &good),
            "a block table of 1 entries does not hold 1 pages of each of 2 sequences",
        ),
        (
            append(&[0, 1], &[15, 0], &[0, 2, 3], &k, &good),
            "token 16 of sequence 0 needs page 1 of the block table, which has 1 of 16 tokens",
        ),
        (append(&[7, 7], &[3, 4], &[0, 2, 3], &k, &good), "sequences 0 and 1 both append to one row of page 7"),
        (
            append(&[0, 1], &[0, 0], &[0, 4, 3], &k, &good),
            "cu_seqlens [0, 4, 3] must have 3 entries that start at 0 and do not fall",
        ),
        (
            append(&[0, 1], &[0, 0], &[0, 1, 3], &k[1..], &good),
            "new k has 191 values where 3 tokens of 2 heads of 32 are asked for",
        ),
        (append(&[0, 1], &[0, 0], &[0, 1, 3], &k, &short), "1 k descales do not fit 2 KV heads"),
        (
            append(&[0, 1], &[0, 0], &[0, 1, 3], &k, &none),
            "a cache in E4M3 needs descales of v, and the plan has none: v has no bound in this layer",
        ),
    ] {
        assert_eq!(error, message);
    }
    assert!(PagedKv::new(PageShape { page_size: 0, ..SHAPE }).unwrap_err().is_argument());
    assert!(PagedKv::new(PageShape { pages: usize::MAX, ..SHAPE }).unwrap_err().is_argument());
    // Shared pages may be read.
    let table = BlockTable { pages: &[3, 3], pages_per_sequence: 1, lengths: &[16, 9] };
    assert_eq!(cache.gather(&table, &good, None).unwrap().cu_seqlens, [0, 16, 25]);
}

/// A cache with a center holds the casts of what is left, in chunks or at once, and gives back what a dense call sees.
#[test]
fn a_cache_with_a_center_is_that_of_a_dense_call() {
    let mut rng = StdRng::seed_from_u64(8);
    let lengths = [33, 17, 64];
    let pages = shuffled(&mut rng, 80);
    let total: usize = lengths.iter().sum();
    let shape = AttentionShape {
        batch: 1,
        n_q_heads: 4,
        n_kv_heads: 2,
        len_q: total,
        len_k: total,
        d_head: SHAPE.d_head,
        d_v: SHAPE.d_v,
    };
    let center = loop {
        let center = super::random_tests::random_center(&shape, 2.0, &mut rng);
        if center.k.is_some() && center.v.is_some() {
            break center;
        }
    };
    let (q, k, v) =
        (draw(&mut rng, shape.q_elements()), draw(&mut rng, shape.k_elements()), draw(&mut rng, shape.v_elements()));
    let (mut at_once, mut in_parts) = (PagedKv::new(SHAPE).unwrap(), PagedKv::new(SHAPE).unwrap());
    let append = |cache: &mut PagedKv, have: &[usize], upto: &[usize]| {
        let (mut new_k, mut new_v, mut ends) = (Vec::new(), Vec::new(), vec![0]);
        for s in 0..3 {
            let first = lengths[..s].iter().sum::<usize>();
            new_k.extend(&k[(first + have[s]) * 64..(first + upto[s]) * 64]);
            new_v.extend(&v[(first + have[s]) * 48..(first + upto[s]) * 48]);
            ends.push(ends[s] + upto[s] - have[s]);
        }
        let new = NewTokens { k: &new_k, v: &new_v, cu_seqlens: &ends };
        let how = (None, Some(&center));
        cache.append(&over(&pages, have), &new, &descales(), how, OnOverflow::Saturate).unwrap()
    };
    let all = append(&mut at_once, &[0; 3], &lengths);
    append(&mut in_parts, &[0; 3], &[5, 17, 40]);
    append(&mut in_parts, &[5, 17, 40], &lengths);
    assert_eq!(at_once, in_parts);
    let gathered = at_once.gather(&over(&pages, &lengths), &descales(), Some(&center)).unwrap();
    let sequences = Sequence::packed(&gathered.cu_seqlens, &gathered.cu_seqlens, None).unwrap();
    let plain = AttentionCall { sequences: Some(&sequences), ..AttentionCall::causal(shape) };
    let call = AttentionCall { center: Some(&center), ..plain };
    let inputs = Inputs { q: &q, k: &k, v: &v };
    let plan = ScalePlan { layer: 0, logit_bound: None, logit_descale: vec![Descale::ONE; 4], operands: descales() };
    let cast = dequantised(&call, &inputs, &plan, OnOverflow::Saturate).unwrap();
    assert_eq!((&gathered.k, &gathered.v), (&cast.k, &cast.v));
    let stats = Cpu.forward(&call, &inputs, &plan, &Precision::KERNEL).unwrap().stats;
    assert_eq!((all.k[0].amax, all.v[1].amax), (stats.k[0].amax, stats.v[1].amax));
    let other = Center::none(0);
    assert_ne!(at_once.gather(&over(&pages, &lengths), &descales(), Some(&other)).unwrap().k, gathered.k);
    let wrong = Center::new(0, Some(vec![vec![1.0; 8]; 2]), None).unwrap();
    assert!(at_once.gather(&over(&pages, &lengths), &descales(), Some(&wrong)).unwrap_err().is_mismatch());
}
