"""Plans of layers with latent attention (MLA), and of layers that are named by hand, on the CPU."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import calls  # noqa: E402

import sigmascale  # noqa: E402
import sigmascale.torch as fp8  # noqa: E402


def made(kind, dtype=torch.float32, **settings):
    """A model whose norms have gains of their own."""
    config = calls.CONFIGS[kind]()
    for name, value in settings.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = calls.AUTO.get(kind, calls.transformers.AutoModelForCausalLM).from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.08)
            elif "norm" in name and name.endswith("weight"):
                parameter.uniform_(0.5, 2.0)
            else:
                parameter.normal_(std=0.1)
    return model.to(dtype).eval()


# Models with their settings: query latents or none, both pairings of a rotation, biases, YaRN, other families.
YARN = {"rope_type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 1e4,
        "original_max_position_embeddings": 4096}  # fmt: skip
LATENT = {
    "DeepSeek-V3": ("deepseek_v3", {}),
    "DeepSeek-V3 in BF16": ("deepseek_v3", {"dtype": torch.bfloat16}),
    "no query latent": ("deepseek_v3", {"q_lora_rank": None}),
    "halves rotate": ("deepseek_v3", {"rope_interleave": False}),
    "with biases": ("deepseek_v3", {"attention_bias": True}),
    "YaRN": ("deepseek_v3", {"rope_parameters": YARN, "max_position_embeddings": 32768}),
    "Kimi-K2": ("deepseek_v3", {"model_type": "kimi_k2"}),
    "DeepSeek-V2": ("deepseek_v2", {}),
    "MiniCPM3": ("minicpm3", {}),
    "GLM-4 MoE Lite": ("glm4_moe_lite", {}),
    "Kimi-Linear, every second layer": ("kimi_linear", {}),
    "LongCat, two attentions a layer": ("longcat_flash", {}),
}


@pytest.mark.parametrize("name", LATENT)
def test_descales_are_those_of_calibrate_bit_for_bit(name):
    kind, settings = LATENT[name]
    model = made(kind, **settings)
    runtime = fp8.attach(model, bound="worst-case")
    profile = sigmascale.calibrate(model.config, weights=model.state_dict())
    assert len(runtime) == len(profile["layers"]) == 2
    for plan, row in zip(runtime.layers, profile["layers"]):
        ours = [x.numpy() for x in (plan.q_descale, plan.k_descale, plan.v_descale, plan.o_descale, plan.logit_descale)]
        theirs = [row[f"{key}_descale"] for key in "qkvo"] + [row["logit_descales"]]
        for a, b in zip(ours, theirs):
            assert np.array_equal(a, np.array(b, dtype=np.float32)), (name, a, b)
    assert runtime.layers[0].d_head == model.config.qk_nope_head_dim + model.config.qk_rope_head_dim
    assert runtime.layers[0].latent


@pytest.mark.parametrize(
    "name", ["DeepSeek-V3", "no query latent", "DeepSeek-V2", "MiniCPM3", "LongCat, two attentions a layer"]
)
def test_a_forward_stays_inside_its_descales_and_agrees_with_eager(name):
    kind, settings = LATENT[name]
    model = made(kind, **settings)
    tokens = calls.tokens()
    with torch.no_grad():
        model.set_attn_implementation("eager")
        theirs = model(tokens, use_cache=False).logits
        runtime = fp8.attach(model)
        model.set_attn_implementation(fp8.register())
        ours = model(tokens, use_cache=False).logits
        stats = runtime.stats()
        exact = fp8.attach(model, policy="current")
        reference = model(tokens, use_cache=False).logits
    error, least = calls.relative([ours], [theirs]), calls.relative([reference], [theirs])
    assert error < 0.2 and error < 1.4 * least + 0.01, (error, least)
    assert not stats["overflow"].any() and (stats["peak"] <= 448).all() and (stats["peak"] > 1).all()
    assert stats["calls"]["native"].tolist() == [1, 1] and exact.stats()["calls"]["native"].tolist() == [1, 1]


def test_a_refresh_follows_the_weights():
    model = made("deepseek_v3")
    runtime = fp8.attach(model)
    before = runtime.descales.clone()
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.q_b_proj.weight.mul_(2)
        attention.kv_a_proj_with_mqa.weight.mul_(2)
        attention.kv_a_layernorm.weight.mul_(2)
    runtime.refresh()
    ratio = runtime.descales / before
    assert torch.allclose(ratio[0], torch.tensor([2.0, 2.0, 2.0, 2.0])[:, None].expand(-1, 4)) and (ratio[1] == 1).all()
    # Another parameter in its place is found again.
    attention.q_b_proj.weight = torch.nn.Parameter(attention.q_b_proj.weight.detach() * 2)
    runtime.refresh()
    assert torch.allclose((runtime.descales / before)[0, 0], torch.tensor(4.0))


def test_policies_that_observe_plan_for_it_and_those_of_one_input_do_not():
    model = made("deepseek_v3")
    runtime = fp8.attach(model, policy="delayed-te")
    model.set_attn_implementation(fp8.register())
    with torch.no_grad():
        model(calls.tokens())
        runtime.refresh()
        model(calls.tokens())
    assert not runtime.stats()["beyond"].any()
    for policy in ("geometry-c-star", "auto-c"):
        with pytest.raises(
            sigmascale.UnsupportedError, match=f"policy='{policy}'.*policy='geometry'"
        ):
            fp8.attach(model, policy=policy)
    with pytest.raises(sigmascale.UnsupportedError, match="latents.*past_key_values"):
        fp8.fp8_cache(fp8.attach(model))
    with torch.no_grad():
        model.model.layers[1].self_attn.kv_b_proj.weight[0, 0] = torch.nan
    with pytest.raises(sigmascale.NonFiniteError, match=r"layers\.1.*has a NaN"):
        fp8.attach(model)


def test_families_without_bounds_are_refused_by_name():
    for kind, text in [("t5", "relative position"), ("bart", "bart"), ("modernbert", "modernbert")]:
        with pytest.raises(sigmascale.UnsupportedError, match=text):
            fp8.attach(made(kind))


@pytest.mark.parametrize("kind", ["bart", "modernbert"])
def test_layers_that_are_named_have_bounds_that_hold(kind):
    model = made(kind)
    bounded, crossed = getattr(calls, f"{kind}_layers")(model)
    runtimes = [fp8.attach(model, layers=bounded)]
    runtimes += [fp8.attach(model, policy="current", layers=crossed)] if crossed else []
    given = {"input_ids": calls.tokens()} | ({"decoder_input_ids": calls.tokens(seed=1)} if kind == "bart" else {})
    with torch.no_grad():
        model.set_attn_implementation("eager")
        theirs = model(**given)[0]
        model.set_attn_implementation(fp8.register())
        ours = model(**given)[0]
    stats = runtimes[0].stats()
    assert calls.relative([ours], [theirs]) < 0.2 and stats["calls"]["native"].tolist() == [1] * len(bounded)
    assert not stats["overflow"].any() and (stats["peak"] <= 448).all() and (stats["peak"] > 1).all()
    # A weight that grows is found.
    before = runtimes[0].descales.clone()
    with torch.no_grad():
        (bounded[1].v._base if bounded[1].v._base is not None else bounded[1].v).mul_(2)
    runtimes[0].refresh()
    assert (runtimes[0].descales[1, 2] > 1.5 * before[1, 2]).all()
