#!/usr/bin/env python3
"""What the scales of FP8 attention add to an optimizer step of a 70B model on 64, 512 and 4096 GPUs.

    scale_out.py [--mfu 0.4] [--alone-us 28.7]

A model, not a measurement: kernel times are rows of `benches/records`, network times an alpha-beta model with published constants.
`docs/scale-out.md` states its assumptions and what it leaves out. Needs Python alone. Output: CSV on stdout.
"""

import argparse
import csv
import dataclasses
import math
import pathlib
import sys

RECORDS = pathlib.Path(__file__).resolve().parent / "records"

# Llama-2-70B's attention.
LAYERS, Q_HEADS, KV_HEADS, D_HEAD, PARAMETERS = 80, 64, 8, 128, 70e9
GPUS_PER_NODE = 8
# H200 SXM data sheet: 1979 TFLOPS in BF16 with sparsity.
DENSE_BF16_FLOPS = 989.5e12

# NCCL's tuning model (src/graph/tuning.cc, NCCL 2.28), tree algorithm with the LL protocol, in seconds: start, one hop over NVLink, one
# hop over the network. LL sends a flag of 4 bytes with every 4 bytes.
START, NVLINK_HOP, NETWORK_HOP, LL_OVERHEAD = 6.8e-6, 0.6e-6, 5.0e-6, 2
# NDR InfiniBand, one ConnectX-7 port of 400 Gb/s a GPU (DGX H200 data sheet), bytes a second.
NETWORK_BANDWIDTH = 50e9

# TransformerEngine's slots of an attention layer: q, k, v, s, o and the like in the forward, gradients in the backward.
TE_FORWARD_SLOTS, TE_BACKWARD_SLOTS, TE_HISTORY = 9, 6, 1024
# This package's: rows of 16 bytes that calls report into, two a query head and two a KV head; five tensors a layer.
WORD_ROW, DELAYED_TENSORS = 16, 5
# Tables of the scale engine (src/device/scale/tables.rs): statistics of a channel, a projection with its tensor map, a layer.
STATISTICS, PROJECTION, TENSOR_MAP, LAYER, HEAD = 32, 96, 128, 68, 8


def measured(record, column, **row):
    """One figure of a record."""
    with open(RECORDS / record, encoding="utf-8") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        found = [each for each in rows if all(each[key] == value for key, value in row.items())]
    if len(found) != 1:
        raise LookupError(f"{record}: {len(found)} rows have {row}: name one row")
    return float(found[0][column])


# Seconds a layer, whole 70B model: one read of W_Q, W_K and W_V, without and with certified logit bounds.
DESCALES = measured("2026-11-24-scale-pass-h200.csv", "us", model="llama-2-70b", method="operand_descales") * 1e-6
PLAN = measured("2026-11-24-scale-pass-h200.csv", "us", model="llama-2-70b", method="plan") * 1e-6
# Microseconds that a layer takes longer by itself, as under FSDP, than in one launch for all layers; at Llama-3 8B's shape.
_moving = lambda form: measured("2026-11-24-scale-moving-h200.csv", "us", what="moving", form="descales: " + form)
ALONE_US = round(_moving("addresses by value") - _moving("one launch a model"), 1)
# Seconds a step, all layers.
DELAYED_STEP = measured("2026-11-21-policy-step-h200.csv", "delayed_te_step_ms", model="llama-2-70b") * 1e-3
# Seconds that the amax of q, k and v adds to a call of 16384 tokens with these heads.
_call = lambda column: measured("2026-11-21-attention-end-to-end-h200.csv", column, keys="8192", causal="1")
AMAX_PER_TOKEN = (_call("best_peer_current_ms") - _call("best_peer_cast_ms")) * 1e-3 / 16384


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a model is spread: tensor, pipeline and context parallel degrees, and a global batch of `sequences`. A microbatch is one
    sequence."""

    gpus: int
    tp: int
    pp: int
    cp: int
    sequences: int
    seq_len: int

    def __post_init__(self):
        assert self.gpus % (self.tp * self.pp * self.cp) == 0 and self.sequences % self.dp == 0
        assert LAYERS % self.pp == 0 and KV_HEADS % self.tp == 0 and self.tp == GPUS_PER_NODE

    @property
    def dp(self):
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def microbatches(self):
        return self.sequences // self.dp

    @property
    def layers(self):
        """Of one rank."""
        return LAYERS // self.pp

    def step(self, mfu):
        """Seconds at a share `mfu` of the dense BF16 peak: 6 operations a parameter and token, and causal attention's."""
        attention = 6 * LAYERS * Q_HEADS * D_HEAD * self.seq_len
        operations = (6 * PARAMETERS + attention) * self.sequences * self.seq_len
        return operations / (self.gpus * DENSE_BF16_FLOPS * mfu)


LAYOUTS = [
    Layout(64, tp=8, pp=1, cp=1, sequences=512, seq_len=8192),
    Layout(512, tp=8, pp=1, cp=1, sequences=512, seq_len=8192),
    Layout(512, tp=8, pp=1, cp=8, sequences=64, seq_len=65536),
    Layout(4096, tp=8, pp=4, cp=1, sequences=2048, seq_len=8192),
]


