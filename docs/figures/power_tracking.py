"""Draws power_tracking.svg from its record.

    python docs/figures/power_tracking.py                   # the picture, from the record
    python docs/figures/power_tracking.py --to FILE         # the same, to another file
    python docs/figures/power_tracking.py --measure         # first a new record; needs PyTorch and sigmascale
"""

import datetime
import math
import platform
import sys

from picture import RECORDS, ROOT, Picture, main, read

RECORD = RECORDS / "2026-11-28-power-tracking.csv"
STEPS, SPIKE = 20, (10, 14)
# Columns, their names in the picture, and where the label stands, as a share of the height.
CURVES = [
    ("certified", "certified bound (gram)", 0.12),
    ("exact", "exact norm", 0.30),
    ("estimate", "estimate (power)", 0.48),
    ("scale", "scale of the logits x 1000", 0.80),
]
RULES = """.zone { fill: #bc4c00; fill-opacity: .1 }
  .certified { stroke: #0969da } .exact { stroke: #1f2328; stroke-dasharray: 6 4 } .estimate { stroke: #bc4c00 } .scale { stroke: #8250df }
  .certified-label { fill: #0969da } .exact-label { fill: #1f2328 } .estimate-label { fill: #bc4c00 } .scale-label { fill: #8250df }"""


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


def draw():
    rows = [{name: float(value) for name, value in row.items()} for row in read(RECORD)]
    picture = Picture(
        820,
        380,
        (74, 224, 62, 46),
        "Estimate, exact norm, certified bound and scale of one head over 20 training steps",
        "One head over 20 training steps: the norm of W_Q^T W_K, as each estimator sees it",
        RULES,
    )
    last, (left, right, top, bottom) = rows[-1]["step"], (picture.left, picture.right, picture.top, picture.bottom)
    values = [row[name] for row in rows for name, *_ in CURVES]
    low, high = min(values) / 1.1, max(values) * 1.1
    x = lambda step: left + step / last * (right - left)
    y = lambda value: top + math.log(high / value) / math.log(high / low) * (bottom - top)
    picture.text(16, 46, f"Log scale. Steps {SPIKE[0]} to {SPIKE[1] - 1}: ten times the learning rate.")
    width = f'width="{x(SPIKE[1]) - x(SPIKE[0]):.1f}"'
    picture.add(f'<rect class="zone" x="{x(SPIKE[0]):.1f}" y="{top}" {width} height="{bottom - top}"/>')
    for tick in (m * 10.0**e for e in range(-6, 7) for m in (1, 2, 5)):
        if low <= tick <= high:
            picture.level(y(tick), f"{tick:g}")
    picture.steps(last, x)
    for name, label, at in CURVES:
        picture.curve(name, ((x(row["step"]), y(row[name])) for row in rows))
        ends = f"{rows[0][name]:.3g} at first, {rows[-1][name]:.3g} at last"
        picture.label(name, top + at * (bottom - top), label, ends)
    return picture.svg()


if __name__ == "__main__":
    main(__file__, __doc__, draw, measure)
