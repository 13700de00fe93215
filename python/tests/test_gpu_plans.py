"""Plans and their refresh on a Hopper GPU, beside those of the CPU."""

import numpy as np
import pytest
from gpu import CONFIGS, random_model, stored_plan, tensors, torch

import sigmascale
import sigmascale.torch as fp8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_plans_are_those_of_the_cpu(kind, dtype, tmp_path):
    # Gains that BF16 holds: a file's others count in both readings where 1 is added to them.
    model = random_model(kind).to(dtype)
    runtime = fp8.attach(model)
    runtime.check()
    rows = stored_plan(model, tmp_path)
    for index, name in enumerate("qkv"):
        assert np.allclose(runtime.descales[:, index].cpu().numpy(), rows[name], rtol=2e-5), name
    if rows["o"] is not None:
        assert np.allclose(runtime.descales[:, 3].cpu().numpy(), rows["o"], rtol=2e-5)


def test_logit_bounds_are_certified_and_close(tmp_path, llama):
    runtime = fp8.attach(llama, bound="worst-case")
    for _ in range(8):
        runtime.refresh()
    llama.save_pretrained(tmp_path)
    profile = sigmascale.calibrate(tmp_path)
    exact = np.array([[head["bound_rounded"] for head in layer["heads"]] for layer in profile["layers"]])
    ours = runtime.logits[:, :, 2].cpu().numpy()
    assert (ours >= exact * (1 - 1e-6)).all() and (ours <= exact * 1.02).all()


@pytest.mark.parametrize("kind", ["gpt_neox", "falcon", "qwen3", "smollm3", "ministral3", "llama4_text"])
def test_logit_bounds_of_every_layout_are_those_of_the_cpu(kind, tmp_path):
    """Interleaved fused weights, normalized q and k, layers with and without rotation."""
    model = random_model(kind)
    runtime = fp8.attach(model, bound="worst-case")
    for _ in range(4):
        runtime.refresh()
    model.save_pretrained(tmp_path)
    layers = sigmascale.calibrate(tmp_path)["layers"]
    for name, column in [("bound_exact", 1), ("bound_rounded", 2)]:
        exact = np.array([[head[name] for head in layer["heads"]] for layer in layers])
        ours = runtime.logits[:, :, column].cpu().numpy()
        assert (ours >= exact * (1 - 1e-6)).all() and (ours <= exact * 1.03).all(), name
    descales = np.array([layer["logit_descales"] for layer in layers])
    assert np.allclose(runtime.logit_descales.cpu().numpy(), descales, rtol=0.03)
    assert runtime.layers[1].logit_descale.data_ptr() == runtime.logit_descales[1].data_ptr()


@pytest.mark.parametrize("policy", ["geometry-c-star", "auto-c"])
@pytest.mark.parametrize(
    "kind", ["llama", "gpt_neox", "falcon", "qwen3", "smollm3", "gpt2", "ministral3", "llama4_text"]
)
def test_policies_that_plan_from_bounds_take_every_layout(kind, policy):
    model = random_model(kind)
    if kind in ("qwen3", "llama4_text") and policy == "geometry-c-star":
        with pytest.raises(sigmascale.UnsupportedError, match="take policy='geometry'"):
            fp8.attach(model, policy=policy)
        return
    runtime, geometry = fp8.attach(model, policy=policy), fp8.attach(model, bound="worst-case")
    # In its burn-in auto-c plans as geometry does; operands of c-star are those of geometry.
    assert torch.allclose(runtime.descales, geometry.descales, rtol=1e-6)
    close = torch.allclose(runtime.logit_descales, geometry.logit_descales, rtol=0.02)
    assert close == (policy == "auto-c") and (runtime.logit_descales > 0).all()


def test_c_star_counts_what_its_tail_says(llama):
    """The logit bound of geometry-c-star is proportional to c_star where there are no biases."""
    tails = [sigmascale.Tail(), sigmascale.Tail(delta=1e-3, seq_len=32768, batch=16, steps=5000)]
    rows = [fp8.attach(llama, policy="geometry-c-star", tail=tail).logit_descales for tail in tails]
    config = llama.config
    stars = [
        sigmascale.calibrate(config, delta=t.delta, seq_len=t.seq_len, batch=t.batch, steps=t.steps)["c_star"]["c_star"]
        for t in tails
    ]
    assert stars[1] > 1.05 * stars[0]
    assert torch.allclose(rows[1] / rows[0], torch.full_like(rows[0], stars[1] / stars[0]), rtol=1e-5)
    assert torch.equal(rows[0], fp8.attach(llama, policy="geometry-c-star").logit_descales)


@pytest.mark.parametrize("policy", ["geometry", "geometry-c-star", "auto-c"])
def test_logit_descales_map_onto_etas_share_of_the_range(policy, llama):
    rows = [
        fp8.attach(llama, policy=policy, bound="worst-case", tail=sigmascale.Tail(eta=eta)).logit_descales
        for eta in (0.8, 0.4)
    ]
    assert torch.allclose(rows[1], 2 * rows[0], rtol=1e-6)


