#!/usr/bin/env python3
"""Accuracy on multiple-choice items under each scaling policy, and what utilization of E4M3's range has to do with it.

    accuracy.py MODEL --items 400 --to accuracy.csv

An item is a piece of a documentation string of the installed Python, and four words that may come next: the one that
does, and three that follow the same word in other strings. The model chooses the most probable. Chance is 25 %. Items are
made from the running Python at each run, so none is stored; the same Python, tokenizer and seed make the same.

Each run casts either the operands of attention (q, k, v and P) or its logits, as the spectral-bounds paper does. Runs with a
`stretch` multiply the descales of `geometry`, so that the same values use less of the range. `utilization` is the largest
magnitude of a layer's head in a batch over the largest that its descale can hold: median, tenth and ninetieth percentile.
Policies that remember see four other batches first. Errors are standard errors, of differences from those of pairs.
"""

import argparse
import ast
import collections
import csv
import pathlib
import platform
import random
import re
import sys
import sysconfig
import time

import torch
import transformers

import sigmascale
import sigmascale.torch as fp8

# Tokens in front of the word, items in a batch, and batches that are not counted.
LENGTH, BATCH, WARM = 48, 16, 4
FIELDS = (
    "model", "cast", "policy", "estimator", "stretch", "items", "accuracy", "error", "change", "change_error", "kl",
    "utilization_p10", "utilization_p50", "utilization_p90", "overflow", "seconds",
)  # fmt: skip

# cast, policy, estimator, stretch
RUNS = [
    (None, "bf16", "", 1),
    *[("operands", policy, "gram", 1) for policy in ("geometry", "current", "auto-c", "delayed-paper")],
    *[("logits", policy, "gram", 1) for policy in ("geometry", "geometry-c-star", "auto-c", "delayed-paper")],
    *[("logits", policy, "power-summed", 1) for policy in ("geometry-c-star", "auto-c")],
    *[(cast, "geometry", "gram", 1 << octaves) for cast in ("logits", "operands") for octaves in (6, 9, 12)],
]


