"""Rotary embedding of attention's operands, on the CPU, where PyTorch turns them."""

import pytest

torch = pytest.importorskip("torch")

import sigmascale  # noqa: E402
import sigmascale.torch as fp8  # noqa: E402
from sigmascale.torch import _attention, _hopper, _rope  # noqa: E402

ROWS = [torch.full((2,), 0.02 * (1 + i)) for i in range(3)]


def operands(length=33, keys=33, d=32):
    generator = torch.Generator().manual_seed(3)
    make = lambda heads, n: torch.randn(2, n, heads, d, generator=generator).requires_grad_(True)
    return make(4, length), make(2, keys), make(2, keys)


def tables(rows=40, rotary=32):
    angles = torch.arange(rows)[:, None] * 100.0 ** (-torch.arange(0, rotary, 2) / rotary)
    return angles.cos(), angles.sin()


def by_complex_numbers(x, cosine, sine, first, interleaved):
    """The definition: a pair is a complex number, which is multiplied."""
    half = cosine.shape[1]
    turned = x.clone()
    for i in range(half):
        at = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        z = torch.complex(x[..., at[0]], x[..., at[1]])
        z = z * torch.complex(cosine[:, i], sine[:, i])[first : first + x.shape[1], None]
        turned[..., at[0]], turned[..., at[1]] = z.real, z.imag
    return turned


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("length, keys, rotary", [(33, 33, 32), (5, 33, 32), (33, 33, 16)])
def test_operands_are_turned_by_their_positions(length, keys, rotary, interleaved):
    q, k, v = operands(length, keys)
    cosine, sine = tables(rotary=rotary)
    out = fp8.attention(q, k, v, ROWS, rope=fp8.Rope(cosine, sine, interleaved))
    have = torch.autograd.grad(out.sum(), (q, k, v))
    turned = [by_complex_numbers(x, cosine, sine, keys - x.shape[1], interleaved) for x in (q, k)]
    want = fp8.attention(*turned, v, ROWS)
    assert (out - want).float().norm() < 2e-3 * want.float().norm()
    for a, b in zip(have, torch.autograd.grad(want.sum(), (q, k, v))):
        assert (a - b).norm() < 1e-2 * b.norm()


def test_a_pair_of_tables_is_a_rope_and_positions_count():
    q, k, v = operands()
    cosine, sine = tables()
    out = fp8.attention(q, k, v, ROWS, rope=(cosine, sine))
    assert torch.equal(out, fp8.attention(q, k, v, ROWS, rope=fp8.Rope(cosine, sine)))
    assert not torch.equal(out, fp8.attention(q, k, v, ROWS))


def test_gradients_are_turned_back():
    """What the cast's turn leaves to PyTorch."""
    q, k, _ = operands(5)
    rope = fp8.Rope(*tables())
    grads = [torch.randn(x.shape) for x in (q, k)]
    back = torch.autograd.grad(_rope.turned_back(rope, q, k), (q, k), grads)
    wants = torch.autograd.grad(_rope.turned(rope, q, k), (q, k), grads)
    for have, want, grad in zip(back, wants, grads):
        assert torch.allclose(have, want, atol=1e-5) and not torch.allclose(have, grad, atol=1e-2)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_cast_that_turns_is_given_the_tables(interleaved, monkeypatch):
    """As on a GPU: the backend gets q, k and the tables, and autograd the gradients of turned operands."""
    original, given = _hopper.Native.forward, []

    def forward(self, q, k, v, *rest, rope=None, **kept):
        given.append(rope)
        return original(self, *_rope.turned(rope, q, k), v, *rest, **kept)

    q, k, v = operands(5)
    rope = fp8.Rope(*tables(), interleaved)
    want = fp8.attention(q, k, v, ROWS, rope=rope)
    monkeypatch.setattr(_attention, "_turns_in_cast", lambda *call: True)
    monkeypatch.setattr(_hopper.Native, "forward", forward)
    have = fp8.attention(q, k, v, ROWS, rope=rope, backend="native")
    assert len(given) == 1 and given[0].interleaved == interleaved and torch.equal(have, want)
    grads = [torch.autograd.grad(out.sum(), (q, k, v)) for out in (have, want)]
    for a, b in zip(*grads):
        assert (a - b).norm() < 1e-2 * b.norm()


def test_compiled_calls_turn_them_too():
    q, k, v = (x.detach() for x in operands())
    rope = tables()
    compiled = torch.compile(lambda q, k, v: fp8.attention(q, k, v, ROWS, rope=rope), backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), fp8.attention(q, k, v, ROWS, rope=rope))


@pytest.mark.parametrize(
    "rope, message",
    [
        (None, None),
        (5, "rope must be"),
        (tables()[:1], "rope must be"),
        ((tables()[0].double(), tables()[1]), "cosines of rope must be float32"),
        ((tables()[0], tables()[1][:3]), "make them equal"),
        (tables(rows=20), "20 positions for 33 keys"),
        (tables(rotary=40), "rope turns 40 channels"),
        (tables(rotary=12), "rope turns 12 channels"),
    ],
)
def test_tables_that_do_not_fit_are_named(rope, message):
    q, k, v = operands()
    if message is None:
        with pytest.raises(sigmascale.MismatchError, match="33 queries.*20 keys"):
            fp8.attention(q, k[:, :20], v[:, :20], ROWS, causal=False, rope=tables())
        return
    with pytest.raises((sigmascale.ArgumentError, sigmascale.MismatchError), match=message):
        fp8.attention(q, k, v, ROWS, rope=rope)


def test_codes_cannot_be_turned():
    q, k, v = (x.detach().to(torch.float8_e4m3fn) for x in operands())
    with pytest.raises(sigmascale.ArgumentError, match="rope comes before the cast"):
        fp8.attention(q, k, v, ROWS, rope=tables())


def test_channels_behind_the_rotary_ones_stay():
    x = operands()[0].detach()
    turned = _rope.turn(x, *(table[:33] for table in tables(rotary=16)), False)
    assert torch.equal(turned[..., 16:], x[..., 16:]) and not torch.equal(turned[..., :16], x[..., :16])
