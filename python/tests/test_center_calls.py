"""Random calls with random centers on the CPU: each element of the output is that of exact attention over the operands that the products
see, within what rounding P, the sums and the output may do, with centers and without.

    python python/tests/test_center_calls.py [--calls 10000] [--first 0] [--device cpu]

makes as many calls; the tests make 300.
"""

import argparse

import pytest

torch = pytest.importorskip("torch")

import plain  # noqa: E402

import sigmascale.torch as fp8  # noqa: E402

# Relative rounding of P, and of sums and of their promotion over a few hundred keys.
ROUNDING = {"f16": 2.0**-9, "fp8-256": 2.0**-4 + 2.0**-6, "fp8-2048": 2.0**-4 + 2.0**-5}


def drawn(seed):
    """Operands, centers and terms of a call."""
    generator = torch.Generator().manual_seed(seed)
    pick = lambda *of: of[int(torch.randint(len(of), (), generator=generator))]
    normal = lambda *shape: torch.randn(*shape, generator=generator)
    d, d_v, kv = pick(16, 32, 40, 64), pick(16, 32, 64), pick(1, 2)
    heads, batch, len_q, len_k = kv * pick(1, 2, 3), pick(1, 2), pick(1, 2, 17, 64, 90), pick(1, 5, 64, 65, 150)
    # Of centers: far smaller than keys, as large, and a thousand times them.
    size_c, size_m, shift = pick(0.01, 1.0, 4.0, 1000.0), pick(0.01, 1.0, 4.0, 100.0), pick(0.0, 3.0)
    c, m = ((size * normal(kv, n)).bfloat16().float() for size, n in ((size_c, d), (size_m, d_v)))
    q, k, v = normal(batch, len_q, heads, d), normal(batch, len_k, kv, d), normal(batch, len_k, kv, d_v)
    k, v = k + shift * c * (size_c < 1000), v + shift * m * (size_m < 100)
    dtype = pick(torch.bfloat16, torch.float16, torch.float32)
    if float(k.abs().amax()) > 3e4 or float(v.abs().amax()) > 3e4:
        dtype = torch.float32
    terms = {"causal": pick(True, False), "softcap": pick(None, None, None, 8.0)}
    if terms["causal"]:
        terms["window"] = pick((-1, -1), (9, 0))
    centers = pick((c, m), (c, None), (None, m))
    if terms["softcap"]:
        centers = None, m
    return [x.to(dtype) for x in (q, k, v)], centers, pick(*ROUNDING), terms


def covering(x, kv):
    return x.float().abs().amax(dim=(0, 1, 3)).view(kv, -1).amax(dim=1).clamp(min=1e-3) / 448 * 1.001



def off_by(q, k, scale):
    """How far the logits of each row may be off, (.., heads, queries): sums of products keep 13 bits of their largest term."""
    q, k = (x.double().abs().transpose(1, 2) for x in (q, k))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    largest = torch.stack([(row[:, :, None] * k).amax(dim=3).amax(dim=2) for row in q.unbind(2)], dim=2)
    return scale * q.shape[3] * 2.0**-13 * largest


def check(seed, device="cpu"):
    """The worst share of the allowed error that a call takes, without centers and with them."""
    given, centers, accumulator, terms = drawn(seed)
    q, k, v = (x.to(device) for x in given)
    centers = [None if x is None else x.to(device) for x in centers]
    kv, shares = k.shape[2], []
    for c, m in ((None, None), centers):
        left = lambda x, center: x.float() if center is None else x.float() - center
        rows = [covering(q, kv), covering(left(k, c), kv), covering(left(v, m), kv)]
        out, lse = fp8.attention(
            q, k, v, rows, accumulator=accumulator, backend="native", return_lse=True,
            centers=None if c is None and m is None else (c, m), **terms,
        )  # fmt: skip
        q8, k8, v8 = (plain.held(left(x, center).float(), row) for x, center, row in ((q, None, rows[0]), (k, c, rows[1]), (v, m, rows[2])))
        given = terms | {"window": terms.get("window", (-1, -1))}
        # Logits of keys with their center: the shift of a row is in its log-sum-exp.
        own, shifted = plain.attention(q8, k8 if c is None else k8 + c.double(), v8, **given)
        sizes, _ = plain.attention(q8, k8 if c is None else k8 + c.double(), v8.abs(), **given)
        wide = 0 if m is None else m.double().repeat_interleave(q.shape[2] // kv, dim=0)
        seen = (shifted > -torch.inf).mT[..., None]
        want = torch.where(seen, own + wide, 0.0)
        assert bool(out.isfinite().all()) and torch.equal(lse > -torch.inf, shifted > -torch.inf), seed
        room = off_by(q8, k8, q.shape[3] ** -0.5)
        far = torch.expm1(2 * room.clamp(max=20)).mT[..., None]
        allowed = (ROUNDING[accumulator] + far) * sizes + 2.0**-8 * want.abs() + 1e-6
        share = ((out.double() - want).abs() / allowed).amax()
        # The sum of P, each rounded to F16 or better; and the dot product of a row with c in f32.
        span = 2.0**-11 + room + 1e-5 * shifted.abs()
        if c is not None:
            span = span + 2.0**-20 * off_by(q8, c[None, None], q.shape[3] ** -0.5) * 2.0**13
        near = ((lse.double() - shifted).abs() / span)[shifted > -torch.inf]
        assert bool((near <= 1).all()), (seed, float(near.amax()))
        shares.append(float(share))
        assert share <= 1, (seed, shares, accumulator, terms, tuple(q.shape), tuple(k.shape), c is not None, m is not None)
    return shares


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_centered_calls_are_within_the_rounding_of_their_products(first):
    shares = [check(seed) for seed in range(first, first + 50)]
    # The room is no larger than it needs to be.
    assert max(max(pair) for pair in shares) > 0.3


def test_a_wrong_center_is_found():
    """Centers that are not those of the call: the output lacks part of m, or its logits are of other keys."""
    found = 0
    for seed in range(40):
        (q, k, v), (c, m), accumulator, terms = drawn(seed)
        # Far centers leave nothing of keys, and anything of the output is allowed.
        if m is None or float(m.abs().amax()) < 1.0 or (c is not None and float(c.abs().amax()) > 100.0):
            continue
        original = fp8.attention
        try:
            fp8.attention = lambda *given, **options: original(
                *given, **options | ({"centers": (options["centers"][0], 1.5 * m)} if options["centers"] else {})
            )
            with pytest.raises(AssertionError):
                check(seed)
            found += 1
        finally:
            fp8.attention = original
    assert found > 5


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    worst = [0.0, 0.0]
    for done in range(1, args.calls + 1):
        worst = [max(pair) for pair in zip(worst, check(args.first + done - 1, args.device))]
        if done % 100 == 0 or done == args.calls:
            print(f"{done} calls: at most {worst[0]:.3f} of the allowed error without centers, {worst[1]:.3f} with them", flush=True)


if __name__ == "__main__":
    main()
