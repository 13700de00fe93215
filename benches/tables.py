#!/usr/bin/env python3
"""Writes the tables of the guides from the dated records in benches/records, with the standard library alone.

    tables.py            rewrites every table between `<!-- table: NAME -->` and `<!-- end of table -->` in README.md
                         and docs/**/*.md
    tables.py --check    changes nothing; exits with 1 and names the tables that do not agree with their records

Pictures are drawn by the scripts in docs/figures.
"""

import csv
import itertools
import json
import math
import pathlib
import re
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benches" / "records"
PLACE = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
MODELS = {"gpt2-xl": "GPT-2 XL", "mistral-7b": "Mistral-7B", "llama-2-13b": "Llama-2-13B", "llama-2-70b": "Llama-2-70B"}
SHAPE = ("heads_q", "heads_kv", "head_dim", "seqlen")
# Rows of this package: the kernel alone, and with the time to bring V into its layout.
OURS = ("sigmascale", "sigmascale+reorder")
LAYERS = {"gpt2-xl": 48, "mistral-7b": 32, "llama-2-13b": 40, "llama-2-70b": 80}


def record(name):
    """Rows of a record as dicts. A record of several parts has a header before each; the first part counts."""
    lines = [line for line in (RECORDS / name).read_text().splitlines() if not line.startswith("#")]
    rows = list(csv.DictReader(lines))
    key = next(iter(rows[0]))
    number = lambda cell: re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", str(cell))
    header = lambda row: row[key] == key and not any(map(number, row.values()))
    return rows[: next((i for i, row in enumerate(rows) if header(row)), len(rows))]


def find(rows, **wanted):
    """The one row with these values."""
    found = [row for row in rows if all(row[key] == str(value) for key, value in wanted.items())]
    if len(found) != 1:
        raise SystemExit(f"{len(found)} rows of the record have {wanted}: expected one")
    return found[0]


