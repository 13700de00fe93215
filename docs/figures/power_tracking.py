"""Draws power_tracking.svg from its record, with the standard library alone.

    python docs/figures/power_tracking.py                   # the picture, from the record
    python docs/figures/power_tracking.py --to FILE         # the same, to another file
    python docs/figures/power_tracking.py --measure         # first a new record; needs PyTorch and sigmascale
"""

import csv
import datetime
import math
import pathlib
import platform
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECORD = ROOT / "benches" / "records" / "2026-11-28-power-tracking.csv"
PICTURE = HERE / "power_tracking.svg"
STEPS, SPIKE = 20, (10, 14)
WIDTH, HEIGHT = 820, 380
LEFT, RIGHT, TOP, BOTTOM = 74, 224, 62, 46
# Columns, their names in the picture, and where the label stands, as a share of the height.
CURVES = [
    ("certified", "certified bound (gram)", 0.12),
    ("exact", "exact norm", 0.30),
    ("estimate", "estimate (power)", 0.48),
    ("scale", "scale of the logits x 1000", 0.80),
]
STYLE = """
  .page { fill: #ffffff } .text { fill: #1f2328 } .soft { fill: #59636e } .grid { stroke: #d1d9e0 }
  .zone { fill: #bc4c00; fill-opacity: .08 }
  .certified { stroke: #0969da } .exact { stroke: #1f2328; stroke-dasharray: 6 4 } .estimate { stroke: #bc4c00 } .scale { stroke: #8250df }
  .certified-label { fill: #0969da } .exact-label { fill: #1f2328 } .estimate-label { fill: #bc4c00 } .scale-label { fill: #8250df }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } .text { fill: #f0f6fc } .soft { fill: #9198a1 } .grid { stroke: #3d444d }
    .zone { fill: #f0883e; fill-opacity: .14 }
    .certified { stroke: #58a6ff } .exact { stroke: #f0f6fc } .estimate { stroke: #f0883e } .scale { stroke: #bc8cff }
    .certified-label { fill: #58a6ff } .exact-label { fill: #f0f6fc } .estimate-label { fill: #f0883e } .scale-label { fill: #bc8cff }
  }
"""


def measure():
    """Trains a GPT-2 of two layers under `geometry-c-star` with the estimator `power` and logits in E4M3, and writes what head 0
    of layer 0 had before each step."""
    import torch

    sys.path.insert(0, str(ROOT / "python" / "examples"))
    from train_gpt import Gpt, attach, batches, loss_of

    class One:
        def split(self, window):
            return window[:, :-1], window[:, 1:]

    torch.manual_seed(0)
    model = Gpt("gpt2", 64, width=128, layers=2, heads=4, kv_heads=4)
    # The runtime that trains last: modules call the plan that they were given last.
    certified = attach(model, "geometry", bound="worst-case")
    power = attach(model, "geometry-c-star", estimator="power", logits="e4m3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.frombuffer(bytearray((ROOT / "data" / "sample.py").read_bytes()), dtype=torch.uint8)
    windows = batches(text, 4, 64, 0, torch.device("cpu"))
    block, d = model.blocks[0], model.blocks[0].attention.d
    rows = []
    for step in range(STEPS):
        q, k, _ = (w.detach().double()[:d] * block.norm.weight.detach().double() for w in block.attention.parts("weight"))
        q, k = (w - w.mean(dim=1, keepdim=True) for w in (q, k))
        exact = float(torch.linalg.matrix_norm(q.T @ k, 2))
        found = [exact, float(power.estimates()["sigma"][0, 0]), float(certified.logits[0, 0, 0])]
        rows.append([step, *found, 1000 * float(power.logit_descales[0, 0])])
        optimizer.param_groups[0]["lr"] = 1e-2 if SPIKE[0] <= step < SPIKE[1] else 1e-3
        optimizer.zero_grad()
        loss_of(model, next(windows), One()).backward()
        optimizer.step()
        power.refresh()
        certified.refresh()
    lines = [
        f"# {platform.machine()}, {datetime.date.today()}, PyTorch {torch.__version__}: docs/figures/power_tracking.py --measure",
        "# A GPT-2 of width 128, 2 layers and 4 heads, from random weights; head 0 of layer 0. exact: norm of W_Q^T W_K with gain",
        "# and without mean. estimate: power iteration, 5 iterations and then one a step. certified: from Grams. scale: 1000 times",
        "# the descale of the logits under geometry-c-star, from the estimate. The rate is ten times larger in steps 10 to 13.",
        "step,exact,estimate,certified,scale",
        *(",".join(f"{x:.6g}" for x in row) for row in rows),
    ]
    RECORD.write_text("\n".join(lines) + "\n")


def read():
    lines = [line for line in RECORD.read_text().splitlines() if not line.startswith("#")]
    return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(lines)]


def draw(rows):
    last, right, bottom = rows[-1]["step"], WIDTH - RIGHT, HEIGHT - BOTTOM
    values = [row[name] for row in rows for name, *_ in CURVES]
    low, high = min(values) / 1.1, max(values) * 1.1
    x = lambda step: LEFT + step / last * (right - LEFT)
    y = lambda value: TOP + math.log(high / value) / math.log(high / low) * (bottom - TOP)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="system-ui, sans-serif" font-size="13">',
        "<title>Estimate, exact norm, certified bound and scale of one head over 20 training steps</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
        '<text class="text" x="16" y="26" font-size="16" font-weight="600">'
        "One head over 20 training steps: the norm of W_Q^T W_K, as each estimator sees it</text>",
        f'<text class="soft" x="16" y="46">Log scale. Steps {SPIKE[0]} to {SPIKE[1] - 1}: ten times the learning rate.</text>',
        f'<rect class="zone" x="{x(SPIKE[0]):.1f}" y="{TOP}" width="{x(SPIKE[1]) - x(SPIKE[0]):.1f}" height="{bottom - TOP}"/>',
    ]
    ticks = [m * 10.0**e for e in range(-6, 7) for m in (1, 2, 5)]
    for tick in [tick for tick in ticks if low <= tick <= high]:
        out.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        out.append(f'<text class="soft" x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for step in range(0, int(last) + 1, 5):
        out.append(f'<text class="soft" x="{x(step):.1f}" y="{bottom + 18}" text-anchor="middle">{step}</text>')
    out.append(f'<text class="soft" x="{(LEFT + right) / 2:.0f}" y="{bottom + 36}" text-anchor="middle">step</text>')
    for name, label, at in CURVES:
        points = " ".join(f"{x(row['step']):.1f},{y(row[name]):.1f}" for row in rows)
        out.append(f'<polyline class="{name}" fill="none" stroke-width="2" stroke-linejoin="round" points="{points}"/>')
        place = TOP + at * (bottom - TOP)
        out.append(f'<text class="{name}-label" x="{right + 8}" y="{place:.1f}" font-size="12" font-weight="600">{label}</text>')
        ends = f"{rows[0][name]:.3g} at first, {rows[-1][name]:.3g} at last"
        out.append(f'<text class="text" x="{right + 8}" y="{place + 16:.1f}" font-size="12">{ends}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


if __name__ == "__main__":
    picture = PICTURE
    match sys.argv[1:]:
        case []:
            pass
        case ["--to", file]:
            picture = pathlib.Path(file)
        case ["--measure"]:
            measure()
        case _:
            sys.exit(__doc__)
    picture.write_text(draw(read()))
