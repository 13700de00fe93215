"""Checkpoint folders with scales of an FP8 cache, as tools write them and as they should not be: families, names, producers,
one scale a tensor and one a head, exclusions. What an engine's own loader makes of each is the truth that `verify` is compared
with."""

import itertools
import json
import pathlib
import shutil
from dataclasses import dataclass

import models
import torch
from models import EXPERTS, LATENT, SIZES, without

# SGLang splits some fused projections evenly.
EQUAL = SIZES | {"num_key_value_heads": SIZES["num_attention_heads"]}
# Beside those of `models`.
MORE = {
    "mistral": lambda t: t.MistralConfig(**SIZES),
    "gemma": lambda t: t.GemmaConfig(**SIZES, head_dim=16),
    # SGLang reads `hidden_act`.
    "gemma2": lambda t: t.Gemma2Config(**SIZES, head_dim=16, hidden_act="gelu_pytorch_tanh"),
    "qwen2_moe": lambda t: t.Qwen2MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64
    ),
    "qwen3_moe": lambda t: t.Qwen3MoeConfig(**SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64),
    "phi": lambda t: t.PhiConfig(**EQUAL),
    "starcoder2": lambda t: t.Starcoder2Config(**SIZES),
    "olmo": lambda t: t.OlmoConfig(**EQUAL),
    "olmoe": lambda t: t.OlmoeConfig(**EQUAL, num_experts=4, num_experts_per_tok=2),
    "granite": lambda t: t.GraniteConfig(**SIZES),
    "granitemoe": lambda t: t.GraniteMoeConfig(**SIZES, **EXPERTS),
    "glm4": lambda t: t.Glm4Config(**SIZES, head_dim=16, pad_token_id=0),
    "stablelm": lambda t: t.StableLmConfig(**SIZES),
    "cohere": lambda t: t.CohereConfig(**SIZES),
    "cohere2": lambda t: t.Cohere2Config(**SIZES),
    "nemotron": lambda t: t.NemotronConfig(**SIZES),
    "opt": lambda t: t.OPTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, ffn_dim=128, vocab_size=256, word_embed_proj_dim=64,
        max_position_embeddings=256,
    ),
    "gptj": lambda t: t.GPTJConfig(n_embd=64, n_layer=2, n_head=4, vocab_size=256, n_positions=256, rotary_dim=8),
    "gpt_bigcode": lambda t: t.GPTBigCodeConfig(n_embd=64, n_layer=2, n_head=4, vocab_size=256, n_positions=256),
    "ernie4_5": lambda t: t.Ernie4_5Config(**SIZES, head_dim=16),
    "exaone4": lambda t: t.Exaone4Config(**SIZES, sliding_window=64, sliding_window_pattern=2),
    "hunyuan_v1_dense": lambda t: t.HunYuanDenseV1Config(**SIZES, head_dim=16, use_qk_norm=True),
    "seed_oss": lambda t: t.SeedOssConfig(**SIZES, head_dim=16),
    "smollm3": lambda t: t.SmolLM3Config(**SIZES, pad_token_id=0),
    "arcee": lambda t: t.ArceeConfig(**SIZES),
    "apertus": lambda t: t.ApertusConfig(**SIZES),
    "persimmon": lambda t: t.PersimmonConfig(**without("num_key_value_heads")),
    "phimoe": lambda t: t.PhimoeConfig(**SIZES, **EXPERTS),
    "lfm2": lambda t: t.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
    "llama4_text": lambda t: t.Llama4TextConfig(
        **SIZES, head_dim=16, intermediate_size_mlp=128, num_local_experts=2, num_experts_per_tok=1,
        interleave_moe_layer_step=99, moe_layers=[],
    ),
    "gemma4_text": lambda t: t.Gemma4TextConfig(
        **(SIZES | {"num_hidden_layers": 6}), head_dim=16, global_head_dim=32, sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 3, num_kv_shared_layers=2, hidden_size_per_layer_input=0,
    ),
    "qwen3_5_text": lambda t: t.Qwen3_5TextConfig(
        **SIZES, head_dim=16, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    ),
    "qwen3_next": lambda t: t.Qwen3NextConfig(
        **SIZES, head_dim=16, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=64, shared_expert_intermediate_size=64,
    ),
    "olmo2": lambda t: t.Olmo2Config(**SIZES),
    "olmo3": lambda t: t.Olmo3Config(**SIZES),
    "helium": lambda t: t.HeliumConfig(**SIZES, head_dim=16),
    "bitnet": lambda t: t.BitNetConfig(**SIZES),
    "cwm": lambda t: t.CwmConfig(**SIZES, head_dim=16),
    "vaultgemma": lambda t: t.VaultGemmaConfig(**SIZES, head_dim=16),
    "nanochat": lambda t: t.NanoChatConfig(**SIZES),
    "minimax_m2": lambda t: t.MiniMaxM2Config(
        **SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2, rotary_dim=16, scoring_func="sigmoid"
    ),
}
FAMILIES = models.CONFIGS | MORE | LATENT

