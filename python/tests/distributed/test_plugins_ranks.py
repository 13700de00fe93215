"""Plugins of engines over tensor-parallel ranks: centers are those of whole layers, whatever the heads of one rank have."""

import pathlib
import sys

from models import torch
from ranks import distributed

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import test_plugins  # noqa: E402


def gathered(own):
    found = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, own)
    return found


def biases(number, heads):
    """Keys of all layers but the last have a bias; in layer `number` only some heads."""
    for name, row in test_plugins.biases():
        if name == f"model.layers.{number}.self_attn.k_proj.bias":
            row.view(2, -1)[[head for head in (0, 1) if head not in heads]] = 0
        yield name, row


def scales(rank, ranks, weights, gather=None):
    engine, followed, filled, centers, log = test_plugins.biased(rank, ranks, center="auto", context=512, gather=gather)
    engine.load_weights(weights)
    followed.refresh()
    return followed, list(filled.values()), list(centers.values()), log


@distributed(2)
def test_layers_are_centered_on_all_ranks_or_on_none():
    rank = torch.distributed.get_rank()
    for heads in ([0], []):
        weights = [*test_plugins.weights(), *biases(2, heads)]
        whole = None
        if rank == 0:
            one, want, rows, _ = scales(0, 1, weights)
            whole = one.center_hash, want, rows
        key, want, rows = gathered(whole)[0]
        followed, have, own, log = scales(rank, 2, weights, gathered)
        halves = gathered(have)
        assert followed.center_hash == key is not None
        none = [i == 5 or (i == 2 and not heads) for i in range(6)]
        assert [center is None for center in own] == [center is None for center in rows] == none
        assert all(mine is None or mine == theirs[rank : rank + 1] for mine, theirs in zip(own, rows))
        # The scale of a whole layer is the larger one of its halves.
        assert [{o: max(one[o], other[o]) for o in "qkv"} for one, other in zip(*halves)] == want
        assert f"in {5 if heads else 4} of 6 layers" in log.lines[0][1] and key in log.lines[0][1]
        # By itself a rank finds its own heads alone.
        _, _, alone, _ = scales(rank, 2, weights)
        assert (alone[2] is None) == (rank not in heads)


@distributed(2)
def test_a_rank_without_scales_keeps_no_other_waiting():
    rank = torch.distributed.get_rank()
    weights = [(name, tensor * float("nan") if rank and "3.self_attn.v_proj.weight" in name else tensor) for name, tensor in test_plugins.weights()]
    followed, have, _, log = scales(rank, 2, [*weights, *test_plugins.biases()], gathered)
    assert len(have) == (0 if rank else 6)
    assert rank == 0 or "has a NaN" in log.lines[-1][1], log.lines


