//! Calls on a paged cache against the cache of the CPU and plain attention over what it gathers.

use super::{BF16, distance, scratch, stream};
use crate::device;
use half::bf16;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, StandardNormal};
use sigmascale::Descale;
use sigmascale::attention::{
    AttentionCall, AttentionShape, BlockTable, Mask, NewTokens, PageShape, PagedKv, PvAccumulator, reference,
};
use sigmascale::cuda::{Buffer, Stream};
use sigmascale::device::attention::{self as gpu, Cuda, DeviceCall, Element, Keys, Tensors, ValuePages};
use sigmascale::fp8::{Format, OnOverflow};
use sigmascale::plan::OperandDescales;
use sigmascale::stats::stats_words;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;

tests![
    decoding_over_pages_is_plain_attention,
    drafts_and_chunks_over_pages_are_plain_attention,
    parts_of_blocks_that_are_not_full_are_joined,
    pages_repeat_bit_for_bit_and_from_a_graph,
    wrong_tables_are_named_and_harm_nothing,
];

/// NaN in E4M3.
const NAN: u8 = 0x7f;

/// One call.
#[derive(Clone, Debug)]
pub(super) struct Case {
    /// Tokens of each sequence before the call.
    pub lengths: Vec<usize>,
    pub page_size: usize,
    pub len_q: usize,
    /// Queries of each sequence, packed; `None`: each has `len_q`.
    pub counts: Option<Vec<usize>>,
    /// Tokens that the call appends to each sequence.
    pub new: usize,
    pub heads_q: usize,
    pub heads_kv: usize,
    pub d: usize,
    pub rows: bool,
    pub mask: Mask,
    pub sinks: bool,
    pub splits: gpu::Splits,
    pub rope: Option<bool>,
    pub q8: bool,
    pub processors: usize,
}

impl Case {
    pub fn decode(lengths: &[usize], page_size: usize) -> Self {
        Self {
            lengths: lengths.to_vec(),
            page_size,
            len_q: 1,
            counts: None,
            new: 1,
            heads_q: 8,
            heads_kv: 2,
            d: 128,
            rows: false,
            mask: Mask::CAUSAL,
            sinks: false,
            splits: gpu::Splits::Fastest,
            rope: None,
            q8: false,
            processors: usize::MAX,
        }
    }

    /// Rows of q where the queries of each sequence begin, and their number.
    fn starts(&self) -> Vec<usize> {
        let mut starts = vec![0];
        for sequence in 0..self.lengths.len() {
            let count = self.counts.as_ref().map_or(self.len_q, |counts| counts[sequence]);
            starts.push(starts[sequence] + count);
        }
        starts
    }
}

fn bf16s(rng: &mut StdRng, n: usize) -> Vec<f32> {
    (0..n).map(|_| bf16::from_f32(StandardNormal.sample(rng)).to_f32()).collect()
}

fn bytes(x: &[f32]) -> Vec<u8> {
    x.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect()
}

fn doubled(x: &[f32]) -> Vec<f32> {
    x.iter().map(|x| 2.0 * x).collect()
}

/// Values as the append writes them where they are tiled.
fn tiled(rows: &[u8], pages: usize, page_size: usize, heads: usize, d: usize) -> Vec<u8> {
    let mut out = vec![0; rows.len()];
    for page in 0..pages {
        for token in 0..page_size {
            for head in 0..heads {
                for i in 0..d {
                    let key = token % 16;
                    let byte = 4 * (key % 8 / 2) + 2 * (key / 8) + key % 2;
                    let group = ((page * heads + head) * (page_size / 16) + token / 16) * 16 * d;
                    out[group + 16 * i + byte] = rows[((page * page_size + token) * heads + head) * d + i];
                }
            }
        }
    }
    out
}

fn rotate(x: &mut [f32], position: usize, interleaved: bool) {
    let half = x.len() / 2;
    for i in 0..half {
        let (sine, cosine) = angle(position, i, half).sin_cos();
        let (a, b) = if interleaved { (2 * i, 2 * i + 1) } else { (i, i + half) };
        (x[a], x[b]) = (x[a] * cosine - x[b] * sine, x[b] * cosine + x[a] * sine);
    }
}

