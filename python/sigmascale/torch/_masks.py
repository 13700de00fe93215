"""Attention masks as sequences with a causal mask or a window, read off a mask's values.

A mask is recognised where each row sees one run of keys whose ends stay or move by a key a row: causal masks, windows, padding on
either side, the filled part of a static cache, packed sequences. Everything else is not, and neither is a mask whose values
cannot be read, inside compiled code or while a CUDA graph is captured.
"""

import dataclasses

import numpy as np
import torch

from ._terms import Sequences, readable

# Rows that a sequence must have on average: more sequences than that are no padding and no packing.
_ROWS = 16
# Calls that one mask may take. Text around an image whose tokens see each other (Gemma 3) takes three.
_CALLS = 3
# An additive mask hides keys by numbers of at most this. Models that do not hide by -inf take -1e4 or less, which is -9984 in
# bfloat16: beside logits that are thousands larger the weight of a key is zero.
_HIDES = -9000.0


def once(x, what, read):
    """``read()``, what was found in ``x``, kept with the tensor for as long as its values stay."""
    if x.is_inference():
        return read()
    name = f"_sigmascale_{what}"
    known = getattr(x, name, None)
    if known is None or known[0] != x._version:
        known = (x._version, read())
        setattr(x, name, known)
    return known[1]


def recognise(mask, batch, len_q, len_k):
    """The mask as ``[(causal, window, sequences or None), ...]``, calls on rows that they do not share, or why not.

    ``mask`` is what ``F.scaled_dot_product_attention`` takes, a bool tensor (True: seen) or an additive one. Reading it waits for
    the device, once for a tensor that stays as it is.
    """
    if not readable(mask):
        where = "in compiled code" if torch.compiler.is_compiling() else "while a CUDA graph is captured"
        return f"the values of an attention mask cannot be read {where}"
    return once(mask, f"calls_{batch}_{len_q}_{len_k}", lambda: _read(mask.detach(), batch, len_q, len_k))


