"""FP8 attention by a plan, with gradients.

Forward: q, k, v are cast to E4M3 by the plan's descales and go through the chosen backend. Backward: BF16, on the
dequantised E4M3 operands and with the forward's log-sum-exp, so that ``exp(S - LSE)`` is the softmax that the forward had
and its rows sum to one; gradients pass through the casts unchanged (straight-through).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .._arguments import positive
from .._errors import ArgumentError, MismatchError, UnsupportedError
from . import _backends
from ._runtime import LayerPlan, Runtime, plan_of_module

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


# Addresses and streams are read here: a compiled model leaves its graph for the call.
@torch.compiler.disable
def attention(q, k, v, plan, *, causal=True, softmax_scale=None, backend=None, return_lse=False):
    """FP8 attention of one layer: ``(batch, seq, heads, d_head)`` in and out, differentiable.

    ``q``, ``k``, ``v``: bfloat16, float16 or float32, of one type (autocast makes them so), any strides with channels
    together; query heads a multiple of KV heads. ``plan`` is a layer of a :class:`Runtime`, or three descales f32
    ``(batch, n_kv_heads)`` or ``(n_kv_heads,)`` of q, k, v. Causal masks are aligned to the last query and the last key.
    ``softmax_scale``: by default the plan's, or ``d_head ** -0.5``. ``backend``: by default the runtime's.

    Returns the output in bfloat16, and with ``return_lse`` also the log-sum-exp of each row's logits, f32
    ``(batch, n_q_heads, seq)`` in nats, not differentiable. Raises :class:`ArgumentError` and :class:`MismatchError` for
    operands that do not fit, :class:`UnsupportedError` for what the backend does not offer.

    ``q`` is what the model multiplies with ``k``: rotated, normalised, and with its factor where queries grow with the
    position (Llama 4, Ministral 3), which Hugging Face's modules apply ahead of their attention call. Such layers take as many
    keys as the config has positions.
    """
    q, k, v = _lowered(q, k, v)
    _check(q, k, v)
    batch, n_kv = k.shape[0], k.shape[2]
    words = None
    if isinstance(plan, LayerPlan):
        if (plan.n_q_heads, plan.n_kv_heads, plan.d_head) != (q.shape[2], n_kv, q.shape[3]):
            raise MismatchError(
                f"the plan of {plan.name} has {plan.n_q_heads} query and {plan.n_kv_heads} KV heads of {plan.d_head}; the call "
                f"has {q.shape[2]} and {n_kv} of {q.shape[3]}"
            )
        if plan.positions is not None and k.shape[1] > plan.positions:
            raise MismatchError(
                f"the call has {k.shape[1]} keys, and queries of {plan.name} grow with the position: its descales are bounds for "
                f"{plan.positions}"
            )
        if q.device != plan.words.device:
            raise ArgumentError(
                f"q is on {q.device} and the plan of {plan.name} on {plan.words.device}: move q, k and v there"
            )
        words, scale = plan.words, plan.softmax_scale
        name = backend or plan.runtime.backend
        descales = _current(q, k, v) if plan.per_call else tuple(d.expand(batch, -1) for d in plan._descales)
    else:
        if not isinstance(plan, Sequence | torch.Tensor) or len(plan) != 3:
            raise TypeError(f"plan must be a layer of a Runtime or the three descales of q, k and v, not {plan!r}")
        scale, name = q.shape[3] ** -0.5, backend or "auto"
        descales = tuple(_row(d, key, batch, n_kv, q.device) for key, d in zip("qkv", plan))
    if softmax_scale is not None:
        scale = positive("softmax_scale", softmax_scale)
    chosen = _backends.choose(name, q)
    with torch.autocast(q.device.type, enabled=False):
        out, lse = _Fp8Attention.apply(q, k, v, descales, words, bool(causal), float(scale), chosen)
    return (out, lse) if return_lse else out


def _lowered(*tensors):
    """Under autocast its type, as PyTorch's own attention takes it."""
    kinds = {x.device.type for x in tensors if isinstance(x, torch.Tensor)}
    if len(kinds) != 1 or not torch.is_autocast_enabled(*kinds):
        return tensors
    dtype = torch.get_autocast_dtype(*kinds)
    lower = lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype in (*_DTYPES, dtype) else x
    return tuple(lower(x) for x in tensors)


