"""Draws weight_spike.svg from its record.

    python docs/figures/weight_spike.py                     # the picture, from the record
    python docs/figures/weight_spike.py --to FILE           # the same, to another file
    python docs/figures/weight_spike.py --measure BINARY    # first new records, by the command `sigmascale`
"""

import datetime
import json
import math
import pathlib
import platform
import subprocess

from picture import RECORDS, ROOT, Picture, main, read

RECORD = RECORDS / "2026-11-28-weight-spike.csv"
SUMMARY = RECORDS / "2026-11-28-weight-spike-policies.csv"
COMMAND = "stress weight-spike --model data/tiny-llama --tokens data/sample.py --json"
POLICIES = ["geometry", "delayed-te", "delayed-paper", "current"]

LABELS = {
    "geometry": "Sigmascale",
    "delayed-te": "delayed (TE settings)",
    "delayed-paper": "delayed (paper settings)",
}
LOW, HIGH = 0.018, 16.0
RULES = """.zone { fill: #cf222e; fill-opacity: .1 } .edge { stroke: #cf222e } .over { fill: #cf222e }
  .geometry { stroke: #0969da } .delayed-te { stroke: #bc4c00 } .delayed-paper { stroke: #8250df }
  .geometry-label { fill: #0969da } .delayed-te-label { fill: #bc4c00 } .delayed-paper-label { fill: #8250df }"""


def measure(binary):
    """Runs the scenario and writes its records: the largest |x / descale| / 448 of each step, and a line per policy."""
    out = subprocess.run([pathlib.Path(binary).resolve(), *COMMAND.split()], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    result = json.loads(out)
    trace = result["trace"]
    made = f"# {platform.machine()}, {datetime.date.today()}, sigmascale {COMMAND}"
    used = {}
    for row in trace:
        key = row["step"], row["policy"]
        used[key] = max(used.get(key, 0.0), row["max_scaled"] / 448)
    steps = sorted({step for step, _ in used})
    lines = [
        made,
        "# Largest |x / descale| / 448 of a step, over all layers and q, k, v; above 1 is an overflow. The weights of q, k",
        "# and v grow by a factor of 4 at step 10. delayed-te exceeds the range by less than 0.01 % in four of its steps.",
        "step," + ",".join(POLICIES),
        *(f"{step}," + ",".join(f"{used[step, policy]:.8g}" for policy in POLICIES) for step in steps),
    ]
    RECORD.write_text("\n".join(lines) + "\n")
    lines = [
        made,
        "# overflow_steps: largest |x / descale| above 448. clipped_steps: above 464, where values no longer round to 448.",
        "# sqnr_db: of the attention output against f32, median over layers and steps. sqnr_worst_step_db: median over the",
        "# layers of the step in which it is least.",
        "policy,steps,overflow_steps,clipped_steps,max_utilization,sqnr_db,sqnr_worst_step_db",
    ]
    for policy in POLICIES:
        (summary,) = (row for row in result["policies"] if row["policy"] == policy)
        counts = ",".join(str(summary[key]) for key in ("overflow_steps", "clipped_steps"))
        figures = f"{summary['max_scaled'] / 448:.6g},{summary['sqnr_db']:.6g},{summary['sqnr_worst_step_db']:.6g}"
        lines.append(f"{policy},{len(steps)},{counts},{figures}")
    SUMMARY.write_text("\n".join(lines) + "\n")


def draw():
    rows = [{name: float(value) for name, value in row.items()} for row in read(RECORD)]
    picture = Picture(
        820,
        380,
        (74, 184, 62, 46),
        "Largest value cast to E4M3, as a share of its range, for three scaling policies",
        "FP8 attention while the weights change: largest value cast to E4M3 / its range",
        RULES,
    )
    last, (left, right, top, bottom) = rows[-1]["step"], (picture.left, picture.right, picture.top, picture.bottom)
    x = lambda step: left + step / last * (right - left)
    y = lambda used: top + (math.log(HIGH) - math.log(used)) / math.log(HIGH / LOW) * (bottom - top)
    about = "A trained model on real text. Step 0: checkpoint loaded. Step 10: weights of q, k and v times 4."
    picture.text(16, 46, about)
    picture.add(f'<rect class="zone" x="{left}" y="{top}" width="{right - left}" height="{y(1) - top:.1f}"/>')
    picture.text(right - 8, top + 18, "overflow", "over", "end", bold=True)
    for used, label in [(0.1, "10 %"), (1, "100 %"), (10, "10x")]:
        picture.level(y(used), label, "edge" if used == 1 else "grid")
    picture.steps(last, x)
    for policy in ("delayed-paper", "delayed-te", "geometry"):
        picture.curve(policy, ((x(row["step"]), y(row[policy])) for row in rows), 3 if policy == "geometry" else 2)
    for policy, at in [("delayed-te", y(4)), ("delayed-paper", y(1.3)), ("geometry", y(0.4))]:
        over = sum(row[policy] > 1 for row in rows)
        picture.label(policy, at, LABELS[policy], f"overflows in {over} of {len(rows)} steps")
    return picture.svg()


if __name__ == "__main__":
    main(__file__, __doc__, draw, measure, arguments=1)
