"""Attention masks as a few dense calls: which rows see which keys, read off a mask's values.

A mask is recognised where each row sees one run of keys, and runs of consecutive rows are equal or grow by a key a row (causal):
causal masks, padding on either side, the filled part of a static cache, packed sequences. Everything else, windows included, is
not, and neither is a mask whose values cannot be read, inside compiled code or while a CUDA graph is captured.
"""

import numpy as np
import torch

# Rows that a dense call must have on average to be worth a launch.
_ROWS = 16


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
    """The mask as ``[(first sequence, end, [(first row, end, first key, end, causal), ...]), ...]``, or why not.

    ``mask`` is what ``F.scaled_dot_product_attention`` takes, a bool tensor (True: seen) or an additive one. Reading it waits for
    the device, once for a tensor that stays as it is.
    """
    if torch.compiler.is_compiling():
        return "the values of an attention mask cannot be read in compiled code"
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return "the values of an attention mask cannot be read while a CUDA graph is captured"
    return once(mask, f"layout_{batch}_{len_q}_{len_k}", lambda: _read(mask.detach(), batch, len_q, len_k))


def _read(mask, batch, len_q, len_k):
    if mask.dim() not in (2, 3, 4):
        return f"an attention mask of shape {tuple(mask.shape)} is not (batch, heads, queries, keys)"
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.shape[1] > 1 and mask.stride(1) != 0:
        return "an attention mask with its own values for each head is not offered in FP8"
    try:
        mask = mask[:, 0].expand(mask.shape[0], len_q, len_k)
    except RuntimeError:
        return f"an attention mask of shape {tuple(mask.shape)} does not fit {len_q} queries and {len_k} keys"
    seen, known = mask, torch.ones((), dtype=torch.bool, device=mask.device)
    if mask.dtype != torch.bool:
        if not mask.is_floating_point():
            return f"an attention mask of type {mask.dtype} is not offered in FP8: give it as bool"
        seen = mask == 0
        known = (seen | (mask <= torch.finfo(mask.dtype).min / 2)).all()
    bits = seen.to(torch.uint8)
    count, start = bits.sum(dim=2, dtype=torch.int64), bits.argmax(dim=2)
    stop = torch.where(count > 0, len_k - bits.flip(2).argmax(dim=2), 0)
    start = torch.where(count > 0, start, 0)
    known &= (stop - start == count).all()
    *bounds, fine = torch.cat([start.flatten(), stop.flatten(), known[None].to(torch.int64)]).tolist()
    bounds = np.array(bounds).reshape(2, mask.shape[0], len_q)
    if not fine:
        return "an attention mask of another kind than causal, padding or packed sequences is not offered in FP8"
    pieces = [_pieces(*bounds[:, row]) for row in range(mask.shape[0])]
    if any(len(each) > max(8, len_q // _ROWS) for each in pieces):
        return "an attention mask with a window, or of another kind than causal or padding, is not offered in FP8"
    if len(pieces) == 1:
        return [(0, batch, pieces[0])]
    return grouped(pieces)


def _pieces(start, stop):
    """Maximal runs of rows of one sequence that one dense call computes; rows that see nothing are left out."""
    same, rows = np.diff(start) == 0, len(start)
    # From each row to the next: 0 equal, 1 one key more, 2 neither.
    step = np.where(same & (np.diff(stop) == 0), 0, np.where(same & (np.diff(stop) == 1), 1, 2))
    changes = np.flatnonzero(np.diff(step)) + 1
    pieces, row = [], 0
    while row < rows:
        last = row
        if row < rows - 1 and step[row] != 2:
            after = changes[np.searchsorted(changes, row, side="right") :]
            last = int(after[0]) if len(after) else rows - 1
        if stop[last] > start[last]:
            causal = last > row and step[row] == 1
            pieces.append((row, last + 1, int(start[last]), int(stop[last]), causal))
        row = last + 1
    return pieces


def grouped(pieces):
    """Consecutive sequences of the same pieces as one."""
    layout = []
    for row, each in enumerate(pieces):
        if layout and layout[-1][2] == each:
            layout[-1] = (layout[-1][0], row + 1, each)
        else:
            layout.append((row, row + 1, each))
    return layout


def run(q, k, v, layout, call):
    """Output and LSE of ``call(q, k, v, causal, sequences)`` on every piece; rows that see nothing are zero, with an LSE of -inf."""
    outs, lses = [], []
    for first, end, pieces in layout:
        out, lse, at = [], [], 0

        def skip(rows, out=out, lse=lse, batch=end - first):
            if rows:
                out.append(q.new_zeros((batch, rows, *q.shape[2:]), dtype=torch.bfloat16))
                lse.append(q.new_full((batch, q.shape[2], rows), -torch.inf, dtype=torch.float32))

        for row, row_end, key, key_end, causal in pieces:
            skip(row - at)
            sequences, keys = slice(first, end), slice(key, key_end)
            piece = call(q[sequences, row:row_end], k[sequences, keys], v[sequences, keys], causal, sequences)
            out.append(piece[0])
            lse.append(piece[1])
            at = row_end
        skip(q.shape[1] - at)
        outs.append(_joined(out, 1))
        lses.append(_joined(lse, 2))
    return _joined(outs, 0), _joined(lses, 0)


def _joined(parts, dim):
    if any(part is None for part in parts):
        return None
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def band(len_q, len_k, causal, window, device):
    """True where a query sees a key: the last query stands at the last key; ``window`` keys before it and after it, -1 all."""
    place = torch.arange(len_q, device=device)[:, None] + (len_k - len_q)
    ahead = torch.arange(len_k, device=device)[None, :] - place
    left, right = window
    right = 0 if causal else right
    seen = torch.ones((len_q, len_k), dtype=torch.bool, device=device)
    if left >= 0:
        seen = seen & (ahead >= -left)
    return seen & (ahead <= right) if right >= 0 else seen
