#!/usr/bin/env python3
"""Table 9 of the spectral-bounds paper: what the scale step adds to a forward, per estimator and for the delayed baseline.

    scale_step.py > rows.csv

Models of the paper's shapes with random weights (of Llama-2-70B 8 of its 80 layers), the paper's batches of 1024 tokens, logits in
E4M3. A row: a forward of the body, the same with the scale step behind it, the step alone, and in how many layers the first forward
overflowed. 3 warm-up passes, the mean of 6 with a synchronization after each, the median of 3 repetitions. Needs one GPU of 80 GB
and transformers; without a GPU it runs two small models, to try it.
"""

import csv
import sys
import time

import torch
import transformers

import sigmascale.torch as fp8

SMALL = not torch.cuda.is_available()
GPT2, MISTRAL, LLAMA = transformers.GPT2Config, transformers.MistralConfig, transformers.LlamaConfig
MODELS = [
    ("gpt2-xl", 8, lambda: GPT2(n_embd=1600, n_layer=48, n_head=25, n_positions=1024)),
    ("mistral-7b", 4, lambda: MISTRAL(sliding_window=None)),
    (
        "llama-2-13b", 4,
        lambda: LLAMA(hidden_size=5120, num_hidden_layers=40, num_attention_heads=40, intermediate_size=13824),
    ),
    (
        "llama-2-70b, 8 of 80 layers", 2,
        lambda: LLAMA(
            hidden_size=8192, num_hidden_layers=8, num_attention_heads=64, num_key_value_heads=8, intermediate_size=28672
        ),
    ),
]  # fmt: skip
if SMALL:
    MODELS = [
        ("small GPT-2", 1, lambda: GPT2(n_embd=64, n_layer=2, n_head=4, vocab_size=128)),
        (
            "small Llama", 1,
            lambda: LLAMA(
                hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
                vocab_size=128,
            ),
        ),
    ]  # fmt: skip
HOW = [
    ("delayed-paper", "gram"),
    ("geometry-c-star", "power-summed"),
    ("geometry-c-star", "power"),
    ("geometry", "gram"),
]
LENGTH, COUNT = (16, 1) if SMALL else (1024, 6)
FIELDS = "model,policy,estimator,forward_ms,with_scale_step_ms,scale_step_ms,layers,layers_over".split(",")


def timed(work):
    """Milliseconds of a call."""
    synchronize = (lambda: None) if SMALL else torch.cuda.synchronize
    for _ in range(3):
        work()
    means = []
    for _ in range(3):
        synchronize()
        start = time.perf_counter()
        for _ in range(COUNT):
            work()
            synchronize()
        means.append((time.perf_counter() - start) / COUNT * 1e3)
    return sorted(means)[1]


@torch.no_grad()
def rows(batch, config):
    """What comes behind the model's name."""
    torch.manual_seed(0)
    device = torch.device("cpu" if SMALL else "cuda")
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16).eval()
    tokens = torch.randint(100, (batch, LENGTH), device=device)
    body = lambda: model.base_model(tokens, use_cache=False)
    yield "none (BF16 attention)", "", f"{timed(body):.2f}", "", "", len(list(fp8.find_layers(model))), ""
    model.set_attn_implementation(fp8.register())
    for policy, estimator in HOW:
        runtime = fp8.attach(model, policy, estimator=estimator, logits="e4m3")
        body()
        over = int((runtime.stats()["logit_overflow"].sum(axis=1) > 0).sum())
        step = lambda runtime=runtime: (body(), runtime.refresh())
        times = timed(body), timed(step), timed(runtime.refresh)
        yield policy, estimator, *(f"{each:.2f}" for each in times), len(runtime), over


def main():
    out = csv.writer(sys.stdout)
    out.writerow(FIELDS)
    for name, batch, config in MODELS:
        for row in rows(batch, config):
            out.writerow([name, *row])
            sys.stdout.flush()
        if not SMALL:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
