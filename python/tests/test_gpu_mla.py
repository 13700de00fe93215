"""Latent attention (MLA) on a GPU: descales from weights where they lie, whole or sharded."""

import pytest
from gpu import torch, transformers

import sigmascale
import sigmascale.torch as fp8
from sigmascale.torch import _engine, _host


def run(model, tokens):
    return model(tokens, use_cache=False).logits


LATENT = {
    "DeepSeek-V3": {},
    "no query latent": {"q_lora_rank": None},
    "with biases": {"attention_bias": True},
    "halves rotate": {"rope_interleave": False},
}


def latent(dtype, **settings):
    config = transformers.DeepseekV3Config(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, intermediate_size=256,
        moe_intermediate_size=64, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, vocab_size=128,
        first_k_dense_replace=1, q_lora_rank=64, kv_lora_rank=32, qk_nope_head_dim=64, qk_rope_head_dim=32,
        v_head_dim=64, n_shared_experts=1, max_position_embeddings=512,
    )  # fmt: skip
    for name, value in settings.items():
        setattr(config, name, value)
    torch.manual_seed(2)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.08) if parameter.dim() > 1 else parameter.add_(0.3 * torch.randn_like(parameter))
    return model.to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", LATENT)
def test_latent_attention_is_planned_on_the_device(name, dtype):
    model = latent(dtype, **LATENT[name])
    expected = fp8.attach(model).descales
    model = model.cuda()
    runtime = fp8.attach(model)
    assert isinstance(runtime._engine._engine, _engine._DeviceMla)
    ratio = (runtime.descales.cpu() / expected).flatten()
    assert (ratio >= 1 - 2e-7).all() and (ratio <= 1 + 2e-5).all(), (ratio.min(), ratio.max())
    # No weight leaves the device, and a graph follows them.
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        runtime.refresh()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        runtime.refresh()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj.weight.mul_(2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    assert not [event.name for event in profile.events() if "DtoH" in event.name]
    assert torch.allclose(runtime.descales[:, 2].cpu() / expected[:, 2], torch.tensor(2.0), rtol=1e-3)
    with torch.no_grad():
        model.model.layers[0].self_attn.kv_b_proj.weight[0, 0] = torch.nan
    runtime.refresh()
    with pytest.raises(sigmascale.NonFiniteError, match="not finite"):
        runtime.check()
    # Bounds of logits are the host's.
    with torch.no_grad():
        model.model.layers[0].self_attn.kv_b_proj.weight[0, 0] = 0.0
    assert isinstance(fp8.attach(model, bound="worst-case")._engine._engine, _host.MlaEngine)


@pytest.mark.usefixtures("alone")
def test_sharded_latent_attention_is_planned_on_the_device():
    from torch.distributed.fsdp import fully_shard

    whole, model = latent(torch.bfloat16).cuda(), latent(torch.bfloat16).cuda()
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    expected, runtime = fp8.attach(whole), fp8.attach(model)
    model.set_attn_implementation(fp8.register())
    for _ in range(3):
        run(model, torch.arange(96, device="cuda").reshape(1, 96))
        assert torch.equal(runtime.descales, expected.descales)
        with torch.no_grad():
            for x, y in zip(whole.parameters(), model.parameters()):
                x.mul_(1.25), y.mul_(1.25)
        expected.refresh(), runtime.refresh()
    assert len(runtime._shape_engines) == 1
    assert isinstance(runtime._shape_engines[0]._engine, _engine._DeviceMla)
