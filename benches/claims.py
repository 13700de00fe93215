"""Figures in the prose of the README and the guides, computed from the dated records.

`claims()` gives pairs of a page and a phrase that must be on it, word by word, whatever its line breaks. `tables.py
--check` names those that are missing: change the sentence, or the record that it is computed from. The standard library
alone.
"""

import json
import math
import statistics

import tables
from tables import SHAPE, find, peers, record


def span(values, form=".2f", join=" to "):
    """Smallest and largest."""
    return f"{min(values):{form}}{join}{max(values):{form}}"


def down(values):
    """Smallest and largest ratio, rounded down to two decimals."""
    return span([math.floor(100 * value) / 100 for value in values])


def readme():
    rows = record("2026-11-24-training-h200.csv")
    speeds = {}
    for row in rows:
        key = row["size"], row["compiled"], row["attention"]
        speeds.setdefault(key, []).append(int(row["tokens_per_second"]))
    means = {key: statistics.mean(found) for key, found in speeds.items()}
    gains = [means[key] / means[key[:2] + ("bf16",)] for key in means if key[2] != "bf16"]
    rotated = [means[key] / means[key[:2] + ("fp8",)] for key in means if key[2] == "fp8-rope"]
    whole = f"{span(gains)} times as fast as with PyTorch's BF16"
    yield "README.md", whole
    yield "docs/performance.md", whole
    yield "docs/pytorch.md", f"[{span(rotated)} times](performance.md#pytorch) as fast"
    steps = record("2026-11-23-weight-spike.csv")
    largest = lambda policy, rows: max(float(row[policy]) for row in rows)
    spike = steps[10:]
    yield "README.md", f"Sigmascale stays at {largest('geometry', steps):.2f}."
    yield "README.md", (
        f"with the paper's settings reaches {largest('delayed-paper', steps):.1f} at the checkpoint load and "
        f"{largest('delayed-paper', spike):.1f} when the weights grow; with TransformerEngine's settings it reaches "
        f"{largest('delayed-te', spike):.1f} when the weights grow"
    )


