"""Odd ways to wrap a model and to go on with it: the scales are right, or an error says what to do."""

import copy
import dataclasses
import functools
import io
import pickle

import pytest
from models import BF16, Plain, attach, blocks, describe, described, expected, inputs, llama, mesh_of, run, shard, torch
from ranks import distributed
from test_fsdp import full, tensor_parallel
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

import sigmascale
import sigmascale.torch as fp8


def right(runtime, model, make=llama, dtype=torch.bfloat16, rank=0):
    """Whether the scales are those of the model's present weights, after a forward and after a step."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):
        run(model, inputs(model, rank)).backward()
        assert not any(plan.stale for plan in runtime.layers)
        whole = make()
        whole.load_state_dict({name.removeprefix("_orig_mod."): x for name, x in full(model).items()})
        assert torch.equal(runtime.descales, expected(whole, dtype).descales)
        optimizer.step()
        optimizer.zero_grad()
        runtime.refresh()


@distributed(2)
def test_parts_of_a_sharded_model_are_refused():
    """The unit that gathers their weights is not in them, and a slice of rows is no head of tensor parallelism."""
    mesh = mesh_of(2)
    model = fully_shard(llama(heads=(8, 4)), mesh=mesh)
    with pytest.raises(sigmascale.UnsupportedError, match="fully_shard"):
        fp8.attach(model.model)
    block = fully_shard(Plain(), mesh=mesh).blocks[0]
    with pytest.raises(sigmascale.UnsupportedError, match="in a unit above the given module"):
        fp8.attach(block, layers=[functools.partial(describe, block)])
    # A part that is a unit itself is read.
    model = shard(llama(), mesh)
    runtime = fp8.attach(model.model, backend="emulated")
    model.set_attn_implementation(fp8.register())
    right(runtime, model)


@distributed(2)
def test_several_modules_in_one_unit():
    mesh = mesh_of(2)
    model = llama()
    for block in blocks(model):
        fully_shard([block.input_layernorm, block.self_attn], mesh=mesh, mp_policy=BF16)
    fully_shard(model, mesh=mesh, mp_policy=BF16)
    right(attach(model), model)


@distributed(2)
def test_mixed_precision_and_offload_before_and_after():
    mesh = mesh_of(2)
    for before in (True, False):
        model = llama()
        runtime = attach(model) if before else None
        for block in blocks(model):
            fully_shard(block, mesh=mesh, mp_policy=BF16, offload_policy=CPUOffloadPolicy(pin_memory=False))
        fully_shard(model, mesh=mesh, mp_policy=BF16, offload_policy=CPUOffloadPolicy(pin_memory=False))
        if before:
            runtime.refresh()
        right(runtime or attach(model), model)


@distributed(2)
def test_weights_of_16_bits_under_mixed_precision():
    mesh = mesh_of(2)
    half = MixedPrecisionPolicy(param_dtype=torch.float16)
    model = shard(llama(), mesh, mp=half)
    right(attach(model), model, dtype=torch.float16)


@distributed(2)
def test_tied_embeddings():
    mesh = mesh_of(2)
    make = functools.partial(llama, tie_word_embeddings=True)
    model = shard(make(), mesh)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    right(attach(model), model, make)


def tied(projections=False):
    """Two blocks with one attention module, or one weight for two projections."""
    model = Plain(width=64, heads=4, kv_heads=4, fused=False)
    if projections:
        for block in model.blocks:
            block.attention.k.weight = block.attention.q.weight
    else:
        model.blocks[1].attention = model.blocks[0].attention
    return model


@pytest.mark.parametrize("projections", [True, False])
@distributed(2)
def test_tied_weights_and_shared_modules(projections):
    mesh, make = mesh_of(2), functools.partial(tied, projections)
    model = fully_shard(make(), mesh=mesh, mp_policy=BF16)
    runtime = attach(model)
    right(runtime, model, make)


@distributed(2)
def test_weights_that_begin_on_the_meta_device():
    mesh = mesh_of(2)
    with torch.device("meta"):
        model = Plain.__new__(Plain)
        nn.Module.__init__(model)
        model.blocks = nn.ModuleList(type(block)(96, 6, 3, True) for block in (Plain().blocks))
    shard(model, mesh)
    runtime = attach(model)
    assert all(plan.stale for plan in runtime.layers)
    model.to_empty(device="cpu")
    source = Plain().state_dict()
    model.load_state_dict({name: distribute_tensor(x, mesh) for name, x in source.items()})
    runtime.refresh()
    right(runtime, model, Plain)
    with torch.device("meta"):
        bare = transformers_model()
    with pytest.raises(sigmascale.ArgumentError, match="meta device"):
        fp8.attach(bare)


def transformers_model():
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=32, num_attention_heads=2, num_key_value_heads=1, vocab_size=8, intermediate_size=8, num_hidden_layers=1
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@distributed(2)
def test_state_dicts_have_nothing_of_a_runtime():
    mesh = mesh_of(2)
    model = shard(llama(), mesh)
    names = list(model.state_dict())
    runtime = attach(model)
    run(model, inputs(None)).backward()
    state = model.state_dict()
    assert list(state) == names
    held = {name: distribute_tensor(x, mesh) for name, x in full(model).items()}
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    runtime.refresh()
    run(model, inputs(None))
    moved = runtime.descales.clone()
    model.load_state_dict(held)
    runtime.refresh()
    right(runtime, model)
    assert not torch.equal(moved, expected(llama()).descales)


@distributed(2)
def test_copies_and_pickles():
    """Of a model, with no plans; a runtime and its plans are refused, by name."""
    mesh = mesh_of(2)
    model = tensor_parallel(llama(heads=(8, 4)), mesh)
    runtime = attach(model)
    other = copy.deepcopy(model)
    run(model, inputs(None))
    with pytest.raises(sigmascale.ArgumentError, match="sigmascale.torch.attach"):
        run(other, inputs(None))
    again = attach(other)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    again.refresh()
    assert not torch.equal(again.descales, runtime.descales)
    plain = llama()
    kept = attach(plain)
    back = pickle.loads(pickle.dumps(plain))
    assert torch.equal(attach(back).descales, kept.descales)
    for thing in (runtime, runtime.layers[0]):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            torch.save(thing, io.BytesIO())


@distributed(2)
def test_evaluation_and_inference():
    mesh = mesh_of(2)
    for context in (torch.no_grad, torch.inference_mode):
        model = shard(llama(), mesh)
        runtime = attach(model)
        model.eval()
        with context():
            run(model, inputs(None))
            assert torch.equal(runtime.descales, expected(llama()).descales)
            runtime.refresh()
            run(model, inputs(None))
        model.train()
        runtime.refresh()
        # FSDP itself cannot train on memory that it allocated in inference mode.
        if context is torch.no_grad:
            right(runtime, model)


class Adapted(nn.Module):
    """A projection with an adapter, under the names of peft."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


