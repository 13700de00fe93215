"""The plugin in SGLang's own loader, on the CPU: the scales of `calibrate` for checkpoints that have none, and again after updates.

    pytest python/tests/lanes/lane_sglang_plugin.py

needs SGLang 0.5.23 (without its kernels) and this package installed, since SGLang finds the plugin by its entry point.
"""

import importlib.util
import shutil

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)

import engine_sglang  # noqa: E402
import models  # noqa: E402

import sigmascale  # noqa: E402
from sigmascale._loaded import up_to_bf16  # noqa: E402


def expected(folder):
    rows = sigmascale.calibrate(folder)["layers"]
    return [{operand: up_to_bf16(max(row[f"{operand}_descale"])) for operand in "kv"} for row in rows]


def in_order(found):
    return [scales for _, scales in sorted(found.items())]


# Qwen3 has no scales in SGLang but these.
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma3_text", "mixtral", "phi3"])
def test_a_bare_checkpoint_has_the_scales_of_calibrate(family, tmp_path):
    model = models.write(family, tmp_path / family)
    found, _ = engine_sglang.load(model)
    assert in_order(found) == expected(model)


def test_an_update_has_the_scales_of_its_weights(tmp_path):
    from safetensors.torch import load_file, save_file

    model, other = models.write("qwen2", tmp_path / "qwen2"), tmp_path / "other"
    shutil.copytree(model, other)
    weights = load_file(model / "model.safetensors")
    weights = {name: tensor * (2 if "k_proj.weight" in name else 1) for name, tensor in weights.items()}
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    before, after = engine_sglang.load(model, other)[0]
    assert in_order(before) == expected(model) != expected(other) == in_order(after)


def test_q_is_cast_at_one(tmp_path):
    from safetensors.torch import load_file, save_file

    model = models.write("llama", tmp_path / "llama")
    weights = load_file(model / "model.safetensors")
    weights = {name: tensor * (100 if "q_proj.weight" in name else 1) for name, tensor in weights.items()}
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    found, log = engine_sglang.load(model)
    assert in_order(found) == expected(model) and "SGLang casts q at 1.0" in log


def test_it_can_be_turned_off(tmp_path):
    found, _ = engine_sglang.load(models.write("llama", tmp_path / "llama"), plugin=False)
    assert in_order(found) == [{"k": None, "v": None}] * 2
