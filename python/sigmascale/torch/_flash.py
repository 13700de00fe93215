"""FlashAttention's functions in FP8: the arguments of ``flash_attn`` 2, in its order and with its defaults, and a plan.

Keywords that FlashAttention-3 has beside are taken where they ask for nothing, or for how the work is shared out, and
refused by name otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .._errors import ArgumentError, MismatchError, UnsupportedError
from . import _paged
from ._attention import How, attend, pair, typed
from ._centers import subtracted
from ._e4m3 import E4M3, cast
from ._terms import Sequences, checked

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
    which are not kept. ``deterministic`` is ``torch.use_deterministic_algorithms``. Dropout is refused, or goes to
    PyTorch's own attention by ``fallback="bf16"``; ALiBi slopes are refused. ``sinks`` ``(n_q_heads,)`` join the row
    sums.
    """
    _refuse("flash_attn_func", others, alibi_slopes=alibi_slopes)
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
        how=How(backend, accumulator, fallback),
    )
    out = typed(out, q)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
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
    block_table: None = None,
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
    """
    _refuse("flash_attn_varlen_func", others, alibi_slopes=alibi_slopes, block_table=block_table)
    _check_deterministic(deterministic)
    window_size = pair("window_size", window_size)
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
        how=How(backend, accumulator, fallback),
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
    not validated. Pages (``block_table``) of 16 to 256 tokens in E4M3 are read in place; values may also have the
    layout of :func:`value_pages`. If ``rotary_cos`` is given, the kernel rotates new keys for such pages, and PyTorch
    rotates new keys and queries in all other cases. Other paged caches are first gathered into a copy. The kernel
    chooses ``num_splits``.
    """
    known = _refuse("flash_attn_with_kvcache", others, alibi_slopes=alibi_slopes)
    block_table = known.get("page_table") if block_table is None else block_table
    _check_cache(q, k_cache, v_cache, k, v, cache_batch_idx, block_table)
    window_size = pair("window_size", window_size)
    plain = window_size == (-1, -1) and not softcap and sinks is None and cache_leftpad is None
    if plain and backend in (None, "auto", "native") and _paged.takes(q, k_cache, block_table):
        _refuse("flash_attn_with_kvcache on E4M3 pages", {}, cache_batch_idx=cache_batch_idx)
        with torch.no_grad():
            rotary = (rotary_cos, rotary_sin)
            room = block_table.shape[1] * k_cache.shape[1]
            lengths = cache_lengths(cache_seqlens, q.shape[0], 0 if k is None else k.shape[1], room)
            out, lse = _paged.attend(
                q,
                k_cache,
                v_cache,
                k,
                v,
                rotary,
                rotary_interleaved,
                lengths,
                block_table,
                softmax_scale,
                causal,
                plan,
                return_softmax_lse,
            )
        out = typed(out, q)
        return (out, lse) if return_softmax_lse else out
    with torch.no_grad():
        given, new = q, 0 if k is None else k.shape[1]
        capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
        lengths = cache_lengths(cache_seqlens, q.shape[0], new, capacity)
        if not isinstance(lengths, torch.Tensor) and lengths + new == 0:
            # An empty cache: no row sees a key.
            lengths = torch.zeros(q.shape[0], dtype=torch.int32, device=q.device)
        if block_table is not None:
            block_table = _pages(block_table, lengths, new, k_cache)
        if rotary_cos is not None or rotary_sin is not None:
            if cache_leftpad is not None:
                raise UnsupportedError("rotary_cos is not offered with cache_leftpad: rotate q and k before the call")
            together = not causal and window_size == (-1, -1)
            q, k = _rotated(q, k, rotary_cos, rotary_sin, lengths, bool(rotary_interleaved), together, capacity)
        if k_cache.dtype == E4M3:
            q, k, v = cast_new(q, k, v, plan)
        if new:
            _append(k_cache, v_cache, k, v, lengths, block_table, cache_batch_idx)
        if block_table is not None:
            k_cache, v_cache = (x[block_table].flatten(1, 2) for x in (k_cache, v_cache))
        elif cache_batch_idx is not None:
            k_cache, v_cache = (x[cache_batch_idx.long()] for x in (k_cache, v_cache))
        sequences = None
        if isinstance(lengths, torch.Tensor) or cache_leftpad is not None:
            sequences = _filled(lengths, new, cache_leftpad, q, capacity)
        else:
            k_cache, v_cache = k_cache[:, : lengths + new], v_cache[:, : lengths + new]
        out, lse = attend(
            q,
            k_cache,
            v_cache,
            plan,
            causal=bool(causal),
            softmax_scale=softmax_scale,
            sequences=sequences,
            window=window_size,
            softcap=softcap,
            sinks=sinks,
            return_lse=return_softmax_lse,
            how=How(backend, accumulator, fallback),
        )
    out = typed(out, given)
    return (out, lse) if return_softmax_lse else out


