"""What the scales of an E4M3 KV cache cost: loss and KL on text, under scales of 1.0, worst-case ones and the exact
amax.

    python calibration/fp8-cache/study.py data/tiny-llama [MODEL ...] > calibration/fp8-cache/DATE.csv
    python calibration/fp8-cache/study.py --tables calibration/fp8-cache/DATE.csv

needs PyTorch, Hugging Face transformers and this package. Models are folders of Llama or GPT-2 checkpoints on bytes;
the text is `data/sample.py`, which they were not trained on. The forward is the model's own in BF16; keys and values go
through E4M3 as a cache holds them, queries stay in BF16. Every row compares with BF16 weights of the same planting:

- `bias B`: a key bias of B in four channels of each KV head: with rotation the two pairs that turn least, which changes
  the model (the column `bf16_loss`); without rotation any channels, which changes no probability, since a softmax
  forgets what all of its logits share.
- `unread bias B`: the same, where the rows of W_Q of these channels are zero, so that no logit depends on them.
- `values 2^J`: W_V times 2^J and W_O times 2^-J. The model is the same, in BF16 too.
- `keys 2^J`: W_K times 2^J and W_Q times 2^-J, the same.

`--tables` prints the tables of the README.
"""

import csv
import math
import pathlib
import sys

import torch
import transformers

import sigmascale

ROOT = pathlib.Path(__file__).resolve().parents[2]
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


class Projections:
    """Rows of W_Q, W_K, W_V and their biases, and W_O, of one layer: views that can be changed in place."""

    def __init__(self, layer, fused):
        if fused:
            # GPT-2 stores [in, out].
            weight, bias = layer.attn.c_attn.weight.data.t(), layer.attn.c_attn.bias.data
            self.q, self.k, self.v = weight.chunk(3)
            self.q_bias, self.k_bias, self.v_bias = bias.chunk(3)
            self.o = layer.attn.c_proj.weight.data
            return
        attention = layer.self_attn
        for name in "qkv":
            linear = getattr(attention, f"{name}_proj")
            linear.bias.data.zero_()
            setattr(self, name, linear.weight.data)
            setattr(self, f"{name}_bias", linear.bias.data)
        attention.o_proj.bias.data.zero_()
        self.o = attention.o_proj.weight.data


