"""Bounds of q and k that are normalised after the projection: from the gains of their norms alone, on the device.

``|q_b| <= R |g_b|`` with R the root of the number of channels that are normalised together, and for logits
``tau R_q R_k max_b |gq_b gk_b|``; rotation mixes the channels of a pair, so both count with the larger gain. The same as the
crate's ``bound`` module, which says why; everything is rounded up.
"""

import math

import torch

_MAX = 448.0
# The share of the rounding errors of projection, norm and rotation in an operand bound.
_ROUNDING = 1.0 + 1.0 / 32.0
# What E4M3 and BF16 rounding together can add to the norm of q or k, and the error of a subnormal in units of its descale.
_ROUNDED = (1.0 + 1.0 / 17.0) * _ROUNDING
_SUBNORMAL = 1.0 / 1024.0
_ETA = 0.8


def operand_bounds(layer):
    """Rounded bounds of q and k, ``(2, n_kv)`` f32; 0 for gains of zero."""
    rows = [limit.amax(dim=1).view(layer.n_kv_heads, -1).amax(dim=1) for limit in _limits(layer)]
    return _above(torch.stack(rows) * _ROUNDING)


def descales(bounds):
    """What covers ``bounds``; 1 where they are 0."""
    return torch.where(bounds == 0, 1.0, _above(bounds.double() / _MAX))


def logit_bounds(layer, q_and_k):
    """Sigma (none: 0), certain bound, rounded bound and logit descale, ``(n_q, 4)`` f32, with ``descales`` of q and k."""
    group = layer.n_q_heads // layer.n_kv_heads
    q, k = _limits(layer)
    k = k.repeat_interleave(group, dim=0)
    tau = layer.d_head**-0.5 if layer.softmax_scale is None else layer.softmax_scale
    certain = tau * (q * k).amax(dim=1)
    norm_q, norm_k = q.amax(dim=1), k.amax(dim=1)
    flush = math.sqrt(layer.d_head) * _SUBNORMAL
    step_q, step_k = (row.double().amax() * flush for row in q_and_k)
    gap = tau * ((_ROUNDED * norm_q + step_q) * (_ROUNDED * norm_k + step_k) - norm_q * norm_k)
    rounded = _above(certain + torch.where((norm_q == 0) | (norm_k == 0), 0.0, gap))
    descale = torch.where(rounded == 0, 1.0, _above(rounded.double() / (_ETA * _MAX)))
    return torch.stack([torch.zeros_like(rounded), _above(certain), rounded, descale], dim=1)


def _limits(layer):
    """``R |g|`` of every channel of q ``(n_q, d_head)`` and of k ``(n_kv, d_head)``, the larger of each rotation pair, f64."""
    both = []
    for gain, heads in [(layer.q_norm, layer.n_q_heads), (layer.k_norm, layer.n_kv_heads)]:
        radius = math.sqrt(heads * layer.d_head if layer.qk_norm_joint else layer.d_head)
        size = (gain.double() + layer.qk_norm_offset).abs().view(-1, layer.d_head).expand(heads, -1)
        turned, rest = size.split([layer.rotary, layer.d_head - layer.rotary], dim=1)
        pairs = turned.unflatten(1, (-1, 2) if layer.interleaved else (2, -1))
        larger = pairs.amax(dim=2 if layer.interleaved else 1, keepdim=True).expand_as(pairs).flatten(1)
        both.append(radius * torch.cat([larger * layer.rope_factor, rest], dim=1))
    return both


def _above(value):
    """f64 to f32, never below: one step up covers the rounding."""
    up = torch.nextafter(value.float(), torch.full_like(value, math.inf, dtype=torch.float32))
    return torch.where(value == 0, 0.0, up)
