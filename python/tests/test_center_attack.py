"""An attack on the scales of centered keys and values, which knows nothing of how they are computed: transformers' own models give the
keys and values that a cache would hold, and inputs and positions ascend towards the largest of them."""

import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import sigmascale  # noqa: E402
from sigmascale._serving import ScaleStream  # noqa: E402

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
    "vocab_size": 32, "max_position_embeddings": 512,
}  # fmt: skip


def rope(**given):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4} | given}


MODELS = {
    "qwen2": ("Qwen2", {}),
    "linear": ("Qwen2", rope(rope_type="linear", factor=4.0)),
    "yarn": ("Qwen2", rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=128)),
    "llama3": (
        "Qwen2",
        rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=100),
    ),
    "partial": ("Glm", {"head_dim": 16, "attention_bias": True, "pad_token_id": 0}),
    "layernorm": ("Starcoder2", {"use_bias": True, "sliding_window": None}),
    "partial layernorm": ("StableLm", {"use_qkv_bias": True}),
}


def model_of(name, seed):
    """A model of one layer, with random gains and biases, large in few channels; in f64, so that no rounding is left out of account."""
    family, options = MODELS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**SIZES | options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).bfloat16()
    attention, norm = model.model.layers[0].self_attn, model.model.layers[0].input_layernorm
    with torch.no_grad():
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
            linear.weight.normal_(std=0.3)
            linear.bias.normal_()
            linear.bias.mul_(torch.where(torch.rand_like(linear.bias) < 0.3, 40.0, 1.0))
        # A head whose center would not lower its bound keeps zeros.
        attention.k_proj.bias.view(2, -1)[1].mul_(0.01 if seed % 2 else 1.0)
        norm.weight.uniform_(0.3, 2.0)
        if getattr(norm, "bias", None) is not None:
            norm.bias.normal_()
    return model


def cached(model, inputs, positions):
    out = model.model(inputs_embeds=inputs, position_ids=positions, use_cache=True).past_key_values.layers[0]
    return out.keys.transpose(1, 2), out.values.transpose(1, 2)


def largest(model, which, center, scale, seed, steps=80, tokens=96):
    """The largest that ascent finds of a head's channels less their center, relative to what its scale covers."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(1, tokens, SIZES["hidden_size"], generator=generator, dtype=torch.float64).requires_grad_(True)
    positions = torch.randint(0, SIZES["max_position_embeddings"], (1, tokens), generator=generator)
    positions[0, :3] = torch.tensor([0, 1, SIZES["max_position_embeddings"] - 1])
    optimizer, most = torch.optim.Adam([inputs], lr=0.1), torch.zeros(len(scale), dtype=torch.float64)
    for _ in range(steps):
        found = (cached(model, inputs, positions)[which] - center).abs() / (448 * scale[:, None])
        most = torch.maximum(most, found.detach().amax(dim=(0, 1, 3)))
        # Each token attacks the channel in which it is nearest to the bound.
        optimizer.zero_grad()
        found.flatten(2).amax(dim=2).sum().neg().backward()
        optimizer.step()
    return most


def scales_with(folder, center):
    """The scales of a layer whose keys have a center of other weights."""
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    stream = ScaleStream(folder, names=list(weights), host=True)
    stream._native.keep_centers(json.dumps([{"layer": 0, "k": center.tolist(), "v": None}]))
    for name, tensor in weights.items():
        stream.push(name, tensor)
    return torch.tensor(stream.layers[0]["centered"]["k_descale"], dtype=torch.float64)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_no_input_passes_a_centered_scale(name, seed, tmp_path):
    model = model_of(name, seed)
    model.save_pretrained(tmp_path)
    exact = model.double()
    reached = []
    for source in ("weights", "minimax"):
        (layer,) = sigmascale.centers(tmp_path, keys=source, values=source)["layers"]
        for which, operand in enumerate("kv"):
            if layer[operand] is None:
                continue
            center, scale = (torch.tensor(layer[key], dtype=torch.float64) for key in (operand, f"{operand}_scale"))
            most = largest(exact, which, center, scale, seed)
            assert bool((most <= 1).all()), (source, operand, most)
            reached.append(float(most.max()))
    # Centers of other weights, of the size of these biases and of a thousand times theirs. Where the largest bias turns fast, these
    # weights give none.
    wide = exact.model.layers[0].self_attn.k_proj.bias.detach().abs().amax()
    for size in (0.5, 1000.0):
        center = (size * wide * torch.randn(2, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).bfloat16()
        scale = scales_with(tmp_path, center.float())
        most = largest(exact, 0, center.double(), scale, seed, steps=40)
        assert bool((most <= 1).all()), (size, most)
        reached.append(float(most.max()))
    # An attack that comes near no bound shows nothing.
    assert min(reached) > 0.9, reached


def test_the_attack_finds_a_scale_that_is_too_small(tmp_path):
    model = model_of("qwen2", 0)
    model.save_pretrained(tmp_path)
    (layer,) = sigmascale.centers(tmp_path)["layers"]
    center, scale = (torch.tensor(layer[key], dtype=torch.float64) for key in ("k", "k_scale"))
    assert bool((largest(model.double(), 0, center, 0.95 * scale, 0) > 1).any())
    # The scales of keys without their center do not cover them with it missing: a bias in slow pairs.
    assert bool((largest(model, 0, 0 * center, scale, 0) > 1).any())