@pytest.mark.parametrize("when", ["before", "after attach", "after attach, no refresh"])
@distributed(2)
def test_adapters_are_refused(when):
    """The weights of their base are not what is multiplied."""
    mesh, model = mesh_of(2), llama()

    def adapt():
        for block in blocks(model):
            block.self_attn.q_proj = Adapted(block.self_attn.q_proj)

    if when == "before":
        adapt()
        shard(model, mesh)
        with pytest.raises(sigmascale.UnsupportedError, match="LoRA"):
            attach(model)
        return
    shard(model, mesh)
    runtime = attach(model)
    if when == "after attach":
        run(model, inputs(None)).backward()
        adapt()
        with pytest.raises(sigmascale.UnsupportedError, match="LoRA"):
            runtime.refresh()
    else:
        adapt()
        with pytest.raises(sigmascale.SigmascaleError, match="layer 0: .*replaced"):
            run(model, inputs(None))


@distributed(2)
def test_a_projection_replaced_after_sharding():
    mesh, model, other = mesh_of(2), llama(), llama()
    shard(model, mesh, mp=MixedPrecisionPolicy())
    runtime = attach(model)
    run(model, inputs(None)).backward()
    for block, donor in zip(blocks(model), blocks(other)):
        block.self_attn.k_proj = donor.self_attn.k_proj
        with torch.no_grad():
            donor.self_attn.k_proj.weight.mul_(3)
    runtime.refresh()
    run(model, inputs(None))
    assert torch.equal(runtime.descales, expected(other, torch.float32).descales)


