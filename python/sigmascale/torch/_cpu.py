"""Attention on the CPU: the crate's own, which the kernels have to match, over tensors."""

import torch

from .. import _native
from . import _residual
from ._centers import centered, joined
from ._e4m3 import E4M3, cast_all, spread
from ._telemetry import add
from ._terms import NOTHING, Call, seen_rows


def forward(q, k, v, descales, terms, words, residual=None):
    """Output, log-sum-exp, and q, k and v in E4M3 if they are kept."""
    given = (q, k, v) = centered(q, k, v, terms)
    operands = given if terms.keeps == NOTHING else cast_all(*seen_rows(*given, terms), descales)
    out = torch.empty((*q.shape[:3], v.shape[3]), dtype=torch.float32, device="cpu")
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device="cpu")
    for row in _native.host_forward(_call(given, descales, terms, out=out, lse=lse)):
        if words is not None and q.dtype != E4M3:
            add(words, torch.tensor(row, dtype=torch.int64, device="cpu").view(-1, 4), q.shape[2])
    out = joined(out, lse, terms)
    rounded = out.to(torch.bfloat16)
    if residual is not None:
        residual.copy_(_residual.code(out, rounded))
    return rounded, lse, operands


def backward(grad, operands, descales, out, lse, terms, residual=None):
    """Gradients of q, k and v before their casts, and of the sinks; f32."""
    dq, dk, dv = (torch.empty(x.shape, dtype=torch.float32, device="cpu") for x in operands)
    d_sinks = None if terms.sinks is None else torch.empty_like(terms.sinks)
    wide = out.float() if residual is None else _residual.value(out, residual)
    saved = {"out": joined(wide, lse, terms, -1).contiguous(), "lse": lse.contiguous(), "d_out": grad.float().contiguous()}
    _native.host_backward(_call(operands, descales, terms, **saved, dq=dq, dk=dk, dv=dv, d_sinks=d_sinks))
    return dq, dk, dv, d_sinks


def _call(operands, descales, terms, **tensors):
    q, k, v = (_wide(x, d) for x, d in zip(operands, descales))
    return Call(q=q, k=k, v=v, descales=descales[:3], terms=terms, **tensors)


def _wide(x, descale):
    """An operand in f32; E4M3 is times its descale, which the cast takes off again without a rounding."""
    return (x.float() * spread(descale, x.shape[2]) if x.dtype == E4M3 else x.float()).contiguous()
