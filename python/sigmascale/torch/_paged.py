"""Attention over a KV cache in E4M3 that lies in pages: the operator ``sigmascale::paged_attention``.

It appends new keys and values to their pages and attends to them with the rest. Lengths and block tables stay on the device.
Keys are ``(pages, page_size, n_kv_heads, d_head)``. Values are the same, or in the order that the tensor cores take
(:func:`value_pages`), which is faster.
"""

import torch

from .._errors import ArgumentError, UnsupportedError
from . import _calls, _centers
from ._backends import backend
from ._e4m3 import E4M3
from ._hopper import _aligned
from ._plan import LayerPlan
from ._rope import Rope
from ._terms import Call, Terms, checked

_LIBRARY = torch.library.Library("sigmascale", "FRAGMENT")
_LIBRARY.define(
    "paged_attention(Tensor q, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor block_table, Tensor lengths, Tensor? k, Tensor? v, "
    "Tensor q_descale, Tensor k_descale, Tensor v_descale, Tensor? cosine, Tensor? sine, bool interleaved, Tensor(c!)? words, "
    "bool causal, float scale, Tensor? label=None, Tensor? k_center=None, Tensor? v_center=None) -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def value_pages(
    pages: int, page_size: int, n_kv_heads: int, d_head: int, device: torch.device | str | int | None = None
) -> torch.Tensor:
    """Zeroed pages of values in the order that the tensor cores take: ``(pages, n_kv_heads, page_size // 16, d_head // 8, 8,
    16)``, E4M3."""
    if page_size % 16 or d_head % 8:
        raise ArgumentError(f"pages of {page_size} tokens of {d_head} elements do not divide into groups of 16 by 8")
    shape = (pages, n_kv_heads, page_size // 16, d_head // 8, 8, 16)
    # A cache is written in the mode of each call.
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=torch.uint8, device=device).view(E4M3)


def takes(q, k_cache, block_table):
    """Whether the kernels offer a call on this cache."""
    if block_table is None or not q.is_cuda or k_cache.dtype != E4M3 or k_cache.dim() != 4:
        return False
    if q.shape[3] not in (64, 128) or k_cache.shape[1] not in (16, 32, 64, 128, 256):
        return False
    return torch.cuda.get_device_capability(q.device) == (9, 0)


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
    k_center=None,
    v_center=None,
):
    out = torch.empty(q.shape, device=q.device, dtype=torch.bfloat16)
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), device=q.device, dtype=torch.float32)
    call = Call(
        q=_aligned(q),
        k=None if k is None else _aligned(k),
        v=None if v is None else _aligned(v),
        pages=(k_pages, v_pages, block_table, lengths, checked(lengths)),
        descales=(q_descale, k_descale, v_descale),
        terms=Terms(causal, scale, k_center=k_center, v_center=v_center),
        out=out,
        lse=lse,
        stats=None if words is None else words.view(-1),
        rope=None if cosine is None else Rope(cosine, sine, interleaved),
    )
    # A table may grow with each call: its size is not worth a key.
    backend("native").launch("forward", call)
    _calls.ran(label, "native", "these kernels read the pages where they lie")
    return out, lse


def _shapes(q, *_):
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    return q.new_empty(q.shape, dtype=torch.bfloat16), lse


_LIBRARY.impl("paged_attention", _attend, "CUDA")
torch.library.register_fake("sigmascale::paged_attention", _shapes, lib=_LIBRARY)
paged_attention = torch.ops.sigmascale.paged_attention.default


def attend(q, k_cache, v_cache, k, v, rotary, interleaved, lengths, block_table, scale, causal, plan, needs_lse):
    """A call of ``flash_attn_with_kvcache`` on E4M3 pages: the output and the log-sum-exp."""
    if getattr(plan, "per_call", False):
        raise UnsupportedError("policy='current' has no descales that an E4M3 cache could keep: take another policy")
    new, room = 0 if k is None else k.shape[1], block_table.shape[1] * k_cache.shape[1]
    batch, rows = q.shape[:2]
    given = plan.descales(batch) if hasattr(plan, "descales") else [d.expand(batch, -1) for d in plan]
    cosine, sine = rotary
    if cosine is not None:
        if new != rows or not (causal or rows == 1):
            raise UnsupportedError("on pages in E4M3, rotation is offered for causal calls with a new key for each query")
        cosine, sine = (_table(x, room) for x in rotary)
    if not isinstance(lengths, torch.Tensor):
        lengths = torch.full((batch,), int(lengths), dtype=torch.int32, device=q.device)
    lengths, block_table = (x if x.dtype == torch.int32 else x.to(torch.int32) for x in (lengths, block_table))
    scale = getattr(plan, "softmax_scale", q.shape[3] ** -0.5) if scale is None else float(scale)
    words, label = (plan.reported, plan.label) if isinstance(plan, LayerPlan) else (None, None)
    c, m = getattr(plan, "centers", (None, None))
    if needs_lse and c is not None and cosine is not None:
        raise UnsupportedError(
            "the log-sum-exp of centered keys needs the rotated queries, which the kernel makes: rotate q and k before the call"
        )
    how = bool(interleaved), words, bool(causal), scale, label, c, m
    out, lse = paged_attention(q, k_cache, v_cache, block_table, lengths, k, v, *given[:3], cosine, sine, *how)
    return out, _centers.model_lse(lse, q, given[0], Terms(causal, scale, k_center=c)) if needs_lse else lse


def _table(x, room):
    """A table of rotation in f32, as long as the cache has room for."""
    if x.shape[0] < room:
        x = torch.cat([x, x[-1:].expand(room - x.shape[0], -1)])
    return x.to(torch.float32).contiguous()
