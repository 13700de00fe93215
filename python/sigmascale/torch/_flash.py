"""FlashAttention's functions in FP8: its arguments, and a plan in place of descales."""

import torch

from .._errors import ArgumentError, MismatchError, UnsupportedError
from ._attention import How, attend
from ._casts import E4M3, cast
from ._masks import grouped, once


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    *,
    plan,
    backend=None,
    accumulator=None,
    fallback=None,
):
    """``flash_attn.flash_attn_func`` in FP8, with a ``plan`` and options as for :func:`attention`; the output has the type of
    ``q``.

    With ``return_attn_probs`` also the log-sum-exp ``(batch, n_q_heads, seq)``, and ``None`` for the probabilities, which are
    not kept. ``deterministic`` is ``torch.use_deterministic_algorithms``. Windows, soft-caps and dropout
    are refused, or go to PyTorch's own attention by ``fallback="bf16"``; ALiBi slopes are refused.
    """
    _refuse(alibi_slopes, deterministic)
    out, lse = attend(
        q,
        k,
        v,
        plan,
        causal=bool(causal),
        softmax_scale=softmax_scale,
        window=tuple(window_size),
        softcap=softcap or None,
        dropout=dropout_p,
        return_lse=return_attn_probs,
        how=How(backend, accumulator, fallback),
    )
    out = out.to(q.dtype)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q=None,
    max_seqlen_k=None,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
    *,
    plan,
    backend=None,
    accumulator=None,
    fallback=None,
):
    """``flash_attn.flash_attn_varlen_func`` in FP8: q ``(total_q, heads, d_head)`` of packed sequences, k and v likewise.

    Every sequence is a call of its own. ``cu_seqlens_q`` and ``cu_seqlens_k`` are read on the host, which waits for the device
    once for a tensor that stays as it is (never where they lie on the CPU). In compiled code and in captures of CUDA graphs
    they cannot be read: such calls are refused, or with ``fallback="bf16"`` go to PyTorch's own attention with a mask
    ``(total_q, total_k)``. With ``return_attn_probs`` the log-sum-exp is ``(n_q_heads, total_q)``. Otherwise as
    :func:`flash_attn_func`.
    """
    _refuse(alibi_slopes, deterministic, block_table=block_table)
    for name, x in [("q", q), ("k", k), ("v", v)]:
        if not isinstance(x, torch.Tensor) or x.dim() != 3:
            shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise ArgumentError(f"{name} must be (tokens, heads, d_head), not {shape}")
    out, lse = attend(
        q[None],
        k[None],
        v[None],
        plan,
        causal=bool(causal),
        softmax_scale=softmax_scale,
        window=tuple(window_size),
        softcap=softcap or None,
        dropout=dropout_p,
        return_lse=return_attn_probs,
        how=How(backend, accumulator, fallback),
        **packed(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0], bool(causal)),
    )
    out = out[0].to(q.dtype)
    return (out, lse[0], None) if return_attn_probs else out


def packed(cu_q, cu_k, total_q, total_k, causal):
    """The layout of packed sequences as an argument of :func:`attend`, or their mask where lengths cannot be read."""
    ends = [_read(name, cu) for name, cu in [("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)]]
    if None in ends:
        return {"mask": _packed_mask(cu_q, cu_k, total_q, total_k, causal)}
    for name, cu, total in zip(("cu_seqlens_q", "cu_seqlens_k"), ends, (total_q, total_k)):
        if len(cu) < 2 or cu[0] != 0 or cu[-1] != total or any(a > b for a, b in zip(cu, cu[1:])):
            raise MismatchError(f"{name} must grow from 0 to the {total} tokens, and is {_short(cu)}")
    if len(ends[0]) != len(ends[1]):
        raise MismatchError(f"cu_seqlens_q has {len(ends[0]) - 1} sequences and cu_seqlens_k {len(ends[1]) - 1}")
    rows, keys = (list(zip(cu, cu[1:])) for cu in ends)
    pieces = [(*row, *key, causal) for row, key in zip(rows, keys) if row[0] < row[1] and key[0] < key[1]]
    return {"layout": [(0, 1, pieces)]}


def _short(values):
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:4]))}, ..., {values[-1]}]"


