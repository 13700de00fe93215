"""Rotary embedding of queries and keys, in PyTorch and for the cast of this package's kernels."""

import dataclasses

import torch
from torch.autograd.function import once_differentiable

from .._errors import ArgumentError, MismatchError
from ._e4m3 import E4M3


@dataclasses.dataclass(frozen=True)
class Rope:
    """Tables of cosines and sines, f32 ``(positions, rotary / 2)``.

    The first ``rotary`` channels of a head turn in pairs ``(i, i + rotary / 2)``, or ``(2 i, 2 i + 1)`` if
    ``interleaved``, as ``(a, b) -> (a cos - b sin, b cos + a sin)``. Query i has the position ``i + len_k - len_q``.
    """

    cosine: torch.Tensor
    sine: torch.Tensor
    interleaved: bool = False


def checked(given, q, k):
    """``(cosine, sine)`` or a Rope, checked against a call."""
    rope = given if isinstance(given, Rope) else Rope(*_two(given))
    for name, table in ("cosines", rope.cosine), ("sines", rope.sine):
        if not isinstance(table, torch.Tensor) or table.dim() != 2 or table.dtype != torch.float32:
            shown = f"{table.dtype} {tuple(table.shape)}" if isinstance(table, torch.Tensor) else type(table).__name__
            raise ArgumentError(f"the {name} of rope must be float32 (positions, rotary / 2), not {shown}")
        if table.device != q.device:
            raise ArgumentError(
                f"the {name} of rope are on {table.device} and q on {q.device}: move them to one device"
            )
    if rope.cosine.shape != rope.sine.shape:
        raise MismatchError(
            f"rope has cosines {tuple(rope.cosine.shape)} and sines {tuple(rope.sine.shape)}: make them equal"
        )
    rows, rotary = rope.cosine.shape[0], 2 * rope.cosine.shape[1]
    if rotary == 0 or rotary % 8 or rotary > q.shape[3]:
        raise MismatchError(f"rope turns {rotary} channels: a multiple of 8 up to d_head {q.shape[3]} is needed")
    if q.shape[1] > k.shape[1]:
        raise MismatchError(f"rope needs a position for each of {q.shape[1]} queries, and there are {k.shape[1]} keys")
    if rows < k.shape[1]:
        raise MismatchError(f"rope has {rows} positions for {k.shape[1]} keys: give tables for all of them")
    if q.dtype == E4M3:
        raise ArgumentError("operands in E4M3 cannot be turned: rope comes before the cast")
    return dataclasses.replace(rope, cosine=rope.cosine.contiguous(), sine=rope.sine.contiguous())


def turned(rope, q, k):
    """q and k, turned by PyTorch."""
    return tuple(turn(x, *_rows(rope, x, k), rope.interleaved) for x in (q, k))


def turned_back(rope, q, k):
    """q and k as they are, whose gradients, those of turned ones, are turned back."""
    return tuple(_Back.apply(x, *_rows(rope, x, k), rope.interleaved) for x in (q, k))


def _rows(rope, x, k):
    """Rows of the tables where x stands among the keys."""
    first = k.shape[1] - x.shape[1]
    return rope.cosine[first : k.shape[1]], rope.sine[first : k.shape[1]]


def _two(given):
    try:
        cosine, sine = given
    except (TypeError, ValueError):
        raise ArgumentError(f"rope must be (cosines, sines) or a Rope, not {type(given).__name__}") from None
    return cosine, sine


def turn(x, cosine, sine, interleaved):
    """x ``(batch, seq, heads, d_head)`` turned, in f32 and rounded to its type."""
    half = cosine.shape[1]
    cosine, sine = cosine[None, :, None], sine[None, :, None]
    pairs = x[..., : 2 * half]
    a, b = (pairs[..., ::2], pairs[..., 1::2]) if interleaved else (pairs[..., :half], pairs[..., half:])
    a, b = a.float(), b.float()
    both = torch.addcmul(a * cosine, b, sine, value=-1), torch.addcmul(b * cosine, a, sine)
    turned = torch.stack(both, dim=-1).flatten(-2) if interleaved else torch.cat(both, dim=-1)
    turned = turned.to(x.dtype)
    return turned if 2 * half == x.shape[3] else torch.cat([turned, x[..., 2 * half :]], dim=-1)


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cosine, sine, interleaved):
        ctx.save_for_backward(cosine, sine)
        ctx.interleaved = interleaved
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        cosine, sine = ctx.saved_tensors
        return turn(grad, cosine, -sine, ctx.interleaved), None, None, None