def _read(mask, batch, len_q, len_k):
    if mask.dim() not in (2, 3, 4):
        return f"an attention mask of shape {tuple(mask.shape)} is not (batch, heads, queries, keys)"
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.shape[1] > 1 and mask.stride(1) != 0 and not torch.equal(mask, mask[:, :1].expand_as(mask)):
        return "an attention mask with its own values for each head is not supported in FP8"
    try:
        mask = mask[:, 0].expand(mask.shape[0], len_q, len_k)
    except RuntimeError:
        return f"an attention mask of shape {tuple(mask.shape)} does not fit {len_q} queries and {len_k} keys"
    seen, known = mask, torch.ones((), dtype=torch.bool, device=mask.device)
    if mask.dtype != torch.bool:
        if not mask.is_floating_point():
            return f"an attention mask of type {mask.dtype} is not supported in FP8: give it as bool"
        seen = mask == 0
        known = (seen | (mask <= _HIDES)).all()
    bits = seen.to(torch.uint8)
    count, start = bits.sum(dim=2, dtype=torch.int64), bits.argmax(dim=2)
    stop = torch.where(count > 0, len_k - bits.flip(2).argmax(dim=2), 0)
    start = torch.where(count > 0, start, 0)
    known &= (stop - start == count).all()
    *bounds, fine = torch.cat([start.flatten(), stop.flatten(), known[None].to(torch.int64)]).tolist()
    bounds = np.array(bounds).reshape(2, mask.shape[0], len_q)
    # Rows after a causal text may belong to its window, or see all of it.
    ways = []
    for whole in (True, False) if fine else ():
        pieces = [_pieces(*bounds[:, row], whole) for row in range(mask.shape[0])]
        if all(len(each) <= max(8, len_q // _ROWS) for each in pieces):
            ways.append(_grouped(pieces * (batch // mask.shape[0]), len_q, len_k))
    groups = min(ways, key=len, default=None)
    if groups is not None and len(groups) <= _CALLS:
        return [group.call(batch, len_q, len_k, mask.device) for group in groups]
    return "an attention mask of another kind than causal, window, padding or packed sequences is not supported in FP8"


@dataclasses.dataclass
class _Bound:
    """One side of a window: its width if rows show it, else at least how wide it must be."""

    width: int | None
    least: int

    def joined(self, other):
        """The bound of both, or None where they contradict each other."""
        widths = {self.width, other.width} - {None}
        least = max(self.least, other.least)
        if len(widths) > 1 or any(width < least for width in widths):
            return None
        return _Bound(next(iter(widths), None), least)


@dataclasses.dataclass
class _Piece:
    """Consecutive rows of one sequence, and the keys that they see between them."""

    rows: tuple[int, int]
    keys: tuple[int, int]
    left: _Bound
    right: _Bound


@dataclasses.dataclass
class _Group:
    """Pieces that one call computes, by sequences in order."""

    places: list
    left: _Bound
    right: _Bound

    def add(self, q, k, piece):
        """Takes a piece in, or returns False."""
        left, right = self.left.joined(piece.left), self.right.joined(piece.right)
        if left is None or right is None or (self.places and self.places[-1][1][1] > k[0]):
            return False
        self.left, self.right = left, right
        self.places.append((q, k))
        return True

    def call(self, batch, len_q, len_k, device):
        causal = self.right.width == 0
        unless = lambda width: -1 if width is None else width
        window = unless(self.left.width), -1 if causal else unless(self.right.width)
        whole = [((i * len_q, (i + 1) * len_q), (i * len_k, (i + 1) * len_k)) for i in range(batch)]
        if self.places == whole:
            return causal, window, None
        places = torch.tensor(self.places, dtype=torch.int32, device="cpu").reshape(-1, 4).t().contiguous().to(device)
        longest = [max(ends[i][1] - ends[i][0] for ends in self.places) for i in (0, 1)]
        return causal, window, Sequences(*places, *longest)


def _grouped(pieces, len_q, len_k):
    groups = []
    for sequence, each in enumerate(pieces):
        for piece in each:
            q, k = ((n * sequence + a, n * sequence + b) for n, (a, b) in ((len_q, piece.rows), (len_k, piece.keys)))
            if not any(group.add(q, k, piece) for group in groups):
                groups.append(_Group([(q, k)], piece.left, piece.right))
    # A mask that shows nothing is one empty sequence: a list needs an entry.
    return groups or [_Group([((0, 0), (0, 0))], _Bound(None, 0), _Bound(None, 0))]


def _pieces(start, stop, whole):
    """Runs of rows of one sequence that are one sequence of a call; rows that see nothing are left out. ``whole``: as long as they
    are one window."""
    rows = len(start)
    steps = np.stack([np.diff(start), np.diff(stop)])
    # Rows that see nothing have neither end.
    joined = ((steps == 0) | (steps == 1)).all(axis=0) & (stop[1:] > start[1:]) & (stop[:-1] > start[:-1])
    kind = np.where(joined, 2 * steps[0] + steps[1], -1)
    pieces, row = [], 0
    while row < rows:
        if stop[row] == start[row]:
            row += 1
            continue
        after = kind[row:]
        piece = _fitted(start, stop, row, row + _first(after == -1) + 1) if whole else None
        if piece is None:
            # Rows that all take the same step always fit.
            piece = _fitted(start, stop, row, row + _first((after != after[:1]) | (after == -1)) + 1)
        pieces.append(piece)
        row = piece.rows[1]
    return pieces


def _first(found):
    """Where the first is, or the length."""
    return int(found.argmax()) if found.any() else len(found)


def _fitted(start, stop, row, end):
    """These rows as a window on their keys, if they are one."""
    start, stop = start[row:end], stop[row:end]
    first, last = int(start[0]), int(stop[-1])
    place = np.arange(end - row) - (end - row) + last
    left, right = (_width(x) for x in ((place - start)[start > first], (stop - 1 - place)[stop < last]))
    if left is False or right is False:
        return None
    left, right = _Bound(left, int(place.max()) - first), _Bound(right, last - 1 - int(place.min()))
    low = first if left.width is None else np.maximum(first, place - left.width)
    high = last if right.width is None else np.minimum(last, place + right.width + 1)
    if (low != start).any() or (high != stop).any():
        return None
    return _Piece((row, end), (first, last), *(x if x.width is None else _Bound(x.width, 0) for x in (left, right)))


def _width(widths):
    """Their one value that is not negative; None where there are no rows, False where there are several values."""
    if len(widths) == 0:
        return None
    return int(widths[0]) if (widths == widths[0]).all() and widths[0] >= 0 else False
