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
use super::kernels::{Kernels, Tells, run_map};
use super::params;
use super::sizes::outer_strides;
use super::terms::{DeviceCall, Features};
use crate::attention::Keeps;
use crate::cuda::{Arch, Device, Launch, Request, SideStreams, Stream, View, sources};
use crate::error::{Error, Result};
use std::sync::Arc;

/// Threads of a block, of the backward and of the other two.
const BLOCK: u32 = 384;
const ROWS_BLOCK: u32 = 256;

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
        let rows = BackwardForm {
            used: form.columns,
            causal: false,
            features: Features { soft_cap: false, ..form.features },
            ..form
        };
        // delta is the first kernel's.
        let keeps = if form.keeps == Keeps::Fp8Dq { form.keeps } else { Keeps::Nothing };
        let rest = BackwardForm { keeps, ..form };
        let backward = BackwardForm { features: Features { sink: false, center: false, ..form.features }, ..rest };
        let backward = Self::Backward { form: backward, deterministic, splits };
        let finish = BackwardForm { keeps, features: Features { center: false, ..rows.features }, ..rows };
        [Self::Prepare(rows), backward, Self::Finish(finish)]
    }
}

impl super::kernels::Variant for Variant {
    fn request(self) -> Request {
        let of = |source, form: BackwardForm| {
            let mut request = Request::new(source, Arch::SM90A).define("HEAD_DIM", form.columns);
            request = request.define("BLOCK_KEYS", form.keys()).define("BLOCK_ROWS", form.rows());
            if form.used < form.columns {
                request = request.define("COLUMNS", form.used);
            }
            let flags = [
                ("FILL", form.fill),
                ("CAUSAL", form.causal),
                ("DQ8", form.keeps == Keeps::Fp8Dq),
                ("RESIDUAL", form.keeps == Keeps::UnroundedDelta),
            ];
            let given = flags.into_iter().filter(|(_, given)| *given);
            given.fold(form.features.define(request), |request, (name, _)| request.define(name, 1))
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

    fn tells(self) -> Tells {
        if matches!(self, Self::Backward { .. }) { Tells::Shared } else { Tells::Nothing }
    }
}

/// Variants of the backward's kernels: every one of dense calls, and of the others one for each kind of what they add.
#[cfg(test)]
pub(in crate::device) fn backward_variants() -> Vec<Request> {
    use super::kernels::Variant as _;
    let mut all = Vec::new();
    let none = Features::default();
    let [varlen, window] = [Features { varlen: true, ..none }, Features { window: true, ..none }];
    let every = Features { window: true, varlen: true, soft_cap: true, sink: true, center: false };
    let center = Features { center: true, ..none };
    for columns in [64, 128, 256] {
        let plain =
            BackwardForm { columns, used: columns, fill: false, causal: false, features: none, keeps: Keeps::Nothing };
        for causal in [false, true] {
            let form = BackwardForm { causal, ..plain };
            all.extend(Variant::all(form, true, 1));
            let splits: &[usize] = if columns == 128 { &[1, 2, 4] } else { &[1] };
            for &splits in splits {
                let dense = |form| Variant::Backward { form, deterministic: false, splits };
                all.push(dense(form));
                if columns == 128 {
                    all.push(dense(BackwardForm { keeps: Keeps::Fp8Dq, ..form }));
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
            BackwardForm { causal: true, features: Features { soft_cap: true, ..none }, ..plain },
            BackwardForm { causal: true, features: varlen, ..plain },
            BackwardForm { features: Features { sink: true, ..window }, ..plain },
            BackwardForm { features: every, ..plain },
            BackwardForm { features: center, ..plain },
        ] {
            all.extend(Variant::all(form, false, 1));
            all.extend(Variant::all(BackwardForm { keeps: Keeps::UnroundedDelta, ..form }, false, 1));
        }
        if columns == 256 {
            continue;
        }
        for form in [
            BackwardForm { causal: true, ..plain },
            BackwardForm { fill: true, used: columns.min(96), ..plain },
            BackwardForm { features: every, ..plain },
            BackwardForm { features: center, ..plain },
        ] {
            let form = BackwardForm { keeps: Keeps::Fp8Dq, ..form };
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

    /// Bytes of device memory that a call needs besides its tensors.
    ///
    /// # Errors
    /// If the call is not offered.
    pub fn workspace_bytes(&self, call: &DeviceCall) -> Result<usize> {
        Ok(BackwardWorkspace::of(call, &self.options, self.processors())?.bytes)
    }

    /// Compiles and loads what this call needs, which otherwise its first launch does. A capture needs this before it.
    ///
    /// # Errors
    /// If the call is not offered, or a kernel does not compile or load.
    pub fn prepare(&self, call: &DeviceCall) -> Result<()> {
        let form = BackwardForm::of(call, &self.options)?;
        let mut variants = Vec::new();
        for [entries, kv_heads] in self.parts(call, &form).all(&call.shape) {
            let sizes = Parts { entries: entries.len(), kv_heads: kv_heads.len() }.largest(&call.shape);
            let part = call.part(sizes, 0..sizes.n_kv_heads);
            for variant in Variant::all(form, self.options.deterministic, self.schedule(&part, &form).splits) {
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
        call: &DeviceCall,
        tensors: &BackwardTensors,
        workspace: &View<1>,
    ) -> Result<()> {
        tensors.check(call)?;
        let form = BackwardForm::of(call, &self.options)?;
        let place = BackwardWorkspace::of(call, &self.options, self.processors())?;
        place.check(workspace)?;
        let (kept, wanted) = (tensors.keeps(), self.options.keeps);
        if kept != wanted {
            return Err(Error::argument(format_args!(
                "the tensors are those of a forward that keeps {}, and the engine is for {}",
                kept.name(),
                wanted.name()
            )));
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
        let mut parts = self.parts(call, &form).all(&call.shape).enumerate();
        let launched = parts.try_for_each(|(index, [entries, kv_heads])| {
            let (lane, follows) = (index % lanes.len(), index >= lanes.len());
            let start = workspace.ptr().offset((lane * place.lane) as u64).0;
            let tensors = tensors.part(entries, kv_heads.clone());
            let call = call.part(tensors.shape(), kv_heads);
            self.launch(&lanes[lane], &call, form, &tensors, (&place, start), follows)
        });
        lanes[1..].iter().try_for_each(|side| stream.wait_for(side))?;
        launched
    }

    /// Launches the kernels of a part, whose workspace starts at an address. `follows`: another part of the same call, in that
    /// workspace.
    fn launch(
        &self,
        stream: &Stream,
        call: &DeviceCall,
        form: BackwardForm,
        tensors: &BackwardTensors,
        (place, start): (&BackwardWorkspace, u64),
        follows: bool,
    ) -> Result<()> {
        tensors.check(call)?;
        let (sizes, schedule) = (&call.shape, self.schedule(call, &form));
        let variants = Variant::all(form, self.options.deterministic, schedule.splits);
        let [prepare, backward, finish] = variants.map(|variant| self.kernels.load(variant));
        let (prepare, backward, finish) = (prepare?, backward?, finish?);

        let [units, query_tiles, _] = form.tiles(call);
        let mut params = params::Backward::of(call, tensors, &self.kernels);
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
        let value_norm = tensors.bounds.and_then(|bounds| bounds.value_norm);
        let mut with_bounds = params::Fp8Backward {
            backward: params,
            row_max: tensors.bounds.map_or(0, |bounds| bounds.row_max.ptr().0),
            value_norm: value_norm.map_or(0, |x| x.ptr().0),
            value_norm_strides: value_norm.map_or([0; 2], |x| x.strides()),
        };
        let (residual, residual_strides) = match &tensors.delta {
            Delta::Unrounded { residual, .. } => (residual.ptr().0, outer_strides(residual)),
            _ => (0, [0; 3]),
        };
        // Kernels that take neither have no place for what follows: theirs are the bytes in front.
        let mut unrounded = params::UnroundedBackward { backward: params, residual, residual_strides };
        let params =
            if form.keeps == Keeps::Fp8Dq { (&raw mut with_bounds).cast() } else { (&raw mut unrounded).cast() };
        // SAFETY: 1. the struct, and two maps before it, are the kernels' parameters; 2. and 3. every address comes from a view
        // whose shape was checked, or lies in the workspace; each kernel waits for the one in front of it before it reads
        // or writes.
        unsafe {
            prepare.kernel.launch_parameters(stream, tiles, &mut [params], follows)?;
            backward.kernel.launch_parameters(stream, keys, &mut [q8, d_out, params], true)?;
            finish.kernel.launch_parameters(stream, tiles, &mut [params], true)
        }
    }

    fn parts(&self, call: &DeviceCall, form: &BackwardForm) -> Parts {
        Parts::of(call, form, self.options.sums_limit, self.processors())
    }

    fn schedule(&self, call: &DeviceCall, form: &BackwardForm) -> BackwardSchedule {
        BackwardSchedule::of(call, form, self.options.deterministic, self.processors())
    }

    fn processors(&self) -> usize {
        self.kernels.device.processors()
    }
}
