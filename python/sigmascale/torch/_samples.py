"""What a few rows of an attention call show, from its backward: repeated maxima, the bias of delta, entropy.

Logits are those of the E4M3 operands: their product is exact in f64 and rounded to f32 once, so two keys tie where
their products do. The exact output is the softmax of these logits times the E4M3 values, in f64.

    delta_bias = sum_rows (rowsum(dO * O) - rowsum(dO * O_exact)) / sum_rows |rowsum(dO * O_exact)|

    error_sign = mean over values of sign(dO) sign(O - O_exact)

O is the output that the call returned, from which FlashAttention's backward computes delta. Source: "Why Low-Precision
Transformer Training Fails", sections 3.2 and 3.3 (delta, its bias) and appendix E.1 (repeated maxima).
"""

import dataclasses

import torch

from . import _residual
from ._e4m3 import E4M3
from ._terms import Terms

# Keys of a tile: the largest that the attention kernels have at a head dimension of 128 and below.
TILE = 128
# Bytes of f64 that are held at a time, and of k and v in E4M3; KV heads are measured in groups.
_BYTES, KEPT_BYTES = 256 << 20, 256 << 20
# Fraction by which the rows of consecutive samples are apart: any number of them spreads evenly.
_GOLDEN = 0.6180339887498949

NAMES = ("repeated", "repeated_in_tile", "delta_bias", "error_sign", "entropy", "logit_max")


