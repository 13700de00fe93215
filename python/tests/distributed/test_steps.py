"""Scales are computed once a layer and refresh, and a recompute has those of its forward."""

import functools

import pytest
from models import Plain, attach, blocks, expected, inputs, llama, mesh_of, run, shard, torch
from ranks import distributed
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

import sigmascale
from sigmascale import _native

wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)


class Counted:
    """How often scales were computed on this rank."""

    def __enter__(self):
        self.count, self._original = 0, _native.host_scales

        def counting(*arguments):
            self.count += 1
            return self._original(*arguments)

        _native.host_scales = counting
        return self

    def __exit__(self, *_):
        _native.host_scales = self._original


def replace_blocks(model, make):
    for index in range(len(blocks(model))):
        blocks(model)[index] = make(blocks(model)[index])


def checkpointed(order, model, mesh):
    if order == "none":
        return shard(model, mesh)
    if order == "inside":
        for block in model.blocks:
            block.attention = wrapper(block.attention)
        return shard(model, mesh)
    if order == "checkpoint of unit":
        shard(model, mesh)
        replace_blocks(model, wrapper)
        return model
    replace_blocks(model, wrapper)
    return shard(model, mesh)


def gradients(model):
    return [p.grad.full_tensor() for p in model.parameters()]


@pytest.mark.parametrize("order", ["inside", "checkpoint of unit", "unit of checkpoint"])
@distributed(2)
def test_checkpoints_in_three_orders(order):
    mesh = mesh_of(2)

    def step(order):
        model = checkpointed(order, Plain(), mesh)
        with Counted() as counted:
            runtime = attach(model)
            x = inputs(model.eval(), torch.distributed.get_rank())
            loss = run(model, x)
            before = runtime.descales.clone()
            words = runtime.words.clone()
            loss.backward()
        assert counted.count == len(runtime) and torch.equal(runtime.descales, before)
        # Maxima are those of the forward, which a recompute repeats.
        assert torch.equal(runtime.words[..., 0], words[..., 0])
        return gradients(model)

    plain, recomputed = step("none"), step(order)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed))


@distributed(2)
def test_checkpoints_of_hugging_face():
    mesh = mesh_of(2)
    model = llama().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    shard(model, mesh)
    with Counted() as counted:
        runtime = attach(model)
        run(model, inputs(None)).backward()
        runtime.refresh()
        run(model, inputs(None)).backward()
    assert counted.count == 2 * len(runtime)
    assert torch.equal(runtime.descales, expected(llama()).descales)


@pytest.mark.parametrize("reshard", [True, False])
@distributed(2)
def test_accumulation_and_several_forwards_in_flight(reshard):
    mesh = mesh_of(2)
    model = shard(Plain(), mesh, reshard_after_forward=reshard)
    rank = torch.distributed.get_rank()
    with Counted() as counted:
        runtime = attach(model)
        model.set_requires_gradient_sync(False)
        run(model, inputs(model, rank)).backward()
        model.set_requires_gradient_sync(True)
        run(model, inputs(model, 2 + rank)).backward()
        assert counted.count == len(runtime)
        before = gradients(model)
        # Scales of new weights are written between the forward of one layer and the backward of all.
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()
        runtime.refresh()
        losses = [run(model, inputs(model, 2 * step + rank)) for step in range(3)]
        sum(losses).backward()
        assert counted.count == 2 * len(runtime)
    after = gradients(model)
    assert all(torch.isfinite(grad).all() for grad in after)
    assert any(not torch.equal(a, b) for a, b in zip(before, after))


@distributed(2)
def test_a_refresh_between_a_forward_and_its_backward_is_noticed():
    mesh = mesh_of(2)
    model = shard(Plain(), mesh)
    runtime = attach(model)
    loss = run(model, inputs(model))
    runtime.refresh()
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


@pytest.mark.parametrize("hooked", ["before", "after"])
@pytest.mark.parametrize("full", [True, False])
@distributed(2)
def test_compiled_blocks(hooked, full):
    """Hooks that are put on before and after the first compilation; in one graph and in as many as there are."""
    torch.compiler.reset()
    mesh = mesh_of(2)
    model, options = Plain(), {"fullgraph": full, "backend": "aot_eager"}
    for block in model.blocks:
        block.compile(**options)
    shard(model, mesh)
    x = inputs(model, torch.distributed.get_rank())
    if hooked == "after":
        run(model, x).backward()
        model.zero_grad()
    with Counted() as counted:
        runtime = attach(model)
        for _ in range(2):
            run(model, x).backward()
        assert counted.count == len(runtime)
        runtime.refresh()
        run(model, x).backward()
        assert counted.count == 2 * len(runtime)
    assert torch.equal(runtime.descales, expected(Plain()).descales)
    assert (runtime.stats()["amax"] > 0).all()


@distributed(1)
def test_units_that_are_called_by_another_method():
    """Its hooks do not run then, so nothing has computed the scales: attention refuses."""
    mesh = mesh_of(1)
    model = Plain(layers=1)
    type(model.blocks[0]).step = type(model.blocks[0]).forward
    fully_shard(model.blocks[0], mesh=mesh)
    torch.distributed.fsdp.register_fsdp_forward_method(model.blocks[0], "step")
    runtime = attach(model)
    assert runtime.layers[0].stale
    with pytest.raises(sigmascale.SigmascaleError, match="not those of its weights yet"):
        model.blocks[0].step(inputs(model))
