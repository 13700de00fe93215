//! The backward on the GPU: gradients of q, k and v from the E4M3 operands that the forward multiplied.
//!
//! [`BackwardEngine::backward`] puts three kernels on the caller's stream:
//!
//! 1. **Prepare.** delta, the log-sum-exp to the base 2, sums of dQ cleared.
//! 2. **Backward.** S by the FP8 instruction of the forward, so that P belongs to its log-sum-exp; the other four products in BF16
//!    from exact E4M3 values, descales as scalars. A block owns 128 keys of a KV head and walks all query heads of its group: no
//!    head is expanded, dK and dV are added up in registers, in a fixed order.
//! 3. **Finish.** dQ from f32 sums to BF16.
//!
//! A call in parts ([`BackwardOptions::sums_limit`]) does so for each part, in turn on the caller's stream and on a second one, for
//! which the caller's waits.
//!
//! dQ is added up in the order in which blocks arrive, so its last bits differ from run to run; by
//! [`with_deterministic`](BackwardEngine::with_deterministic) in the order of the keys. dK and dV are the same in every run.
//!
//! Nothing is allocated and nothing waited for once the kernels are loaded ([`BackwardEngine::prepare`]), so a call can be captured.
//!
//! Windows, sequences, sinks, soft-caps and head dimensions from 16 to 256 are macros of the kernels, compiled when a call asks for them.
//!
//! **Not offered**, and refused by name: logits in E4M3, and dQ in FP8 for heads of more than 128.

use super::backward_call::{BackwardOptions, BackwardTensors, Delta};
use super::backward_cut::{BackwardForm, BackwardSchedule, BackwardWorkspace, Parts};
use super::kernels::{Kernels, Variant as _, run_map};
use super::params::outer_strides;
use super::terms::{Sequences, Terms};
use crate::attention::AttentionShape;
use crate::cuda::{Arch, Device, Launch, Request, SideStreams, Stream, View, sources};
use crate::error::{Error, Result};
use bytemuck::{Pod, Zeroable};
use std::sync::Arc;

/// Threads of a block, of the backward and of the other two.
const BLOCK: u32 = 384;
const ROWS_BLOCK: u32 = 256;

/// `Backward` of the kernels, byte for byte. Pointers may be 0 where they say so; strides count elements.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct Params {
    q: u64,
    k: u64,
    v: u64,
    o: u64,
    d_out: u64,
    lse: u64,
    delta: u64,
    dq: u64,
    dk: u64,
    dv: u64,
    dq_sum: u64,
    terms: u64,
    turns: u64,
    q_descale: u64,
    k_descale: u64,
    v_descale: u64,
    q_strides: [i64; 3],
    k_strides: [i64; 3],
    v_strides: [i64; 3],
    o_strides: [i64; 3],
    d_out_strides: [i64; 3],
    dq_strides: [i64; 3],
    dk_strides: [i64; 3],
    dv_strides: [i64; 3],
    q_descale_strides: [i64; 2],
    k_descale_strides: [i64; 2],
    v_descale_strides: [i64; 2],
    softmax_scale: f32,
    batch: i32,
    heads_q: i32,
    heads_kv: i32,
    len_q: i32,
    len_k: i32,
    q_tiles: i32,
    diagonal: i32,
    section: i32,
    d: i32,
    q_starts: u64,
    q_ends: u64,
    k_starts: u64,
    k_ends: u64,
    sequences: i32,
    unused: i32,
    sinks: u64,
    d_sinks: u64,
    sink_parts: u64,
    soft_cap: f32,
    window_left: i32,
    window_right: i32,
    d_v: i32,
}
const _: () = assert!(size_of::<Params>() == 488, "the kernels assert the same");

/// What follows them where dQ is in FP8.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct BoundParams {
    row_max: u64,
    value_norm: u64,
    value_norm_strides: [i64; 2],
}

#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct Fp8Params {
    params: Params,
    bounds: BoundParams,
}

