"""Megatron-Core's own GPTModel under tensor parallelism: plans of its interleaved projections, and attention by them.

Its layers are the local ones, which need neither TransformerEngine nor a GPU. Norms with zero-centred gains and norms
under sequence parallelism exist in TransformerEngine alone, so they are written here and put into the real layer by its
specification.
"""

import contextlib
import os

import pytest
from models import torch
from ranks import distributed

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

import torch.nn.functional as F  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

import sigmascale  # noqa: E402
import sigmascale.torch as fp8  # noqa: E402

WIDTH, HEADS, GROUPS, D_HEAD, LAYERS = 64, 8, 4, 16, 2
CASES = {
    "RMS norm": {},
    "layer norm and biases": {"normalization": "LayerNorm", "add_qkv_bias": True},
    "zero-centred gain": {"layernorm_zero_centered_gamma": True},
    "sequence parallelism": {"sequence_parallel": True},
    "norms of q and k": {"qk_layernorm": True},
    "L2 norms of q and k": {"qk_l2_norm": True},
    "half rotated, interleaved": {"rotary_percent": 0.5, "rotary_interleaved": True},
    "no rotation": {"position_embedding_type": "learned_absolute"},
    "its own softmax scale": {"softmax_scale": 0.2},
    "gated outputs": {"attention_output_gate": True},
}


class Norm(torch.nn.Module):
    """What TransformerEngine's norms do, in PyTorch."""

    def __init__(self, config, hidden_size, eps=1e-5):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel
        self.centred, self.eps = config.layernorm_zero_centered_gamma, eps

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight + self.centred, self.eps)


class Sdpa(torch.nn.Module):
    """PyTorch's attention in the place of Megatron's own, which takes no context parallelism."""

    def __init__(self, config, *_, **__):
        super().__init__()
        self.scale = config.softmax_scale

    def forward(self, q, k, v, mask, **_):
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)


@contextlib.contextmanager
def megatron(tp, cp=1):
    """Its groups, on the CPU."""
    current, torch.cuda.current_device = torch.cuda.current_device, lambda: torch.device("cpu")
    # Dropout under sequence parallelism has random states of a GPU; there is none here.
    tracker, tensor_parallel.get_cuda_rng_tracker = tensor_parallel.get_cuda_rng_tracker, lambda: Unforked
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
    try:
        yield parallel_state.get_tensor_model_parallel_rank()
    finally:
        parallel_state.destroy_model_parallel()
        torch.cuda.current_device, tensor_parallel.get_cuda_rng_tracker = current, tracker


class Unforked:
    fork = contextlib.nullcontext


def gpt(tp, cp=1, **options):
    """Of the same values at every degree."""
    options = options | {"sequence_parallel": tp > 1 and options.get("sequence_parallel", False)}
    position = options.pop("position_embedding_type", "rope")
    percent, l2 = options.pop("rotary_percent", 1.0), options.pop("qk_l2_norm", False)
    options = {"normalization": "RMSNorm"} | options
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS, ffn_hidden_size=96, kv_channels=D_HEAD,
        use_cpu_initialization=True, attention_dropout=0.0, hidden_dropout=0.0, add_bias_linear=False,
        tensor_model_parallel_size=tp, context_parallel_size=cp, bias_dropout_fusion=False, masked_softmax_fusion=False,
        persist_layer_norm=False, **{"num_query_groups": GROUPS} | options,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm, qk_l2_norm=l2)
    spec.submodules.self_attention.submodules.core_attention = Sdpa
    if config.layernorm_zero_centered_gamma or config.sequence_parallel:
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
        spec = TransformerBlockSubmodules(layer_specs=[spec] * LAYERS, layer_norm=Norm)
    model = GPTModel(
        config, spec, vocab_size=64, max_sequence_length=64, position_embedding_type=position, rotary_percent=percent
    )
    generator, rank = torch.Generator().manual_seed(0), parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            dim = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
            shape = [n * (tp if i == dim else 1) for i, n in enumerate(parameter.shape)]
            value = (0.3 if parameter.dim() == 1 else 0.2) * torch.randn(shape, generator=generator)
            gain = parameter.dim() == 1 and name.endswith("weight")
            value = value + 1 if gain and not config.layernorm_zero_centered_gamma else value
            parameter.copy_(value if dim is None else value.chunk(tp, dim)[rank])
    return model


def run(model):
    """Logits of all tokens and of this rank's words, and gradients."""
    tokens = torch.arange(24).view(2, 12) * 7 % 64
    out = model(tokens, torch.arange(12).expand(2, -1), None)
    # A sum, so that the loss is that of all ranks together.
    out.float().square().sum().backward()
    return out.detach()


