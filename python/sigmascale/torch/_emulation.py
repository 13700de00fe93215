"""The kernels' arithmetic in plain PyTorch, forward and backward, on any device."""

import torch

from . import _residual
from ._centers import centered, joined
from ._e4m3 import E4M3, MAX, P_SCALE, cast_all
from ._telemetry import add_logits
from ._terms import seen_rows, within


class Emulated:
    """Slow: for tests, and for shapes that no kernel takes. P is rounded as the accumulator of P V has it; sums are f32."""

    name, per_tensor = "emulated", False

    def forward(self, q, k, v, descales, terms, words=None, residual=None):
        q, k, v = seen_rows(*centered(q, k, v, terms), terms)
        operands = cast_all(q, k, v, descales, words)
        q8, k8, v8 = _heads(*operands)
        factor, v_descale = _factors(descales, q8.shape[1], terms)
        logits, _ = _logits(q8, k8, factor, terms, words)
        top = logits.amax(dim=3, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
        weights = torch.exp(logits - top)
        total = weights.sum(dim=3, keepdim=True)
        lse = top + total.log()
        if terms.sinks is not None:
            lse = torch.logaddexp(lse, terms.sinks.float().view(-1, 1, 1))
            if terms.sequences is not None:
                lse = torch.where(_in_sequence(q8, terms), lse, -torch.inf)
        weights = (weights * P_SCALE).to(torch.float16 if terms.accumulator == "f16" else E4M3).float()
        # Divided by the row sum with the sink in it.
        out = (weights @ v8) * (v_descale / P_SCALE) * torch.exp(top - lse)
        wide = joined(torch.where(total > 0, out, 0.0).transpose(1, 2), lse.squeeze(3), terms)
        out = wide.to(torch.bfloat16)
        if residual is not None:
            residual.copy_(_residual.code(wide, out))
        return out, lse.squeeze(3), operands

    def backward(self, grad, operands, descales, out, lse, terms):
        """Gradients of q, k and v before their casts, and of the sinks, for the output's; f32. delta is the sum of P dP."""
        group = operands[0].shape[2] // operands[1].shape[2]
        q8, k8, v8 = _heads(*operands)
        factor, v_descale = _factors(descales, q8.shape[1], terms)
        q_descale, k_descale, _ = _by_query_head(descales, q8.shape[1])
        if terms.sequences is not None:
            grad = within(grad, terms.sequences.q_starts, terms.sequences.q_ends)
        grad = grad.float().transpose(1, 2)
        logits, slope = _logits(q8, k8, factor, terms)
        # A row that sees no key has no softmax, and an LSE of -inf.
        seen = logits != -torch.inf
        weights = torch.where(seen, torch.exp(logits - torch.where(lse == -torch.inf, 0.0, lse)[..., None]), 0.0)
        products = (grad @ v8.transpose(2, 3)) * v_descale
        delta = (weights * products).sum(dim=3, keepdim=True)
        scores = weights * (products - delta) * terms.scale
        if slope is not None:
            scores = scores * slope
        grads = (
            scores @ k8 * k_descale,
            scores.transpose(2, 3) @ q8 * q_descale,
            weights.transpose(2, 3) @ grad,
        )
        fold = lambda g: g.unflatten(1, (-1, group)).sum(dim=2)
        grads = tuple(g.transpose(1, 2) for g in (grads[0], fold(grads[1]), fold(grads[2])))
        if terms.sinks is None:
            return (*grads, None)
        share = torch.exp(terms.sinks.float().view(-1, 1) - lse)
        share = torch.where(seen.any(dim=3), share, 0.0)
        return (*grads, -(share * delta.squeeze(3)).sum(dim=(0, 2)))


def _in_sequence(q8, terms):
    """``(batch, 1, len_q, 1)``."""
    batch, _, length, _ = q8.shape
    ones = torch.ones(batch, length, 1, 1, dtype=torch.bool, device=q8.device)
    return within(ones, terms.sequences.q_starts, terms.sequences.q_ends).transpose(1, 2)


def _heads(q8, k8, v8):
    """``(batch, heads, seq, d_head)`` in f32, KV heads repeated for the query heads of their group."""
    group = q8.shape[2] // k8.shape[2]
    every = lambda x: x.float().repeat_interleave(group, dim=2)
    return tuple(x.transpose(1, 2) for x in (q8.float(), every(k8), every(v8)))


def _by_query_head(descales, heads):
    return tuple(d.repeat_interleave(heads // d.shape[1], dim=1)[:, :, None, None] for d in descales[:3])


def _factors(descales, heads, terms):
    """What the products q . k and P V are multiplied by."""
    q_descale, k_descale, v_descale = _by_query_head(descales, heads)
    return q_descale * k_descale * terms.scale, v_descale


def _logits(q8, k8, factor, terms, words=None):
    """Logits, ``-inf`` where a key is hidden, and the slope of the soft-cap or None. ``words``: for the statistics of logits in
    E4M3."""
    logits, slope = (q8 @ k8.transpose(2, 3)) * factor, None
    if terms.soft_cap is not None:
        capped = torch.tanh(logits / terms.soft_cap)
        logits, slope = terms.soft_cap * capped, 1 - capped * capped
    visible = terms.visible(q8.shape[0], q8.shape[2], k8.shape[2], q8.device)
    if terms.logit_descale is not None:
        unit = terms.logit_descale.view(-1, 1, 1)
        scaled = logits / unit
        if words is not None:
            seen = torch.ones((), dtype=torch.bool, device=logits.device) if visible is None else visible
            add_logits(words, logits, ((scaled.abs() > MAX) & torch.isfinite(scaled) & seen).sum(dim=(0, 2, 3)), seen)
        logits = scaled.clamp(-MAX, MAX).to(E4M3).float() * unit
    return logits if visible is None else logits.masked_fill(~visible, -torch.inf), slope