/// What follows them in the first kernel where delta is that of the output before its rounding.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct UnroundedParams {
    params: Params,
    residual: u64,
    residual_strides: [i64; 3],
}

/// Compiled form of one kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Variant {
    Prepare(BackwardForm),
    Backward { form: BackwardForm, deterministic: bool, splits: usize },
    Finish(BackwardForm),
}

impl Variant {
    /// The kernels of a call, in their order. Forms are without what a kernel does not look at, so that calls share it.
    fn all(form: BackwardForm, deterministic: bool, splits: usize) -> [Self; 3] {
        let rows = BackwardForm { used: form.columns, causal: false, soft_cap: false, ..form };
        // delta is the first kernel's.
        let rest = BackwardForm { residual: false, ..form };
        let backward = Self::Backward { form: BackwardForm { sink: false, ..rest }, deterministic, splits };
        [Self::Prepare(rows), backward, Self::Finish(BackwardForm { residual: false, ..rows })]
    }
}

impl super::kernels::Variant for Variant {
    fn request(self) -> Request {
        let of = |source, form: BackwardForm| {
            let mut request = Request::new(source, Arch::SM90A).define("HEAD_DIM", form.columns);
            if form.used < form.columns {
                request = request.define("COLUMNS", form.used);
            }
            let flags = [
                ("FILL", form.fill),
                ("VARLEN", form.varlen),
                ("WINDOW", form.window),
                ("SINK", form.sink),
                ("CAUSAL", form.causal),
                ("SOFT_CAP", form.soft_cap),
                ("DQ8", form.dq_fp8),
                ("RESIDUAL", form.residual),
            ];
            flags.into_iter().filter(|(_, given)| *given).fold(request, |request, (name, _)| request.define(name, 1))
        };
        match self {
            Self::Prepare(form) => of(sources::BACKWARD_PREPARE, form),
            Self::Backward { form, deterministic, splits } => {
                of(sources::BACKWARD, form).define("DETERMINISTIC", u8::from(deterministic)).define("SPLITS", splits)
            }
            Self::Finish(form) => of(sources::BACKWARD_FINISH, form),
        }
    }

    fn entry(self) -> &'static str {
        match self {
            Self::Prepare { .. } => "attention_backward_prepare",
            Self::Backward { .. } => "attention_backward",
            Self::Finish { .. } => "attention_backward_finish",
        }
    }

    fn has_shared(self) -> bool {
        matches!(self, Self::Backward { .. })
    }
}

/// Variants of the backward's kernels: every one of dense calls, and of the others one for each kind of what they add.
pub fn backward_variants() -> Vec<Request> {
    let mut all = Vec::new();
    for columns in [64, 128, 256] {
        let plain = BackwardForm {
            columns,
            used: columns,
            fill: false,
            causal: false,
            window: false,
            varlen: false,
            soft_cap: false,
            sink: false,
            dq_fp8: false,
            residual: false,
        };
        for causal in [false, true] {
            let form = BackwardForm { causal, ..plain };
            all.extend(Variant::all(form, true, 1));
            let splits: &[usize] = if columns == 128 { &[1, 2, 4] } else { &[1] };
            for &splits in splits {
                let dense = |form| Variant::Backward { form, deterministic: false, splits };
                all.push(dense(form));
                if columns == 128 {
                    all.push(dense(BackwardForm { dq_fp8: true, ..form }));
                }
            }
        }
        for form in [
            BackwardForm {
                causal: true,
                fill: true,
                used: if columns == 256 { 192 } else { columns.min(96) },
                ..plain
            },
            BackwardForm { causal: true, soft_cap: true, ..plain },
            BackwardForm { causal: true, varlen: true, ..plain },
            BackwardForm { window: true, sink: true, ..plain },
            BackwardForm { window: true, varlen: true, soft_cap: true, sink: true, ..plain },
        ] {
            all.extend(Variant::all(form, false, 1));
            all.extend(Variant::all(BackwardForm { residual: true, ..form }, false, 1));
        }
        if columns == 256 {
            continue;
        }
        for form in [
            BackwardForm { causal: true, ..plain },
            BackwardForm { fill: true, used: columns.min(96), ..plain },
            BackwardForm { window: true, varlen: true, soft_cap: true, sink: true, ..plain },
        ] {
            let form = BackwardForm { dq_fp8: true, ..form };
            all.extend(Variant::all(form, false, 1));
            // Of 64 columns, deterministic calls have no registers for it, and are refused.
            if columns == 128 {
                all.extend(Variant::all(form, true, 1));
            }
        }
    }
    let mut requests: Vec<Request> = Vec::new();
    for request in all.into_iter().map(|variant| variant.request()) {
        if !requests.contains(&request) {
            requests.push(request);
        }
    }
    requests
}

