"""Draws weight_spike.svg from its record, with the standard library alone.

    python docs/figures/weight_spike.py                     # the picture, from the record
    python docs/figures/weight_spike.py --to FILE           # the same, to another file
    python docs/figures/weight_spike.py --measure BINARY    # first new records, by the command `sigmascale`
"""

import csv
import datetime
import json
import math
import pathlib
import platform
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECORD = ROOT / "benches" / "records" / "2026-11-28-weight-spike.csv"
SUMMARY = RECORD.with_name("2026-11-28-weight-spike-policies.csv")
PICTURE = HERE / "weight_spike.svg"
COMMAND = "stress weight-spike --model data/tiny-llama --tokens data/sample.py --json"
POLICIES = ["geometry", "delayed-te", "delayed-paper", "current"]

LABELS = {
    "geometry": "Sigmascale",
    "delayed-te": "delayed (TE settings)",
    "delayed-paper": "delayed (paper settings)",
}
WIDTH, HEIGHT = 820, 380
LEFT, RIGHT, TOP, BOTTOM = 74, 184, 62, 46
LOW, HIGH = 0.018, 16.0
STYLE = """
  .page { fill: #ffffff } .text { fill: #1f2328 } .soft { fill: #59636e } .grid { stroke: #d1d9e0 }
  .zone { fill: #cf222e; fill-opacity: .08 } .edge { stroke: #cf222e } .over { fill: #cf222e }
  .geometry { stroke: #0969da } .delayed-te { stroke: #bc4c00 } .delayed-paper { stroke: #8250df }
  .geometry-label { fill: #0969da } .delayed-te-label { fill: #bc4c00 } .delayed-paper-label { fill: #8250df }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } .text { fill: #f0f6fc } .soft { fill: #9198a1 } .grid { stroke: #3d444d }
    .zone { fill: #f85149; fill-opacity: .14 } .edge { stroke: #f85149 } .over { fill: #ff7b72 }
    .geometry { stroke: #58a6ff } .delayed-te { stroke: #f0883e } .delayed-paper { stroke: #bc8cff }
    .geometry-label { fill: #58a6ff } .delayed-te-label { fill: #f0883e } .delayed-paper-label { fill: #bc8cff }
  }
"""


def measure(binary):
    """Runs the scenario and writes its records: the largest |x / descale| / 448 of each step, and a line per policy."""
    out = subprocess.run([binary, *COMMAND.split()], cwd=ROOT, capture_output=True, text=True, check=True).stdout
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


def read():
    lines = [line for line in RECORD.read_text().splitlines() if not line.startswith("#")]
    return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(lines)]


def draw(rows):
    last = rows[-1]["step"]
    x = lambda step: LEFT + step / last * (WIDTH - LEFT - RIGHT)
    y = lambda used: TOP + (math.log(HIGH) - math.log(used)) / math.log(HIGH / LOW) * (HEIGHT - TOP - BOTTOM)
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="system-ui, sans-serif" font-size="13">',
        "<title>Largest value cast to E4M3, as a share of its range, for three scaling policies</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
        '<text class="text" x="16" y="26" font-size="16" font-weight="600">'
        "FP8 attention while the weights change: largest value cast to E4M3 / its range</text>",
        '<text class="soft" x="16" y="46">A trained model on real text. Step 0: checkpoint loaded. '
        "Step 10: weights of q, k and v times 4.</text>",
        f'<rect class="zone" x="{LEFT}" y="{TOP}" width="{right - LEFT}" height="{y(1) - TOP:.1f}"/>',
        f'<text class="over" x="{right - 8}" y="{TOP + 18}" text-anchor="end" font-weight="600">overflow</text>',
    ]
    for used, label in [(0.1, "10 %"), (1, "100 %"), (10, "10x")]:
        kind = "edge" if used == 1 else "grid"
        out.append(f'<line class="{kind}" x1="{LEFT}" x2="{right}" y1="{y(used):.1f}" y2="{y(used):.1f}"/>')
        out.append(f'<text class="soft" x="{LEFT - 8}" y="{y(used) + 4:.1f}" text-anchor="end">{label}</text>')
    for step in range(0, int(last) + 1, 5):
        out.append(f'<text class="soft" x="{x(step):.1f}" y="{bottom + 18}" text-anchor="middle">{step}</text>')
    out.append(f'<text class="soft" x="{(LEFT + right) / 2:.0f}" y="{bottom + 36}" text-anchor="middle">step</text>')
    for policy in ("delayed-paper", "delayed-te", "geometry"):
        points = " ".join(f"{x(row['step']):.1f},{y(row[policy]):.1f}" for row in rows)
        width = 3 if policy == "geometry" else 2
        out.append(f'<polyline class="{policy}" fill="none" stroke-width="{width}" stroke-linejoin="round" points="{points}"/>')
    for policy, at in [("delayed-te", y(4)), ("delayed-paper", y(1.3)), ("geometry", y(0.4))]:
        over = sum(row[policy] > 1 for row in rows)
        out.append(f'<text class="{policy}-label" x="{right + 8}" y="{at:.1f}" font-size="12" font-weight="600">{LABELS[policy]}</text>')
        out.append(
            f'<text class="text" x="{right + 8}" y="{at + 16:.1f}" font-size="12">overflows in {over} of {len(rows)} steps</text>'
        )
    return "\n".join([*out, "</svg>"]) + "\n"


if __name__ == "__main__":
    picture = PICTURE
    match sys.argv[1:]:
        case []:
            pass
        case ["--to", file]:
            picture = pathlib.Path(file)
        case ["--measure", binary]:
            measure(pathlib.Path(binary).resolve())
        case _:
            sys.exit(__doc__)
    picture.write_text(draw(read()))