@dataclasses.dataclass
class Taken:
    """What of a call is kept to be measured: a few rows of q, of the output, of what its rounding took (or None) and of its
    gradient, ``(rows, heads, d)``, and k and v of one entry of the batch, ``(keys, kv heads, d)``, with the center of v,
    ``(kv heads, d)`` or None."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad: torch.Tensor
    out: torch.Tensor
    residual: torch.Tensor | None
    v_center: torch.Tensor | None
    # (3, kv heads)
    descales: torch.Tensor
    terms: Terms
    # Of the rows in the entry, with the entry and the length of its queries.
    places: tuple[torch.Tensor, int, int]

    @property
    def bytes(self):
        """Of k and v, which are by far the most."""
        return self.k.numel() + self.v.numel()

    def form(self):
        """What calls that are measured together have in common, beside their lengths: masks by identity."""
        terms, sequences = self.terms, self.terms.sequences
        shapes = tuple(x.shape for x in (self.q, self.k, self.v))
        mask = terms.causal, terms.window, None if sequences is None else tuple(map(id, sequences.places))
        given = terms.sinks is None, self.residual is None, self.v_center is None
        return *shapes, mask, terms.scale, terms.soft_cap, *given, self.places[1:]


def places_of(len_q, rows, turn, device):
    """The queries that are read in turn ``turn``: ``rows`` of them, spread over the length."""
    count = min(rows, len_q)
    spread = (torch.arange(count, dtype=torch.float32, device=device) + turn * _GOLDEN % 1.0) * (len_q / count)
    return spread.long().clamp_max(len_q - 1)


@torch.no_grad()
def take(grad, operands, descales, out, terms, places, turn, residual=None):
    """Copies what :func:`measure` needs of a call. ``operands``: q, k and v in E4M3; ``grad``: that of ``out``, which is to be
    added to ``residual``, what its rounding took. The rows ``places`` of entry ``turn`` of the batch are read."""
    q, k, v = operands
    entry = turn % q.shape[0]
    rows = lambda x: _bytes(x)[entry].index_select(0, places)
    kept = [_bytes(x)[entry].clone(memory_format=torch.contiguous_format) for x in (k, v)]
    # A refresh writes descales and centers.
    own = torch.stack([d[entry] for d in descales[:3]])
    center = None if terms.v_center is None else terms.v_center.clone()
    took = None if residual is None else rows(residual).view(torch.int8)
    return Taken(rows(q), *kept, rows(grad), rows(out), took, center, own, terms, (places, entry, q.shape[1]))


@torch.no_grad()
def measure(taken):
    """What calls show, given by the number of their layer: pairs of such numbers and f64 ``(calls, len(NAMES), n_q_heads)``,
    on the operands' device and without waiting for it. NaN where none of a call's rows sees a key.

    Calls of one form are measured together: what they compute is many small kernels.
    """
    forms = {}
    for index, each in taken.items():
        forms.setdefault(each.form(), []).append(index)
    return [(indices, _together([taken[index] for index in indices])) for indices in forms.values()]


def _together(taken):
    first = taken[0]
    (rows, n_q, _), (len_k, n_kv, d_k) = first.q.shape, first.k.shape
    group, terms = n_q // n_kv, first.terms
    places, entry, len_q = first.places
    visible = terms.visible_to(places, entry, len_q, len_k)
    # KV heads of all calls: (head, rows of its queries or keys, channel).
    of_queries = lambda name: _stacked(taken, name).unflatten(2, (n_kv, group)).permute(0, 2, 3, 1, 4).flatten(0, 1)
    of_keys = lambda name: _stacked(taken, name).transpose(1, 2).flatten(0, 1)
    q, grad, out, k, v = of_queries("q"), of_queries("grad"), of_queries("out"), of_keys("k"), of_keys("v")
    if first.residual is not None:
        out = _residual.value(out, of_queries("residual"))
    if first.v_center is not None:
        # Of one kind with the operands; rows without keys are not measured.
        out = out - _stacked(taken, "v_center").flatten(0, 1)[:, None, None]
    descales = _stacked(taken, "descales").transpose(1, 2).flatten(0, 1).double()
    sinks = None if terms.sinks is None else torch.stack([each.terms.sinks for each in taken]).view(-1, group).double()
    size = 8 * len_k * (d_k + v.shape[2] + 4 * group * rows)
    step, parts = max(1, _BYTES // size), []
    with torch.autocast(q.device.type, enabled=False):
        for start in range(0, q.shape[0], step):
            part = slice(start, start + step)
            own = None if sinks is None else sinks[part]
            parts.append(_heads(q[part], k[part], v[part], grad[part], out[part], descales[part], terms, visible, own))
    # (names, heads of calls, group) to (calls, names, query heads)
    return torch.cat(parts, dim=1).unflatten(1, (len(taken), n_kv)).transpose(0, 1).flatten(2).contiguous()


def _stacked(taken, name):
    return torch.stack([getattr(each, name) for each in taken])


def _bytes(x):
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _wide(x):
    """E4M3, here as bytes, has no conversion to f64 everywhere."""
    x = x.view(E4M3) if x.dtype == torch.uint8 else x
    return x.float().double()


def _heads(q, k, v, grad, out, descales, terms, visible, sinks):
    """Of KV heads and their query heads: q, grad and out ``(kv heads, heads of a group, rows, d)``, k and v ``(kv heads, keys,
    d)``."""
    shape = q.shape[:3]
    q, k, v, grad, out = (_wide(x) for x in (q, k, v, grad, out))
    q_descale, k_descale, v_descale = descales[:, :, None, None, None].unbind(1)
    # A product for each KV head.
    times = lambda x, y: torch.bmm(x.flatten(1, 2), y).unflatten(1, shape[1:])
    logits = times(q, k.transpose(1, 2)) * (q_descale * k_descale * terms.scale)
    if terms.soft_cap is not None:
        logits = terms.soft_cap * torch.tanh(logits / terms.soft_cap)
    logits = logits.float()
    if visible is not None:
        logits = logits.masked_fill(~visible, -torch.inf)
    top = logits.amax(dim=3, keepdim=True)
    seen = (top != -torch.inf).squeeze(3)
    ties = (logits == top) & seen[..., None]
    in_tile = torch.nn.functional.pad(ties, (0, -ties.shape[3] % TILE)).unflatten(3, (-1, TILE)).sum(dim=4).amax(dim=3)
    weights = torch.exp(logits.double() - top.double())
    total = weights.sum(dim=3, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks[:, :, None, None] - top.double())
    weights = weights / total
    exact = times(weights, v) * v_descale
    delta, reference = ((grad * x).sum(dim=3) for x in (out, exact))
    mean = lambda x: torch.where(seen, x.double(), 0.0).sum(dim=2) / seen.sum(dim=2)
    # A row without keys is NaN.
    kept = lambda x: torch.where(seen, x, 0.0).sum(dim=2)
    rows = (
        mean(ties.sum(dim=3) > 1),
        mean(in_tile > 1),
        kept(delta - reference) / kept(reference.abs()),
        mean((grad.sign() * (out - exact).sign()).mean(dim=3)),
        mean(-torch.xlogy(weights, weights).sum(dim=3)),
        torch.where(logits.isfinite(), logits.abs(), 0.0).amax(dim=(2, 3)).double(),
    )
    return torch.stack(rows)
