#!/usr/bin/env python3
"""Records of small trainings that do not fail: `diagnose` must stay silent on them.

    python diagnose_calm.py --text DIR --to FOLDER              # on the CPU, FP8 attention emulated
    cargo run --example diagnose -- FOLDER/*.jsonl

Runs of `train_gpt.py --monitor` with other seeds, rates, widths, depths, heads, styles and policies.
"""

import argparse
import os
import pathlib
import subprocess
import sys

# Part, style, policy, width, layers, heads, KV heads, peak rate, seed. Thresholds were chosen on those marked `tuning`.
RUNS = [
    ("tuning", "llama", "geometry", 64, 2, 2, 1, 1e-3, 0),
    ("tuning", "llama", "geometry", 64, 2, 2, 1, 3e-3, 1),
    ("tuning", "llama", "geometry", 128, 2, 4, 2, 1e-3, 2),
    ("tuning", "llama", "geometry", 128, 3, 4, 4, 3e-4, 3),
    ("tuning", "gpt2", "geometry", 64, 2, 4, 4, 1e-3, 4),
    ("tuning", "gpt2", "geometry", 128, 2, 4, 4, 3e-3, 5),
    ("tuning", "llama", "delayed-te", 64, 2, 2, 2, 1e-3, 6),
    ("tuning", "llama", "delayed-te", 128, 2, 4, 2, 3e-3, 7),
    ("tuning", "gpt2", "delayed-te", 64, 3, 2, 2, 3e-4, 8),
    ("tuning", "llama", "current", 64, 2, 4, 2, 1e-3, 9),
    ("tuning", "gpt2", "current", 64, 2, 2, 2, 3e-3, 10),
    ("tuning", "llama", "geometry", 96, 4, 3, 3, 1e-3, 11),
    ("heldout", "llama", "geometry", 64, 2, 2, 1, 1e-3, 20),
    ("heldout", "llama", "geometry", 64, 2, 4, 2, 2e-3, 21),
    ("heldout", "llama", "geometry", 96, 2, 3, 3, 1e-3, 22),
    ("heldout", "llama", "geometry", 128, 2, 4, 2, 5e-4, 23),
    ("heldout", "llama", "geometry", 64, 3, 2, 2, 3e-4, 24),
    ("heldout", "gpt2", "geometry", 64, 2, 2, 2, 1e-3, 25),
    ("heldout", "gpt2", "geometry", 96, 2, 3, 3, 3e-3, 26),
    ("heldout", "llama", "current", 64, 2, 2, 1, 2e-3, 27),
    ("heldout", "gpt2", "current", 64, 3, 4, 4, 1e-3, 28),
    ("heldout", "llama", "geometry", 64, 2, 2, 1, 5e-3, 29),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, metavar="DIR", help="folder of text to train on")
    parser.add_argument("--to", required=True, metavar="FOLDER", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    args.to.mkdir(parents=True, exist_ok=True)
    script = str(pathlib.Path(__file__).with_name("train_gpt.py"))
    for part, style, policy, width, layers, heads, kv_heads, rate, seed in RUNS:
        name = f"gpt-{part}-{style}-{policy}-w{width}-l{layers}-h{heads}-lr{rate:g}-seed{seed}"
        record = args.to / f"{name}.jsonl"
        if record.exists():
            continue
        # It appears when the run is over, so that a second start goes on with the next run.
        draft = record.with_suffix(".part")
        draft.unlink(missing_ok=True)
        options = dict(style=style, policy=policy, width=width, layers=layers, heads=heads, lr=rate, seed=seed)
        options |= {"kv-heads": kv_heads, "steps": args.steps, "batch": 4, "seq-len": 64, "every": 3, "warmup": 20}
        options |= dict(device="cpu", text=args.text, monitor=draft, log=os.devnull)
        given = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
        subprocess.run([sys.executable, script, *given], check=True)
        draft.rename(record)


if __name__ == "__main__":
    main()
