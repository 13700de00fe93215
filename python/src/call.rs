//! A call of attention as Python describes it, for the CPU and the GPU, forward and backward: tensors by address, and `Terms` of
//! `sigmascale/torch/_terms.py` by its fields.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use sigmascale::attention::{AttentionCall, AttentionShape, Keeps, Mask, PvAccumulator, Sequence};
use sigmascale::cuda::DevicePtr;
use sigmascale::device::attention::{
    BackwardOptions, BackwardTensors, Centers, Delta, Descales, DeviceCall, Element, Keys, NewTokens, PackedQueries,
    RowBounds, SavedOperands, SavedRows, Splits, Tensors, ValuePages, View,
};
use sigmascale::device::attention::{Pages as CachePages, Rope as Tables, Sequences as Places};
use sigmascale::{Error, Result};

/// A tensor of PyTorch: address, type, shape and strides in elements.
pub struct Array {
    pub address: u64,
    /// The type's name where the kernels do not take it.
    element: std::result::Result<Element, String>,
    pub shape: Vec<usize>,
    pub strides: Vec<i64>,
}

impl<'py> FromPyObject<'_, 'py> for Array {
    type Error = PyErr;

    fn extract(tensor: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let py = tensor.py();
        Ok(Self {
            address: tensor.call_method0(intern!(py, "data_ptr"))?.extract()?,
            element: element(&tensor.getattr(intern!(py, "dtype"))?)?,
            shape: tensor.getattr(intern!(py, "shape"))?.extract()?,
            strides: tensor.call_method0(intern!(py, "stride"))?.extract()?,
        })
    }
}

/// The type of elements, by the identity of PyTorch's object: its name takes longer to make than the rest of a tensor to read.
fn element(dtype: &Bound<'_, PyAny>) -> PyResult<std::result::Result<Element, String>> {
    static KNOWN: PyOnceLock<Vec<(Py<PyAny>, Element)>> = PyOnceLock::new();
    let named = [
        ("bfloat16", Element::Bf16),
        ("float16", Element::F16),
        ("float32", Element::F32),
        ("float8_e4m3fn", Element::E4m3),
        ("int32", Element::I32),
        ("uint8", Element::U8),
    ];
    let known = KNOWN.get_or_try_init(dtype.py(), || {
        let torch = dtype.py().import("torch")?;
        named.into_iter().map(|(name, element)| Ok((torch.getattr(name)?.unbind(), element))).collect::<PyResult<_>>()
    })?;
    match known.iter().find(|(object, _)| dtype.is(object)) {
        Some((_, element)) => Ok(Ok(*element)),
        None => Ok(Err(dtype.str()?.to_string())),
    }
}

impl Array {
    pub fn element(&self) -> Result<Element> {
        let refused = |name| Error::argument(format_args!("tensors of type {name} are not taken"));
        self.element.as_ref().copied().map_err(refused)
    }

    pub fn view<const R: usize>(&self, name: &str) -> Result<View<R>> {
        self.view_as(name, self.element()?)
    }

    /// The same with its elements taken as `element`.
    fn view_as<const R: usize>(&self, name: &str, element: Element) -> Result<View<R>> {
        let (Ok(shape), Ok(strides)) =
            (<[usize; R]>::try_from(&self.shape[..]), <[i64; R]>::try_from(&self.strides[..]))
        else {
            return Err(Error::argument(format_args!("{name} must have {R} dimensions, not {}", self.shape.len())));
        };
        // SAFETY: 1. the package reads these off a live tensor of this device; 2. PyTorch's allocator keeps its memory until
        // the work of its stream has run; 3. outputs are tensors of the package's own, and work is ordered by streams.
        Ok(unsafe { View::new(DevicePtr(self.address), element, shape, strides) })
    }
}

fn optional<const R: usize>(name: &str, array: &Option<Array>) -> Result<Option<View<R>>> {
    array.as_ref().map(|array| array.view(name)).transpose()
}

/// Where sequences lie in a padded or packed batch.
#[derive(FromPyObject)]
pub struct Sequences {
    pub q_starts: Array,
    pub q_ends: Array,
    pub k_starts: Array,
    pub k_ends: Array,
    max_len_q: usize,
    max_len_k: usize,
}

/// What the call computes besides its operands.
#[derive(FromPyObject)]
pub struct Terms {
    causal: bool,
    pub scale: f64,
    window_left: Option<usize>,
    window_right: Option<usize>,
    pub soft_cap: Option<f64>,
    pub sinks: Option<Array>,
    k_center: Option<Array>,
    v_center: Option<Array>,
    accumulator: String,
    keeps: String,
    /// Parts that keys are split into; 0: as is fastest.
    splits: usize,
    pub sequences: Option<Sequences>,
    /// Of logits in E4M3, `(n_q)`; `None`: they stay in f32.
    pub logit_descale: Option<Array>,
}

impl Terms {
    pub fn mask(&self) -> Mask {
        Mask { causal: self.causal, window_left: self.window_left, window_right: self.window_right }
    }