def all_reduce(size, ranks, nodes):
    """Seconds of an all-reduce of `size` bytes: up a chain in each node and a tree of nodes, and down again."""
    if ranks == 1:
        return 0.0
    hops = 2 * ((ranks / nodes - 1) * NVLINK_HOP + math.ceil(math.log2(nodes)) * NETWORK_HOP)
    return START + hops + 2 * LL_OVERHEAD * size / NETWORK_BANDWIDTH


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one rank, for an optimizer step: collective calls and the bytes of each, seconds, bytes held, bytes in a checkpoint."""

    policy: str
    calls: int = 0
    call_bytes: int = 0
    network: float = 0.0
    kernels: float = 0.0
    memory: int = 0
    checkpoint: int = 0


def _engine_bytes(layers, tp):
    q, kv = Q_HEADS // tp, KV_HEADS // tp
    channels, heads = (q + 2 * kv) * D_HEAD, q + 2 * kv
    results = 4 * (4 * kv + 4 + 3 * kv)
    each = channels * STATISTICS + 3 * (PROJECTION + TENSOR_MAP) + heads * HEAD + LAYER + results
    return layers * each


def geometry(layout, alone, sharded=False, bounds=False):
    """One read of the weights a step, in one launch for all layers, or in one for each layer in its forward."""
    share = (PLAN if bounds else DESCALES) / layout.tp
    name = "geometry" + (", logit bounds" if bounds else "") + (", FSDP" if sharded else "")
    return Cost(
        name,
        kernels=layout.layers * (share + (alone if sharded else 0.0)),
        # Sharded layers of one shape share an engine.
        memory=_engine_bytes(1 if sharded else layout.layers, layout.tp),
    )


def delayed(layout):
    """This package's delayed-te: one all-reduce a step over ranks that have the same heads, and one kernel."""
    words = layout.layers * 2 * (Q_HEADS + KV_HEADS) // layout.tp * WORD_ROW
    ranks = layout.dp * layout.cp
    state = layout.layers * DELAYED_TENSORS * (TE_HISTORY + 1) * 4
    # One GPU of each node: tensor parallelism fills the node.
    network = all_reduce(words, ranks, ranks)
    return Cost("delayed-te", 1, words, network, DELAYED_STEP, state, state * layout.pp * layout.tp)


def delayed_te(layout):
    """TransformerEngine's DelayedScaling with reduce_amax: two blocking all-reduces a microbatch over TP x CP x DP."""
    ranks = layout.tp * layout.cp * layout.dp
    sizes = [4 * slots * layout.layers for slots in (TE_FORWARD_SLOTS, TE_BACKWARD_SLOTS)]
    network = layout.microbatches * sum(all_reduce(size, ranks, ranks // GPUS_PER_NODE) for size in sizes)
    state = layout.layers * (TE_FORWARD_SLOTS + TE_BACKWARD_SLOTS) * (TE_HISTORY + 1) * 4
    calls = 2 * layout.microbatches
    return Cost("DelayedScaling", calls, max(sizes), network, calls * DELAYED_STEP, state, state * layout.pp)


def current(layout):
    """Each call takes the amax of its q, k and v; with context parallelism it is reduced too, in the forward and the backward."""
    calls = layout.layers * layout.microbatches
    tokens = layout.seq_len // layout.cp
    reduces = 2 * calls if layout.cp > 1 else 0
    # The tensor parallel ranks of a node have heads of their own: a context group has one GPU a node.
    network = reduces * all_reduce(4, layout.cp, layout.cp)
    return Cost("current", reduces, 4 if reduces else 0, network, calls * tokens * AMAX_PER_TOKEN / layout.tp)


def costs(layout, alone):
    """Of every policy."""
    yield geometry(layout, alone)
    yield geometry(layout, alone, sharded=True)
    yield geometry(layout, alone, bounds=True)
    yield delayed(layout)
    yield delayed_te(layout)
    yield current(layout)


def rows(mfu, alone):
    """Of every layout and policy, ready to print."""
    for layout in LAYOUTS:
        step = layout.step(mfu)
        for cost in costs(layout, alone):
            added = cost.network + cost.kernels
            yield {
                "gpus": layout.gpus,
                "tp": layout.tp,
                "pp": layout.pp,
                "cp": layout.cp,
                "dp": layout.dp,
                "seq_len": layout.seq_len,
                "microbatches": layout.microbatches,
                "policy": cost.policy,
                "collective_calls": cost.calls,
                "bytes_a_call": cost.call_bytes,
                "network_ms": f"{cost.network * 1e3:.3f}",
                "kernels_ms": f"{cost.kernels * 1e3:.3f}",
                "step_ms": f"{step * 1e3:.0f}",
                "percent_of_step": f"{100 * added / step:.4f}",
                "memory_kib": f"{cost.memory / 1024:.0f}",
                "checkpoint_kib": f"{cost.checkpoint / 1024:.0f}",
            }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mfu", type=float, default=0.4, help="share of the dense BF16 peak that a step reaches")
    parser.add_argument("--alone-us", type=float, default=ALONE_US, help="what a sharded layer takes longer by itself")
    args = parser.parse_args()
    if not 0 < args.mfu <= 1 or args.alone_us < 0:
        parser.error("--mfu must be above 0 and at most 1, --alone-us not negative")
    table = list(rows(args.mfu, args.alone_us * 1e-6))
    out = csv.DictWriter(sys.stdout, table[0], lineterminator="\n")
    out.writeheader()
    out.writerows(table)


if __name__ == "__main__":
    main()
