"""Microseconds of the host for one eager attention call, of two builds of the package in turn.

    python benches/host_time.py BEFORE AFTER [--device cuda] [--rounds 7]

BEFORE and AFTER are folders that hold the package ``sigmascale``. Calls are tiny, so that the time is what the package and
PyTorch do around the kernels. Each round starts a process for either build; a row has the least of the rounds.
"""

import argparse
import json
import os
import subprocess
import sys
import time


def forms(torch, fp8, device):
    """Calls by name; each takes nothing and returns what it computed."""
    tensors = lambda *shape: [torch.randn(*shape, dtype=torch.bfloat16, device=device) for _ in range(3)]
    q, k, v = tensors(1, 16, 2, 64)
    plan = [torch.full((2,), 0.02, dtype=torch.float32, device=device)] * 3
    sinks = torch.zeros(2, dtype=torch.float32, device=device)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    ends = torch.tensor([0, 7, 16], dtype=torch.int32, device=device)
    rows = [x.flatten(0, 1) for x in (q, k, v)]

    def step():
        out = fp8.attention(*leaves, plan)
        return torch.autograd.grad(out, leaves, out)

    return {
        "inference": lambda: fp8.attention(q, k, v, plan),
        "window, soft-cap, sinks": lambda: fp8.attention(q, k, v, plan, window=(8, 0), softcap=30.0, sinks=sinks),
        "packed": lambda: fp8.flash_attn_varlen_func(*rows, ends, ends, 9, 9, causal=True, plan=plan),
        "forward and backward": step,
    }


def measured(device, seconds):
    """Microseconds of each form, the least of batches of calls."""
    import torch

    import sigmascale.torch as fp8

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    torch.manual_seed(0)
    torch.set_num_threads(1)
    found = {}
    for name, call in forms(torch, fp8, device).items():
        for _ in range(20):
            call()
        wait()
        batches, end = [], time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            for _ in range(50):
                call()
            batches.append((time.perf_counter() - start) / 50)
            # Outside of the time: a queue that is full would make the host wait within it.
            wait()
        found[name] = min(batches) * 1e6
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("builds", nargs="*", metavar="FOLDER")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each form in each round")
    options = parser.parse_args()
    if not options.builds:
        print(json.dumps(measured(options.device, options.seconds)))
        return
    rounds = {build: [] for build in options.builds}
    for _ in range(options.rounds):
        for build, results in rounds.items():
            arguments = ["--device", options.device, "--seconds", str(options.seconds)]
            environment = os.environ | {"PYTHONPATH": build, "OMP_NUM_THREADS": "1"}
            out = subprocess.run([sys.executable, __file__, *arguments], env=environment, stdout=subprocess.PIPE, check=True)
            results.append(json.loads(out.stdout))
    print("call,build,microseconds")
    for name in rounds[options.builds[0]][0]:
        for build, results in rounds.items():
            print(f'"{name}",{build},{min(result[name] for result in results):.1f}')


if __name__ == "__main__":
    main()
