"""Models whose layers are not alike: other heads, no rotation, f32 among bf16, normalized q and k."""

import pytest
from gpu import tensors, torch

import sigmascale
import sigmascale.torch as fp8

DEVICE = "cuda"


def unlike():
    """Six layers of five kinds; the first and the last are alike."""
    generator = torch.Generator(DEVICE).manual_seed(3)
    random = lambda *shape: torch.randn(*shape, generator=generator, device=DEVICE)

    def layer(index, n_q, n_kv, dtype=torch.bfloat16, normalised=False, **options):
        weight = lambda heads: (0.1 * random(heads * 64, 256)).to(dtype)
        gain = lambda n: (1 + 0.2 * random(n)).to(dtype)
        if normalised:
            options |= {"q_norm": gain(64), "k_norm": gain(64)}
        return fp8.Layer(
            q=weight(n_q),
            k=weight(n_kv),
            v=weight(n_kv),
            n_q_heads=n_q,
            n_kv_heads=n_kv,
            gain=gain(256),
            name=f"layer {index}",
            **options,
        )

    kinds = [
        {"n_q": 4, "n_kv": 2, "rotary": 64},
        {"n_q": 4, "n_kv": 2, "query_factor": 1.7, "positions": 4096},
        {"n_q": 6, "n_kv": 3, "rotary": 64, "rope_factor": 1.25},
        {"n_q": 4, "n_kv": 2, "rotary": 64, "normalised": True},
        {"n_q": 4, "n_kv": 2, "rotary": 32, "dtype": torch.float32},
        {"n_q": 4, "n_kv": 2, "rotary": 64},
    ]
    return [layer(index, **kind) for index, kind in enumerate(kinds)]


def attach(layers, **options):
    model = torch.nn.Linear(1, 1, device=DEVICE)
    runtime = fp8.attach(model, layers=layers, **options)
    # A runtime is gone with its model.
    runtime.test_model = model
    return runtime


def test_every_layer_has_the_plan_of_a_runtime_of_its_own():
    layers = unlike()
    whole = attach(layers, bound="worst-case")
    whole.check()
    assert whole.descales.shape == (6, 4, 3) and whole.logits.shape == (6, 6, 4)
    for index, (layer, plan) in enumerate(zip(layers, whole.layers)):
        alone = attach([layer], bound="worst-case")
        n_q, n_kv = layer.n_q_heads, layer.n_kv_heads
        # Sums of layers that share a launch are cut elsewhere.
        same = torch.equal if index in range(1, 5) else lambda a, b: torch.allclose(a, b, rtol=1e-5)
        assert same(plan._descales, alone.layers[0]._descales), index
        assert same(whole.logits[index, :n_q], alone.logits[0]), index
        assert same(plan.logit_descale, alone.layers[0].logit_descale)
        assert plan.logit_descale.shape == (n_q,) and plan.k_descale.shape == (n_kv,)
        assert (whole.descales[index, :, n_kv:] < 1e-37).all() and (whole.logit_descales[index, n_q:] < 1e-37).all()
        assert plan.q_descale.data_ptr() == whole.descales[index].data_ptr()


def calls(runtime, scale=1.0):
    for plan in runtime.layers:
        operands = tensors(length=64, heads=(plan.n_q_heads, plan.n_kv_heads), d=64, scale=scale, seed=plan.index)
        fp8.attention(*operands, plan)


@pytest.mark.parametrize("policy", ["auto-c", "delayed-te", "delayed-paper"])
def test_policies_observe_and_plan_as_runtimes_of_one_layer_do(policy):
    layers = unlike()
    whole, alone = attach(layers, policy=policy), [attach([layer], policy=policy) for layer in layers]
    for step in range(3):
        for runtime in (whole, *alone):
            for plan in runtime.layers:
                seed = plan.index if runtime is whole else alone.index(runtime)
                operands = tensors(
                    length=64, heads=(plan.n_q_heads, plan.n_kv_heads), d=64, scale=1 + step, seed=seed
                )
                fp8.attention(*operands, plan)
        if step == 2:
            stats = whole.stats()
            for index, runtime in enumerate(alone):
                n_q, n_kv = layers[index].n_q_heads, layers[index].n_kv_heads
                own = runtime.stats()
                assert (stats["amax"][index, :, :n_kv] == own["amax"][0]).all() and own["amax"].min() > 1
                assert (stats["amax"][index, :, n_kv:] == 0).all()
                assert (stats["logit_max"][index, :n_q] == own["logit_max"][0]).all()
        for runtime in (whole, *alone):
            runtime.refresh()
    for plan, runtime in zip(whole.layers, alone):
        assert torch.allclose(plan._descales, runtime.layers[0]._descales, rtol=1e-5), plan.name
        assert torch.allclose(plan.logit_descale, runtime.layers[0].logit_descale, rtol=1e-5)
    # Resumed in another runtime, the next step is the same.
    saved = whole.state_dict()
    resumed = attach(layers, policy=policy)
    resumed.load_state_dict(saved)
    assert torch.equal(resumed.descales, whole.descales)
    for runtime in (whole, resumed):
        calls(runtime, scale=5.0)
        runtime.refresh()
    assert torch.equal(resumed.descales, whole.descales)
    for damaged in (saved | {"state": saved["state"][:1]}, saved | {"shape": saved["shape"][:3]}):
        with pytest.raises(sigmascale.MismatchError):
            resumed.load_state_dict(damaged)


def test_a_graph_of_the_refresh_sees_new_weights():
    layers = unlike()
    runtime = attach(layers, policy="auto-c", bound="worst-case")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        runtime.refresh()
    before = runtime.descales.clone()
    with torch.no_grad():
        for layer in layers:
            layer.v.mul_(2.0)
    graph.replay()
    torch.cuda.synchronize()
    for layer, old, new in zip(layers, before, runtime.descales):
        n_kv = layer.n_kv_heads
        assert torch.allclose(new[2, :n_kv], 2 * old[2, :n_kv], rtol=1e-5) and torch.equal(new[:2], old[:2])


def test_c_star_names_the_layer_that_has_other_heads():
    with pytest.raises(sigmascale.UnsupportedError, match="layer 2 .*6 query .*3 KV .*layer 0 4 and 2"):
        attach([layer for layer in unlike() if layer.q_norm is None], policy="geometry-c-star")
