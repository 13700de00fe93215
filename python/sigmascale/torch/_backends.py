"""The attention calls behind the wrappers. All take q, k, v ``(batch, seq, heads, d_head)`` and give output and LSE.

Each backend: ``forward(q, k, v, descales, causal, scale, words) -> (out, lse)`` with descales ``(batch, n_kv)`` of q, k, v
(and of o, which only cuDNN needs), output BF16 in q's layout, LSE f32 ``(batch, n_q, len_q)`` in nats or ``None`` where
the library does not return it. ``words`` gets maxima and overflow counts where given.
"""

import contextlib
import functools
import threading
import warnings

import torch

from .. import _native
from .._errors import ArgumentError, UnsupportedError
from ._results import add_counts

E4M3 = torch.float8_e4m3fn
_MAX = 448.0
# What P, in [0, 1], is multiplied by before its cast: a power of two, so 1 becomes 256 and nothing overflows.
_P_SCALE = 256.0


def spread(descale, heads):
    """``(batch, n_kv)`` to ``(batch, 1, heads, 1)``: query heads of one group share theirs."""
    group = heads // descale.shape[1]
    return descale.repeat_interleave(group, dim=1)[:, None, :, None] if group > 1 else descale[:, None, :, None]


def cast(x, descale, words=None):
    """``x / descale`` in E4M3, saturating; ``words`` (heads, 4) takes in amax, |x / descale| past 448 and 464, non-finite."""
    fused = _fused_cast() if x.is_cuda and x.stride(3) == 1 and descale.stride(1) == 1 else None
    return (fused or plain_cast)(x, descale, words)


@functools.cache
def _fused_cast():
    """The Triton kernel, where Triton is installed."""
    try:
        from ._cast import cast as fused
    except ImportError:
        return None
    return fused


def plain_cast(x, descale, words=None):
    """The same in plain PyTorch."""
    scaled = x.float() * spread(descale.reciprocal(), x.shape[2])
    if words is not None:
        report(words, x, scaled)
    return scaled.clamp(-_MAX, _MAX).to(E4M3)


def report(words, x, scaled):
    """Adds a tensor's maxima and counts to its rows."""
    size = scaled.abs()
    amax = x.abs().amax(dim=(0, 1, 3)).float().view(torch.int32)
    words[:, 0] = torch.maximum(words[:, 0], amax)
    finite = torch.isfinite(size)
    masks = ((size > _MAX) & finite, (size > 464.0) & finite, ~finite)
    add_counts(words[:, 1:], torch.stack([mask.sum(dim=(0, 1, 3)) for mask in masks], dim=1))


def cast_all(q, k, v, descales, words):
    """q, k and v in E4M3, with their statistics in the rows of ``words``."""
    if words is None:
        return tuple(cast(x, d) for x, d in zip((q, k, v), descales))
    n_q, n_kv = q.shape[2], k.shape[2]
    rows = words[n_q:].split([n_q, n_kv, n_kv])
    return tuple(cast(x, d, row) for x, d, row in zip((q, k, v), descales, rows))


def dequantised(x, descale):
    """What the kernel saw of ``x``, in BF16."""
    return (cast(x, descale).float() * spread(descale, x.shape[2])).to(torch.bfloat16)


def hidden(len_q, len_k, device):
    """True where a causal query does not see a key; the last query sees all keys."""
    rows = torch.arange(len_q, device=device)[:, None] + (len_k - len_q)
    return torch.arange(len_k, device=device)[None, :] > rows


