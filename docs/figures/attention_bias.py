"""Draws attention_bias.svg from its record.

    python docs/figures/attention_bias.py              # the picture, from the record
    python docs/figures/attention_bias.py --to FILE    # the same, to another file
"""

import math

from picture import RECORDS, Picture, main, read

RECORD = RECORDS / "2026-11-23-peers-bias-h200.csv"
KERNELS = {
    "sigmascale f16": "Sigmascale f16",
    "sigmascale fp8-256": "Sigmascale fp8-256",
    "fa3": "FlashAttention-3 FP8",
    "cudnn": "cuDNN FP8",
}
LENGTHS = (4096, 16384, 65536)
FLOOR = -50.0
RULES = ".bar0 { fill: #0969da } .bar1 { fill: #54aeff } .bar2 { fill: #bc4c00 } .bar3 { fill: #8250df }"


def percent(value):
    """Three digits, at most three decimals."""
    return f"{value:.{min(3, 2 - math.floor(math.log10(abs(value))))}f} %"


def draw():
    # In percent by kernel and keys, where V has mean 1.
    rows = [row for row in read(RECORD) if float(row["mean_of_v"]) == 1]
    bias = {(row["kernel"], int(row["keys"])): 100 * float(row["signed_error"]) for row in rows}
    picture = Picture(
        820,
        350,
        (70, 16, 96, 22),
        "Bias of the output of FP8 attention by the number of keys",
        "Bias of the output of FP8 attention, V with mean 1 and deviation 1",
        RULES,
    )
    top = picture.top
    y = lambda value: top + (picture.bottom - top) * value / FLOOR
    for i, name in enumerate(KERNELS.values()):
        picture.add(f'<rect class="bar{i}" x="{16 + 185 * i}" y="40" width="12" height="12"/>')
        picture.text(34 + 185 * i, 51, name, "text")
    for value in range(0, int(FLOOR) - 1, -10):
        picture.level(y(value), f"{value} %")
    group = (picture.right - picture.left) / len(LENGTHS)
    bar = group / 4.5
    for g, keys in enumerate(LENGTHS):
        start = picture.left + g * group + bar / 4
        picture.text(start + 2 * bar, top - 24, f"{keys // 1024}k keys", anchor="middle")
        for i, kernel in enumerate(KERNELS):
            value, x = bias[kernel, keys], start + i * bar
            size = f'width="{bar - 8:.1f}" height="{max(y(value) - top, 0.5):.1f}"'
            picture.add(f'<rect class="bar{i}" x="{x + 4:.1f}" y="{top}" {size}/>')
            picture.text(x + bar / 2, y(value) + 16, percent(value), "text", "middle", 11)
    return picture.svg()


if __name__ == "__main__":
    main(__file__, __doc__, draw)
