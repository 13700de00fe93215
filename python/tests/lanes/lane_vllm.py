"""Exports through vLLM's own loader, on the CPU: every scale that its attention layers would be given.

    SIGMASCALE_PLUGIN=0 pytest python/tests/lanes/lane_vllm.py

needs vLLM 0.32 (its CPU build is enough), transformers and this package. No forward pass is made: a kernel that does
not read a scale is not found here. One engine per process: run the lanes of two engines apart.
"""

import os

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
# What is tested are the scales of files.
os.environ["SIGMASCALE_PLUGIN"] = "0"

import engine_vllm  # noqa: E402
import models  # noqa: E402
import numpy  # noqa: E402

import sigmascale  # noqa: E402


def loaded(folder):
    """``{layer: {operand: [scales]}}`` of a folder, as the engine resolves it."""
    _, model = engine_vllm.load(folder)
    found = {}
    for layer in engine_vllm.attention(model):
        assert layer.kv_cache_dtype == "fp8"
        found[engine_vllm.number(layer)] = scales = engine_vllm.scales(layer)
        for operand, values in scales.items():
            assert getattr(layer, f"_{operand}_scale_float") == max(values), "the host's copy differs"
    return found


def check(folder, said):
    found = loaded(folder)
    assert sorted(found) == [layer["layer"] for layer in said["layers"]]
    audit = sigmascale.verify(folder, "vllm")
    assert audit["safe"]
    for layer in audit["layers"]:
        for operand in "qkv":
            needed = [entry["needed"] for entry in layer[operand]]
            place = f"layer {layer['layer']} {operand}"
            models.within(found[layer["layer"]][operand], needed, place)
            # The audit says what the loader does.
            assert found[layer["layer"]][operand] == [numpy.float32(entry["scale"]) for entry in layer[operand]]


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2"])
def test_the_scales_of_a_trained_model_arrive(name, per_head, tmp_path):
    check(tmp_path / "out", sigmascale.export(models.trained(name), tmp_path / "out", "vllm", per_head=per_head))


@pytest.mark.parametrize("family", [family for family in models.CONFIGS if family != "jamba"])
def test_every_scale_arrives(family, tmp_path):
    model = models.write(family, tmp_path / family)
    check(tmp_path / "out", sigmascale.export(model, tmp_path / "out", "vllm"))


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "qwen3", "gemma3_text", "mixtral", "gpt_oss", "phi3"])
def test_per_head_scales_arrive(family, tmp_path):
    model = models.write(family, tmp_path / family)
    check(tmp_path / "out", sigmascale.export(model, tmp_path / "out", "vllm", per_head=True))


@pytest.mark.parametrize(
    ("method", "per_head"),
    [("fp8", False), ("compressed-tensors", False), ("compressed-tensors", True), ("modelopt", False)],
)
def test_scales_beside_fp8_weights_arrive(method, per_head, tmp_path, monkeypatch):
    models.skip_without_kernel(method)
    monkeypatch.setitem(models.SIZES, "hidden_size", 256)
    monkeypatch.setitem(models.SIZES, "intermediate_size", 256)
    model = models.quantized(models.write("llama", tmp_path / "model"), method)
    check(tmp_path / "out", sigmascale.export(model, tmp_path / "out", "vllm", per_head=per_head))


def test_the_scales_of_a_multimodal_model_arrive(tmp_path):
    model = models.write_multimodal(tmp_path / "model")
    check(tmp_path / "out", sigmascale.export(model, tmp_path / "out", "vllm"))


# Names that other tools write: what `verify` says of them is what the loader makes of them.
@pytest.mark.parametrize(
    ("family", "method", "names"),
    [
        ("llama", "quark", ["k_proj.output_scale", "v_proj.output_scale"]),
        ("llama", "quark", ["q_proj.output_scale", "k_proj.output_scale", "v_proj.output_scale"]),
        ("llama", "modelopt", ["k_proj.k_scale", "v_proj.v_scale"]),
        ("llama", "modelopt", ["kv_scale"]),
        ("llama", "compressed-tensors", ["k_scale", "v_scale"]),
        ("hy_v3", "cache alone", ["q.scale", "k_cache.scale", "v_cache.scale"]),
    ],
)
def test_the_audit_of_other_tools_says_what_the_loader_does(family, method, names, tmp_path, monkeypatch):
    monkeypatch.setitem(models.SIZES, "hidden_size", 256)
    monkeypatch.setitem(models.SIZES, "intermediate_size", 256)
    model = models.with_scales(models.quantized(models.write(family, tmp_path / "model"), method), names)
    found = loaded(model)
    for layer in sigmascale.verify(model, "vllm")["layers"]:
        for operand in "qkv":
            (entry,) = layer[operand]
            assert found[layer["layer"]][operand] == [numpy.float32(entry["scale"])], (layer["layer"], operand, entry)
    assert any(scale != 1.0 for layer in found.values() for scale in layer["k"])


# vLLM builds Jamba's attention, and all latent attention, without scales to load.
@pytest.mark.parametrize("family", [*models.LATENT, "jamba"])
def test_what_has_no_scales_has_a_certificate_at_one(family, tmp_path):
    model = models.write(family, tmp_path / family)
    said = sigmascale.export(model, tmp_path / "out", "vllm")
    assert said["scales_file"] is None and said["safe"]
    _, loaded = engine_vllm.load(tmp_path / "out")
    layers = engine_vllm.attention(loaded)
    assert len(layers) == len(said["layers"])
    assert all(engine_vllm.scales(layer) == {operand: [1.0] for operand in "qkv"} for layer in layers)
