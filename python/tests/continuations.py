"""Greedy continuations of `data/tiny-llama` in FP8: on how many leading tokens they agree with those of BF16.

    python continuations.py                  # this package's kernel and FlashAttention-3 with the same descales on a GPU,
                                             # the crate's CPU implementation and the emulation on a CPU; prints CSV
    python continuations.py --backends native --tokens 32

A prompt is a piece of Python text that the model was not trained on. One token that differs ends the agreement, so two
BF16 kernels do not agree on all tokens either: the last row is BF16 attention written out in PyTorch. Exits with 1 where
the first backend agrees on fewer than 95 % of the second's tokens.
"""

import argparse
import csv
import pathlib
import sys

import torch
import transformers

import sigmascale.torch as fp8

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def prompts(count, length):
    """Pieces of the text, as bytes, one after the other."""
    text = torch.tensor(list((ROOT / "data" / "sample.py").read_bytes()))
    starts = torch.linspace(0, len(text) - length, count).long().tolist()
    return torch.stack([text[start : start + length] for start in starts]).to(DEVICE)


def continued(model, given, count):
    """The next tokens of each prompt."""
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    out = model.generate(given, attention_mask=torch.ones_like(given), disable_compile=True, **options)
    return out[:, given.shape[1] :]


def leading(ours, theirs):
    """How many tokens of each prompt agree before the first that does not."""
    return (ours == theirs).int().cumprod(dim=1).sum(dim=1).tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = "native,fa3" if DEVICE.type == "cuda" else "native,emulated"
    parser.add_argument("--backends", default=default, help=f"of attach(), by commas; default {default}")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--length", type=int, default=128, help="bytes of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens")
    given = parser.parse_args()

    path = ROOT / "data" / "tiny-llama"
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(DEVICE).eval()
    texts = prompts(given.prompts, given.length)
    model.set_attn_implementation("sdpa")
    expected = continued(model, texts, given.tokens)
    agreed = {}
    for backend in given.backends.split(","):
        runtime = fp8.attach(model, backend=backend)
        model.set_attn_implementation(fp8.register())
        agreed[backend] = leading(continued(model, texts, given.tokens), expected)
        ran = runtime.stats()["calls"].keys()
        if ran != {backend}:
            raise SystemExit(f"backend {backend!r} was asked for, and {', '.join(ran)} ran")
    model.set_attn_implementation("eager")
    agreed["bf16 eager"] = leading(continued(model, texts, given.tokens), expected)

    rows = csv.writer(sys.stdout, lineterminator="\n")
    rows.writerow(["backend", "agreeing", "of", *(f"prompt_{i}" for i in range(given.prompts))])
    for backend, counts in agreed.items():
        rows.writerow([backend, sum(counts), given.prompts * given.tokens, *counts])
    first, second, *_ = map(sum, agreed.values())
    sys.exit(len(agreed) > 2 and first < 0.95 * second)


if __name__ == "__main__":
    main()
