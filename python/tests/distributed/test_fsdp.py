"""Scales of models that FSDP shards are those of the whole tensors that the projections multiply, bit for bit."""

import functools
import gc
import weakref

import pytest
from models import BF16, Plain, attach, blocks, expected, inputs, latent, llama, mesh_of, run, shard, torch
from ranks import distributed, processes_of_their_own  # noqa: F401
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_map

import sigmascale
import sigmascale.torch as fp8
from sigmascale.torch import _layers

MODELS = {"llama": llama, "plain": Plain, "latent": latent}


def check(make, wrap, before=False, dtype=torch.bfloat16, own=lambda x: x):
    """Attaches before or after wrapping, and compares with one process after the first forward and after a step."""
    rank = torch.distributed.get_rank()
    model = make()
    if before:
        runtime = attach(model)
    wrapped = wrap(model)
    if before:
        runtime.refresh()
    else:
        runtime = attach(wrapped)
    assert all(plan.stale for plan in runtime.layers)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.05)
    first = None
    for step in range(3):
        run(wrapped, inputs(model, rank)).backward()
        assert not any(plan.stale for plan in runtime.layers)
        whole = make()
        whole.load_state_dict(full(model))
        whole = expected(whole, dtype)
        assert torch.equal(runtime.descales, own(whole.descales))
        assert not (runtime.stats()["overflow"] > 0).any() and (runtime.stats()["amax"] > 0).all()
        first = runtime.descales.clone() if step == 0 else first
        optimizer.step()
        optimizer.zero_grad()
        runtime.refresh()
        assert all(plan.stale for plan in runtime.layers)
    assert not torch.equal(first, runtime.descales)


def full(model):
    """The state dict with whole tensors."""
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in model.state_dict().items()}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("before", [False, True])
@distributed(2)
def test_two_ranks(kind, before):
    mesh = mesh_of(2)
    check(MODELS[kind], lambda model: shard(model, mesh), before)


@distributed(4)
def test_what_the_hook_reads():
    """Plain tensors of the type that is multiplied, in memory, with all rows of the rank's heads and the whole gain."""
    mesh, seen = mesh_of(2, 2, names=("dp", "tp")), []
    original = _layers.Layers.whole

    def whole(*arguments):
        layer = original(*arguments)
        tensors = {name.rpartition(".")[2]: x for name, x in layer.tensors().items()}
        assert all(x.data_ptr() and x.untyped_storage().nbytes() for x in tensors.values())
        seen.append(tensors)
        return layer

    _layers.Layers.whole = whole
    try:
        for make, wrap, rows in (
            (functools.partial(llama, heads=(8, 4)), lambda model: shard(model, mesh["dp"]), (128, 64, 64)),
            (
                functools.partial(llama, heads=(8, 4)),
                lambda model: shard(tensor_parallel(model, mesh["tp"]), mesh["dp"]),
                (64, 32, 32),
            ),
        ):
            model = wrap(make())
            runtime = attach(model)
            run(model, inputs(None)).backward()
            assert len(seen) == len(runtime) == 2
            for tensors in seen:
                assert {type(x) for x in tensors.values()} <= {torch.Tensor, torch.nn.Parameter}
                assert {x.dtype for x in tensors.values()} == {torch.bfloat16}
                assert tuple(tensors[name].shape for name in "qkv") == tuple((n, 128) for n in rows)
                assert tensors["gain"].shape == (128,)
                # They had memory while the hook ran; FSDP has taken it back since.
                assert all(x.untyped_storage().nbytes() == 0 for x in (tensors[name] for name in "qkv"))
            seen.clear()
    finally:
        _layers.Layers.whole = original


