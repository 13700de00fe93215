"""Tensor, pipeline and data parallelism: local heads, stages with some of the layers, and constants of the whole model."""

import dataclasses
import functools

import pytest
from models import Plain, attach, blocks, describe, expected, inputs, llama, mesh_of, run, shard, torch
from ranks import distributed
from test_fsdp import tensor_parallel
from test_steps import Counted
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sigmascale
import sigmascale.torch as fp8

close = functools.partial(torch.testing.assert_close, rtol=1e-6, atol=0)


@pytest.mark.parametrize("policy", ["geometry", "geometry-c-star"])
@pytest.mark.parametrize("before", [False, True])
@distributed(2)
def test_heads_shared_by_tensor_parallelism(before, policy):
    mesh, rank = mesh_of(2), torch.distributed.get_rank()
    make = lambda: llama(heads=(8, 4)).bfloat16()
    model = make()
    if before:
        runtime = attach(model, policy=policy)
        assert runtime.n_kv_heads == 4
        tensor_parallel(model, mesh)
        with pytest.raises(sigmascale.SigmascaleError, match="attach again"):
            runtime.refresh()
    else:
        tensor_parallel(model, mesh)
    runtime = attach(model, policy=policy)
    assert not any(plan.stale for plan in runtime.layers)
    whole = expected(make(), policy=policy)
    own = slice(2 * rank, 2 * rank + 2)
    assert torch.equal(runtime.descales, whole.descales[..., own])
    if policy == "geometry-c-star":
        close(runtime.logit_descales, whole.logit_descales[:, 4 * rank : 4 * rank + 4])
    address = runtime.descales.data_ptr()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    run(model, inputs(None)).backward()
    optimizer.step()
    runtime.refresh()
    moved = make()
    state = {n: x.full_tensor() if hasattr(x, "full_tensor") else x for n, x in model.state_dict().items()}
    moved.load_state_dict(state)
    assert torch.equal(runtime.descales, expected(moved, policy=policy).descales[..., own])
    assert runtime.descales.data_ptr() == address and not torch.equal(runtime.descales, whole.descales[..., own])


@distributed(2)
def test_plain_modules_under_tensor_parallelism():
    mesh, rank = mesh_of(2), torch.distributed.get_rank()
    make = functools.partial(Plain, width=128, heads=8, kv_heads=4, fused=False)
    model = make()
    plan = {name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v")}
    for block in model.blocks:
        parallelize_module(block, mesh, plan | {"attention.out": RowwiseParallel()})
    own = slice(2 * rank, 2 * rank + 2)
    reference = expected(make(), torch.float32)
    for layers in ([functools.partial(describe, block) for block in model.blocks], [describe(b) for b in model.blocks]):
        runtime = fp8.attach(model, layers=layers, backend="emulated")
        assert torch.equal(runtime.descales, reference.descales[..., own])
    for block, layer in zip(model.blocks, runtime.layers):
        block.attention.plan = layer
    x = inputs(model)
    torch.testing.assert_close(model(x), make()(x), rtol=0.2, atol=0.3)
    assert (runtime.stats()["overflow"] == 0).all()


@pytest.mark.parametrize(("heads", "message"), [((6, 3), "6 query and 3 KV heads"), ((2, 1), "2 query and 1 KV heads")])
@distributed(2)
def test_kv_heads_that_ranks_cannot_share_are_refused(heads, message):
    mesh = mesh_of(2)
    model = tensor_parallel(llama(heads=heads, d_head=32), mesh)
    with pytest.raises(sigmascale.UnsupportedError, match=f"layer 0: 2 tensor-parallel ranks do not share {message}"):
        attach(model)


@distributed(2)
def test_a_fused_weight_cut_across_its_parts_is_refused():
    mesh = mesh_of(2)
    model = Plain(width=128, heads=8, kv_heads=4)
    parallelize_module(model.blocks[0], mesh, {"attention.qkv": ColwiseParallel()})
    # Parts of the local rows: the sizes of the whole do not fit them.
    with pytest.raises(RuntimeError, match="split_with_sizes"):
        attach(model)


class Stage(nn.Module):
    """Some layers of a model under their own numbers, as a pipeline stage has them."""

    def __init__(self, whole, numbers):
        super().__init__()
        self.config, self.model = whole.config, nn.Module()
        self.model.layers = nn.ModuleDict({str(number): whole.model.layers[number] for number in numbers})


@pytest.mark.parametrize("policy", ["geometry", "geometry-c-star"])
@distributed(1)
def test_stages_have_the_plans_of_the_whole_model(policy):
    tail = sigmascale.Tail(delta=1e-4)
    whole = fp8.attach(llama(layers=4).bfloat16(), policy=policy, tail=tail)
    for numbers in ([0, 1], [2, 3], [3]):
        stage = fp8.attach(Stage(llama(layers=4).bfloat16(), numbers), policy=policy, tail=tail)
        assert [plan.name for plan in stage.layers] == [f"layer {number}" for number in numbers]
        assert torch.equal(stage.descales, whole.descales[numbers])
        if policy == "geometry-c-star":
            close(stage.logit_descales, whole.logit_descales[numbers])
            narrow = fp8.attach(llama(layers=1).bfloat16(), policy=policy, tail=tail)
            # A model of fewer layers has fewer logits that may fail.
            assert (narrow.logit_descales[0] < whole.logit_descales[0]).all()


@distributed(1)
def test_a_stage_without_attention_and_a_layer_without_a_tensor_are_refused():
    with pytest.raises(sigmascale.UnsupportedError, match="no parameter of Stage"):
        fp8.attach(Stage(llama(), []))
    stage = Stage(llama(layers=3), [1, 2])
    del stage.model.layers["2"].self_attn.k_proj
    with pytest.raises(sigmascale.UnsupportedError, match="layers.2.self_attn.k_proj.weight"):
        fp8.attach(stage)


@distributed(2)
def test_stages_with_several_microbatches_in_flight():
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = torch.distributed.get_rank()
    whole = Plain(layers=2)
    x = inputs(whole).repeat(4, 1, 1)

    def loss(y, target):
        return (y.float() - target).square().mean()

    target = torch.zeros_like(x)
    reference = attach(whole)
    for part in x.chunk(4):
        (loss(whole(part), target[: len(part)]) / 4).backward()
    model = Plain(layers=2)
    model.blocks = model.blocks[rank : rank + 1]
    layers = [lambda: dataclasses.replace(describe(model.blocks[0]), number=rank, model_q_heads=12)]
    runtime = fp8.attach(model, layers=layers, backend="emulated")
    model.blocks[0].attention.plan = runtime.layers[0]
    assert torch.equal(runtime.descales[0], reference.descales[rank])
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss)
    schedule.step(*([x] if rank == 0 else []), **({} if rank == 0 else {"target": target}))
    for a, b in zip(model.blocks[0].parameters(), whole.blocks[rank].parameters()):
        torch.testing.assert_close(a.grad, b.grad)


