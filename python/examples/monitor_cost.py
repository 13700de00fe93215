#!/usr/bin/env python3
"""What a monitor costs in a training step: windows of steps with it and without it, in turn, in one process.

    python monitor_cost.py --size 125m --seq-len 4096 --batch 4
    python monitor_cost.py --device cpu --size 5m --seq-len 256 --batch 1 --rounds 2

A window has as many steps as the monitor has from one layer line to the next, so it has one step with layer lines. Before it, two
steps are not timed. `geometry` is the policy without logit bounds, `bounds` has them (`bound="worst-case"`, which a monitor needs for
sigma), `monitor` is that with a monitor, which writes its file. Printed as CSV: ms per step, median and range of the windows, and
relative to `bounds`.
"""

import argparse
import pathlib
import statistics
import tempfile
import time

import torch
import train_gpt

import sigmascale.torch as fp8

WAYS = ("geometry", "bounds", "monitor")
WARM = 2


class Training:
    def __init__(self, args):
        torch.manual_seed(0)
        self.args, self.device = args, torch.device(args.device)
        with self.device:
            self.model = train_gpt.Gpt("llama", args.seq_len, **train_gpt.SIZES[args.size])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(0, 256, (args.batch, args.seq_len + 1), device=self.device)

    def step(self, runtime, monitor=None):
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.model(self.tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), self.tokens[:, 1:].flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        runtime.refresh()
        if monitor:
            monitor.step(loss=loss, grad_norm=norm, lr=1e-4)

    def window(self, way, file):
        """Milliseconds per step."""
        runtime = train_gpt.attach(self.model, "geometry", bound=None if way == "geometry" else "worst-case")
        monitor = fp8.Monitor(runtime, file, self.args.every, first_step=self.args.every - WARM) if way == "monitor" else None
        for _ in range(WARM):
            self.step(runtime, monitor)
        self.synchronize()
        start = time.perf_counter()
        for _ in range(self.args.every):
            self.step(runtime, monitor)
        self.synchronize()
        seconds = time.perf_counter() - start
        if monitor:
            monitor.close()
        return 1e3 * seconds / self.args.every

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="125m", choices=list(train_gpt.SIZES))
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--every", type=int, default=10, help="steps from one layer line to the next")
    parser.add_argument("--rounds", type=int, default=8, help="windows of each kind")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    args = parser.parse_args()
    training, found = Training(args), {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(args.rounds + 1):
            for way in WAYS:
                ms = training.window(way, pathlib.Path(folder, f"{turn}.jsonl"))
                if turn:  # the first of each compiles
                    found[way].append(ms)
    print("size,batch,seq_len,every,way,ms_per_step,least,most,beside_bounds")
    for way, times in found.items():
        ratio = statistics.median(a / b for a, b in zip(times, found["bounds"]))
        cells = [f"{x:.3f}" for x in (statistics.median(times), min(times), max(times))]
        print(args.size, args.batch, args.seq_len, args.every, way, *cells, f"{ratio:.4f}", sep=",")


if __name__ == "__main__":
    main()
