"""Where PyTorch's own attention in BF16 is faster than this package's in FP8, by the records in ``benches/records``.

A pair of times is of one call from BF16, casts included, beside cuDNN's BF16 in the same run. Pairs are told apart by
direction, head dimension and query heads per KV head; a pair whose times differ by at most ``NOISE`` is a tie. From the
shortest length to the longest FP8 gains. So at lengths up to a loss, and below a tie, BF16 is taken. What has no pair is
not known to be slower, and runs in FP8: calls with windows, sinks, soft-caps and sequences, unequal lengths and decoding,
and other head dimensions and groups.
"""

import dataclasses

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
    Pair(_FORWARD, False, 64, 8, 128, 2048, False, 1.4369, 1.7797),
    Pair(_FORWARD, False, 64, 8, 128, 2048, True, 0.8635, 1.0304),
    Pair(_FORWARD, False, 64, 8, 128, 8192, False, 5.0771, 7.0214),
    Pair(_FORWARD, False, 64, 8, 128, 8192, True, 2.5491, 3.8284),
    Pair(_FORWARD, False, 32, 32, 64, 2048, False, 0.5479, 0.603),
    Pair(_FORWARD, False, 32, 32, 64, 2048, True, 0.3582, 0.3526),
    Pair(_FORWARD, False, 32, 32, 64, 8192, False, 1.776, 2.385),
    Pair(_FORWARD, False, 32, 32, 64, 8192, True, 0.9795, 1.2599),
    Pair(_STEP, True, 64, 8, 128, 2048, False, 7.0265, 7.6627),
    Pair(_STEP, True, 64, 8, 128, 2048, True, 4.1296, 4.5853),
    Pair(_STEP, True, 64, 8, 128, 4096, False, 13.2154, 14.4611),
    Pair(_STEP, True, 64, 8, 128, 4096, True, 7.1313, 8.0918),
    Pair(_STEP, True, 64, 8, 128, 8192, False, 25.3664, 28.0439),
    Pair(_STEP, True, 64, 8, 128, 8192, True, 13.2347, 15.0093),
    Pair(_STEP, True, 64, 8, 128, 16384, False, 49.5872, 57.4535),
    Pair(_STEP, True, 64, 8, 128, 16384, True, 25.4194, 28.6137),
    Pair(_STEP, True, 32, 8, 128, 2048, False, 3.5983, 3.8487),
    Pair(_STEP, True, 32, 8, 128, 2048, True, 2.1162, 2.3262),
    Pair(_STEP, True, 32, 8, 128, 4096, False, 6.6208, 7.2891),
    Pair(_STEP, True, 32, 8, 128, 4096, True, 3.6167, 4.0522),
    Pair(_STEP, True, 32, 8, 128, 8192, False, 12.7918, 14.0999),
    Pair(_STEP, True, 32, 8, 128, 8192, True, 6.657, 7.5233),
    Pair(_STEP, True, 32, 8, 128, 16384, False, 24.748, 27.7149),
    Pair(_STEP, True, 32, 8, 128, 16384, True, 12.9185, 14.3642),
    Pair(_STEP, True, 32, 32, 128, 2048, False, 3.8231, 3.7182),
    Pair(_STEP, True, 32, 32, 128, 2048, True, 2.3414, 2.2425),
    Pair(_STEP, True, 32, 32, 128, 4096, False, 6.8616, 7.1711),
    Pair(_STEP, True, 32, 32, 128, 4096, True, 3.8549, 4.0091),
    Pair(_STEP, True, 32, 32, 128, 8192, False, 13.055, 14.0406),
    Pair(_STEP, True, 32, 32, 128, 8192, True, 6.9256, 7.5084),
    Pair(_STEP, True, 32, 32, 64, 2048, False, 2.2234, 2.2959),
    Pair(_STEP, True, 32, 32, 64, 2048, True, 1.3898, 1.4208),
    Pair(_STEP, True, 32, 32, 64, 4096, False, 4.0281, 4.4474),
    Pair(_STEP, True, 32, 32, 64, 4096, True, 2.2646, 2.4527),
    Pair(_STEP, True, 32, 32, 64, 8192, False, 7.4885, 8.7861),
    Pair(_STEP, True, 32, 32, 64, 8192, True, 3.981, 4.6989),
    Pair(_STEP, True, 32, 32, 64, 16384, False, 14.5613, 17.3275),
    Pair(_STEP, True, 32, 32, 64, 16384, True, 7.3768, 8.9384),
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
