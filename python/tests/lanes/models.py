"""Small models of the families that the engines' lanes load, written by Hugging Face transformers."""

import json
import os
import pathlib

import pytest
import torch
import transformers

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 256,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def without(*keys):
    """The sizes without some that a class does not have."""
    return {key: value for key, value in SIZES.items() if key not in keys}


CONFIGS = {
    "llama": lambda t: t.LlamaConfig(**SIZES),
    "gpt2": lambda t: t.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=256, n_positions=256),
    "qwen2": lambda t: t.Qwen2Config(**SIZES),
    "qwen3": lambda t: t.Qwen3Config(**SIZES, head_dim=16),
    "gemma3_text": lambda t: t.Gemma3TextConfig(**SIZES, head_dim=16),
    "mixtral": lambda t: t.MixtralConfig(**SIZES, **EXPERTS),
    "gpt_oss": lambda t: t.GptOssConfig(**SIZES, head_dim=16, **EXPERTS),
    "phi3": lambda t: t.Phi3Config(**SIZES, pad_token_id=0),
    "falcon": lambda t: t.FalconConfig(
        **without("num_key_value_heads", "intermediate_size", "max_position_embeddings"),
        new_decoder_architecture=True,
        num_kv_heads=2,
    ),
    "gpt_neox": lambda t: t.GPTNeoXConfig(**without("num_key_value_heads")),
    "nemotron_h": lambda t: t.NemotronHConfig(
        **without("num_hidden_layers"),
        head_dim=16,
        layers_block_type=["mamba", "attention"],
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=16,
    ),
    "hy_v3": lambda t: t.HYV3Config(
        **SIZES,
        **EXPERTS,
        head_dim=16,
        num_experts=4,
        moe_intermediate_size=64,
        expert_hidden_dim=64,
        route_norm=True,
        qk_norm=True,
        first_k_dense_replace=1,
    ),
    "jamba": lambda t: t.JambaConfig(
        **SIZES, attn_layer_period=2, attn_layer_offset=1, num_experts=4, num_experts_per_tok=2
    ),
}

# Latent attention; the CPU's kernels take multiples of 32.
LATENT_SIZES = {
    **SIZES,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 2,
    "moe_layer_freq": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    # SGLang's CPU build rotates these models with YaRN only.
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
LATENT = {
    "deepseek_v2": lambda t: t.DeepseekV2Config(**LATENT_SIZES, q_lora_rank=None, head_dim=32),
    "deepseek_v3": lambda t: t.DeepseekV3Config(**LATENT_SIZES, q_lora_rank=96, n_group=1, topk_group=1),
}


def write(family, folder):
    """A model of a family with random weights."""
    torch.manual_seed(0)
    config = (CONFIGS | LATENT)[family](transformers)
    config.dtype = torch.bfloat16
    _save(transformers.AutoModelForCausalLM.from_config(config), folder)
    return pathlib.Path(folder)


def _save(model, folder):
    """In BF16, with projections of a size that makes scales differ."""
    model.to(torch.bfloat16)
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and "embed" not in name:
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(folder)


def trained(name):
    """A trained checkpoint: that of this repository, or another in the folder `SIGMASCALE_CHECKPOINTS`."""
    own = pathlib.Path(__file__).resolve().parents[3] / "data" / name
    others = os.environ.get("SIGMASCALE_CHECKPOINTS")
    if own.is_dir():
        return own
    if others is None:
        pytest.skip(f"{name} is not in this repository: SIGMASCALE_CHECKPOINTS names its folder")
    return pathlib.Path(others) / name


def within(used, needed, place):
    """Whether scales cover what is needed, and no more than 1 % over it; 1.0 is the loaders' default."""
    assert len(used) == len(needed), f"{place}: {len(used)} scales, expected {len(needed)}"
    for one, least in zip(used, needed):
        assert least <= one <= least * 1.01 and one != 1.0, f"{place}: {one} for a bound of {least}"


def skip_without_kernel(method):
    """vLLM's CPU build refuses block FP8 weights before it loads them where the processor has no AMX."""
    if method == "fp8" and "amx_tile" not in pathlib.Path("/proc/cpuinfo").read_text():
        pytest.skip("block FP8 weights in vLLM's CPU build need a processor with AMX")


def quantized(folder, method):
    """The weights of the projections in E4M3, with the config that says so."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj.weight") and method != "cache alone"]:
        if method == "fp8":
            rows, columns = weights[name].shape
            weights[name + "_scale_inv"] = torch.full((-(-rows // 128), -(-columns // 128)), 0.01)
        elif method == "modelopt":
            weights[name + "_scale"] = torch.tensor(0.01)
            weights[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.02)
        elif method == "quark":
            weights[name + "_scale"] = torch.full((weights[name].shape[0],), 0.01)
        else:
            weights[name + "_scale"] = torch.full((weights[name].shape[0], 1), 0.01)
        weights[name] = (weights[name].float() / 0.01).clamp(-448, 448).to(torch.float8_e4m3fn)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    arguments = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": arguments | {"strategy": "channel", "dynamic": False},
        "input_activations": arguments | {"strategy": "token", "dynamic": True},
    }
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    tensor = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
    channels = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0, "is_dynamic": False}
    inputs = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 1, "is_dynamic": True}
    plain = {"weight": channels, "input_tensors": inputs, "output_tensors": None, "bias": None}
    said = {
        "quark": {
            "quant_method": "quark",
            "exclude": ["lm_head"],
            "global_quant_config": plain,
            "layer_type_quant_config": {},
            "layer_quant_config": {name: plain | {"output_tensors": tensor} for name in ("*k_proj", "*v_proj")},
            "export": {"kv_cache_group": ["*k_proj", "*v_proj"], "pack_method": "reorder"},
        },
        "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"},
        "compressed-tensors": {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        },
        "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        "cache alone": {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": cache},
    }[method]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return folder


def with_scales(folder, names):
    """Adds scales of the cache under the names of another tool: f32 scalars, other ones in each layer."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    for layer in range(SIZES["num_hidden_layers"]):
        for place, name in enumerate(names):
            weights[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(0.0371 * (layer + 1) * (place + 1))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_multimodal(folder):
    """Gemma 3 with its vision tower, under the names of its published checkpoints."""
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    text = SIZES | {"head_dim": 16, "vocab_size": 300}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=299
    )
    config.dtype = torch.bfloat16
    _save(transformers.Gemma3ForConditionalGeneration(config), folder)
    file = pathlib.Path(folder) / "model.safetensors"
    own = lambda name: (
        name if "vision_model" in name else name.replace("vision_tower.", "vision_tower.vision_model.", 1)
    )
    save_file({own(name): tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return pathlib.Path(folder)
