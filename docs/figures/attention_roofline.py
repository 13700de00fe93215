"""Draws attention_roofline.svg from its record, with the standard library alone.

    python docs/figures/attention_roofline.py              # the picture, from the record
    python docs/figures/attention_roofline.py --to FILE    # the same, to another file

A point is a full call: FLOP per byte of q, k, v (E4M3) and o (BF16), each read or written once, and TFLOP/s. Roofs, at
1.98 GHz (docs/attention-kernel.md): device memory at 4.2 TB/s, the copy bandwidth of the same card; tensor cores in
E4M3, which at d = 128 take as long as the exponentials; the exponentials at d = 64.
"""

import csv
import math
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
RECORD = HERE.parents[1] / "benches" / "records" / "2026-11-23-peers-forward-h200.csv"
PICTURE = HERE / "attention_roofline.svg"
KERNELS = {"sigmascale": "Sigmascale", "fa3": "FlashAttention-3 FP8", "cudnn": "cuDNN FP8"}
SHAPES = {("64", "8", "128"): "64 query, 8 KV heads of 128", ("32", "32", "64"): "32 heads of 64"}
MEMORY, ROOFS = 4.2, {"128": 2140, "64": 1070}
WIDTH, HEIGHT = 820, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 16, 86, 46
# FLOP per byte and TFLOP/s at the edges.
ACROSS, UP = (200, 40000), (300, 2600)
STYLE = """
  .page { fill: #ffffff } .text { fill: #1f2328 } .soft { fill: #59636e } .grid { stroke: #d1d9e0 }
  .roof { stroke: #59636e; stroke-width: 2; fill: none }
  .of0 { fill: #0969da; stroke: #0969da } .of1 { fill: #bc4c00; stroke: #bc4c00 } .of2 { fill: #8250df; stroke: #8250df }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } .text { fill: #f0f6fc } .soft { fill: #9198a1 } .grid { stroke: #3d444d }
    .roof { stroke: #9198a1 }
    .of0 { fill: #58a6ff; stroke: #58a6ff } .of1 { fill: #f0883e; stroke: #f0883e } .of2 { fill: #bc8cff; stroke: #bc8cff }
  }
"""


def read():
    """(shape, kernel) -> [(keys, FLOP per byte, TFLOP/s)] of full calls."""
    lines = [line for line in RECORD.read_text().splitlines() if not line.startswith("#")]
    found = {}
    for row in csv.DictReader(lines):
        shape = row["heads_q"], row["heads_kv"], row["head_dim"]
        if row["kernel"] in KERNELS and shape in SHAPES and row["causal"] == "0":
            heads_q, heads_kv, keys = int(shape[0]), int(shape[1]), int(row["seqlen"])
            intensity = 4 * heads_q * keys / (3 * heads_q + 2 * heads_kv)
            found.setdefault((shape, row["kernel"]), []).append((keys, intensity, float(row["tflops"])))
    return found


def draw(points):
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    share = lambda value, ends: math.log(value / ends[0]) / math.log(ends[1] / ends[0])
    x = lambda value: LEFT + (right - LEFT) * share(value, ACROSS)
    y = lambda value: bottom - (bottom - TOP) * share(value, UP)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="system-ui, sans-serif" font-size="13">',
        "<title>Roofline of FP8 attention on an H200</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
        '<text class="text" x="16" y="26" font-size="16" font-weight="600">'
        "FP8 attention forward on one H200, full calls of 1k, 4k and 16k keys</text>",
    ]
    for i, name in enumerate(KERNELS.values()):
        out.append(f'<circle class="of{i}" cx="{22 + 185 * i}" cy="46" r="5"/>')
        out.append(f'<text class="text" x="{34 + 185 * i}" y="51">{name}</text>')
    out.append('<text class="soft" x="16" y="72">filled: heads of 128, hollow: heads of 64</text>')
    for value in (300, 500, 1000, 2000):
        out.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        out.append(f'<text class="soft" x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value}</text>')
    for value in (300, 1000, 3000, 10000, 30000):
        out.append(f'<text class="soft" x="{x(value):.1f}" y="{bottom + 18}" text-anchor="middle">{value}</text>')
    out.append(f'<text class="soft" x="{right}" y="{bottom + 36}" text-anchor="end">FLOP per byte of device memory</text>')
    out.append(f'<text class="soft" x="16" y="{TOP + 4}" font-size="12">TFLOP/s</text>')
    for d, roof in ROOFS.items():
        knee = roof / MEMORY
        out.append(f'<path class="roof" d="M{x(ACROSS[0]):.1f} {y(max(MEMORY * ACROSS[0], UP[0])):.1f} '
                   f'L{x(knee):.1f} {y(roof):.1f} H{right}"/>')
        label = "tensor cores and exponentials, d = 128" if d == "128" else "exponentials, d = 64"
        out.append(f'<text class="soft" x="{right - 6}" y="{y(roof) - 6:.1f}" text-anchor="end">{label}: {roof}</text>')
    out.append(f'<text class="soft" x="{x(330):.1f}" y="{y(1500):.1f}" text-anchor="end">4.2 TB/s</text>')
    for (shape, kernel), found in points.items():
        i, hollow = list(KERNELS).index(kernel), ' fill-opacity="0" stroke-width="2"' if shape[2] == "64" else ""
        for keys, intensity, speed in found:
            about = f"<title>{KERNELS[kernel]}, {SHAPES[shape]}, {keys} keys: {speed:.0f} TFLOP/s</title>"
            # Side by side, so that none hides another.
            out.append(f'<circle class="of{i}" cx="{x(intensity) + 9 * (i - 1):.1f}" cy="{y(speed):.1f}" r="5"{hollow}>{about}</circle>')
    return "\n".join([*out, "</svg>"]) + "\n"


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            picture = PICTURE
        case ["--to", file]:
            picture = pathlib.Path(file)
        case _:
            sys.exit(__doc__)
    picture.write_text(draw(read()))