def strings():
    """Documentation strings of the installed Python's library, in the order of its files."""
    for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if {"site-packages", "test", "tests", "idle_test", "lib2to3"} & set(path.parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                if text := ast.get_docstring(node):
                    yield " ".join(text.split())


def items_of(tokenizer, count, seed):
    """Tokens in front of a word, choices as tokens, and the place of the right one."""
    draw = random.Random(seed)
    every = list(dict.fromkeys(strings()))
    pair = re.compile(r"([A-Za-z]+) ([a-z]{4,})(?=[ ,.])")
    follows = collections.defaultdict(set)
    for text in every:
        for match in pair.finditer(text):
            follows[match[1]].add(match[2])
    token = {}
    for word in sorted(set().union(*follows.values())):
        ids = tokenizer.encode(" " + word, add_special_tokens=False)
        if len(ids) == 1:
            token[word] = ids[0]
    found = []
    draw.shuffle(every)
    for text in every:
        # One item a string: the last word that will do.
        for match in reversed(list(pair.finditer(text))):
            word, before = match[2], text[: match.start(2) - 1]
            others = sorted(w for w in follows[match[1]] if w != word and w in token)
            context = tokenizer.encode(before, add_special_tokens=False)
            if word in token and len(others) >= 3 and len(context) >= LENGTH:
                choices = [word, *draw.sample(others, 3)]
                draw.shuffle(choices)
                found.append((context[-LENGTH:], [token[w] for w in choices], choices.index(word)))
                break
        if len(found) == count:
            return found
    sys.exit(
        f"Python {platform.python_version()} has strings for {len(found)} items, fewer than {count}: lower --items"
    )


def attached(model, cast, policy, estimator, stretch, backend):
    """A runtime whose descales are `stretch` times as large as the policy's."""
    model.set_attn_implementation(fp8.register())
    named = sigmascale.AutoC(burn_in=WARM) if policy == "auto-c" else policy
    logits = "e4m3" if cast == "logits" else None
    runtime = fp8.attach(model, named, estimator=estimator, logits=logits, backend=backend)
    (runtime.logit_descales if logits else runtime.descales).mul_(stretch)
    return runtime


def used(runtime, cast):
    """The share of the range that each head used, and how many values overflowed, since the last batch."""
    stats = runtime.stats()
    if cast == "operands":
        shares, over = torch.from_numpy(stats["peak"]) / 448, stats["overflow"]
    else:
        largest = torch.maximum(*(torch.from_numpy(stats[name]).abs() for name in ("logit_max", "logit_min")))
        shares, over = largest / (448 * runtime.logit_descales.double().cpu()), stats["logit_overflow"]
    shares = shares.flatten()
    # Under `current` the largest value is 448 descales by definition, and nothing is reported.
    return (shares[shares > 0] if runtime.policy != "current" else torch.ones(1)), int(over.sum())


def answers(model, batch):
    """The log-probabilities of the next token of each item."""
    tokens = torch.tensor([context for context, _, _ in batch], device=model.device)
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits[:, -1]
    return torch.log_softmax(logits.float(), dim=1).cpu()


def run(model, items, cast, policy, estimator, stretch, backend):
    """Which items were right, the distributions, utilization, and the number of values that overflowed."""
    runtime = attached(model, cast, policy, estimator, stretch, backend) if cast else None
    if not cast:
        model.set_attn_implementation("sdpa")
    remembers = policy in ("auto-c", "delayed-paper")
    right, laws, shares, over = [], [], [], 0
    for number, first in enumerate(range(0, len(items), BATCH)):
        batch, counts = items[first : first + BATCH], number >= WARM
        if not (counts or remembers):
            continue
        law = answers(model, batch)
        if counts:
            right += [int(row[choices].argmax()) == place for row, (_, choices, place) in zip(law, batch)]
            laws.append(law)
        if counts and runtime:
            share, count = used(runtime, cast)
            shares.append(share)
            over += count
        if remembers:
            runtime.refresh()
        elif runtime:
            # Statistics alone: the weights are the same.
            runtime.words.zero_()
    return torch.tensor(right, dtype=torch.float64), torch.cat(laws), shares, over


def mean(values):
    """The mean, and its standard error."""
    return float(values.mean()), float(values.std() / len(values) ** 0.5)


def main():
    parse = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parse.add_argument("model", help="folder of a Hugging Face model")
    parse.add_argument("--items", type=int, default=400)
    parse.add_argument("--seed", type=int, default=0)
    parse.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parse.add_argument("--backend", default="auto", help="of the attention calls; on a CPU 'emulated' is fastest")
    parse.add_argument("--to", type=pathlib.Path, help="CSV file, to which rows are added that it has not")
    parse.add_argument("--only", default="", help="run only what has this in 'cast policy estimator stretch'")
    args = parse.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval().to(args.device)
    items = items_of(tokenizer, WARM * BATCH + args.items, args.seed)
    name, truth, laws = pathlib.Path(args.model).name, None, None
    done = set()
    if args.to and args.to.exists():
        with args.to.open(newline="") as file:
            done = {tuple(row[:6]) for row in csv.reader(file)}
    for cast, policy, estimator, stretch in RUNS:
        held = (name, cast or "none", policy, estimator, str(stretch), str(args.items)) in done
        if cast and (held or args.only not in f"{cast} {policy} {estimator} {stretch}"):
            continue
        start = time.perf_counter()
        right, found, shares, over = run(model, items, cast, policy, estimator, stretch, args.backend)
        if truth is None:
            truth, laws = right, found
        kl = sum(float((a.double().exp() * (a.double() - b.double())).sum()) for a, b in zip(laws, found)) / len(found)
        row = [name, cast or "none", policy, estimator, stretch, len(right), *mean(right), *mean(right - truth), kl]
        if cast:
            percentiles = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
            row += [*torch.quantile(torch.cat(shares).double(), percentiles).tolist(), over]
        else:
            row += ["", "", "", ""]
        row.append(time.perf_counter() - start)
        row = [f"{value:.5g}" if isinstance(value, float) else value for value in row]
        print(dict(zip(FIELDS, row)), flush=True)
        if args.to and not held:
            fresh = not args.to.exists()
            with args.to.open("a", newline="") as file:
                csv.writer(file).writerows([FIELDS, row] if fresh else [row])


if __name__ == "__main__":
    main()
