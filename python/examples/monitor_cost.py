#!/usr/bin/env python3
"""What the monitor computes in a step with layer lines, against a training step of the same size, on the CPU.

The step is 12 layers of GPT-2 size (12 heads of 64) on 1024 tokens with PyTorch's own attention, forward and backward.
The monitor's part is the norms of W_Q and the sampled rows. Both are those of one layer times 12. Reading the kernels'
statistics and writing the file are not counted.
"""

import time

import torch
from torch import nn

import sigmascale.torch as fp8
from sigmascale.torch import _norms, _samples, _terms

LAYERS, HEADS, D, TOKENS, EVERY, ROWS = 12, 12, 64, 1024, 10, 16


def seconds(work, times):
    work()
    start = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - start) / times


def main():
    torch.manual_seed(0)
    width = HEADS * D
    block = nn.TransformerEncoderLayer(width, HEADS, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False)
    x = torch.randn(1, TOKENS, width)
    step = seconds(lambda: model(x).square().mean().backward(), 2)
    weight = torch.randn(width, width)
    layer = fp8.Layer(q=weight, k=weight, v=weight, n_q_heads=HEADS, n_kv_heads=HEADS)
    norms = LAYERS * seconds(lambda: _norms.query_norms(layer), 5)
    q, k, v = ((torch.randn(1, TOKENS, HEADS, D) * 50).to(torch.float8_e4m3fn) for _ in range(3))
    out, terms = torch.randn(1, TOKENS, HEADS, D).bfloat16(), _terms.Terms(causal=True, scale=D**-0.5)
    descales = [torch.full((1, HEADS), 0.02)] * 3
    rows = LAYERS * seconds(lambda: _samples.sample(out, (q, k, v), descales, out, terms, ROWS, 1), 5)
    print(f"step {step:.3f} s; norms {norms:.4f} s, sampled rows {rows:.4f} s in one of {EVERY} steps")
    print(f"{(norms + rows) / EVERY / step:.3%} of a step")


if __name__ == "__main__":
    main()
