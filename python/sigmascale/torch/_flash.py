"""FlashAttention's functions in FP8: its arguments, and a plan in place of descales."""

import torch

from .._errors import ArgumentError, MismatchError, UnsupportedError
from . import _paged
from ._attention import How, attend, typed
from ._casts import E4M3, cast
from ._terms import Sequences


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
    sinks=None,
    backend=None,
    accumulator=None,
    fallback=None,
):
    """``flash_attn.flash_attn_func`` in FP8, with a ``plan`` and options as for :func:`attention`; the output has the type of
    ``q``, bfloat16 where that is E4M3.

    With ``return_attn_probs`` also the log-sum-exp ``(batch, n_q_heads, seq)``, and ``None`` for the probabilities, which are
    not kept. ``deterministic`` is ``torch.use_deterministic_algorithms``. Dropout is refused, or goes to PyTorch's own attention
    by ``fallback="bf16"``; ALiBi slopes are refused. ``sinks`` ``(n_q_heads,)`` join the row sums.
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
        softcap=softcap,
        sinks=sinks,
        dropout=dropout_p,
        return_lse=return_attn_probs,
        how=How(backend, accumulator, fallback),
    )
    out = typed(out, q)
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
    seqused_k=None,
    sinks=None,
    backend=None,
    accumulator=None,
    fallback=None,
):
    """``flash_attn.flash_attn_varlen_func`` in FP8: q ``(total_q, heads, d_head)`` of packed sequences, k and v likewise.

    One call for all sequences. ``cu_seqlens_q`` and ``cu_seqlens_k`` stay on the device: nothing waits for them, and on a GPU
    nothing checks their values. ``max_seqlen_q`` and ``max_seqlen_k``, at least the longest sequence's, are by default all
    tokens, which starts more work than is needed. ``seqused_k``: how many of its keys each sequence uses. With
    ``return_attn_probs`` the log-sum-exp is ``(n_q_heads, total_q)``. Otherwise as :func:`flash_attn_func`.
    """
    _refuse(alibi_slopes, deterministic, block_table=block_table)
    for name, x in [("q", q), ("k", k), ("v", v)]:
        if not isinstance(x, torch.Tensor) or x.dim() != 3:
            shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise ArgumentError(f"{name} must be (tokens, heads, d_head), not {shape}")
    longest = max_seqlen_q or q.shape[0], max_seqlen_k or k.shape[0]
    out, lse = attend(
        q[None],
        k[None],
        v[None],
        plan,
        causal=bool(causal),
        softmax_scale=softmax_scale,
        sequences=packed(cu_seqlens_q, cu_seqlens_k, *longest, seqused_k),
        window=tuple(window_size),
        softcap=softcap,
        sinks=sinks,
        dropout=dropout_p,
        return_lse=return_attn_probs,
        how=How(backend, accumulator, fallback),
    )
    out = typed(out[0], q)
    return (out, lse[0], None) if return_attn_probs else out


def packed(cu_q, cu_k, max_q, max_k, used_k=None):
    """Packed sequences by where each ends."""
    cu_q, cu_k = _integers("cu_seqlens_q", cu_q), _integers("cu_seqlens_k", cu_k)
    if cu_q.shape != cu_k.shape or cu_q.shape[0] < 2:
        raise MismatchError(
            f"cu_seqlens_q and cu_seqlens_k have {cu_q.shape[0]} and {cu_k.shape[0]} entries: one more than sequences is needed"
        )
    ends = cu_k[1:] if used_k is None else cu_k[:-1] + _integers("seqused_k", used_k)
    if ends.shape != cu_k[1:].shape:
        raise MismatchError(f"seqused_k has {ends.shape[0]} entries for {cu_k.shape[0] - 1} sequences")
    return Sequences(cu_q[:-1], cu_q[1:], cu_k[:-1], ends, int(max_q), int(max_k))


def _integers(name, x):
    """A tensor of integers as int32."""
    if not isinstance(x, torch.Tensor) or x.dim() != 1 or x.is_floating_point():
        raise ArgumentError(f"{name} must be a tensor of integers of one dimension")
    return x.to(torch.int32)


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
    sinks=None,
    backend=None,
    accumulator=None,
    fallback=None,
):
    """``flash_attn.flash_attn_with_kvcache`` in FP8: new keys and values are written behind the first ``cache_seqlens`` in place,
    then attended to with the rest. No gradients.

    The caches may be E4M3: new keys and values are cast by the plan, old ones are not cast again. ``cache_seqlens`` is an int, or a
    tensor that stays on the device: one call for the whole batch, whatever the lengths, and on a GPU nothing checks them. Pages
    (``block_table``) of 16 to 256 tokens in E4M3 are read where they lie; values may also be as :func:`value_pages` makes them.
    New keys are rotated there where ``rotary_cos`` is given. Other caches in pages are gathered into a copy first. ``num_splits``
    is chosen by the kernel. Rotation elsewhere and ``cache_batch_idx`` are refused.
    """
    plain = tuple(window_size) == (-1, -1) and not softcap and sinks is None and cache_leftpad is None
    if plain and backend in (None, "auto", "native") and _paged.takes(q, k_cache, block_table):
        _refuse(alibi_slopes, False, cache_batch_idx=cache_batch_idx)
        with torch.no_grad():
            rotary = (rotary_cos, rotary_sin)
            out, lse = _paged.attend(
                q, k_cache, v_cache, k, v, rotary, rotary_interleaved, cache_seqlens, block_table, softmax_scale, causal, plan
            )
        out = typed(out, q)
        return (out, lse) if return_softmax_lse else out
    _refuse(alibi_slopes, False, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_batch_idx=cache_batch_idx)
    if (k is None) != (v is None):
        raise ArgumentError("k and v are given together or not at all")
    with torch.no_grad():
        given = q
        if k_cache.dtype == E4M3:
            q, k, v = cast_new(q, k, v, plan)
        new = 0 if k is None else k.shape[1]
        capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
        if cache_seqlens is None and new:
            raise ArgumentError("new keys and values need cache_seqlens, the number of keys in front of them")
        lengths = capacity if cache_seqlens is None else cache_seqlens
        if isinstance(lengths, torch.Tensor):
            lengths = _integers("cache_seqlens", lengths)
        elif not 0 <= lengths <= capacity - new:
            raise MismatchError(f"{new} keys behind {lengths} do not fit a cache of {capacity}")
        if new:
            _append(k_cache, v_cache, k, v, lengths, block_table)
        if block_table is not None:
            k_cache, v_cache = (x[block_table].flatten(1, 2) for x in (k_cache, v_cache))
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
            window=tuple(window_size),
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
    return (None if x is None else cast(x, d) for x, d in zip((q, k, v), rows))


def _append(k_cache, v_cache, k, v, lengths, block_table):
    batch, new = k.shape[:2]
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


def _filled(lengths, new, leftpad, q, capacity):
    """The filled part of each row of a cache."""
    batch, rows = q.shape[:2]
    row = torch.arange(batch, device=q.device, dtype=torch.int32)
    starts = row * capacity if leftpad is None else row * capacity + _integers("cache_leftpad", leftpad)
    for name, x in [("cache_seqlens", lengths), ("cache_leftpad", leftpad)]:
        if isinstance(x, torch.Tensor) and x.shape != (batch,):
            raise MismatchError(f"{name} has shape {tuple(x.shape)}: ({batch},) is needed")
    ends = row * capacity + (lengths + new)
    return Sequences(row * rows, row * rows + rows, starts, ends, rows, capacity)


def _refuse(alibi_slopes, deterministic, **others):
    for name, value in {"alibi_slopes": alibi_slopes, **others}.items():
        if value is not None:
            raise UnsupportedError(f"{name} is not offered in FP8")
    if deterministic and not torch.are_deterministic_algorithms_enabled():
        raise UnsupportedError(
            "deterministic=True is a setting of the process here: torch.use_deterministic_algorithms(True)"
        )