def cast_new(q, k, v, plan):
    """Operands of a call on E4M3 caches, by the plan's descales."""
    if getattr(plan, "per_call", False):
        raise UnsupportedError("policy='current' has no descales that an E4M3 cache could keep: take another policy")
    rows = plan.descales(q.shape[0]) if hasattr(plan, "descales") else [d.expand(q.shape[0], -1) for d in plan]
    if k is not None:
        k, v = subtracted(k, v, getattr(plan, "centers", (None, None)))
    return (None if x is None else cast(x, d) for x, d in zip((q, k, v), rows))


def _check_cache(q, k_cache, v_cache, k, v, cache_batch_idx, block_table):
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
        if _integers(name, x, dims).shape[0] != q.shape[0]:
            raise MismatchError(f"{name} has {x.shape[0]} rows for a batch of {q.shape[0]}: give one for each sequence")
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
    if block_table is None and cache_batch_idx is None and k_cache.shape[0] != q.shape[0]:
        raise MismatchError(
            f"k_cache has {k_cache.shape[0]} rows for a batch of {q.shape[0]}: give as many, or say which by cache_batch_idx"
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


def _append(k_cache, v_cache, k, v, lengths, block_table, cache_batch_idx):
    batch, new = k.shape[:2]
    place = torch.arange(new, dtype=torch.int64, device=k.device).expand(batch, -1)
    place = place + (lengths.long()[:, None] if isinstance(lengths, torch.Tensor) else lengths)
    sequence = torch.arange(batch, dtype=torch.int64, device=k.device)[:, None]
    if cache_batch_idx is not None:
        sequence = cache_batch_idx.long()[:, None]
    if block_table is not None:
        page = k_cache.shape[1]
        sequence, place = block_table.gather(1, place // page), place % page
    for cache, x in ((k_cache, k), (v_cache, v)):
        # E4M3 is copied as bytes.
        cache, x = (y.view(torch.uint8) if y.dtype == E4M3 else y for y in (cache, x.to(cache.dtype)))
        cache[sequence, place] = x


def _filled(lengths, new, leftpad, q, capacity):
    """The filled part of each row of a cache."""
    batch, rows = q.shape[:2]
    row = torch.arange(batch, device=q.device, dtype=torch.int32)
    starts = row * capacity
    if leftpad is not None:
        if _integers("cache_leftpad", leftpad).shape != (batch,):
            raise MismatchError(f"cache_leftpad has shape {tuple(leftpad.shape)}: ({batch},) is needed")
        starts = starts + leftpad.to(torch.int32)
    ends = row * capacity + (lengths + new)
    return Sequences(row * rows, row * rows + rows, starts, ends, rows, capacity)


# Keywords of FlashAttention-3 besides those of ``flash_attn``: the value that asks for nothing, and what to do instead.
_SCHEDULES = ("num_splits", "pack_gqa", "sm_margin", "scheduler_metadata")
_PLANNED = "leave it out: descales come from plan"
_ELSEWHERE = {
    "q_descale": (None, _PLANNED),
    "k_descale": (None, _PLANNED),
    "v_descale": (None, _PLANNED),
    "qv": (None, "concatenate it to q, and its keys to k"),
    "attention_chunk": (0, "call flash_attn_varlen_func on the chunks"),
    "seqused_q": (None, "end the sequences in cu_seqlens_q"),
    "cu_seqlens_q": (None, "call flash_attn_with_kvcache on a batch of equal lengths"),
    "cu_seqlens_k_new": (None, "call flash_attn_with_kvcache on a batch of equal lengths"),
    "max_seqlen_q": (None, "call flash_attn_with_kvcache on a batch of equal lengths"),
    "rotary_seqlens": (None, "rotate q and k before the call"),
    "page_table": (None, "call flash_attn_with_kvcache"),
    "alibi_slopes": (None, "use PyTorch's attention with the biases in its mask"),
    "block_table": (None, "call flash_attn_with_kvcache for caches in pages"),
    "cache_batch_idx": (None, "put the rows of block_table in that order"),
}


def _refuse(function, others, **given):
    """Refuses arguments that ask for what is not offered; returns those that are taken under another name."""
    taken = {}
    for name, value in {**given, **others}.items():
        if name in _SCHEDULES:
            continue
        if name not in _ELSEWHERE:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        if name == "page_table" and function == "flash_attn_with_kvcache":
            taken[name] = value
            continue
        nothing, remedy = _ELSEWHERE[name]
        if value is not nothing and not (isinstance(value, int) and value == nothing):
            raise UnsupportedError(f"{name} is not supported in FP8 by {function}: {remedy}")
    return taken


def _check_deterministic(deterministic):
    if deterministic and not torch.are_deterministic_algorithms_enabled():
        raise UnsupportedError(
            "deterministic=True is a setting of the process here: call torch.use_deterministic_algorithms(True)"
        )
