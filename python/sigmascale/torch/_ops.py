"""The operators ``sigmascale::attention`` and ``sigmascale::attention_backward``, as PyTorch's compiler, exporter and
checkpoints see them.

Addresses and streams are read inside them alone. What a call computes is listed in :class:`Terms`; both operators take it
flat, after their tensors. ``attention`` returns the output, the log-sum-exp, what a backward needs (:class:`Kept`) as
``terms.keeps`` says, and with ``report`` the telemetry of the call; what is not kept is an empty tensor. It writes into none
of its arguments: a checkpoint in compiled code would keep such an argument until the backward, and autograd refuses it there
once another call has written into it. ``report`` takes the telemetry of a call into that of a layer, and leaves zeros.
Gradients pass through the casts unchanged (straight-through); those of the sinks are empty where there are none.

``label`` says whose call it is (:mod:`_calls`).
"""

import contextlib
import functools
from typing import NamedTuple

import torch

from .._errors import UnsupportedError
from . import _backends, _calls, _distributed, _telemetry, _terms
from ._e4m3 import E4M3
from ._terms import Terms


class Kept(NamedTuple):
    """What a forward keeps for a backward, besides its output: q, k and v in E4M3 as uint8, since PyTorch lacks some operations
    on float8; the logarithm of each row's largest P; and what the rounding of the output took."""

    q8: torch.Tensor
    k8: torch.Tensor
    v8: torch.Tensor
    row_max: torch.Tensor
    residual: torch.Tensor


_DESCALES = dict.fromkeys(("q_descale", "k_descale", "v_descale"), "Tensor")
_FORWARD = dict.fromkeys("qkv", "Tensor") | _DESCALES | {"o_descale": "Tensor?"} | _terms.KINDS
_FORWARD |= {"backend": "str", "label": "Tensor?", "report": "bool"}
# Behind the gradient of the output.
_SAVED = {name: "Tensor" if name in ("q8", "k8", "v8") else "Tensor?" for name in Kept._fields} | _DESCALES
_SAVED |= {"out": "Tensor", "lse": "Tensor"} | _terms.KINDS | {"backend": "str"}
_IS_TENSOR = [kind.startswith("Tensor") for kind in _SAVED.values()]
_RESULTS = ("out", "lse", *Kept._fields, "words")


def _schema(name, arguments, results):
    given = ", ".join(f"{kind} {argument}" for argument, kind in arguments.items())
    return f"{name}({given}) -> ({', '.join(f'Tensor {result}' for result in results)})"


# Kept for the life of the process: the operators go with it.
_LIBRARY = torch.library.Library("sigmascale", "FRAGMENT")
_COMPLIANT = (torch.Tag.pt2_compliant_tag,)
_LIBRARY.define(_schema("attention", _FORWARD, _RESULTS), tags=_COMPLIANT)
_LIBRARY.define(
    _schema("attention_backward", {"grad": "Tensor"} | _SAVED, ("dq", "dk", "dv", "d_sinks")), tags=_COMPLIANT
)
# An operator without a result: a checkpoint policy that saves all results has none to keep.
_LIBRARY.define("report(Tensor(a!) words, Tensor(b!) called, int n_q) -> ()", tags=_COMPLIANT)


def _in_full(chosen, device):
    """Autocast lowers no product of a backend that is written in PyTorch."""
    return contextlib.nullcontext() if chosen.name == "native" else torch.autocast(device.type, enabled=False)


def _of_backend(chosen, descales):
    return tuple(d.amax().expand_as(d) for d in descales) if chosen.per_tensor else descales


def _attention(q, k, v, q_descale, k_descale, v_descale, o_descale, *rest):
    *flat, backend, label, report = rest
    words = _words(q, k, report).zero_()
    descales = (q_descale, k_descale, v_descale, o_descale)
    return (*_forward(q, k, v, descales, Terms.of(flat), backend, label, words if report else None), words)


def _words(q, k, report):
    """Room for the telemetry of a call."""
    return q.new_empty((2 * (q.shape[2] + k.shape[2]) if report else 0, 4), dtype=torch.int32)


def _report(words, called, n_q):
    _telemetry.add(words, called, n_q)
    # A selective checkpoint that keeps the telemetry of a call hands it out again when it recomputes, and a call counts
    # once. By `data`: the checkpoint refuses what autograd knows to be changed.
    called.data.zero_()


# The backends that tell what the rounding of the output takes.
_EXACT = ("native", "emulated")