def _check(q, k, v):
    for name, x in [("q", q), ("k", k), ("v", v)]:
        if not isinstance(x, torch.Tensor) or x.dim() != 4:
            shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise ArgumentError(f"{name} must be (batch, seq, heads, d_head), not {shape}")
        if 0 in x.shape:
            raise ArgumentError(f"{name} has shape {tuple(x.shape)}: there is nothing to attend to or from")
        if x.dtype not in _DTYPES:
            raise ArgumentError(f"{name} has type {x.dtype}: give it as bfloat16, float16 or float32, it is cast here")
        if x.stride(3) != 1:
            raise ArgumentError(f"{name} has stride {x.stride(3)} between channels of a head: call .contiguous() on it")
        if x.device != q.device:
            raise ArgumentError(f"{name} is on {x.device} and q on {q.device}: move them to one device")
        if x.dtype != q.dtype:
            raise ArgumentError(f"{name} has type {x.dtype} and q {q.dtype}: cast them to one type")
    if k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise MismatchError(
            f"q, k and v have shapes {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}, which do not fit"
        )
    if q.shape[2] % k.shape[2]:
        raise MismatchError(f"{q.shape[2]} query heads are no multiple of {k.shape[2]} KV heads")


def _row(descale, key, batch, n_kv, device):
    if not isinstance(descale, torch.Tensor):
        raise TypeError(f"the {key} descale must be a tensor, not {type(descale).__name__}")
    if descale.shape not in ((n_kv,), (batch, n_kv)):
        raise MismatchError(
            f"the {key} descale has shape {tuple(descale.shape)}: ({n_kv},) or ({batch}, {n_kv}) is needed"
        )
    if descale.dtype != torch.float32 or descale.device != device:
        raise ArgumentError(f"the {key} descale is {descale.dtype} on {descale.device}: float32 on {device} is needed")
    return descale.expand(batch, -1)


def _current(q, k, v):
    """Descales from this call's own maxima, one a tensor."""
    # One ulp up, else the division can put the maximum itself past 448.
    one = lambda x: (x.detach().abs().amax().float() * ((1 + 2**-22) / 448.0)).clamp_min(
        torch.finfo(torch.float32).tiny
    )
    rows = [one(x).expand(k.shape[0], k.shape[2]) for x in (q, k, v)]
    return (*rows, 2 * rows[2])


class _Fp8Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, descales, words, causal, scale, backend):
        if backend.per_tensor:
            descales = tuple(d.amax().expand_as(d) for d in descales)
        out, lse = backend.forward(q, k, v, descales, causal, scale, words)
        ctx.save_for_backward(q, k, v, out, lse, *descales[:3])
        ctx.causal, ctx.scale = causal, scale
        ctx.mark_non_differentiable(lse)
        return out, lse

    # The casts are no functions that could be differentiated again.
    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        q, k, v, out, lse, *descales = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            operands = [_backends.dequantised(x, d) for x, d in zip((q, k, v), descales)]
            run = _fused_backward if q.is_cuda and q.shape[1] == k.shape[1] else plain_backward
            grads = run(grad, *operands, out, lse, ctx.causal, ctx.scale)
        # PyTorch gives them the types of q, k and v.
        return (*grads, None, None, None, None, None)


def _fused_backward(grad, q, k, v, out, lse, causal, scale):
    """FlashAttention-2's backward, as PyTorch carries it."""
    group = q.shape[2] // k.shape[2]
    expand = lambda x: x.repeat_interleave(group, dim=2) if group > 1 else x
    heads = lambda x: x.transpose(1, 2)
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        heads(grad.to(torch.bfloat16)),
        heads(q),
        heads(expand(k)),
        heads(expand(v)),
        heads(out),
        lse.contiguous(),
        None,
        None,
        q.shape[1],
        k.shape[1],
        0.0,
        causal,
        seed,
        seed,
        scale=scale,
    )
    q_grad, k_grad, v_grad = (heads(g) for g in grads)
    if group > 1:
        fold = lambda g: g.unflatten(2, (k.shape[2], group)).float().sum(dim=3)
        k_grad, v_grad = fold(k_grad), fold(v_grad)
    return q_grad, k_grad, v_grad


def plain_backward(grad, q, k, v, out, lse, causal, scale):
    """The same in plain f32: dV = P^T dO, dS = P (dO V^T - rowsum(dO O)), dQ = tau dS K, dK = tau dS^T Q."""
    group = q.shape[2] // k.shape[2]
    heads = lambda x: x.float().transpose(1, 2)
    expand = lambda x: heads(x).repeat_interleave(group, dim=1)
    grad, out, q, k, v = heads(grad), heads(out), heads(q), expand(k), expand(v)
    logits = (q @ k.transpose(2, 3)) * scale
    if causal:
        logits = logits.masked_fill(_backends.hidden(logits.shape[2], logits.shape[3], logits.device), float("-inf"))
    # A row that sees no key has no softmax, and an LSE of -inf.
    weights = torch.where(torch.isfinite(lse)[..., None], torch.exp(logits - lse[..., None]), 0.0)
    v_grad = weights.transpose(2, 3) @ grad
    scores = weights * (grad @ v.transpose(2, 3) - (grad * out).sum(dim=3, keepdim=True)) * scale
    q_grad, k_grad = scores @ k, scores.transpose(2, 3) @ q
    fold = lambda g: g.unflatten(1, (-1, group)).sum(dim=2)
    return (x.transpose(1, 2) for x in (q_grad, fold(k_grad), fold(v_grad)))


