"""Exports through SGLang's own loader, on the CPU: every scale of k and v that its attention layers would be given.

    pytest python/tests/lanes/lane_sglang.py

needs SGLang 0.5.23 (without its kernels), transformers and this package. Each model is loaded in a process of its own.
"""

import importlib.util
import pathlib

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)

import engine_sglang  # noqa: E402
import models  # noqa: E402

import sigmascale  # noqa: E402

FAMILIES = ["llama", "gpt2", "qwen2", "gemma3_text", "mixtral", "phi3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_scale_arrives(family, tmp_path):
    model = models.write(family, tmp_path / family)
    sigmascale.export(model, tmp_path / "out", "sglang")
    found, _ = engine_sglang.load(tmp_path / "out", plugin=False)
    audit = sigmascale.verify(pathlib.Path(tmp_path / "out"), "sglang")
    assert audit["safe"] and sorted(found) == [layer["layer"] for layer in audit["layers"]]
    for layer in audit["layers"]:
        for operand in "kv":
            (entry,) = layer[operand]
            models.within([found[layer["layer"]][operand]], [entry["needed"]], f"layer {layer['layer']} {operand}")
