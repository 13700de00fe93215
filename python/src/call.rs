//! A call of attention as Python describes it, for the CPU and the GPU, forward and backward: tensors by address, and `Terms` of
//! `sigmascale/torch/_terms.py` by its fields.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use sigmascale::attention::{AttentionShape, Mask, PvAccumulator};
use sigmascale::cuda::DevicePtr;
use sigmascale::device::attention::{
    BackwardOptions, BackwardTensors, Delta, Descales, Element, NewTokens, PagedCache, PagedRope, PagedTensors,
    RowBounds, SavedOperands, Tensors, ValuePages, View,
};
use sigmascale::device::attention::{Rope as Tables, Sequences as Places, Terms as DeviceTerms};
use sigmascale::{Error, Result};

/// A tensor of PyTorch: address, type, shape and strides in elements.
pub struct Array {
    pub address: u64,
    /// The type's name where it is none of the kernels'.
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

/// What the call computes beside its operands.
#[derive(FromPyObject)]
pub struct Terms {
    causal: bool,
    pub scale: f64,
    window_left: Option<usize>,
    window_right: Option<usize>,
    pub soft_cap: Option<f64>,
    pub sinks: Option<Array>,
    accumulator: String,
    pub keeps: String,
    pub sequences: Option<Sequences>,
}

impl Terms {
    pub fn mask(&self) -> Mask {
        Mask { causal: self.causal, window_left: self.window_left, window_right: self.window_right }
    }

    pub fn accumulator(&self) -> Result<PvAccumulator> {
        self.accumulator.parse()
    }
}

/// Tables of a rotation: the cast turns q and k.
#[derive(FromPyObject)]
struct Rope {
    cosine: Array,
    sine: Array,
    interleaved: bool,
}

/// A cache in pages, and whether block tables and lengths are checked before the call.
#[derive(FromPyObject)]
struct Pages(Array, Array, Array, Array, bool);

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

/// A call of the kernels: on rows, or on a cache in pages.
pub enum OnDevice {
    Rows(DeviceTerms, Tensors),
    Pages(DeviceTerms, PagedTensors),
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
        matches!(self.pages, Some(Pages(.., true)))
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
        Ok(Descales { q: row("q descale", q)?, k: row("k descale", k)?, v: row("v descale", v)?, o: None, logit: None })
    }

    pub fn device_terms(&self) -> Result<DeviceTerms> {
        let terms = &self.terms;
        let places = |sequences: &Sequences| {
            let keys = self.keys()?.shape[1];
            Ok::<_, Error>(Places {
                q_starts: sequences.q_starts.view("q_starts")?,
                q_ends: sequences.q_ends.view("q_ends")?,
                k_starts: sequences.k_starts.view("k_starts")?,
                k_ends: sequences.k_ends.view("k_ends")?,
                max_len_q: sequences.max_len_q.clamp(1, self.q.shape[1]),
                max_len_k: sequences.max_len_k.clamp(1, keys),
            })
        };
        Ok(DeviceTerms {
            mask: terms.mask(),
            softmax_scale: terms.scale as f32,
            soft_cap: terms.soft_cap.map(|cap| cap as f32),
            sinks: optional("sinks", &terms.sinks)?,
            sequences: terms.sequences.as_ref().map(places).transpose()?,
        })
    }

    pub fn forward(&self) -> Result<OnDevice> {
        // PyTorch has no unsigned words to add to.
        let stats = self.stats.as_ref().map(|stats| stats.view_as("stats", Element::U32)).transpose()?;
        let (out, lse) = (self.out.view("out")?, Some(self.lse.view("lse")?));
        let rope = self.rope.as_ref().map(Rope::tables).transpose()?;
        let Some(Pages(k_pages, v_pages, block_table, lengths, _)) = &self.pages else {
            let tensors = Tensors {
                q: self.q.view("q")?,
                k: self.keys()?.view("k")?,
                v: self.values()?.view("v")?,
                descales: self.descales()?,
                accumulator: self.terms.accumulator()?,
                saved: self.saved()?,
                rope,
                out,
                lse,
                stats,
            };
            return Ok(OnDevice::Rows(self.device_terms()?, tensors));
        };
        // Of six dimensions where they are tiled, of four where they are rows.
        let v = match v_pages.shape.len() {
            6 => ValuePages::Tiled(v_pages.view("v pages")?),
            _ => ValuePages::Rows(v_pages.view("v pages")?),
        };
        let new = match &self.k {
            Some(k) => Some(NewTokens { k: k.view("new k")?, v: self.values()?.view("new v")? }),
            None => None,
        };
        let (block_table, lengths) = (block_table.view("block table")?, lengths.view("lengths")?);
        let tensors = PagedTensors {
            q: self.q.view("q")?,
            cache: PagedCache { k: k_pages.view("k pages")?, v, block_table, lengths },
            new,
            descales: self.descales()?,
            rope: rope.map(|Tables { cosine, sine, interleaved, .. }| PagedRope { cosine, sine, interleaved }),
            out,
            lse,
            stats,
        };
        Ok(OnDevice::Pages(self.device_terms()?, tensors))
    }

    fn saved(&self) -> Result<Option<SavedOperands>> {
        let Some([q, k, v]) = &self.saved else { return Ok(None) };
        let (row_max, residual) = (optional("row_max", &self.row_max)?, optional("residual", &self.residual)?);
        let (q, k, v) = (q.view("saved q")?, k.view("saved k")?, v.view("saved v")?);
        Ok(Some(SavedOperands { q, k, v, row_max, residual }))
    }

    pub fn backward(&self) -> Result<BackwardTensors> {
        let [dq, dk, dv] = self.grads()?;
        let out = self.out.view("out")?;
        Ok(BackwardTensors {
            q: self.q.view("q")?,
            k: self.keys()?.view("k")?,
            v: self.values()?.view("v")?,
            descales: self.descales()?,
            lse: self.lse.view("lse")?,
            delta: match &self.residual {
                Some(residual) => Delta::Unrounded { out, residual: residual.view("residual")? },
                None => Delta::Output(out),
            },
            d_out: self.d_out()?.view("d_out")?,
            dq: dq.view("dq")?,
            dk: dk.view("dk")?,
            dv: dv.view("dv")?,
            bounds: optional("row_max", &self.row_max)?.map(|row_max| RowBounds { row_max, value_norm: None }),
            d_sinks: optional("d_sinks", &self.d_sinks)?,
        })
    }

    pub fn backward_options(&self) -> BackwardOptions {
        BackwardOptions {
            deterministic: self.deterministic,
            sums_limit: self.sums_limit,
            dq_fp8: self.row_max.is_some(),
            residual: self.residual.is_some(),
        }
    }
}

impl Rope {
    fn tables(&self) -> Result<Tables> {
        let (cosine, sine) = (self.cosine.view("RoPE cosines")?, self.sine.view("RoPE sines")?);
        Ok(Tables { cosine, sine, positions: None, interleaved: self.interleaved })
    }
}