/// The backward's kernels of one device, loaded as calls need them, and how calls run. Clones share the kernels.
#[derive(Clone, Debug)]
pub struct BackwardEngine {
    kernels: Arc<Kernels<Variant>>,
    sides: Arc<SideStreams>,
    options: BackwardOptions,
}

impl BackwardEngine {
    /// An engine for a device; nothing is compiled yet.
    ///
    /// # Errors
    /// If the device is not of compute capability 9.0 (`is_unsupported`), or the driver fails.
    pub fn new(device: &Device) -> Result<Self> {
        let kernels = Arc::new(Kernels::new(device, "the attention backward")?);
        Ok(Self { kernels, sides: Arc::default(), options: BackwardOptions::default() })
    }

    /// Whether dQ, too, has the same bits in every run; off by default, since it is slower.
    pub fn with_deterministic(mut self, deterministic: bool) -> Self {
        self.options.deterministic = deterministic;
        self
    }

    /// How calls run.
    pub fn with_options(mut self, options: BackwardOptions) -> Self {
        self.options = options;
        self
    }

    /// The engine's device.
    pub fn device(&self) -> &Device {
        &self.kernels.device
    }

    /// Bytes of device memory that a call needs beside its tensors.
    ///
    /// # Errors
    /// If the call is not offered.
    pub fn workspace_bytes(&self, sizes: &AttentionShape, terms: &Terms) -> Result<usize> {
        Ok(BackwardWorkspace::of(sizes, terms, &self.options, self.processors())?.bytes)
    }

    /// Compiles and loads what this call needs, which otherwise its first launch does. A capture needs this before it.
    ///
    /// # Errors
    /// If the call is not offered, or a kernel does not compile or load.
    pub fn prepare(&self, sizes: &AttentionShape, terms: &Terms) -> Result<()> {
        let form = BackwardForm::of(sizes, terms, &self.options)?;
        let mut variants = Vec::new();
        for [entries, kv_heads] in self.parts(sizes, terms, &form).all(sizes) {
            let part = Parts { entries: entries.len(), kv_heads: kv_heads.len() }.largest(sizes);
            for variant in Variant::all(form, self.options.deterministic, self.schedule(&part, terms, &form).splits) {
                if !variants.contains(&variant) {
                    variants.push(variant);
                }
            }
        }
        variants.into_iter().try_for_each(|variant| self.kernels.load(variant).map(drop))
    }