fn angle(position: usize, i: usize, half: usize) -> f32 {
    position as f32 * 10_000f32.powf(-(i as f32) / half as f32)
}

/// Device memory of a case, and what it must become.
struct Setup {
    case: Case,
    sizes: AttentionShape,
    pages: usize,
    /// q as the products take it, before its descale.
    q: Vec<f32>,
    /// Keys and values of each sequence, and the pages after the append.
    gathered: sigmascale::attention::Gathered,
    want: [Vec<u8>; 2],
    stats: [Vec<f32>; 2],
    descales: OperandDescales,
    buffers: Vec<Buffer<u8>>,
    tables: [Buffer<i32>; 2],
    scales: Vec<Buffer<f32>>,
    words: Buffer<u32>,
    lse: Buffer<f32>,
    cu_seqlens: Buffer<i32>,
    /// A logit of each query head.
    sinks: (Vec<f64>, Buffer<f32>),
}

impl Setup {
    fn new(case: &Case, seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let Case { page_size, len_q, new, heads_q, heads_kv, d, .. } = *case;
        let sequences = case.lengths.len();
        let needed: Vec<usize> = case.lengths.iter().map(|n| (n + new).div_ceil(page_size)).collect();
        let pages_per_sequence = needed.iter().max().unwrap() + 2;
        let pages = needed.iter().sum::<usize>() + 3;
        let mut free: Vec<i32> = (0..pages as i32).collect();
        free.shuffle(&mut rng);
        // Entries past a sequence's last page: pages of no one, and no pages at all.
        let garbage = [free[0], -1, i32::MAX, pages as i32];
        let mut free = free.into_iter().skip(1);
        let mut table = Vec::new();
        for &n in &needed {
            table.extend(free.by_ref().take(n));
            table.extend((n..pages_per_sequence).map(|_| garbage[rng.random_range(0..4)]));
        }
        let descale = |i: usize| Descale::new(0.02 + 0.005 * i as f32).unwrap();
        let each = |from: usize| (0..heads_kv).map(|head| descale(head + from)).collect::<Vec<_>>();
        let descales = OperandDescales { q: each(0), k: each(1), v: Some(each(2)), o: None };

        // The cache before the call, then all that no token has is NaN
        let shape = PageShape { pages, page_size, n_kv_heads: heads_kv, d_head: d, d_v: d };
        let mut cache = PagedKv::new(shape).unwrap();
        cache.k.fill(NAN);
        cache.v.fill(NAN);
        let row = heads_kv * d;
        let mut append = |cache: &mut PagedKv, lengths: &[usize], counts: &[usize], rope: Option<bool>| {
            let mut ends = vec![0];
            counts.iter().for_each(|n| ends.push(ends.last().unwrap() + n));
            let (k, v) = (bf16s(&mut rng, ends[sequences] * row), bf16s(&mut rng, ends[sequences] * row));
            let mut turned = k.clone();
            if let Some(interleaved) = rope {
                let places = lengths.iter().zip(counts).flat_map(|(from, n)| *from..from + n);
                for (position, token) in places.zip(turned.chunks_exact_mut(row)) {
                    token.chunks_exact_mut(d).for_each(|head| rotate(head, position, interleaved));
                }
            }
            let tokens = NewTokens { k: &turned, v: &v, cu_seqlens: &ends };
            let at = BlockTable { pages: &table, pages_per_sequence, lengths };
            let appended = cache.append(&at, &tokens, &descales, (None, None), OnOverflow::Saturate).unwrap();
            (k, v, appended)
        };
        append(&mut cache, &vec![0; sequences], &case.lengths, None);
        let before = [cache.k.clone(), cache.v.clone()];
        let (k, v, appended) = append(&mut cache, &case.lengths, &vec![new; sequences], case.rope);
        let stats = [&appended.k, &appended.v].map(|x| x.iter().map(|head| head.amax).collect());
        let at = BlockTable { pages: &table, pages_per_sequence, lengths: &appended.lengths };
        let gathered = cache.gather(&at, &descales, None).unwrap();

        let starts = case.starts();
        let rows = starts[sequences];
        let given = bf16s(&mut rng, rows * heads_q * d);
        let mut q = given.clone();
        if let Some(interleaved) = case.rope {
            for (i, head) in q.chunks_exact_mut(d).enumerate() {
                let row = i / heads_q;
                let sequence = starts.partition_point(|&start| start <= row) - 1;
                let position = (appended.lengths[sequence] + row).saturating_sub(starts[sequence + 1]);
                rotate(head, position, interleaved);
            }
        }
        let up = |bytes: &[u8]| device().upload(bytes).unwrap();
        let layout = |v: &[u8]| if case.rows { v.to_vec() } else { tiled(v, pages, page_size, heads_kv, d) };
        let group = heads_q / heads_kv;
        let codes = || -> Vec<u8> {
            let multiplier = |i: usize| descales.q[i / d % heads_q / group].quant_scale().get();
            q.iter().enumerate().map(|(i, x)| Format::E4m3.encode(x * multiplier(i), OnOverflow::Saturate)).collect()
        };
        let q_bytes = if case.q8 { codes() } else { bytes(&given) };
        let capacity = pages_per_sequence * page_size;
        let half = d / 2;
        let tables: [Vec<f32>; 2] =
            [f32::cos, f32::sin].map(|f| (0..capacity * half).map(|i| f(angle(i / half, i % half, half))).collect());
        let scales = [&descales.q, &descales.k, descales.v.as_ref().unwrap()]
            .map(|x| x.iter().map(|x| x.get()).collect::<Vec<f32>>());
        let lengths: Vec<i32> = case.lengths.iter().map(|&n| n as i32).collect();
        let out = rows * heads_q * d * 2;
        let buffers = vec![
            up(&q_bytes),
            up(&before[0]),
            up(&layout(&before[1])),
            up(&bytes(&k)),
            up(&bytes(&v)),
            up(&vec![0xff; out]),
        ];
        Self {
            case: case.clone(),
            sizes: AttentionShape {
                batch: if case.counts.is_some() { 1 } else { sequences },
                n_q_heads: heads_q,
                n_kv_heads: heads_kv,
                len_q: if case.counts.is_some() { rows } else { len_q },
                len_k: capacity,
                d_head: d,
                d_v: d,
            },
            pages,
            q,
            gathered,
            want: [cache.k.clone(), layout(&cache.v)],
            stats,
            descales,
            buffers,
            tables: [device().upload(&table).unwrap(), device().upload(&lengths).unwrap()],
            scales: scales.iter().chain(&tables).map(|x| device().upload(x).unwrap()).collect(),
            words: device().zeros(stats_words(heads_q, heads_kv)).unwrap(),
            lse: device().upload(&vec![f32::NAN; rows * heads_q]).unwrap(),
            cu_seqlens: device().upload(&starts.iter().map(|&row| row as i32).collect::<Vec<_>>()).unwrap(),
            sinks: {
                let sinks = bf16s(&mut rng, heads_q);
                (sinks.iter().map(|&x| 2.0 * f64::from(x)).collect(), device().upload(&doubled(&sinks)).unwrap())
            },
        }
    }