    /// On a device: of the host's calls the package subtracts centers itself.
    fn center(&self) -> Result<Option<Centers>> {
        let (k, v) = (optional("center of k", &self.k_center)?, optional("center of v", &self.v_center)?);
        Ok(k.or(v).map(|_| Centers { k, v }))
    }

    pub fn accumulator(&self) -> Result<PvAccumulator> {
        self.accumulator.parse()
    }

    pub fn keeps(&self) -> Result<Keeps> {
        self.keeps.parse()
    }
}

/// Tables of a rotation: the cast turns q and k.
#[derive(FromPyObject)]
struct Rope {
    cosine: Array,
    sine: Array,
    interleaved: bool,
}

/// A cache in pages, and how a call goes through it.
#[derive(FromPyObject)]
struct Pages {
    k: Array,
    v: Array,
    block_table: Array,
    lengths: Array,
    /// Where the queries of each sequence begin, and how many the longest has: of packed ones.
    cu_seqlens_q: Option<Array>,
    max_seqlen_q: usize,
    /// Whether block tables and lengths are checked before the call.
    checked: bool,
}

/// A call: its operands and results, `None` for those that it does not have.
#[derive(FromPyObject)]
pub struct Call {
    pub q: Array,
    /// Of a call on pages, new keys and values.
    k: Option<Array>,
    v: Option<Array>,
    pages: Option<Pages>,
    /// Of q, k and v, `(batch, n_kv)` each.
    pub descales: [Array; 3],
    pub terms: Terms,
    pub out: Array,
    pub lse: Array,
    stats: Option<Array>,
    /// What the forward keeps: q, k and v in E4M3.
    saved: Option<[Array; 3]>,
    /// The largest P of each row, and what the rounding of the output took: kept by a forward, read by a backward.
    row_max: Option<Array>,
    residual: Option<Array>,
    rope: Option<Rope>,
    /// Of a backward: the gradient of the output, and those to write.
    d_out: Option<Array>,
    dq: Option<Array>,
    dk: Option<Array>,
    dv: Option<Array>,
    pub d_sinks: Option<Array>,
    deterministic: bool,
    sums_limit: Option<usize>,
}