def performance():
    page = "docs/performance.md"
    rows = record("2026-11-24-scale-pass-h200.csv")
    ratios = [float(find(rows, model=model, method="operand_descales")["ratio"]) for model in tables.MODELS]
    yield page, f"**Scales from weights** take {span(ratios)} times as long as one read of W_Q, W_K and W_V"
    ((_, _, steps),) = (part for part in tables.compared() if part[0] == "forward and backward from BF16")
    speeds = [tables.speed(pair) for pair in steps["sigmascale"]]
    faster = [speed for speed in speeds if speed >= 1]
    yield page, f"{span(faster)} times as fast as cuDNN's BF16 graphs in {len(faster)} of {len(speeds)} calls"
    rows = record("2026-11-21-policy-step-h200.csv")
    percent = lambda column: [float(row[column]) for row in rows]
    eight = span(percent("overhead_8x1024_percent"), ".2g")
    yield page, f"is {eight} % of a BF16 forward of the whole model with 8 sequences"
    yield page, f"and {span(percent('overhead_1x1024_percent'), '.2g')} % with one sequence"
    rows = [row for row in peers("forward") if row["kernel"] == "sigmascale"]
    least = max(1 - float(row["low"]) / float(row["ms"]) for row in rows)
    yield page, f"smallest time is up to {100 * least:.0f} % below its median"
    drawn = {"128": ("64", "8"), "64": ("32", "32")}  # in docs/figures/attention_roofline.py
    rows = [row for row in peers("forward") if row["causal"] == "0" and row["kernel"] in ("sigmascale", "fa3", "cudnn")]
    of = lambda row: (row["head_dim"], (row["heads_q"], row["heads_kv"]))
    full = lambda d: [float(row["tflops"]) for row in rows if of(row) == (d, drawn[d])]
    yield page, f"Heads of 128: {span(full('128'), '.0f')} of 2140 TFLOP/s; heads of 64: {span(full('64'), '.0f')} of 1070"
    rows = record(max(tables.RECORDS.glob("*-peers-calls-*.csv")).name)
    both = {}
    for row in rows:
        if row["ms"] and row["kernel"] in ("fa3", "fa3-vllm") and row["call"].startswith("packed"):
            both.setdefault(tuple(row[key] for key in ("call", *SHAPE, "causal")), {})[row["kernel"]] = float(row["ms"])
    slower = [found["fa3-vllm"] / found["fa3"] for found in both.values() if len(found) == 2]
    yield page, f"vLLM's takes {span(slower)} times as long"
    rows = record("2026-11-24-attention-telemetry-h200.csv")
    cost = {}
    for row in (row for row in rows if row["kernel"] == "fp8"):
        other = find(rows, kernel="fp8+telemetry", causal=row["causal"], **{key: row[key] for key in SHAPE})
        cost.setdefault(int(row["seqlen"]) >= 4096, []).append(100 * (float(other["ms"]) / float(row["ms"]) - 1))
    long, short = span(cost[True], ".0f"), span(cost[False], ".0f")
    yield page, f"adds {long} % with 4096 keys or more, and {short} % with 1024"
    yield "docs/attention-kernel.md", f"take {long} % of a call with 4096 keys or more, and {short} % with 1024"
    yield "docs/attention-calls.md", f"costs {span(cost[True] + cost[False], '.0f')} % of a forward on E4M3 operands"
    rows = record("2026-11-23-paged-attention-h200.csv")
    both = [(row, float(row[ours])) for row in rows for ours in ("tiled_us", "rows_us")]
    speeds = lambda kinds, peer: [float(row[peer]) / us for row, us in both if row["row"].startswith(kinds)]
    few, chunk = ("decode", "draft"), "chunk"
    same = span(speeds(few, "fa3_paged_us"))
    yield page, f"decoding is {same} times as fast as FlashAttention-3"
    yield page, f"decoding and drafts of 4 queries are {same} times as fast as FlashAttention-3"
    yield page, f"a chunk of 512 queries on 8k keys {span(speeds(chunk, 'fa3_paged_us'))} times"
    yield page, f"in decoding and drafts ({span(speeds(few, 'fa3_us'))} times as fast here)"
    yield page, f"faster in chunks ({span(speeds(chunk, 'fa3_us'))})"
    rows = record("2026-11-23-paged-decode-h200.csv")
    tokens = {row["pages"]: float(row["tokens_per_second"]) for row in rows}
    yield page, f"gives {tokens['e4m3-tiled'] / tokens['bf16-fa3-no-pages']:.1f} times the tokens per second"
    rows = record("2026-11-21-python-h200.csv")
    error = {row["what"]: row["32_kv_heads"] for row in rows}
    yield page, (
        f"{error['error_plan']} with scales from the weights and {error['error_exact_maxima']} with the exact maxima "
        f"of each head; {error['error_cudnn_fp8_output']} for cuDNN, whose output is FP8 too; {error['error_bf16']} for BF16"
    )


def bias():
    rows = peers("bias")
    of = lambda kernel, keys: abs(100 * float(find(rows, kernel=kernel, keys=keys, mean_of_v="1.0")["signed_error"]))
    keys = (4096, 16384, 65536)
    ours = max(of(kernel, n) for kernel in ("sigmascale f16", "sigmascale fp8-256") for n in keys)
    theirs = [{round(of(kernel, n)) for kernel in ("fa3", "cudnn")} for n in keys[:1] + keys[2:]]
    (first,), (last,) = theirs
    text = (
        f"Sigmascale: at most {ours:.2f} % at 4k, 16k and 64k keys. FlashAttention-3 and cuDNN in FP8: about -{first} % "
        f"at 4k keys, -{of('fa3', 16384):.0f} % at 16k and -{last} % at 64k"
    )
    for page in ("docs/performance.md", "docs/attention-numerics.md"):
        yield page, text