    fn tensors(&self) -> Tensors {
        let Case { page_size, heads_q, heads_kv, d, new, .. } = self.case;
        let AttentionShape { batch, len_q, len_k, .. } = self.sizes;
        let bytes = |i: usize, element, extents| unsafe { self.buffers[i].view(element, extents).unwrap() };
        let pages = [self.pages, page_size, heads_kv, d];
        // SAFETY of all views: the buffers outlive the work, which `check` waits for.
        let sequences = self.case.lengths.len();
        let row =
            |i: usize| unsafe { gpu::View::new(self.scales[i].ptr(), Element::F32, [sequences, heads_kv], [0, 1]) };
        let table = |i: usize| unsafe { self.scales[i].view(Element::F32, [len_k, d / 2]).unwrap() };
        let new = (new > 0).then(|| {
            let shape = [sequences, new, heads_kv, d];
            gpu::NewTokens { k: bytes(3, Element::Bf16, shape), v: bytes(4, Element::Bf16, shape) }
        });
        let v = match self.case.rows {
            true => ValuePages::Rows(bytes(2, Element::E4m3, pages)),
            false => ValuePages::Tiled(unsafe {
                self.buffers[2].view(Element::E4m3, [self.pages, heads_kv, page_size / 16, d / 8, 8, 16]).unwrap()
            }),
        };
        Tensors {
            q: bytes(0, if self.case.q8 { Element::E4m3 } else { Element::Bf16 }, [batch, len_q, heads_q, d]),
            keys: Keys::Pages(gpu::Pages {
                k: bytes(1, Element::E4m3, pages),
                v,
                block_table: unsafe { self.tables[0].view(Element::I32, [sequences, len_k / page_size]).unwrap() },
                lengths: unsafe { self.tables[1].view(Element::I32, [sequences]).unwrap() },
                queries: self.case.counts.as_ref().map(|_| gpu::PackedQueries {
                    cu_seqlens: unsafe { self.cu_seqlens.view(Element::I32, [sequences + 1]).unwrap() },
                    longest: self.case.len_q,
                }),
                splits: self.case.splits,
                new,
            }),
            descales: gpu::Descales { q: Some(row(0)), k: Some(row(1)), v: Some(row(2)), o: None, logit: None },
            rope: self.case.rope.map(|interleaved| {
                let (cosine, sine) = (table(3), table(4));
                gpu::Rope { cosine, sine, positions: None, interleaved }
            }),
            accumulator: PvAccumulator::default(),
            saved: None,
            out: bytes(5, Element::Bf16, [batch, len_q, heads_q, d]),
            lse: Some(unsafe { self.lse.view(Element::F32, [batch, heads_q, len_q]).unwrap() }),
            stats: Some(unsafe { self.words.view(Element::U32, [stats_words(heads_q, heads_kv)]).unwrap() }),
        }
    }

