"""FP8 attention in NumPy: the right call, and calls with planted faults, for the probe."""

import numpy as np


def attention(q, k, v, q_descale, k_descale, v_descale, causal=False):
    """f64 attention of dequantized operands, ``(batch, seq, heads, d)``."""
    group = q.shape[2] // k.shape[2]
    heads = lambda descale: np.repeat(descale, group, axis=1)[:, None, :, None]
    q = q.astype(np.float64) * heads(q_descale)
    k, v = (np.repeat(x.astype(np.float64), group, axis=2) * heads(d) for x, d in [(k, k_descale), (v, v_descale)])
    logits = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[3])
    if causal:
        rows, columns = logits.shape[2:]
        logits = np.where(np.arange(columns) > np.arange(rows)[:, None] + columns - rows, -np.inf, logits)
    weights = np.exp(logits - logits.max(axis=3, keepdims=True))
    weights /= weights.sum(axis=3, keepdims=True)
    return np.einsum("bhqk,bkhd->bqhd", weights, v)


class Stale:
    """Keeps descales of an earlier call: the first (``lag`` None) or the one ``lag`` calls ago."""

    def __init__(self, call, which, lag=None):
        self.call, self.which, self.lag, self.seen = call, which, lag, []

    def __call__(self, *arguments):
        arguments = list(arguments)
        self.seen.append(arguments[self.which])
        place = 0 if self.lag is None else max(0, len(self.seen) - 1 - self.lag)
        arguments[self.which] = self.seen[place]
        return self.call(*arguments)


def faulty(call, which, change):
    """``call`` with argument ``which`` (3, 4, 5: the descales) changed."""

    def changed(*arguments):
        arguments = list(arguments)
        arguments[which] = change(arguments[which])
        return call(*arguments)

    return changed
