"""Biases of values behind attention: the same model in float64, and one whose values have no bias."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import sigmascale  # noqa: E402
import sigmascale.torch as fp8  # noqa: E402

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "vocab_size": 50, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0}),
    "gpt_neox": ("GPTNeoX", {"rotary_pct": 0.5}),
    "granite": ("Granite", {"attention_bias": True}),
    "llama": ("Llama", {"attention_bias": True}),
    "phi": ("Phi", {}),
    "starcoder2": ("Starcoder2", {"use_bias": True}),
}


def made(family, options):
    torch.manual_seed(0)
    sizes = {name: value for name, value in SIZES.items() if family not in ("GPT2", "GPTNeoX") or not name.startswith("num_key")}
    kind = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    model = getattr(transformers, kind)(getattr(transformers, f"{family}Config")(**sizes | options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
            elif "attn" in name or "attention" in name:
                parameter.normal_(std=0.2)
    return model


def values(model, tokens):
    return model(tokens, use_cache=True).past_key_values.layers[1].values


@pytest.mark.parametrize("name", MODELS)
def test_the_model_computes_the_same_without_biases_of_values(name):
    model = made(*MODELS[name]).double()
    tokens = torch.arange(20)[None] % 50
    with torch.no_grad():
        before, cached = model(tokens).logits, values(model, tokens)
        assert fp8.fold_values(model) == 2
        after, left = model(tokens).logits, values(model, tokens)
    assert float((after - before).abs().max()) < 1e-12 * float(before.abs().max())
    gone = cached - left
    assert float((gone - gone[:, :, :1]).abs().max()) < 1e-12 and float(gone.abs().max()) > 0.5, "one constant of all tokens"
    assert all(not layer.v_bias[_rows(layer)].any() for layer in fp8.find_layers(model))
    assert all(layer.k_bias.any() for layer in fp8.find_layers(model)), "others stay"
    with pytest.raises(sigmascale.UnsupportedError, match="nothing to fold"):
        fp8.fold_values(model)


def _rows(layer):
    d = layer.d_head
    return [row for start in layer.heads[2] for row in range(start, start + d)] if layer.heads else slice(None)


def test_scales_are_those_of_values_without_bias(tmp_path):
    model = made(*MODELS["llama"]).bfloat16()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.bias.mul_(20)
    model.save_pretrained(tmp_path / "before")
    fp8.fold_values(model)
    model.save_pretrained(tmp_path / "after")
    rows = [[row["v_descale"] for row in sigmascale.calibrate(tmp_path / name)["layers"]] for name in ("before", "after")]
    assert all(max(after) < 0.8 * max(before) for before, after in zip(*rows))
    exported = sigmascale.export(tmp_path / "after", tmp_path / "served", "vllm")
    assert exported["folder"] == str(tmp_path / "served")


def test_what_is_not_exact_is_refused_and_left():
    cases = [
        (made("Qwen2", {}), "knows gpt2"),
        (made("Llama", {}), "nothing to fold"),
        (made("Starcoder2", {"use_bias": True}), "o_proj has no bias"),
    ]
    cases[2][0].model.layers[1].self_attn.o_proj.bias = None
    for model, why in cases:
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(sigmascale.UnsupportedError, match=why):
            fp8.fold_values(model)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
