"""Where PyTorch's own attention in BF16 is faster than this package's in FP8, by the records in ``benches/records``.

A pair of times is of one call from BF16, casts included, beside cuDNN's BF16 in the same run. Pairs are told apart by
direction, head dimension and query heads per KV head; a pair whose times differ by at most ``NOISE`` is a tie. From the
shortest length to the longest FP8 gains. So at lengths up to a loss, and below a tie, BF16 is taken. What has no pair is
not known to be slower, and runs in FP8: calls with windows, sinks, soft-caps and sequences, unequal lengths and decoding,
and other head dimensions and groups.
"""

import dataclasses

import torch

from ._hopper import Native
from ._terms import NOTHING

NOISE = 0.02


@dataclasses.dataclass(frozen=True)
class Pair:
    """Times of one shape in milliseconds, and the record that they are from; all have 16384 tokens a call."""

    record: str
    training: bool
    heads_q: int
    heads_kv: int
    d_head: int
    keys: int
    causal: bool
    fp8_ms: float
    bf16_ms: float

    @property
    def ratio(self):
        """FP8's time over BF16's."""
        return self.fp8_ms / self.bf16_ms

    @property
    def kind(self):
        """What a call must share with it."""
        return self.training, self.d_head, self.heads_q // self.heads_kv, self.causal


_FORWARD, _STEP = "2026-11-23-peers-from-bf16-h200.csv", "2026-11-23-peers-training-h200.csv"
PAIRS = (
    Pair(_FORWARD, False, 64, 8, 128, 2048, False, 1.3553, 1.7654),
    Pair(_FORWARD, False, 64, 8, 128, 2048, True, 0.8377, 1.0321),
    Pair(_FORWARD, False, 64, 8, 128, 8192, False, 4.8275, 7.1985),
    Pair(_FORWARD, False, 64, 8, 128, 8192, True, 2.5625, 3.7452),
    Pair(_FORWARD, False, 32, 32, 64, 2048, False, 0.5592, 0.5967),
    Pair(_FORWARD, False, 32, 32, 64, 2048, True, 0.3637, 0.3478),
    Pair(_FORWARD, False, 32, 32, 64, 8192, False, 1.8284, 2.3698),
    Pair(_FORWARD, False, 32, 32, 64, 8192, True, 1.0359, 1.2391),
    Pair(_STEP, True, 64, 8, 128, 2048, False, 7.0437, 7.6288),
    Pair(_STEP, True, 64, 8, 128, 2048, True, 4.1264, 4.588),
    Pair(_STEP, True, 64, 8, 128, 4096, False, 13.3621, 14.6176),
    Pair(_STEP, True, 64, 8, 128, 4096, True, 7.1521, 8.204),
    Pair(_STEP, True, 64, 8, 128, 8192, False, 25.5832, 28.4673),
    Pair(_STEP, True, 64, 8, 128, 8192, True, 13.3605, 15.1461),
    Pair(_STEP, True, 64, 8, 128, 16384, False, 50.0465, 56.7233),
    Pair(_STEP, True, 64, 8, 128, 16384, True, 25.652, 29.1086),
    Pair(_STEP, True, 32, 8, 128, 2048, False, 3.6443, 3.8873),
    Pair(_STEP, True, 32, 8, 128, 2048, True, 2.1442, 2.3373),
    Pair(_STEP, True, 32, 8, 128, 4096, False, 6.6958, 7.281),
    Pair(_STEP, True, 32, 8, 128, 4096, True, 3.6836, 4.1026),
    Pair(_STEP, True, 32, 8, 128, 8192, False, 13.0757, 14.2826),
    Pair(_STEP, True, 32, 8, 128, 8192, True, 6.7757, 7.6656),
    Pair(_STEP, True, 32, 8, 128, 16384, False, 25.0651, 28.4491),
    Pair(_STEP, True, 32, 8, 128, 16384, True, 13.0186, 14.6169),
    Pair(_STEP, True, 32, 32, 128, 2048, False, 3.829, 3.7916),
    Pair(_STEP, True, 32, 32, 128, 2048, True, 2.3791, 2.2681),
    Pair(_STEP, True, 32, 32, 128, 4096, False, 6.8122, 7.1812),
    Pair(_STEP, True, 32, 32, 128, 4096, True, 3.913, 3.9749),
    Pair(_STEP, True, 32, 32, 128, 8192, False, 13.1749, 14.2968),
    Pair(_STEP, True, 32, 32, 128, 8192, True, 7.0268, 7.4868),
    Pair(_STEP, True, 32, 32, 128, 16384, False, 25.4442, 28.1463),
    Pair(_STEP, True, 32, 32, 128, 16384, True, 13.2504, 14.522),
    Pair(_STEP, True, 32, 32, 64, 2048, False, 2.2247, 2.3164),
    Pair(_STEP, True, 32, 32, 64, 2048, True, 1.416, 1.4086),
    Pair(_STEP, True, 32, 32, 64, 4096, False, 4.0025, 4.4937),
    Pair(_STEP, True, 32, 32, 64, 4096, True, 2.2884, 2.4524),
    Pair(_STEP, True, 32, 32, 64, 8192, False, 7.4605, 8.8056),
    Pair(_STEP, True, 32, 32, 64, 8192, True, 4.0189, 4.6978),
    Pair(_STEP, True, 32, 32, 64, 16384, False, 14.5203, 17.4326),
    Pair(_STEP, True, 32, 32, 64, 16384, True, 7.4927, 8.9097),
)


def limits(pairs):
    """Rows of a kind, the first length that FP8 takes, and why BF16 takes those below."""
    found = {}
    for pair in pairs:
        # A tie stays in FP8, which keeps less memory for the backward.
        first = pair.keys + 1 if pair.ratio > 1 + NOISE else pair.keys if pair.ratio >= 1 - NOISE else 0
        if first > found.get(pair.kind, (0, ""))[0]:
            what = "forward and backward" if pair.training else "forward"
            found[pair.kind] = (
                first,
                (
                    f"BF16 is faster below {first} keys for {what} of {pair.heads_q // pair.heads_kv} query heads per KV head of "
                    f"{pair.d_head}: FP8 took {pair.ratio:.2f} times BF16's time at {pair.keys} keys ({pair.record})"
                ),
            )
    return tuple((*kind, *row) for kind, row in found.items())


# Plain values, which compiled code reads.
LIMITS = limits(PAIRS)


def limit(training, heads_q, heads_kv, d_head, causal, table=LIMITS):
    """The first length that FP8 takes of dense calls with as many queries as keys, and why BF16 takes those below; 0
    where FP8 is not known to be slower."""
    for of_training, d, group, of_causal, first, reason in table:
        if (of_training, of_causal) == (training, causal) and d == d_head and group == heads_q // heads_kv:
            return first, reason
    return 0, ""


def slower(q, k, v, terms):
    """Why BF16 is known to be faster for a call, or None."""
    if not measured(q, v) or not terms.dense or q.shape[1] != k.shape[1]:
        return None
    first, reason = limit(terms.keeps != NOTHING, q.shape[2], k.shape[2], q.shape[3], terms.causal)
    return reason if k.shape[1] < first else None


def measured(q, v):
    """Whether a call is of the kind that was timed beside BF16: on Hopper, from 16 bits a value."""
    return q.is_cuda and q.element_size() == 2 and q.shape[3] == v.shape[3] and _on_hopper(q.device)


# A constant of compiled code.
@torch.compiler.assume_constant_result
def _on_hopper(device):
    return Native.on_hopper(device)
