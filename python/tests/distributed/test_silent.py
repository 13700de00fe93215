"""Scales of sharded models follow the optimizer, and a rank whose own part of the weights has changed without it says so."""

import warnings

import pytest
from models import attach, expected, inputs, llama, mesh_of, run, shard, torch
from ranks import distributed
from test_fsdp import full
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import sigmascale.torch as fp8

STALE = "have changed since their FP8 scales were computed"
KINDS = {
    "fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1.0),
}


def flattened(model):
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))


def wrapped(how, mesh):
    model = llama()
    return model, shard(model, mesh) if how == "fully_shard" else flattened(model)


def exact(model):
    """The scales of the whole weights as they are, as one process has them."""
    whole = llama()
    whole.load_state_dict(full(model))
    return expected(whole).descales


def said(model, rank, forwards=1):
    """Whether forwards said that scales are of other weights."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(forwards):
            run(model, inputs(model, rank))
    return any(STALE in str(each.message) for each in caught)


@pytest.mark.parametrize("kind", KINDS)
@distributed(2)
def test_steps_of_an_optimizer_are_followed(kind):
    rank = torch.distributed.get_rank()
    model, unit = wrapped("fully_shard", mesh_of(2))
    optimizer = KINDS[kind](unit.parameters())
    runtime = attach(unit, optimizer=optimizer, strict=True)
    for step in range(3):
        run(unit, inputs(model, rank)).backward()
        assert torch.equal(runtime.descales, exact(model))
        optimizer.step()
        optimizer.zero_grad()
        assert all(plan.stale for plan in runtime.layers)
    run(unit, inputs(model, rank))
    runtime.check()


@distributed(2)
def test_loaded_shards_get_their_scales():
    rank = torch.distributed.get_rank()
    model, unit = wrapped("fully_shard", mesh_of(2))
    runtime = attach(unit, strict=True)
    run(unit, inputs(model, rank))
    state = {name: 4 * x for name, x in model.state_dict().items()}
    model.load_state_dict(state)
    assert all(plan.stale for plan in runtime.layers)
    run(unit, inputs(model, rank))
    assert torch.equal(runtime.descales, exact(model))
    runtime.check()


@pytest.mark.parametrize("how", ["fully_shard", "flattened"])
@distributed(2)
def test_a_step_without_a_refresh_is_said_by_every_rank(how):
    rank = torch.distributed.get_rank()
    model, unit = wrapped(how, mesh_of(2))
    optimizer = torch.optim.AdamW(unit.parameters(), lr=0.05, fused=True)
    runtime = attach(unit)
    run(unit, inputs(model, rank)).backward()
    assert not said(unit, rank)
    optimizer.step()
    assert said(unit, rank) and not said(unit, rank)
    runtime.refresh()
    run(unit, inputs(model, rank))
    runtime.check()


@distributed(2)
def test_a_rank_whose_own_part_has_changed_says_so():
    rank = torch.distributed.get_rank()
    model, unit = wrapped("fully_shard", mesh_of(2))
    runtime = attach(unit)
    assert not said(unit, rank, 2)
    # A forward without a backward leaves the root's parameters whole.
    unit.reshard()
    if rank == 1:
        for parameter in unit.parameters():
            parameter.to_local().data.mul_(3)
    assert said(unit, rank) == (rank == 1)
    runtime.refresh()
    run(unit, inputs(model, rank))
    assert torch.equal(runtime.descales, exact(model))


@distributed(2)
def test_layers_that_run_elsewhere_are_named_by_every_rank():
    model = llama()
    model.set_attn_implementation("sdpa")
    unit = shard(model, mesh_of(2))
    runtime = fp8.attach(unit)
    with pytest.warns(RuntimeWarning, match="layer 0, layer 1 of 2 made no attention call"):
        run(unit, inputs(model))
    del runtime
