"""The operators ``sigmascale::attention`` and ``sigmascale::attention_backward``, as PyTorch's compiler, exporter and
checkpoints see them.

Addresses and streams are read inside them alone. ``attention`` writes telemetry into ``words`` and returns the output and the
log-sum-exp. With ``save`` it also returns q, k and v in E4M3, which are saved for the backward. They are uint8 tensors, since
PyTorch lacks some operations on float8. Gradients pass through the casts unchanged (straight-through).
"""

import torch
from torch.autograd.function import once_differentiable

from . import _backends, _calls
from ._casts import E4M3

_TENSORS = "Tensor q_descale, Tensor k_descale, Tensor v_descale"
_HOW = "bool causal, float scale, str backend, str accumulator"

# Kept for the life of the process: the operators go with it.
_LIBRARY = torch.library.Library("sigmascale", "FRAGMENT")
_LIBRARY.define(
    f"attention(Tensor q, Tensor k, Tensor v, {_TENSORS}, Tensor? o_descale, Tensor(a!)? words, {_HOW}, bool save) "
    "-> (Tensor out, Tensor lse, Tensor q8, Tensor k8, Tensor v8)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    f"attention_backward(Tensor grad, Tensor q8, Tensor k8, Tensor v8, {_TENSORS}, Tensor out, Tensor lse, {_HOW}) "
    "-> (Tensor dq, Tensor dk, Tensor dv)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _plain(device):
    """Autocast lowers no product in here."""
    return torch.autocast(device.type, enabled=False)


def _of_backend(chosen, descales):
    return tuple(d.amax().expand_as(d) for d in descales) if chosen.per_tensor else descales


def _forward(q, k, v, q_descale, k_descale, v_descale, o_descale, words, causal, scale, backend, accumulator, save):
    chosen = _backends.choose(backend, q)
    given = (q_descale, k_descale, v_descale) + (() if o_descale is None else (o_descale,))
    with _plain(q.device):
        descales = _of_backend(chosen, given)
        out, lse, operands = chosen.forward(q, k, v, descales, causal, scale, words, accumulator, save)
    _calls.count(words, chosen.name)
    saved = (x.contiguous().view(torch.uint8) if save else x.new_empty(0, dtype=torch.uint8) for x in operands)
    return (out.contiguous(), lse.contiguous(), *saved)


def _forward_shapes(
    q, k, v, q_descale, k_descale, v_descale, o_descale, words, causal, scale, backend, accumulator, save
):
    out = q.new_empty(q.shape, dtype=torch.bfloat16)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    return (out, lse, *(x.new_empty(x.shape if save else (0,), dtype=torch.uint8) for x in (q, k, v)))


def _backward(grad, q8, k8, v8, q_descale, k_descale, v_descale, out, lse, causal, scale, backend, accumulator):
    chosen, operands = _backends.choose(backend, q8), [x.view(E4M3) for x in (q8, k8, v8)]
    with _plain(grad.device):
        descales = _of_backend(chosen, (q_descale, k_descale, v_descale))
        grads = _backends.backward(grad, operands, descales, out, lse, causal, scale, chosen, accumulator)
    return tuple(g.to(torch.bfloat16).contiguous() for g in grads)


def _backward_shapes(grad, q8, k8, v8, *_):
    return tuple(x.new_empty(x.shape, dtype=torch.bfloat16) for x in (q8, k8, v8))


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, q_descale, k_descale, v_descale, o_descale, words, *how):
        with torch._C._AutoDispatchBelowAutograd():
            result = attention(q, k, v, q_descale, k_descale, v_descale, o_descale, words, *how)
        out, lse, *operands = result
        *ctx.how, save = how
        if save:
            ctx.save_for_backward(*operands, q_descale, k_descale, v_descale, out, lse)
        ctx.types = [x.dtype for x in (q, k, v)]
        ctx.mark_non_differentiable(lse, *operands)
        ctx.set_materialize_grads(False)
        return result

    # The casts are no functions that could be differentiated again.
    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_):
        grads, saved = (None, None, None), ctx.saved_tensors
        if grad is not None:
            if not saved:
                raise RuntimeError("sigmascale::attention with save=False keeps nothing for a backward: pass save=True")
            grads = (g.to(t) for g, t in zip(attention_backward(grad, *saved, *ctx.how), ctx.types))
        return (*grads, *(None,) * 10)


def _differentiable(*arguments):
    if torch.is_grad_enabled() and any(x.requires_grad for x in arguments[:3]):
        return _Differentiable.apply(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return attention(*arguments)


_LIBRARY.impl("attention", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("attention", _differentiable, "Autograd")
_LIBRARY.impl("attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("sigmascale::attention", _forward_shapes, lib=_LIBRARY)
torch.library.register_fake("sigmascale::attention_backward", _backward_shapes, lib=_LIBRARY)

attention = torch.ops.sigmascale.attention.default
attention_backward = torch.ops.sigmascale.attention_backward.default