# Names behind the attention module, by operand.
STYLES = {
    "module": ["q_scale", "k_scale", "v_scale"],
    "inner": ["attn.q_scale", "attn.k_scale", "attn.v_scale"],
    "projection": ["k_proj.k_scale", "v_proj.v_scale"],
    "one": ["kv_scale"],
    "output": ["q_proj.output_scale", "k_proj.output_scale", "v_proj.output_scale"],
    "cache": ["q.scale", "k_cache.scale", "v_cache.scale"],
    "fused": ["qkv_proj.k_scale", "qkv_proj.v_scale"],
    "crossed": ["k_scale", "v_scale", "v_proj.k_scale", "k_proj.v_scale"],
    "keys": ["k_scale"],
    "first layer": ["q_scale", "k_scale", "v_scale"],
    "buffers": ["attn._k_scale", "attn._v_scale"],
}


def scheme(strategy="tensor", **other):
    return {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False} | other


def compressed(strategy="tensor", **other):
    return {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme(strategy, **other)}


def modelopt(algorithm, **other):
    """Nothing is quantized but the cache: every module is excluded."""
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["*"]} | other


def quark(*exclude):
    tensor = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
    plain = {"weight": tensor, "input_tensors": tensor, "output_tensors": None, "bias": None}
    return {
        "quant_method": "quark",
        "exclude": ["lm_head", "re:.*(proj|c_attn|c_proj|fc|dense|query_key_value|gate|mlp|moe|expert).*", *exclude],
        "global_quant_config": plain,
        "layer_type_quant_config": {},
        "layer_quant_config": {name: plain | {"output_tensors": tensor} for name in ("*k_proj", "*v_proj")},
        "export": {"kv_cache_group": ["*k_proj", "*v_proj"], "pack_method": "reorder"},
    }


FP8_CACHE = {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}
ASIDE = {"producer": {"name": "modelopt", "version": "0.29.0"}}
# What the config, or `hf_quant_config.json`, says.
PRODUCERS = {
    "llm-compressor": compressed(),
    "llm-compressor per head": compressed("attn_head"),
    "llm-compressor without a scheme": {"quant_method": "compressed-tensors", "config_groups": {}, "ignore": []},
    "llm-compressor asymmetric": compressed(symmetric=False),
    "modelopt FP8": modelopt("FP8", **FP8_CACHE),
    "modelopt FP8 without a scheme": modelopt("FP8"),
    "modelopt FP8_PB_WO": modelopt("FP8_PB_WO", **FP8_CACHE),
    "modelopt FP8_PER_CHANNEL_PER_TOKEN": modelopt("FP8_PER_CHANNEL_PER_TOKEN", **FP8_CACHE),
    "modelopt NVFP4": modelopt("NVFP4", group_size=16, **FP8_CACHE),
    "modelopt lower case": modelopt("fp8", **FP8_CACHE),
    "modelopt aside": None,
    "quark": quark(),
    "quark without attention": quark("re:.*self_attn.*"),
    "quark without one layer": quark("model.layers.1.self_attn.attn"),
    "none": None,
}


