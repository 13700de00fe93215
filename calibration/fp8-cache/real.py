"""What an FP8 cache costs a real model, on a CPU: largest q, k and v beside their bounds, and the KL of scales of 1.0 and of scales from
the weights.

    python calibration/fp8-cache/real.py MODEL [TOKENS] > RECORD

MODEL is a folder of Hugging Face transformers with a tokenizer; a record is CSV, a row a layer and then a row a cache. Queries, keys and
values are rounded to E4M3 in front of PyTorch's attention, in BF16: the casts of an engine, not its kernels. The text is Python's
language reference (`pydoc_data.topics`), in chunks of 1024 tokens.
"""

import math
import pathlib
import platform
import sys

import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import sigmascale
from sigmascale._loaded import up_to_bf16

CHUNK, MAX = 1024, 448.0


def tokens(model, count):
    import pydoc_data.topics

    whole = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    ids = transformers.AutoTokenizer.from_pretrained(model)(whole[: 12 * count])["input_ids"][:count]
    return [torch.tensor([ids[at : at + CHUNK]]) for at in range(0, count, CHUNK)]


class Cache:
    """Attention whose operands are rounded to E4M3 with one scale each for a layer; with None they are only looked at."""

    def __init__(self):
        self.scales, self.largest = None, {}

    def __call__(self, module, q, k, v, *args, **kwargs):
        layer = module.layer_idx
        found = [x.abs().max().item() for x in (q, k, v)]
        if self.scales is None:
            self.largest[layer] = [max(pair) for pair in zip(found, self.largest.get(layer, [0.0] * 3))]
        else:
            q, k, v = (self.cast(x, scale) for x, scale in zip((q, k, v), self.scales[layer]))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v, *args, **kwargs)

    @staticmethod
    def cast(x, scale):
        held = (x.float() / scale).clamp(-MAX, MAX).to(torch.float8_e4m3fn)
        return (held.float() * scale).to(x.dtype)


def main(folder, count=4096):
    folder = pathlib.Path(folder)
    layers = sigmascale.calibrate(folder)["layers"]
    needed = {layer["layer"]: [max(layer[f"{x}_descale"]) for x in "qkv"] for layer in layers}
    cache = Cache()
    transformers.AttentionInterface.register("e4m3", cache)
    transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register("e4m3", transformers.masking_utils.sdpa_mask)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="e4m3").eval()
    caches = {
        "bf16": None,
        "fixed": {number: [1.0] * 3 for number in needed},
        "weights": {number: [up_to_bf16(x) for x in row] for number, row in needed.items()},
    }
    losses, kl, chunks = {name: [] for name in caches}, {name: [] for name in caches}, tokens(folder, count)
    for chunk in chunks:
        hidden = {}
        for name, cache.scales in caches.items():
            with torch.no_grad():
                hidden[name] = model.base_model(input_ids=chunk, use_cache=False).last_hidden_state[0, :-1]
        for at in range(0, chunk.shape[1] - 1, 128):
            rows = {}
            for name, states in hidden.items():
                with torch.no_grad():
                    rows[name] = torch.log_softmax(model.lm_head(states[at : at + 128]).float(), -1)
                told = chunk[0, 1:][at : at + 128, None]
                losses[name] += (-rows[name].gather(1, told)[:, 0]).tolist()
                kl[name] += (rows["bf16"].exp() * (rows["bf16"] - rows[name])).sum(-1).tolist()
    print(f"# PyTorch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}, a CPU: real.py {folder.name} {count}")
    print("model,row,max_q,max_k,max_v,scale_q,scale_k,scale_v")
    for number, row in sorted(cache.largest.items()):
        print(",".join([folder.name, str(number), *(f"{x:.5g}" for x in row), *(f"{x:.5g}" for x in caches["weights"][number])]))
    print("model,cache,tokens,perplexity,kl")
    for name in caches:
        values = losses[name]
        print(f"{folder.name},{name},{len(values)},{math.exp(sum(values) / len(values)):.4f},{sum(kl[name]) / len(kl[name]):.5f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