def separate(model, index, rank=0, ranks=1):
    """A layer as q, k and v of their own, taken out of `linear_qkv` by hand: of a rank, or that rank's part of a whole."""
    layer = model.decoder.layers[index]
    attention, config = layer.self_attention, model.config
    group = HEADS // GROUPS
    # Behind the query heads of a group lie as many gates, where there are any.
    width = (2 * group if config.attention_output_gate else group) + 2
    count = attention.linear_qkv.weight.shape[0] // (width * D_HEAD)
    part = slice(rank * count // ranks, (rank + 1) * count // ranks)

    def split(x):
        x = x.detach().view(count, width, D_HEAD, -1)[part]
        return [y.reshape(-1, y.shape[-1]) for y in (x[:, :group], x[:, -2], x[:, -1])]

    linear, norm, n_kv = attention.linear_qkv, layer.input_layernorm, count // ranks
    q, k, v = split(linear.weight)
    biases = [None] * 3 if linear.bias is None else [b.flatten() for b in split(linear.bias)]
    q_norm, k_norm = (getattr(getattr(attention, f"{x}_layernorm"), "weight", None) for x in "qk")
    if type(attention.q_layernorm).__name__ == "L2Norm":
        q_norm = k_norm = torch.ones(D_HEAD)
    rope = model.position_embedding_type == "rope"
    return fp8.Layer(
        q=q, k=k, v=v, n_q_heads=group * n_kv, n_kv_heads=n_kv, gain=norm.weight, shift=getattr(norm, "bias", None),
        norm="layer" if config.normalization == "LayerNorm" else "rms", gain_offset=float(config.layernorm_zero_centered_gamma),
        q_bias=biases[0], k_bias=biases[1], v_bias=biases[2], q_norm=q_norm, k_norm=k_norm,
        rotary=int(D_HEAD * model.rotary_percent) if rope else 0, interleaved=config.rotary_interleaved,
        softmax_scale=config.softmax_scale,
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@distributed(2)
def test_interleaved_projections(case):
    """Descales are those of the projections taken apart, on a rank and of the whole model; attention is that of one process."""
    options = CASES[case]
    with megatron(1):
        whole = gpt(1, **options)
        apart = fp8.attach(whole, bound="worst-case", layers=[separate(whole, i) for i in range(LAYERS)])
        plain = run(whole)
        whole.zero_grad()
        one = fp8.megatron.attach(whole, bound="worst-case", backend="emulated")
        assert torch.equal(one.descales, apart.descales)
        torch.testing.assert_close(one.logits, apart.logits, rtol=1e-5, atol=0)
        logits = run(whole)
    with megatron(2) as rank:
        model = gpt(2, **options)
        own = fp8.attach(model, layers=[separate(model, i) for i in range(LAYERS)])
        runtime = fp8.megatron.attach(model, backend="emulated")
        assert torch.equal(runtime.descales, own.descales)
        assert torch.equal(runtime.descales, one.descales[..., 2 * rank : 2 * rank + 2])
        assert runtime._places == [[layer, 2 * rank, 2, 4] for layer in range(LAYERS)]
        out = run(model)
        assert not (runtime.stats()["overflow"] > 0).any() and (runtime.stats()["amax"] > 0).all()
        close(out, logits.chunk(2, 2)[rank], 0.01)
        close(out, plain.chunk(2, 2)[rank], 0.1)
        for a, b in zip(model.decoder.layers, whole.decoder.layers):
            a, b = (layer.self_attention.linear_qkv.weight.grad for layer in (a, b))
            close(a, b.chunk(2)[rank], 0.05)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        own = fp8.attach(model, layers=[separate(model, i) for i in range(LAYERS)])
        runtime.refresh()
        assert torch.equal(runtime.descales, own.descales)


def close(a, b, most):
    distance = float((a.float() - b.float()).norm() / b.float().norm())
    assert distance <= most, distance


@distributed(2)
def test_a_failure_probability_is_that_of_all_ranks():
    with megatron(1):
        whole = fp8.megatron.attach(gpt(1), policy="geometry-c-star")
    with megatron(2) as rank:
        model = gpt(2)
        own = fp8.megatron.attach(model, policy="geometry-c-star").logit_descales
        torch.testing.assert_close(own, whole.logit_descales[:, 4 * rank : 4 * rank + 4], rtol=1e-6, atol=0)


@distributed(2)
def test_context_parallelism_is_a_ring():
    """Each rank has two chunks of the sequence, as Megatron cuts it. Its rotation under context parallelism needs a GPU."""
    options = CASES["no rotation"]
    with megatron(1):
        whole = gpt(1, **options)
        one = fp8.megatron.attach(whole, backend="emulated")
        logits = run(whole)
    with megatron(1, 2):
        model = gpt(1, 2, **options)
        runtime = fp8.megatron.attach(model)
        assert torch.equal(runtime.descales, one.descales)
        group = parallel_state.get_context_parallel_group()
        tokens, places = (torch.arange(24).view(2, 12) * 7 % 64, torch.arange(12).expand(2, -1))
        tokens, places = (fp8.shard_sequence(x, group, zigzag=True) for x in (tokens, places))
        out = model(tokens, places, None)
        out.float().square().mean().backward()
        close(out, fp8.shard_sequence(logits, group, zigzag=True), 0.02)


@distributed(2)
def test_its_data_parallel_wrapper():
    with megatron(1):
        inner = gpt(1)
        expected = fp8.attach(inner, layers=[separate(inner, i) for i in range(LAYERS)]).descales
        model = DistributedDataParallel(inner.config, DistributedDataParallelConfig(), inner)
        runtime = fp8.megatron.attach(model, backend="emulated")
        assert torch.equal(runtime.descales, expected) and not any(plan.stale for plan in runtime.layers)
        run(model)
        assert (runtime.stats()["amax"] > 0).all()
        parameters = dict(inner.named_parameters())
        assert set(inner.state_dict()) >= set(parameters) and not any("core_attention" in name for name in parameters)


@distributed(1)
def test_norms_inside_the_projection():
    """As TransformerEngine's `TELayerNormColumnParallelLinear` holds them, by name; that module itself needs a GPU."""
    with megatron(1):
        model = gpt(1, normalization="LayerNorm")
        expected = fp8.attach(model, layers=[separate(model, i) for i in range(LAYERS)]).descales
        for layer in model.decoder.layers:
            linear, norm = layer.self_attention.linear_qkv, layer.input_layernorm
            linear.layer_norm_weight, linear.layer_norm_bias = norm.weight, norm.bias
            layer.input_layernorm = torch.nn.Identity()
        assert torch.equal(fp8.megatron.attach(model).descales, expected)
        for layer in model.decoder.layers:
            del layer.self_attention.linear_qkv.layer_norm_weight
        with pytest.raises(sigmascale.UnsupportedError, match="Identity .*linear_qkv"):
            fp8.megatron.attach(model)


class Overlapping(torch.nn.Module):
    """What Megatron's wrapper is while it gathers parameters in forwards."""

    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_param_gather=True)

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *arguments):
        return self.module(*arguments)