    /// Puts one call on `stream`: gradients of `softmax(softmax_scale q k^T) v` with respect to q, k and v, for d_out.
    /// Asynchronous and capturable.
    ///
    /// The workspace has [`BackwardEngine::workspace_bytes`] bytes, 256-byte aligned, of any content. Calls that can run at the same
    /// time need one each.
    ///
    /// # Errors
    /// If the call is not offered (`is_unsupported`), a tensor breaks a rule of [`BackwardTensors`], a kernel does not compile or load, or the driver refuses a launch.
    pub fn backward(
        &self,
        stream: &Stream,
        terms: &Terms,
        tensors: &BackwardTensors,
        workspace: &View<1>,
    ) -> Result<()> {
        let sizes = tensors.check()?;
        let form = BackwardForm::of(&sizes, terms, &self.options)?;
        let place = BackwardWorkspace::of(&sizes, terms, &self.options, self.processors())?;
        place.check(workspace)?;
        if terms.sinks.is_some() != tensors.d_sinks.is_some() {
            return Err(Error::argument("d_sinks is for calls with sinks, and they need it"));
        }
        if self.options.dq_fp8 != tensors.bounds.is_some() {
            return Err(Error::argument("bounds are for dQ in FP8, which needs them"));
        }
        if self.options.residual != matches!(tensors.delta, Delta::Unrounded { .. }) {
            return Err(Error::argument("Delta::Unrounded is for an engine with the option residual, which needs it"));
        }
        // A thread of an autograd engine may have done nothing on the device so far.
        stream.bind()?;
        // Blocks of one lane take the multiprocessors that the last blocks of the other leave idle.
        let mut lanes = vec![stream.clone()];
        if place.lanes > 1 {
            let side = self.sides.beside(stream, self.device())?;
            side.wait_for(stream)?;
            lanes.push(side);
        }
        let mut parts = self.parts(&sizes, terms, &form).all(&sizes).enumerate();
        let launched = parts.try_for_each(|(index, [entries, kv_heads])| {
            let (lane, follows) = (index % lanes.len(), index >= lanes.len());
            let start = workspace.ptr().offset((lane * place.lane) as u64).0;
            self.launch(&lanes[lane], terms, form, &tensors.part(entries, kv_heads), (&place, start), follows)
        });
        lanes[1..].iter().try_for_each(|side| stream.wait_for(side))?;
        launched
    }

    /// Launches the kernels of a part, whose workspace starts at an address. `follows`: another part of the same call, in that
    /// workspace.
    fn launch(
        &self,
        stream: &Stream,
        terms: &Terms,
        form: BackwardForm,
        tensors: &BackwardTensors,
        (place, start): (&BackwardWorkspace, u64),
        follows: bool,
    ) -> Result<()> {
        let sizes = tensors.check()?;
        let schedule = self.schedule(&sizes, terms, &form);
        let variants = Variant::all(form, self.options.deterministic, schedule.splits);
        let [prepare, backward, finish] = variants.map(|variant| self.kernels.load(variant));
        let (prepare, backward, finish) = (prepare?, backward?, finish?);

        let [units, query_tiles, _] = form.tiles(&sizes, terms);
        let mut params = self.params(tensors, &sizes, terms);
        (params.q_tiles, params.section) = (query_tiles as i32, schedule.section as i32);
        let at = |offset: usize| start + offset as u64;
        (params.terms, params.dq_sum) = (at(place.terms), at(place.dq_sum));
        params.turns = if self.options.deterministic { at(place.turns) } else { 0 };
        params.sink_parts = at(place.sinks);
        let runs = [(&tensors.q, form.columns.min(128)), (&tensors.d_out, 64)];
        let [q8, d_out] = runs.map(|(x, columns)| run_map(x, columns, 1, form.rows()));

        let tiles =
            Launch { grid: ((query_tiles * sizes.n_q_heads) as u32, units as u32, 1), block: ROWS_BLOCK, shared: 0 };
        let keys = Launch::linear(schedule.grid, BLOCK, backward.shared);
        let mut maps = [q8?, d_out?];
        let [q8, d_out] = maps.each_mut().map(|map| (&raw mut *map).cast());
        let mut with_bounds = Fp8Params { params, bounds: self.bounds(tensors) };
        let (residual, residual_strides) = match &tensors.delta {
            Delta::Unrounded { residual, .. } => (residual.ptr().0, outer_strides(residual)),
            _ => (0, [0; 3]),
        };
        // Kernels that take neither have no place for what follows: theirs are the bytes in front.
        let mut unrounded = UnroundedParams { params, residual, residual_strides };
        let params = if form.dq_fp8 { (&raw mut with_bounds).cast() } else { (&raw mut unrounded).cast() };
        // SAFETY: 1. the struct, and two maps before it, are the kernels' parameters; 2. and 3. every address comes from a view
        // whose shape was checked, or lies in the workspace; each kernel waits for the one in front of it before it reads
        // or writes.
        unsafe {
            prepare.kernel.launch_parameters(stream, tiles, &mut [params], follows)?;
            backward.kernel.launch_parameters(stream, keys, &mut [q8, d_out, params], true)?;
            finish.kernel.launch_parameters(stream, tiles, &mut [params], true)
        }
    }