def _forward(q, k, v, descales, terms, backend, label, words, rope=None):
    _distributed.refuse_context_parallel()
    chosen, why = _backends.choose(backend, q, v, terms)
    if terms.keeps == _terms.FP8_DQ and chosen.name != "native":
        raise UnsupportedError(
            f"gradients={terms.keeps!r} is for this package's kernels, and {chosen.name} takes this call: leave it out"
        )
    row_max, residual = _row_max(q, terms), _residual(q, v, terms)
    beside = {"row_max": row_max} if row_max.numel() else {}
    if residual.numel() and chosen.name in _EXACT:
        beside["residual"] = residual
    elif residual.numel():
        # `auto` took a library, whose delta is that of its output.
        residual.zero_()
    if rope is not None:
        beside["rope"] = rope
    with _in_full(chosen, q.device):
        descales = _of_backend(chosen, descales if descales[-1] is not None else descales[:3])
        out, lse, operands = chosen.forward(q, k, v, descales, terms, words, **beside)
    out, lse, keeps = out.contiguous(), lse.contiguous(), terms.keeps != _terms.NOTHING
    _calls.ran(label, chosen.name, why, q, k, v, lse, keeps, words is not None)
    saved = (x.contiguous().view(torch.uint8) if keeps else x.new_empty(0, dtype=torch.uint8) for x in operands)
    return (out, lse, *saved, row_max, residual)


def _row_max(q, terms):
    """Room for the rows' largest P. The CPU computes them again, and q in E4M3 gets no gradient."""
    batch, length, heads, _ = q.shape
    kept = terms.keeps == _terms.FP8_DQ and not q.is_cpu and q.dtype != E4M3
    return q.new_empty((batch, heads, length) if kept else (0,), dtype=torch.float32)


def _residual(q, v, terms):
    """Room for what the rounding of the output takes. q in E4M3 gets no gradient."""
    kept = terms.keeps == _terms.UNROUNDED_DELTA and q.dtype != E4M3
    return q.new_empty((*q.shape[:3], v.shape[3]) if kept else (0,), dtype=torch.int8)


def _forward_shapes(q, k, v, q_descale, k_descale, v_descale, o_descale, *rest):
    *flat, _, _, report = rest
    terms = Terms.of(flat)
    out = q.new_empty((*q.shape[:3], v.shape[3]), dtype=torch.bfloat16)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    keeps = terms.keeps != _terms.NOTHING
    saved = (x.new_empty(x.shape if keeps else (0,), dtype=torch.uint8) for x in (q, k, v))
    return (out, lse, *saved, _row_max(q, terms), _residual(q, v, terms), _words(q, k, report))


def _backward(grad, q8, k8, v8, row_max, residual, q_descale, k_descale, v_descale, out, lse, *rest):
    *flat, backend = rest
    terms, operands = Terms.of(flat), [x.view(E4M3) for x in (q8, k8, v8)]
    row_max, residual = (None if x is None or x.numel() == 0 else x for x in (row_max, residual))
    chosen, _ = _backends.choose(backend, operands[0], operands[2], terms)
    with _in_full(chosen, grad.device):
        descales = _of_backend(chosen, (q_descale, k_descale, v_descale))
        _calls.saw_backward(lse, grad, operands, descales, out, terms, residual)
        *grads, d_sinks = _backends.backward(grad, operands, descales, out, lse, terms, chosen, row_max, residual)
    if d_sinks is None:
        d_sinks = grad.new_empty(0, dtype=torch.float32)
    return (*(g.to(torch.bfloat16).contiguous() for g in grads), d_sinks)


def _backward_shapes(grad, q8, k8, v8, row_max, residual, q_descale, k_descale, v_descale, out, lse, *rest):
    *flat, _ = rest
    sinks = Terms.of(flat).sinks
    grads = (x.new_empty(x.shape, dtype=torch.bfloat16) for x in (q8, k8, v8))
    return (*grads, grad.new_empty(0 if sinks is None else sinks.shape, dtype=torch.float32))


def without_second(backward):
    """Makes gradients of what ``backward`` returns raise an exception: casts are no functions that have any. PyTorch's
    once_differentiable drops them in silence where the gradient of the output needs none, as that of a sum."""

    @functools.wraps(backward)
    def once(ctx, *grads):
        again = torch.is_grad_enabled()
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not again:
            return found
        error = torch._C._functions.DelayedError(
            "FP8 attention has no gradients of gradients: for penalties on gradients, Hessians and the like run the model in BF16, "
            "as by model.set_attn_implementation('sdpa')",
            len(found),
        )
        return error(*(None if x is None else x.detach().requires_grad_() for x in found))

    return once