def scaled_dot_product_attention(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    *,
    plan,
    backend=None,
):
    """``torch.nn.functional.scaled_dot_product_attention`` in FP8: its arguments and layout ``(batch, heads, seq, d_head)``,
    and a ``plan`` as for :func:`attention`. The output has the type of ``query``.

    Masks and dropout are refused by an :class:`UnsupportedError`, since no FP8 kernel takes them.
    """
    _refuse(attn_mask, dropout_p)
    for name, x in [("query", query), ("key", key), ("value", value)]:
        if not isinstance(x, torch.Tensor) or x.dim() != 4:
            shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise ArgumentError(f"{name} must be (batch, heads, seq, d_head), not {shape}")
    if key.shape[1] != query.shape[1] and not enable_gqa:
        raise ArgumentError(f"{query.shape[1]} query and {key.shape[1]} key heads: set enable_gqa=True")
    if is_causal and query.shape[2] != key.shape[2]:
        raise UnsupportedError(
            "is_causal with unequal lengths aligns to the first key in PyTorch and to the last here: use sigmascale.torch.attention"
        )
    heads = lambda x: x.transpose(1, 2)
    out = attention(
        heads(query), heads(key), heads(value), plan, causal=is_causal, softmax_scale=scale, backend=backend
    )
    return out.transpose(1, 2).to(query.dtype)


def _refuse(mask, dropout):
    if mask is not None:
        raise UnsupportedError(
            "FP8 kernels take no attention mask: use batches without padding, or keep this layer in BF16"
        )
    if dropout:
        raise UnsupportedError(f"dropout {dropout}: FP8 kernels have none, set attention dropout to 0")


class patched:
    """``with patched(runtime):`` sends ``F.scaled_dot_product_attention`` of the runtime's modules through FP8.

    For plain modules that call it by that name: while one of the runtime's attention modules runs, its calls use its plan;
    all others are left alone. It replaces a function of the whole process, so one thread at a time.
    """

    def __init__(self, runtime):
        if not isinstance(runtime, Runtime):
            raise TypeError(f"runtime must be what attach() returned, not {type(runtime).__name__}")
        self._runtime, self._stack, self._hooks = runtime, [], []

    def __enter__(self):
        if self._hooks:
            raise ArgumentError("this patched() is in use: make another one")
        if not self._runtime._modules:
            raise ArgumentError("the layers of this runtime name no modules: give layers=[Layer(..., module=...)]")
        for module, plan in self._runtime._modules.items():
            self._hooks.append(module.register_forward_pre_hook(lambda *_, plan=plan: self._stack.append(plan)))
            self._hooks.append(module.register_forward_hook(lambda *_: self._stack.pop() and None, always_call=True))
        self._original = original = F.scaled_dot_product_attention

        def replaced(query, key, value, *args, **kwargs):
            if not self._stack:
                return original(query, key, value, *args, **kwargs)
            return scaled_dot_product_attention(query, key, value, *args, **kwargs, plan=self._stack[-1])

        F.scaled_dot_product_attention = replaced
        return self._runtime

    def __exit__(self, *_):
        F.scaled_dot_product_attention = self._original
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._stack = [], []


def hugging_face(module, query, key, value, attention_mask, scaling=None, dropout=0.0, is_causal=None, **kwargs):
    """The function behind ``attn_implementation="sigmascale_fp8"``."""
    plan = plan_of_module(module)
    _refuse(attention_mask, dropout)
    for setting in ("softcap", "sinks", "s_aux", "position_bias"):
        if kwargs.get(setting) is not None:
            raise UnsupportedError(f"{setting} is not offered in FP8: load the model with another attn_implementation")
    window = kwargs.get("sliding_window")
    if window and key.shape[2] > window:
        raise UnsupportedError(f"a sliding window of {window} is not offered in FP8 for {key.shape[2]} keys")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    out = attention(
        *(x.transpose(1, 2) for x in (query, key, value)),
        plan,
        causal=causal and query.shape[2] > 1,
        softmax_scale=scaling,
    )
    return out.to(query.dtype), None


def register(name="sigmascale_fp8"):
    """Makes ``attn_implementation=name`` known to Hugging Face transformers, and returns the name.

    Then ``model.set_attn_implementation(name)`` sends every attention layer of an attached model through FP8. Raises
    :class:`UnsupportedError` if transformers is not there or too old.
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    except ImportError as error:
        raise UnsupportedError("transformers 4.53 or later is needed for its AttentionInterface") from error
    AttentionInterface.register(name, hugging_face)
    # No mask where a causal flag says the same.
    AttentionMaskInterface.register(name, sdpa_mask)
    return name