    fn call(&self) -> DeviceCall {
        // SAFETY: the buffer outlives the work.
        let sinks = self.case.sinks.then(|| unsafe { self.sinks.1.view(Element::F32, [self.case.heads_q]).unwrap() });
        DeviceCall { mask: self.case.mask, sinks, ..DeviceCall::causal(self.sizes) }
    }

    /// The workspace, as the call left it.
    fn launch(&self, engine: &Cuda, stream: &Stream, tensors: &Tensors) -> sigmascale::Result<Buffer<u8>> {
        let bytes = Cuda::workspace_bytes(&self.call(), tensors)?;
        let memory = scratch(bytes);
        // SAFETY: the memory is freed after the work, which is waited for.
        let workspace = unsafe { memory.view(Element::U8, [bytes])? };
        engine.launch(stream, &self.call(), tensors, &workspace)?;
        stream.synchronize()?;
        Ok(memory)
    }

    /// Writes what a call left to a file of its own, to be compared with that of another device (`SIGMASCALE_KEEP=FOLDER`): the case,
    /// workspace, log-sum-exps and output.
    fn keep(&self, folder: &Path, seed: usize, workspace: &Buffer<u8>) {
        let case = format!("{:?}", self.case);
        let mut hash = DefaultHasher::new();
        (&case, seed).hash(&mut hash);
        let (workspace, lse, out) =
            (workspace.read().unwrap(), self.lse.read().unwrap(), self.buffers[5].read().unwrap());
        let lse: Vec<u8> = lse.iter().flat_map(|x| x.to_le_bytes()).collect();
        let head = format!("{case}\n{} {} {}\n", workspace.len(), lse.len(), out.len());
        let content = [head.as_bytes(), &workspace, &lse, &out].concat();
        std::fs::write(folder.join(format!("{:016x}", hash.finish())), content).unwrap();
    }

