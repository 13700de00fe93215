#!/usr/bin/env python3
"""Writes the tables of the guides from the dated records in benches/records, with the standard library alone.

    tables.py            rewrites every table between `<!-- table: NAME -->` and `<!-- end of table -->` in docs/*.md and README.md
    tables.py --check    changes nothing; exits with 1 and names the tables that do not agree with their records
"""

import csv
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benches" / "records"
PLACE = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
MODELS = {"gpt2-xl": "GPT-2 XL", "mistral-7b": "Mistral-7B", "llama-2-13b": "Llama-2-13B", "llama-2-70b": "Llama-2-70B"}
LAYERS = {"gpt2-xl": 48, "mistral-7b": 32, "llama-2-13b": 40, "llama-2-70b": 80}


def record(name):
    """Rows of a record as dicts. A record of several parts has a header before each; the first part counts."""
    lines = [line for line in (RECORDS / name).read_text().splitlines() if not line.startswith("#")]
    rows = list(csv.DictReader(lines))
    key = next(iter(rows[0]))
    return rows[: next((i for i, row in enumerate(rows) if row[key] == key), len(rows))]


def find(rows, **wanted):
    """The one row with these values."""
    found = [row for row in rows if all(row[key] == str(value) for key, value in wanted.items())]
    if len(found) != 1:
        raise SystemExit(f"{len(found)} rows of the record have {wanted}: expected one")
    return found[0]


