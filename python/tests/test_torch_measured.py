"""The rule by which ``backend="auto"`` takes BF16: its table is that of the records, and every record of such times
is in it."""

import csv
import pathlib

import pytest

torch = pytest.importorskip("torch")

from planned import Planned, layer  # noqa: E402

import sigmascale.torch as fp8  # noqa: E402
from sigmascale.torch import _measured  # noqa: E402

RECORDS = pathlib.Path(__file__).parents[2] / "benches" / "records"


def recorded():
    """Every pair of FP8's and BF16's time of one attention call in the records, as the table has them."""
    for path in sorted(RECORDS.glob("*-peers-*.csv")):
        rows = csv.DictReader(line for line in path.read_text().splitlines() if not line.startswith("#"))
        times = {}
        for row in rows:
            if row["kernel"] in ("sigmascale", "cudnn-bf16"):
                shape = tuple(int(row[key]) for key in ("heads_q", "heads_kv", "head_dim", "seqlen")), row["causal"] == "1"
                times.setdefault(shape, {})[row["kernel"]] = float(row["ms"])
        for (sizes, causal), one in times.items():
            if len(one) == 2:
                yield _measured.Pair(path.name, "training" in path.name, *sizes, causal, *one.values())


def test_the_table_is_that_of_the_records():
    if not RECORDS.is_dir():
        pytest.skip("the records are not installed")
    assert sorted(map(str, recorded())) == sorted(map(str, _measured.PAIRS))


def test_fp8_gains_with_the_length_in_every_pair():
    """What the rule rests on where it goes below the measured lengths."""
    kinds = {}
    for pair in _measured.PAIRS:
        kinds.setdefault((*pair.kind, pair.heads_q), []).append(pair)
    assert len(kinds) == 12
    for pairs in kinds.values():
        shortest, *_, longest = sorted(pairs, key=lambda pair: pair.keys)
        assert longest.ratio < shortest.ratio


def test_bf16_is_taken_below_a_tie_and_up_to_a_loss():
    limit = _measured.limit
    # A loss at 2048 keys: FP8 from 2049 on.
    first, reason = limit(False, 32, 32, 64, True)
    assert first == 2049 and "1.05 times BF16's time at 2048 keys" in reason
    # A tie: FP8 from there on.
    for dim, causal, keys in [(128, True, 4096), (128, False, 2048), (64, True, 2048)]:
        for heads in [(32, 32), (8, 8)]:
            first, reason = limit(True, *heads, dim, causal)
            assert first == keys and f"BF16 is faster below {keys} keys" in reason
    # FP8 was faster at all lengths: shorter ones are not known.
    for given in [(True, 32, 8, 128, True), (False, 64, 8, 128, True), (False, 64, 8, 128, False), (True, 32, 32, 64, False)]:
        assert limit(*given) == (0, "")
    # Nothing was measured.
    for given in [(True, 64, 2, 128, False), (True, 64, 8, 96, True), (False, 32, 8, 128, True)]:
        assert limit(*given) == (0, "")
    lost = (_measured.Pair("made up", False, 4, 2, 32, 512, True, 2.0, 1.0),)
    first, reason = limit(False, 8, 4, 32, True, _measured.limits(lost))
    assert first == 513 and "FP8 took 2.00 times BF16's time at 512 keys (made up)" in reason


def operands(length=24, **options):
    make = lambda heads: torch.randn(
        1, length, heads, 128, generator=torch.Generator().manual_seed(heads), **options
    ).bfloat16()
    return make(4), make(4), make(4)


def test_auto_takes_bf16_and_says_why(monkeypatch):
    monkeypatch.setattr(_measured, "measured", lambda q, v: True)
    runtime = Planned([layer(heads=(4, 4), d=128)])
    plan = runtime.layers[0]
    q, k, v = (x.requires_grad_(True) for x in operands())
    from sigmascale.torch import _calls

    calls, why = _calls.counted(plan.key)
    out = fp8.attention(q, k, v, plan)
    heads = lambda x: x.transpose(1, 2)
    exact = torch.nn.functional.scaled_dot_product_attention(
        *map(heads, (q, k, v)), is_causal=True, enable_gqa=True, scale=128**-0.5
    )
    assert torch.equal(out, heads(exact)) and calls == {"bf16": 1}
    ((name, reason),) = why
    assert name == "bf16" and "peers-training-h200.csv" in reason
    # Asked for, in a forward alone, of a window, of other lengths, of descales alone: FP8.
    fp8.attention(q, k, v, plan, backend="native")
    fp8.attention(q, k, v, plan, accumulator="f16")
    with torch.no_grad():
        fp8.attention(q, k, v, plan)
    fp8.attention(q, k, v, plan, window=(3, 0))
    fp8.attention(q[:, :7], k, v, plan)
    assert calls == {"bf16": 1, "native": 5}
    assert not torch.equal(fp8.attention(q, k, v, [torch.full((4,), 0.02)] * 3), out)
    # A policy that plans from statistics needs them of every call.
    plan.remembers = True
    fp8.attention(q, k, v, plan)
    assert calls == {"bf16": 1, "native": 6}
    # PyTorch's attention has no log-sum-exp.
    plan.remembers = False
    fp8.attention(q, k, v, plan, return_lse=True)
    assert calls == {"bf16": 1, "native": 7}
    # Nothing of the rule breaks a graph.
    torch._dynamo.reset()
    compiled = torch.compile(fp8.attention, fullgraph=True, backend="aot_eager", dynamic=True)
    assert torch.equal(compiled(q, k, v, plan), out)
    torch._dynamo.reset()


def test_nothing_was_measured_on_the_cpu():
    assert not _measured.measured(*operands()[:2])
