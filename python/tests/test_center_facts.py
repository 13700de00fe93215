"""Each case of the guide's table of what is exact with centers, in float64, next to the form that is not."""

import math

import pytest

torch = pytest.importorskip("torch")

import plain  # noqa: E402

D, HEADS, LENGTH = 16, 4, 24
TAU = D**-0.5
EXACT, WRONG = 1e-12, 0.05


def draw(seed=0):
    """q of four heads over one of keys and values, their c and m, and sinks."""
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    q, k, v = make(LENGTH, HEADS, D), make(LENGTH, 1, D), make(LENGTH, 1, D)
    return q, k, v, 3 * make(D), 2 + make(D), make(HEADS)


def off(a, b):
    return float((a - b).abs().max())


def attend(q, k, v, **terms):
    out, lse = plain.attention(q, k, v, **terms)
    return out, lse.T


def by_logits(logits, v, sink=None):
    """Output and log-sum-exp of logits (queries, heads, keys) that a kernel was given, causal."""
    hidden = torch.ones(LENGTH, logits.shape[2], dtype=torch.bool).triu(1)
    logits = logits.masked_fill(hidden[:, None], -math.inf)
    lse = logits.logsumexp(2) if sink is None else torch.logaddexp(logits.logsumexp(2), sink.expand(LENGTH, HEADS))
    return torch.einsum("qhk,kd->qhd", (logits - lse[..., None]).exp(), v[:, 0]), lse


def logits(q, k):
    return TAU * torch.einsum("qhd,kd->qhk", q, k[:, 0])


def merged(parts):
    """Of outputs and log-sum-exps over parts of the keys."""
    total = torch.stack([lse for _, lse in parts]).logsumexp(0)
    return sum((lse - total).exp()[..., None] * out for out, lse in parts), total


@pytest.mark.parametrize("terms", [{}, {"causal": False}, {"window": (7, 0)}])
def test_output_and_log_sum_exp(terms):
    q, k, v, c, m, _ = draw()
    (out, lse), (own, shifted) = attend(q, k, v, **terms), attend(q, k - c, v - m, **terms)
    assert off(own + m, out) < EXACT and off(shifted + TAU * q @ c, lse) < EXACT
    assert off(own, out) > WRONG and off(shifted, lse) > WRONG
    # Queries have no center: it would take another number from each key's logit.
    assert off(attend(q - c, k, v, **terms)[0], out) > WRONG


def test_queries_lose_a_number_per_key():
    q, k, v, a, _, _ = draw(1)
    out, _ = attend(q, k, v)
    assert off(by_logits(logits(q - a, k) + TAU * (k[:, 0] @ a), v)[0], out) < EXACT


def test_soft_cap():
    q, k, v, c, m, _ = draw(2)
    out, _ = attend(q, k, v, softcap=2.0)
    capped = lambda x: 2.0 * torch.tanh(x / 2.0)
    assert off(by_logits(capped(logits(q, k - c)), v)[0], out) > WRONG
    assert off(by_logits(capped(logits(q, k - c) + TAU * (q @ c)[..., None]), v)[0], out) < EXACT
    assert off(attend(q, k, v - m, softcap=2.0)[0] + m, out) < EXACT


def test_sinks():
    q, k, v, c, m, sinks = draw(3)
    out, lse = attend(q, k, v, sinks=sinks)
    share = (sinks - lse).exp()[..., None]
    assert off(by_logits(logits(q, k - c), v, sinks)[0], out) > WRONG
    assert off(attend(q, k, v - m, sinks=sinks)[0] + m, out) > WRONG
    own, _ = by_logits(logits(q, k - c), v - m, sinks - TAU * q @ c)
    assert off(own + (1 - share) * m, out) < EXACT
    # A kernel without sinks.
    own, shifted = attend(q, k - c, v - m)
    assert off(torch.sigmoid(shifted + TAU * q @ c - sinks)[..., None] * (own + m), out) < EXACT


def test_one_in_the_denominator_is_a_row_of_the_cache():
    q, k, v, c, m, _ = draw(4)
    zeros = torch.zeros(HEADS, dtype=torch.float64)
    out, _ = attend(q, k, v, sinks=zeros)
    row = lambda x, center: torch.cat([-center[None, None], x - center])
    # The row is before all others, so that causal queries see it.
    assert off(attend(q, row(k, c), row(v, m))[0] + m, out) < EXACT
    assert off(attend(q, k - c, v - m)[0] + m, out) > WRONG


def test_parts_of_the_keys():
    q, k, v, c, m, _ = draw(5)
    out, lse = attend(q, k, v, causal=False)
    parts = slice(0, 9), slice(9, LENGTH)
    of = lambda part, c, m: attend(q, k[part] - c, v[part] - m, causal=False)
    own, shifted = merged([of(part, c, m) for part in parts])
    assert off(own + m, out) < EXACT and off(shifted + TAU * q @ c, lse) < EXACT
    centers = (c, m), (-0.5 * c, 2 * m)
    each = [(of(part, *own), own) for part, own in zip(parts, centers)]
    assert off(merged([(o + m, s) for (o, s), (c, m) in each])[0], out) > WRONG
    assert off(merged([(o + m, s + TAU * q @ c) for (o, s), (c, m) in each])[0], out) < EXACT


def test_blocks_of_keys_with_centers_of_their_own():
    q, k, v, c, _, _ = draw(6)
    out, _ = attend(q, k, v)
    blocks = torch.arange(LENGTH) // 8 + 1.0
    own = logits(q, k - blocks[:, None, None] * c)
    assert off(by_logits(own, v)[0], out) > WRONG
    assert off(by_logits(own + TAU * (q @ c)[..., None] * blocks, v)[0], out) < EXACT