@distributed(2)
def test_weights_that_fsdp_ignores():
    mesh = mesh_of(2)
    for mp in (MixedPrecisionPolicy(), BF16):
        model = llama()
        for block in blocks(model):
            fully_shard(block, mesh=mesh, mp_policy=mp, ignored_params={block.self_attn.q_proj.weight})
        ignored = {block.self_attn.q_proj.weight for block in blocks(model)}
        fully_shard(model, mesh=mesh, mp_policy=mp, ignored_params=ignored)
        runtime = attach(model)
        if mp is BF16:
            # The layer itself could not multiply them.
            with pytest.raises(sigmascale.ArgumentError, match="mixed types .*layer 0.q torch.float32"):
                run(model, inputs(None))
        else:
            right(runtime, model, dtype=torch.float32)


@distributed(2)
def test_frozen_weights():
    mesh = mesh_of(2)
    model = llama()
    for block in blocks(model):
        block.self_attn.requires_grad_(False)
    shard(model, mesh)
    right(attach(model), model)


@distributed(2)
def test_two_runtimes_of_one_model():
    mesh = mesh_of(2)
    model = shard(llama(), mesh)
    first, second = attach(model), attach(model, bound="worst-case")
    run(model, inputs(None)).backward()
    assert torch.equal(first.descales, second.descales) and second.logits is not None
    del second
    first.refresh()
    right(first, model)


@distributed(2)
def test_checkpoints_put_around_blocks_after_attach():
    mesh = mesh_of(2)
    model = shard(Plain(), mesh)
    runtime, x = attach(model), inputs(model)
    for index in range(len(blocks(model))):
        blocks(model)[index] = checkpoint_wrapper(blocks(model)[index])
    for _ in range(2):
        run(model, x).backward()
        assert torch.equal(runtime.descales, expected(Plain()).descales)
        runtime.refresh()
        assert all(plan.stale for plan in runtime.layers)


@distributed(2)
def test_reentrant_checkpoints():
    mesh = mesh_of(2)
    model = llama().train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    shard(model, mesh)
    right(attach(model), model)


@pytest.mark.parametrize("early", [True, False])
@distributed(2)
def test_a_whole_model_compiled(early):
    """Around units, whose hooks are then in compiled code."""
    torch.compiler.reset()
    mesh, x = mesh_of(2), inputs(None)
    model = shard(llama(), mesh)
    compiled = torch.compile(model, backend="aot_eager")
    if early:
        run(compiled, x).backward()
    runtime = attach(compiled)
    for _ in range(2):
        run(compiled, x).backward()
        assert torch.equal(runtime.descales, expected(llama()).descales)
        assert not any(plan.stale for plan in runtime.layers) and (runtime.stats()["amax"] > 0).all()
        runtime.refresh()


def flattened(model):
    """FullyShardedDataParallel around each block and the whole."""
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(blocks(model)[0])}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


