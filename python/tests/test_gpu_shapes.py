"""Weights that move on a GPU: one engine a layer shape, whose launches carry the addresses."""

import pytest
from gpu import random_model, torch

import sigmascale.torch as fp8
from sigmascale import _native
from sigmascale.torch import _engine, _layers


def run(model, tokens):
    return model(tokens, use_cache=False).logits


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("bound", [None, "worst-case"])
@pytest.mark.parametrize("policy", ["geometry", "geometry-c-star"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt_neox"])
def test_a_sharded_model_has_the_scales_of_the_whole_one(kind, policy, bound):
    from torch.distributed.fsdp import fully_shard

    if (kind, policy) == ("qwen3", "geometry-c-star"):
        pytest.skip("q and k are normalized")
    whole, model = random_model(kind), random_model(kind)
    blocks = model.gpt_neox.layers if kind == "gpt_neox" else model.model.layers
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    expected = fp8.attach(whole, policy=policy, bound=bound)
    runtime = fp8.attach(model, policy=policy, bound=bound)
    model.set_attn_implementation(fp8.register())
    tokens = torch.arange(96, device="cuda").reshape(1, 96)
    held, places = [], set()
    for step in range(4):
        with torch.no_grad():
            for x, y in zip(whole.parameters(), model.parameters()):
                scale = 1.0 + 0.25 * step
                x.mul_(scale), y.mul_(scale)
        expected.refresh(), runtime.refresh()
        # Other memory is given to what the next forward gathers.
        held.append(torch.empty(1 << 20, device="cuda"))
        handle = blocks[0].register_forward_pre_hook(lambda block, _: places.add(next(block.parameters()).data_ptr()))
        run(model, tokens)
        handle.remove()
        # A plan with bounds of logits is cut over the layers of its engine, and its sums round otherwise.
        same_cut = bound is None and policy == "geometry"
        close = torch.equal if same_cut else lambda x, y: torch.allclose(x, y, rtol=2e-3)
        assert close(runtime.descales, expected.descales), step
        if bound:
            assert torch.allclose(runtime.logits[..., 2], expected.logits[..., 2], rtol=0.02)
    assert len(runtime._shape_engines) == 1 and not any(plan.stale for plan in runtime.layers)
    print(f"{kind}: {len(places)} addresses of a parameter in 4 steps")


def test_a_capture_of_moving_weights_uploads_nothing():
    """Kernels alone, neither copies nor allocations; each replay reads the addresses that were captured."""
    models = [random_model("llama") for _ in range(3)]
    with torch.no_grad():
        for factor, model in enumerate(models, 1):
            for parameter in model.parameters():
                parameter.mul_(factor)
    layers = [fp8.find_layers(model)[0] for model in models]
    rows = [_layers.entries(layer) for layer in layers]
    engine = _native.ShapeEngine(0, rows[0], True, 0.8)
    heads = _engine._heads.memory(engine, engine.results()["heads"], torch.float32, torch.device("cuda"))
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    kept = torch.zeros(3, heads.numel(), device="cuda")
    with torch.cuda.stream(stream):
        engine.launch(stream.cuda_stream, rows[0])
    # Before its first graph PyTorch allocates the state of its generator, 1024 bytes that the last graph frees.
    other = torch.cuda.CUDAGraph()
    with torch.cuda.graph(other, stream=stream):
        kept.zero_()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with torch.cuda.graph(graph, stream=stream):
        for row, target in zip(rows, kept):
            engine.launch(torch.cuda.current_stream().cuda_stream, row)
            target.copy_(heads)
    assert torch.cuda.memory_allocated() == before and all(map(engine.fits, rows))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    assert not [event.name for event in profile.events() if "HtoD" in event.name or "DtoH" in event.name]
    for model, layer, row in zip(models, layers, kept):
        runtime = fp8.attach(model, bound="worst-case", layers=[layer])
        assert torch.equal(row, runtime.descales[0].flatten())
    assert not torch.equal(kept[0], kept[1])
