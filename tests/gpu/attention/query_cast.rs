//! Queries that the attention kernel casts itself, beside those of the cast in front of it: the same bits.

use super::{Memory, cuda, stream, terms};
use crate::device;
use half::bf16;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, StandardNormal};
use sigmascale::attention::{AttentionCall, AttentionShape, Mask};
use sigmascale::cuda::View;
use sigmascale::device::attention::{Element, Rope};

/// (batch, query heads, KV heads, queries, keys): heads of a group in a block and blocks of rows of one head, ends
/// inside of tiles and at their halves, queries that stand behind the keys, of which some see none, and several work
/// items a block.
const SHAPES: [(usize, usize, usize, usize, usize); 10] = [
    (1, 8, 2, 640, 640),
    (2, 3, 3, 512, 512),
    (1, 4, 1, 577, 577),
    (1, 2, 2, 300, 449),
    (2, 6, 1, 129, 1000),
    (1, 1, 1, 1000, 320),
    (1, 2, 1, 64, 64),
    (1, 4, 2, 700, 763),
    (3, 5, 5, 200, 191),
    (3, 24, 4, 1030, 1030),
];
/// Positions of the tables.
const ROWS: usize = 1100;
/// Bytes of the workspace in front of the queries' codes.
const HEADER: usize = 256;

/// Rotated dimensions in quarters of a head, whether pairs are neighbours, whether positions come in a list.
type Rotation = (usize, bool, bool);
const ROTATIONS: [Option<Rotation>; 5] =
    [None, Some((4, false, false)), Some((2, false, true)), Some((4, true, true)), Some((1, true, false))];

pub fn queries_cast_inside_are_those_of_the_cast() {
    for (d, shape) in [64, 128].into_iter().flat_map(|d| SHAPES.map(|shape| (d, shape))) {
        for (at, rotation) in ROTATIONS.into_iter().enumerate() {
            let (batch, n_q_heads, n_kv_heads, len_q, len_k) = shape;
            // Without a key at its position a query has no angle.
            if rotation.is_none() || len_q <= len_k {
                let shape = AttentionShape { batch, n_q_heads, n_kv_heads, len_q, len_k, d_head: d, d_v: d };
                for causal in [false, true] {
                    compare(&shape, rotation, causal, 80 + at as u64);
                }
            }
        }
    }
}

fn compare(shape: &AttentionShape, rotation: Option<Rotation>, causal: bool, seed: u64) {
    let AttentionShape { batch, n_q_heads, n_kv_heads, len_k, d_head, .. } = *shape;
    let call = AttentionCall { mask: Mask { causal, ..Mask::NONE }, ..AttentionCall::causal(*shape) };
    let mut rng = StdRng::seed_from_u64(seed);
    let mut draw = |count: usize| -> Vec<u8> {
        let mut value = || bf16::from_f32(3.0 * Distribution::<f32>::sample(&StandardNormal, &mut rng)).to_le_bytes();
        (0..count).flat_map(|_| value()).collect()
    };
    // Queries lie with gaps.
    let [q, k, v] = [2 * shape.q_elements(), shape.k_elements(), shape.v_elements()].map(&mut draw);
    // Some values pass 448 descales.
    let descales: Vec<f32> = (0..3 * batch * n_kv_heads).map(|i| 0.02 + 0.003 * (i % 5) as f32).collect();
    let positions: Vec<i32> = (0..batch * len_k).map(|i| (i * 37 % ROWS) as i32).collect();
    let places = device().upload(&positions).unwrap();
    let angles: Vec<f32> = (0..ROWS * d_head / 2).map(|i| (i as f32 * 0.37).sin()).collect();
    let [cosine, sine] = [0.0, 1.3].map(|shift| {
        let table: Vec<f32> = angles.iter().map(|angle| (angle + shift).cos()).collect();
        device().upload(&table).unwrap()
    });
    let run = |inside: bool| {
        let memory = Memory::new(&call, [&q, &k, &v], &descales);
        let (mut tensors, workspace) = memory.tensors(&call, Element::Bf16);
        let strides = [shape.len_q * n_q_heads * 2 * d_head, n_q_heads * 2 * d_head, 2 * d_head, 1];
        // SAFETY: all lives until `results` has waited.
        unsafe {
            tensors.q = View::new(tensors.q.ptr(), Element::Bf16, shape.q_shape(), strides.map(|x| x as i64));
            tensors.rope = rotation.map(|(quarters, interleaved, listed)| {
                let [cosine, sine] =
                    [&cosine, &sine].map(|table| View::dense(table.ptr(), Element::F32, [ROWS, quarters * d_head / 8]));
                let positions = listed.then(|| places.view(Element::I32, [batch, len_k]).unwrap());
                Rope { cosine, sine, positions, interleaved }
            });
        }
        tensors.stats = None;
        let attention = cuda().with_split(false).with_query_cast(inside);
        let stream = stream();
        for _ in 0..2 {
            attention.launch(&stream, &terms(&call), &tensors, &workspace).unwrap();
        }
        let results = memory.results();
        let codes = &memory.workspace.read().unwrap()[HEADER..][..shape.q_elements()];
        assert_eq!(codes.iter().all(|&code| code == 0), inside, "{call:?}: codes of the queries in the workspace");
        results
    };
    assert!(run(true) == run(false), "{call:?}, rotation {rotation:?}");
}
