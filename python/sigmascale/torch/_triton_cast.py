"""The cast to E4M3 in one pass, with maxima and overflow counts as a by-product, as a Triton kernel."""

import torch
import triton
import triton.language as tl

_ROWS = 32


@triton.jit
def _add(place, count):
    # A count that would wrap stays at the largest: all bits set.
    before = tl.atomic_add(place, count).to(tl.uint32, bitcast=True)
    if before + count.to(tl.uint32, bitcast=True) < before:
        tl.atomic_or(place, -1)


@triton.jit
def _cast(
    x,
    out,
    descale,
    words,
    rows,
    heads,
    group,
    stride_b,
    stride_s,
    stride_h,
    d: tl.constexpr,
    width: tl.constexpr,
    step: tl.constexpr,
    descale_b,
    counts: tl.constexpr,
):
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, channel = block * step + tl.arange(0, step), tl.arange(0, width)
    kept = (row[:, None] < rows) & (channel[None, :] < d)
    at = (
        batch.to(tl.int64) * stride_b
        + row[:, None].to(tl.int64) * stride_s
        + head.to(tl.int64) * stride_h
        + channel[None, :]
    )
    value = tl.load(x + at, mask=kept, other=0.0).to(tl.float32)
    # Rounded as everywhere else: an approximate division moves values that lie between two of E4M3.
    inverse = tl.div_rn(tl.full((), 1.0, tl.float32), tl.load(descale + batch * descale_b + head // group))
    scaled = value * inverse
    to = ((batch.to(tl.int64) * rows + row[:, None]) * heads + head) * d + channel[None, :]
    # Minimum and maximum would turn a NaN into a number.
    clipped = tl.where(scaled > 448.0, 448.0, tl.where(scaled < -448.0, -448.0, scaled))
    tl.store(out + to, clipped.to(tl.float8e4nv), mask=kept)
    if counts:
        # Bits of numbers that are not negative keep their order as integers, and NaN is above all.
        bits = tl.max(tl.max(tl.abs(value).to(tl.int32, bitcast=True), axis=1), axis=0)
        size = tl.abs(scaled)
        finite = size < float("inf")
        beyond = (size > 464.0) & finite
        over = (size > 448.0) & finite
        place = words + 4 * head
        tl.atomic_max(place, bits)
        total = tl.sum(tl.sum(over.to(tl.int32), axis=1), axis=0)
        if total > 0:
            _add(place + 1, total)
            _add(place + 2, tl.sum(tl.sum(beyond.to(tl.int32), axis=1), axis=0))
        bad = tl.sum(tl.sum((kept & (size != size) | (size == float("inf"))).to(tl.int32), axis=1), axis=0)
        if bad > 0:
            _add(place + 3, bad)


def cast(x, descale, words=None):
    """``x / descale`` of ``(batch, seq, heads, d)`` in E4M3, saturating, contiguous; see ``_backends.cast``."""
    batch, rows, heads, d = x.shape
    out = torch.empty(x.shape, device=x.device, dtype=torch.float8_e4m3fn)
    grid = (triton.cdiv(rows, _ROWS), heads, batch)
    with torch.cuda.device(x.device):
        _cast[grid](
            x,
            out,
            descale,
            words if words is not None else out,
            rows,
            heads,
            heads // descale.shape[1],
            *x.stride()[:3],
            d,
            triton.next_power_of_2(d),
            _ROWS,
            descale.stride(0),
            words is not None,
        )
    return out
