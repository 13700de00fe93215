"""Draws attention_roofline.svg from its record.

    python docs/figures/attention_roofline.py              # the picture, from the record
    python docs/figures/attention_roofline.py --to FILE    # the same, to another file

A point is a full call: FLOP per byte of q, k, v (E4M3) and o (BF16), each read or written once, and TFLOP/s. Roofs, at
1.98 GHz (docs/attention-kernel.md): device memory at 4.2 TB/s, the copy bandwidth of the same card; tensor cores in
E4M3, which at d = 128 take as long as the exponentials; the exponentials at d = 64.
"""

import math

from picture import RECORDS, Picture, main, read

RECORD = RECORDS / "2026-11-23-peers-forward-h200.csv"
KERNELS = {"sigmascale": "Sigmascale", "fa3": "FlashAttention-3 FP8", "cudnn": "cuDNN FP8"}
SHAPES = {("64", "8", "128"): "64 query, 8 KV heads of 128", ("32", "32", "64"): "32 heads of 64"}
MEMORY, ROOFS = 4.2, {"128": 2140, "64": 1070}
# FLOP per byte and TFLOP/s at the edges.
ACROSS, UP = (200, 40000), (300, 2600)
RULES = """.roof { stroke: #59636e; stroke-width: 2; fill: none }
  .of0 { fill: #0969da; stroke: #0969da } .of1 { fill: #bc4c00; stroke: #bc4c00 } .of2 { fill: #8250df; stroke: #8250df }"""


def points():
    """(shape, kernel) -> [(keys, FLOP per byte, TFLOP/s)] of full calls."""
    found = {}
    for row in read(RECORD):
        shape = row["heads_q"], row["heads_kv"], row["head_dim"]
        if row["kernel"] in KERNELS and shape in SHAPES and row["causal"] == "0":
            heads_q, heads_kv, keys = int(shape[0]), int(shape[1]), int(row["seqlen"])
            intensity = 4 * heads_q * keys / (3 * heads_q + 2 * heads_kv)
            found.setdefault((shape, row["kernel"]), []).append((keys, intensity, float(row["tflops"])))
    return found


def draw():
    picture = Picture(
        820,
        400,
        (70, 16, 86, 46),
        "Roofline of FP8 attention on an H200",
        "FP8 attention forward on one H200, full calls of 1k, 4k and 16k keys",
        RULES,
    )
    left, right, top, bottom = picture.left, picture.right, picture.top, picture.bottom
    share = lambda value, ends: math.log(value / ends[0]) / math.log(ends[1] / ends[0])
    x = lambda value: left + (right - left) * share(value, ACROSS)
    y = lambda value: bottom - (bottom - top) * share(value, UP)
    for i, name in enumerate(KERNELS.values()):
        picture.add(f'<circle class="of{i}" cx="{22 + 185 * i}" cy="46" r="5"/>')
        picture.text(34 + 185 * i, 51, name, "text")
    picture.text(16, 72, "filled: heads of 128, hollow: heads of 64")
    for value in (300, 500, 1000, 2000):
        picture.level(y(value), value)
    for value in (300, 1000, 3000, 10000, 30000):
        picture.text(x(value), bottom + 18, value, anchor="middle")
    picture.text(right, bottom + 36, "FLOP per byte of device memory", anchor="end")
    picture.text(16, top + 4, "TFLOP/s", size=12)
    for d, roof in ROOFS.items():
        slope = f"M{x(ACROSS[0]):.1f} {y(max(MEMORY * ACROSS[0], UP[0])):.1f} L{x(roof / MEMORY):.1f} {y(roof):.1f}"
        picture.add(f'<path class="roof" d="{slope} H{right}"/>')
        label = "tensor cores and exponentials, d = 128" if d == "128" else "exponentials, d = 64"
        picture.text(right - 6, y(roof) - 6, f"{label}: {roof}", anchor="end")
    picture.text(x(330), y(1500), "4.2 TB/s", anchor="end")
    for (shape, kernel), found in points().items():
        i, hollow = list(KERNELS).index(kernel), ' fill-opacity="0" stroke-width="2"' if shape[2] == "64" else ""
        for keys, intensity, speed in found:
            about = f"<title>{KERNELS[kernel]}, {SHAPES[shape]}, {keys} keys: {speed:.0f} TFLOP/s</title>"
            # Side by side, so that none hides another.
            place = f'cx="{x(intensity) + 9 * (i - 1):.1f}" cy="{y(speed):.1f}"'
            picture.add(f'<circle class="of{i}" {place} r="5"{hollow}>{about}</circle>')
    return picture.svg()


if __name__ == "__main__":
    main(__file__, __doc__, draw)
