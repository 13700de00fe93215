"""Attention over a KV cache in E4M3 that lies in pages: the operator ``sigmascale::paged_attention``.

It appends new keys and values to their pages and attends to them with the rest. Lengths, block tables and where packed queries
begin stay on the device. Keys are ``(pages, page_size, n_kv_heads, d_head)``. Values are the same, or in the order that the tensor
cores take (:func:`value_pages`), which is faster.
"""

import dataclasses

import torch

from .._errors import ArgumentError
from . import _calls
from ._backends import backend
from ._e4m3 import E4M3
from ._hopper import _aligned
from ._plan import LayerPlan
from ._rope import Rope
from ._terms import Call, Terms, checked

# What the kernels take: channels of a head, tokens of a page.
HEAD_DIMS, PAGE_SIZES = (64, 128), (16, 32, 64, 128, 256)

_LIBRARY = torch.library.Library("sigmascale", "FRAGMENT")
_LIBRARY.define(
    "paged_attention(Tensor q, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor block_table, Tensor lengths, Tensor? k, Tensor? v, "
    "Tensor q_descale, Tensor k_descale, Tensor v_descale, Tensor? cosine, Tensor? sine, bool interleaved, Tensor(c!)? words, "
    "bool causal, float scale, Tensor? label=None, SymInt? window_left=None, SymInt? window_right=None, Tensor? sinks=None, "
    "str accumulator='fp8-256', int splits=0, Tensor? cu_seqlens_q=None, SymInt max_seqlen_q=0, "
    "Tensor? k_center=None, Tensor? v_center=None) -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@dataclasses.dataclass
class Pages:
    """A cache as the native half reads it (``Pages`` in ``python/src/call.rs``)."""

    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    # Of packed queries: q, the output and the log-sum-exp have a batch of 1.
    cu_seqlens_q: torch.Tensor | None = None
    max_seqlen_q: int = 0
    checked: bool = False


def value_pages(
    pages: int, page_size: int, n_kv_heads: int, d_head: int, device: torch.device | str | int | None = None
) -> torch.Tensor:
    """Zeroed pages of values in the order that the tensor cores take: ``(pages, n_kv_heads, page_size // 16, d_head // 8, 8,
    16)``, E4M3.

    Channel ``c`` of token ``t`` of a page is element ``[page, head, t // 16, c // 8, c % 8, i]``, where ``i`` is
    ``4 * (t % 8 // 2) + 2 * (t % 16 // 8) + t % 2``: the order of the 16 tokens is 0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6,
    7, 14, 15. Only :func:`flash_attn_with_kvcache` and :func:`flash_attn_varlen_func` on a Hopper GPU take such pages.
    """
    if page_size % 16 or d_head % 8:
        raise ArgumentError(f"pages of {page_size} tokens of {d_head} elements do not divide into groups of 16 by 8")
    shape = (pages, n_kv_heads, page_size // 16, d_head // 8, 8, 16)
    # A cache is written in the mode of each call.
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=torch.uint8, device=device).view(E4M3)


def refusal(q, k_cache, block_table):
    """Why the kernels do not take a call on this cache, or None."""
    if block_table is None:
        return "the cache has no block_table"
    if not q.is_cuda or torch.cuda.get_device_capability(q.device) != (9, 0):
        return "the kernels over pages are for Hopper GPUs"
    if k_cache.dtype != E4M3:
        return f"the cache has type {k_cache.dtype}, not float8_e4m3fn"
    if q.shape[-1] not in HEAD_DIMS:
        return f"heads have {q.shape[-1]} channels, not 64 or 128"
    if k_cache.shape[1] not in PAGE_SIZES:
        return f"pages have {k_cache.shape[1]} tokens, not 16, 32, 64, 128 or 256"
    return None


def _attend(
    q,
    k_pages,
    v_pages,
    block_table,
    lengths,
    k,
    v,
    q_descale,
    k_descale,
    v_descale,
    cosine,
    sine,
    interleaved,
    words,
    causal,
    scale,
    label=None,
    window_left=None,
    window_right=None,
    sinks=None,
    accumulator="fp8-256",
    splits=0,
    cu_seqlens_q=None,
    max_seqlen_q=0,
    k_center=None,
    v_center=None,
):
    # Rows of no sequence, behind the last one, are not written.
    new = torch.empty if cu_seqlens_q is None else torch.zeros
    out = new(q.shape, device=q.device, dtype=torch.bfloat16)
    lse = new((q.shape[0], q.shape[2], q.shape[1]), device=q.device, dtype=torch.float32)
    call = Call(
        q=_aligned(q),
        k=None if k is None else _aligned(k),
        v=None if v is None else _aligned(v),
        pages=Pages(k_pages, v_pages, block_table, lengths, cu_seqlens_q, max_seqlen_q, checked(lengths)),
        descales=(q_descale, k_descale, v_descale),
        terms=Terms(
            causal,
            scale,
            window_left,
            window_right,
            sinks=sinks,
            k_center=k_center,
            v_center=v_center,
            accumulator=accumulator,
            splits=splits,
        ),
        out=out,
        lse=lse,
        stats=None if words is None else words.view(-1),
        rope=None if cosine is None else Rope(cosine, sine, interleaved),
    )
    # A table may grow with each call: its size is not worth a key.
    backend("native").launch("forward", call)
    _calls.ran(label, "native", "these kernels read the pages where they lie")
    return out, lse


def _shapes(q, *_, **__):
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    return q.new_empty(q.shape, dtype=torch.bfloat16), lse


_LIBRARY.impl("paged_attention", _attend, "CUDA")
torch.library.register_fake("sigmascale::paged_attention", _shapes, lib=_LIBRARY)
paged_attention = torch.ops.sigmascale.paged_attention.default


def attend(cache, new, descales, terms, plan, rotary=(None, None), interleaved=False, q=None):
    """A call on the kernels: the output and the log-sum-exp. ``cache``: :class:`Pages`; ``new``: keys and values to append, or
    None for each; ``terms`` without sequences."""
    cosine, sine = rotary
    if cosine is not None:
        room = cache.block_table.shape[1] * cache.k.shape[1]
        cosine, sine = (_table(x, room) for x in rotary)
    # A table may have more rows than there are sequences.
    lengths = cache.lengths.to(torch.int32)
    table = cache.block_table[: lengths.shape[0]].to(torch.int32)
    words, label = (plan.reported, plan.label) if isinstance(plan, LayerPlan) else (None, None)
    starts = None if cache.cu_seqlens_q is None else cache.cu_seqlens_q.contiguous()
    return paged_attention(
        q,
        cache.k,
        cache.v,
        table if table.stride(1) == 1 or table.shape[1] == 1 else table.contiguous(),
        lengths.contiguous(),
        *new,
        *descales,
        cosine,
        sine,
        interleaved,
        words,
        terms.causal,
        terms.scale,
        label,
        terms.window_left,
        terms.window_right,
        terms.sinks,
        terms.accumulator,
        terms.splits,
        starts,
        cache.max_seqlen_q,
        terms.k_center,
        terms.v_center,
    )


def _table(x, room):
    """A table of rotation in f32, as long as the cache has room for."""
    if x.shape[0] < room:
        x = torch.cat([x, x[-1:].expand(room - x.shape[0], -1)])
    return x.to(torch.float32).contiguous()
