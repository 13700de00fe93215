"""Exports through SGLang's own loader, on the CPU: every scale of k and v that its attention layers would be given.

    pytest python/tests/lanes/lane_sglang.py

needs SGLang 0.5.23 (without its kernels), transformers and this package. Each model is loaded in a process of its own.
"""

import importlib.util

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)

import engine_sglang  # noqa: E402
import models  # noqa: E402

import sigmascale  # noqa: E402


def check(model, out):
    """Exports a model and compares what SGLang resolves with what its weights need."""
    said = sigmascale.export(model, out, "sglang")
    found, _ = engine_sglang.load(out, plugin=False)
    audit = sigmascale.verify(out, "sglang")
    assert said["safe"] and audit["safe"] and sorted(found) == [layer["layer"] for layer in audit["layers"]]
    # q has a certificate in place of a scale.
    assert all(layer["q"]["cast_at_one"] and layer["q"]["needed"][0] <= 1.0 for layer in said["layers"])
    for layer in audit["layers"]:
        for operand in "kv":
            (entry,) = layer[operand]
            models.within([found[layer["layer"]][operand]], [entry["needed"]], f"layer {layer['layer']} {operand}")


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "gemma3_text", "mixtral", "phi3"])
def test_every_scale_arrives(family, tmp_path):
    check(models.write(family, tmp_path / family), tmp_path / "out")


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2"])
def test_the_scales_of_a_trained_model_arrive(name, tmp_path):
    check(models.trained(name), tmp_path / "out")


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors", "modelopt"])
def test_scales_beside_fp8_weights_arrive(method, tmp_path, monkeypatch):
    monkeypatch.setitem(models.SIZES, "hidden_size", 256)
    monkeypatch.setitem(models.SIZES, "intermediate_size", 256)
    check(models.quantized(models.write("llama", tmp_path / "model"), method), tmp_path / "out")


# SGLang builds their attention without scales, or writes their cache without one.
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", *models.LATENT])
def test_what_has_no_scales_has_a_certificate_at_one(family, tmp_path):
    model = models.write(family, tmp_path / family)
    said = sigmascale.export(model, tmp_path / "out", "sglang")
    assert said["scales_file"] is None and said["safe"]
    assert all(layer[operand]["cast_at_one"] for layer in said["layers"] for operand in "qkv")
    # gpt-oss asks for a backend with sinks.
    backend = "triton" if family == "gpt_oss" else "torch_native"
    found, _ = engine_sglang.load(tmp_path / "out", plugin=False, backend=backend)
    assert len(found) == len(said["layers"])
    assert all(scales == {"k": None, "v": None} for scales in found.values())