@distributed(4)
def test_stages_that_are_sharded():
    """Two stages of two ranks each, four microbatches in flight: one computation a refresh, and gradients of one process."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = mesh_of(2, 2, names=("pp", "dp"))
    place, whole = mesh.get_local_rank("pp"), Plain(layers=2)
    x = inputs(whole).repeat(4, 1, 1)

    def loss(y, target):
        return (y.float() - target).square().mean()

    target = torch.zeros_like(x)
    reference = attach(whole)
    for part in x.chunk(4):
        (loss(whole(part), target[: len(part)]) / 4).backward()
    model = Plain(layers=2)
    model.blocks = model.blocks[place : place + 1]
    shard(model, mesh["dp"], mp=MixedPrecisionPolicy())
    layers = [lambda: dataclasses.replace(describe(model.blocks[0]), number=place, model_q_heads=12)]
    runtime = fp8.attach(model, layers=layers, backend="emulated")
    model.blocks[0].attention.plan = runtime.layers[0]
    stage = PipelineStage(model, place, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss)
    with Counted() as counted:
        for step in range(2):
            model.zero_grad()
            schedule.step(*([] if place else [x]), **({"target": target} if place else {}))
            assert counted.count == step + 1 and torch.equal(runtime.descales[0], reference.descales[place])
            runtime.refresh()
    for a, b in zip(model.blocks[0].parameters(), whole.blocks[place].parameters()):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad)


@pytest.mark.parametrize("before", [False, True])
@distributed(2)
def test_data_parallel(before):
    rank = torch.distributed.get_rank()
    model = llama()
    runtime = attach(model) if before else None
    wrapped = nn.parallel.DistributedDataParallel(model)
    runtime = runtime or attach(wrapped)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
    for _ in range(2):
        run(wrapped, inputs(None, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        runtime.refresh()
    moved = llama()
    moved.load_state_dict(model.state_dict())
    assert torch.equal(runtime.descales, expected(moved, torch.float32).descales)
    other = [torch.empty_like(runtime.descales) for _ in range(2)]
    torch.distributed.all_gather(other, runtime.descales)
    assert torch.equal(*other) and len(blocks(model)) == 2


@distributed(1)
def test_parameters_that_are_gathered_at_every_read_are_refused():
    """As SimpleFSDP's."""
    model = llama()
    projection = model.model.layers[0].self_attn.q_proj
    gathered = property(lambda module: module._parameters["weight"])
    projection.__class__ = type("SimpleFSDPLinear", (nn.Linear,), {"weight": gathered})
    with pytest.raises(sigmascale.UnsupportedError, match="property that gathers"):
        attach(model)


@distributed(2)
def test_layers_that_state_other_totals_are_refused():
    model = Plain()
    layers = [dataclasses.replace(describe(block), model_q_heads=n) for block, n in zip(model.blocks, (12, 24))]
    with pytest.raises(sigmascale.ArgumentError, match=r"\[12, 24\] model_q_heads"):
        fp8.attach(model, layers=layers)


@distributed(2)
def test_weights_that_are_placed_otherwise_are_refused():
    mesh = mesh_of(2)
    model = llama(heads=(8, 4))
    parallelize_module(model.model.layers[0], mesh, {"self_attn.k_proj": RowwiseParallel()})
    with pytest.raises(
        sigmascale.UnsupportedError, match="layer 0.k .*Shard.dim=1"
    ):
        attach(model)
    model = llama(heads=(8, 4))
    parallelize_module(model.model.layers[0], mesh, {"self_attn.k_proj": ColwiseParallel()})
    with pytest.raises(sigmascale.UnsupportedError, match="sharded over 1, 2 and 1 ranks"):
        attach(model)


@distributed(1)
def test_weights_of_float8_training_are_refused():
    from torch.testing._internal.two_tensor import TwoTensor

    model = llama()
    attention = model.model.layers[1].self_attn
    weight = attention.v_proj.weight.detach()
    attention.v_proj.weight = nn.Parameter(TwoTensor(weight, weight.clone()))
    with pytest.raises(sigmascale.UnsupportedError, match="layer 1.v .*TwoTensor.*float8"):
        attach(model)
