//! The GPU backend: fused E4M3 attention on Hopper, on tensors in device memory.
//!
//! [`Cuda::launch`] is the entry for callers whose tensors are on the device: it puts the cast (with RoPE, if asked for)
//! and the attention on their stream, with descales that their plan left in device memory, and neither allocates nor
//! waits. [`Attention::forward`] does the same for host memory and is there to compare, not to be fast.
//!
//! ```no_run
//! use sigmascale::device::attention::{Cuda, DeviceCall, Element, Keys, Tensors, View, Workspace};
//! use sigmascale::attention::{AttentionShape, PvAccumulator};
//! use sigmascale::cuda::{Device, DevicePtr};
//! # fn example([q, k, v, out, workspace]: [DevicePtr; 5]) -> sigmascale::Result<()> {
//! let device = Device::open(0)?;
//! let attention = Cuda::new(&device)?;
//! let shape = AttentionShape { batch: 2, n_q_heads: 64, n_kv_heads: 8, len_q: 8192, len_k: 8192, d_head: 128, d_v: 128 };
//! let call = DeviceCall::causal(shape);
//! let bytes = Workspace::of(&call, Element::Bf16, PvAccumulator::default(), false).bytes;
//! // SAFETY: the pointers reach arrays of these shapes, which outlive the work.
//! let (tensors, workspace) = unsafe {
//!     let tensors = Tensors {
//!         q: View::dense(q, Element::Bf16, [2, 8192, 64, 128]),
//!         keys: Keys::Rows {
//!             k: View::dense(k, Element::Bf16, [2, 8192, 8, 128]),
//!             v: View::dense(v, Element::Bf16, [2, 8192, 8, 128]),
//!         },
//!         out: View::dense(out, Element::Bf16, [2, 8192, 64, 128]),
//!         descales: Default::default(),
//!         rope: None,
//!         accumulator: PvAccumulator::default(),
//!         saved: None,
//!         lse: None,
//!         stats: None,
//!     };
//!     (tensors, View::dense(workspace, Element::U8, [bytes]))
//! };
//! let stream = device.stream()?;
//! attention.launch(&stream, &call, &tensors, &workspace)?;
//! # Ok(())
//! # }
//! ```
//!
//! **Where it differs from the CPU**, beyond the order of sums: the tensor core's FP8 accumulator of q . k truncates, so a
//! logit lies nearer to zero by up to 1e-3 of `tau sum |q k|` (measured: 1e-4 on Gaussian data, 8.4e-4 for q = k, whose
//! terms all have one sign). Maximum and minimum of the logits are those of such logits, and a count of overflow differs
//! where a logit lies that near to its threshold. The output is BF16 at best. NaN in v reaches all rows of its tile of keys,
//! not only those that see it.
//!
//! **Not counted on the device**: logits that are not finite (a NaN shows in the output), logits past 464 descales, and
//! overflow of the output's cast. [`Attention::forward`] counts the last two.

use super::engine::Cuda;
use super::host::{HostOutput, Resident, Setup};
use crate::attention::{
    Attention, AttentionCall, AttentionOutput, Cast, CenteredOutput, Inputs, Keeps, LogitCast, Precision,
    PvAccumulator, Sequence, check, key_offsets,
};
use crate::cuda::Element;
use crate::error::{Error, Result};
use crate::fp8::Format;
use crate::plan::{Center, ScalePlan};
use crate::scale::Descale;
use crate::stats::{CastStats, StepStats, StepWords, stats_words};

