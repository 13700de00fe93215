"""PyTorch's own attention, for calls that no FP8 kernel takes."""

import torch

# The function itself: ``patched`` puts another in its place.
from torch.nn.functional import scaled_dot_product_attention as _sdpa

from ._terms import hidden, seen_rows


def attend(q, k, v, terms, *, mask=None, dropout=0.0, return_lse=False):
    """Attention in the operands' type: output ``(batch, seq, heads, d_v)``, and LSE or None.

    ``mask`` hides keys besides those that ``terms`` hides. Soft-caps, sinks and an LSE are computed in plain PyTorch, with all
    logits in memory.
    """
    scale, softcap, sinks = terms.scale, terms.soft_cap, terms.sinks
    # Branches, since compiled code would make symbols of these, which PyTorch's attention does not take.
    grouped = True if q.shape[2] != k.shape[2] else False
    causal = True if terms.causal and terms.dense and mask is None and q.shape[1] == k.shape[1] else False
    visible = None if causal else terms.visible(q.shape[0], q.shape[1], k.shape[1], q.device)
    if visible is not None and mask is not None:
        visible = visible & mask if mask.dtype == torch.bool else mask.masked_fill(~visible, -torch.inf)
    mask = mask if visible is None else visible
    if terms.sequences is not None:
        # NaN besides a sequence is not to be multiplied by zero, and rows that see nothing are zero.
        q, k, v = seen_rows(q, k, v, terms)
    heads = lambda x: x.transpose(1, 2)
    if softcap is None and sinks is None and not return_lse:
        rows = None
        if terms.sequences is not None:
            # A softmax of nothing has a gradient of NaN.
            rows = mask.any(dim=3, keepdim=True)
            mask = mask | ~rows
        out = _sdpa(
            heads(q),
            heads(k),
            heads(v),
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=causal,
            scale=scale,
            enable_gqa=grouped,
        )
        return heads(out if rows is None else out.masked_fill(~rows, 0.0)), None
    group = q.shape[2] // k.shape[2]
    every = lambda x: heads(x.repeat_interleave(group, dim=2))
    logits = (heads(q) @ every(k).transpose(2, 3)).float() * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if causal:
        mask = ~hidden(q.shape[1], k.shape[1], q.device)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    joined = logits
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        joined = torch.cat([logits, column], dim=3)
    lse = torch.logsumexp(joined, dim=3)
    # A row that sees nothing is zero.
    weights = torch.exp(logits - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    weights = torch.nn.functional.dropout(weights, dropout)
    return heads(weights.to(v.dtype) @ every(v)), lse
