"""Bounds against the classes of Hugging Face transformers: small models, attacked at their own attention call.

Each layer's input is free. Gradient ascent through the class's own norm, projections, rotation and QK-norm looks for
the inputs with the largest q, k, v and logits, and none may exceed the bounds of `calibrate`. What comes close shows
that the bounds are of this model. The same inputs then go through a BF16 forward, whose q, k and v the descales must
cover, too.

`pytest -s` prints a row per family: the largest q, k, v and logit over their bounds, and the largest of q, k and v in
BF16.
"""

import functools
import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import sigmascale  # noqa: E402

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What else classes are made of, where their defaults are those of a large model.
PARTS = {
    "num_local_experts": 2,
    "num_experts": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "zero_expert_num": 1,
    "shared_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "dense_intermediate_size": 64,
    "intermediate_size_mlp": 64,
    "ffn_dim": 64,
    "expert_ffn_hidden_size": 32,
    "ffn_hidden_size": 64,
    "first_k_dense_replace": 2,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_d_ssm": 128,
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "linear_head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 8,
    "index_block_size": 8,
    "block_size": 8,
}
STEPS, TOKENS, TRIES = 60, 8, 16


class Recorder:
    """Takes the place of the attention function."""

    calls, current = {}, None

    @classmethod
    def attention(cls, module, query, key, value, mask=None, scaling=None, **arguments):
        cls.calls[module] = query, key, value, scaling or query.shape[-1] ** -0.5
        group = query.shape[1] // key.shape[1]
        value = value.repeat_interleave(group, 1)
        length = query.shape[2]
        return value[:, :, :length].transpose(1, 2).contiguous(), None

    @classmethod
    def of_sdpa(cls, query, key, value, **arguments):
        return cls.attention(cls.current, query, key, value, scaling=arguments.get("scale"))[0].transpose(1, 2)

    @classmethod
    def of_gptj(cls, module, query, key, value, mask=None):
        return cls.attention(module, query, key, value, scaling=1.0 / float(module.scale_attn))[0].transpose(1, 2), None


transformers.AttentionInterface.register("recorded", Recorder.attention)
transformers.AttentionMaskInterface.register(
    "recorded", lambda batch_size, q_length, kv_length, **more: torch.zeros(batch_size, 1, q_length, kv_length)
)

HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
# What a family needs beside the sizes.
EXTRA = {
    "bailing_hybrid": LATENT
    | {
        "q_lora_rank": None,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "dense"],
    },
    "bamba": {"attn_layer_indices": [1]},
    "cohere2_moe": {"layer_types": ["sliding_attention", "full_attention"]},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
    },
    "gemma4_text": {
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    # Equal heads in all layers.
    "gemma4_unified_text": {"global_head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": LATENT
    | {"layer_types": ["full_attention", "full_attention"], "mlp_layer_types": ["dense", "dense"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["sliding_attention", "full_attention"]},
    "mellum": {"layer_types": ["sliding_attention", "full_attention"]},
    "minimax": HYBRID | {"rotary_dim": 8},
    "minimax_m2": {"rotary_dim": 8},
    "minimax_m3_vl_text": {"rotary_dim": 8, "layer_types": ["full_attention", "minimax_m3_sparse"]},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"]},
    "olmo_hybrid": HYBRID,
    "phi4_multimodal": {
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        | {"image_size": 28, "crop_size": 28},
        "audio_config": {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 2, "num_attention_heads": 2}
        | {"ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 32},
    },
    "step3p5": {
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "dense"],
        "num_sliding_attention_heads": 6,
        "rope_theta": [10000.0, 5000000.0],
        "partial_rotary_factors": [1.0, 0.5],
    },
    "qwen2_5_vl_text": AXES,
    "qwen2_vl_text": AXES,
    "qwen3_next": HYBRID,
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": HYBRID,
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "qwen_sparse_attention"],
        "hc_count": 3,
        "hc_lowrank": 16,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
}
# Latent attention, by sizes of its own.
for name in (
    "axk1",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "hy_v4",
    "minicpm3",
    "mistral4",
    "youtu",
):
    EXTRA[name] = LATENT
EXTRA["longcat_flash"] = LATENT | {"num_layers": 2, "num_experts_per_tok": 2}
# No class in transformers, or a wrapper of a text model that is in the list itself.
ABSENT = {"deci", "kimi_k2", "kimi_vl", "nemotron-nas", "openelm"}


def is_wrapper(model_type):
    if model_type not in transformers.CONFIG_MAPPING:
        return False
    return "text_config" in (getattr(transformers.CONFIG_MAPPING[model_type], "sub_configs", None) or {})


def known():
    """Every model type that has bounds."""
    command = [sys.executable, "-m", "sigmascale", "families", "--format", "json"]
    rows = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["families"]
    return [row["model_type"] for row in rows if "family" in row]


FAMILIES = [name for name in known() if name not in ABSENT and not is_wrapper(name)]
# Their attention reads the norm behind the layer before: only the input of the first is free.
POST_NORM = {"bert", "roberta", "xlm-roberta"}
# Their classes multiply q by the softmax scale, and call attention with a scale of 1.
SCALED = {"opt"}
# Their first layer reads the norm of the embeddings.
EMBEDDING_NORM = {"modernbert-decoder"}


def config_of(model_type, **more):
    """A small config; keys that its class does not have are left out."""
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no class for {model_type}")
    kind = transformers.CONFIG_MAPPING[model_type]
    known = set(kind.__dataclass_fields__) | set(kind.attribute_map)
    sizes = {key: value for key, value in (SIZES | PARTS).items() if key in known}
    return kind(**(sizes | EXTRA.get(model_type, {}) | more))


def random_model(config):
    torch.manual_seed(0)
    config._attn_implementation = {"falcon": "sdpa", "gptj": "eager"}.get(config.model_type, "recorded")
    if config.model_type == "step3p5":  # No automatic class makes the text model alone.
        from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

        model = Step3p7TextModel(config)
    else:
        try:
            model = transformers.AutoModelForCausalLM.from_config(config)
        except ValueError:
            model = transformers.AutoModel.from_config(config)
    model = model.eval().float()
    for module in model.modules():
        # These classes call no attention function of the interface.
        if type(module).__name__ == "FalconAttention":
            module.register_forward_pre_hook(lambda module, _: setattr(Recorder, "current", module))
        elif type(module).__name__ == "GPTJAttention":
            module._attn = functools.partial(Recorder.of_gptj, module)
    with torch.no_grad():
        for weight in model.parameters():
            values = weight + 0.3 * torch.randn_like(weight) if weight.ndim == 1 else 0.2 * torch.randn_like(weight)
            weight.copy_(values.bfloat16())
        for name, weight in model.named_parameters():
            # Gates that can open for all streams at once, as the bound has them.
            if name.endswith("hyper_connection.input_mix_weight_up.weight"):
                weight.abs_().mul_(8)
    return model


def free_inputs(model, modules):
    """Modules of layers, each with the one whose input is to be replaced."""
    found = {}
    lists = {name for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)}
    for name, module in model.named_modules():
        if module in modules:
            parts = name.split(".")
            layer = next(".".join(parts[:n]) for n in range(1, len(parts) + 1) if ".".join(parts[: n - 1]) in lists)
            found[module] = model.get_submodule(layer)
    return found


