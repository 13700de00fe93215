#!/usr/bin/env python3
"""A whole training step of Llama-3.2-1B's shape where attention is most of it: FP8 attention beside PyTorch's BF16, in turn.

    python benches/long_context.py [--tokens 16384,32768,65536] [--rounds 5] [--steps 2]

One sequence, weights and AdamW states in BF16 and random, an activation checkpoint around each decoder layer, decoder layers
compiled, the loss in chunks so that the vocabulary's logits do not fill the memory. `bf16` is F.scaled_dot_product_attention, by
cuDNN where PyTorch has it for the call, else FlashAttention-2. `fp8` is this package's attention with scales that follow the
optimizer. A round has a window of steps of each, every second round in reverse order. Needs a Hopper GPU; `--device cpu --layers 1
--width 128 --vocabulary 256 --tokens 512` runs the same code on a CPU.

CSV, after comment lines with machine and versions: ms per step, median and range over rounds, the median of the ratios bf16 / fp8 of
rounds with their range, and the most memory that PyTorch held.
"""

import argparse
import contextlib
import gc
import statistics
import time

import torch
import torch.nn.functional as F
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import sigmascale
import sigmascale.torch as fp8

CHUNK = 4096
WARM = 2


def model_of(args, longest):
    config = transformers.LlamaConfig(
        hidden_size=args.width, num_hidden_layers=args.layers, num_attention_heads=args.width // 64,
        num_key_value_heads=max(1, args.width // 256), head_dim=64, intermediate_size=4 * args.width, vocab_size=args.vocabulary,
        max_position_embeddings=longest, rope_theta=500_000.0, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(args.device):
        return transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()


class Training:
    def __init__(self, args, way, longest):
        self.args, self.way, self.model = args, way, model_of(args, longest)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.runtime = None
        if way == "fp8":
            self.model.set_attn_implementation(fp8.register())
            self.runtime = fp8.attach(self.model, optimizer=self.optimizer, strict=True)
        else:
            self.model.set_attn_implementation("sdpa")
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        if not args.eager:
            for layer in self.model.model.layers:
                layer.compile()

    def step(self, tokens):
        order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
        chosen = sdpa_kernel(order, set_priority=True) if self.way == "bf16" and tokens.is_cuda else contextlib.nullcontext()
        with chosen:
            hidden = self.model.model(tokens[:, :-1]).last_hidden_state[0]
            loss = 0.0
            for rows, targets in zip(hidden.split(CHUNK), tokens[0, 1:].split(CHUNK)):
                loss = loss + checkpoint(self.loss_of, rows, targets, use_reentrant=False)
            (loss / len(hidden)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def loss_of(self, rows, targets):
        return F.cross_entropy(self.model.lm_head(rows).float(), targets, reduction="sum")

    def window(self, tokens, steps):
        """Milliseconds per step, and GiB."""
        cuda = tokens.is_cuda
        synchronize = torch.cuda.synchronize if cuda else lambda: None
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        synchronize()
        held, start = torch.cuda.memory_allocated() if cuda else 0, time.perf_counter()
        for _ in range(steps):
            self.step(tokens)
        synchronize()
        seconds = time.perf_counter() - start
        # Without what the other model holds.
        return 1e3 * seconds / steps, (torch.cuda.max_memory_allocated() - held) / 2**30 if cuda else 0.0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="16384,32768,65536")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="of a window")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    args = parser.parse_args()
    lengths = [int(x) for x in args.tokens.split(",")]
    if args.device == "cuda":
        print(f"# {torch.cuda.get_device_name()}, PyTorch {torch.__version__}, transformers {transformers.__version__}, "
              f"cuDNN {torch.backends.cudnn.version()}, sigmascale {sigmascale.__version__}", flush=True)  # fmt: skip
    print("tokens,layers,width,way,ms,low,high,ratio,ratio_low,ratio_high,peak_gib", flush=True)
    for length in lengths:
        # Anew for each length: graphs of another one are no part of the memory.
        trainings = {way: Training(args, way, length) for way in ("bf16", "fp8")}
        tokens = torch.randint(args.vocabulary, (1, length + 1), device=args.device)
        for training in trainings.values():
            training.window(tokens, WARM)
        times, memory = {way: [] for way in trainings}, {}
        for turn in range(args.rounds):
            for way in list(trainings)[:: -1 if turn % 2 else 1]:
                ms, gib = trainings[way].window(tokens, args.steps)
                times[way].append(ms)
                memory[way] = max(gib, memory.get(way, 0.0))
        ratios = [a / b for a, b in zip(times["bf16"], times["fp8"])]
        trainings["fp8"].runtime.check()
        for way, ms in times.items():
            beside = (statistics.median(ratios), min(ratios), max(ratios)) if way == "fp8" else (1.0,) * 3
            cells = [f"{x:.1f}" for x in (statistics.median(ms), min(ms), max(ms))] + [f"{x:.3f}" for x in beside]
            print(length, args.layers, args.width, way, *cells, f"{memory[way]:.2f}", sep=",", flush=True)
        del trainings, training
        torch._dynamo.reset()
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