/// The device's telemetry as [`StepStats`], with the number of values that `calls` calls like this one saw; `words` are
/// those of [`Tensors::stats`](super::Tensors::stats). With a soft-cap the words hold the extremes of
/// raw logits; the result has those of capped ones, computed from them.
///
/// # Errors
/// If there are not [`stats_words`] words.
pub fn step_stats(call: &AttentionCall, words: &[u32], calls: u64) -> Result<StepStats> {
    let shape = &call.shape;
    let (n_q, n_kv) = (shape.n_q_heads, shape.n_kv_heads);
    let Some(row) = StepWords::from_row(words, n_q, n_kv) else {
        let want = stats_words(n_q, n_kv);
        return Err(Error::argument(format_args!("telemetry has {} words where the call leaves {want}", words.len())));
    };
    let mut stats = StepStats::from(&row);
    let pairs = calls * call.pairs();
    for s in &mut stats.logits {
        s.count = pairs;
        if let Some(cap) = call.soft_cap {
            let capped = |raw: f32| (cap * (f64::from(raw) / cap).tanh()) as f32;
            // None was seen: infinities stay.
            (s.max, s.min) = if s.max < s.min { (s.max, s.min) } else { (capped(s.raw_max), capped(s.raw_min)) };
        }
    }
    let sequences = call.all_sequences();
    let rows = |of: fn(&Sequence) -> usize| calls * sequences.iter().map(|s| of(s) as u64).sum::<u64>();
    let (q, kv) = (rows(|s| s.q.len()), rows(|s| s.k.len()));
    let [q, o, k, v] = [(q, shape.d_head), (q, shape.d_v), (kv, shape.d_head), (kv, shape.d_v)];
    for (heads, (rows, d)) in [(&mut stats.q, q), (&mut stats.o, o), (&mut stats.k, k), (&mut stats.v, v)] {
        heads.iter_mut().for_each(|s| s.count = rows * d as u64);
    }
    Ok(stats)
}

impl Attention for Cuda {
    /// Takes the precisions of [`Precision::hopper`], with any logits and output, and a plan with descales of all operands;
    /// everything else is refused. The output is BF16 where the precision leaves it in f32.
    fn forward(
        &self,
        call: &AttentionCall<'_>,
        inputs: &Inputs<'_>,
        plan: &ScalePlan,
        precision: &Precision,
    ) -> Result<AttentionOutput> {
        check(call, inputs, plan)?;
        let accumulator = precision.pv_accumulator;
        let Precision { logits, output, .. } = *precision;
        let offered = Precision { logits, output, ..Precision::hopper(accumulator) };
        if *precision != offered || !matches!(output, Cast::F32 | Cast::E4m3) {
            return Err(Error::unsupported(format_args!(
                "the GPU computes with the precision INFERENCE or TRAINING, or another of Precision::hopper, which is not \
                 {precision:?}"
            )));
        }
        let operands = &plan.operands;
        let Some(v) = &operands.v else {
            return Err(Error::unsupported("the GPU casts v, and the plan has no descales for it"));
        };
        let values = |row: &[Descale]| row.iter().map(|d| d.get()).collect::<Vec<f32>>();
        let rows = [values(&operands.q), values(&operands.k), values(v)];
        let logit = values(&plan.logit_descale);
        let o_descale = operands.o.as_deref().map(values);
        let setup = Setup {
            call: *call,
            operands: Element::F32,
            descales: [&rows[0], &rows[1], &rows[2]],
            rope: None,
            stats: true,
            accumulator,
            keeps: Keeps::Nothing,
            logit: (precision.logits == LogitCast::E4m3).then_some(&logit[..]),
            output: o_descale.as_deref().filter(|_| precision.output == Cast::E4m3),
        };
        let host = Host { setup, inputs };
        let HostOutput { mut out, mut lse, stats } = self.run(&host)?;
        let mut stats = step_stats(call, &stats, 1)?;
        if precision.logits != LogitCast::F32 {
            self.count_logits(&host, &logit, &mut stats)?;
        }
        if let Some(descales) = &operands.o {
            self.count_output(&host, descales, &out, &mut stats)?;
        }
        if let Some(row) = host.setup.output {
            let d = call.shape.d_v;
            for (at, head) in out.chunks_exact_mut(d).enumerate() {
                let descale = row[call.shape.kv_head(at % call.shape.n_q_heads)];
                head.iter_mut().for_each(|x| *x *= descale);
            }
        }
        let centered = call.center.map(|center| CenteredOutput { out: without(&out, center, call), lse: lse.clone() });
        if let Some(offsets) = key_offsets(call, inputs, plan, precision)? {
            lse.iter_mut().zip(offsets).for_each(|(lse, offset)| *lse += offset);
        }
        Ok(AttentionOutput { out, lse, centered, sums: None, stats })
    }
}