    /// What is wrong with what a call left.
    fn complaint(&self) -> Option<String> {
        let Case { heads_q, heads_kv, d, new, mask, .. } = self.case;
        let starts = self.case.starts();
        for (name, buffer, want) in [("k", 1, &self.want[0]), ("v", 2, &self.want[1])] {
            let have = self.buffers[buffer].read().unwrap();
            let off = have.iter().zip(want).filter(|(a, b)| a != b).count();
            let near = have.iter().zip(want).all(|(&a, &b)| {
                let (a, b) = (Format::E4m3.decode(a), Format::E4m3.decode(b));
                (a.is_nan() && b.is_nan()) || (a - b).abs() <= 0.13 * b.abs() + 0.002
            });
            // Angles differ by the rounding of fused products.
            let allowed = if self.case.rope.is_some() { have.len() / 500 + 4 } else { 0 };
            if off > allowed || !near {
                return Some(format!("{off} of {} codes of {name} pages differ", have.len()));
            }
        }
        let group = heads_q / heads_kv;
        let words = self.words.read().unwrap();
        for (tensor, want) in self.stats.iter().enumerate() {
            for (head, &want) in want.iter().enumerate() {
                let have = f32::from_bits(words[4 * (2 * heads_q + tensor * heads_kv + head)]);
                if new > 0 && (have - want).abs() > 1e-5 * want {
                    return Some(format!("amax of head {head} of {} is {have} for {want}", ["k", "v"][tensor]));
                }
            }
        }
        let out: Vec<f32> = self.buffers[5]
            .read()
            .unwrap()
            .chunks_exact(2)
            .map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32())
            .collect();
        let lse = self.lse.read().unwrap();
        let (mut have, mut want) = (Vec::new(), Vec::new());
        for (sequence, ends) in self.gathered.cu_seqlens.windows(2).enumerate() {
            let (keys, row) = (ends[1] - ends[0], heads_q * d);
            let (first, len_q) = (starts[sequence], starts[sequence + 1] - starts[sequence]);
            let mine = &out[first * row..(first + len_q) * row];
            if len_q == 0 {
                continue;
            }
            if keys == 0 {
                if mine.iter().any(|&x| x != 0.0) {
                    return Some(format!("sequence {sequence} has no keys and an output"));
                }
                continue;
            }
            let shape = AttentionShape { batch: 1, len_q, len_k: keys, ..self.sizes };
            let sinks = self.case.sinks.then_some(self.sinks.0.as_slice());
            let call = AttentionCall { mask, sinks, ..AttentionCall::causal(shape) };
            let q: Vec<f64> = (0..len_q * row)
                .map(|i| {
                    let descale = self.descales.q[i / d % heads_q / group];
                    let code = Format::E4m3
                        .encode(self.q[first * row + i] * descale.quant_scale().get(), OnOverflow::Saturate);
                    f64::from(Format::E4m3.decode(code) * descale.get())
                })
                .collect();
            let part = |x: &[f32]| -> Vec<f64> {
                x[ends[0] * heads_kv * d..ends[1] * heads_kv * d].iter().map(|&x| x.into()).collect()
            };
            let exact = reference(&call, &q, &part(&self.gathered.k), &part(&self.gathered.v)).unwrap();
            for (row, (a, b)) in mine.chunks_exact(d).zip(exact.out.chunks_exact(d)).enumerate() {
                let (apart, size) = (
                    a.iter().zip(b).map(|(&a, b)| (f64::from(a) - b).powi(2)).sum::<f64>(),
                    b.iter().map(|b| b * b).sum::<f64>(),
                );
                if apart.is_nan() || apart.sqrt() > 0.2 * size.sqrt() + 1e-3 {
                    return Some(format!(
                        "sequence {sequence} of {keys} keys, row {row} is off by {:.3e} of {:.3e}",
                        apart.sqrt(),
                        size.sqrt()
                    ));
                }
            }
            for (i, &b) in exact.lse.iter().enumerate() {
                let (head, row) = (i / len_q, first + i % len_q);
                let entry = row / self.sizes.len_q;
                let a = lse[(entry * heads_q + head) * self.sizes.len_q + row % self.sizes.len_q];
                if !(f64::from(a) == b || (f64::from(a) - b).abs() <= 2e-2) {
                    return Some(format!("sequence {sequence}, head {head}, row {}: lse {a} for {b}", i % len_q));
                }
            }
            have.extend_from_slice(mine);
            want.extend(exact.out);
        }
        let error = if have.is_empty() { 0.0 } else { distance(&have, &want) };
        // The rounding of P is 2.5e-2 of the output.
        (error.is_nan() || error > 3.2e-2 + BF16).then(|| format!("output off by {error:.2e}"))
    }
}