class Eight(torch.Tensor):
    """A weight of 32 bits that FSDP gathers in E4M3, by the extensions of its all-gather that float8 training uses."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            dtype=held.dtype,
            device=held.device,
            requires_grad=held.requires_grad,
        )

    def __init__(self, held):
        self.held = held

    def __tensor_flatten__(self):
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(held, *_):
        return Eight(held["held"])

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), named=None):
        plain = lambda x: x.held if isinstance(x, Eight) else x
        result = function(*tree_map(plain, arguments), **tree_map(plain, named or {}))
        kept = torch.ops.aten.split.Tensor, torch.ops.aten.slice.Tensor, torch.ops.aten.view.default
        kept += torch.ops.aten.clone.default, torch.ops.aten.detach.default, torch.ops.aten.new_zeros.default
        kept += torch.ops.aten.as_strided.default, torch.ops.aten._to_copy.default
        if function is torch.ops.aten.copy_.default:
            return arguments[0]
        wrap = lambda x: Eight(x) if isinstance(x, torch.Tensor) else x
        return tree_map(wrap, result) if function in kept else result

    def fsdp_pre_all_gather(self, mesh):
        return (self.held.to(torch.float8_e4m3fn),), None

    def fsdp_post_all_gather(self, gathered, metadata, dtype, *, out=None):
        if out is None:
            whole = Eight(gathered[0].to(dtype))
            return whole, gathered
        out.held.copy_(gathered[0])


@distributed(2)
def test_weights_that_are_gathered_in_float8_are_refused():
    mesh, model = mesh_of(2), llama()
    for block in blocks(model):
        weight = block.self_attn.k_proj.weight.detach()
        block.self_attn.k_proj.weight = torch.nn.Parameter(Eight(weight))
    shard(model, mesh, mp=MixedPrecisionPolicy())
    with pytest.raises(sigmascale.UnsupportedError, match="layer 0.k .*Eight.*float8"):
        runtime = attach(model)
        run(model, inputs(None))
    assert all(plan.stale for plan in runtime.layers)


@pytest.mark.parametrize("kind", MODELS)
@distributed(4)
def test_heads_that_lie_across_shards(kind):
    """Three KV heads of 16 channels over four ranks: every boundary is inside a head."""
    mesh = mesh_of(4)
    check(MODELS[kind], lambda model: shard(model, mesh))


@pytest.mark.parametrize(("ranks", "heads", "rows"), [(3, 5, [27, 27, 26]), (7, 1, [3, 3, 3, 3, 3, 1, 0])])
@distributed(7)
def test_uneven_and_empty_shards(ranks, heads, rows):
    """80 rows of q over three ranks and 16 over seven: the last ones have fewer or none."""
    rank, mesh = torch.distributed.get_rank(), DeviceMesh("cpu", list(range(ranks)))
    if rank >= ranks:
        return

    def wrap(model):
        shard(model, mesh)
        assert blocks(model)[0].attention.q.weight.to_local().shape[0] == rows[rank]
        return model

    check(functools.partial(Plain, width=16 * heads, heads=heads, kv_heads=heads, fused=False), wrap)


@pytest.mark.usefixtures("processes_of_their_own")
@distributed(3)
def test_training_on_uneven_shards_is_that_of_one_process():
    """Losses, scales and weights of four steps, bit for bit. One rank has all tokens, so that sums over ranks round nothing."""
    make = functools.partial(Plain, width=80, heads=5, kv_heads=5, fused=False)
    rank, model, whole = torch.distributed.get_rank(), shard(make(), mesh_of(3), mp=MixedPrecisionPolicy()), make()
    assert blocks(model)[0].attention.q.weight.to_local().shape[0] == [27, 27, 26][rank]
    for unit in (*blocks(model), model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    runs = [(one, attach(one), torch.optim.AdamW(one.parameters(), lr=0.01)) for one in (model, whole)]
    seen = []
    for step in range(4):
        losses = []
        for one, *_ in runs:
            loss = run(one, inputs(whole, step))
            (loss * (rank == 0 or one is whole)).backward()
            losses.append(loss.detach())
        assert torch.equal(*losses) and torch.equal(*(runtime.descales for _, runtime, _ in runs))
        seen.append(runs[0][1].descales.clone())
        for _, runtime, optimizer in runs:
            optimizer.step()
            optimizer.zero_grad()
            runtime.refresh()
    state = whole.state_dict()
    assert all(torch.equal(x, state[name]) for name, x in full(model).items())
    assert not torch.equal(seen[0], seen[-1])


@pytest.mark.parametrize("reshard", [True, False, 2])
@distributed(4)
def test_every_reshard_after_forward(reshard):
    mesh = mesh_of(4)
    check(llama, lambda model: shard(model, mesh, reshard_after_forward=reshard))


@distributed(4)
def test_replicas_of_shards():
    mesh = mesh_of(2, 2, names=("replicate", "shard"))
    check(llama, lambda model: shard(model, mesh))


@distributed(2)
def test_layers_of_one_shape_share_an_engine():
    model = shard(llama(), mesh_of(2))
    runtime, rank = attach(model), torch.distributed.get_rank()
    for _ in range(3):
        run(model, inputs(model, rank))
        runtime.refresh()
    assert len(runtime) > 1 and len(runtime._shape_engines) == 1


@distributed(1)
def test_one_rank():
    mesh = mesh_of(1)
    check(llama, lambda model: shard(model, mesh))


@distributed(2)
def test_weights_sharded_by_columns():
    mesh = mesh_of(2)
    columns = lambda p: Shard(1) if p.dim() == 2 else None
    check(llama, lambda model: shard(model, mesh, shard_placement_fn=columns))


@distributed(2)
def test_full_precision():
    """Without mixed precision the projections multiply the weights of 32 bits."""
    mesh = mesh_of(2)
    check(llama, lambda model: shard(model, mesh, mp=MixedPrecisionPolicy()), dtype=torch.float32)


@distributed(2)
def test_shards_on_the_host():
    mesh = mesh_of(2)
    check(llama, lambda model: shard(model, mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)))


@distributed(2)
def test_units_of_other_sizes():
    """The attention module alone, its norm in the block's unit; and a norm that is a unit of its own."""
    mesh = mesh_of(2)

    def attention_alone(model):
        for block in blocks(model):
            fully_shard(block.self_attn, mesh=mesh, mp_policy=BF16)
            fully_shard(block, mesh=mesh, mp_policy=BF16)
        return fully_shard(model, mesh=mesh, mp_policy=BF16)

    def norm_alone(model):
        for block in blocks(model):
            fully_shard(block.input_layernorm, mesh=mesh, mp_policy=BF16)
            fully_shard(block.self_attn, mesh=mesh, mp_policy=BF16)
        return fully_shard(model, mesh=mesh, mp_policy=BF16)

    check(llama, attention_alone)
    check(llama, norm_alone)
    check(llama, lambda model: fully_shard(model, mesh=mesh, mp_policy=BF16))


