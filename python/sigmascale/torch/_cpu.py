"""Attention on the CPU: the crate's own, which the kernels have to match, over tensors."""

import torch

from .. import _native
from ._casts import E4M3, cast_all, spread
from ._emulation import seen_rows
from ._results import add


def forward(q, k, v, descales, terms, words, accumulator, save, residual=None):
    """Output, log-sum-exp, and q, k and v in E4M3 if ``save``."""
    given = (q, k, v)
    operands = cast_all(*seen_rows(*given, terms), descales) if save else given
    out = torch.empty((*q.shape[:3], v.shape[3]), dtype=torch.float32, device="cpu")
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device="cpu")
    call = _call(given, descales, out, lse, terms, accumulator)
    for row in _native.host_forward(call):
        if words is not None and q.dtype != E4M3:
            add(words, torch.tensor(row, dtype=torch.int64, device="cpu").view(-1, 4), q.shape[2])
    rounded = out.to(torch.bfloat16)
    if residual is not None:
        residual.copy_(out - rounded.float())
    return rounded, lse, operands


def backward(grad, operands, descales, out, lse, terms, dq_fp8=False, residual=None):
    """Gradients of q, k and v before their casts, and of the sinks; f32."""
    grads = [torch.empty(x.shape, dtype=torch.float32, device="cpu") for x in operands]
    out = out.float() if residual is None else out.float() + residual.float()
    wide, grad, lse = out.contiguous(), grad.float().contiguous(), lse.contiguous()
    call = {"forward": _call(operands, descales, wide, lse, terms, "f16"), "d_out": grad, "dq_fp8": dq_fp8}
    d_sinks = _native.host_backward(call | dict(zip(("dq", "dk", "dv"), grads)))
    if terms.sinks is None:
        return *grads, None
    return *grads, torch.tensor(d_sinks, dtype=torch.float32, device="cpu")


def _call(operands, descales, out, lse, terms, accumulator):
    values = [_wide(x, d) for x, d in zip(operands, descales)]
    # One set of descales for the whole batch, where all rows are the same.
    sets = [d[:1] if d.stride(0) == 0 or d.shape[0] == 1 else d for d in descales[:3]]
    sets = [d.expand(max(x.shape[0] for x in sets), -1) for d in sets]
    left, right = (None if keys < 0 else keys for keys in terms.window)
    described = {
        "causal": terms.causal,
        "window_left": left,
        "window_right": right,
        "softmax_scale": terms.scale,
        "soft_cap": terms.soft_cap,
        "sinks": None if terms.sinks is None else terms.sinks.tolist(),
        "sequences": None if terms.sequences is None else [x.tolist() for x in terms.sequences.places],
        "descales": [d.flatten().tolist() for d in sets],
        "accumulator": accumulator,
    }
    names = ("q", "k", "v", "out", "lse")
    return dict(zip(names, (*values, out, lse))) | {"terms": described}


def _wide(x, descale):
    """An operand in f32; E4M3 is times its descale, which the cast takes off again without a rounding."""
    return (x.float() * spread(descale, x.shape[2]) if x.dtype == E4M3 else x.float()).contiguous()
