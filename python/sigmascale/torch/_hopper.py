"""This package's own attention: its kernels on Hopper, the cast and the attention, forward and backward; on the CPU the crate's."""

import dataclasses
import functools

import torch

from .. import _native
from .._errors import UnsupportedError
from . import _cpu
from ._e4m3 import E4M3
from ._terms import NOTHING, Call, Sequences

# Most bytes of the backward's f32 sums of dQ: calls that have more run in parts, to save memory. None: as the crate decides.
SUMS = {"sums_limit": None}


class Native:
    """Forward in two launches with telemetry, backward in three; workspaces are PyTorch's memory."""

    name, per_tensor = "native", False

    def __init__(self):
        self._engines, self._bytes = {}, {}

    @staticmethod
    def on_hopper(device):
        """Whether a device has kernels."""
        return device.type == "cuda" and _capability(device) == (9, 0)

    @staticmethod
    def takes(q, v, terms):
        """Whether the kernels, or on the CPU the crate, offer this call."""
        if q.is_cpu:
            return all(d % 8 == 0 and 16 <= d <= 576 for d in (q.shape[3], v.shape[3]))
        if not Native.on_hopper(q.device) or (terms.logit_descale is not None and terms.keeps != NOTHING):
            return False
        return _offers(q.shape[3], v.shape[3])

    def forward(self, q, k, v, descales, terms, words=None, row_max=None, residual=None, rope=None):
        """``row_max``, f32 as the log-sum-exp, and ``residual``, as the output, get what ``terms.keeps`` names; the CPU needs no
        ``row_max``. ``rope``: the cast turns q and k; on a GPU alone."""
        if q.is_cpu:
            return _cpu.forward(q, k, v, descales, terms, words, residual)
        if terms.logit_descale is not None:
            if terms.keeps != NOTHING:
                raise UnsupportedError(
                    "gradients through logits in E4M3 have no kernel: leave backend at 'auto', or take 'emulated'"
                )
            if words is None:
                # The kernel counts their overflow in any case.
                words = q.new_zeros((2 * (q.shape[2] + k.shape[2]), 4), dtype=torch.int32)
        terms = _contiguous(terms)
        q, k, v = given = _aligned(q), _aligned(k), _aligned(v)
        device, saved = q.device, None
        if terms.keeps != NOTHING and q.dtype != E4M3:
            saved = [_rows(x, 16, E4M3) for x in given]
        out = torch.empty((*q.shape[:3], v.shape[3]), device=device, dtype=torch.bfloat16)
        lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), device=device, dtype=torch.float32)
        call = Call(
            q=q,
            k=k,
            v=v,
            descales=descales[:3],
            terms=terms,
            out=out,
            lse=lse,
            stats=None if words is None else words.view(-1),
            saved=saved,
            row_max=row_max,
            residual=residual,
            rope=rope,
        )
        self.launch("forward", call, (q.shape, k.shape, v.shape, q.dtype, terms.key()))
        return out, lse, saved or given

    def backward(self, grad, operands, descales, out, lse, terms, row_max=None, residual=None):
        """Gradients of q, k and v before their casts, BF16, and of the sinks. ``out`` must be that of the accumulator ``f16``.
        With ``row_max`` of its forward dQ is a product in FP8, with ``residual`` delta is that of the output before its
        rounding."""
        if grad.is_cpu:
            return _cpu.backward(grad, operands, descales, out, lse, terms, residual)
        terms = _contiguous(terms)
        q, k, v = (_aligned(x) for x in operands)
        device = q.device
        dq, dk, dv = (torch.empty(x.shape, device=device, dtype=torch.bfloat16) for x in operands)
        d_sinks = None if terms.sinks is None else torch.empty_like(terms.sinks)
        deterministic, sums_limit = torch.are_deterministic_algorithms_enabled(), SUMS["sums_limit"]
        call = Call(
            q=q,
            k=k,
            v=v,
            descales=descales[:3],
            terms=terms,
            out=_aligned(out),
            lse=lse.contiguous(),
            d_out=_aligned(grad.to(torch.bfloat16)),
            dq=dq,
            dk=dk,
            dv=dv,
            d_sinks=d_sinks,
            row_max=row_max,
            residual=residual,
            deterministic=deterministic,
            sums_limit=sums_limit,
        )
        self.launch("backward", call, (q.shape, k.shape, v.shape, terms.key(), deterministic, row_max is None, sums_limit))
        return dq, dk, dv, d_sinks

    def launch(self, direction, call, key=None):
        """Puts a call on the current stream of its device. ``key``: what the size of its workspace depends on."""
        device = call.q.device
        engine = self._engines.get(device)
        if engine is None:
            engine = self._engines.setdefault(device, _native.Attention(device.index))
        key = key and (direction, device, *key)
        size = self._bytes.get(key)
        if size is None:
            size = getattr(engine, f"{direction}_bytes")(call)
            # Shapes are few, or of one growing cache.
            if len(self._bytes) > 4096:
                self._bytes.clear()
            if key:
                self._bytes[key] = size
        space = torch.empty(size, device=device, dtype=torch.uint8)
        stream = torch.cuda.current_stream(device).cuda_stream
        getattr(engine, direction)(call, space, stream)


_capability = functools.cache(torch.cuda.get_device_capability)


_offers = functools.cache(_native.Attention.offers)


def _contiguous(terms):
    """Terms whose places of sequences have no gaps."""
    sequences = terms.sequences
    if sequences is None or all(x.is_contiguous() for x in sequences.places):
        return terms
    places = (x.contiguous() for x in sequences.places)
    return dataclasses.replace(terms, sequences=Sequences(*places, sequences.max_len_q, sequences.max_len_k))


def _aligned(x):
    """The kernels want 16-byte rows; anything else is copied."""
    size = x.element_size()
    step = 16 // size if size < 4 else 8
    b, s, h, d = x.stride()
    fits = d == 1 and h % step == 0 and s % step == 0 and b % step == 0 and x.data_ptr() % 16 == 0
    return x if fits else _rows(x, step, x.dtype).copy_(x)


def _rows(x, step, dtype):
    """Memory for a tensor like ``x``, with rows that begin at multiples of ``step`` elements."""
    *shape, d = x.shape
    return torch.empty((*shape, -(-d // step) * step), device=x.device, dtype=dtype)[..., :d]
