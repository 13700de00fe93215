"""The forward of the command beside transformers' own classes: the largest q, k and v of every layer on the same tokens."""

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = dict(
    hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96, vocab_size=120,
    max_position_embeddings=256,
)
CONFIGS = {
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, head_dim=16, sliding_window=16, query_pre_attn_scalar=24),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=16, sliding_window_pattern=2),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES, rms_norm_eps=1e-6),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
    "llama": lambda: transformers.LlamaConfig(**SIZES),
}


def observed(model, ids):
    """What the model's attention is given, by layer: the largest |q|, |k| and |v|."""
    eager = sys.modules[type(model).__module__].eager_attention_forward
    most = {}

    def record(module, query, key, value, *arguments, **named):
        most[module.layer_idx] = [x.abs().max().item() for x in (query, key, value)]
        return eager(module, query, key, value, *arguments, **named)

    transformers.AttentionInterface.register("recorded", record)
    transformers.masking_utils.AttentionMaskInterface.register("recorded", transformers.masking_utils.eager_mask)
    model.set_attn_implementation("recorded")
    with torch.no_grad():
        model(torch.tensor([ids]))
    return most


@pytest.mark.parametrize("name", CONFIGS)
def test_verify_reaches_what_transformers_does(name, tmp_path):
    torch.manual_seed(0)
    config = CONFIGS[name]()
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Gains that are all alike would hide one that is left out.
            parameter.add_(0.05 * torch.randn_like(parameter))
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    ids = torch.randint(0, 120, (40,)).tolist()
    (tmp_path / "ids.json").write_text(json.dumps(ids))
    command = [sys.executable, "-m", "sigmascale", "verify", folder, "--tokens", tmp_path / "ids.json", "--seq-len", "40"]
    printed = subprocess.run([*map(str, command), "--json"], capture_output=True, text=True)
    found = json.loads(printed.stdout)["observed"]
    assert (found["sequences"], found["seq_len"]) == (1, 40)
    for layer, expected in observed(model, ids).items():
        have = [found["layers"][layer][operand] for operand in "qkv"]
        assert have == pytest.approx(expected, rel=2e-4), (layer, have, expected)
