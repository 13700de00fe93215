"""FlashAttention's functions in FP8: the arguments of ``flash_attn`` 2, in its order and with its defaults, and a plan.

Of the keywords that FlashAttention-3 has beside, ``num_splits`` and those of packed queries are taken. The rest is taken where it asks
for nothing, ``pack_gqa``, ``sm_margin`` and ``scheduler_metadata`` as hints that change no result, and refused by name otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .._arguments import positive
from .._errors import ArgumentError, MismatchError, UnsupportedError
from . import _paged
from ._attention import INFERENCE, How, attend, pair, row, sinks_of, typed, window_of
from ._centers import model_lse, refuse, subtracted
from ._e4m3 import E4M3, cast
from ._terms import Sequences, Terms, checked

if TYPE_CHECKING:
    from ._typing import Backend, Fallback, Plan


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    plan: Plan,
    sinks: torch.Tensor | None = None,
    backend: Backend | None = None,
    accumulator: str | None = None,
    fallback: Fallback = None,
    **others: Any,
) -> Any:
    """``flash_attn.flash_attn_func`` in FP8, with a ``plan`` and options as for :func:`attention`; the output has the
    type of ``q``, bfloat16 where that is E4M3.

    With ``return_attn_probs`` also the log-sum-exp ``(batch, n_q_heads, seq)``, and ``None`` for the probabilities,
    which are not kept. ``num_splits=1`` (of FlashAttention-3) splits no keys over blocks of the device. ``deterministic`` is ``torch.use_deterministic_algorithms``. Dropout is refused, or goes to
    PyTorch's own attention by ``fallback="bf16"``; ALiBi slopes are refused. ``sinks`` ``(n_q_heads,)`` join the row
    sums.
    """
    known = _refuse("flash_attn_func", others, alibi_slopes=alibi_slopes)
    _check_deterministic(deterministic)
    window_size = pair("window_size", window_size)
    out, lse = attend(
        q,
        k,
        v,
        plan,
        causal=bool(causal),
        softmax_scale=softmax_scale,
        window=window_size,
        softcap=softcap,
        sinks=sinks,
        dropout=dropout_p,
        return_lse=return_attn_probs,
        how=How(backend, accumulator, fallback, splits=known.get("num_splits", 0)),
    )
    out = typed(out, q)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    plan: Plan,
    seqused_k: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    backend: Backend | None = None,
    accumulator: str | None = None,
    fallback: Fallback = None,
    **others: Any,
) -> Any:
    """``flash_attn.flash_attn_varlen_func`` in FP8: q ``(total_q, heads, d_head)`` of packed sequences, k and v
    likewise.

    One call for all sequences. ``cu_seqlens_q`` and ``cu_seqlens_k`` stay on the device: nothing waits for them, and
    on a GPU nothing checks their values. ``max_seqlen_q`` and ``max_seqlen_k``, at least the longest sequence's, may
    be None for all tokens, which starts more work than is needed. ``seqused_k``: how many of its keys each sequence
    uses. With ``return_attn_probs`` the log-sum-exp is ``(n_q_heads, total_q)``. Otherwise as
    :func:`flash_attn_func`.

    With ``block_table`` ``(sequences, pages)`` k and v are caches in pages ``(pages, page_size, n_kv_heads, d_head)``, and
    ``seqused_k`` (or the differences of ``cu_seqlens_k``) says how many keys each sequence has there: prefills and decodes in
    one call, without gradients, as :func:`flash_attn_with_kvcache` with ``cu_seqlens_q``.
    """
    known = _refuse("flash_attn_varlen_func", others, alibi_slopes=alibi_slopes)
    _check_deterministic(deterministic)
    window_size = pair("window_size", window_size)
    if block_table is not None:
        if dropout_p:
            raise UnsupportedError("dropout_p is not supported in FP8 over pages: leave it 0")
        if seqused_k is None and cu_seqlens_k is None:
            raise ArgumentError("pages have no ends of their own: give seqused_k, how many keys each sequence has")
        lengths = seqused_k if seqused_k is not None else _integers("cu_seqlens_k", cu_seqlens_k).diff()
        out = flash_attn_with_kvcache(
            q,
            k,
            v,
            cache_seqlens=lengths,
            block_table=block_table,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            num_splits=known.get("num_splits", 0),
            return_softmax_lse=return_attn_probs,
            plan=plan,
            sinks=sinks,
            backend=backend,
            accumulator=accumulator,
            fallback=fallback,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
        )
        return (*out, None) if return_attn_probs else out
    if cu_seqlens_k is None:
        raise ArgumentError("cu_seqlens_k says where the keys of each sequence begin: give it, or pages and a block_table")
    for name, x in [("q", q), ("k", k), ("v", v)]:
        if not isinstance(x, torch.Tensor) or x.dim() != 3:
            shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise ArgumentError(f"{name} must be (tokens, heads, d_head), not {shape}")
    if k.shape[0] != v.shape[0]:
        raise MismatchError(f"k has {k.shape[0]} tokens and v {v.shape[0]}: both must have those of cu_seqlens_k")
    longest = _longest("max_seqlen_q", max_seqlen_q, q), _longest("max_seqlen_k", max_seqlen_k, k)
    out, lse = attend(
        q[None],
        k[None],
        v[None],
        plan,
        causal=bool(causal),
        softmax_scale=softmax_scale,
        sequences=packed(cu_seqlens_q, cu_seqlens_k, *longest, seqused_k, (q, k)),
        window=window_size,
        softcap=softcap,
        sinks=sinks,
        dropout=dropout_p,
        return_lse=return_attn_probs,
        how=How(backend, accumulator, fallback, splits=known.get("num_splits", 0)),
    )
    out = typed(out[0], q)
    return (out, lse[0], None) if return_attn_probs else out


def _longest(name, given, x):
    if given is None:
        return x.shape[0]
    if isinstance(given, torch.Tensor) or isinstance(given, bool) or given != int(given) or given < 0:
        shown = "a tensor" if isinstance(given, torch.Tensor) else repr(given)
        raise ArgumentError(
            f"{name} is {shown}: give a whole number on the host, at least the longest sequence's, or None"
        )
    return int(given)


def packed(cu_q, cu_k, max_q, max_k, used_k=None, operands=None):
    """Packed sequences by where each ends. Of ``operands``, q and k ``(tokens, ..)``, places on the CPU are held
    against the rows."""
    cu_q, cu_k = _integers("cu_seqlens_q", cu_q), _integers("cu_seqlens_k", cu_k)
    if cu_q.shape != cu_k.shape or cu_q.shape[0] < 2:
        raise MismatchError(
            f"cu_seqlens_q and cu_seqlens_k have {cu_q.shape[0]} and {cu_k.shape[0]} entries: give each as many as sequences, and one more"
        )
    used = None if used_k is None else _integers("seqused_k", used_k)
    if used is not None and used.shape != cu_k[1:].shape:
        raise MismatchError(
            f"seqused_k has {used.shape[0]} entries for {cu_k.shape[0] - 1} sequences: give one for each"
        )
    for name, x, of in [("cu_seqlens_q", cu_q, 0), ("cu_seqlens_k", cu_k, 1), ("seqused_k", used, 1)]:
        if operands is not None and x is not None and x.device != operands[of].device:
            raise ArgumentError(f"{name} is on {x.device} and the operands on {operands[of].device}: move it there")
    if operands is not None and checked(cu_q):
        _check_places("q", cu_q, operands[0].shape[0], max_q)
        _check_places("k", cu_k, operands[1].shape[0], max_k, used)
    ends = cu_k[1:] if used is None else cu_k[:-1] + used
    return Sequences(cu_q[:-1], cu_q[1:], cu_k[:-1], ends, int(max_q), int(max_k))


def _check_places(which, cu, rows, longest, used=None):
    """Of places on the host: that they lie in order in the rows, and that no sequence is longer than was said."""
    places, name = cu.tolist(), f"cu_seqlens_{which}"
    if places[0] != 0:
        raise ArgumentError(f"{name} begins with {places[0]}: it must begin with 0")
    for i, (a, b) in enumerate(zip(places, places[1:])):
        if b < a:
            raise ArgumentError(
                f"{name} decreases from {a} to {b} at entry {i + 1}: each entry is where a sequence ends"
            )
    if places[-1] > rows:
        raise MismatchError(
            f"{name} ends with {places[-1]}, but {which} has {rows} tokens: its last entry is at most that"
        )
    lengths = [b - a for a, b in zip(places, places[1:])]
    counted = lengths if used is None else used.tolist()
    for i, (length, own) in enumerate(zip(lengths, counted)):
        if not 0 <= own <= length:
            raise ArgumentError(f"seqused_k says {own} keys of sequence {i}, which has {length}: give from 0 to that")
    if longest < max(counted):
        raise ArgumentError(
            f"max_seqlen_{which} is {longest}, but a sequence has {max(counted)} tokens: give at least that"
        )


def _integers(name, x, dims=1):
    """A tensor of integers as int32."""
    if isinstance(x, torch.Tensor) and x.dim() == dims and x.dtype in (torch.int32, torch.int64):
        return x.to(torch.int32)
    given = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
    raise ArgumentError(f"{name} is {given}: give an int32 tensor of {dims} dimension{'s' if dims > 1 else ''}")


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    plan: Plan,
    sinks: torch.Tensor | None = None,
    backend: Backend | None = None,
    accumulator: str | None = None,
    fallback: Fallback = None,
    **others: Any,
) -> Any:
    """``flash_attn.flash_attn_with_kvcache`` in FP8: new keys and values are written after the first
    ``cache_seqlens`` in place, then attended to with the rest. No gradients.

    The caches may be E4M3: new keys and values are cast by the plan, old ones are not cast again. ``cache_seqlens`` is
    an int, or a tensor that stays on the device: one call for the whole batch, whatever the lengths. On a GPU they are
    not validated. Pages (``block_table``) of 16 to 256 tokens in E4M3 are read in place, with windows and sinks; values
    may also have the layout of :func:`value_pages`. If ``rotary_cos`` is given, the kernel rotates new keys for such
    pages, and PyTorch rotates new keys and queries in all other cases. Other paged caches are first gathered into a copy.

    With ``cu_seqlens_q`` queries are packed, ``(total_q, heads, d_head)``, prefills and decodes in one call, of at most
    ``max_seqlen_q`` a sequence. They and the lengths are read on the device, so that a graph captured with the largest batch
    serves every step: sequences without queries cost nothing, and rows behind the last sequence get zeros. New keys and
    values are then packed likewise, by ``cu_seqlens_k_new``. The log-sum-exp is ``(heads, total_q)``.

    ``num_splits``: into how many parts the keys of each sequence are split over the device, which fixes the order of sums; 0
    for as many as are fastest for this batch. More than one is offered on E4M3 pages.
    """
    known = _refuse("flash_attn_with_kvcache", others, alibi_slopes=alibi_slopes)
    block_table = known.get("page_table") if block_table is None else block_table
    window_size = pair("window_size", window_size)
    packed_q = _Packed.of(q, known)
    q, given = packed_q.batched(q), q
    k, v = packed_q.new_tokens(k, v)
    batch = packed_q.sequences(q)
    _check_cache(q, k_cache, v_cache, k, v, cache_batch_idx, block_table, packed_q)
    how = How(backend, accumulator, fallback, splits=num_splits)
    descales = plan_rows(plan, q, k_cache.shape[2], batch, k_cache.dtype == E4M3)
    reason = _paged.refusal(q, k_cache, block_table)
    if softcap:
        reason = reason or "the kernels over pages take no softcap"
    # Their kernels over pages have not yet passed their tests on a GPU: such calls gather their pages.
    withheld = {"window_size": window_size != (-1, -1), "sinks": sinks is not None, "cu_seqlens_q": packed_q.starts is not None}
    for name in filter(withheld.get, withheld):
        reason = reason or f"the kernels over pages take no {name}"
    if cache_leftpad is not None:
        reason = reason or "the kernels over pages take no cache_leftpad"
    if backend not in (None, "auto", "native"):
        reason = reason or f"backend {backend!r} has no kernels over pages"
    if reason is not None and v_cache.dim() == 6:
        raise ArgumentError(
            f"v_cache is in the order of value_pages, which only the kernels over pages read, and {reason}: give values as "
            "(pages, page_size, n_kv_heads, d_head)"
        )
    if reason is not None and how.splits > 1:
        raise UnsupportedError(f"num_splits={how.splits} is offered by the kernels over pages alone, and {reason}: give 0 or 1")
    if (rotary_cos is not None or rotary_sin is not None) and packed_q.starts is not None:
        raise UnsupportedError("rotary_cos is not offered with cu_seqlens_q: rotate q and k before the call")
    if (rotary_cos is not None or rotary_sin is not None) and cache_leftpad is not None:
        raise UnsupportedError("rotary_cos is not offered with cache_leftpad: rotate q and k before the call")
    with torch.no_grad():
        new = packed_q.most_new(k)
        capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
        lengths = cache_lengths(cache_seqlens, batch, new, capacity)
        if not isinstance(lengths, torch.Tensor) and lengths + new == 0:
            # An empty cache: no row sees a key.
            lengths = torch.zeros(batch, dtype=torch.int32, device=q.device)
        if reason is None:
            rotary = (rotary_cos, rotary_sin, bool(rotary_interleaved))
            out, lse = _on_pages(
                q, k_cache, v_cache, k, v, rotary, lengths, block_table, packed_q, descales, plan,
                (softmax_scale, bool(causal), window_size, sinks), how, return_softmax_lse,
            )  # fmt: skip
        else:
            if block_table is not None:
                block_table = _pages(block_table[:batch], lengths, new, k_cache)
            if rotary_cos is not None or rotary_sin is not None:
                together = not causal and window_size == (-1, -1)
                q, k = _rotated(q, k, rotary_cos, rotary_sin, lengths, bool(rotary_interleaved), together, capacity)
            out, lse = _on_rows(
                q, k_cache, v_cache, k, v, lengths, block_table, cache_batch_idx, cache_leftpad, packed_q, descales, plan,
                dict(causal=bool(causal), softmax_scale=softmax_scale, window=window_size, softcap=softcap, sinks=sinks), how,
                return_softmax_lse,
            )  # fmt: skip
    if packed_q.starts is not None and out.dim() == 4:
        out, lse = out[0], None if lse is None else lse[0]
    out = typed(out, given)
    return (out, lse) if return_softmax_lse else out


class _Packed:
    """Which queries, and which new keys, are whose: those of an entry of the batch, or packed ones by where each sequence begins."""

    def __init__(self, starts=None, longest=0, new_starts=None):
        self.starts, self.longest, self.new_starts = starts, longest, new_starts

    @classmethod
    def of(cls, q, known):
        starts, longest = known.get("cu_seqlens_q"), known.get("max_seqlen_q")
        new_starts = known.get("cu_seqlens_k_new")
        if starts is None:
            for name in ("max_seqlen_q", "cu_seqlens_k_new"):
                if known.get(name) is not None:
                    raise ArgumentError(f"{name} is of packed queries: give cu_seqlens_q, too, or leave it out")
            return cls()
        starts = _integers("cu_seqlens_q", starts)
        if not isinstance(q, torch.Tensor) or q.dim() != 3:
            shape = tuple(q.shape) if isinstance(q, torch.Tensor) else type(q).__name__
            raise ArgumentError(f"q is {shape}: with cu_seqlens_q give (total_q, heads, d_head)")
        if starts.shape[0] < 2:
            raise MismatchError("cu_seqlens_q has no sequence: give as many entries as sequences, and one more")
        if starts.device != q.device:
            raise ArgumentError(f"cu_seqlens_q is on {starts.device} and q on {q.device}: move it there")
        longest = _longest("max_seqlen_q", longest, q)
        if checked(starts):
            _check_places("q", starts, q.shape[0], longest)
        if new_starts is not None:
            new_starts = _integers("cu_seqlens_k_new", new_starts)
            if new_starts.shape != starts.shape:
                raise MismatchError(
                    f"cu_seqlens_k_new has {new_starts.shape[0]} entries and cu_seqlens_q {starts.shape[0]}: give equally many"
                )
        return cls(starts, max(1, min(longest, q.shape[0])), new_starts)

    def batched(self, q):
        """q with a batch, of 1 where it is packed."""
        return q if self.starts is None else q[None]

    def sequences(self, q):
        if self.starts is not None:
            return self.starts.shape[0] - 1
        return q.shape[0] if isinstance(q, torch.Tensor) and q.dim() else None

    def new_tokens(self, k, v):
        if self.starts is None or k is None or v is None:
            return k, v
        if self.new_starts is None:
            raise ArgumentError("new keys of packed queries are packed, too: give cu_seqlens_k_new, where each sequence's begin")
        for name, x in (("k", k), ("v", v)):
            if not isinstance(x, torch.Tensor) or x.dim() != 3:
                shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
                raise ArgumentError(f"{name} is {shape}: with cu_seqlens_k_new give (new keys, heads, d_head)")
        if checked(self.new_starts):
            _check_places("k_new", self.new_starts, k.shape[0], k.shape[0])
        return k[None], v[None]

    def rows_of(self, descales):
        """Descales of each entry of the batch: of a packed one, whose sequences have them in common."""
        if self.starts is None or descales is None:
            return descales
        if any(d.shape[0] > 1 and d.stride(0) for d in descales):
            raise UnsupportedError("descales of each sequence are not offered for packed queries: give (n_kv_heads,)")
        return [d[:1] for d in descales]

    def most_new(self, k):
        """New keys of a sequence, of packed ones none that are known here."""
        return 0 if k is None or self.starts is not None else k.shape[1]

    def added(self, k):
        """New keys of each sequence: a number, or a tensor of packed ones."""
        if k is None:
            return 0
        return k.shape[1] if self.new_starts is None else self.new_starts.diff()


def plan_rows(plan, q, n_kv, batch, of_cache):
    """Descales of q, k and v, ``(batch, n_kv)`` each; None where each call makes its own. ``of_cache``: the cache is cast by them."""
    if getattr(plan, "per_call", False):
        if of_cache:
            raise UnsupportedError("policy='current' has no descales that an E4M3 cache could keep: take another policy")
        return None
    if hasattr(plan, "descales"):
        return plan.descales(batch)
    if not isinstance(plan, list | tuple | torch.Tensor) or len(plan) != 3:
        raise TypeError("plan must be a layer of a Runtime (runtime.layers[i]) or the three descales of q, k and v")
    return tuple(row(d, name, batch, n_kv, q.device).expand(batch, -1) for name, d in zip("qkv", plan))


def _on_pages(q, k_cache, v_cache, k, v, rotary, lengths, block_table, packed_q, descales, plan, terms, how, needs_lse):
    """A call by the kernels over pages."""
    c, m = getattr(plan, "centers", (None, None))
    refuse(c, m, False, terms[-1])
    softmax_scale, causal, window, sinks = terms
    cosine, sine, interleaved = rotary
    batch, new, capacity = packed_q.sequences(q), packed_q.most_new(k), block_table.shape[1] * k_cache.shape[1]
    if not isinstance(lengths, torch.Tensor):
        lengths = torch.full((batch,), int(lengths), dtype=torch.int32, device=q.device)
    if (cosine is not None or sine is not None) and (k is None or new != q.shape[1] or not (causal or new == 1) or k.dtype == E4M3):
        # The kernel rotates a query by the place of the new key that stands with it.
        together = not causal and window == (-1, -1)
        q, k = _rotated(q, k, cosine, sine, lengths, interleaved, together, capacity)
        cosine = sine = None
    # The kernel casts and appends keys of a batch.
    written = None
    if k is not None and (packed_q.starts is not None or k.dtype == E4M3 or 0 in (k.shape[1], q.numel())):
        if v_cache.dim() == 6 and k.shape[1] > 0:
            raise UnsupportedError(
                "new keys that are packed, or in E4M3 already, are not written into value_pages: give a batch of keys before their cast"
            )
        pages = _pages(block_table[:batch], lengths, packed_q.added(k), k_cache)
        rows = packed_q.rows_of(descales)
        own = (k, v) if k.dtype == E4M3 else subtracted(k, v, (c, m))
        written, k, v = tuple(map(cast, own, rows[1:3])), None, None
        lengths, before = lengths + packed_q.added(written[0]), lengths
    scale = getattr(plan, "softmax_scale", q.shape[3] ** -0.5) if softmax_scale is None else positive("softmax_scale", softmax_scale)
    longest = q.shape[1] if packed_q.starts is None else packed_q.longest
    left, right = window_of(window, causal, longest, capacity)
    if needs_lse and c is not None and cosine is not None:
        raise UnsupportedError(
            "the log-sum-exp of centered keys needs the rotated queries, which the kernel makes: rotate q and k before the call"
        )
    terms = Terms(
        causal,
        float(scale),
        left,
        right,
        sinks=sinks_of(sinks, q),
        k_center=c,
        v_center=m,
        accumulator=how.accumulator or INFERENCE,
        splits=how.splits,
    )
    if written is not None:
        _append(k_cache, v_cache, *written, before, pages, None, packed_q)
    if q.numel() == 0:
        return q.clone(), q.new_zeros((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    cache = _paged.Pages(k_cache, v_cache, block_table, lengths, packed_q.starts, longest)
    out, lse = _paged.attend(cache, (k, v), descales, terms, plan, (cosine, sine), interleaved, q=q)
    return out, model_lse(lse, q, packed_q.rows_of(descales)[0], terms) if needs_lse and c is not None else lse


def _on_rows(q, k_cache, v_cache, k, v, lengths, block_table, batch_idx, leftpad, packed_q, descales, plan, terms, how, lse):
    """A call by the kernels over rows, on what pages hold gathered into a copy."""
    rows, added = packed_q.rows_of(descales), packed_q.added(k)
    if k_cache.dtype == E4M3:
        if k is not None and k.dtype != E4M3:
            k, v = subtracted(k, v, getattr(plan, "centers", (None, None)))
        q, k, v = (None if x is None else cast(x, d) for x, d in zip((q, k, v), rows))
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    sequences, used = None, capacity
    if packed_q.starts is not None:
        sequences = _filled(lengths, added, leftpad, packed_q, capacity)
    elif isinstance(lengths, torch.Tensor) or leftpad is not None:
        sequences = _filled(lengths, added, leftpad, q, capacity)
    else:
        used = lengths + added
    batch = packed_q.sequences(q)

    def shaped(x):
        return x.reshape(1, -1, *x.shape[2:]) if packed_q.starts is not None else x[:, :used]

    def loaded():
        # Nothing is written before every check has passed.
        if k is not None and k.shape[1]:
            _append(k_cache, v_cache, k, v, lengths, block_table, batch_idx, packed_q)
        caches = k_cache, v_cache
        if block_table is not None:
            caches = (x[block_table].flatten(1, 2) for x in caches)
        elif batch_idx is not None:
            caches = (x[batch_idx.long()] for x in caches)
        return tuple(map(shaped, caches))

    like = (x[:1, :1].expand(batch, capacity, *x.shape[2:]) for x in (k_cache, v_cache))
    if packed_q.starts is not None:
        like = (x[:1].expand(1, -1, -1, -1)[:, :1].expand(-1, batch * capacity, -1, -1) for x in like)
    else:
        like = (x[:, :used] for x in like)
    return attend(q, *like, plan, sequences=sequences, return_lse=lse, how=how, loaded=loaded, **terms)


def _check_cache(q, k_cache, v_cache, k, v, cache_batch_idx, block_table, packed_q):
    batch = packed_q.sequences(q)
    given = (
        {"q": q, "k_cache": k_cache, "v_cache": v_cache}
        | ({} if k is None else {"k": k})
        | ({} if v is None else {"v": v})
    )
    if (k is None) != (v is None):
        raise ArgumentError("k and v are given together or not at all: give both new keys and new values")
    for name, x in given.items():
        # Values may be in the order of `value_pages`.
        if not isinstance(x, torch.Tensor) or (x.dim() != 4 and not (name == "v_cache" and x.dim() == 6)):
            shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise ArgumentError(f"{name} is {shape}: give a tensor of four dimensions, ending with heads and d_head")
        if torch.is_grad_enabled() and x.requires_grad:
            raise UnsupportedError(
                f"flash_attn_with_kvcache has no backward, and {name} requires gradients: call it under torch.no_grad()"
            )
        if x.device != q.device:
            raise ArgumentError(f"{name} is on {x.device} and q on {q.device}: move them to one device")
        if x.stride(-1) != 1:
            raise ArgumentError(
                f"{name} has stride {x.stride(-1)} between channels of a head: call .contiguous() on it"
            )
    if k_cache.dtype != v_cache.dtype:
        raise ArgumentError(f"k_cache has type {k_cache.dtype} and v_cache {v_cache.dtype}: give both in one type")
    if v_cache.dim() == 4 and k_cache.shape[:3] != v_cache.shape[:3]:
        raise MismatchError(
            f"k_cache has shape {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)}: all but d_head must agree"
        )
    for name, x, cache in [("k", k, k_cache), ("v", v, v_cache)]:
        if x is not None and cache.dim() == 4 and (x.shape[0], *x.shape[2:]) != (q.shape[0], *cache.shape[2:]):
            raise MismatchError(
                f"{name} has shape {tuple(x.shape)}: ({q.shape[0]}, new keys, {cache.shape[2]}, {cache.shape[3]}) is needed for this q "
                "and this cache"
            )
    for name, x in [("cache_batch_idx", cache_batch_idx), ("block_table", block_table)]:
        if x is None:
            continue
        dims = 1 if name == "cache_batch_idx" else 2
        rows = _integers(name, x, dims).shape[0]
        # A table of pages may have room for more sequences.
        if rows != batch and (dims == 1 or rows < batch):
            raise MismatchError(f"{name} has {rows} rows for a batch of {batch}: give one for each sequence")
        if x.device != q.device:
            raise ArgumentError(f"{name} is on {x.device} and q on {q.device}: move it there")
    if cache_batch_idx is not None and checked(cache_batch_idx):
        outside = cache_batch_idx[(cache_batch_idx < 0) | (cache_batch_idx >= k_cache.shape[0])]
        if len(outside):
            raise ArgumentError(
                f"cache_batch_idx names row {int(outside[0])} of a cache with {k_cache.shape[0]}: give numbers from 0 to {k_cache.shape[0] - 1}"
            )
    if block_table is not None and cache_batch_idx is not None:
        raise UnsupportedError("cache_batch_idx and block_table both say where a sequence lies: give one of them")
    if block_table is None and cache_batch_idx is None and k_cache.shape[0] != batch:
        raise MismatchError(
            f"k_cache has {k_cache.shape[0]} rows for a batch of {batch}: give as many, or say which by cache_batch_idx"
        )


def cache_lengths(cache_seqlens, batch, new, capacity):
    """How many keys a cache holds before the call: an int, or int32 ``(batch,)``."""
    if cache_seqlens is None:
        if new:
            raise ArgumentError("new keys and values need cache_seqlens, the number of keys in front of them")
        return capacity
    given = cache_seqlens
    if isinstance(given, torch.Tensor):
        cache_seqlens = _integers("cache_seqlens", given)
        if cache_seqlens.shape[0] != batch:
            raise MismatchError(
                f"cache_seqlens has {cache_seqlens.shape[0]} entries for a batch of {batch}: give one for each sequence"
            )
        known = cache_seqlens.tolist() if checked(cache_seqlens) else []
    elif isinstance(given, int) and not isinstance(given, bool):
        known = [given]
    else:
        raise ArgumentError(f"cache_seqlens is {type(given).__name__}: give an int or an int32 tensor")
    for length in known:
        if not 0 <= length <= capacity - new:
            raise MismatchError(
                f"{new} keys after {length} do not fit a cache of {capacity}: cache_seqlens must be from 0 to {capacity - new}"
            )
    return cache_seqlens


def _pages(block_table, lengths, new, k_cache):
    """A block table whose entries past the sequences, which may hold anything, are page numbers too."""
    pages, page = k_cache.shape[:2]
    if checked(block_table):
        device = block_table.device
        used = (lengths + new)[:, None] if isinstance(lengths, torch.Tensor) else lengths + new
        needed = torch.arange(block_table.shape[1], dtype=torch.int64, device=device)[None] * page < used
        wrong = block_table[needed & ((block_table < 0) | (block_table >= pages))]
        if len(wrong):
            raise ArgumentError(
                f"block_table names page {int(wrong[0])} of a cache with {pages}: give numbers from 0 to {pages - 1}"
            )
    return block_table.long().clamp(0, pages - 1)


def _rotated(q, k, cosine, sine, lengths, interleaved, together, capacity):
    """New keys rotated by their positions after the cache, and queries likewise, or ``together`` by the first of
    these."""
    if k is None:
        raise ArgumentError("rotary_cos and rotary_sin rotate new keys: give k and v too, or rotate q before the call")
    for name, x in [("rotary_cos", cosine), ("rotary_sin", sine)]:
        if not isinstance(x, torch.Tensor) or x.dim() != 2 or x.shape != cosine.shape or x.device != q.device:
            raise ArgumentError(
                f"{name} must be (positions, rotated channels / 2) on {q.device}, the same as the other of the two"
            )
    if 2 * cosine.shape[1] > q.shape[3]:
        raise MismatchError(f"rotary_cos turns {2 * cosine.shape[1]} channels, but a head has {q.shape[3]}")
    if cosine.shape[0] < capacity:
        raise MismatchError(f"rotary_cos has {cosine.shape[0]} positions for a cache of {capacity}: give one for each")
    first = lengths.long()[:, None] if isinstance(lengths, torch.Tensor) else lengths

    def rotated(x, one_place):
        place = torch.arange(x.shape[1], dtype=torch.int64, device=x.device)[None] * (0 if one_place else 1) + first
        c, s = (
            table[place.clamp(0, capacity - 1).expand(x.shape[0], -1)][:, :, None].float() for table in (cosine, sine)
        )
        width = 2 * c.shape[3]
        turned, rest = x[..., :width].float(), x[..., width:]
        a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=3)
        pair = a * c - b * s, a * s + b * c
        turned = torch.stack(pair, dim=4).flatten(3) if interleaved else torch.cat(pair, dim=3)
        return torch.cat([turned.to(x.dtype), rest], dim=3)

    return rotated(q, together), rotated(k, False)


def _append(k_cache, v_cache, k, v, lengths, block_table, cache_batch_idx, packed_q):
    batch, new = k.shape[:2]
    place = torch.arange(new, dtype=torch.int64, device=k.device).expand(batch, -1)
    sequence = torch.arange(batch, dtype=torch.int64, device=k.device)[:, None]
    if packed_q.new_starts is not None:
        starts = packed_q.new_starts.long()
        # Rows behind the last sequence have the last one's row again, with the same values.
        last = (starts[-1] - 1).clamp_min(0)
        place = torch.minimum(place, last)
        k, v = (x.index_select(1, place[0]) if x.dtype != E4M3 else _taken(x, place[0]) for x in (k, v))
        sequence = torch.bucketize(place, starts[1:], right=True).clamp_max(starts.shape[0] - 2)
        place = place - starts[sequence]
        place = place + (lengths.long()[sequence] if isinstance(lengths, torch.Tensor) else lengths)
    else:
        place = place + (lengths.long()[:, None] if isinstance(lengths, torch.Tensor) else lengths)
    own = sequence
    if cache_batch_idx is not None:
        sequence = cache_batch_idx.long()[own]
    if block_table is not None:
        page = k_cache.shape[1]
        sequence, place = block_table[own, place // page], place % page
    for cache, x in ((k_cache, k), (v_cache, v)):
        # E4M3 is copied as bytes.
        cache, x = (y.view(torch.uint8) if y.dtype == E4M3 else y for y in (cache, x.to(cache.dtype)))
        if packed_q.new_starts is not None:
            # Where there is no new key at all, the row keeps what it has.
            x = torch.where(starts[-1] > 0, x, cache[sequence, place])
        cache[sequence, place] = x


def _taken(x, rows):
    """Rows of a tensor in E4M3, which PyTorch selects as bytes alone."""
    return x.view(torch.uint8).index_select(1, rows).view(E4M3)


def _filled(lengths, new, leftpad, q, capacity):
    """The filled part of each row of a cache. ``q``: queries, or which packed ones are whose."""
    if isinstance(q, _Packed):
        starts = q.starts
        row = torch.arange(starts.shape[0] - 1, device=starts.device, dtype=torch.int32)
        q_starts, q_ends, rows = starts[:-1], starts[1:], q.longest
    else:
        batch, rows = q.shape[:2]
        row = torch.arange(batch, device=q.device, dtype=torch.int32)
        q_starts, q_ends = row * rows, row * rows + rows
    starts = row * capacity
    if leftpad is not None:
        if _integers("cache_leftpad", leftpad).shape != row.shape:
            raise MismatchError(f"cache_leftpad has shape {tuple(leftpad.shape)}: ({row.shape[0]},) is needed")
        starts = starts + leftpad.to(torch.int32)
    ends = row * capacity + (lengths + new)
    return Sequences(q_starts, q_ends, starts, ends.to(torch.int32), rows, capacity)


# Keywords of FlashAttention-3 besides those of ``flash_attn``: the value that asks for nothing, and what to do instead.
# Hints: how the work is shared out, which changes no result.
_SCHEDULES = ("pack_gqa", "sm_margin", "scheduler_metadata")
# Taken, by the functions that have a use for them.
_TAKEN = {
    "flash_attn_func": ("num_splits",),
    "flash_attn_varlen_func": ("num_splits",),
    "flash_attn_with_kvcache": ("page_table", "cu_seqlens_q", "max_seqlen_q", "cu_seqlens_k_new"),
}
_PLANNED = "leave it out: descales come from plan"
_ELSEWHERE = {
    "q_descale": (None, _PLANNED),
    "k_descale": (None, _PLANNED),
    "v_descale": (None, _PLANNED),
    "qv": (None, "concatenate it to q, and its keys to k"),
    "attention_chunk": (0, "call flash_attn_varlen_func on the chunks"),
    "seqused_q": (None, "end the sequences in cu_seqlens_q"),
    "rotary_seqlens": (None, "rotate q and k before the call"),
    "page_table": (None, "give it as block_table"),
    "alibi_slopes": (None, "use PyTorch's attention with the biases in its mask"),
}


def _refuse(function, others, **given):
    """Refuses arguments that ask for what is not offered; returns those that are taken under another name."""
    taken = {}
    for name, value in {**given, **others}.items():
        if name in _SCHEDULES:
            continue
        if name in _TAKEN[function]:
            taken[name] = value
            continue
        if name not in _ELSEWHERE:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        nothing, remedy = _ELSEWHERE[name]
        if value is not nothing and not (isinstance(value, int) and value == nothing):
            raise UnsupportedError(f"{name} is not supported in FP8 by {function}: {remedy}")
    return taken


def _check_deterministic(deterministic):
    if deterministic and not torch.are_deterministic_algorithms_enabled():
        raise UnsupportedError(
            "deterministic=True is a setting of the process here: call torch.use_deterministic_algorithms(True)"
        )