def test_a_reader_takes_the_center_of_the_writer():
    q, k, v, c, _, _ = draw(7)
    out, _ = attend(q, k, v)
    cache = torch.cat([k[:12] - c, k[12:] - 1.5 * c])
    assert off(attend(q, cache, v)[0], out) > WRONG


def test_scales_per_channel_and_additive_masks():
    q, k, v, c, m, _ = draw(8)
    out, _ = attend(q, k, v)
    scale = torch.linspace(0.1, 3.0, D, dtype=torch.float64)
    assert off(attend(q * scale, (k - c) / scale, v)[0], out) < EXACT
    bias = -0.3 * (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs().double()[:, None]
    assert off(by_logits(logits(q, k - c) + bias, v - m)[0] + m, by_logits(logits(q, k) + bias, v)[0]) < EXACT


def test_norms_and_rotations_come_first():
    q, k, v, c, _, _ = draw(9)
    angles = torch.arange(LENGTH).double()[:, None, None] * 0.7 ** torch.arange(D // 2).double()

    def turned(x):
        one, two = x.chunk(2, dim=2)
        return torch.cat([one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()], 2)

    normed = lambda x: x * x.square().mean(2, keepdim=True).rsqrt()
    k = k + 1.0
    out, _ = attend(q, turned(normed(k)), v)
    assert off(attend(q, turned(normed(k)) - c, v)[0], out) < EXACT
    assert off(attend(q, turned(normed(k) - c), v)[0], out) > WRONG
    assert off(attend(q, turned(normed(k - 1.0)), v)[0], out) > WRONG
    # The mean of a rotated constant over positions, in closed form.
    theta, n = 0.7 ** torch.arange(D // 2).double(), LENGTH
    mean = turned(c.expand(LENGTH, 1, D)).mean(dim=(0, 1))
    factor = torch.polar(torch.sin(n * theta / 2) / (n * torch.sin(theta / 2)), (n - 1) * theta / 2)
    pair = torch.complex(*c.chunk(2)) * factor
    assert off(torch.cat([pair.real, pair.imag]), mean) < EXACT


def test_latent_attention():
    generator = torch.Generator().manual_seed(10)
    make = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    rank, pe, nope = 12, 4, 8
    latent, k_pe, q, q_pe = make(LENGTH, rank), make(LENGTH, pe), make(LENGTH, HEADS, nope), make(LENGTH, HEADS, pe)
    up_k, up_v, a, b = make(HEADS, nope, rank), make(HEADS, nope, rank), 2 * make(rank), 2 * make(pe)

    def expanded(latent, k_pe):
        k = torch.cat([torch.einsum("hnr,tr->thn", up_k, latent), k_pe[:, None].expand(-1, HEADS, -1)], 2)
        return attend(torch.cat([q, q_pe], 2), k, torch.einsum("hnr,tr->thn", up_v, latent))[0]

    out, heads = expanded(latent, k_pe), up_v @ a
    assert off(expanded(latent - a, k_pe - b) + heads, out) < EXACT and off(expanded(latent - a, k_pe - b), out) > WRONG
    absorbed = torch.cat([torch.einsum("thn,hnr->thr", q, up_k), q_pe], 2)
    rows = torch.cat([latent - a, k_pe - b], 1)[:, None]
    own, _ = attend(absorbed, rows, (latent - a)[:, None], scale=(nope + pe) ** -0.5)
    assert off(torch.einsum("hnr,thr->thn", up_v, own + a), out) < EXACT
    assert off(torch.einsum("hnr,thr->thn", up_v, own), out) > WRONG


@pytest.mark.parametrize("with_sinks", [False, True])
def test_gradients(with_sinks):
    q, k, v, c, m, sinks = draw(11)
    terms = {"sinks": sinks} if with_sinks else {}
    leaves = [x.requires_grad_(True) for x in (q, k, v)]
    out, lse = attend(q, k, v, **terms)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(12), dtype=torch.float64)
    dq, dk, dv = torch.autograd.grad(out, leaves, grad)
    q, k, v, out, lse = (x.detach() for x in (q, k, v, out, lse))
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[:, None]
    p = (logits(q, k).masked_fill(hidden, -math.inf) - lse[..., None]).exp()
    dp = torch.einsum("qhd,kd->qhk", grad, (v - m)[:, 0])
    delta = (grad * (out - m)).sum(2, keepdim=True)
    ds = p * (dp - delta)
    sums = ds.sum(2)[..., None]
    into = lambda ds, keys: TAU * torch.einsum("qhk,kd->qhd", ds, keys[:, 0])
    from_sinks = TAU * sums * c if with_sinks else 0
    assert off(into(ds, k - c) + from_sinks, dq) < EXACT
    assert off(torch.einsum("qhk,qhd->kd", TAU * ds, q), dk[:, 0]) < EXACT
    assert off(torch.einsum("qhk,qhd->kd", p, grad), dv[:, 0]) < EXACT
    if with_sinks:
        assert off(into(ds, k - c), dq) > WRONG, "rows of dS do not sum to zero"
        share = (sinks - lse).exp()[..., None]
        kernels_own = (grad * (out - (1 - share) * m)).sum(2, keepdim=True)
        assert off(into(p * (dp - kernels_own), k), dq) > WRONG, "delta has the full m"
    else:
        assert off(sums, torch.zeros(())) < EXACT
    # O with V' is of two kinds.
    assert off(into(p * (dp - (grad * out).sum(2, keepdim=True)), k - c), dq) > WRONG
