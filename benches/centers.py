#!/usr/bin/env python3
"""What centers of keys and values change in attention on a GPU: the error of outputs and gradients by accumulator of P V, the
shrinkage of the output, and time.

    python benches/centers.py gradients [--keys 2048] [--heads 32] [--d 128] [--operands FILE]
    python benches/centers.py shrinkage
    python benches/centers.py cost

`gradients`: causal, q, k and v in E4M3 at 1/32, against f64 on the same operands. `aligned`: keys, values and the gradient of the
output have directions in common; `repeated`: each token three times; `normal`: nothing in common; with --operands, those of a
model: a file of torch.save with q, k, v and grad of shape (1, tokens, heads, d). c and m are the means of k and v; `stale` is 1.1
times these plus the noise of 512 tokens. Each quantity has a relative error, and a bias factor: the norm of the error's mean row over
what independent rows of that size leave, 1 if unbiased. `bf16` is PyTorch's attention on the operands before their cast, against f64
on the same. With few heads the kernel splits a call over its keys, and promotes the parts' sums after every tile.
`shrinkage`: d 64, no mask, V ~ N(mean, 1): the error of the output along the exact one in percent of its mean size, and its rms.
`cost`: median and least of 9 rounds in ms, causal, by CUDA graphs, calls with and without centers in turn. Centers are zeros, so that
the operands of both are the same: times depend on them.
"""

import argparse
import functools
import math
import sys

import torch

from sigmascale.torch import _backends
from sigmascale.torch._terms import FP8_DQ, NOTHING, OPERANDS, UNROUNDED_DELTA, Terms

ACCUMULATORS = ("f16", "fp8-256", "fp8-2048")


def emit(*cells):
    print(*cells, sep=",", flush=True)


def native():
    return _backends.backend("native")


def center(x):
    """The mean over tokens, as BF16 has it."""
    return x.float().mean(dim=(0, 1)).bfloat16().float()


def covering(x, own, n_kv):
    largest = (x.float() if own is None else x.float() - own).abs().amax(dim=(0, 1, 3)) / 448 * 1.001
    return largest.view(n_kv, -1).amax(dim=1)


def draw(device, *shape):
    return torch.randn(*shape, device=device)