pub(super) fn check(cases: impl IntoIterator<Item = Case>) {
    let engine = |processors| Cuda::new(device()).unwrap().with_processors(processors);
    let (all, few) = (engine(usize::MAX), engine(3));
    let mut wrong = Vec::new();
    for (seed, case) in cases.into_iter().enumerate() {
        let setup = Setup::new(&case, seed as u64);
        let engine = if case.processors == 3 { &few } else { &all };
        let workspace = setup.launch(engine, &stream(), &setup.tensors()).unwrap();
        if let Some(folder) = std::env::var_os("SIGMASCALE_KEEP") {
            setup.keep(Path::new(&folder), seed, &workspace);
        }
        if let Some(complaint) = setup.complaint() {
            wrong.push(format!("{case:?}: {complaint}"));
        }
    }
    assert!(wrong.is_empty(), "{} calls: {}", wrong.len(), wrong.join("\n"));
}

const LENGTHS: [usize; 12] = [0, 1, 14, 15, 16, 17, 126, 127, 128, 129, 500, 1000];

fn every_layout(case: &Case) -> impl Iterator<Item = Case> {
    [(false, 128), (true, 128), (false, 64), (true, 64)].map(|(rows, d)| Case { rows, d, ..case.clone() }).into_iter()
}

fn decoding_over_pages_is_plain_attention() {
    check(
        [16, 32, 64, 128, 256]
            .into_iter()
            .flat_map(|page_size| every_layout(&Case::decode(&LENGTHS, page_size)).collect::<Vec<_>>()),
    );
    // Several parts a sequence, beside short ones; several items a block; more sequences than threads of a block; groups of odd
    // sizes; queries that are E4M3; both kinds of rotation
    let long = Case::decode(&[20_000, 5, 3000, 0], 64);
    let many =
        Case { heads_q: 4, heads_kv: 1, ..Case::decode(&(0..300).map(|i| i * 37 % 190).collect::<Vec<_>>(), 32) };
    let cases = [
        long.clone(),
        Case { rows: true, ..long.clone() },
        Case { processors: 3, ..long.clone() },
        Case { processors: 3, rows: true, d: 64, ..Case::decode(&LENGTHS, 32) },
        many.clone(),
        Case { processors: 3, ..many },
        Case { heads_q: 10, heads_kv: 2, ..Case::decode(&LENGTHS, 64) },
        Case { heads_q: 3, heads_kv: 3, ..Case::decode(&LENGTHS, 64) },
        Case { heads_q: 71, heads_kv: 1, ..Case::decode(&[300, 40], 64) },
        Case { q8: true, ..Case::decode(&LENGTHS, 64) },
        Case { rope: Some(false), ..Case::decode(&LENGTHS, 64) },
        Case { rope: Some(true), rows: true, d: 64, ..Case::decode(&LENGTHS, 16) },
    ];
    check(cases);
}

fn drafts_and_chunks_over_pages_are_plain_attention() {
    let drafts = Case { len_q: 4, new: 4, ..Case::decode(&LENGTHS, 64) };
    // Queries that see no key, since there are fewer of these.
    let few = Case { len_q: 4, new: 0, lengths: vec![0, 1, 2, 3, 4, 5, 130], ..drafts.clone() };
    let chunk = Case { len_q: 512, new: 512, lengths: vec![0, 300, 1000], ..drafts.clone() };
    let mut cases: Vec<Case> = [drafts.clone(), few.clone(), chunk.clone()].iter().flat_map(every_layout).collect();
    cases.extend([
        Case { mask: Mask::NONE, ..drafts.clone() },
        Case { mask: Mask::NONE, rows: true, ..few },
        Case { len_q: 100, new: 7, page_size: 16, heads_q: 6, lengths: vec![0, 5, 250], ..drafts.clone() },
        Case { rope: Some(false), page_size: 256, ..chunk.clone() },
        Case { rows: true, processors: 3, page_size: 128, ..chunk },
        Case { len_q: 33, new: 33, lengths: vec![6000], ..drafts },
    ]);
    check(cases);
}

