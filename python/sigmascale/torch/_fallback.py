"""PyTorch's own attention, for calls that no FP8 kernel takes."""

import torch

# The function itself: ``patched`` puts another in its place.
from torch.nn.functional import scaled_dot_product_attention as _sdpa

from ._casts import hidden


def attend(q, k, v, *, scale, causal=False, mask=None, dropout=0.0, softcap=None, sinks=None, return_lse=False):
    """Attention in the operands' type: output ``(batch, seq, heads, d_head)``, and LSE or None.

    A causal mask is aligned to the last query and the last key, and is not combined with ``mask``. Soft-caps, sinks and an LSE
    are computed in plain PyTorch, with all logits in memory.
    """
    if causal and q.shape[1] != k.shape[1]:
        causal, mask = False, ~hidden(q.shape[1], k.shape[1], q.device)
    heads = lambda x: x.transpose(1, 2)
    if softcap is None and sinks is None and not return_lse:
        out = _sdpa(
            heads(q),
            heads(k),
            heads(v),
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=causal,
            scale=scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return heads(out), None
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