def tensor_parallel(model, mesh):
    plan = {"self_attn.q_proj": ColwiseParallel(), "self_attn.k_proj": ColwiseParallel()}
    plan |= {"self_attn.v_proj": ColwiseParallel(), "self_attn.o_proj": RowwiseParallel()}
    for block in model.model.layers:
        parallelize_module(block, mesh, plan)
    return model


@distributed(4)
def test_fsdp_over_tensor_parallel():
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    rank = mesh.get_local_rank("tp")
    wrap = lambda model: shard(tensor_parallel(model, mesh["tp"]), mesh["dp"])
    check(functools.partial(llama, heads=(8, 4)), wrap, own=lambda x: x[..., 2 * rank : 2 * rank + 2])


@distributed(8)
def test_replicas_of_shards_over_tensor_parallelism():
    mesh = mesh_of(2, 2, 2, names=("replicate", "shard", "tp"))
    rank = mesh.get_local_rank("tp")
    wrap = lambda model: shard(tensor_parallel(model, mesh["tp"]), mesh["replicate", "shard"])
    check(functools.partial(llama, heads=(8, 4)), wrap, own=lambda x: x[..., 2 * rank : 2 * rank + 2])


@pytest.mark.parametrize("original", [True, False])
@distributed(2)
def test_flattened_parameters(original):
    """FullyShardedDataParallel."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model, reference = llama(), expected(llama())
    kind = type(model.model.layers[0])
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({kind}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        use_orig_params=original,
        device_id=torch.device("cpu"),
    )
    runtime = fp8.attach(model, backend="emulated")
    model.module.set_attn_implementation(fp8.register())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    tokens = inputs(model, torch.distributed.get_rank())
    model(tokens).logits.float().square().mean().backward()
    assert torch.equal(runtime.descales, reference.descales)
    optimizer.step()
    runtime.refresh()
    with pytest.raises(sigmascale.UnsupportedError, match="fully_shard"):
        runtime.refresh(now=True)
    model(tokens)
    with FullyShardedDataParallel.summon_full_params(model):
        whole = llama()
        names = {name.replace("_fsdp_wrapped_module.", ""): x.clone() for name, x in model.named_parameters()}
    whole.load_state_dict(names)
    assert torch.equal(runtime.descales, expected(whole).descales)


@pytest.mark.parametrize("policy", fp8.POLICIES)
@distributed(2)
def test_every_policy(policy):
    mesh = mesh_of(2)
    model, whole = shard(llama(), mesh), llama().bfloat16()
    runtime, alone = (attach(one, policy=policy, bound="worst-case") for one in (model, whole))
    for _ in range(3):
        run(model, inputs(None)).backward()
        # The same statistics: those of the other's own forward differ by the type of its rotation.
        alone.words.copy_(runtime.words)
        assert torch.equal(runtime.logits, alone.logits) and torch.equal(runtime.descales, alone.descales)
        assert runtime.logit_descales is None or torch.equal(runtime.logit_descales, alone.logit_descales)
        runtime.refresh()
        alone.refresh()
        # Only scales that come from the weights wait for them.
        assert all(plan.stale == (policy in ("geometry", "geometry-c-star", "auto-c")) for plan in runtime.layers)


@pytest.mark.parametrize("estimator", ["power", "power-summed"])
@distributed(2)
def test_power_iteration(estimator):
    """Vectors go on from forward to forward as those of one process do, and through a saved state."""
    mesh = mesh_of(2)
    model, whole = shard(llama(), mesh), llama().bfloat16()
    runtime, alone = (attach(one, policy="geometry-c-star", estimator=estimator) for one in (model, whole))
    for step in range(4):
        if step == 2:
            state = runtime.state_dict()
            runtime = attach(model, policy="geometry-c-star", estimator=estimator)
            runtime.load_state_dict(state)
        run(model, inputs(None)).backward()
        assert torch.equal(runtime._estimates.vectors, alone._estimates.vectors), step
        assert torch.equal(runtime.logit_descales, alone.logit_descales)
        assert runtime.estimates()["steps"].tolist() == alone.estimates()["steps"].tolist()
        runtime.refresh()
        alone.refresh()


@distributed(2)
def test_weights_made_whole_for_an_export():
    mesh = mesh_of(2)
    model = shard(llama(), mesh)
    runtime = attach(model, bound="worst-case")
    runtime.refresh(now=True)
    reference = expected(llama(), bound="worst-case")
    assert torch.equal(runtime.descales, reference.descales) and torch.equal(runtime.logits, reference.logits)
    assert all(isinstance(p, DTensor) for p in model.parameters())


@pytest.mark.parametrize("above", ["block", "model"])
@distributed(2)
def test_weights_in_units_inside_units_made_whole_for_an_export(above):
    """The norm lies in the unit above, which only its own forward makes whole."""
    mesh, model = mesh_of(2), llama()
    for block in blocks(model):
        fully_shard(block.self_attn, mesh=mesh, mp_policy=BF16)
        if above == "block":
            fully_shard(block, mesh=mesh, mp_policy=BF16)
    fully_shard(model, mesh=mesh, mp_policy=BF16)
    runtime = attach(model)
    for _ in range(2):
        runtime.refresh(now=True)
        assert torch.equal(runtime.descales, expected(llama()).descales)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        # Training goes on.
        run(model, inputs(model)).backward()


@distributed(2)
def test_weights_that_an_evaluation_left_whole_are_gathered_anew():
    """The outermost unit stays whole after a forward without a backward, with the weights of that time."""
    mesh = mesh_of(2)
    model = fully_shard(llama(), mesh=mesh, mp_policy=BF16)
    runtime = attach(model)
    run(model, inputs(model)).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with torch.no_grad():
        run(model, inputs(model))
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    optimizer.step()
    runtime.refresh(now=True)
    whole = llama()
    whole.load_state_dict(full(model))
    reference = expected(whole)
    assert torch.equal(runtime.descales, reference.descales)
    # So are those of the next forward.
    runtime.refresh()
    run(model, inputs(model))
    assert torch.equal(runtime.descales, reference.descales)


@distributed(2)
def test_weights_written_from_outside():
    """load_state_dict and writes to the local shard leave no trace that could be seen; refresh() says so."""
    mesh = mesh_of(2)
    model = shard(llama(), mesh)
    runtime, tokens = attach(model), inputs(None)
    # The root stays whole until a backward.
    run(model, tokens).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().mul_(2)
    runtime.refresh()
    run(model, tokens).backward()
    doubled = llama()
    with torch.no_grad():
        for parameter in doubled.parameters():
            parameter.mul_(2)
    assert torch.equal(runtime.descales, expected(doubled).descales)
    state = {name: x * 0.5 for name, x in model.state_dict().items()}
    model.load_state_dict(state)
    runtime.refresh()
    run(model, tokens)
    assert torch.equal(runtime.descales, expected(llama()).descales)


@distributed(2)
def test_the_runtime_adds_no_communication():
    mesh = mesh_of(2)
    counts = []
    for attached in (False, True):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model = shard(llama(), mesh)
            runtime = attach(model) if attached else None
            run(model, inputs(None)).backward()
            if runtime:
                runtime.refresh()
            run(model, inputs(None)).backward()
        names = [event.name for event in profile.events() if event.name.startswith("c10d::")]
        counts.append({name: names.count(name) for name in set(names)})
    assert counts[0] == counts[1] and any("allgather" in name for name in counts[0])


@distributed(1)
def test_neither_keeps_the_other_alive():
    mesh = mesh_of(1)
    model = shard(llama(), mesh)
    runtime = attach(model)
    run(model, inputs(None)).backward()
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    with pytest.raises(sigmascale.SigmascaleError, match="model was deleted"):
        runtime.refresh()
    model = shard(llama(), mesh)
    runtime = attach(model)
    alive, hooks = weakref.ref(runtime), len(blocks(model)[0]._forward_pre_hooks)
    del runtime
    gc.collect()
    assert alive() is None and len(blocks(model)[0]._forward_pre_hooks) == hooks - 1


@distributed(2)
def test_the_memory_of_whole_weights_is_not_kept():
    mesh = mesh_of(2)
    model = shard(llama(), mesh)
    runtime = attach(model)
    run(model, inputs(None)).backward()
    assert isinstance(blocks(model)[0], FSDPModule) and runtime._tensors == []
    for state in (blocks(model)[0]._get_fsdp_state(),):
        for parameter in state._fsdp_param_group.fsdp_params:
            assert parameter._unsharded_param.untyped_storage().nbytes() == 0


@distributed(2)
def test_stale_plans_are_refused():
    mesh = mesh_of(2)
    model = shard(llama(), mesh)
    runtime = attach(model)
    q = torch.randn(1, 8, 6, 16)
    with pytest.raises(sigmascale.SigmascaleError, match="layer 1.*forward of its FSDP unit"):
        fp8.attention(q, q[:, :, :3], q[:, :, :3], runtime.layers[1])
    run(model, inputs(None))
    fp8.attention(q, q[:, :, :3], q[:, :, :3], runtime.layers[1])
    runtime.refresh()
    with pytest.raises(sigmascale.SigmascaleError, match=r"refresh\(now=True\)"):
        runtime.layers[1].descales(2)


@distributed(2)
def test_logit_bounds_of_other_weights_are_not_given():
    mesh, model = mesh_of(2), llama()
    shard(model, mesh)
    runtime = attach(model, bound="worst-case")
    with pytest.raises(sigmascale.SigmascaleError, match="not those of its weights yet"):
        fp8.max_logit_bound(runtime)
    run(model, inputs(model)).backward()
    before = fp8.max_logit_bound(runtime)[0]
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    runtime.refresh()
    with pytest.raises(sigmascale.SigmascaleError, match=r"refresh\(now=True\) on all ranks"):
        fp8.max_logit_bound(runtime)
    runtime.refresh(now=True)
    assert (fp8.max_logit_bound(runtime)[0] != before).any()


@distributed(2)
def test_projections_in_units_of_their_own_are_refused():
    mesh = mesh_of(2)
    model = llama()
    for block in blocks(model):
        for name in ("q_proj", "k_proj", "v_proj"):
            fully_shard(getattr(block.self_attn, name), mesh=mesh)
    fully_shard(model, mesh=mesh)
    with pytest.raises(sigmascale.UnsupportedError, match="layer 0.*FSDP units"):
        attach(model)


@distributed(2)
def test_fixed_layers_of_sharded_weights_are_refused():
    from models import describe

    mesh = mesh_of(2)
    model = Plain()
    layers = [describe(block) for block in model.blocks]
    runtime = fp8.attach(model, layers=layers)
    shard(model, mesh)
    with pytest.raises(sigmascale.SigmascaleError, match="replaced by others"):
        runtime.refresh()
    a = model.blocks[0].attention
    layer = fp8.Layer(q=a.out.weight, k=a.out.weight, v=a.out.weight, n_q_heads=6, n_kv_heads=6)
    with pytest.raises(sigmascale.UnsupportedError, match="a function that returns the Layer"):
        fp8.attach(model, layers=[layer])
    with pytest.raises(sigmascale.UnsupportedError, match="attach.. reads its layers"):
        fp8.find_layers(shard(llama(), mesh))