/// The output without m in the rows that see a key; others have none.
fn without(out: &[f32], center: &Center, call: &AttentionCall<'_>) -> Vec<f32> {
    let shape = call.shape;
    let mut own = out.to_vec();
    for sequence in call.all_sequences().iter() {
        for row in (0..sequence.q.len()).filter(|row| !call.visible(sequence, *row).is_empty()) {
            for head in 0..shape.n_q_heads {
                let Some(m) = center.m(shape.kv_head(head)) else { continue };
                let at = shape.out_at(sequence.q.start + row, head);
                own[at..][..shape.d_v].iter_mut().zip(m).for_each(|(o, m)| *o -= m);
            }
        }
    }
    own
}

/// A call from host memory.
#[derive(Clone, Copy)]
struct Host<'a> {
    setup: Setup<'a>,
    inputs: &'a Inputs<'a>,
}

impl Cuda {
    fn run(&self, host: &Host<'_>) -> Result<HostOutput> {
        let mut call = Resident::new(self, &host.setup)?;
        let Inputs { q, k, v } = host.inputs;
        call.write([q, k, v].map(|x| bytemuck::cast_slice(x)))?;
        let stream = self.device().stream()?;
        call.launch(self, &stream)?;
        call.read()
    }

    /// Counts logits past 448 and 464 descales where the extremes say that there are any: the kernel counts in the mode
    /// that casts them, so it runs again in that mode for what one run does not tell.
    fn count_logits(&self, host: &Host<'_>, descales: &[f32], stats: &mut StepStats) -> Result<()> {
        let past = |limit: f32| stats.logits.iter().zip(descales).any(|(s, d)| s.amax() / d > limit);
        let (any, any_beyond) = (past(448.0), past(464.0));
        let count = |factor: f32| {
            let row: Vec<f32> = descales.iter().map(|d| d * factor).collect();
            let setup = Setup { logit: Some(&row), output: None, accumulator: PvAccumulator::default(), ..host.setup };
            let run = self.run(&Host { setup, ..*host })?;
            Ok::<_, Error>(run.stats.chunks_exact(4).map(|words| u64::from(words[3])).collect::<Vec<_>>())
        };
        if any && host.setup.logit.is_none() {
            let counts = count(1.0)?;
            stats.logits.iter_mut().zip(counts).for_each(|(s, n)| s.overflow = n);
        }
        if any_beyond {
            let counts = count(464.0 / 448.0)?;
            stats.logits.iter_mut().zip(counts).for_each(|(s, n)| s.beyond_rounding = n);
        }
        Ok(())
    }