class _Differentiable(torch.autograd.Function):
    """``sinks`` are those of the terms: autograd follows tensors that it is given as arguments."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, call):
        descales, terms, backend, label, report, rope, ctx.direct = call
        if ctx.direct:
            result = _forward(q, k, v, descales, terms, backend, label, report, rope)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                result = attention(q, k, v, *descales, *terms.flat(), backend, label, report)
        out, lse, *rest = result
        ctx.saves = terms.keeps != _terms.NOTHING
        if ctx.saves:
            kept = (x if x.numel() else None for _, x in zip(Kept._fields, rest))
            saved = *kept, *descales[:3], out, lse, *terms.flat(), backend
            ctx.save_for_backward(*(x for x, tensor in zip(saved, _IS_TENSOR) if tensor))
            ctx.values = [x for x, tensor in zip(saved, _IS_TENSOR) if not tensor]
        ctx.types = q.dtype, k.dtype, v.dtype, None if sinks is None else sinks.dtype
        ctx.mark_non_differentiable(lse, *rest)
        ctx.set_materialize_grads(False)
        return result

    @staticmethod
    @without_second
    def backward(ctx, grad, *_):
        if grad is None:
            return (*(None for _ in ctx.types), None)
        if not ctx.saves:
            raise RuntimeError("sigmascale::attention with keeps='nothing' has no backward: pass keeps='operands'")
        # Read once: checkpoints compute them again each time.
        tensors, values = iter(ctx.saved_tensors), iter(ctx.values)
        saved = [next(tensors if tensor else values) for tensor in _IS_TENSOR]
        run = _backward if ctx.direct and plain(grad) else attention_backward
        return (*(None if t is None else g.to(t) for g, t in zip(run(grad, *saved), ctx.types)), None)


def _differentiable(q, k, v, q_descale, k_descale, v_descale, o_descale, *rest):
    *flat, backend, label, report = rest
    terms, descales = Terms.of(flat), (q_descale, k_descale, v_descale, o_descale)
    tensors = q, k, v, terms.sinks
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return _Differentiable.apply(*tensors, (descales, terms, backend, label, report, None, False))
    with torch._C._AutoDispatchBelowAutograd():
        return attention(q, k, v, *descales, *rest)


def plain(*tensors):
    """Whether nothing observes the call: no compiler, exporter, checkpoint policy, transform or subclass."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and all(type(x) in _PLAIN for x in tensors)
    )


def run(q, k, v, descales, terms, backend, label=None, words=None, rope=None):
    """The operator ``attention``, with its telemetry taken into ``words``; ``descales`` of q, k, v and o, which may be None.
    Where nothing observes the call, it goes without PyTorch's dispatcher, which costs more than the call. ``rope`` is for such calls of
    this package's kernels."""
    if not plain(q, k, v):
        *result, reported = attention(q, k, v, *descales, *terms.flat(), backend, label, words is not None)
        if words is not None:
            # Compiled code fuses what it sees.
            add = _telemetry.add if torch.compiler.is_compiling() else torch.ops.sigmascale.report
            add(words, reported, q.shape[2])
        return result
    if terms.keeps != _terms.NOTHING:
        return _Differentiable.apply(q, k, v, terms.sinks, (descales, terms, backend, label, words, rope, True))
    return _forward(q, k, v, descales, terms, backend, label, words, rope)


_PLAIN = (torch.Tensor, torch.nn.Parameter)

_LIBRARY.impl("attention", _attention, "CompositeExplicitAutograd")
_LIBRARY.impl("attention", _differentiable, "Autograd")
_LIBRARY.impl("attention_backward", _backward, "CompositeExplicitAutograd")
_LIBRARY.impl("report", _report, "CompositeExplicitAutograd")
torch.library.register_fake("sigmascale::attention", _forward_shapes, lib=_LIBRARY)
torch.library.register_fake("sigmascale::attention_backward", _backward_shapes, lib=_LIBRARY)
torch.library.register_fake("sigmascale::report", lambda *_: None, lib=_LIBRARY)

attention = torch.ops.sigmascale.attention.default
attention_backward = torch.ops.sigmascale.attention_backward.default
