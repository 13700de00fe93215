"""Statistics that calls report, a row of 32-bit words for each head, and what a runtime makes of them."""

import math

import numpy as np
import torch


def folded(words, n_q, n_kv):
    """amax ``(layers, 3, n_kv)`` and counts ``(layers, 3, n_kv, 3)`` from the words of layers with as many heads."""
    rows = words[:, n_q : 2 * (n_q + n_kv)].reshape(words.shape[0], -1, 4)
    # Bits of numbers that are not negative keep their order as integers.
    q, k, v = rows[..., 0].split([n_q, n_kv, n_kv], dim=1)
    amax = torch.stack([q.unflatten(1, (n_kv, -1)).amax(dim=2), k, v], dim=1).view(torch.float32)
    q, k, v = unsigned(rows[..., 1:]).split([n_q, n_kv, n_kv], dim=1)
    return amax, torch.stack([q.unflatten(1, (n_kv, -1)).sum(dim=2), k, v], dim=1)


U32_MAX = 0xFFFFFFFF


def unsigned(words):
    """Words of 32 bits, which PyTorch has as int32, as int64."""
    return words.long() & U32_MAX


def add_counts(words, counts):
    """Adds int64 counts to words in place; they stop at the largest that 32 bits hold, as the kernels' do."""
    words.copy_(_signed((unsigned(words) + counts).clamp_max(U32_MAX)))


def add(words, called, n_q):
    """Takes the words of a call into a layer's: largest values, and counts."""
    before, new = unsigned(words), unsigned(called)
    largest, total = torch.maximum(before, new), (before + new).clamp_max(U32_MAX)
    # Of the words of a row of logits the first three are largest values, of the others the first.
    places = (slice(n_q), 3), (slice(n_q, None), 1)
    rows = [torch.cat([largest[rows, :n], total[rows, n:]], dim=1) for rows, n in places]
    words.copy_(_signed(torch.cat(rows)))


def add_logits(words, logits, overflow, seen):
    """Takes the extremes of the logits ``(batch, n_q, len_q, len_k)`` that are ``seen``, and counts of overflow by head, into a
    layer's rows."""
    largest = logits.masked_fill(~seen, -torch.inf).amax(dim=(0, 2, 3))
    smallest = logits.masked_fill(~seen, torch.inf).amin(dim=(0, 2, 3))
    none = torch.zeros_like(overflow)
    row = torch.stack([_ordered(largest), U32_MAX - _ordered(smallest), none, overflow], dim=1)
    below = torch.zeros((words.shape[0] - row.shape[0], 4), dtype=row.dtype, device=row.device)
    rows = torch.cat([row, below])
    add(words, torch.where((largest >= smallest).any(), rows, 0), row.shape[0])


def _ordered(x):
    """Integers of 32 bits in the order of f32 values, int64."""
    bits = unsigned(x.float().view(torch.int32))
    return torch.where(bits & 0x80000000 != 0, U32_MAX - bits, bits | 0x80000000)


def _signed(numbers):
    """int64 of 32 bits as PyTorch's int32 has them."""
    return torch.where(numbers > U32_MAX // 2, numbers - (U32_MAX + 1), numbers)


def observed(words, heads):
    """The same of every layer of a runtime, zero past the heads of each."""
    if heads.equal:
        return folded(words, heads.n_q, heads.n_kv)
    shape = (len(heads.counts), 3, heads.n_kv)
    amax = words.new_zeros(shape, dtype=torch.float32)
    counts = words.new_zeros((*shape, 3), dtype=torch.int64)
    for index, (n_q, n_kv) in enumerate(heads.counts):
        one = folded(words[index : index + 1], n_q, n_kv)
        amax[index : index + 1, :, :n_kv], counts[index : index + 1, :, :n_kv] = one
    return amax, counts


def extremes(ordered):
    """Largest and smallest logit from words in the order of unsigned integers, int64 ``(.., 2)``; NaN where there was none."""
    low = ordered.clone()
    low[..., 1] ^= U32_MAX
    bits = torch.where(low & 0x80000000 != 0, low & 0x7FFFFFFF, ~low & U32_MAX)
    return torch.where(ordered == 0, math.nan, bits.to(torch.int64).to(torch.uint32).view(torch.float32).double())


def _extremes(words, heads):
    """Largest and smallest logits ``(layers, n_q, 2)``, which are stored as integers of the same order; NaN where there are none."""
    ordered = unsigned(words[:, : heads.n_q, :2])
    for index, (n_q, _) in enumerate(heads.counts):
        ordered[index, n_q:] = 0
    return extremes(ordered)


def stats(words, heads, descales, counted, reported):
    """What ``Runtime.stats`` returns. ``descales``: what was multiplied with, or None; ``counted``: counters of each
    layer's calls by what ran them, and by that and why."""
    amax, counts = observed(words, heads)
    logits, why = _extremes(words, heads), {}
    for (name, reason), row in _by_layer([reasons for _, reasons in counted]).items():
        why.setdefault(name, {})[reason] = row
    return {
        "amax": amax.numpy(),
        "overflow": counts[..., 0].numpy(),
        "beyond": counts[..., 1].numpy(),
        "non_finite": counts[..., 2].numpy(),
        "peak": np.full(amax.shape, np.nan, np.float32) if descales is None else (amax / descales[:, :3]).numpy(),
        "logit_max": logits[..., 0].numpy(),
        "logit_min": logits[..., 1].numpy(),
        "logit_overflow": unsigned(words[:, : heads.n_q, 3]).numpy(),
        "calls": _by_layer([calls for calls, _ in counted]),
        "why": why,
        "reported": reported,
    }


def _by_layer(counters):
    """Counts ``(layers,)`` by what was counted."""
    return {key: np.array([counter[key] for counter in counters]) for key in sorted(set().union(*counters))}