@pytest.mark.parametrize("wrapper", ["tensor parallel", "data parallel", "flattened"])
@distributed(2)
def test_other_wrappers_compiled(wrapper):
    torch.compiler.reset()
    mesh, rank, x = mesh_of(2), torch.distributed.get_rank(), inputs(None)
    model, own, dtype = llama(heads=(8, 4)), slice(None), torch.float32
    if wrapper == "tensor parallel":
        model, own = tensor_parallel(model, mesh), slice(2 * rank, 2 * rank + 2)
    elif wrapper == "data parallel":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        model, dtype = flattened(model), torch.bfloat16
    compiled = torch.compile(model, backend="aot_eager")
    runtime = attach(compiled)
    for _ in range(2):
        # The compiler cannot read gradients of FullyShardedDataParallel, whose type is not that of the weights.
        model.zero_grad()
        run(compiled, x).backward()
        assert torch.equal(runtime.descales, expected(llama(heads=(8, 4)), dtype).descales[..., own])
        assert not any(plan.stale for plan in runtime.layers) and (runtime.stats()["amax"] > 0).all()
        runtime.refresh()


@distributed(2)
def test_flattened_after_attach():
    model = llama()
    runtime = attach(model)
    whole = flattened(model)
    runtime.refresh()
    assert all(plan.stale for plan in runtime.layers)
    run(whole, inputs(None)).backward()
    assert torch.equal(runtime.descales, expected(llama()).descales)


@distributed(2)
def test_units_that_the_user_gathers():
    mesh = mesh_of(2)
    model = shard(llama(), mesh)
    runtime = attach(model)
    for block in blocks(model):
        block.unshard()
    model.unshard()
    right(runtime, model)
    # A part of a unit that is whole, called past its unit: no hook has run.
    block = blocks(model)[0]
    block.unshard()
    hidden = torch.zeros(1, 4, 96, dtype=torch.bfloat16)
    places = model.model.rotary_emb(hidden, torch.arange(4)[None])
    with pytest.raises(sigmascale.SigmascaleError, match="layer 0 .*weights"):
        block.self_attn(hidden, position_embeddings=places, attention_mask=None)


@distributed(2)
def test_replicate():
    """PyTorch's composable data parallelism, in whichever form this version has it."""
    from torch.distributed._composable import replicate

    model = llama()
    for block in blocks(model):
        replicate(block)
    replicate(model)
    right(attach(model), model, dtype=torch.float32)


@distributed(2)
def test_a_unit_given_by_hand():
    """A wrapper that the package does not know, which makes weights whole in its forward."""

    class Gathering(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block, weight = block, block.attention.q.weight
            self.kept = weight.detach().clone()
            weight.untyped_storage().resize_(0)

        def forward(self, x):
            return self.block(x)

    def gather(module, _):
        weight = module.block.attention.q.weight
        weight.untyped_storage().resize_(4 * weight.numel())
        with torch.no_grad():
            weight.copy_(module.kept)

    model = Plain(fused=False)
    reference = expected(Plain(fused=False), torch.float32)
    shells = [Gathering(block) for block in model.blocks]

    def layer(shell):
        return dataclasses.replace(describe(shell.block), unit=shell)

    layers = [functools.partial(layer, shell) for shell in shells]
    never = fp8.attach(nn.Sequential(*shells), layers=layers)
    with pytest.raises(sigmascale.UnsupportedError, match="layer.q .*FSDP"):
        shells[0](inputs(model))
    del never
    for shell in shells:
        shell.register_forward_pre_hook(gather)
    stack = nn.Sequential(*shells)
    runtime = fp8.attach(stack, layers=layers, backend="emulated")
    assert all(plan.stale for plan in runtime.layers)
    stack(inputs(model))
    assert torch.equal(runtime.descales, reference.descales) and not any(plan.stale for plan in runtime.layers)
    runtime.refresh()
    # A copy keeps the hooks, which are not its own.
    copy.deepcopy(shells[0])(inputs(model))
    assert all(plan.stale for plan in runtime.layers)


@distributed(1)
def test_what_is_no_model():
    for thing in (None, "model", [llama()]):
        with pytest.raises(TypeError, match="model must be a torch.nn.Module"):
            fp8.attach(thing)
    with pytest.raises(sigmascale.UnsupportedError, match="DataParallel has no Hugging Face config"):
        fp8.attach(nn.DataParallel(Plain()))
    assert len(fp8.attach(Plain(), layers=described(Plain()))) == 2