class Emulated:
    """The kernels' arithmetic in plain PyTorch, on any device: slow, for tests and for shapes that no kernel takes."""

    name, per_tensor = "emulated", False

    def forward(self, q, k, v, descales, causal, scale, words=None, operands=None):
        q8, k8, v8 = operands or cast_all(q, k, v, descales, words)
        q_descale, k_descale, v_descale = descales[:3]
        group = q8.shape[2] // k8.shape[2]
        heads = lambda x: x.float().repeat_interleave(group, dim=2).transpose(1, 2)
        q8, k8, v8 = q8.float().transpose(1, 2), heads(k8), heads(v8)
        factor = (q_descale * k_descale).repeat_interleave(group, dim=1)[:, :, None, None] * scale
        logits = (q8 @ k8.transpose(2, 3)) * factor
        if causal:
            logits = logits.masked_fill(hidden(logits.shape[2], logits.shape[3], logits.device), float("-inf"))
        top = logits.amax(dim=3, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
        weights = torch.exp(logits - top)
        total = weights.sum(dim=3, keepdim=True)
        weights = (weights * _P_SCALE).to(E4M3).float()
        out = (weights @ v8) * (v_descale.repeat_interleave(group, dim=1)[:, :, None, None] / _P_SCALE)
        out = torch.where(total > 0, out / total, 0.0)
        return out.transpose(1, 2).to(torch.bfloat16).contiguous(), (top + total.log()).squeeze(3)


class Native:
    """This package's fused kernel: cast and attention in two launches, with telemetry."""

    name, per_tensor = "native", False

    def __init__(self):
        self._engines, self._spaces, self._lock = {}, {}, threading.Lock()

    @staticmethod
    def takes(q):
        """Whether the kernel offers this call."""
        return q.is_cuda and q.shape[3] in (64, 128) and torch.cuda.get_device_capability(q.device) == (9, 0)

    def forward(self, q, k, v, descales, causal, scale, words=None, operands=None):
        device = q.device
        engine = self._engines.get(device)
        if engine is None:
            engine = self._engines.setdefault(device, _native.Attention(device.index))
        q, k, v = operands or tuple(_aligned(x) for x in (q, k, v))
        kind = str(q.dtype).removeprefix("torch.")
        stream = torch.cuda.current_stream(device).cuda_stream
        out = torch.empty(q.shape, device=device, dtype=torch.bfloat16)
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], device=device, dtype=torch.float32)
        space = self._space(q, k, kind, stream)
        with torch.cuda.device(device):
            engine.forward(
                {
                    "q": _array(q, kind),
                    "k": _array(k, kind),
                    "v": _array(v, kind),
                    "out": _array(out, "bfloat16"),
                    "lse": _array(lse, "float32"),
                    "stats": None if words is None else _array(words.view(-1), "int32"),
                    "descales": [_array(d, "float32") for d in descales[:3]],
                    "logit_descale": None,
                    "workspace": _array(space, "uint8"),
                    "causal": causal,
                    "softmax_scale": scale,
                    "stream": stream,
                }
            )
        return out, lse

    def _space(self, q, k, kind, stream):
        """Workspace of a stream, grown as needed; a captured graph gets its own, which lives in its pool. The call itself
        clears the little of it that has to be."""
        size, _ = _native.Attention.sizes(list(q.shape), list(k.shape), kind)
        make = lambda: torch.empty(size, device=q.device, dtype=torch.uint8)
        if torch.cuda.is_current_stream_capturing():
            return make()
        with self._lock:
            space = self._spaces.get((q.device, stream))
            if space is None or space.numel() < size:
                space = self._spaces[(q.device, stream)] = make()
            return space


def _aligned(x):
    """The kernel wants 16-byte rows; anything else is copied."""
    fits = x.stride(3) == 1 and all(s % 8 == 0 for s in x.stride()[:3]) and x.data_ptr() % 16 == 0
    return x if fits else x.contiguous()


def _array(x, kind):
    return (x.data_ptr(), kind, list(x.shape), list(x.stride()))


class Fa3:
    """FlashAttention-3 (``flash_attn_interface``, ``flash_attn_3`` or ``fa3_fwd_interface``)."""

    name, per_tensor = "fa3", False

    def __init__(self):
        self._function = _first_import(
            ["flash_attn_interface", "flash_attn_3.flash_attn_interface", "fa3_fwd_interface"],
            "flash_attn_func",
            "FlashAttention-3 is not installed: build flash-attention/hopper, or pip install fa3-fwd",
        )

    @staticmethod
    def takes(q):
        """Whether the library is there and offers this call in FP8."""
        if not (q.is_cuda and q.shape[3] in (64, 128, 256) and torch.cuda.get_device_capability(q.device) == (9, 0)):
            return False
        try:
            return backend("fa3") is not None
        except UnsupportedError:
            return False

    def forward(self, q, k, v, descales, causal, scale, words=None, operands=None):
        q8, k8, v8 = operands or cast_all(q, k, v, descales, words)
        q_descale, k_descale, v_descale = (d.contiguous() for d in descales[:3])
        out, lse = self._function(
            q8,
            k8,
            v8,
            softmax_scale=scale,
            causal=causal,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
            return_attn_probs=True,
        )[:2]
        return out, lse


