#!/usr/bin/env python3
"""What the rounding of the output does to the output and to dQ where row maxima repeat: FP8 attention with and without
`gradients="rounded-delta"` and without, PyTorch's BF16 attention, and FP8 with P shifted within an octave.

    python benches/delta_bias.py [--device cpu] [--keys 2048] [--heads 4] [--d 128] [--copies 3] [--seed 0]

Keys are +-1 codes that share a part; `--copies` keys of each token are equal, so that each row has as many equal maxima; V has
one sign ("one") or both ("both"). dO is a tenth of the exact output. All keys are visible. Against f64 on the operands that
each contender reads (E4M3 ones in FP8). A line of CSV each:

    output_bias   mean error of O in the direction of the exact O, over its mean size, in percent
    output_rms    relative error of O, in percent
    dq_error      relative error of dQ, in percent
    dq_bias       norm of the mean row of that error over what independent rows of its size would leave: 1 is unbiased
    dq_shared     mean over rows of the error of dQ along the part that keys share, over the mean size of dQ's rows

The lines `shift` are forwards with two keys of value zero whose logits lie so many octaves above the others' maximum: it moves P
of the repeated maxima from 2^8 down to 2^(8 - octaves). The output is multiplied by what those keys took from the sum.
"""

import argparse
import math
import pathlib
import sys

import torch

import sigmascale.torch as fp8

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "python" / "tests"))
import plain  # noqa: E402


def operands(args, sign):
    """q, k, v in BF16, `(1, keys, heads, d)`, exact in E4M3 but for v."""
    generator = torch.Generator().manual_seed(args.seed)
    n, heads, d = args.keys, args.heads, args.d
    tokens = n // args.copies
    code = torch.randint(0, 2, (tokens, heads, d - 8), generator=generator) * 2.0 - 1.0
    value = torch.randn(tokens, heads, d, generator=generator)
    value = -(0.6 * value).exp() if sign == "one" else value
    order = torch.randperm(tokens * args.copies, generator=generator)
    every = lambda x: x.repeat(args.copies, 1, 1)[order]
    shared, none = torch.ones(tokens, heads, 4), torch.zeros(tokens, heads, 4)
    k = every(torch.cat([code, shared, none], 2))
    # The row's own code 1.5 times, which with d = 128 puts its maxima at 15.9 nats.
    q = every(torch.cat([1.5 * code, none, none], 2))
    return [x[None].bfloat16().to(args.device) for x in (q, k, every(value))]


def exact(q, k, v, grad=None):
    """Output, or dQ for the gradient of the output, in f64."""
    q, k, v = (x.detach().double() for x in (q, k, v))
    out, _ = plain.attention(q.requires_grad_(True), k, v, causal=False)
    return out.detach() if grad is None else torch.autograd.grad(out, q, grad.double())[0]


def report(name, sign, out, want, dq=None, want_dq=None):
    error = out.double() - want
    bias = (error * want.sign()).mean() / want.abs().mean()
    cells = [name, sign, f"{100 * bias:.4f}", f"{100 * (error.norm() / want.norm()):.4f}"]
    if dq is not None:
        error = (dq.double() - want_dq)[0]
        rows, size = error.shape[0], want_dq[0].norm(dim=2).mean()
        mean = error.mean(0)
        independent = error.norm(dim=2).square().mean(0).sqrt() / math.sqrt(rows)
        shared = error[..., -8:-4].sum(2).mean() / 2.0
        cells += [f"{100 * (error.norm() / want_dq.norm()):.4f}", f"{(mean.norm(dim=1) / independent).mean():.2f}"]
        cells += [f"{shared / size:.3e}"]
    print(",".join(cells + [""] * (7 - len(cells))), flush=True)


def gradients(step, q, k, v, grad):
    leaves = [x.detach().clone().requires_grad_(True) for x in (q, k, v)]
    out = step(*leaves)
    return out.detach(), torch.autograd.grad(out, leaves, grad)[0]


