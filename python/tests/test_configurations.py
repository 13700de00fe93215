"""Configurations of models of 2026, as the classes of Hugging Face transformers 5.17 give them, and of vLLM 0.33 where transformers
has none: each is read, or refused with a reason. What a class has by default is the model that its authors publish.

``pytest -s`` prints a row each.
"""

import json

import pytest

transformers = pytest.importorskip("transformers")

import sigmascale  # noqa: E402

# Layers with attention, query heads and width of each, where they differ between layers a set.
READ = {
    "afmoe": {},
    "apertus": {},
    "axk1": {},
    "cohere2_moe": {},
    "deepseek_v32": {},
    "dots1": {},
    "exaone4_5": {},
    "exaone_moe": {},
    "gemma4": {},
    "gemma4_text": {},
    "glm4_moe_lite": {},
    "glm_moe_dsa": {},
    "gpt_oss": {},
    "granite_swa": {},
    "granitemoe_swa": {},
    "hy_v3": {},
    "hy_v4": {},
    "hyperclovax": {},
    "jais2": {},
    "kimi_k25": {},
    "kimi_linear": {},
    "laguna": {},
    "lfm2_moe": {},
    "longcat_flash": {},
    "mellum": {},
    "minimax_m2": {},
    "minimax_m3_vl": {},
    "ministral3": {},
    "mistral4": {},
    "nanochat": {},
    "nemotron_h": {},
    "olmo_hybrid": {},
    "qwen3_5": {},
    "qwen3_5_moe": {},
    "qwen4_exp": {},
    "solar_open": {},
    # Of the published model: the class has full layers alone by default.
    "step3p7": {
        "text_config": {
            "num_hidden_layers": 4,
            "num_nextn_predict_layers": 1,
            "num_attention_groups": 8,
            "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
            "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 96},
            "rope_theta": [5e6, 1e4, 1e4, 1e4, 5e6],
            "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 0.5],
            "sliding_window": 512,
        }
    },
    "vaultgemma": {},
    "youtu": {},
}
# vLLM's own classes (`transformers_utils/configs`): what they read.
VLLM = {
    "kimi_k3": {
        "text_config": {
            "model_type": "kimi_linear",
            "hidden_size": 4096,
            "num_hidden_layers": 8,
            "num_attention_heads": 32,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "mla_use_nope": True,
            "mla_use_output_gate": True,
            "attn_res_block_size": 4,
            "linear_attn_config": {"kda_layers": [1, 2, 3, 5, 6, 7], "full_attn_layers": [4, 8]},
        }
    },
}
REFUSED = {
    "axk2": "the query latent without its norm",
    "deepseek_v4": "gated sums of rows",
    "glm5_next": "a latent alone, without the shared key",
    "mimo_v2_flash": "narrower than its keys",
    "gemma4_assistant": "the model that it drafts for",
    "bloom": "ALiBi",
}


def written(model_type, settings, folder):
    """The config as transformers saves it."""
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no class for {model_type}")
    transformers.CONFIG_MAPPING[model_type](**settings).save_pretrained(folder)
    return folder / "config.json"


def read(file):
    """The model's shape and its constants, which need no weights."""
    profile = sigmascale.calibrate(file)
    assert 0 < profile["c_star"]["c_star"] < 1
    print(f"\n{json.dumps(profile['model'])}")
    return profile["model"]


@pytest.mark.parametrize("model_type", READ)
def test_a_configuration_is_read(model_type, tmp_path):
    config = written(model_type, READ[model_type], tmp_path)
    said = json.loads(config.read_text())
    said = said.get("text_config", said)
    model = read(config)
    assert model["d_model"] == said["hidden_size"] and model["layers"] >= 1


@pytest.mark.parametrize("model_type", VLLM)
def test_a_configuration_of_vllm_is_read(model_type, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": model_type} | VLLM[model_type]))
    assert read(file)["layers"] == 2


def test_heads_differ_between_the_layers_of_step(tmp_path):
    model = read(written("step3p7", READ["step3p7"], tmp_path))
    assert model["n_q_heads"] == [64, 96, 96, 96] and model["n_kv_heads"] == 8


def test_full_layers_of_gemma_are_wider(tmp_path):
    assert set(read(written("gemma4_text", {}, tmp_path))["d_head"]) == {256, 512}


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_configuration_is_refused_with_a_reason(model_type, tmp_path):
    with pytest.raises(sigmascale.UnsupportedError, match=REFUSED[model_type]):
        sigmascale.calibrate(written(model_type, {}, tmp_path))