    fn parts(&self, sizes: &AttentionShape, terms: &Terms, form: &BackwardForm) -> Parts {
        Parts::of(sizes, terms, form, self.options.sums_limit, self.processors())
    }

    fn bounds(&self, tensors: &BackwardTensors) -> BoundParams {
        tensors.bounds.as_ref().map_or_else(BoundParams::zeroed, |bounds| BoundParams {
            row_max: bounds.row_max.ptr().0,
            value_norm: bounds.value_norm.map_or(0, |x| x.ptr().0),
            value_norm_strides: bounds.value_norm.map_or([0; 2], |x| x.strides()),
        })
    }

    fn schedule(&self, sizes: &AttentionShape, terms: &Terms, form: &BackwardForm) -> BackwardSchedule {
        BackwardSchedule::of(sizes, terms, form, self.options.deterministic, self.processors())
    }

    fn processors(&self) -> usize {
        self.kernels.device.processors()
    }

    fn params(&self, t: &BackwardTensors, sizes: &AttentionShape, terms: &Terms) -> Params {
        let [q, k, v] = [&t.descales.q, &t.descales.k, &t.descales.v].map(|d| self.kernels.descale(d.as_ref()));
        let (o, o_strides, delta) = match &t.delta {
            Delta::Output(out) | Delta::Unrounded { out, .. } => (out.ptr().0, outer_strides(out), 0),
            Delta::Given(delta) => (0, [0; 3], delta.ptr().0),
        };
        let [left, right] = terms.window(sizes);
        let list =
            |of: fn(&Sequences) -> &View<1>| terms.sequences.as_ref().map_or(0, |sequences| of(sequences).ptr().0);
        Params {
            q: t.q.ptr().0,
            k: t.k.ptr().0,
            v: t.v.ptr().0,
            o,
            d_out: t.d_out.ptr().0,
            lse: t.lse.ptr().0,
            delta,
            dq: t.dq.ptr().0,
            dk: t.dk.ptr().0,
            dv: t.dv.ptr().0,
            q_descale: q.0,
            k_descale: k.0,
            v_descale: v.0,
            q_strides: outer_strides(&t.q),
            k_strides: outer_strides(&t.k),
            v_strides: outer_strides(&t.v),
            o_strides,
            d_out_strides: outer_strides(&t.d_out),
            dq_strides: outer_strides(&t.dq),
            dk_strides: outer_strides(&t.dk),
            dv_strides: outer_strides(&t.dv),
            q_descale_strides: q.1,
            k_descale_strides: k.1,
            v_descale_strides: v.1,
            batch: sizes.batch as i32,
            heads_q: sizes.n_q_heads as i32,
            heads_kv: sizes.n_kv_heads as i32,
            len_q: sizes.len_q as i32,
            len_k: sizes.len_k as i32,
            softmax_scale: terms.softmax_scale,
            diagonal: sizes.len_k as i32 - sizes.len_q as i32,
            d: sizes.d_head as i32,
            d_v: sizes.d_v as i32,
            q_starts: list(|s| &s.q_starts),
            q_ends: list(|s| &s.q_ends),
            k_starts: list(|s| &s.k_starts),
            k_ends: list(|s| &s.k_ends),
            sequences: terms.sequences.map_or(0, |s| s.count() as i32),
            sinks: terms.sinks.map_or(0, |x| x.ptr().0),
            d_sinks: t.d_sinks.map_or(0, |x| x.ptr().0),
            soft_cap: terms.soft_cap.unwrap_or(0.0),
            window_left: left,
            window_right: right,
            ..Zeroable::zeroed()
        }
    }
}