class TorchQuantised:
    """PyTorch's own FP8 SDPA, where the installed version has it (experimental there); needs FlashAttention-3."""

    name, per_tensor = "torch", False

    def __init__(self):
        self._function = _first_import(
            ["torch.nn.attention.experimental._scaled_dot_product_attention_quantized"],
            "_scaled_dot_product_attention_quantized",
            f"PyTorch {torch.__version__} has no quantised SDPA",
        )
        import torch.nn.attention as switch

        if not hasattr(switch, "activate_flash_attention_impl"):
            raise UnsupportedError(f"PyTorch {torch.__version__} cannot switch its flash attention to FA3")
        self._switch = switch
        with self._active():
            pass

    @contextlib.contextmanager
    def _active(self):
        """FA3 in PyTorch's dispatcher, for this call alone: the switch is one for the whole process."""
        before = self._switch.current_flash_attention_impl()
        try:
            self._switch.activate_flash_attention_impl("FA3")
        except Exception as error:
            raise UnsupportedError(f"PyTorch could not switch to FlashAttention-3: {error}") from error
        try:
            yield
        finally:
            self._switch.restore_flash_attention_impl(_raise_warn=False)
            if before is not None:
                self._switch.activate_flash_attention_impl(before)

    def forward(self, q, k, v, descales, causal, scale, words=None, operands=None):
        q8, k8, v8 = operands or cast_all(q, k, v, descales, words)
        if causal and q.shape[1] != k.shape[1]:
            raise UnsupportedError(
                "PyTorch's quantised SDPA aligns a causal mask of unequal lengths otherwise: use fa3"
            )
        q_descale, k_descale, v_descale = (d.contiguous() for d in descales[:3])
        with self._active():
            result = torch.ops.aten._scaled_dot_product_flash_attention.quantized(
                *(x.transpose(1, 2) for x in (q8, k8, v8)),
                q_descale,
                k_descale,
                v_descale,
                0.0,
                causal,
                False,
                scale=scale,
            )
        return result[0].transpose(1, 2), result[1]