@dataclass(frozen=True)
class Folder:
    """One folder."""

    family: str
    producer: str
    style: str
    heads: bool = False
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = ()

    @property
    def name(self):
        kind = str(self.dtype).removeprefix("torch.")
        words = (self.family, self.producer, self.style, "heads" if self.heads else "tensor", kind, "x".join(map(str, self.shape)))
        return "-".join(word.replace(" ", "_") for word in words if word)


def control(family):
    """A family without scales and without a quantization: what does not start so has another reason than scales."""
    return Folder(family, "none", "nothing")


def folders():
    """The same ones in every run."""
    every = [family for family in FAMILIES]
    few = ["llama", "qwen2", "gemma3_text", "gpt2", "qwen3"]
    chosen = {}

    def add(*fields, **named):
        one = Folder(*fields, **named)
        chosen.setdefault(one.name, one)

    for family, style in itertools.product(every, STYLES):
        add(family, "llm-compressor", style)
    for family, producer in itertools.product(every, PRODUCERS):
        add(family, producer, "module")
        add(family, producer, "inner")
    for family, producer, style in itertools.product(few, PRODUCERS, ["module", "projection", "output", "one"]):
        add(family, producer, style)
    for producer, style in itertools.product(PRODUCERS, STYLES):
        add("llama", producer, style)
    for family, producer, heads in itertools.product(few, ["llm-compressor", "llm-compressor per head"], [False, True]):
        add(family, producer, "module", heads=heads)
        add(family, producer, "keys", heads=heads)
    for dtype, shape in itertools.product([torch.bfloat16, torch.float16, torch.float32, torch.float64], [(), (1,), (1, 1)]):
        for producer in ["llm-compressor", "modelopt FP8", "quark"]:
            add("llama", producer, "module", dtype=dtype, shape=shape)
    return list(chosen.values())


def base(family, place):
    """The model of a family, written once."""
    folder = pathlib.Path(place) / f"base-{family}"
    if not (folder / "model.safetensors").exists():
        torch.manual_seed(0)
        import transformers

        config = FAMILIES[family](transformers)
        config.dtype = torch.bfloat16
        models._save(transformers.AutoModelForCausalLM.from_config(config), folder)
    return folder


def modules(weights):
    """The attention modules, by the number of their layer."""
    found = {}
    for name in weights:
        parts = name.split(".")
        for at, part in enumerate(parts):
            if part.isdigit() and at + 2 < len(parts):
                inner = parts[at + 1]
                projections = ("q_proj", "qkv_proj", "c_attn", "query_key_value", "q_a_proj", "kv_a_proj_with_mqa")
                if parts[at + 2] in projections and ("attn" in inner or inner in ("mixer", "self_attention", "attention")):
                    found.setdefault(int(part), ".".join(parts[: at + 2]))
                break
    return dict(sorted(found.items()))


def write(one, place):
    """Writes a folder; gives it."""
    from safetensors.torch import load_file, save_file

    source = base(one.family, place)
    folder = pathlib.Path(place) / one.name
    if folder.exists():
        return folder
    folder.mkdir()
    for file in source.iterdir():
        if file.name != "model.safetensors":
            shutil.copy(file, folder)
    weights = load_file(source / "model.safetensors")
    for number, (layer, module) in enumerate(modules(weights).items()):
        if one.style == "first layer" and number > 0:
            break
        for place_, name in enumerate(STYLES.get(one.style, [])):
            value = 0.0371 * (layer + 1) * (place_ + 1)
            last = name.rsplit(".", 1)[-1].lstrip("_")
            entries = {"q": 4}.get(last[0], 2) if one.heads else 1
            values = torch.tensor([value * (1 + head / 8) for head in range(entries)])
            shape = (entries, 1, 1) if one.heads else one.shape
            weights[f"{module}.{name}"] = values.reshape(shape).to(one.dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    said = PRODUCERS[one.producer]
    if said is not None:
        config["quantization_config"] = said
    (folder / "config.json").write_text(json.dumps(config))
    if one.producer == "modelopt aside":
        settings = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["*"]}
        (folder / "hf_quant_config.json").write_text(json.dumps(ASIDE | {"quantization": settings}))
    return folder