def markdown(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    text = "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
    return text.replace("|  |", "| |").replace("| --- |", "|---|").replace(" --- |", "---|") + "\n"


def three(value):
    """Three digits."""
    value = float(value)
    digits = max(0, 2 - len(str(int(value))) + (1 if value >= 1 else 0))
    return f"{value:.{digits}f}" if value >= 1 else f"{value:.2f}"


def pair(rows, value, **shape):
    """Full and causal."""
    return " / ".join(value(find(rows, **shape, causal=causal)) for causal in (0, 1))


def heads(row):
    q, kv, d = row
    return f"{q} query, {kv} KV, of {d}"


def weight_spike():
    names = {
        "geometry": ("Sigmascale (`geometry`)", "the weights"),
        "current": ("current scaling (`current`)", "an additional pass over q, k and v"),
        "delayed-te": ("delayed scaling, TransformerEngine's settings (`delayed-te`)", "earlier steps"),
        "delayed-paper": ("delayed scaling, the paper's settings (`delayed-paper`)", "earlier steps"),
    }
    rows, table = record("2026-11-23-weight-spike-policies.csv"), []
    for policy, (name, needs) in names.items():
        row = find(rows, policy=policy)
        steps = [f"{row[column]} of {row['steps']}" for column in ("overflow_steps", "clipped_steps")]
        sqnr = [f"{float(row[column]):.1f} dB" for column in ("sqnr_db", "sqnr_worst_step_db")]
        table.append([name, needs, *steps, f"{float(row['max_utilization']):.2f}", *sqnr])
    header = ["scaling policy", "needs", "steps with overflow", "with clipping", "largest utilization", "output SQNR, median"]
    return markdown([*header, "in the worst step"], table)


def scale_pass():
    rows = record("2026-11-22-scale-pass.csv")
    cell = lambda model, method, column: float(find(rows, model=model, method=method)[column])
    lines = [
        ["descales of q, k, v and o, relative to the floor", "operand_descales", "ratio_after", ".2f"],
        ["whole plan with certified logit bounds, relative to the floor", "plan", "ratio_after", ".2f"],
        ["whole plan, us per layer", "plan", "after_1", ".1f"],
    ]
    table = [[name, *(format(cell(m, method, column), f) for m in MODELS)] for name, method, column, f in lines]
    return markdown(["", *MODELS.values()], [*table, ["layers", *LAYERS.values()]])


def attention_forward():
    rows = record("2026-11-22-attention-accumulators-h200.csv")
    table = []
    for shape, accumulators in (((64, 8, 128), ("fp8_256", "f16")), ((32, 32, 64), ("fp8_256", "f16"))):
        for i, accumulator in enumerate(accumulators):
            where = dict(zip(("heads_q", "heads_kv", "head_dim"), shape))
            ms = lambda row: three(float(row["before_ms"]) * float(row[accumulator]))
            cells = [pair(rows, ms, **where, seqlen=keys) for keys in (1024, 4096, 16384)]
            table.append([heads(shape) if i == 0 else "", f"`{accumulator.replace('_', '-')}`", *cells])
    return markdown(["heads", "P V", "1k keys", "4k", "16k"], table)


def attention_peers():
    rows = record("2026-11-21-attention-h200.csv")
    table = []
    for shape in ((64, 8, 128), (32, 32, 64)):
        for i, keys in enumerate((4096, 16384)):
            where = dict(zip(("heads_q", "heads_kv", "head_dim"), shape))
            cells = [pair(rows, lambda r: f"{float(r[c]):.2f}", **where, keys=keys) for c in ("sigmascale_ms", "cudnn_ms", "fa3_ms")]
            table.append([heads(shape) if i == 0 else "", keys, *cells])
    return markdown(["heads", "keys", "this kernel", "cuDNN FP8", "FlashAttention-3 FP8"], table)


def attention_calls():
    rows = record("2026-11-23-attention-calls-h200.csv")
    calls = {
        "32k keys, window of 1024": (32768, 32768, "fp8+window-1024"),
        "32k keys, window of 4096": (32768, 32768, "fp8+window-4096"),
        "32k keys, a sink per head": (32768, 32768, "fp8+sink"),
        "8 sequences of 2048, packed": (2048, 2048, "fp8+packed"),
        "8 x 2048, soft-cap": (2048, 2048, "fp8+cap"),
        "decoding, 64 sequences of 8k keys, lengths on the device": (8192, 1, "fp8+packed"),
    }
    ms = lambda keys, queries, kernel: float(find(rows, keys=keys, queries=queries, kernel=kernel)["ms"])
    shown = lambda value: f"{value:.2f}" if value > 0.6 else f"{value:.3f}"
    table = [[name, shown(ms(k, q, kernel)), shown(ms(k, q, "fp8"))] for name, (k, q, kernel) in calls.items()]
    return markdown(["call", "ms", "the same dense, ms"], table)


def training_kernel():
    rows = record("2026-11-22-attention-training-step-h200.csv")
    table = []
    for shape in ((64, 8, 128), (32, 8, 128), (32, 32, 64)):
        where = dict(zip(("heads_q", "heads_kv", "head_dim"), shape))
        short, long = (find(rows, **where, seqlen=seqlen) for seqlen in (2048, 8192))
        times = [three(row[c]) for row in (short, long) for c in ("e2e_ms", "cudnn_bf16_ms")]
        table.append([heads(shape), *times, short["e2e_mib"], short["cudnn_bf16_mib"]])
    return markdown(["heads", "8 x 2048, ms", "cuDNN BF16", "2 x 8192, ms", "cuDNN BF16", "MiB", "cuDNN BF16"], table)


def refresh():
    rows = record("2026-11-21-python-h200.csv")
    names = {
        "eager": "refresh_eager_percent",
        "from a CUDA graph": "refresh_graph_percent",
        "with certified logit bounds, eager": "refresh_logit_bounds_eager_percent",
        "with certified logit bounds, from a CUDA graph": "refresh_logit_bounds_graph_percent",
    }
    cells = lambda what: [f"{find(rows, what=what)[column]} %" for column in ("32_kv_heads", "8_kv_heads")]
    return markdown(["", "32 KV heads", "8 KV heads"], [[name, *cells(what)] for name, what in names.items()])


def training_step():
    rows = record("2026-11-23-training-h200.csv")
    sizes = {"125m": "125M, 4 x 4096 tokens", "1b": "1B, 2 x 4096 tokens"}
    table = []
    for size, name in sizes.items():
        both = [find(rows, size=size, attention=attention) for attention in ("fp8", "bf16")]
        speed = [f"{int(row['tokens_per_second']):,}" for row in both]
        table.append([name, *speed, *(f"{float(row['peak_gib']):.1f}" for row in both)])
    return markdown(["", "FP8, tokens per second", "BF16", "FP8, peak GiB", "BF16"], table)


TABLES = {
    f.__name__.replace("_", "-"): f
    for f in (weight_spike, scale_pass, attention_forward, attention_peers, attention_calls, training_kernel, refresh, training_step)
}


def main():
    check, seen, stale = "--check" in sys.argv[1:], set(), []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text()

        def table(match):
            name = match[2]
            if name not in TABLES:
                raise SystemExit(f"{page.name} asks for table {name}: there are {', '.join(TABLES)}")
            seen.add(name)
            made = TABLES[name]()
            if made != match[3]:
                stale.append(f"{page.name}: {name}")
            return match[1] + made + match[4]

        made = PLACE.sub(table, text)
        if made != text and not check:
            page.write_text(made)
    for name in TABLES.keys() - seen:
        stale.append(f"{name}: on no page")
    if stale and check:
        print("tables that do not agree with their records:", *stale, sep="\n  ")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
