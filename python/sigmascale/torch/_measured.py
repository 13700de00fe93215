"""Where PyTorch's own attention in BF16 is faster than this package's in FP8, by the records in ``benches/records``.

A pair of times is of one call from BF16, casts included, beside cuDNN's BF16 in the same run. Pairs are told apart by
direction, head dimension and query heads a KV head; a pair whose times differ by at most ``NOISE`` is a tie. In every
pair of lengths FP8 gains as sequences grow. So at lengths up to a loss, and below a tie, BF16 is taken. What has no
pair is not known to be slower, and runs in FP8: calls with windows, sinks, soft-caps and sequences, full (not causal)
training, unequal lengths and decoding, other head dimensions and groups, and lengths below those of the table in the
forward alone.
"""

import dataclasses

NOISE = 0.01


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


_END_TO_END, _STEP = "2026-11-21-attention-end-to-end-h200.csv", "2026-11-22-attention-training-step-h200.csv"
PAIRS = (
    Pair(_END_TO_END, False, 64, 8, 128, 2048, False, 1.272, 1.701),
    Pair(_END_TO_END, False, 64, 8, 128, 2048, True, 0.817, 1.066),
    Pair(_END_TO_END, False, 64, 8, 128, 8192, False, 4.775, 7.135),
    Pair(_END_TO_END, False, 64, 8, 128, 8192, True, 2.439, 3.684),
    Pair(_STEP, True, 64, 8, 128, 2048, True, 4.46, 4.445),
    Pair(_STEP, True, 64, 8, 128, 8192, True, 14.02, 15.02),
    Pair(_STEP, True, 32, 8, 128, 2048, True, 2.00, 2.258),
    Pair(_STEP, True, 32, 8, 128, 8192, True, 6.64, 7.636),
    Pair(_STEP, True, 32, 32, 64, 2048, True, 1.397, 1.398),
    Pair(_STEP, True, 32, 32, 64, 8192, True, 3.98, 4.73),
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
                    f"BF16 is faster below {first} keys for {what} of {pair.heads_q // pair.heads_kv} query heads a KV head of "
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
