"""The kernels' arithmetic in plain PyTorch, forward and backward, on any device."""

import torch

from ._casts import E4M3, P_SCALE, cast_all, hidden


class Emulated:
    """Slow: for tests, and for shapes that no kernel takes. P is rounded as the accumulator of P V has it; sums are f32."""

    name, per_tensor = "emulated", False

    def forward(self, q, k, v, descales, causal, scale, words=None, accumulator="fp8-256", save=False):
        operands = cast_all(q, k, v, descales, words)
        q8, k8, v8 = _heads(*operands)
        q_descale, k_descale, v_descale = _by_query_head(descales, q8.shape[1])
        logits = _logits(q8, k8, q_descale * k_descale * scale, causal)
        top = logits.amax(dim=3, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
        weights = torch.exp(logits - top)
        total = weights.sum(dim=3, keepdim=True)
        weights = (weights * P_SCALE).to(torch.float16 if accumulator == "f16" else E4M3).float()
        out = (weights @ v8) * (v_descale / P_SCALE)
        out = torch.where(total > 0, out / total, 0.0).transpose(1, 2).to(torch.bfloat16)
        return out, (top + total.log()).squeeze(3), operands

    def backward(self, grad, operands, descales, out, lse, causal, scale):
        """Gradients of q, k and v before their casts, for the output's; f32. delta is the sum of P dP."""
        group = operands[0].shape[2] // operands[1].shape[2]
        q8, k8, v8 = _heads(*operands)
        q_descale, k_descale, v_descale = _by_query_head(descales, q8.shape[1])
        grad = grad.float().transpose(1, 2)
        logits = _logits(q8, k8, q_descale * k_descale * scale, causal)
        # A row that sees no key has no softmax, and an LSE of -inf.
        weights = torch.where((lse == -torch.inf)[..., None], 0.0, torch.exp(logits - lse[..., None]))
        products = (grad @ v8.transpose(2, 3)) * v_descale
        scores = weights * (products - (weights * products).sum(dim=3, keepdim=True)) * scale
        grads = (
            scores @ k8 * k_descale,
            scores.transpose(2, 3) @ q8 * q_descale,
            weights.transpose(2, 3) @ grad,
        )
        fold = lambda g: g.unflatten(1, (-1, group)).sum(dim=2)
        return tuple(g.transpose(1, 2) for g in (grads[0], fold(grads[1]), fold(grads[2])))


def _heads(q8, k8, v8):
    """``(batch, heads, seq, d_head)`` in f32, KV heads repeated for the query heads of their group."""
    group = q8.shape[2] // k8.shape[2]
    every = lambda x: x.float().repeat_interleave(group, dim=2)
    return tuple(x.transpose(1, 2) for x in (q8.float(), every(k8), every(v8)))


def _by_query_head(descales, heads):
    return tuple(d.repeat_interleave(heads // d.shape[1], dim=1)[:, :, None, None] for d in descales[:3])


def _logits(q8, k8, factor, causal):
    logits = (q8 @ k8.transpose(2, 3)) * factor
    if causal:
        logits = logits.masked_fill(hidden(logits.shape[2], logits.shape[3], logits.device), float("-inf"))
    return logits