def operands(args):
    """q, k, v and the gradient of the output by name."""
    n, heads, d = args.keys, args.heads, args.d
    make = functools.partial(draw, args.device)
    along, offset = make(d), torch.zeros(d, device=args.device)
    along /= along.norm()
    offset[: d // 8] = -2
    normal = [make(1, n, heads, d) for _ in range(4)]
    q, k, v, grad = normal
    yield "normal", normal
    aligned = [q + make(1, n, heads, 1) * along, k + 4 * along, v + offset, grad + offset / 2]
    yield "aligned", aligned
    place = torch.randperm(n // 3 * 3, device=args.device)
    yield "repeated", [x[:, : n // 3].repeat(1, 3, 1, 1)[:, place] for x in aligned]
    if args.operands:
        held = torch.load(args.operands, map_location=args.device, weights_only=True)
        yield "model", [held[name].float() for name in ("q", "k", "v", "grad")]


def exact(q, k, v, grad, m=None):
    """Output, dQ, dK and dV in f64, `(heads, tokens, d)`."""
    n, d = q.shape[1:]
    hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    p = (d**-0.5 * q @ k.transpose(1, 2)).masked_fill(hidden, -math.inf).softmax(-1)
    dp = grad @ v.transpose(1, 2)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * d**-0.5
    out = p @ v + (0 if m is None else m.double()[:, None])
    return {"o": out, "dq": ds @ k, "dk": ds.transpose(1, 2) @ q, "dv": p.transpose(1, 2) @ grad}


def figures(have, want):
    """Relative error and bias factor, means over heads."""
    cells = []
    for own, x in zip(have, want.values()):
        off = own[0].transpose(0, 1).double() - x
        size = off.flatten(1).norm(dim=1)
        bias = off.mean(1).norm(dim=1) * off.shape[1] / size
        cells += [f"{float((size / x.flatten(1).norm(dim=1)).mean()):.6f}", f"{float(bias.mean()):.2f}"]
    return cells


def gradients(args):
    emit("data,centers,pv,keeps", *(f"{x}_{y}" for x in ("o", "dq", "dk", "dv") for y in ("error", "bias")))
    for data, given in operands(args):
        q, k, v, grad = (x.bfloat16() for x in given)
        leaves = [x.transpose(1, 2).detach().requires_grad_(True) for x in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
        found = torch.autograd.grad(out, leaves, grad.transpose(1, 2))
        flat = [x[0].transpose(0, 1).double() for x in (q, k, v, grad)]
        emit(data, "none", "bf16", "", *figures([x.transpose(1, 2) for x in (out.detach(), *found)], exact(*flat)))
        c, m = center(k), center(v)
        stale = [(1.1 * x + torch.randn_like(x) / 512**0.5).bfloat16().float() for x in (c, m)]
        ways = {"none": (None, None), "m": (None, m), "c": (c, None), "c and m": (c, m), "stale": stale}
        rows = [torch.full((1, q.shape[2]), 1 / 32, device=args.device)] * 3
        for name, (c, m) in ways.items():
            for accumulator in ACCUMULATORS:
                for keeps in (OPERANDS, UNROUNDED_DELTA, FP8_DQ):
                    if keeps == FP8_DQ and args.device == "cpu":
                        continue
                    terms = Terms(True, q.shape[3] ** -0.5, k_center=c, v_center=m, accumulator=accumulator, keeps=keeps)
                    kept = {}
                    if keeps == UNROUNDED_DELTA:
                        kept["residual"] = torch.empty_like(q)
                    if keeps == FP8_DQ:
                        kept["row_max"] = q.new_empty(1, q.shape[2], q.shape[1], dtype=torch.float32)
                    out, lse, cast = native().forward(q, k, v, rows, terms, None, **kept)
                    found = native().backward(grad, cast, rows, out, lse, terms, **kept)[:3]
                    held = [x.float().double()[0].transpose(0, 1) / 32 for x in cast]
                    emit(data, name, accumulator, keeps, *figures([out, *found], exact(*held, flat[3], m)))


def shrinkage(args):
    emit("keys,mean,m,pv,percent,rms_percent")
    make = functools.partial(draw, args.device)
    for n in (4096, 16384, 65536) if args.device == "cuda" else (512,):
        for mean in (0.1, 1.0, 3.0):
            q, k, v = make(1, 512, args.heads, 64), make(1, n, args.heads, 64), make(1, n, args.heads, 64) + mean
            q, k, v = (x.bfloat16() for x in (q, k, v))
            other = (mean + make(args.heads, 64) / 512**0.5).bfloat16().float()
            for name, m in (("none", None), ("mean", center(v)), ("512 others", other)):
                rows = [torch.full((1, args.heads), 1 / 32, device=args.device)] * 3
                for accumulator in ACCUMULATORS:
                    terms = Terms(False, 0.125, v_center=m, accumulator=accumulator, keeps=OPERANDS)
                    out, _, cast = native().forward(q, k, v, rows, terms, None)
                    q8, k8, v8 = (x.float().double()[0].transpose(0, 1) / 32 for x in cast)
                    want = torch.stack([(0.125 * a @ b.T).softmax(-1) @ x for a, b, x in zip(q8, k8, v8)])
                    want = want if m is None else want + m.double()[:, None]
                    off = out.double()[0].transpose(0, 1) - want
                    along = 100 * (off * want.sign()).mean() / want.abs().mean()
                    emit(n, mean, name, accumulator, f"{float(along):.3f}", f"{float(100 * off.norm() / want.norm()):.3f}")


def recorded(run, repeats):
    """A function that gives the time of a run in ms."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()

    def time():
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) / repeats

    time()
    return time


def cost(args):
    emit("batch,heads_q,heads_kv,head_dim,len_q,len_k,pv,keeps,centers,what,ms,low")
    shapes = ((64, 8, 128, 16384, 16384, 1), (64, 8, 128, 2048, 2048, 1), (32, 8, 64, 8192, 8192, 1), (64, 8, 128, 1, 16384, 8))
    make = functools.partial(draw, "cuda")
    for n_q, n_kv, d, length, keys, batch in shapes:
        c, m = (torch.zeros(n_kv, d, device="cuda") for _ in range(2))
        q, k, v = (make(batch, *of, d).bfloat16() for of in ((length, n_q), (keys, n_kv), (keys, n_kv)))
        grad, times = torch.randn_like(q), {}
        rows = [covering(x, own, n_kv).expand(batch, -1) for x, own in ((q, None), (k, c), (v, m))]
        ways = [("fp8-256", NOTHING), ("fp8-2048", NOTHING)]
        ways += [(accumulator, keeps) for keeps in (OPERANDS, UNROUNDED_DELTA, FP8_DQ) for accumulator in ACCUMULATORS]
        for accumulator, keeps in ways if length > 1 else ways[:1]:
            for name, (own_c, own_m) in (("none", (None, None)), ("c and m", (c, m))):
                terms = Terms(True, d**-0.5, k_center=own_c, v_center=own_m, accumulator=accumulator, keeps=keeps)
                kept = {"residual": torch.empty_like(q)} if keeps == UNROUNDED_DELTA else {}
                if keeps == FP8_DQ:
                    kept["row_max"] = q.new_empty(batch, n_q, length, dtype=torch.float32)
                forward = functools.partial(native().forward, q, k, v, rows, terms, None, **kept)
                out, lse, cast = forward()
                repeats = 3 if length > 8000 else 20
                times[accumulator, keeps, name, "forward"] = recorded(forward, repeats), []
                if keeps != NOTHING:
                    backward = functools.partial(native().backward, grad, cast, rows, out, lse, terms, **kept)
                    times[accumulator, keeps, name, "backward"] = recorded(backward, repeats), []
        for _ in range(9):
            for time, found in times.values():
                found.append(time())
        for key, (_, found) in times.items():
            found.sort()
            emit(batch, n_q, n_kv, d, length, keys, *key, f"{found[4]:.4f}", f"{found[0]:.4f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("gradients", "shrinkage", "cost"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--operands")
    for name, default in (("keys", 2048), ("heads", 32), ("d", 128), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    where = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    print(f"# {where}, torch {torch.__version__}, {vars(args)}")
    {"gradients": gradients, "shrinkage": shrinkage, "cost": cost}[args.part](args)


if __name__ == "__main__":
    sys.exit(main())