def contenders(args, sign):
    q, k, v = operands(args, sign)
    one = lambda x: (x.abs().amax(dim=(0, 1, 3)).float() / 448.0).contiguous()
    descales = one(q), one(k), one(v)
    rows = [d.expand(1, -1) for d in descales]
    held = [plain.held(x, d) for x, d in zip((q, k, v), rows)]
    want = exact(*held)
    grad = (0.1 * want).bfloat16()
    want_dq = exact(*held, grad)
    backend = "native"
    for name, given in (("fp8", {"gradients": "rounded-delta"}), ("fp8 unrounded-delta", {})):
        step = lambda q, k, v: fp8.attention(q, k, v, descales, causal=False, backend=backend, **given)
        report(name, sign, *sum(zip(gradients(step, q, k, v, grad), (want, want_dq)), ()))
    whole, whole_dq = exact(q, k, v), exact(q, k, v, grad)

    def sdpa(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    kernels = torch.nn.attention.SDPBackend
    chosen = [("bf16 flash", kernels.FLASH_ATTENTION)]
    if args.device == "cuda":
        chosen.append(("bf16 cudnn", kernels.CUDNN_ATTENTION))
    for name, kernel in chosen:
        try:
            with torch.nn.attention.sdpa_kernel(kernel):
                found = gradients(sdpa, q, k, v, grad)
        except RuntimeError as missing:
            print(f"# {name}: {str(missing).splitlines()[0]}")
            continue
        report(name, sign, *sum(zip(found, (whole, whole_dq)), ()))
    shifted(args, sign, q, k, v, rows)


def shifted(args, sign, q, k, v, rows):
    """P of the repeated maxima at 2^(8 - octaves), by a key without a value."""
    scale = args.d**-0.5
    q = q.clone()
    q[..., -4:] = 1.5
    held = [plain.held(x, d) for x, d in zip((q, k, v), rows)]
    want = exact(*held)
    logits = torch.einsum("bqhd,bkhd->bhqk", held[0], held[1]) * scale
    top, lse = logits.amax(3), torch.logsumexp(logits, 3)
    for octaves in (0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9):
        key = torch.zeros_like(k[:, :1])
        # Maxima are one number for all rows. A power of two, so that keys of ones stay exact.
        left = (top.max() + octaves * math.log(2)).item() / (1.5 * scale)
        k_descale = torch.full_like(rows[1][0], 2.0 ** math.ceil(math.log2(left / 448.0))).contiguous()
        for channel in range(-4, 0):
            key[..., channel] = left
            key[..., channel] = plain.held(key, k_descale)[..., channel].to(key.dtype)
            left -= key[0, 0, 0, channel].item()
        # The key's own logit, as E4M3 holds it.
        kept = 1.5 * scale * key[0, 0].double().sum(1)
        moved = ((kept - top.amax(dim=(0, 2))) / math.log(2)).mean().item() if octaves else 0.0
        # At both ends, since kernels go through the keys either way, and P of a tile knows the maxima so far.
        keys = torch.cat([key, k, key], 1) if octaves else k
        values = torch.cat([torch.zeros_like(key), v, torch.zeros_like(key)], 1) if octaves else v
        for accumulator in ("f16", "fp8-256"):
            out = fp8.attention(
                q, keys, values, (rows[0][0].contiguous(), k_descale, rows[2][0].contiguous()), causal=False,
                backend="native", accumulator=accumulator,
            )  # fmt: skip
            share = torch.ones_like(lse) if not octaves else 1 + 2 * torch.exp(kept.view(1, -1, 1) - lse)
            report(f"shift {moved:.3f} {accumulator}", sign, out.double() * share.transpose(1, 2)[..., None], want)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    for name, default in (("keys", 2048), ("heads", 4), ("d", 128), ("copies", 3), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    args.keys = args.keys // args.copies * args.copies
    print(f"# {torch.cuda.get_device_name() if args.device == 'cuda' else 'cpu'}, torch {torch.__version__}, {vars(args)}")
    print("kernel,sign_of_v,output_bias,output_rms,dq_error,dq_bias,dq_shared")
    for sign in ("one", "both"):
        contenders(args, sign)


if __name__ == "__main__":
    main()