def planted(folder, kind, size):
    """The model with something planted in it."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.attention_bias = True
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.bfloat16, attn_implementation="e4m3"
    ).eval()
    fused = config.model_type == "gpt2"
    heads, layers = config.num_attention_heads, model.transformer.h if fused else model.model.layers
    kv_heads = heads if fused else config.num_key_value_heads
    d = config.hidden_size // heads if fused else config.head_dim
    channels = [pair + half for pair in (d // 2 - 2, d // 2 - 1) for half in (0, d // 2)]
    for layer in layers:
        own = Projections(layer, fused)
        if "bias" in kind:
            for head in range(kv_heads):
                for channel in channels:
                    own.k_bias[head * d + channel] += size * (1 if torch.rand(()) < 0.5 else -1)
            if kind == "unread bias":
                for head in range(heads):
                    rows = [head * d + channel for channel in channels]
                    own.q[rows] = 0
                    own.q_bias[rows] = 0
        else:
            large, small = (own.v, own.v_bias), (own.o,)
            if kind == "keys":
                large, small = (own.k, own.k_bias), (own.q, own.q_bias)
            for tensor in large:
                tensor *= 2.0**size
            for tensor in small:
                tensor *= 2.0**-size
    return model, config


def windows():
    """Bytes of the text."""
    data = (ROOT / "data" / "sample.py").read_bytes()
    step = (len(data) - WINDOW) // (WINDOWS - 1)
    return torch.tensor([list(data[at : at + WINDOW]) for at in range(0, step * WINDOWS, step)])


def certain(model, config, per_head):
    """Scales from the weights alone, as `export` writes them."""
    config = config.to_dict()
    config = {
        key: value
        for key, value in config.items()
        if key not in ("dtype", "attn_implementation", "_attn_implementation_internal")
    }
    profile = sigmascale.calibrate(config | {"dtype": "bfloat16"}, weights=model.state_dict())
    scales = {}
    for layer in profile["layers"]:
        for name in "kv":
            row = layer[f"{name}_descale"]
            scales[layer["layer"], name] = torch.tensor(row).reshape(1, -1, 1, 1) if per_head else max(row)
    return scales


@torch.no_grad()
def measure(folder, out):
    """Writes the rows of one model."""
    text = windows()
    cases = [("bias", size) for size in SIZES] + [("unread bias", size) for size in SIZES[2::2]]
    cases += [("values", power) for power in POWERS] + [("keys", power) for power in POWERS]
    for kind, size in cases:
        model, config = planted(folder, kind, size)
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
            "exact amax, per tensor": {
                place: max(value, 1e-30) * (1 + 2**-20) / E4M3_MAX for place, value in amax.items()
            },
        }
        for name, scales in kinds.items():
            Cache.use(scales)
            found = run()
            kl = (reference.exp() * (reference - found)).sum(-1).mean().item()
            label = f"{kind} {size}" if "bias" in kind else f"{kind} 2^{size}"
            numbers = [f"{x:.4g}" for x in (largest["k"], largest["v"])], f"{loss(reference):.4f}", f"{loss(found):.4f}"
            row = [folder.name, label, *numbers[0], numbers[1], name, numbers[2], f"{max(kl, 0.0):.2e}"]
            out.writerow([*row, f"{Cache.clipped / Cache.values:.2e}"])
            sys.stdout.flush()
            assert math.isfinite(kl)


# Names in the record. Certain: the worst-case scales.
COLUMNS = ["model", "planted", "largest_key", "largest_value", "bf16_loss", "scales", "loss", "kl", "clipped_share"]
KINDS = ["1.0", "certain, per tensor", "certain, per head", "exact amax, per tensor"]


def tables(record):
    """The README's tables of a record, in Markdown."""
    with open(record) as file:
        rows = list(csv.DictReader(file))
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        for kind in ("values", "keys", "bias", "unread bias"):
            own = [row for row in rows if row["model"] == model and row["planted"].rpartition(" ")[0] == kind]
            planted = list(dict.fromkeys(row["planted"] for row in own))
            if kind in ("values", "keys"):
                # From the smallest range to the largest.
                planted.sort(key=lambda name: int(name.rpartition("^")[2]))
            lines += [f"{model}, {kind}:", ""]
            lines.append(
                "| planted | largest key / value | loss: BF16, 1.0, per tensor | KL: 1.0 | per tensor | per head "
                "| amax | clipped at 1.0 |"
            )
            lines.append("|---|---|---|---|---|---|---|---|")
            for name in planted:
                found = {row["scales"]: row for row in own if row["planted"] == name}
                one = found["1.0"]
                losses = one["bf16_loss"], one["loss"], found["certain, per tensor"]["loss"]
                largest = f"{one['largest_key']} / {one['largest_value']}"
                divergence = [f"{float(found[kind]['kl']):.4f}" for kind in KINDS]
                clipped = f"{100 * float(one['clipped_share']):.2g} %"
                cells = [name, largest, ", ".join(f"{float(loss):.3f}" for loss in losses), *divergence, clipped]
                lines.append(f"| {' | '.join(cells)} |")
            lines.append("")
    return "\n".join(lines)


def main():
    arguments = sys.argv[1:] or [str(ROOT / "data" / "tiny-llama")]
    if arguments[0] == "--tables":
        print(tables(arguments[1]))
        return
    transformers.AttentionInterface.register("e4m3", Cache.attention)
    transformers.AttentionMaskInterface.register("e4m3", transformers.masking_utils.sdpa_mask)
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(COLUMNS)
    for folder in arguments:
        measure(pathlib.Path(folder), out)


if __name__ == "__main__":
    main()
