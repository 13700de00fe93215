#!/usr/bin/env python3
"""Loss of FP8 attention beside BF16's over seeds, on real text and on text that brings the bias of FP8 sums out.

    python train_seeds.py --text DIR --out DIR2 --seeds 0,1,2 --steps 300 --size 125m --seq-len 4096 --batch 4
    python train_seeds.py --text DIR --out DIR2 --texts text --ways bf16,fp8,centered,centered-fp8-dq --steps 3000 --seconds 480 \\
        --csv runs.csv --size 125m --seq-len 4096 --batch 4 --lr 6e-4 --probe 250

Runs train_gpt.py once for each way, text and seed, in processes of their own, and prints the mean loss of the last 50
steps:

    bf16      PyTorch's attention
    fp8       this package's: P V in F16, delta from that output before its rounding
    centered  the same on keys and values without their means, which are taken anew every 500 steps
    fp8-dq, centered-fp8-dq
              with the product of dQ in FP8
    fp8-2048  P V in FP8 promoted every 2048 keys, and delta from that output, which is too small where V has a mean
              (docs/attention-numerics.md). For comparison only.

The second text has one line of it again and again, with a byte in twenty changed: tokens repeat, so values have a
common part. Runs whose log is there already are not repeated. `--seconds` ends after about so long, and the same command again
goes on from there. `--csv` writes losses, and of logged steps with `--probe` the error and bias factor of dQ by layer.
"""

import argparse
import json
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import time

LAST = 50
CENTERED = ["--center", "mean", "--center-every", "500"]
WAYS = {
    "bf16": ["--attention", "bf16"],
    "fp8": [],
    "centered": CENTERED,
    "fp8-dq": ["--gradients", "fp8-dq"],
    "centered-fp8-dq": [*CENTERED, "--gradients", "fp8-dq"],
    "fp8-2048": [],
}
# Seconds to start a process, and to end one.
LEAST = 30


def repeated(folder, to):
    """A megabyte of one line of the text, a byte in twenty changed."""
    import train_gpt

    line = bytes(train_gpt.read(folder)[0][:61].tolist())
    rng = random.Random(0)
    change = lambda byte: rng.choice(line) if rng.random() < 0.05 else byte
    to.mkdir(parents=True, exist_ok=True)
    (to / "repeated.txt").write_bytes(bytes(change(line[i % len(line)]) for i in range(1 << 20)))
    return to


def as_before():
    """Attention with P V in FP8, promoted every 2048 keys: nothing is computed again for delta."""
    from sigmascale.torch import _attention, _backends, _terms

    _attention._TRAINING = "fp8-2048"
    _attention._kept = lambda *_: _terms.OPERANDS

    def backward(grad, operands, descales, out, lse, terms, *_):
        return _backends.backend("native").backward(grad, operands, descales, out, lse, terms)

    _backends.backward = backward


def run(way, arguments):
    """One training, in this process."""
    import train_gpt

    if way == "fp8-2048":
        as_before()
    sys.argv = ["train_gpt.py", *WAYS[way], *arguments]
    train_gpt.main()


def rows_of(log):
    return [json.loads(line) for line in log.read_text().splitlines()]


def losses(log):
    rows = rows_of(log)
    steps = [row["loss"] for row in rows if "step" in row]
    return statistics.mean(steps[-LAST:]), rows[-1].get("held_out_loss")


def is_done(log):
    return log.exists() and "held_out_loss" in log.read_text()


def trained(log, way, arguments, seconds):
    """Runs or goes on with one training, for at most so long. Whether it has ended well."""
    saved = log.with_suffix(".checkpoint")
    command = [sys.executable, __file__, "run", way, *arguments, "--log", str(log)]
    if seconds is not None:
        command += ["--seconds", str(max(1, int(seconds))), "--save", str(saved)]
    if saved.exists():
        command += ["--load", str(saved)]
    if subprocess.run(command).returncode:
        print(f"# {log.name} failed", flush=True)
        return False
    if not is_done(log):
        print(f"# {log.name}: {rows_of(log)[-1].get('step', 0) + 1} steps so far", flush=True)
        return False
    shutil.rmtree(saved, ignore_errors=True)
    return True


def write_csv(file, logs):
    """Logged steps of every run."""
    with open(file, "w", encoding="utf-8") as out:
        print("text,attention,seed,step,loss,dq_layers,dq_error,dq_bias_factor,overflow", file=out)
        for (text, way, seed), log in logs.items():
            for row in rows_of(log) if log.exists() else ():
                if "step" in row and ("dq_error" in row or row["step"] % LAST == LAST - 1):
                    cells = [" ".join(map(str, row.get(name, ()))) for name in ("dq_layers", "dq_error", "dq_bias_factor", "overflow")]
                    print(text, way, seed, row["step"], f"{row['loss']:.5f}", *cells, sep=",", file=out)


def main():
    if len(sys.argv) > 1 and sys.argv[1] == "run":
        return run(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, metavar="DIR", help="folder of text to train on")
    parser.add_argument("--out", required=True, metavar="DIR", type=pathlib.Path, help="where logs go")
    parser.add_argument("--ways", default="bf16,fp8,fp8-2048")
    parser.add_argument("--texts", default="text,repeated")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", default="300")
    parser.add_argument("--seconds", type=float, help="end after about so long; the same command goes on")
    parser.add_argument("--csv", metavar="FILE", help="write losses, errors and bias factors")
    args, rest = parser.parse_known_args()
    args.out.mkdir(parents=True, exist_ok=True)
    texts = {"text": args.text}
    if "repeated" in args.texts:
        texts["repeated"] = str(repeated(args.text, args.out / "repeated"))
    found, logs, end = {}, {}, None if args.seconds is None else time.time() + args.seconds
    for text in args.texts.split(","):
        # Seeds outside: if time ends, every way has as many.
        for seed in args.seeds.split(","):
            for way in args.ways.split(","):
                log = logs[text, way, seed] = args.out / f"{text}-{way}-{seed}.jsonl"
                if not is_done(log):
                    left = None if end is None else end - time.time() - LEAST
                    arguments = ["--text", texts[text], "--seed", seed, "--steps", args.steps, "--every", "1", *rest]
                    if (left is not None and left <= 0) or not trained(log, way, arguments, left):
                        continue
                found.setdefault((text, way), []).append(losses(log))
                print(f"# {log.name}: {found[text, way][-1][0]:.4f}", flush=True)
    if args.csv:
        write_csv(args.csv, logs)
    print(f"| text | attention | mean loss of the last {LAST} steps, by seed | mean | held-out |")
    print("|---|---|---|---|---|")
    for (text, way), rows in found.items():
        last, held_out = zip(*rows)
        each = ", ".join(f"{loss:.4f}" for loss in last)
        print(f"| {text} | {way} | {each} | {statistics.mean(last):.4f} | {statistics.mean(held_out):.4f} |")
    for (text, way), rows in found.items():
        if way != "bf16" and (text, "bf16") in found:
            control = [loss for loss, _ in found[text, "bf16"]]
            mean = statistics.mean(loss for loss, _ in rows)
            verdict = "within" if min(control) <= mean <= max(control) else "outside"
            print(f"{text}, {way}: mean {mean:.4f} is {verdict} BF16's {min(control):.4f} to {max(control):.4f}")


if __name__ == "__main__":
    main()