    /// Counts output values against their descale, on the BF16 output.
    fn count_output(&self, host: &Host<'_>, descales: &[Descale], out: &[f32], stats: &mut StepStats) -> Result<()> {
        let group = host.setup.call.shape.n_q_heads / host.setup.call.shape.n_kv_heads;
        let past = |(head, s): (usize, &CastStats)| s.amax / descales[head / group].get() > 448.0;
        if !stats.o.iter().enumerate().any(past) && out.iter().all(|x| x.is_finite()) {
            return Ok(());
        }
        let plain = if host.setup.output.is_some() {
            Some(self.run(&Host { setup: Setup { output: None, ..host.setup }, ..*host })?.out)
        } else {
            None
        };
        let mut counts = vec![crate::fp8::Counts::default(); host.setup.call.shape.n_q_heads];
        for (at, row) in plain.as_deref().unwrap_or(out).chunks_exact(host.setup.call.shape.d_v).enumerate() {
            let head = at % host.setup.call.shape.n_q_heads;
            counts[head] += Format::E4m3.count_slice(row, descales[head / group].quant_scale().get())?;
        }
        for (o, counts) in stats.o.iter_mut().zip(counts) {
            *o = CastStats { amax: if counts.amax.is_nan() { counts.amax } else { o.amax }, ..counts.into() };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::{AttentionShape, Mask};
    use crate::stats::LogitStats;
    use crate::stats::ordered;

    fn call() -> AttentionCall<'static> {
        let shape = AttentionShape { batch: 2, n_q_heads: 4, n_kv_heads: 2, len_q: 3, len_k: 5, d_head: 64, d_v: 64 };
        AttentionCall::causal(shape)
    }

    #[test]
    fn what_the_gpu_does_not_offer_is_refused_by_name() {
        let taken = |call: &AttentionCall| call.on_device(None, None, None)?.check();
        let refusal = |call: &AttentionCall| taken(call).unwrap_err();
        assert!(taken(&AttentionCall { mask: Mask::sliding(4), soft_cap: Some(50.0), ..call() }).is_ok());
        let cap = refusal(&AttentionCall { soft_cap: Some(-1.0), ..call() });
        assert!(cap.is_argument() && cap.to_string().contains("soft-cap -1"), "{cap}");
        let dims = |d_head, d_v| AttentionCall { shape: AttentionShape { d_head, d_v, ..call().shape }, ..call() };
        let wide = refusal(&dims(256, 264));
        assert!(wide.is_unsupported() && wide.to_string().contains("d_v 264"), "{wide}");
        let odd = refusal(&dims(100, 100));
        assert!(odd.is_argument() && odd.to_string().contains("100"), "{odd}");
        for (d_head, d_v) in [(16, 16), (40, 40), (96, 96), (192, 128), (256, 256), (64, 256)] {
            assert!(taken(&dims(d_head, d_v)).is_ok(), "{d_head}, {d_v}");
        }
        let empty = refusal(&AttentionCall { shape: AttentionShape { len_k: 0, ..call().shape }, ..call() });
        assert!(empty.is_argument(), "as on the CPU: {empty}");
    }

    #[test]
    fn telemetry_words_become_statistics() {
        let mut words = vec![0u32; stats_words(4, 2)];
        words[..4].copy_from_slice(&[ordered(3.5), !ordered(-2.0), 1.25f32.to_bits(), 7]);
        words[4..8].copy_from_slice(&[ordered(-1.0), !ordered(-9.0), 0, 0]);
        words[4 * 9..4 * 10].copy_from_slice(&[2.5f32.to_bits(), 3, 2, 1]);
        let stats = step_stats(&call(), &words, 1).unwrap();
        // Rows of 3, 4 and 5 keys in each of two sequences.
        let first = LogitStats {
            max: 3.5,
            min: -2.0,
            raw_max: 3.5,
            raw_min: -2.0,
            overflow: 7,
            beyond_rounding: 0,
            non_finite: 0,
            count: 24,
        };
        assert_eq!(stats.logits[0], first);
        assert_eq!((stats.logits[1].max, stats.logits[1].min), (-1.0, -9.0));
        assert_eq!((stats.logits[2].max, stats.logits[2].min), (f32::NEG_INFINITY, f32::INFINITY));
        assert_eq!(stats.o[0].amax, 1.25);
        let k = CastStats { amax: 2.5, overflow: 3, beyond_rounding: 2, non_finite: 1, count: 2 * 5 * 64 };
        assert_eq!(stats.k[1], k);
        assert_eq!((stats.q.len(), stats.k.len(), stats.v.len(), stats.q[0].count), (4, 2, 2, 2 * 3 * 64));
        assert!(step_stats(&call(), &words[1..], 1).is_err());
    }
}