def test_policies_have_the_parameters_that_they_are_given(llama):
    q, k, v = tensors(heads=(4, 2), d=64, length=64)

    def after(policy, steps):
        runtime = fp8.attach(llama, policy=policy)
        for step in range(steps):
            for plan in runtime.layers:
                fp8.attention(q / (1 + step), k / (1 + step), v / (1 + step), plan)
            runtime.refresh()
        return runtime

    def q_descale(policy, steps):
        return float(after(policy, steps).descales[0, 0, 0])

    amax = [float(q.abs().max()) / (1 + step) for step in range(5)]
    close = lambda a, b: abs(a / b - 1) < 1e-2
    assert close(q_descale("delayed-te", 5), amax[0] / 448)
    assert close(q_descale(sigmascale.DelayedTe(history=3, margin=2), 5), 4 * amax[2] / 448)
    assert close(q_descale(sigmascale.DelayedTe(algorithm="most-recent"), 5), amax[4] / 448)
    assert close(q_descale(sigmascale.DelayedPaper(history=2, margin=0.5), 5), amax[3] / 224)
    certain = fp8.attach(llama).descales
    frozen = after(sigmascale.AutoC(burn_in=2, quantile=0.5, kappa=1.25, pooling="head"), 3)
    assert (frozen.descales[:, 0] < 0.9 * certain[:, 0]).all()
    state = frozen.state_dict()
    assert {key: state["state"]["config"][key] for key in ("burn_in", "quantile", "kappa", "pooling")} == {
        "burn_in": 2, "quantile": 0.5, "kappa": 1.25, "pooling": "head",
    }  # fmt: skip
    with pytest.raises(sigmascale.MismatchError, match="burn_in is 2, not 100"):
        fp8.attach(llama, policy="auto-c").load_state_dict(state)


def test_slack_is_bound_over_maximum_in_the_burn_in(llama):
    q, k, v = tensors(heads=(4, 2), d=64, length=64)
    runtime = fp8.attach(llama, policy=sigmascale.AutoC(burn_in=3))
    assert np.isnan(runtime.slack()["q"]["mean"]).all() and (runtime.slack()["q"]["count"] == 0).all()
    bound = 448 * runtime.descales.cpu().double().numpy()
    for step in range(5):
        for plan in runtime.layers[:2]:
            fp8.attention(q / 2**step, k / 2**step, v / 2**step, plan)
        runtime.refresh()
    slack = runtime.slack()
    for index, (name, x) in enumerate([("q", q), ("k", k), ("v", v)]):
        amax = x.abs().amax(dim=(0, 1, 3)).double().view(2, -1).amax(dim=1).cpu().numpy()
        rows = bound[:2, index] / amax
        assert slack[name]["count"].tolist() == [6, 6, 0]
        assert np.allclose(slack[name]["min"][:2], rows.min(axis=1), rtol=1e-5)
        assert np.allclose(slack[name]["max"][:2], 4 * rows.max(axis=1), rtol=1e-5)
        assert np.allclose(slack[name]["mean"][:2], rows.mean(axis=1) * 7 / 3, rtol=1e-5)
        assert np.isnan(slack[name]["min"][2])
    assert (slack["logit"]["min"][:2] > 1).all()
    with pytest.raises(sigmascale.UnsupportedError, match="policy='auto-c'"):
        fp8.attach(llama).slack()


def test_auto_c_observes_against_the_bounds_that_were_in_force():
    """Its constant is the largest ratio of a value to its bound, so weights that grow at each refresh must not shrink it."""
    q, k, v = tensors(heads=(4, 2), d=64, length=64, scale=0.1)
    constants = []
    for growth in (1.0, 8.0):
        model = random_model("llama")
        runtime = fp8.attach(model, policy="auto-c")
        certain = fp8.attach(model)
        for step in range(101):
            if step == 0:
                before = certain.descales.clone()
                with torch.no_grad():
                    for layer in model.model.layers:
                        layer.self_attn.k_proj.weight.mul_(growth)
            for plan in runtime.layers:
                fp8.attention(q, k, v, plan)
            runtime.refresh()
            certain.refresh()
        constants.append(runtime.descales[:, 1] / (before[:, 1] * growth))
    assert torch.allclose(constants[0], constants[1], rtol=1e-4) and (constants[0] < 0.9).all()


def test_a_layer_may_be_named_by_hand(llama):
    attention = [layer.self_attn for layer in llama.model.layers]
    fused = [torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]).detach() for a in attention]
    layers = [
        fp8.Layer(
            q=w[:256], k=w[256:384], v=w[384:], n_q_heads=4, n_kv_heads=2, gain=layer.input_layernorm.weight, rotary=64
        )
        for w, layer in zip(fused, llama.model.layers)
    ]
    by_hand = fp8.attach(llama, layers=layers)
    assert torch.equal(by_hand.descales, fp8.attach(llama).descales)
