"""The flash attention whose failure in BF16 "Why Low-Precision Transformer Training Fails" explains, in PyTorch's operations,
and the paper's remedy, the shifted softmax.

    P' = bf16(exp(S - m))        O' = bf16(P' V)        O = bf16(O' / rowsum(P'))        delta = rowsum(dO * O)

m is the row's maximum. Where that maximum repeats, several P' are exactly 1 and the rounding of O' has a bias, which delta carries
to dQ. With `shifted`, m exceeds a repeated maximum (Algorithm 3), so that P' stays below 1; attention is the same for every m.
The matrix of logits is kept, so it is slow. `train_gpt.py --attention flash` and `shifted` train with it.
"""

import torch

# Algorithm 3: how far a positive repeated maximum is exceeded, and how near to the maximum a logit repeats it.
BETA, EPSILON = 2.0, 1e-3
# Shifts beyond this many nats move with the maximum between half of it and all: one shift for all rows would round all of them
# in one direction, and a larger one would empty the row.
MOST = 40.0


def shift(logits, shifted):
    """What is subtracted from each row of logits, and whether its maximum repeats."""
    top = logits.amax(dim=-1, keepdim=True)
    repeats = ((top - logits) <= EPSILON).sum(dim=-1, keepdim=True) > 1
    if not shifted:
        return top, repeats
    wanted = torch.where(top > 0, (BETA - 1) * top, -top)
    limited = torch.where(wanted <= MOST, wanted, MOST / 2 + wanted % (MOST / 2))
    return torch.where(repeats, top + limited, top), repeats


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale, shifted):
        n = q.shape[2]
        hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        logits = ((q @ k.transpose(2, 3)).float() * scale).masked_fill(hidden, -torch.inf)
        m, _ = shift(logits, shifted)
        p = torch.exp(logits - m).bfloat16()
        total = p.float().sum(dim=3, keepdim=True)
        out = ((p @ v).float() / total).bfloat16()
        ctx.save_for_backward(q, k, v, out, m + total.log())
        ctx.scale, ctx.hidden = scale, hidden
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, out, lse = ctx.saved_tensors
        logits = ((q @ k.transpose(2, 3)).float() * ctx.scale).masked_fill(ctx.hidden, -torch.inf)
        p = torch.exp(logits - lse)
        delta = (d_out.float() * out.float()).sum(dim=3, keepdim=True)
        d_logits = (p * ((d_out @ v.transpose(2, 3)).float() - delta)).bfloat16()
        d_v = p.bfloat16().transpose(2, 3) @ d_out
        return (d_logits @ k).float() * ctx.scale, (d_logits.transpose(2, 3) @ q).float() * ctx.scale, d_v, None, None


def flash(q, k, v, shifted=False, scale=None):
    """Causal attention of q, k and v ``(batch, heads, tokens, d)``, in BF16; fewer KV heads are shared by query heads."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.bfloat16() for x in (q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)))
    return _Flash.apply(q, k, v, q.shape[3] ** -0.5 if scale is None else scale, shifted)