def backward():
    page = "docs/attention-backward.md"
    rows = record("2026-11-23-attention-backward-lanes-h200.csv")
    rows = [row for row in rows if (row["kernel"], row["pass"]) == ("e2e", "fwd_bwd")]
    ratio = lambda row, column: float(row[column]) / float(row["one_part"])
    square = [ratio(row, "default") for row in rows if row["heads_kv"] == row["heads_q"]]
    yield page, f"in these parts took {span(square)} times as long as in one part"
    rows = record("2026-11-24-attention-stabilise-h200.csv")
    with_it = lambda row: find(rows, way="stabilise", **{key: row[key] for key in ("heads_q", "d", "seqlen", "causal")})
    plain = [row for row in rows if row["way"] == "plain"]
    costs = [100 * (float(with_it(row)["ms"]) / float(row["ms"]) - 1) for row in plain]
    yield page, f"the size of the output, {max(0, round(min(costs)))} to {max(costs):.0f} % of both passes"
    longer = f"{max(0, round(min(costs)))} to {max(costs):.0f} % longer"
    yield "docs/pytorch.md", f"Forward and backward of attention take {longer}"
    rows = record("2026-11-24-training-seeds-h200.csv")
    runs = lambda text, way: [row for row in rows if (row["text"], row["attention"]) == (text, way)]
    of = lambda text, way, column: [float(row[column]) for row in runs(text, way)]
    for way, name in (("bf16", "BF16"), ("fp8", "FP8")):
        losses = of("text", way, "loss_last_50")
        yield page, f"{name} {', '.join(f'{x:.4f}' for x in losses)} (mean {statistics.mean(losses):.4f})"
        yield page, f"{name} {', '.join(f'{x:.4f}' for x in of('repeated', way, 'loss_last_50'))}"
        yield page, f"{name} {statistics.mean(of('text', way, 'held_out_loss')):.4f}"


def accumulators():
    rows = record("2026-11-22-attention-accumulators-h200.csv")
    of = lambda column, d: span([float(row[column]) for row in rows if row["head_dim"] == d])
    for column in ("f16", "fp8_256"):
        yield "docs/attention-numerics.md", f"| {of(column, '128')} (d 64: {of(column, '64')}) |"


def streams():
    page = "docs/serving-rl.md"
    rows = record("2026-11-27-scale-stream-h100.csv")
    of = lambda way: statistics.median(float(row["wall_s"]) for row in rows if row["way"] == way)
    gigabytes = float(rows[0]["gigabytes"])
    host, device, scales = (of(way) for way in ("copy from the host", "copy on the device", "scales"))
    yield page, f"took {host:.3f} s from pinned memory ({gigabytes / host:.0f} GB/s) and {1000 * device:.1f} ms on the device"
    for seconds in (scales, of("scales after each layer")):
        yield page, f"| {1000 * seconds:.1f} ms | {100 * seconds / host:.1f} % |"
    rows = record("2026-11-23-scale-stream.csv")
    yield page, f"{span([float(row['gigabytes_per_wall_s']) for row in rows])} GB per second of wall time"


def alarms():
    rows = [row for row in record("2026-11-23-diagnose.csv") if row["part"] == "heldout"]
    for rate in ("0.001", "0.002"):
        runs = [row for row in rows if row["run"].startswith(f"lab-lr{rate}-none-")]
        leads = [int(row["lead"]) for row in runs]
        firsts = {int(row["loss_shows"]) - int(row["lead"]) for row in runs}
        (first,), (raised,) = firsts, {row["raised"] for row in runs}
        lead = f"{min(leads)}{' to ' if len(runs) > 2 else ', '}{max(leads)}"
        yield "docs/diagnose.md", f"head 2, {len(runs)} of {len(runs)} | `logit-limit` at step {first} | at step {raised} |"
        yield "docs/diagnose.md", f"| {lead} |"
    calm = [row for row in rows if row["verdict"] == "calm"]
    yield "docs/diagnose.md", f"{len(calm)} held-out runs that do not fail raised none"


