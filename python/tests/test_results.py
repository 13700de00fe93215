"""Where the values of layers with unequal heads lie: the copies from an engine's results, without a GPU."""

import types

import pytest

torch = pytest.importorskip("torch")

from sigmascale.torch import _heads, _telemetry  # noqa: E402
from sigmascale.torch._heads import Heads, Target  # noqa: E402

COUNTS = [(4, 2), (4, 2), (6, 3), (8, 1), (4, 2)]
# The third and the last come as one engine entry a KV head.
PARTS = [1, 1, 3, 1, 2]


def heads(counts=COUNTS):
    return Heads([types.SimpleNamespace(n_q_heads=q, n_kv_heads=kv) for q, kv in counts])


def flat(rows):
    """A result of ``rows`` tensors a layer in the engine's order, whose values name layer, tensor and KV head."""
    values = []
    for layer, ((_, n_kv), parts) in enumerate(zip(COUNTS, PARTS)):
        each = n_kv // parts
        for part in range(parts):
            values += [100 * layer + 10 * row + part * each + h for row in range(rows) for h in range(each)]
    return torch.tensor(values, dtype=torch.float32)


def named(n_kv, layer, rows):
    return torch.tensor([[100 * layer + 10 * row + h for h in range(n_kv)] for row in range(rows)]).float()


def test_consecutive_layers_of_one_kind_are_one_run():
    found = _heads.runs(COUNTS, PARTS)
    assert [(run.first, run.count, run.q, run.kv) for run in found] == [
        (0, 2, 0, 0),
        (2, 1, 8, 4),
        (3, 1, 14, 7),
        (4, 1, 22, 8),
    ]
    assert len(_heads.runs([(4, 2)] * 7, [1] * 7)) == 1


def test_every_result_goes_to_its_layer_and_leaves_the_rest():
    every = _heads.runs(COUNTS, PARTS)
    descales = heads().pad(torch.ones(5, 4, 3), 1)
    members = [0, 1, 4]
    policy = torch.zeros(3, 3, 2)
    logits, own = torch.full((5, 8, 4), -1.0), torch.zeros(3, 4, 8)
    bounds = torch.arange(26.0)[:, None] + torch.arange(8) / 8
    results = {"heads": flat(4), "operands": flat(3), "bounds": bounds.flatten(), "tensors": flat(1)}
    targets = {
        "heads": [Target(descales)],
        "operands": [Target(policy, members)],
        "bounds": [Target(logits), Target(own, members)],
    }
    for source, target in _heads.copies(results, targets, every):
        target.copy_(source)
    q = 0
    for layer, (n_q, n_kv) in enumerate(COUNTS):
        assert torch.equal(descales[layer, :, :n_kv], named(n_kv, layer, 4))
        assert (descales[layer, :, n_kv:] == _heads.PADDING).all()
        assert torch.equal(logits[layer, :n_q], bounds[q : q + n_q, :4]) and (logits[layer, n_q:] == -1).all()
        if layer in members:
            assert torch.equal(policy[members.index(layer)], named(n_kv, layer, 3))
            assert torch.equal(own[members.index(layer)], bounds[q : q + n_q])
        q += n_q


def test_equal_layers_take_one_copy_a_target():
    every = _heads.runs([(4, 2)] * 3, [2] * 3)
    values = torch.arange(24.0)
    target = torch.zeros(3, 4, 2)
    pairs = _heads.copies({"heads": values}, {"heads": [Target(target)]}, every)
    assert len(pairs) == 1
    pairs[0][1].copy_(pairs[0][0])
    # Layer 1: parts of four tensors with one head each.
    assert target[1].tolist() == [[8, 12], [9, 13], [10, 14], [11, 15]]


def test_statistics_are_folded_by_the_heads_of_each_layer():
    counts = [(4, 2), (2, 1)]
    own = heads(counts)
    words = torch.zeros(2, 12, 4, dtype=torch.int32)
    bits = lambda x: torch.tensor(x).view(torch.int32)
    # Layer 0: q heads 4..8, k 8..10, v 10..12. Layer 1: q 2..4, k 4, v 5, and what lies behind is nobody's.
    words[0, 5] = torch.stack([bits(3.0), *torch.tensor([1, 0, 0], dtype=torch.int32)])
    words[0, 11, 0] = bits(7.0)
    words[1, 3, 0], words[1, 4, 1], words[1, 5, 0] = bits(2.0), 9, bits(0.5)
    words[1, 6:] = 99
    amax, overflows = _telemetry.observed(words, own)
    assert amax.tolist() == [[[3.0, 0.0], [0.0, 0.0], [0.0, 7.0]], [[2.0, 0.0], [0.0, 0.0], [0.5, 0.0]]]
    assert overflows[0, 0, 0].tolist() == [1, 0, 0] and overflows[1, 1, 0].tolist() == [9, 0, 0]
    assert int(overflows.sum()) == 10
    equal = _telemetry.observed(words[:1], heads(counts[:1]))
    assert torch.equal(equal[0], amax[:1]) and torch.equal(equal[1], overflows[:1])


def test_layers_are_grouped_by_their_heads():
    assert heads().groups() == {(4, 2): [0, 1, 4], (6, 3): [2], (8, 1): [3]}
    assert (heads().n_q, heads().n_kv, heads().equal, heads([(4, 2)] * 2).equal) == (8, 3, False, True)
