"""Centered keys in SGLang on the CPU: what its attention passes on, with its own loader and modules.

    pytest python/tests/lanes/lane_sglang_center.py

needs SGLang 0.5.23 (without its kernels) and this package installed, since SGLang finds the plugin by its entry point.
"""

import importlib.util

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)

import engine_sglang  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

import sigmascale  # noqa: E402
from sigmascale._loaded import up_to_bf16  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two layers whose keys have a large bias in pairs that turn little, and one without."""
    out = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        hidden_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=512, vocab_size=512,
        max_position_embeddings=512,
    )
    model = transformers.Qwen2ForCausalLM(config).bfloat16()
    for layer in model.model.layers[:2]:
        layer.self_attn.k_proj.bias.data.view(2, 2, 32)[:, :, 20:] = 150 * torch.randn(2, 2, 12)
    model.save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def plain(folder):
    return engine_sglang.keys(folder, "off")


def test_keys_reach_the_cache_without_their_center(folder, plain):
    scales, seen, log = engine_sglang.keys(folder)
    own = sigmascale.centers(folder)
    assert own["hash"] in log and "in 2 of 3 layers" in log
    for layer in own["layers"]:
        number = layer["layer"]
        assert torch.equal(torch.tensor(seen[number][0]), -torch.tensor(layer["k"]))
        assert scales[number]["k"] == up_to_bf16(max(layer["k_scale"]))
    assert not torch.tensor(seen[2]).any()
    assert all(scales[number]["k"] < 0.8 * plain[0][number]["k"] for number in (0, 1))
    assert [row["v"] for row in scales.values()] == [row["v"] for row in plain[0].values()]


def test_keys_stay_as_they_are_when_asked(folder, plain):
    scales, seen, log = plain
    assert not any(torch.tensor(keys).any() for keys in seen.values()) and "constant part" not in log
    rows = sigmascale.calibrate(folder)["layers"]
    assert [row["k"] for _, row in sorted(scales.items())] == [up_to_bf16(max(row["k_descale"])) for row in rows]