impl Call {
    fn given<'a>(name: &str, array: &'a Option<Array>) -> Result<&'a Array> {
        array.as_ref().ok_or_else(|| Error::argument(format_args!("the call has no {name}")))
    }

    pub fn keys(&self) -> Result<&Array> {
        Self::given("k", &self.k)
    }

    pub fn values(&self) -> Result<&Array> {
        Self::given("v", &self.v)
    }

    /// The gradient of the output.
    pub fn d_out(&self) -> Result<&Array> {
        Self::given("d_out", &self.d_out)
    }

    /// The gradients of q, k and v.
    pub fn grads(&self) -> Result<[&Array; 3]> {
        Ok([Self::given("dq", &self.dq)?, Self::given("dk", &self.dk)?, Self::given("dv", &self.dv)?])
    }

    pub fn checks_pages(&self) -> bool {
        self.pages.as_ref().is_some_and(|pages| pages.checked)
    }

    /// Whether the keys of a call on rows must not be split.
    pub fn is_whole(&self) -> bool {
        self.pages.is_none() && self.terms.splits == 1
    }

    pub fn shape(&self) -> Result<AttentionShape> {
        let (q, k, v) = (&self.q.shape[..], &self.keys()?.shape[..], &self.values()?.shape[..]);
        let (&[batch, len_q, n_q_heads, d_head], &[_, len_k, n_kv_heads, _], &[.., d_v]) = (q, k, v) else {
            return Err(Error::argument("q, k and v must be (batch, length, heads, d_head)"));
        };
        Ok(AttentionShape { batch, n_q_heads, n_kv_heads, len_q, len_k, d_head, d_v })
    }

    fn descales(&self) -> Result<Descales> {
        let [q, k, v] = &self.descales;
        let row = |name, array: &Array| array.view(name).map(Some);
        let logit = optional("logit descale", &self.terms.logit_descale)?;
        Ok(Descales { q: row("q descale", q)?, k: row("k descale", k)?, v: row("v descale", v)?, o: None, logit })
    }

    /// The call on a device.
    fn described(&self, shape: AttentionShape) -> Result<DeviceCall> {
        let terms = &self.terms;
        let places = |sequences: &Sequences| {
            Ok::<_, Error>(Places {
                q_starts: sequences.q_starts.view("q_starts")?,
                q_ends: sequences.q_ends.view("q_ends")?,
                k_starts: sequences.k_starts.view("k_starts")?,
                k_ends: sequences.k_ends.view("k_ends")?,
                max_len_q: sequences.max_len_q.clamp(1, shape.len_q),
                max_len_k: sequences.max_len_k.clamp(1, shape.len_k),
            })
        };
        Ok(DeviceCall {
            shape,
            mask: terms.mask(),
            softmax_scale: terms.scale,
            soft_cap: terms.soft_cap,
            sinks: optional("sinks", &terms.sinks)?,
            sequences: terms.sequences.as_ref().map(places).transpose()?,
            center: terms.center()?,
        })
    }

    /// The call on the host.
    pub fn on_host<'a>(
        &self,
        shape: AttentionShape,
        sequences: Option<&'a [Sequence]>,
        sinks: Option<&'a [f64]>,
    ) -> AttentionCall<'a> {
        let Terms { scale: softmax_scale, soft_cap, .. } = self.terms;
        AttentionCall { shape, mask: self.terms.mask(), softmax_scale, soft_cap, sequences, sinks, center: None }
    }

    fn keys_and_values(&self) -> Result<Keys> {
        let Some(pages) = &self.pages else {
            return Ok(Keys::Rows { k: self.keys()?.view("k")?, v: self.values()?.view("v")? });
        };
        let new = match &self.k {
            Some(k) => Some(NewTokens { k: k.view("new k")?, v: self.values()?.view("new v")? }),
            None => None,
        };
        Ok(Keys::Pages(CachePages {
            k: pages.k.view("k pages")?,
            // Of six dimensions where they are tiled, of four where they are rows.
            v: match pages.v.shape.len() {
                6 => ValuePages::Tiled(pages.v.view("v pages")?),
                _ => ValuePages::Rows(pages.v.view("v pages")?),
            },
            block_table: pages.block_table.view("block table")?,
            lengths: pages.lengths.view("lengths")?,
            queries: match &pages.cu_seqlens_q {
                Some(starts) => {
                    Some(PackedQueries { cu_seqlens: starts.view("cu_seqlens_q")?, longest: pages.max_seqlen_q })
                }
                None => None,
            },
            splits: if self.terms.splits == 0 { Splits::Fastest } else { Splits::Parts(self.terms.splits) },
            new,
        }))
    }

    /// A forward on a device, and its tensors.
    pub fn forward(&self) -> Result<(DeviceCall, Tensors)> {
        let tensors = Tensors {
            q: self.q.view("q")?,
            keys: self.keys_and_values()?,
            descales: self.descales()?,
            accumulator: self.terms.accumulator()?,
            saved: self.saved()?,
            rope: self.rope.as_ref().map(Rope::tables).transpose()?,
            out: self.out.view("out")?,
            lse: Some(self.lse.view("lse")?),
            // PyTorch has no unsigned words to add to.
            stats: self.stats.as_ref().map(|stats| stats.view_as("stats", Element::U32)).transpose()?,
        };
        Ok((self.described(tensors.shape())?, tensors))
    }

    fn saved(&self) -> Result<Option<SavedOperands>> {
        let Some([q, k, v]) = &self.saved else { return Ok(None) };
        let rows = match self.terms.keeps()? {
            Keeps::Nothing | Keeps::Operands => SavedRows::Nothing,
            Keeps::Fp8Dq => SavedRows::RowMax(Self::given("row_max", &self.row_max)?.view("row_max")?),
            Keeps::UnroundedDelta => {
                SavedRows::Residual(Self::given("residual", &self.residual)?.view_as("residual", Element::U8)?)
            }
        };
        Ok(Some(SavedOperands { q: q.view("saved q")?, k: k.view("saved k")?, v: v.view("saved v")?, rows }))
    }

    /// A backward on a device, its tensors, and how it runs.
    pub fn backward(&self) -> Result<(DeviceCall, BackwardTensors, BackwardOptions)> {
        let ([dq, dk, dv], out, keeps) = (self.grads()?, self.out.view("out")?, self.terms.keeps()?);
        let (mut delta, mut bounds) = (Delta::Output(out), None);
        match keeps {
            Keeps::Nothing | Keeps::Operands => {}
            Keeps::Fp8Dq => {
                let row_max = Self::given("row_max", &self.row_max)?.view("row_max")?;
                bounds = Some(RowBounds { row_max, value_norm: None });
            }
            Keeps::UnroundedDelta => {
                let residual = Self::given("residual", &self.residual)?.view_as("residual", Element::U8)?;
                delta = Delta::Unrounded { out, residual };
            }
        }
        let tensors = BackwardTensors {
            q: self.q.view("q")?,
            k: self.keys()?.view("k")?,
            v: self.values()?.view("v")?,
            descales: self.descales()?,
            lse: self.lse.view("lse")?,
            delta,
            d_out: self.d_out()?.view("d_out")?,
            dq: dq.view("dq")?,
            dk: dk.view("dk")?,
            dv: dv.view("dv")?,
            bounds,
            d_sinks: optional("d_sinks", &self.d_sinks)?,
        };
        let options =
            BackwardOptions { deterministic: self.deterministic, sums_limit: self.sums_limit, keeps: tensors.keeps() };
        Ok((self.described(tensors.shape())?, tensors, options))
    }
}

impl Rope {
    fn tables(&self) -> Result<Tables> {
        let (cosine, sine) = (self.cosine.view("RoPE cosines")?, self.sine.view("RoPE sines")?);
        Ok(Tables { cosine, sine, positions: None, interleaved: self.interleaved })
    }
}
