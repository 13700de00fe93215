"""The attention calls behind the wrappers. All take q, k ``(batch, seq, heads, d_head)`` and v ``(batch, seq, heads, d_v)``.

Each backend: ``forward(q, k, v, descales, terms, words) -> (out, lse, operands)`` with descales ``(batch, n_kv)`` of q, k,
v (and of o, which only cuDNN needs), :class:`Terms`, output BF16 in q's layout, LSE f32 ``(batch, n_q, len_q)`` in nats.
``words`` gets maxima and overflow counts where given; ``operands`` are q, k, v in E4M3 where ``terms.keeps`` says so. Operands
that are E4M3 already are ``x / descale`` and taken as they are.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any

import torch

from .._errors import ArgumentError, UnsupportedError
from ._e4m3 import dequantised
from ._emulation import Emulated
from ._hopper import Native
from ._libraries import Cudnn, Fa3, TorchQuantised
from ._terms import NOTHING, Terms

_KINDS = {kind.name: kind for kind in (Native, Fa3, Cudnn, TorchQuantised, Emulated)}
NAMES = ("auto", *_KINDS)
# Other libraries, called for dense attention alone.
LIBRARIES = (Fa3.name, Cudnn.name, TorchQuantised.name)


@functools.cache
def backend(name: str) -> Any:
    """A backend by name, made when first asked for."""
    if name not in _KINDS:
        raise ArgumentError(f"backend {name!r} is not one of {', '.join(NAMES)}")
    return _KINDS[name]()


def kernel_for(q, v, terms):
    """The FP8 attention that ``auto`` takes for a call, or None: native, else FlashAttention-3 where it is installed."""
    if Native.takes(q, v, terms):
        return "native"
    takes = terms.dense and q.shape[3] == v.shape[3] and Fa3.takes(q)
    return "fa3" if takes and _installed("fa3") else None


def offered(q, v, terms):
    """Whether an FP8 kernel takes a call."""
    if torch.compiler.is_compiling():
        return _offered(q.shape[3], v.shape[3], terms.dense, q.device)
    return kernel_for(q, v, terms) is not None


# A constant of compiled code.
@torch.compiler.assume_constant_result
def _offered(d_head, d_v, dense, device):
    q, v = (torch.empty((1, 1, 1, d), dtype=torch.bfloat16, device=device) for d in (d_head, d_v))
    side = None if dense else 0
    return kernel_for(q, v, Terms(False, 1.0, side, side)) is not None


@functools.cache
def _installed(name):
    try:
        return backend(name) is not None
    except UnsupportedError:
        return False


def choose(name, q, v, terms):
    """The backend of a call, and why; ``auto`` takes a kernel that offers it, else the emulation."""
    if name != "auto":
        return backend(name), f"backend={name!r}"
    kernel = kernel_for(q, v, terms)
    if kernel is None and q.is_cuda and terms.logit_descale is not None and Native.takes(q, v, dataclasses.replace(terms, logit_descale=None)):
        return backend("emulated"), "gradients through logits in E4M3 have no kernel"
    if kernel is None and q.is_cuda:
        _warn_of_emulation(q.shape[3], torch.cuda.get_device_capability(q.device))
    kernel = kernel or "emulated"
    return backend(kernel), _reason(kernel, q.shape[3], q.is_cuda)


@functools.cache
def _reason(name, d_head, cuda):
    """Why ``auto`` took this backend."""
    if name == "native":
        return "this package's kernels take it" if cuda else "on the CPU the crate's own attention runs"
    if name == "fa3":
        return f"this package's kernels do not take d_head {d_head}, and FlashAttention-3 does"
    return f"no FP8 kernel takes d_head {d_head} here"


@functools.cache
def _warn_of_emulation(d_head, capability):
    warnings.warn(
        f"no FP8 kernel takes d_head {d_head} on compute capability {capability[0]}.{capability[1]} here, so attention is "
        "emulated in plain PyTorch, which is slow: on Hopper, pip install fa3-fwd, or pass fallback='bf16'",
        RuntimeWarning,
        stacklevel=4,
    )


def backward(grad, operands, descales, out, lse, terms, chosen, row_max=None, residual=None):
    """Gradients of q, k and v before their casts, and of the sinks or None, from what the forward of ``chosen`` saved.

    An output of FP8 sums of P V is biased, and so would be delta, its product with ``grad``: then output and LSE are
    computed again from the same operands, with P V in F16. ``residual`` is what the rounding of the output took, where delta is to be
    that of the output before it; the emulation's delta needs none.
    """
    q, k, v = operands
    if chosen.name == "emulated":
        return chosen.backward(grad, operands, descales, out, lse, terms)
    again = lambda backend: backend.forward(*operands, descales, dataclasses.replace(terms, accumulator="f16", keeps=NOTHING))
    if Native.takes(q, v, terms):
        native = backend("native")
        if (chosen.name, terms.accumulator) != ("native", "f16"):
            out, lse, _ = again(native)
        return native.backward(grad, operands, descales, out, lse, terms, row_max, residual)
    plain = terms.dense and q.shape[3] == v.shape[3]
    if not plain or (terms.causal and q.shape[1] != k.shape[1]):
        # PyTorch's kernels align such a mask to the first key.
        emulated = backend("emulated")
        out, lse, _ = again(emulated)
        return emulated.backward(grad, operands, descales, out, lse, terms)
    return (*_flash_backward(grad, operands, descales, terms.causal, terms.scale), None)


def _flash_backward(grad, operands, descales, causal, scale):
    """FlashAttention-2 in BF16 as PyTorch carries it, forward and backward, on the dequantized operands."""
    q, k, v = (dequantised(x, d) for x, d in zip(operands, descales))
    group = q.shape[2] // k.shape[2]
    heads = lambda x: x.transpose(1, 2)
    q, (k, v) = heads(q), (heads(x.repeat_interleave(group, dim=2)) for x in (k, v))
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        heads(grad.to(torch.bfloat16)), q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset, scale=scale
    )  # fmt: skip
    fold = lambda g: g.unflatten(2, (-1, group)).float().sum(dim=3)
    dq, dk, dv = (heads(g) for g in grads)
    return dq, fold(dk), fold(dv)