def families():
    rows = record("2026-11-23-family-ascent.csv")
    names = {"q": "q", "k": "k", "v": "v", "logit": "logit, of the exact bound", "bf16": "q, k and v in BF16"}
    for column, name in names.items():
        values = sorted(float(row[column]) for row in rows if row[column])
        yield "docs/models.md", f"| {name} | {values[0]:.2f} | {statistics.median(values):.2f} | {values[-1]:.2f} |"
    yield "docs/models.md", f"({len(rows)} types;"


def constants():
    for name, title in tables.MODELS.items():
        found = json.loads((tables.ROOT / "calibration" / "profiles" / f"{name}.json").read_text())["c_star"]
        yield "docs/bounds.md", f"| {name} | {found['gamma']:.4f} |"
        yield "docs/bounds.md", f"| {found['c_star']:.6f} |"
        yield "docs/ablations.md", f"| {found['gamma']:.3f} |"
        yield "docs/ablations.md", f"| {found['c_star']:.4f} |"


def launches():
    rows = record("2026-11-24-scale-moving-h200.csv")
    us = lambda form: f"{float(find(rows, form=form)['us']):.1f}"
    for form in ("one launch a model", "an engine a layer", "addresses by value"):
        yield "docs/scale-engine.md", f"| {us('descales: ' + form)} | {us('plan: ' + form)} |"
    alone = float(us("descales: addresses by value")) - float(us("descales: one launch a model"))
    yield "docs/scale-out.md", f"That takes {alone:.1f} us longer than in one launch"
    layer = find(record("2026-11-23-scale-moving-h200.csv"), what="latent", shape="deepseek-v3")
    yield "docs/latent-attention.md", f"One layer of DeepSeek-V3 takes {layer['us']} us there"
    rows = record("2026-11-23-attention-backward-wide-h200.csv")
    for shape in (("16", "8", "256"), ("16", "16", "192")):
        step = {"kernel": "fp8", "pass": "fwd_bwd", **dict(zip(SHAPE, shape))}
        speed = lambda keys, causal: f"{float(find(rows, seqlen=keys, causal=causal, **step)['tflops']):.0f}"
        cells = [f"{speed(keys, 0)}, {speed(keys, 1)}" for keys in (2048, 8192)]
        yield "docs/attention-backward.md", f"| {shape[0]} query, {shape[1]} KV, of {shape[2]} | {cells[0]} | {cells[1]} |"
    rows = record("2026-11-23-attention-backward-options-h200.csv")
    steps = [row for row in rows if row["pass"] == "fwd_bwd"]
    gains = lambda d, kernels: [
        float(row["plain"]) / float(row["dq_fp8"]) for row in steps if row["head_dim"] == d and row["kernel"] in kernels
    ]
    wide, narrow = (span(gains(d, ("fp8", "e2e"))) for d in ("128", "64"))
    yield "docs/attention-backward.md", (
        f"With heads of 128, forward and backward are {wide} times as fast with it "
        f"({statistics.mean(gains('128', ('e2e',))):.2f} from BF16, casts included), with heads of 64 {narrow} times"
    )


def failures():
    page = "docs/low-precision-failure.md"
    rows = record("2026-11-23-low-precision.csv")
    starts = span([float(row["loss_start"]) for row in rows], ".4f")
    yield page, f"Losses are means of 50 steps, {starts} at the start"
    power = [float(row["w_q_end_2"]) for row in rows if row["remedy"] == "stabilised-power"]
    yield page, f"the norm of W_Q reaches {span(power, '.0f')} in all three runs"
    rows = record("2026-11-24-delta-bias-h200.csv")
    runs = lambda sign: [row for row in rows if (row["d"], row["kernel"], row["sign_of_v"]) == ("64", "fp8 stabilise", sign)]
    one, both = (statistics.mean(float(row["dq_error"]) for row in runs(sign)) for sign in ("one", "both"))
    yield page, f"`gradients=\"unrounded-delta\"` by {one:.2f} % and {both:.2f} %"


def claims():
    for part in (
        readme,
        performance,
        bias,
        backward,
        accumulators,
        streams,
        alarms,
        families,
        constants,
        launches,
        failures,
    ):
        yield from part()