@distributed(1)
def test_scales_wait_for_parameters_that_are_gathered_in_the_forward():
    with megatron(1):
        inner = gpt(1)
        weight, own = inner.decoder.layers[0].self_attention.linear_qkv.weight, []

        def arrive(*_):
            own.append(weight.detach().clone())
            weight.data.mul_(3)

        inner.decoder.layers[0].self_attention.linear_qkv.register_forward_pre_hook(arrive)
        runtime = fp8.megatron.attach(Overlapping(inner), backend="emulated")
        assert all(plan.stale for plan in runtime.layers)
        run(inner)
        expected = fp8.attach(inner, layers=[separate(inner, i) for i in range(LAYERS)])
        assert len(own) == 1 and torch.equal(weight, own[0] * 3)
        assert torch.equal(runtime.descales, expected.descales) and not any(plan.stale for plan in runtime.layers)
        runtime.refresh()
        assert all(plan.stale for plan in runtime.layers)


REFUSED = {
    "fewer groups than ranks": ({"num_query_groups": 1}, "layer 0: 2 tensor-parallel ranks do not share 1 KV groups"),
    "dropout": ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
    "windows": ({"window_size": (4, 0)}, "windows and softmax offsets"),
    "softmax offsets": ({"softmax_type": "learnable"}, "windows and softmax offsets"),
}


@pytest.mark.parametrize("case", REFUSED)
@distributed(2)
def test_what_cannot_be_is_refused(case):
    options, message = REFUSED[case]
    with megatron(2):
        model = gpt(2)
        for name, value in options.items():
            setattr(model.config, name, value)
        before = [layer.self_attention.core_attention for layer in model.decoder.layers]
        with pytest.raises(sigmascale.UnsupportedError, match=message):
            fp8.megatron.attach(model)
        assert before == [layer.self_attention.core_attention for layer in model.decoder.layers]


@distributed(1)
def test_calls_that_cannot_be_are_refused():
    with megatron(1):
        model = gpt(1)
        runtime = fp8.megatron.attach(model, backend="emulated")
        core, q = model.decoder.layers[0].self_attention.core_attention, torch.zeros(4, 1, HEADS, D_HEAD)
        for options, message in (
            ({"attention_bias": q}, "attention_bias is not taken"),
            ({"packed_seq_params": object()}, "packed_seq_params is not taken"),
        ):
            with pytest.raises(sigmascale.UnsupportedError, match=message):
                core(q, q[:, :, :GROUPS], q[:, :, :GROUPS], None, **options)
        core.mask = "padding"
        with pytest.raises(sigmascale.UnsupportedError, match="attn_mask_type padding is not read"):
            core(q, q[:, :, :GROUPS], q[:, :, :GROUPS])
        model.position_embedding_type = "mrope"
        with pytest.raises(sigmascale.UnsupportedError, match="position_embedding_type 'mrope'"):
            fp8.megatron.attach(model)
        assert len(runtime) == LAYERS
