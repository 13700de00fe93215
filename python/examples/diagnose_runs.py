#!/usr/bin/env python3
"""How early `diagnose` sees the failure of BF16 attention, and whether it is silent on runs that do not fail.

    python diagnose_runs.py --text DIR --to FOLDER > runs.csv      # on the CPU, FP8 attention emulated
    python diagnose_runs.py --text DIR --to FOLDER --only lab

Makes the records of FOLDER, of runs of `sigmascale stress low-precision` and of small trainings by `train_gpt.py
--monitor`, and prints a line for each. A record that is there already is not made again. Thresholds were chosen on the
trainings marked `tuning`; none was changed for the others.

`loss_shows`: first step at which the mean of the last 50 losses is 10 % above the smallest such mean before; `lead`:
steps to it from the first alarm of the head that is named.
"""

import argparse
import os
import pathlib
import subprocess
import sys

import sigmascale

# Part, remedy, seeds, rate, other options.
LAB = [
    ("heldout", "none", (3, 4, 5), 1e-3, ()),
    ("heldout", "none", (6, 7), 2e-3, ()),
    ("heldout", "f32", (3, 4, 5), 1e-3, ()),
    ("heldout", "f32-output", (3, 4, 5), 1e-3, ()),
    ("heldout", "delta-from-p", (3, 4, 5), 1e-3, ()),
    ("heldout", "shifted-softmax", (3, 4, 5), 1e-3, ()),
    ("heldout", "f32", (6, 7), 2e-3, ()),
    ("heldout", "f32", (3, 4), 5e-4, ("--head", "none")),
]
# Part, style, policy, width, layers, heads, KV heads, peak rate, seed, other options.
TRAININGS = [
    ("tuning", "llama", "geometry", 64, 2, 2, 1, 1e-3, 0, ()),
    ("tuning", "llama", "geometry", 64, 2, 2, 1, 3e-3, 1, ()),
    ("tuning", "llama", "geometry", 128, 2, 4, 2, 1e-3, 2, ()),
    ("tuning", "llama", "geometry", 128, 3, 4, 4, 3e-4, 3, ()),
    ("tuning", "gpt2", "geometry", 64, 2, 4, 4, 1e-3, 4, ()),
    ("tuning", "gpt2", "geometry", 128, 2, 4, 4, 3e-3, 5, ()),
    ("tuning", "llama", "delayed-te", 64, 2, 2, 2, 1e-3, 6, ()),
    ("tuning", "llama", "delayed-te", 128, 2, 4, 2, 3e-3, 7, ()),
    ("tuning", "gpt2", "delayed-te", 64, 3, 2, 2, 3e-4, 8, ()),
    ("tuning", "llama", "current", 64, 2, 4, 2, 1e-3, 9, ()),
    ("tuning", "gpt2", "current", 64, 2, 2, 2, 3e-3, 10, ()),
    ("tuning", "llama", "geometry", 96, 4, 3, 3, 1e-3, 11, ()),
    ("heldout", "llama", "geometry", 64, 2, 2, 1, 1e-3, 20, ()),
    ("heldout", "llama", "geometry", 64, 2, 4, 2, 2e-3, 21, ()),
    ("heldout", "llama", "geometry", 96, 2, 3, 3, 1e-3, 22, ()),
    ("heldout", "llama", "geometry", 128, 2, 4, 2, 5e-4, 23, ()),
    ("heldout", "llama", "geometry", 64, 3, 2, 2, 3e-4, 24, ()),
    ("heldout", "gpt2", "geometry", 64, 2, 2, 2, 1e-3, 25, ()),
    ("heldout", "gpt2", "geometry", 96, 2, 3, 3, 3e-3, 26, ()),
    ("heldout", "llama", "current", 64, 2, 2, 1, 2e-3, 27, ()),
    ("heldout", "gpt2", "current", 64, 3, 4, 4, 1e-3, 28, ()),
    ("heldout", "llama", "geometry", 64, 2, 2, 1, 5e-3, 29, ()),
    # A policy that begins anew in the middle, and one that is resumed with its state.
    ("heldout", "llama", "geometry", 64, 2, 4, 2, 1e-3, 30, ("--resume", "150")),
    ("heldout", "gpt2", "auto-c", 64, 2, 2, 2, 1e-3, 31, ("--resume", "150:state")),
]


def lab(folder):
    """Records of the lab, in a folder for each rate and option; yields part, name and record."""
    for part, remedy, seeds, rate, options in LAB:
        place = folder / "-".join(["lab", f"lr{rate:g}", *(word.strip("-") for word in options)])
        place.mkdir(exist_ok=True)
        records = {seed: place / f"{remedy}-seed{seed}.jsonl" for seed in seeds}
        missing = ",".join(str(seed) for seed, record in records.items() if not record.exists())
        if missing:
            command = (
                "stress",
                "low-precision",
                "--seeds",
                missing,
                "--remedies",
                remedy,
                "--lr",
                rate,
                "--record",
                place,
            )
            line = [sys.executable, "-m", "sigmascale", *map(str, command), *options]
            subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
        for record in records.values():
            yield part, f"{place.name}-{record.stem}", record


def trainings(folder, text, steps):
    """Records of trainings; yields part, name and record."""
    script = str(pathlib.Path(__file__).with_name("train_gpt.py"))
    for part, style, policy, width, layers, heads, kv_heads, rate, seed, more in TRAININGS:
        resumed = "-resumed" if more else ""
        name = f"gpt-{style}-{policy}-w{width}-l{layers}-h{heads}-lr{rate:g}-seed{seed}{resumed}"
        record = folder / f"{name}.jsonl"
        if not record.exists():
            # It appears when the run is over, so that a second start goes on with the next run.
            draft = record.with_suffix(".part")
            draft.unlink(missing_ok=True)
            options = dict(style=style, policy=policy, width=width, layers=layers, heads=heads, lr=rate, seed=seed)
            options |= {"kv-heads": kv_heads, "steps": steps, "batch": 4, "seq-len": 64, "every": 3, "warmup": 20}
            options |= dict(device="cpu", text=text, monitor=draft, log=os.devnull)
            given = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
            subprocess.run([sys.executable, script, *given, *more], check=True)
            draft.rename(record)
        yield part, name, record


def row(part, name, record):
    """A line of CSV."""
    found = sigmascale.diagnose(record)
    first = found["first"] or {}
    kinds = sorted({alarm["kind"] for alarm in found["alarms"]})
    shown = [first.get(key) for key in ("kind", "layer", "head", "since", "raised")]
    steps = found["last_step"] + 1
    cells = [part, name, steps, found["verdict"], *shown, found["loss_shows"], found["lead"], " ".join(kinds)]
    return ",".join("-" if cell is None else str(cell) for cell in cells)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, metavar="DIR", help="folder of text to train on")
    parser.add_argument("--to", required=True, metavar="FOLDER", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=300, help="steps of the trainings")
    parser.add_argument("--only", choices=["lab", "trainings"])
    parser.add_argument("--part", choices=["tuning", "heldout"])
    args = parser.parse_args()
    args.to.mkdir(parents=True, exist_ok=True)
    print("part,run,steps,verdict,first_alarm,layer,head,since,raised,loss_shows,lead,kinds_raised")
    if args.part:
        for table in (LAB, TRAININGS):
            table[:] = [run for run in table if run[0] == args.part]
    if args.only != "trainings":
        for part, name, record in lab(args.to):
            print(row(part, name, record), flush=True)
    if args.only != "lab":
        for part, name, record in trainings(args.to, args.text, args.steps):
            print(row(part, name, record), flush=True)


if __name__ == "__main__":
    main()