def markdown(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    text = "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
    return re.sub(r"\|  (?=\|)", "| ", text).replace("| --- |", "|---|").replace(" --- |", "---|") + "\n"


def three(value):
    """Three digits; below 1, three decimals."""
    value = float(value)
    return f"{value:.{max(0, 3 - len(str(int(value)))) if value >= 1 else 3}f}"


def heads(row):
    q, kv, d = row
    return f"{q} query, {kv} KV, d = {d}"


def change_entropy():
    table = []
    for (arithmetic, seed), group in itertools.groupby(
        record("2026-11-28-change-entropy.csv"), key=lambda row: (row["arithmetic"], row["seed"])
    ):
        *_, failing = sorted(group, key=lambda row: row["head"] == "2")
        steps = [failing[key] or "-" for key in ("entropy_below_0.1", "logit_above_1000", "loss_shows", "all_on_one_side")]
        table.append([f"`{arithmetic}`", seed, *steps, failing["least_entropy"]])
    header = ["arithmetic", "seed", "entropy below 0.1", "logits above 1000", "the loss shows it", "all on one side", "least entropy"]
    return markdown(header, table)


def scale_step():
    rows, table = record("2026-11-28-scale-step-h200.csv"), []
    name = lambda model: MODELS[model.split(",")[0]] + model[len(model.split(",")[0]) :]
    for row in rows:
        times = [row[key] or "-" for key in ("forward_ms", "with_scale_step_ms", "scale_step_ms")]
        whole = find(rows, model=row["model"], estimator="power")["forward_ms"]
        share = f"{100 * float(row['scale_step_ms']) / float(whole):.1f} %"
        table.append([name(row["model"]), f"`{row['estimator']}`", *times, share])
    return markdown(["model", "scales from", "forward", "with the scale step", "the step alone", "of the forward"], table)


def accuracy():
    table = []
    names = {"smollm2": "SmolLM2-135M", "qwen2.5-coder": "Qwen2.5-Coder-0.5B"}
    percent = lambda cell: f"{100 * float(cell):.1f} %"
    for row in record("2026-11-28-accuracy-cpu.csv"):
        policy = "BF16" if row["policy"] == "bf16" else f"`{row['policy']}`"
        policy += f", `{row['estimator']}`" if row["estimator"].startswith("power") else ""
        policy += f", scales times {row['stretch']}" if row["stretch"] != "1" else ""
        used = float(row["utilization_p50"] or "nan")
        change = f"{100 * float(row['change']):+.1f} ± {100 * float(row['change_error']):.1f}"
        plain = row["cast"] == "none"
        table.append([
            names[row["model"]], "" if plain else row["cast"], policy, "" if plain else f"{100 * used:.2g} %",
            f"{percent(row['accuracy'])} ± {percent(row['error'])}", "" if plain else change, "" if plain else f"{float(row['kl']):.4f}",
            "" if plain else row["overflow"],
        ])  # fmt: skip
    header = ["model", "cast", "scales", "utilization, median", "accuracy", "minus BF16, points", "KL of the next token", "overflows"]
    return markdown(header, table)


def weight_spike():
    names = {
        "geometry": ("Sigmascale (`geometry`)", "the weights"),
        "current": ("current scaling (`current`)", "an additional pass over q, k and v"),
        "delayed-te": ("delayed scaling, TransformerEngine's settings (`delayed-te`)", "earlier steps"),
        "delayed-paper": ("delayed scaling, the paper's settings (`delayed-paper`)", "earlier steps"),
    }
    rows, table = record("2026-11-28-weight-spike-policies.csv"), []
    for policy, (name, needs) in names.items():
        row = find(rows, policy=policy)
        steps = [f"{row[column]} of {row['steps']}" for column in ("overflow_steps", "clipped_steps")]
        sqnr = [f"{float(row[column]):.1f} dB" for column in ("sqnr_db", "sqnr_worst_step_db")]
        table.append([name, needs, *steps, f"{float(row['max_utilization']):.2f}", *sqnr])
    header = ["scaling policy", "needs", "steps with overflow", "with clipping", "largest utilization", "output SQNR, median"]
    return markdown([*header, "output SQNR, worst step"], table)


def scale_pass():
    rows = record("2026-11-24-scale-pass-h200.csv")
    cell = lambda model, method, column: float(find(rows, model=model, method=method)[column])
    lines = [
        ["descales of q, k, v and o, relative to the floor", "operand_descales", "ratio", ".2f"],
        ["whole plan with certified logit bounds, relative to the floor", "plan", "ratio", ".2f"],
        ["whole plan, us per layer", "plan", "us", ".1f"],
    ]
    table = [[name, *(format(cell(m, method, column), f) for m in MODELS)] for name, method, column, f in lines]
    return markdown(["", *MODELS.values()], [*table, ["layers", *LAYERS.values()]])


def scale_launches():
    rows = record("2026-11-24-scale-launches-h200.csv")
    models = {"2048x32x8x64x16": "Llama-3.2-1B", "2048x16x2x128x36": "Qwen2.5-3B", "3072x24x8x128x28": "Llama-3.2-3B"}
    models |= {name: MODELS[name] for name in ("gpt2-xl", "mistral-7b")}
    table = []
    for layers, method, name, column, form in (
        ("all", "operand_descales", "descales, whole model, relative to one read", "ratio", ".2f"),
        ("1", "operand_descales", "descales, one layer, us", "us", ".1f"),
        ("1", "plan", "whole plan, one layer, us", "us", ".1f"),
    ):
        for launches, when in (("before", "before"), ("norms+values", "now")):
            cell = lambda model: find(rows, layers=layers, model=model, method=method, launches=launches)[column]
            table.append([f"{name}, {when}", *(format(float(cell(model)), form) for model in models)])
    return markdown(["", *models.values()], table)


# Beside other libraries: records of benches/peers.py.


def peers(name):
    return record(f"2026-11-23-peers-{name}-h200.csv")


def shapes(rows):
    """Heads, head dimension and lengths of a record, in its order."""
    return list(dict.fromkeys((row["heads_q"], row["heads_kv"], row["head_dim"], row["seqlen"]) for row in rows))


def ratio(time, other):
    """How many times as fast: ratio of medians, and the least and the largest that the rounds allow. Rounded down."""
    down = lambda x: f"{math.floor(100 * x) / 100:.2f}"
    value = lambda a, b: float(other[a]) / float(time[b])
    return f"{down(value('ms', 'ms'))} ({down(value('low', 'high'))} to {down(value('high', 'low'))})"


def spread(row):
    """Median, least and largest."""
    return f"{three(row['ms'])} ({three(row['low'])} to {three(row['high'])})"


def comparison(rows, columns):
    """A row per call: ours in ms, then our speed relative to others; `columns` are pairs of contenders, ours and the other."""
    table, last = [], None
    for shape in shapes(rows):
        for causal in (0, 1):
            of = lambda kernel: find(rows, kernel=kernel, causal=causal, **dict(zip(SHAPE, shape)))
            ours = of("sigmascale")
            call = f"{ours['batch']} x {shape[3]}, {('full', 'causal')[causal]}"
            cells = [ratio(of(a), of(b)) for a, b in columns]
            first = heads(shape[:3]) if shape[:3] != last else ""
            table.append([first, call, spread(ours), *cells, f"{ours['watts']}, {ours['mhz']}"])
            last = shape[:3]
    return table


def forward():
    pairs = [(ours, peer) for peer in ("cudnn", "fa3") for ours in ("sigmascale", "sigmascale+reorder")]
    header = ["heads", "call", "ms", "speed (cuDNN = 1)", "with reordering", "speed (FlashAttention-3 = 1)", "with reordering"]
    return markdown([*header, "W, MHz"], comparison(peers("forward"), pairs))


def from_bf16():
    others = {
        "cudnn+cast": "speed (cuDNN FP8 = 1)",
        "cudnn+current": "its scales current",
        "fa3+cast": "speed (FlashAttention-3 FP8 = 1)",
        "fa3+current": "its scales current",
        "cudnn-bf16": "speed (cuDNN BF16 = 1)",
    }
    rows = comparison(peers("from-bf16"), [("sigmascale", other) for other in others])
    return markdown(["heads", "call", "ms", *others.values(), "W, MHz"], rows)


def from_bf16_rope():
    others = {
        "cudnn+cast": "speed (cuDNN FP8 = 1)",
        "fa3+cast": "speed (FlashAttention-3 FP8 = 1)",
        "cudnn-bf16": "speed (cuDNN BF16 = 1)",
    }
    rows = comparison(record("2026-11-24-from-bf16-rope-h200.csv"), [("sigmascale", other) for other in others])
    return markdown(["heads", "call", "ms", *others.values(), "W, MHz"], rows)


def training():
    rows, table, last = peers("training"), [], None
    for shape in shapes(rows):
        of = lambda kernel, causal: find(rows, kernel=kernel, causal=causal, **dict(zip(SHAPE, shape)))
        ours, other = ([of(kernel, causal) for causal in (0, 1)] for kernel in ("sigmascale", "cudnn-bf16"))
        first = heads(shape[:3]) if shape[:3] != last else ""
        times = [cell for a, b in zip(ours, other) for cell in (spread(a), ratio(a, b))]
        mib = [row[0]["mib"] for row in (ours, other)]
        power = "; ".join(f"{row['watts']}, {row['mhz']}" for row in ours)
        call = f"{ours[0]['batch']} x {shape[3]}"
        table.append([first, call, *times, *mib, power])
        last = shape[:3]
    header = ["heads", "call", "full, ms", "speed (BF16 = 1)", "causal, ms", "speed (BF16 = 1)", "MiB", "BF16, MiB"]
    return markdown([*header, "W, MHz: full; causal"], table)


def call_rows():
    """Contenders by call, of the latest record. One that refuses a call has a row without times."""
    latest = max(RECORDS.glob("*-peers-calls-*.csv"))
    found = []
    rows = record(latest.name)
    for ours in (row for row in rows if row["kernel"] == "sigmascale"):
        same = {key: ours[key] for key in ("call", *SHAPE, "batch", "causal")}
        alike = {row["kernel"]: row for row in rows if row["ms"] and same.items() <= row.items()}
        # Of two builds of FlashAttention-3 the faster.
        builds = [alike[key] for key in ("fa3", "fa3-vllm") if key in alike]
        alike.pop("fa3", None)
        alike |= {"fa3": min(builds, key=lambda row: float(row["ms"]))} if builds else {}
        found.append({**alike, "sigmascale": ours})
    return found


def calls():
    table, last = [], None
    for alike in call_rows():
        ours = alike["sigmascale"]
        pairs = [("sigmascale", "fa3"), ("sigmascale+reorder", "fa3"), ("sigmascale", "fa3-bf16")]
        call = ours["call"] if ours["call"] != last else ""
        shape = f"{ours['batch']} x {ours['seqlen']}, {('full', 'causal')[int(ours['causal'])]}"
        cells = [f"{ours['heads_q']}, {ours['heads_kv']}", shape, spread(ours) if ours["ms"] else "–"]
        cells += [ratio(alike[a], alike[b]) if a in alike and b in alike and alike[a]["ms"] else "–" for a, b in pairs]
        table.append([call, *cells, f"{ours['watts']}, {ours['mhz']}"])
        last = ours["call"]
    header = ["call", "query, KV heads", "tokens", "ms", "speed (FlashAttention-3 = 1)", "with reordering"]
    return markdown([*header, "speed (FlashAttention-3 BF16 = 1)", "W, MHz"], table)


def compared():
    """Every comparison on the page of times: calls, the other library, and pairs of rows (ours, theirs) by variant of ours."""
    names = {"cudnn": "cuDNN FP8", "fa3": "FlashAttention-3 FP8", "cudnn-bf16": "cuDNN BF16"}
    names |= {"fa3-bf16": "FlashAttention-3 BF16"}
    forward, bf16, rope = peers("forward"), peers("from-bf16"), record("2026-11-24-from-bf16-rope-h200.csv")
    for name, rows, suffix, others in (
        ("forward, E4M3 operands", forward, "", ("cudnn", "fa3")),
        ("forward from BF16, with casts", bf16, "+cast", ("cudnn", "fa3", "cudnn-bf16")),
        ("forward from BF16, with casts and RoPE", rope, "+cast", ("cudnn", "fa3", "cudnn-bf16")),
        ("forward and backward from BF16", peers("training"), "", ("cudnn-bf16",)),
    ):
        for other in others:
            kernel = other + suffix * (other != "cudnn-bf16")
            of = lambda row, kernel: find(rows, kernel=kernel, **{key: row[key] for key in (*SHAPE, "causal")})
            pairs = {ours: [(row, of(row, kernel)) for row in rows if row["kernel"] == ours] for ours in OURS}
            yield name, names[other], pairs
    for name, dim in (
        ("packed sequences and windows", "128"),
        ("heads of 96", "96"),
        ("heads of 256", "256"),
        ("heads of 192 and 128 (MLA)", "192"),
    ):
        for other in ("fa3", "fa3-bf16"):
            same = [call for call in call_rows() if call["sigmascale"]["head_dim"] == dim and other in call]
            pairs = {ours: [(call[ours], call[other]) for call in same if ours in call] for ours in OURS}
            # Operands in BF16 need no order of ours.
            yield name, names[other], pairs if other == "fa3" else {**pairs, OURS[1]: []}


def speed(pair):
    """How many times as fast as the other; rounded down, as in every table."""
    return math.floor(100 * float(pair[1]["ms"]) / float(pair[0]["ms"])) / 100


def overview():
    table, last = [], None
    for name, other, variants in compared():
        cells = []
        for speeds in (sorted(map(speed, pairs)) for pairs in variants.values()):
            middle = math.floor(100 * statistics.median(speeds)) / 100 if speeds else 0
            cells.append(f"{middle:.2f} ({speeds[0]:.2f} to {speeds[-1]:.2f})" if speeds else "–")
            cells.append(f"{sum(x < 1 for x in speeds)} of {len(speeds)}" if speeds else "–")
        table.append([name if name != last else "", other, *cells])
        last = name
    header = ["calls", "compared with", "speed", "slower in", "with reordering", "slower in"]
    return markdown(header, table)


def slower():
    """Every call that is slower than another library's, with its speed."""
    lines = []
    for name, other, variants in compared():
        for ours, pairs in variants.items():
            groups = {}
            for pair in (pair for pair in pairs if speed(pair) < 1):
                row = pair[0]
                call = f"{row['batch']} x {row['seqlen']} {('full', 'causal')[int(row['causal'])]} ({speed(pair):.2f})"
                groups.setdefault(heads([row[key] for key in SHAPE[:3]]), []).append(call)
            if not groups:
                continue
            found = "; ".join(f"{group}, {', '.join(calls)}" for group, calls in groups.items())
            speeds = sorted(map(speed, pairs))
            if speeds[-1] < 1:
                found = f"all {len(speeds)} calls ({speeds[0]:.2f} to {speeds[-1]:.2f})"
            lines.append(f"- **{name}{', with reordering' * (ours == OURS[1])}**, than {other}: {found}\n")
    return "".join(lines)


BIAS = {"sigmascale f16": "`f16`", "sigmascale fp8-256": "`fp8-256`", "fa3": "FlashAttention-3 FP8", "cudnn": "cuDNN FP8"}


def percent(row):
    """The signed error: three digits, at most four decimals."""
    value = 100 * float(row["signed_error"])
    return f"{value:.{min(4, 2 - math.floor(math.log10(abs(value))))}f} %"


def bias():
    rows, table = peers("bias"), []
    for keys in ("4096", "16384", "65536"):
        for mean in ("0.1", "0.3", "1.0", "3.0"):
            cells = [percent(find(rows, kernel=kernel, keys=keys, mean_of_v=mean)) for kernel in BIAS]
            table.append([keys if mean == "0.1" else "", f"{float(mean):g}", *cells])
    return markdown(["keys", "mean of V", *BIAS.values()], table)


def summary():
    """The README's: what a call loses, and a training step."""
    biases, steps, table = peers("bias"), peers("training"), []
    for keys in (16384, 65536):
        cells = [percent(find(biases, kernel=kernel, keys=keys, mean_of_v="1.0")) for kernel in BIAS]
        name = f"bias of the output, {keys // 1024}k keys, V ~ N(1, 1)"
        table.append([name, f"{cells[0]}; `fp8-256` {cells[1]}", *cells[2:], "–"])
    for shape in (("64", "8", "128", "16384"), ("32", "32", "128", "2048")):
        of = lambda kernel: find(steps, kernel=kernel, causal=1, **dict(zip(SHAPE, shape)))
        ours, other = of("sigmascale"), of("cudnn-bf16")
        q, kv, d, keys = shape
        call = f"{q} query and {kv} KV heads of {d}, {ours['batch']} x {keys} tokens"
        name = f"training step of attention, {call}, causal"
        table.append([f"{name}, ms", spread(ours), "–", "–", spread(other)])
        table.append(["its peak memory, MiB", ours["mib"], "–", "–", other["mib"]])
    header = ["one H200", "Sigmascale `f16`", "FlashAttention-3 FP8", "cuDNN FP8", "cuDNN BF16"]
    return markdown(header, table)


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
    rows = record("2026-11-24-training-h200.csv")
    sizes = {"125m": "125M, 4 x 4096 tokens", "1b": "1B, 2 x 4096 tokens"}
    table = []
    for (size, name), compiled in itertools.product(sizes.items(), ("0", "1")):
        ways, heads = ("fp8", "fp8-rope", "bf16"), dict(size=size, compiled=compiled)
        runs = {way: [row for row in rows if row | heads | {"attention": way} == row] for way in ways}
        speeds = {way: statistics.mean(int(row["tokens_per_second"]) for row in found) for way, found in runs.items() if found}
        cells = [f"{speeds[way]:,.0f} ({speeds[way] / speeds['bf16']:.2f})" if way in speeds else "–" for way in ways[:2]]
        memory = [f"{float(runs[way][0]['peak_gib']):.1f}" for way in ("fp8", "bf16")]
        table.append([name, "compiled" if compiled == "1" else "eager", *cells, f"{speeds['bf16']:,.0f}", *memory])
    heads = ["FP8, tokens per second (BF16 = 1)", "`rope=` in the cast", "BF16", "FP8, peak GiB", "BF16"]
    return markdown(["", "", *heads], table)


def evidence():
    rows = [row for row in record("2026-11-24-evidence-h200.csv") if row["model"] == "125m"]
    table = []
    for scenario in dict.fromkeys(row["scenario"] for row in rows):
        for policy in ("bf16", "geometry", "current", "delayed-te"):
            runs = [row for row in rows if (row["scenario"], row["policy"]) == (scenario, policy)]
            if not runs:
                continue
            cells = []
            for name in ("loss_last_50", "held_out_loss"):
                # In scenarios that change nothing of BF16, its calm run took the same steps.
                control = {row["seed"]: row for row in rows if row["policy"] == "bf16" and row["scenario"] != "spike"}
                if scenario == "spike":
                    control = {row["seed"]: row for row in rows if (row["policy"], row["scenario"]) == ("bf16", "spike")}
                shown = [float(row[name]) - (policy != "bf16") * float(control[row["seed"]][name]) for row in runs]
                cells.append(", ".join(f"{x:+.3f}" if policy != "bf16" else f"{x:.3f}" for x in shown))
            counts = [", ".join(row[name] for row in runs) for name in ("overflow_steps", "skipped")]
            table.append([f"`{scenario}`", "BF16 (losses)" if policy == "bf16" else f"`{policy}`", *cells, *counts])
    heads = ["loss minus BF16's, by seed", "held-out loss minus BF16's", "steps with overflow, of 60", "skipped"]
    return markdown(["scenario", "policy", *heads], table)


def ablations():
    rows = record("2026-11-23-ablations.csv")
    paper = {("eta", "0.8"), ("delta", "1e-6"), ("kappa", "1"), ("quantile", "0.9999")}
    table = []
    for row in rows:
        name, value = row["parameter"], row["value"]
        value = f"1e-{round(-math.log10(float(value)))}" if name == "delta" else value
        shown = value + " (paper)" * ((name, value) in paper)
        over = row["values_overflowed"].replace("%", " %")
        cells = [row["constant"], over, row["largest_of_448"], f"{row['used_percent_median']} %", row["sqnr_db"]]
        table.append([f"`{name}`", shown, f"`{row['policy']}`", *cells])
    heads = ["constant", "values overflowed", "largest / 448", "used, median", "SQNR, dB"]
    return markdown(["parameter", "value", "policy", *heads], table)


def low_precision():
    rows = record("2026-11-23-low-precision.csv")
    heads = range(sum(key.startswith("w_q_end_") for key in rows[0]))

    def span(values):
        low, high = min(values, key=float), max(values, key=float)
        return low if low == high else f"{low} to {high}"

    table = []
    for remedy in dict.fromkeys(row["remedy"] for row in rows):
        runs = [row for row in rows if row["remedy"] == remedy]
        doubled = [row["loss_doubled_at"] for row in runs if row["loss_doubled_at"] != "-"]
        count = f"{len(doubled)} of {len(runs)}"
        others = [[row[f"w_q_end_{head}"] for head in heads if head != 2] for row in runs]
        table.append(
            [
                f"`{remedy}`",
                f"**{count}**, at step {', '.join(doubled)}" if doubled else count,
                span([row["loss_end"] for row in runs]),
                span([row["w_q_end_2"] for row in runs]),
                span([max(norms, key=float) for norms in others]),
                span([row["logit_end_2"] for row in runs]),
            ]
        )
    norms = ["norm of W_Q of head 2 at the end", "largest of the other heads"]
    header = ["remedy", "loss doubled", "loss at the end", *norms, "largest \\|logit\\| of head 2 at the end"]
    return markdown(header, table)


def low_precision_settings():
    rows = record("2026-11-23-low-precision-settings.csv")
    names = {
        "plain": ("as above: one tile, three copies, V of one sign", ""),
        "tile32": ("tiles of 32 keys", "`--tile 32`"),
        "tile16": ("tiles of 16 keys", "`--tile 16`"),
        "copies2": ("two copies, whose sums have no tie", "`--copies 2`"),
        "none": ("V of both signs, no shared part of K", "`--head none`"),
        "beta8": ("shifted softmax, beta 8 instead of 2", "`--remedies shifted-softmax --beta 8`"),
    }
    table = []
    for key, name in names.items():
        row = find(rows, setting=key)
        doubled = "no" if row["loss_doubled_at"] == "-" else f"at step {row['loss_doubled_at']}"
        table.append([*name, doubled, row["w_q_end"]])
    start = find(rows, setting="plain")["w_q_start"]
    return markdown(["setting", "option", "loss doubled", f"norm of W_Q at the end ({start} at the start)"], table)


def bias_emulation():
    rows = record("2026-11-23-attention-bias-emulation.csv")
    return markdown(["keys", "mean of V", *list(rows[0])[2:]], [list(row.values()) for row in rows])


def gradients():
    rows = record("2026-11-24-attention-gradients-emulation.csv")
    kinds = [key.removesuffix("_error") for key in rows[0] if key.endswith("_error")]
    names = {
        ("fp8-2048", "f32", "dQ"): "O of `fp8-2048`",
        ("fp8-256", "f32", "dQ"): "O of `fp8-256`",
        ("f16", "f32", "dQ"): "O of `f16`",
        ("exact_o", "f32", "dQ"): "exact O and lse",
        ("p_dp", "f32", "dQ"): "sum of P dP",
        ("f16", "bf16", "dQ"): "O of `f16`, BF16 products",
        ("f16", "bf16", "dK"): "",
        ("exact_o", "bf16", "dQ"): "exact O and lse, BF16 products",
        ("exact_o", "bf16", "dK"): "",
    }
    table = []
    for (source, products, gradient), name in names.items():
        row = find(rows, delta_from=source, products=products, gradient=gradient)
        cells = [f"{row[f'{kind}_error']} / {row[f'{kind}_bias']}" for kind in kinds]
        # An error of a tenth of the gradient.
        cells = [f"**{cell}**" if float(row[f"{kind}_error"]) > 0.1 else cell for kind, cell in zip(kinds, cells)]
        table.append([name, gradient, *cells])
    return markdown(["delta from", "gradient: error / bias factor", *kinds], table)


def tested_calls():
    rows, table = record("2026-11-27-calls-h100.csv"), []
    for row in rows:
        where = ""
        if row["refused"].startswith("not run"):
            # A package was missing there: the row is that of the CPU.
            row, where = find(record("2026-11-27-calls-cpu.csv"), call=row["call"]), ", on the CPU"
        ran = f"refused: {row['refused']}" if row["refused"] else (row["ran_in"] or "a function") + where
        table.append([row["call"], ran, row["error"], row["error_exact_maxima"] or ("" if row["refused"] else "-")])
    return markdown(["call", "ran in", "error", "with exact maxima"], table)


def latent():
    rows = record("2026-11-23-latent-bounds.csv")
    names = {
        "random": "random",
        "spike": "rank-one spike in every projection",
        "power law": "power-law spectra",
        "uneven pairs": "rotation pairs uneven by 10^3",
        "copied key": "k_pe rows copied from the latent's, q_pe from q_nope",
        "orthogonal key": "k_pe orthogonal to the latent's rows",
    }
    table = []
    for key, name in names.items():
        row = find(rows, kind="logit", of=key)
        cells = [f"{row[f'{part}_median']} ({row[f'{part}_max']})" for part in ("with_query_latent", "without")]
        table.append([name, *cells])
    return markdown(["weights", "attained / exact bound, median (max), with a query latent", "without"], table)


def backward_order():
    rows = record("2026-11-23-attention-backward-walk-h200.csv")
    shapes = [(2, 2048), (8, 2048), (4, 4096), (2, 8192), (1, 16384)]
    of = lambda shape: find(rows, heads_q=64, heads_kv=8, sequences=shape[0], length=shape[1], causal=1)
    names = {"head by head": "before", "same tiles": "by_rows"}
    table = [[name, *(three(of(shape)[key]) for shape in shapes)] for name, key in names.items()]
    return markdown(["", *(f"{batch} x {length}" for batch, length in shapes)], table)


def low_precision_long():
    rows = record("2026-11-23-low-precision-long.csv")
    heads = range(sum(key.startswith("w_q_end_") for key in rows[0]))
    table = []
    for rate, remedy in dict.fromkeys((row["rate"], row["remedy"]) for row in rows):
        runs = [row for row in rows if (row["rate"], row["remedy"]) == (rate, remedy)]
        doubled = [row["loss_doubled_at"] for row in runs if row["loss_doubled_at"] != "-"]
        count = f"{len(doubled)} of {len(runs)}"
        largest = lambda column: ", ".join(
            max((row[f"{column}_{head}"] for head in heads), key=float) for row in runs
        )
        count = f"**{count}**, at step {', '.join(doubled)}" if doubled else count
        table.append([f"`{remedy}`", rate, count, largest("w_q_end"), largest("logit_end")])
    ends = ["largest norm of W_Q of any head at the end", "largest \\|logit\\| at the end"]
    return markdown(["remedy", "rate", "loss doubled", *ends], table)


def low_precision_kernels():
    table = []
    for row in record("2026-11-24-low-precision-kernels.csv"):
        doubled = row["loss_doubled_at"]
        doubled = doubled if doubled == "-" else f"**{doubled}**"
        table.append([f"`{row['arithmetic']}`", row["seed"], f"`{row['remedy']}`", doubled, row["loss_end"], row["w_q_end"]])
    ends = ["loss at the end", "largest norm of W_Q of any head at the end (9.79 at the start)"]
    return markdown(["arithmetic", "seed", "remedy", "loss doubled at step", *ends], table)


def delta_bias():
    names = {"bf16 flash": "PyTorch's flash attention, BF16", "bf16 cudnn": "cuDNN, BF16"}
    names |= {"fp8": 'FP8, P V in F16, `gradients="rounded-delta"`', "fp8 stabilise": "the same by default"}
    signs = {"one": "one sign", "both": "both signs"}
    rows, table = record("2026-11-24-delta-bias-h200.csv"), []
    percent = lambda x: f"{float(x):.2g} %" if float(x) < 100 else f"{float(x):.0f} %"
    for sign, kernel in itertools.product(signs, names):
        found = [row for row in rows if (row["d"], row["kernel"], row["sign_of_v"]) == ("128", kernel, sign)]
        cells = [", ".join(percent(row[column]) for row in found) for column in ("output_rms", "dq_error")]
        table.append([names[kernel], signs[sign], *cells])
    return markdown(["attention", "V", "error of the output, two seeds", "error of dQ, two seeds"], table)


def training_formats():
    rows = record("2026-11-23-training-formats.csv")
    table = []
    for key in dict.fromkeys((row["fp8"], row["rounding"], row["policy"]) for row in rows):
        runs = [row for row in rows if (row["fp8"], row["rounding"], row["policy"]) == key]
        column = lambda name: [row[name] for row in runs]
        span = lambda name: " to ".join(dict.fromkeys(sorted(column(name), key=float)[:: max(len(runs) - 1, 1)]))
        table.append(
            [*key[:2], f"`{key[2]}`", len(runs), ", ".join(column("overflow_steps")), span("loss_minus_f32")]
            + [span("sqnr_db"), span("softmax_kl")]
        )
    header = ["format", "rounding", "policy", "seeds", "steps with overflow, of 150", "loss minus f32's"]
    return markdown([*header, "output SQNR, dB", "softmax KL"], table)


def span(values, form=".2f"):
    """Smallest and largest."""
    return f"{min(values):{form}} to {max(values):{form}}"


def paged():
    rows, table = record("2026-11-23-paged-attention-h200.csv"), []
    for kind, name in (
        ("decode", "decoding"),
        ("draft", "drafts of 4 queries"),
        ("chunk512-8x", "8 chunks of 512 queries on 8k keys"),
        ("chunk512-1x", "one chunk of 512 queries on 8k keys"),
    ):
        found = [(row, float(row[ours])) for row in rows for ours in ("tiled_us", "rows_us") if row["row"].startswith(kind)]
        speeds = lambda peer: span([float(row[peer]) / us for row, us in found])
        table.append([name, speeds("fa3_paged_us"), speeds("fa3_us")])
    return markdown(["call", "speed (FlashAttention-3, same pages = 1)", "speed (FlashAttention-3, no pages = 1)"], table)


def text_error():
    names = {
        "error_plan": "FP8, scales from the weights",
        "error_exact_maxima": "FP8, scales from the exact maxima per head",
        "error_cudnn_fp8_output": "cuDNN FP8, whose output is FP8 too",
        "error_bf16": "BF16",
    }
    rows = record("2026-11-21-python-h200.csv")
    return markdown(["attention", "error"], [[name, find(rows, what=what)["32_kv_heads"]] for what, name in names.items()])


def accumulators():
    rows = record("2026-11-22-attention-accumulators-h200.csv")
    of = lambda column, d: span([float(row[column]) for row in rows if row["head_dim"] == d])
    table = [[f"`{name}`", of(column, "128"), of(column, "64")] for name, column in (("f16", "f16"), ("fp8-256", "fp8_256"))]
    return markdown(["setting", "heads of 128", "heads of 64"], table)


def training_seeds():
    rows, table = record("2026-11-24-training-seeds-h200.csv"), []
    for text, way in dict.fromkeys((row["text"], row["attention"]) for row in rows):
        of = lambda column: [float(row[column]) for row in rows if (row["text"], row["attention"]) == (text, way)]
        losses = [f"{loss:.4f}" for loss in of("loss_last_50")]
        means = [f"{statistics.mean(of(column)):.4f}" for column in ("loss_last_50", "held_out_loss")]
        table.append([{"text": "sources", "repeated": "one line"}[text], f"`{way}`", ", ".join(losses), *means])
    header = ["text", "attention", "loss of the last 50 steps, seeds 0, 1, 2", "mean", "held-out loss, mean"]
    return markdown(header, table)


def backward_wide():
    rows, table = record("2026-11-23-attention-backward-wide-h200.csv"), []
    for shape in (("16", "8", "256"), ("16", "16", "192")):
        step = {"kernel": "fp8", "pass": "fwd_bwd", **dict(zip(SHAPE, shape))}
        speed = lambda keys, causal: f"{float(find(rows, seqlen=keys, causal=causal, **step)['tflops']):.0f}"
        table.append([heads(shape), *(f"{speed(keys, 0)}, {speed(keys, 1)}" for keys in (2048, 8192))])
    return markdown(["heads", "8 x 2048", "2 x 8192"], table)


def constants():
    """gamma and c_star of the profiles, beside those that the paper prints in its Table 3."""
    paper = {
        "gpt2-xl": ("2.98", "0.074"),
        "mistral-7b": ("2.26", "0.035"),
        "llama-2-13b": ("2.28", "0.028"),
        "llama-2-70b": ("2.32", "0.018"),
    }
    table = []
    for name, (gamma, c_star) in paper.items():
        found = json.loads((ROOT / "calibration" / "profiles" / f"{name}.json").read_text())["c_star"]
        table.append([name, f"{found['gamma']:.4f}", gamma, f"{found['c_star']:.6f}", c_star])
    return markdown(["model", "gamma", "paper", "c_star", "paper"], table)


def families():
    rows = record("2026-11-23-family-ascent.csv")
    names = {"q": "q", "k": "k", "v": "v", "logit": "logit, of the exact bound", "bf16": "q, k and v in BF16"}
    table = []
    for column, name in names.items():
        values = sorted(float(row[column]) for row in rows if row[column])
        table.append([name, len(values), *(f"{x:.2f}" for x in (values[0], statistics.median(values), values[-1]))])
    return markdown(["reached / bound", "types", "smallest", "median", "largest"], table)


def moving_weights():
    rows, table = record("2026-11-24-scale-moving-h200.csv"), []
    us = lambda form: f"{float(find(rows, form=form)['us']):.1f}"
    for form, name in (
        ("one launch per model", "one for the model: `ScaleEngine`"),
        ("one engine per layer", "one per layer: `ScaleEngine`"),
        ("addresses by value", "one for the shape, addresses with each launch: `ShapeEngine`"),
    ):
        table.append([name, us("descales: " + form), us("plan: " + form)])
    return markdown(["engine", "descales", "plan"], table)


def alarms():
    rows, table = [row for row in record("2026-11-23-diagnose.csv") if row["part"] == "heldout"], []
    several = lambda values: ", ".join(dict.fromkeys(map(str, values)))
    for rate, name in (("0.001", "1e-3"), ("0.002", "2e-3")):
        runs = [row for row in rows if row["run"].startswith(f"lab-lr{rate}-none-")]
        named = sum(row["head"] == "2" for row in runs)
        # The lead is counted from the head's first alarm, which is `logit-limit` in these runs.
        first = several(int(row["loss_shows"]) - int(row["lead"]) for row in runs)
        cells = [first, *(several(row[column] for row in runs) for column in ("raised", "loss_shows", "lead"))]
        table.append([f"BF16, rate {name}, {len(runs)} seeds", f"head 2, {named} of {len(runs)}", *cells])
    header = ["runs, held out", "head named", "its first alarm, `logit-limit`, at step", "`delta-bias` raised at step"]
    return markdown([*header, "loss shows at step", "lead, steps"], table)


def weight_sync():
    rows = record("2026-11-27-scale-stream-h100.csv")
    of = lambda way: statistics.median(float(row["wall_s"]) for row in rows if row["way"] == way)
    copy = of("copy from the host")
    relative = lambda seconds: f"{100 * seconds / copy:.1f} %"
    table = [["copy of all weights from pinned host memory, H100", f"{1000 * copy:.0f} ms", "100 %"]]
    for way, name in (
        ("copy on the device", "copy of all weights on the device, H100"),
        ("scales", "`ScaleStream` with CUDA tensors, H100"),
        ("scales after each layer", "the same, scales read after each layer"),
    ):
        table.append([name, f"{1000 * of(way):.1f} ms", relative(of(way))])
    rows = record("2026-11-23-scale-stream.csv")
    # The attention weights of the 32 layers of the model, at the smallest and largest rate of all runs.
    size = 32 * float(rows[0]["gigabytes"]) / float(rows[0]["layers"])
    times = [size / float(row["gigabytes_per_wall_s"]) for row in rows]
    percent = span([100 * seconds / copy for seconds in times], ".0f")
    table.append(["`ScaleStream` on the host", f"{span(times, '.1f')} s", f"{percent} %"])
    return markdown(["what", "time per weight sync", "relative to the copy from the host"], table)


SERVED = {"smollm2": "SmolLM2-135M-Instruct", "qwen2.5-coder": "Qwen2.5-Coder-0.5B-Instruct", "gemma3": "Gemma 3 270M"}


def served_magnitudes():
    rows, table = record("2026-11-28-served-layers-h200.csv"), []
    for model in (model for model in SERVED if any(row["model"] == model for row in rows)):
        layers = [row for row in rows if row["model"] == model]
        most = lambda key: max(float(row[key]) for row in layers)
        slack = lambda x: statistics.median(448 * float(row[f"scale_{x}"]) / float(row[f"max_{x}"]) for row in layers)
        biased = sum(float(row["max_key_bias"]) > 0.5 * float(row["max_k"]) for row in layers)
        over = ", ".join(str(sum(float(row[f"scale_{x}"]) > 1 for row in layers)) for x in "qkv")
        table.append(
            [SERVED[model], *(f"{most(f'max_{x}'):.3g}" for x in "qkv"), f"{over} of {len(layers)}", f"{biased} of {len(layers)}"]
            + [", ".join(f"{slack(x):.2g}" for x in "qkv")]
        )
    return markdown(
        ["model", "largest q", "largest k", "largest v", "layers that can exceed 448 (q, k, v)", "layers with a dominant key bias", "bound / largest seen (q, k, v; median layer)"], table
    )


def served_cache():
    rows, table = record("2026-11-28-served-cache-h200.csv"), []
    ways = {
        "bf16": "BF16 cache",
        "fixed": "FP8, scales of 1.0",
        "calibrated": "FP8, maxima of other text",
        "maxima": "FP8, maxima of this text",
        "plugin": "FP8, scales from the weights",
        "centered-fixed": "FP8, centered keys, scales of 1.0",
        "centered": "FP8, centered keys, scales from the weights",
    }
    for model in (model for model in SERVED if any(row["model"] == model for row in rows)):
        measured = {case: name for case, name in ways.items() if any((row["model"], row["case"]) == (model, case) for row in rows)}
        for place, (case, name) in enumerate(measured.items()):
            row = find(rows, model=model, case=case)
            change = f" ({float(row['change_percent']):+.2f} ± {float(row['standard_error_percent']):.2f} %)" if case != "bf16" else ""
            table.append([SERVED[model] if place == 0 else "", name, f"{float(row['perplexity']):.3f}{change}", row["kl"] or "", row["rms_logprob"] if case != "bf16" else ""])
    return markdown(["model", "cache", "perplexity", "mean KL", "rms change of a token's log-probability"], table)


def real_slack():
    rows, table = record("2026-11-27-real-models-slack-cpu.csv"), []
    for model, name in SERVED.items():
        of = lambda operand: find(rows, model=model, operand=operand)
        slack = lambda row: f"{row['slack_min']}, {row['slack_median']}, {row['slack_max']}"
        table.append([name, *(slack(of(x)) for x in ("q", "k", "v", "logits")), "; ".join(of(x)["largest_seen"] for x in "qkv")])
    return markdown(["bound / largest seen: least, median, most", "q", "k", "v", "logits", "largest q; k; v"], table)


def real_cache():
    rows, table = record("2026-11-27-real-models-cache-cpu.csv"), []
    names = {"1.0": "1.0", "weights": "from the weights", "weights per head": "from the weights, per head", "maxima of this text": "maxima of this text"}
    for scales, name in names.items():
        found = [next((row for row in rows if (row["model"], row["scales"]) == (model, scales)), None) for model in SERVED]
        table.append([name, *("" if row is None else f"{float(row['change_percent']):+.1f} %, {row['kl']}" for row in found)])
    return markdown(["scales of keys and values", *SERVED.values()], table)


def served_long():
    rows, table = record("2026-11-28-served-long-h200.csv"), []
    lengths = sorted({int(row["tokens"]) for row in rows})
    for case, name in (("long-bf16", "BF16 cache"), ("long-plugin", "FP8, scales from the weights"), ("long-centered", "FP8, centered keys")):
        cells = []
        for length in lengths:
            of = lambda way: float(find(rows, case=way, kind="perplexity", tokens=length)["value"])
            change = f" ({100 * (of(case) / of('long-bf16') - 1):+.1f} %)" if case != "long-bf16" else ""
            found = [float(row["value"]) for row in rows if (row["case"], row["kind"], row["tokens"]) == (case, "found", str(length))]
            cells.append(f"{of(case):.3f}{change}; {100 * statistics.mean(found):.0f} %")
        table.append([name, *cells])
    starts = [0, *lengths]
    return markdown(["cache", *(f"{start} to {end}" for start, end in zip(starts, lengths))], table)


# Centers of keys and values: records of benches/centers.py, and of engines.


def centered_cache():
    rows, table = record("2026-11-28-served-cache-h200.csv"), []
    ways = {"keys as they are": ("fixed", "plugin"), "c from the weights": ("centered-fixed", "centered")}
    for name, cases in ways.items():
        for case, scales in zip(cases, ("1.0", "from the weights")):
            row = find(rows, model="qwen2.5-coder", case=case)
            change = f"{float(row['change_percent']):+.2f} ± {float(row['standard_error_percent']):.2f} %"
            table.append([name if case == cases[0] else "", scales, change, f"{float(row['kl']):.4f}"])
    return markdown(["Qwen2.5-Coder-0.5B", "scales", "change of perplexity", "KL"], table)


def centered_gradients():
    rows, table = record("2026-11-28-centers-gradients-h200.csv"), []
    names = {"none": "none", "m": "m", "c": "c", "c and m": "c and m", "stale": "c and m, stale"}
    ways = [
        ("P V in F16, delta of the stored output", "f16", "operands"),
        ("P V in F16 (default)", "f16", "unrounded-delta"),
        ("P V in FP8, promoted every tile", "fp8-256", "operands"),
        ('P V in F16, `gradients="fp8-dq"`', "f16", "fp8-dq"),
        ('P V in FP8, every 2048 keys, `gradients="fp8-dq"`', "fp8-2048", "fp8-dq"),
    ]
    for name, pv, keeps in ways:
        of = lambda centers: find(rows, data="aligned", centers=centers, pv=pv, keeps=keeps)
        cell = lambda row: f"{100 * float(row['dq_error']):.2f} %, {float(row['dq_bias']):.1f}"
        table.append([name, *(cell(of(centers)) for centers in names)])
    return markdown(["error and bias factor of dQ", *names.values()], table)


def centered_outputs():
    rows, table = record("2026-11-28-centers-shrinkage-h200.csv"), []
    ways = ("none", "mean", "512 others")
    for keys, mean in itertools.product((4096, 65536), ("0.1", "1.0", "3.0")):
        found = [find(rows, keys=keys, mean=mean, m=m, pv="fp8-256") for m in ways]
        cells = [f"{float(row['percent']):+.3f} %; {float(row['rms_percent']):.2f} %" for row in found]
        table.append([keys, mean, *cells])
    return markdown(["keys", "mean of V", "no m", "m = mean of V", "m from 512 other tokens"], table)


def centered_cost():
    rows, table = record("2026-11-28-centers-cost-h200.csv"), []
    shape = ("batch", "heads_q", "heads_kv", "head_dim", "len_q", "len_k")
    for own in dict.fromkeys(tuple(row[key] for key in shape) for row in rows):
        cells = []
        for pv, keeps, what in (("fp8-256", "nothing", "forward"), ("f16", "operands", "forward"), ("f16", "operands", "backward")):
            at = {"pv": pv, "keeps": keeps, "what": what} | dict(zip(shape, own))
            if not any(all(row[key] == value for key, value in at.items()) for row in rows):
                cells.append("")
                continue
            of = lambda run, centers: float(find(rows, run=run, centers=centers, **at)["ms"])
            ratios = [of(run, "c and m") / of(run, "none") for run in (1, 2)]
            cells.append(f"{min(ratios):.2f} to {max(ratios):.2f}")
        batch, q, kv, d, len_q, len_k = own
        table.append([f"{batch} x {len_q} over {len_k}, {heads((q, kv, d))}", *cells])
    return markdown(["shape", "forward, P V in FP8", "forward, P V in F16", "backward"], table)


TABLES = {
    f.__name__.replace("_", "-"): f
    for f in (
        weight_spike,
        overview,
        slower,
        scale_pass,
        scale_launches,
        forward,
        from_bf16,
        from_bf16_rope,
        calls,
        training,
        bias,
        summary,
        attention_calls,
        refresh,
        training_step,
        evidence,
        ablations,
        low_precision,
        low_precision_settings,
        bias_emulation,
        gradients,
        tested_calls,
        served_magnitudes,
        served_cache,
        served_long,
        real_slack,
        real_cache,
        centered_cache,
        centered_gradients,
        centered_outputs,
        centered_cost,
        low_precision_long,
        low_precision_kernels,
        delta_bias,
        training_formats,
        latent,
        backward_order,
        paged,
        text_error,
        accumulators,
        training_seeds,
        backward_wide,
        constants,
        families,
        moving_weights,
        alarms,
        weight_sync,
        scale_step,
        accuracy,
        change_entropy,
    )
}


def main():
    check, seen, stale = "--check" in sys.argv[1:], set(), []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
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
    stale = stale if check else []
    if stale:
        print("what does not agree with its record:", *stale, sep="\n  ")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