fn parts_of_blocks_that_are_not_full_are_joined() {
    // As many parts as are asked for, of sequences whose queries leave the last block of rows in part empty.
    let asked = |parts, len_q, heads_q, lengths: &[usize]| Case {
        len_q,
        new: 0,
        heads_q,
        lengths: lengths.to_vec(),
        splits: gpu::Splits::Parts(parts),
        ..Case::decode(&[], 32)
    };
    check([
        asked(2, 1, 2, &[300, 200]),
        asked(3, 2, 4, &[400, 40, 300]),
        asked(2, 17, 16, &[300, 200]),
        Case { rows: true, d: 64, ..asked(3, 40, 8, &[500, 60, 900, 41, 1, 0, 400]) },
        asked(7, 65, 2, &[1000, 300]),
        Case { mask: Mask::NONE, rows: true, ..asked(16, 33, 6, &[2100, 5, 129]) },
    ]);
}

fn pages_repeat_bit_for_bit_and_from_a_graph() {
    let case = Case { rows: true, new: 0, lengths: vec![9000, 77, 4000], ..Case::decode(&[], 64) };
    let setup = Setup::new(&case, 5);
    let (engine, stream, tensors) = (Cuda::new(device()).unwrap(), stream(), setup.tensors());
    setup.launch(&engine, &stream, &tensors).unwrap();
    let first = setup.buffers[5].read().unwrap();
    let bytes = Cuda::workspace_bytes(&setup.call(), &tensors).unwrap();
    let memory = scratch(bytes);
    // SAFETY: the memory outlives the graph's work, which is waited for.
    let workspace = unsafe { memory.view(Element::U8, [bytes]).unwrap() };
    let graph = stream.capture(|stream| engine.launch(stream, &setup.call(), &tensors, &workspace)).unwrap();
    for _ in 0..3 {
        setup.buffers[5].write(&vec![0xff; first.len()]).unwrap();
        graph.launch().unwrap();
        stream.synchronize().unwrap();
        assert!(setup.buffers[5].read().unwrap() == first);
    }
    // Other lengths, the same graph: as a call of its own.
    setup.tables[1].write(&[100, 60, 2500]).unwrap();
    graph.launch().unwrap();
    stream.synchronize().unwrap();
    let replayed = setup.buffers[5].read().unwrap();
    setup.launch(&engine, &stream, &tensors).unwrap();
    assert!(setup.buffers[5].read().unwrap() == replayed && replayed != first);
}

pub(super) fn wrong_tables_are_named_and_harm_nothing() {
    let case = Case { rows: true, ..Case::decode(&[100, 60], 64) };
    let checking = Cuda::new(device()).unwrap().with_table_checks(true);
    let plain = Cuda::new(device()).unwrap();
    let good = Setup::new(&case, 9);
    good.launch(&checking, &stream(), &good.tensors()).unwrap();
    type Change = fn(&mut [i32], &mut [i32]);
    let cases: [(&str, Change); 6] = [
        ("lengths[1] = -1 must be from 0 to", |_, lengths| lengths[1] = -1),
        ("lengths[0] = 100000 must be from 0 to", |_, lengths| lengths[0] = 100_000),
        ("block_table[0][1] = -7 is not one of", |table, _| table[1] = -7),
        ("block_table[1][0] = 1000000 is not one of", |table, _| table[4] = 1_000_000),
        ("block_table[0][1] =", |table, _| table[1] = table[4]),
        ("block_table[0][1] =", |table, _| table[1] = table[0]),
    ];
    for (message, change) in cases {
        let setup = Setup::new(&case, 9);
        let (mut table, mut lengths) = (setup.tables[0].read().unwrap(), setup.tables[1].read().unwrap());
        assert_eq!(table.len(), 8);
        change(&mut table, &mut lengths);
        setup.tables[0].write(&table).unwrap();
        setup.tables[1].write(&lengths).unwrap();
        let error = setup.launch(&checking, &stream(), &setup.tensors()).unwrap_err();
        assert!(error.is_argument() && error.to_string().contains(message), "{error}");
        setup.launch(&plain, &stream(), &setup.tensors()).unwrap();
    }
}
