"""Writes the table of FP8 casts that the unit tests compare with.

Run from the repository's root, with ml_dtypes and numpy installed:

    python tests/python/fp8_table.py tests/data/fp8_ml_dtypes.csv

Each line is the f32 input and its code in float8_e4m3fn, float8_e5m2 and float8_e4m3, all as hexadecimal bits.
ml_dtypes rounds to nearest even and does not saturate.
"""

import sys

import ml_dtypes
import numpy as np

FORMATS = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3]


def inputs():
    values = [np.float32(v) for v in (0.0, 1e-45, 1e-38, 1e-10, 3e38, np.inf, np.nan)]
    for dtype in FORMATS:
        grid = np.arange(128, dtype=np.uint8).view(dtype).astype(np.float64)
        grid = np.unique(grid[np.isfinite(grid)])
        step = grid[-1] - grid[-2]
        grid = np.append(grid, grid[-1] + step)
        middle = ((grid[:-1] + grid[1:]) / 2).astype(np.float32)
        for point in np.concatenate([grid.astype(np.float32), middle]):
            values += [point, np.nextafter(point, np.float32(0)), np.nextafter(point, np.float32(np.inf))]
    rng = np.random.default_rng(8)
    values += list((2.0 ** rng.uniform(-20, 18, 2000)).astype(np.float32))
    values = np.array(values, dtype=np.float32)
    bits = np.unique(np.concatenate([values, -values]).view(np.uint32))
    return bits.view(np.float32)


def main(path):
    x = inputs()
    with np.errstate(all="ignore"):
        codes = [x.astype(dtype).view(np.uint8) for dtype in FORMATS]
    with open(path, "w", encoding="ascii") as out:
        out.write(f"# tests/python/fp8_table.py, ml_dtypes {ml_dtypes.__version__}\n")
        out.write("# f32 bits,float8_e4m3fn,float8_e5m2,float8_e4m3\n")
        for row in zip(x.view(np.uint32), *codes):
            out.write("%08x,%02x,%02x,%02x\n" % row)


if __name__ == "__main__":
    main(sys.argv[1])
