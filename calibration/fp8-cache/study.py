"""What the scales of an E4M3 KV cache cost: loss and KL on text, under scales of 1.0, certain ones and the exact amax.

    python calibration/fp8-cache/study.py > calibration/fp8-cache/DATE.csv

needs PyTorch, Hugging Face transformers and this package. The model is `data/tiny-llama`, the text `data/sample.py`, which it was not
trained on. The forward is the model's own in BF16; keys and values go through E4M3 as a cache holds them, queries stay in BF16. Every
row compares with BF16 weights of the same planting:

- `bias B`: a key bias of B in the two rotation pairs of each KV head that turn least. It changes the model: the column `bf16_loss`.
- `unread bias B`: the same, where the rows of W_Q of these channels are zero, so that no logit depends on them.
- `values 2^J`: W_V times 2^J and W_O times 2^-J. The model is the same, in BF16 too.
- `keys 2^J`: W_K times 2^J and W_Q times 2^-J, the same.
"""

import csv
import math
import pathlib
import sys

import torch
import transformers

import sigmascale

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = ROOT / "data" / "tiny-llama"
WINDOW, WINDOWS = 256, 16
E4M3_MAX = 448.0
SIZES = (0, 30, 100, 200, 400, 600, 1000, 2000)
POWERS = (-14, -10, -6, 6, 8, 10)


def cast(x, scale):
    """E4M3 and back, saturating as GPUs do; how many values were clipped."""
    scaled = x.float() / scale
    clipped = (scaled.abs() > E4M3_MAX).sum().item()
    return (scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale).to(x.dtype), clipped


class Cache:
    """What keys and values go through: scales by layer, or none."""

    scales, clipped, values, amax = None, 0, 0, None

    @classmethod
    def use(cls, scales):
        cls.scales, cls.clipped, cls.values, cls.amax = scales, 0, 0, {}

    @classmethod
    def attention(cls, module, query, key, value, mask, **arguments):
        pair = []
        for name, x in (("k", key), ("v", value)):
            place = module.layer_idx, name
            cls.amax[place] = max(cls.amax.get(place, 0.0), x.abs().max().item())
            if cls.scales is not None:
                x, clipped = cast(x, cls.scales[place])
                cls.clipped += clipped
                cls.values += x.numel()
            pair.append(x)
        return transformers.integrations.sdpa_attention.sdpa_attention_forward(module, query, *pair, mask, **arguments)


def planted(kind, size):
    """The model with something planted in it."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(MODEL)
    config.attention_bias = True
    model = transformers.AutoModelForCausalLM.from_pretrained(
        MODEL, config=config, dtype=torch.bfloat16, attn_implementation="e4m3"
    ).eval()
    d, heads = config.head_dim, config.num_key_value_heads
    slow = [pair + half for pair in (d // 2 - 2, d // 2 - 1) for half in (0, d // 2)]
    for layer in model.model.layers:
        attention = layer.self_attn
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            linear.bias.data.zero_()
        if "bias" in kind:
            for head in range(heads):
                for channel in slow:
                    attention.k_proj.bias.data[head * d + channel] = size * (1 if torch.rand(()) < 0.5 else -1)
            if kind == "unread bias":
                for head in range(config.num_attention_heads):
                    attention.q_proj.weight.data[[head * d + channel for channel in slow]] = 0
        elif kind == "values":
            attention.v_proj.weight.data *= 2.0**size
            attention.o_proj.weight.data *= 2.0**-size
        else:
            attention.k_proj.weight.data *= 2.0**size
            attention.q_proj.weight.data *= 2.0**-size
    return model, config


def windows():
    """Bytes of the text."""
    data = (ROOT / "data" / "sample.py").read_bytes()
    step = (len(data) - WINDOW) // (WINDOWS - 1)
    return torch.tensor([list(data[at : at + WINDOW]) for at in range(0, step * WINDOWS, step)])


def certain(model, config, per_head):
    """Scales from the weights alone, as `export` writes them."""
    config = config.to_dict() | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    config = {key: value for key, value in config.items() if key not in ("dtype", "attn_implementation", "_attn_implementation_internal")}
    profile = sigmascale.calibrate(config | {"dtype": "bfloat16"}, weights=model.state_dict())
    scales = {}
    for layer in profile["layers"]:
        for name in "kv":
            row = layer[f"{name}_descale"]
            scales[layer["layer"], name] = torch.tensor(row).reshape(1, -1, 1, 1) if per_head else max(row)
    return scales


@torch.no_grad()
def main():
    transformers.AttentionInterface.register("e4m3", Cache.attention)
    transformers.AttentionMaskInterface.register("e4m3", transformers.masking_utils.sdpa_mask)
    text = windows()
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(["planted", "largest_key", "largest_value", "bf16_loss", "scales", "loss", "kl", "clipped_share"])
    cases = [("bias", size) for size in SIZES] + [("unread bias", size) for size in SIZES[2::2]]
    cases += [("values", power) for power in POWERS] + [("keys", power) for power in POWERS]
    for kind, size in cases:
        model, config = planted(kind, size)
        run = lambda: model(text).logits[:, :-1].float().log_softmax(-1)
        loss = lambda found: -found.gather(-1, text[:, 1:, None]).mean().item()
        Cache.use(None)
        reference = run()
        amax = dict(Cache.amax)
        largest = {name: max(value for place, value in amax.items() if place[1] == name) for name in "kv"}
        kinds = {
            "1.0": dict.fromkeys(amax, 1.0),
            "certain, per tensor": certain(model, config, False),
            "certain, per head": certain(model, config, True),
            "exact amax, per tensor": {place: max(value, 1e-30) * (1 + 2**-20) / E4M3_MAX for place, value in amax.items()},
        }
        for name, scales in kinds.items():
            Cache.use(scales)
            found = run()
            kl = (reference.exp() * (reference - found)).sum(-1).mean().item()
            label = f"{kind} {size}" if "bias" in kind else f"{kind} 2^{size}"
            numbers = [f"{x:.4g}" for x in (largest["k"], largest["v"])], f"{loss(reference):.4f}", f"{loss(found):.4f}"
            row = [label, *numbers[0], numbers[1], name, numbers[2], f"{max(kl, 0.0):.2e}"]
            out.writerow([*row, f"{Cache.clipped / Cache.values:.2e}"])
            sys.stdout.flush()
            assert math.isfinite(kl)


if __name__ == "__main__":
    main()