def _packed_mask(cu_q, cu_k, total_q, total_k, causal):
    sides = []
    for cu, total in [(cu_q, total_q), (cu_k, total_k)]:
        place = torch.arange(total, device=cu.device)
        sequence = torch.bucketize(place, cu[1:], right=True)
        sides.append((sequence, place - cu[1:][sequence]))
    (of_q, q), (of_k, k) = sides
    seen = of_q[:, None] == of_k[None, :]
    return seen & (k[None, :] <= q[:, None]) if causal else seen


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
    *,
    plan,
    backend=None,
    accumulator=None,
    fallback=None,
):
    """``flash_attn.flash_attn_with_kvcache`` in FP8: new keys and values are written behind the first ``cache_seqlens`` in place,
    then attended to with the rest. No gradients.

    The caches may be E4M3: new keys and values are cast by the plan, old ones are not cast again. ``cache_seqlens`` is an int, or a
    tensor that is read on the host as ``cu_seqlens`` are in :func:`flash_attn_varlen_func`; consecutive sequences of one length are
    one call. Caches in pages (``block_table``) are gathered into a copy first. ``num_splits`` is chosen by the kernel. Rotation
    and ``cache_batch_idx`` are refused.
    """
    _refuse(alibi_slopes, False, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_batch_idx=cache_batch_idx)
    if (k is None) != (v is None):
        raise ArgumentError("k and v are given together or not at all")
    with torch.no_grad():
        q8 = k_cache.dtype == E4M3
        given = q.dtype
        if q8:
            q, k, v = _cast_new(q, k, v, plan)
        new = 0 if k is None else k.shape[1]
        capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
        if cache_seqlens is None and new:
            raise ArgumentError("new keys and values need cache_seqlens, the number of keys in front of them")
        lengths = capacity if cache_seqlens is None else cache_seqlens
        if new:
            _append(k_cache, v_cache, k, v, lengths, block_table, capacity)
        if block_table is not None:
            k_cache, v_cache = (x[block_table].flatten(1, 2) for x in (k_cache, v_cache))
        where = _filled(lengths, new, cache_leftpad, q, capacity, bool(causal))
        out, lse = attend(
            q,
            k_cache,
            v_cache,
            plan,
            causal=bool(causal),
            softmax_scale=softmax_scale,
            window=tuple(window_size),
            softcap=softcap or None,
            return_lse=return_softmax_lse,
            how=How(backend, accumulator, fallback),
            **where,
        )
    out = out.to(given)
    return (out, lse) if return_softmax_lse else out


def _cast_new(q, k, v, plan):
    """Operands of a call on E4M3 caches, by the plan's descales."""
    if getattr(plan, "per_call", False):
        raise UnsupportedError("policy='current' has no descales that an E4M3 cache could keep: take another policy")
    rows = plan.descales(q.shape[0]) if hasattr(plan, "descales") else [d.expand(q.shape[0], -1) for d in plan]
    return (None if x is None else cast(x, d) for x, d in zip((q, k, v), rows))


def _append(k_cache, v_cache, k, v, lengths, block_table, capacity):
    batch, new = k.shape[:2]
    if isinstance(lengths, int) and lengths + new > capacity:
        raise MismatchError(f"{new} keys behind {lengths} do not fit a cache of {capacity}")
    place = torch.arange(new, device=k.device).expand(batch, -1)
    place = place + (lengths.long()[:, None] if isinstance(lengths, torch.Tensor) else lengths)
    sequence = torch.arange(batch, device=k.device)[:, None]
    if block_table is not None:
        page = k_cache.shape[1]
        sequence, place = block_table.long().gather(1, place // page), place % page
    for cache, x in ((k_cache, k), (v_cache, v)):
        # E4M3 is copied as bytes.
        cache, x = (y.view(torch.uint8) if y.dtype == E4M3 else y for y in (cache, x.to(cache.dtype)))
        cache[sequence, place] = x


def _filled(lengths, new, leftpad, q, capacity, causal):
    """Which keys the queries see, as an argument of :func:`attend`."""
    batch, rows = q.shape[:2]
    ends = lengths if isinstance(lengths, int) else _read("cache_seqlens", lengths)
    starts = 0 if leftpad is None else _read("cache_leftpad", leftpad)
    if ends is None or starts is None:
        key = torch.arange(capacity, device=q.device)
        column = lambda x: x.long().view(-1, 1, 1, 1) if isinstance(x, torch.Tensor) else x
        end = column(lengths) + new
        seen = (key < end).expand(batch, 1, rows, -1)
        if causal:
            seen = seen & (key - end + rows <= torch.arange(rows, device=q.device)[:, None])
        return {"mask": seen & (key >= column(leftpad)) if leftpad is not None else seen}
    each = lambda x: [x] * batch if isinstance(x, int) else x
    spans = list(zip(each(starts), each(ends)))
    if len(spans) != batch or any(not 0 <= start <= end <= capacity - new for start, end in spans):
        raise MismatchError(
            f"cache_seqlens and cache_leftpad do not fit {batch} sequences of {capacity} keys, {new} of them new"
        )
    return {"layout": grouped([[(0, rows, a, b + new, causal)] if a < b + new else [] for a, b in spans])}


def _read(name, x):
    """A tensor of integers as a list, read once; None where its values cannot be read."""
    if not isinstance(x, torch.Tensor) or x.dim() != 1 or x.is_floating_point():
        raise ArgumentError(f"{name} must be a tensor of integers of one dimension")
    if torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    return once(x, "values", lambda: x.tolist())


def _refuse(alibi_slopes, deterministic, **others):
    for name, value in {"alibi_slopes": alibi_slopes, **others}.items():
        if value is not None:
            raise UnsupportedError(f"{name} is not offered in FP8")
    if deterministic and not torch.are_deterministic_algorithms_enabled():
        raise UnsupportedError(
            "deterministic=True is a setting of the process here: torch.use_deterministic_algorithms(True)"
        )
