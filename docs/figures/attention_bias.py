"""Draws attention_bias.svg from its record, with the standard library alone.

    python docs/figures/attention_bias.py              # the picture, from the record
    python docs/figures/attention_bias.py --to FILE    # the same, to another file
"""

import csv
import math
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
RECORD = HERE.parents[1] / "benches" / "records" / "2026-11-23-peers-bias-h200.csv"
PICTURE = HERE / "attention_bias.svg"
KERNELS = {
    "sigmascale f16": "Sigmascale f16",
    "sigmascale fp8-256": "Sigmascale fp8-256",
    "fa3": "FlashAttention-3 FP8",
    "cudnn": "cuDNN FP8",
}
LENGTHS = (4096, 16384, 65536)
WIDTH, HEIGHT = 820, 350
LEFT, RIGHT, TOP, BOTTOM = 70, 16, 96, 22
FLOOR = -50.0
STYLE = """
  .page { fill: #ffffff } .text { fill: #1f2328 } .soft { fill: #59636e } .grid { stroke: #d1d9e0 }
  .bar0 { fill: #0969da } .bar1 { fill: #54aeff } .bar2 { fill: #bc4c00 } .bar3 { fill: #8250df }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } .text { fill: #f0f6fc } .soft { fill: #9198a1 } .grid { stroke: #3d444d }
    .bar0 { fill: #58a6ff } .bar1 { fill: #a5d6ff } .bar2 { fill: #f0883e } .bar3 { fill: #bc8cff }
  }
"""


def read():
    """Bias in percent by kernel and keys, where V has mean 1."""
    lines = [line for line in RECORD.read_text().splitlines() if not line.startswith("#")]
    rows = [row for row in csv.DictReader(lines) if float(row["mean_of_v"]) == 1]
    return {(row["kernel"], int(row["keys"])): 100 * float(row["signed_error"]) for row in rows}


def percent(value):
    """Three digits, at most three decimals."""
    return f"{value:.{min(3, 2 - math.floor(math.log10(abs(value))))}f} %"


def draw(bias):
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    y = lambda value: TOP + (bottom - TOP) * value / FLOOR
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="system-ui, sans-serif" font-size="13">',
        "<title>Bias of the output of FP8 attention by the number of keys</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
        '<text class="text" x="16" y="26" font-size="16" font-weight="600">'
        "Bias of the output of FP8 attention, V with mean 1 and deviation 1</text>",
    ]
    for i, name in enumerate(KERNELS.values()):
        out.append(f'<rect class="bar{i}" x="{16 + 185 * i}" y="40" width="12" height="12"/>')
        out.append(f'<text class="text" x="{34 + 185 * i}" y="51">{name}</text>')
    for value in range(0, int(FLOOR) - 1, -10):
        out.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        out.append(f'<text class="soft" x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value} %</text>')
    group = (right - LEFT) / len(LENGTHS)
    bar = group / 4.5
    for g, keys in enumerate(LENGTHS):
        start = LEFT + g * group + bar / 4
        middle = f'x="{start + 2 * bar:.1f}" y="{TOP - 24}" text-anchor="middle"'
        out.append(f'<text class="soft" {middle}>{keys // 1024}k keys</text>')
        for i, kernel in enumerate(KERNELS):
            value, x = bias[kernel, keys], start + i * bar
            size = f'width="{bar - 8:.1f}" height="{max(y(value) - TOP, 0.5):.1f}"'
            out.append(f'<rect class="bar{i}" x="{x + 4:.1f}" y="{TOP}" {size}/>')
            place = f'x="{x + bar / 2:.1f}" y="{y(value) + 16:.1f}" text-anchor="middle" font-size="11"'
            out.append(f'<text class="text" {place}>{percent(value)}</text>')
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
