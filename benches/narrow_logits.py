"""Error of attention whose logits are summed in F16 (kernels/attention/mainloop_narrow.cuh), emulated on the CPU.

    python benches/narrow_logits.py [--rows 64] [--keys 1024,4096,16384]

For each kind of data it prints the relative RMS error of the output against f64 on the same E4M3 operands:
  f32     logits in f32, row sums of P before rounding: the kernel of today
  sums    row sums of P as rounded to E4M3 (ROW_SUMS)
  narrow  logits rounded to F16 after every 32 columns, to nearest and towards zero (the hardware's rounding is not documented), exponents
          and exponentials in F16, row sums of rounded P (NARROW)
P V is summed in f64, so that what is compared is P. Needs NumPy.
"""
import argparse

import numpy as np


def e4m3(x):
    """Nearest E4M3 value, ties to even; saturates."""
    with np.errstate(divide="ignore"):
        exponent = np.clip(np.floor(np.log2(np.maximum(np.abs(x), 1e-30))), -6, 8)
    step = np.exp2(exponent - 3)
    return np.clip(np.round(x / step) * step, -448, 448)


def to_f16(x, toward_zero):
    y = x.astype(np.float16)
    if toward_zero:
        past = np.abs(y.astype(np.float64)) > np.abs(x)
        y = np.where(past, np.nextafter(y, np.float16(0)), y)
    return y.astype(np.float64)


def f16_down(x):
    y = x.astype(np.float16)
    return np.where(y.astype(np.float64) > x, np.nextafter(y, np.float16(-np.inf)), y).astype(np.float64)


def draw(kind, rng, rows, keys, d):
    q, k, v = rng.standard_normal((rows, d)), rng.standard_normal((keys, d)), rng.standard_normal((keys, d))
    if kind == "gauss x2":
        q *= 2
    elif kind == "outlier":
        k[:, :4] *= 8
        q[:, :4] *= 4
    elif kind == "sink":
        k[0] += 0.25 * d**0.5 * q.mean(0) / np.linalg.norm(q.mean(0))
        q += 3 * k[0] / np.linalg.norm(k[0])
    elif kind == "needle":
        k[rng.integers(keys)] = 1.3 * q[0]
    elif kind == "mean":
        v += 1
    elif kind == "equal":
        k[:] = k[0]
    return q, k, v


def attention(s, v, rounded_sums, halves):
    """s: logits in powers of two."""
    top = s.max(1, keepdims=True)
    if halves:
        shift = -f16_down(-(top - 8))
        p = np.exp2(to_f16(s - shift, False)).astype(np.float16).astype(np.float64)
    else:
        p = np.exp2(s - top + 8).astype(np.float32).astype(np.float64)
    code = e4m3(p)
    return code @ v / (code if rounded_sums else p).sum(1, keepdims=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--keys", default="1024,4096,16384")
    args = parser.parse_args()
    d = 128
    print("data,keys,largest_logit,f32,sums,narrow_nearest,narrow_truncated")
    for keys in map(int, args.keys.split(",")):
        for kind in ["gauss", "gauss x2", "outlier", "sink", "needle", "mean", "equal"]:
            rng = np.random.default_rng(keys)
            q, k, v = map(e4m3, draw(kind, rng, args.rows, keys, d))
            scale = d**-0.5 * np.log2(np.e)
            exact = q @ k.T
            s = exact * scale
            w = np.exp2(s - s.max(1, keepdims=True))
            want = w @ v / w.sum(1, keepdims=True)
            errors = []
            for rounded_sums, mode in [(False, None), (True, None), (True, False), (True, True)]:
                raw, factor = exact, scale
                if mode is not None:
                    raw = np.zeros_like(exact)
                    for c in range(0, d, 32):
                        raw = to_f16(raw + q[:, c : c + 32] @ k[:, c : c + 32].T, mode)
                    factor = float(np.float16(scale))
                have = attention(raw * factor, v, rounded_sums, mode is not None)
                errors.append(np.sqrt(((have - want) ** 2).sum() / (want**2).sum()))
            print(f"{kind},{keys},{abs(s).max() / np.log2(np.e):.1f}," + ",".join(f"{e:.2e}" for e in errors), flush=True)


main()
