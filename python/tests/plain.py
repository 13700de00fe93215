"""Attention in f64 in plain PyTorch, with gradients: what every other attention is compared with. It shares no code with the
package."""

import math

import torch

E4M3 = torch.float8_e4m3fn


def held(x, descale):
    """What the cast to E4M3 leaves of ``x`` (.., len, heads, d), in f64; its derivative is the identity. ``descale``: f32
    ``(n_kv)`` or ``(batch, n_kv)``."""
    descale = descale.repeat_interleave(x.shape[-2] // descale.shape[-1], dim=-1)[..., None, :, None]
    eight = x if x.dtype == E4M3 else (x.detach().float() * (1 / descale)).clamp(-448, 448).to(E4M3)
    value = (eight.double() * descale.double()).view(x.shape)
    return value if x.dtype == E4M3 else x.double() + (value - x.detach().double())


def visible(len_q, len_k, causal, window=(-1, -1), rows=None):
    """True where a query sees a key, ``(queries, len_k)``; the last query is at the last key. ``rows``: of these queries."""
    row = torch.arange(len_q) if rows is None else rows.cpu()
    ahead = torch.arange(len_k)[None] - (row[:, None] + len_k - len_q)
    left, right = window
    seen = ahead >= -left if left >= 0 else torch.ones_like(ahead, dtype=torch.bool)
    if causal:
        seen &= ahead <= 0
    return seen & (ahead <= right) if right >= 0 else seen


def probabilities(q, k, scale, seen, softcap=None, sink=None):
    """P ``(.., queries, keys)`` and the log-sum-exp of q and k ``(.., len, d)`` of one head."""
    logits = scale * q @ k.mT
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~seen.to(q.device), -math.inf)
    if sink is not None:
        logits = torch.cat([logits, sink.double().expand(*logits.shape[:-1], 1)], dim=-1)
    lse = torch.logsumexp(logits, dim=-1) if logits.shape[-1] else logits.new_full(logits.shape[:-1], -math.inf)
    return torch.exp(logits - torch.where(lse == -math.inf, 0.0, lse)[..., None])[..., : k.shape[-2]], lse


def attention(q, k, v, *, causal=True, scale=None, window=(-1, -1), softcap=None, sinks=None, rows=None):
    """Output ``(.., queries, heads, d_v)`` and log-sum-exp ``(.., heads, queries)`` of q, k and v ``(.., len, heads, d)``;
    of the queries ``rows``, by default of all. Head by head, which takes less memory."""
    scale, group = scale or q.shape[-1] ** -0.5, q.shape[-2] // k.shape[-2]
    seen = visible(q.shape[-3], k.shape[-3], causal, window, rows)
    q, outs, lses = q if rows is None else q[..., rows, :, :], [], []
    for head in range(q.shape[-2]):
        one = q[..., head, :].double()
        keys, values = (x[..., head // group, :].double() for x in (k, v))
        sink = None if sinks is None else sinks[head]
        p, lse = probabilities(one, keys, scale, seen, softcap, sink)
        outs.append(p @ values)
        lses.append(lse)
    return torch.stack(outs, dim=-2), torch.stack(lses, dim=-2)


def packed(q, k, v, places, **terms):
    """The same of sequences, by (first query, end, first key, end), which count over the whole batch: rows of none are zero,
    with a log-sum-exp of -inf."""
    batch, length, heads, _ = q.shape
    out = q.new_zeros((batch * length, heads, v.shape[3]), dtype=torch.float64)
    lse = q.new_full((batch * length, heads), -math.inf, dtype=torch.float64)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    for q_start, q_end, k_start, k_end in places:
        one, its = attention(q[q_start:q_end], k[k_start:k_end], v[k_start:k_end], **terms)
        out[q_start:q_end], lse[q_start:q_end] = one, its.mT
    return out.view(batch, length, heads, -1), lse.view(batch, length, heads).mT