class Attack:
    """A model whose layers read inputs of their own."""

    def __init__(self, model, layers_are_free):
        self.model, self.inputs, self.modules = model, {}, None
        self.width = model.get_input_embeddings().weight.shape[-1]
        self.run(torch.randn(TRIES, TOKENS, self.width))
        self.modules = list(Recorder.calls)
        assert self.modules, "the class has its own attention"
        if layers_are_free:
            modules = self.modules[model.config.model_type in EMBEDDING_NORM :]
            for layer in set(free_inputs(model, modules).values()):
                layer.register_forward_pre_hook(self.replace, with_kwargs=True)

    def replace(self, layer, args, kwargs):
        given = args[0] if args else kwargs["hidden_states"]
        if layer not in self.inputs:
            self.inputs[layer] = torch.randn_like(given).requires_grad_(True)
        mine = self.inputs[layer].to(given.dtype)
        return (mine, *args[1:]) if args else (), kwargs if args else kwargs | {"hidden_states": mine}

    def run(self, embeds):
        Recorder.calls = {}
        self.model(inputs_embeds=embeds, use_cache=False)
        return [Recorder.calls[module] for module in self.modules or Recorder.calls]

    def largest(self):
        """The largest q, k, v and logits that ascent finds: a row of heads for each, by layer."""
        torch.manual_seed(1)
        self.embeds = embeds = torch.randn(TRIES, TOKENS, self.width, requires_grad=True)
        self.run(embeds)
        leaves = [embeds, *self.inputs.values()]
        best, optimizer = None, torch.optim.Adam(leaves, lr=0.1)
        tries = torch.arange(TRIES)
        for _ in range(STEPS):
            found = [measures(*call) for call in self.run(embeds)]
            now = [[value.detach().amax(0) for value in values] for values in found]
            best = now if best is None else [list(map(torch.maximum, *pair)) for pair in zip(best, now)]
            # Each try is of one measure and one head.
            goal = 0
            for values in found:
                for kind, value in enumerate(values):
                    own = tries[tries % 4 == kind]
                    goal = goal - value[own, own // 4 % value.shape[1]].clamp_min(1e-30).log().sum()
            optimizer.zero_grad()
            goal.backward()
            optimizer.step()
        return best

    @torch.no_grad()
    def rounded(self):
        """The largest q, k and v of the same inputs in a BF16 forward."""
        self.model.bfloat16()
        found = [measures(*(x.float() for x in call[:3]), 1.0)[:3] for call in self.run(self.embeds.bfloat16())]
        return [[value.amax(0) for value in values] for values in found]


def measures(query, key, value, scaling):
    """The largest of each head: ``(tries, heads)``."""
    operands = [x.abs().amax((-1, -2)) for x in (query, key, value)]
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return [*operands, (query @ key.transpose(-1, -2)).abs().amax((-1, -2)) * scaling]


def attacked(config, folder):
    """What ascent reached over the bound, also in a BF16 forward of its inputs: ``{"q": [a row per layer], ...}``."""
    model = random_model(config)
    model.bfloat16().save_pretrained(folder)
    profile = sigmascale.calibrate(folder)["layers"]
    attack = Attack(model.float(), config.model_type not in POST_NORM)
    rows, rounded = attack.largest(), attack.rounded()
    assert len(rows) == len(profile)
    ratios = {"q": [], "k": [], "v": [], "logit": [], "bf16": []}
    for layer, found, again in zip(profile, rows, rounded):
        if config.model_type in SCALED:
            found[0], again[0] = (
                x * (config.hidden_size // config.num_attention_heads) ** 0.5 for x in (found[0], again[0])
            )
        for kind, name in enumerate("qkv"):
            if layer[f"{name}_descale"] is None:
                continue
            bound = 448 * torch.tensor(layer[f"{name}_descale"])
            # Query heads that share a KV head share an entry; so may all heads of latent attention.
            for row, ratio in ((found[kind], ratios[name]), (again[kind], ratios["bf16"])):
                ratio.append(row.view(len(bound), -1).amax(1) / bound)
        ratios["logit"].append(found[3] / torch.tensor([head["bound_exact"] for head in layer["heads"]]))
    return ratios


@pytest.mark.parametrize("model_type", FAMILIES)
def test_no_input_passes_a_bound(model_type, tmp_path, monkeypatch):
    if model_type == "falcon":
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", Recorder.of_sdpa)
    ratios = attacked(config_of(model_type), tmp_path)
    row = [f"{max(r.max().item() for r in rows):.2f}" if rows else "-" for rows in ratios.values()]
    print(f"\n| `{model_type}` | {' | '.join(row)} |")
    for name, rows in ratios.items():
        reached = [row.max().item() for row in rows]
        assert max(reached, default=0.0) <= 1.0 + 1e-4, (name, reached)
        # Ascent comes close, so the bounds are of this model.
        assert not reached or max(reached) >= (0.5 if name == "logit" else 0.75), (name, reached)


# Vision models around a text model whose class makes it from its own config.
AROUND = (
    "aya_vision cohere2_vision exaone4_5 got_ocr2 idefics3 internvl lfm2_vl lighton_ocr llava llava_next "
    "llava_onevision paligemma smolvlm vipllava"
).split()


@pytest.mark.parametrize("model_type", AROUND)
def test_a_wrapped_model_has_the_bounds_of_its_text_model(model_type, tmp_path):
    from safetensors.torch import load_file

    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no class for {model_type}")
    kind = transformers.CONFIG_MAPPING[model_type]
    default = kind()
    vision, found = default.vision_config, {}
    square = isinstance(getattr(vision, "image_size", None), (list, tuple))
    sizes = {"image_size": [28, 28], "patch_size": [14, 14]} if square else {"image_size": 28, "patch_size": 14}
    sizes |= {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    found["vision_config"] = {key: value for key, value in sizes.items() if hasattr(vision, key)}
    found["vision_config"]["model_type"] = vision.model_type
    text = default.text_config
    sizes = {key: value for key, value in SIZES.items() if hasattr(text, key)} | EXTRA.get(text.model_type, {})
    found["text_config"] = sizes | {"vocab_size": 300, "model_type": text.model_type}
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(kind(**found)).bfloat16()
    model.save_pretrained(tmp_path)
    parts = [(*name.partition("layers."), tensor) for name, tensor in load_file(tmp_path / "model.safetensors").items()]
    own = {rest: tensor for front, _, rest, tensor in parts if "language_model" in front or "text_model" in front}
    config = json.loads((tmp_path / "config.json").read_text())["text_config"]
    expected = sigmascale.calibrate(config, weights={f"model.layers.{rest}": tensor for rest, tensor in own.items()})
    assert sigmascale.calibrate(tmp_path)["layers"] == expected["layers"]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_stream_has_the_scales_of_calibrate(model_type, tmp_path):
    from safetensors.torch import load_file

    random_model(config_of(model_type)).bfloat16().save_pretrained(tmp_path)
    weights = [pair for file in sorted(tmp_path.glob("*.safetensors")) for pair in load_file(file).items()]
    layers = sigmascale.calibrate(tmp_path)["layers"]
    stream = sigmascale.ScaleStream(tmp_path, names=[name for name, _ in weights])
    for seed in range(2):
        order = torch.randperm(len(weights), generator=torch.Generator().manual_seed(seed)).tolist()
        for place in order:
            stream.push(*weights[place])
        found = stream.finish()
        assert stream.held_bytes == 0 and len(found) == len(layers)
        # In the order of the layers with attention.
        for layer, one in zip(layers, found.values()):
            if "mla" in layer:
                row = [layer["mla"]["cache_descale"]]
                assert (one["q"], one["k"], one["v"]) == (layer["mla"]["absorbed_q_descale"], row, row)
            else:
                assert all(one[operand] == layer[f"{operand}_descale"] for operand in "qkv")
