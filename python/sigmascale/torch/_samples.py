"""What a few rows of an attention call show, from its backward: repeated maxima, the bias of delta, entropy.

Logits are those of the E4M3 operands: their product is exact in f64 and rounded to f32 once, so two keys tie where
their products do. The exact output is the softmax of these logits times the E4M3 values, in f64.

    delta_bias = sum_rows (rowsum(dO * O) - rowsum(dO * O_exact)) / sum_rows |rowsum(dO * O_exact)|

O is the output that the call returned, from which FlashAttention's backward computes delta. Source: "Why Low-Precision
Transformer Training Fails", sections 3.2 and 3.3 (delta, its bias) and appendix E.1 (repeated maxima).
"""

import torch

# Keys of a tile: the largest that the attention kernels have at a head dimension of 128 and below.
TILE = 128
# Bytes of f64 that are held at a time; KV heads are taken in groups.
_BYTES = 256 << 20
# Fraction by which the rows of consecutive samples are apart: any number of them spreads evenly.
_GOLDEN = 0.6180339887498949

NAMES = ("repeated", "repeated_in_tile", "delta_bias", "entropy", "logit_max")


@torch.no_grad()
def sample(grad, operands, descales, out, terms, rows, turn):
    """f64 ``(len(NAMES), n_q_heads)``, on the operands' device and without waiting for it. ``operands``: q, k and v in
    E4M3; ``grad``: that of ``out``. ``rows`` queries of entry ``turn`` of the batch are read, spread over its length.
    NaN where none of them sees a key."""
    q, k, v = operands
    (batch, len_q, n_q, _), (len_k, n_kv) = q.shape, k.shape[1:3]
    entry, count = turn % batch, min(rows, len_q)
    spread = (torch.arange(count, dtype=torch.float32, device=q.device) + turn * _GOLDEN % 1.0) * (len_q / count)
    places = spread.long().clamp_max(len_q - 1)
    taken = lambda x: x[entry].index_select(0, places)
    q, grad, out = _wide(taken(_bytes(q)).view(q.dtype)), _wide(taken(grad)), _wide(taken(out))
    visible = terms.visible_to(places, entry, len_q, len_k)
    group = n_q // n_kv
    size = 8 * len_k * (k.shape[3] + v.shape[3] + 4 * group * count)
    step = max(1, _BYTES // size)
    parts = []
    with torch.autocast(q.device.type, enabled=False):
        for first in range(0, n_kv, step):
            kv, heads = slice(first, first + step), slice(first * group, (first + step) * group)
            sinks = None if terms.sinks is None else terms.sinks[heads].double()
            own = [d[entry, kv].double() for d in descales[:3]]
            parts.append(
                _heads(
                    q[:, heads],
                    k[entry, :, kv],
                    v[entry, :, kv],
                    grad[:, heads],
                    out[:, heads],
                    own,
                    terms,
                    visible,
                    sinks,
                )
            )
    return torch.cat(parts, dim=1)


def _bytes(x):
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _wide(x):
    """E4M3 has no conversion to f64 everywhere."""
    return x.float().double()


def _heads(q, k, v, grad, out, descales, terms, visible, sinks):
    """Of some KV heads and their query heads: q, grad and out ``(rows, heads, d)``, k and v ``(keys, kv heads, d)``."""
    n_q, n_kv = q.shape[1], k.shape[1]
    q_descale, k_descale, v_descale = (d.view(-1, 1, 1, 1) for d in descales)
    # (KV head, head of its group, row or key, channel)
    of_group = lambda x: x.unflatten(1, (n_kv, -1)).permute(1, 2, 0, 3)
    k, v = (_wide(x).transpose(0, 1)[:, None] for x in (k, v))
    logits = of_group(q) @ k.transpose(2, 3) * (q_descale * k_descale * terms.scale)
    if terms.soft_cap is not None:
        logits = terms.soft_cap * torch.tanh(logits / terms.soft_cap)
    logits = logits.float()
    if visible is not None:
        logits = logits.masked_fill(~visible, -torch.inf)
    top = logits.amax(dim=3, keepdim=True)
    seen = (top != -torch.inf).squeeze(3)
    ties = (logits == top) & seen[..., None]
    in_tile = torch.nn.functional.pad(ties, (0, -ties.shape[3] % TILE)).unflatten(3, (-1, TILE)).sum(dim=4).amax(dim=3)
    weights = torch.exp(logits.double() - top.double())
    total = weights.sum(dim=3, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.view(n_kv, -1, 1, 1) - top.double())
    weights = weights / total
    exact = weights @ v * v_descale
    delta, reference = ((of_group(grad) * x).sum(dim=3) for x in (of_group(out), exact))
    mean = lambda x: torch.where(seen, x.double(), 0.0).sum(dim=2) / seen.sum(dim=2)
    # A row without keys is NaN.
    kept = lambda x: torch.where(seen, x, 0.0).sum(dim=2)
    rows = (
        mean(ties.sum(dim=3) > 1),
        mean(in_tile > 1),
        kept(delta - reference) / kept(reference.abs()),
        mean(-torch.xlogy(weights, weights).sum(dim=3)),
        torch.where(logits.isfinite(), logits.abs(), 0.0).amax(dim=(2, 3)).double(),
    )
    return torch.stack([row.reshape(n_q) for row in rows])
