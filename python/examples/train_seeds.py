#!/usr/bin/env python3
"""Loss of FP8 attention beside BF16's over seeds, on real text and on text that brings the bias of FP8 sums out.

    python train_seeds.py --text DIR --out DIR2 --seeds 0,1,2 --steps 300 --size 125m --seq-len 4096 --batch 4

Runs train_gpt.py once for each way, text and seed, in processes of their own, and prints the mean loss of the last 50
steps:

    bf16      PyTorch's attention
    fp8       this package's: P V in F16, delta from that output
    fp8-2048  P V in FP8 promoted every 2048 keys, and delta from that output, which is too small where V has a mean
              (docs/attention-numerics.md). For comparison only.

The second text has one line of it again and again, with a byte in twenty changed: tokens repeat, so values have a
common part. Runs whose log is there already are not repeated.
"""

import argparse
import json
import pathlib
import random
import statistics
import subprocess
import sys

LAST = 50


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
    from sigmascale.torch import _attention, _backends

    _attention._TRAINING = "fp8-2048"

    def backward(grad, operands, descales, out, lse, terms, *_):
        return _backends.backend("native").backward(grad, operands, descales, out, lse, terms)

    _backends.backward = backward


def run(way, arguments):
    """One training, in this process."""
    import train_gpt

    if way == "fp8-2048":
        as_before()
    sys.argv = ["train_gpt.py", "--attention", "bf16" if way == "bf16" else "fp8", *arguments]
    train_gpt.main()


def losses(log):
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [row["loss"] for row in rows if "step" in row]
    return statistics.mean(steps[-LAST:]), rows[-1].get("held_out_loss")


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
    args, rest = parser.parse_known_args()
    args.out.mkdir(parents=True, exist_ok=True)
    texts = {"text": args.text}
    if "repeated" in args.texts:
        texts["repeated"] = str(repeated(args.text, args.out / "repeated"))
    found = {}
    for text in args.texts.split(","):
        # Seeds outside: if time ends, every way has as many.
        for seed in args.seeds.split(","):
            for way in args.ways.split(","):
                log = args.out / f"{text}-{way}-{seed}.jsonl"
                if not (log.exists() and "held_out_loss" in log.read_text()):
                    command = [sys.executable, __file__, "run", way, "--text", texts[text], "--seed", seed]
                    command += ["--steps", args.steps, "--every", "1", "--log", str(log), *rest]
                    if subprocess.run(command).returncode:
                        print(f"# {log.name} failed", flush=True)
                        continue
                found.setdefault((text, way), []).append(losses(log))
                print(f"# {log.name}: {found[text, way][-1][0]:.4f}", flush=True)
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
