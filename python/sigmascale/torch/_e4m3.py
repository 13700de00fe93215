"""The cast to E4M3 by descales, with telemetry, and its inverse."""

import functools

import torch

from ._telemetry import add_counts

E4M3 = torch.float8_e4m3fn
MAX = 448.0
# What P, in [0, 1], is multiplied by before its cast: a power of two, so 1 becomes 256 and nothing overflows.
P_SCALE = 256.0


def spread(descale, heads):
    """``(batch, n_kv)`` to ``(batch, 1, heads, 1)``: query heads of one group share theirs."""
    group = heads // descale.shape[1]
    return descale.repeat_interleave(group, dim=1)[:, None, :, None] if group > 1 else descale[:, None, :, None]


def cast(x, descale, words=None):
    """``x / descale`` in E4M3, saturating; ``words`` (heads, 4) takes in amax, |x / descale| past 448 and 464, non-finite.

    An operand that is E4M3 already is ``x / descale`` and stays as it is.
    """
    if x.dtype == E4M3:
        return x
    fused = _fused_cast() if x.is_cuda and x.stride(3) == 1 and descale.stride(1) == 1 else None
    return (fused or plain_cast)(x, descale, words)


@functools.cache
def _fused_cast():
    """The Triton kernel, where Triton is installed."""
    try:
        from ._triton_cast import cast as fused
    except ImportError:
        return None
    return fused


def plain_cast(x, descale, words=None):
    """The same in plain PyTorch."""
    scaled = x.float() * spread(descale.reciprocal(), x.shape[2])
    if words is not None:
        report(words, x, scaled)
    return scaled.clamp(-MAX, MAX).to(E4M3)


def report(words, x, scaled):
    """Adds a tensor's maxima and counts to its rows."""
    size = scaled.abs()
    amax = x.abs().amax(dim=(0, 1, 3)).float().view(torch.int32)
    words[:, 0] = torch.maximum(words[:, 0], amax)
    finite = torch.isfinite(size)
    masks = ((size > MAX) & finite, (size > 464.0) & finite, ~finite)
    add_counts(words[:, 1:], torch.stack([mask.sum(dim=(0, 1, 3)) for mask in masks], dim=1))


def cast_all(q, k, v, descales, words=None):
    """q, k and v in E4M3, with their statistics in the rows of ``words``."""
    rows = (None,) * 3
    if words is not None:
        n_q, n_kv = q.shape[2], k.shape[2]
        rows = words[n_q:].split([n_q, n_kv, n_kv])
    return tuple(cast(x, d, row) for x, d, row in zip((q, k, v), descales, rows))


def dequantised(x, descale):
    """What the kernel saw of ``x``, in BF16."""
    return (cast(x, descale).float() * spread(descale, x.shape[2])).to(torch.bfloat16)