class Cudnn:
    """cuDNN's ``sdpa_fp8`` through its Python front end: one descale a tensor, FP8 output by the o descale."""

    name, per_tensor = "cudnn", True

    def __init__(self):
        try:
            import cudnn
        except ImportError as error:
            raise UnsupportedError("cuDNN's front end is not installed: pip install nvidia-cudnn-frontend") from error
        self._cudnn = cudnn
        self._graph = functools.lru_cache(maxsize=64)(self._build)

    def _build(self, shapes, strides, causal, scale, device):
        cudnn = self._cudnn
        fp8, f32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
        graph = cudnn.pygraph(io_data_type=fp8, intermediate_data_type=f32, compute_data_type=f32)
        operands = [graph.tensor(dim=list(d), stride=list(s), data_type=fp8) for d, s in zip(shapes, strides)]
        names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
        scalars = {name: graph.tensor(dim=[1] * 4, stride=[1] * 4, data_type=f32) for name in names}
        q, k, v = operands
        out, stats, amax_s, amax_o = graph.sdpa_fp8(
            q=q,
            k=k,
            v=v,
            **scalars,
            is_inference=False,
            attn_scale=scale,
            # On Hopper the other alignment is refused; for equal lengths both are the same.
            diagonal_alignment=cudnn.diagonal_alignment.TOP_LEFT,
            left_bound=None,
            right_bound=0 if causal else None,
        )
        batch, heads, length, d = shapes[0]
        out.set_output(True).set_dim([batch, heads, length, d]).set_stride(
            [length * heads * d, d, heads * d, 1]
        ).set_data_type(fp8)
        stats.set_output(True).set_dim([batch, heads, length, 1]).set_stride(
            [heads * length, length, 1, 1]
        ).set_data_type(f32)
        for amax in (amax_s, amax_o):
            amax.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(f32)
        try:
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
            graph.check_support()
            graph.build_plans()
        except Exception as error:
            raise UnsupportedError(
                f"cuDNN does not offer this FP8 attention (q {shapes[0]}, k {shapes[1]}): {error}"
            ) from error
        space = torch.empty(max(1, graph.get_workspace_size()), device=device, dtype=torch.uint8)
        # P's scale and its inverse.
        fixed = [
            torch.full((1, 1, 1, 1), value, device=device, dtype=torch.float32) for value in (_P_SCALE, 1 / _P_SCALE)
        ]
        return graph, operands, scalars, (out, stats, amax_s, amax_o), fixed, space

    def forward(self, q, k, v, descales, causal, scale, words=None, operands=None):
        if causal and q.shape[1] != k.shape[1]:
            raise UnsupportedError(
                "cuDNN's FP8 attention aligns a causal mask of unequal lengths otherwise: use fa3 or native"
            )
        # One a tensor: the largest of all heads, so that none can overflow.
        descales = tuple(d.amax().expand_as(d) for d in descales)
        q8, k8, v8 = operands or cast_all(q, k, v, descales, words)
        q8, k8, v8 = (x.transpose(1, 2) for x in (q8, k8, v8))
        shapes, strides = (tuple(tuple(f(x)) for x in (q8, k8, v8)) for f in (lambda x: x.shape, lambda x: x.stride()))
        graph, places, scalars, outputs, fixed, space = self._graph(shapes, strides, causal, float(scale), q.device)
        one = lambda d: d.reshape(-1)[:1].contiguous().view(1, 1, 1, 1)
        o_descale = one(descales[3]) if len(descales) > 3 else one(descales[2]) * 2
        values = {
            "descale_q": one(descales[0]),
            "descale_k": one(descales[1]),
            "descale_v": one(descales[2]),
            "descale_s": fixed[1],
            "scale_s": fixed[0],
            "scale_o": o_descale.reciprocal(),
        }
        out = torch.empty(q.shape, device=q.device, dtype=E4M3).transpose(1, 2)
        stats = torch.empty(*out.shape[:3], 1, device=q.device, dtype=torch.float32)
        # Maxima of P and of the output, which nobody reads.
        results = (out, stats, *torch.empty(2, 1, 1, 1, 1, device=q.device, dtype=torch.float32))
        pack = (
            dict(zip(places, (q8, k8, v8))) | {scalars[n]: x for n, x in values.items()} | dict(zip(outputs, results))
        )
        graph.execute(pack, space)
        return (out.transpose(1, 2).float() * o_descale).to(torch.bfloat16), stats.squeeze(3)


def _first_import(modules, name, missing):
    import importlib

    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise UnsupportedError(missing)


_KINDS = {kind.name: kind for kind in (Native, Fa3, Cudnn, TorchQuantised, Emulated)}


@functools.cache
def backend(name):
    """A backend by name, made when first asked for."""
    if name not in _KINDS:
        raise ArgumentError(f"backend {name!r} is not one of auto, {', '.join(_KINDS)}")
    return _KINDS[name]()


def choose(name, q):
    """The backend of a call; ``auto`` takes the first of native, FlashAttention-3 and the emulation that offers it."""
    if name != "auto":
        return backend(name)
    if Native.takes(q):
        return backend("native")
    if Fa3.takes(q):
        return backend("fa3")
    if q.is_cuda:
        _warn_of_emulation(q.shape[3], torch.cuda.get_device_capability(q.device))
    return backend("emulated")


@functools.cache
def _warn_of_emulation(d_head, capability):
    warnings.warn(
        f"no FP8 kernel takes d_head {d_head} on compute capability {capability[0]}.{capability[1]} here, so attention is "
        "emulated in plain PyTorch, which is slow: on Hopper, pip install fa3-fwd, or keep such layers in BF16",
        RuntimeWarning,
        stacklevel=4,
    )
