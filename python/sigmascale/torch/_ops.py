"""The operators ``sigmascale::attention`` and ``sigmascale::attention_backward``, as PyTorch's compiler, exporter and
checkpoints see them.

Addresses and streams are read inside them alone. ``attention`` returns the output and the log-sum-exp. With ``save``
it also returns q, k and v in E4M3, which are saved for the backward. They are uint8 tensors, since PyTorch lacks some
operations on float8. For ``dq_fp8`` it also returns the logarithm of each row's largest P, for ``stabilise`` what the
rounding of the output took, and with ``report`` the telemetry of the call, else empty tensors. It writes into none of
its arguments: a checkpoint in compiled code would keep such an argument until the backward, and autograd refuses it
there once another call has written into it. ``report`` takes the telemetry of a call into that of a layer, and leaves
zeros. Gradients pass through the casts unchanged (straight-through); those of the sinks are empty where there are none.

Windows are -1 where there is none, ``soft_cap`` 0.0; of starts and ends of sequences there are all four or none.
``label`` says whose call it is (:mod:`_calls`).
"""

import contextlib

import torch
from torch.autograd.function import once_differentiable

from .._errors import UnsupportedError
from . import _backends, _calls, _distributed, _results
from ._casts import E4M3
from ._terms import Sequences, Terms

_DESCALES = "Tensor q_descale, Tensor k_descale, Tensor v_descale"
_TERMS = (
    "Tensor? sinks, Tensor? q_starts, Tensor? q_ends, Tensor? k_starts, Tensor? k_ends, SymInt max_len_q, SymInt max_len_k, "
    "bool causal, int window_left, int window_right, float scale, float soft_cap, str backend, str accumulator, "
    "bool dq_fp8, bool stabilise, Tensor? label"
)

# Kept for the life of the process: the operators go with it.
_LIBRARY = torch.library.Library("sigmascale", "FRAGMENT")
_LIBRARY.define(
    f"attention(Tensor q, Tensor k, Tensor v, {_DESCALES}, Tensor? o_descale, bool report, {_TERMS}, bool save) "
    "-> (Tensor out, Tensor lse, Tensor q8, Tensor k8, Tensor v8, Tensor row_max, Tensor residual, Tensor words)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    f"attention_backward(Tensor grad, Tensor q8, Tensor k8, Tensor v8, Tensor? row_max, Tensor? residual, {_DESCALES}, "
    f"Tensor out, Tensor lse, {_TERMS}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor d_sinks)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# An operator without a result: a checkpoint policy that saves all results has none to keep.
_LIBRARY.define("report(Tensor(a!) words, Tensor(b!) called, int n_q) -> ()", tags=(torch.Tag.pt2_compliant_tag,))


def arguments(terms, backend, accumulator, label=None, dq_fp8=False, stabilise=False):
    """``terms`` as the operators take them."""
    sequences, where = terms.sequences, (None, None, None, None, 0, 0)
    if sequences is not None:
        where = (*sequences.places, sequences.max_len_q, sequences.max_len_k)
    how = terms.causal, *terms.window, terms.scale, terms.soft_cap or 0.0, backend, accumulator, dq_fp8, stabilise, label
    return (terms.sinks, *where, *how)


def _terms(sinks, q_starts, q_ends, k_starts, k_ends, max_len_q, max_len_k, causal, left, right, scale, soft_cap):
    sequences = None
    if q_starts is not None:
        sequences = Sequences(q_starts, q_ends, k_starts, k_ends, max_len_q, max_len_k)
    return Terms(causal, scale, (left, right), soft_cap or None, sinks, sequences)


def _in_full(chosen, device):
    """Autocast lowers no product of a backend that is written in PyTorch."""
    return contextlib.nullcontext() if chosen.name == "native" else torch.autocast(device.type, enabled=False)


def _of_backend(chosen, descales):
    return tuple(d.amax().expand_as(d) for d in descales) if chosen.per_tensor else descales


def _attention(q, k, v, q_descale, k_descale, v_descale, o_descale, report, *how):
    words = _words(q, k, report).zero_()
    given = q_descale, k_descale, v_descale, o_descale, words if report else None
    return (*_forward(q, k, v, *given, *how), words)


def _words(q, k, report):
    """Room for the telemetry of a call."""
    return q.new_empty((2 * (q.shape[2] + k.shape[2]) if report else 0, 4), dtype=torch.int32)


def _report(words, called, n_q):
    _results.add(words, called, n_q)
    # A selective checkpoint that keeps the telemetry of a call hands it out again when it recomputes, and a call counts
    # once. By `data`: the checkpoint refuses what autograd knows to be changed.
    called.data.zero_()


def _forward(q, k, v, q_descale, k_descale, v_descale, o_descale, words, *how, rope=None):
    *terms, backend, accumulator, dq_fp8, stabilise, label, save = how
    _distributed.refuse_context_parallel()
    terms = _terms(*terms)
    chosen = _backends.choose(backend, q, v, terms)
    if dq_fp8 and save and chosen.name != "native":
        raise UnsupportedError(f"dq_fp8 is for this package's kernels, and {chosen.name} takes this call: leave it out")
    if stabilise and save and chosen.name not in ("native", "emulated"):
        raise UnsupportedError(f"stabilise is for this package's kernels, and {chosen.name} takes this call: leave it out")
    row_max, residual = _row_max(q, dq_fp8 and save), _residual(q, v, stabilise and save)
    kept = {"row_max": row_max} if row_max.numel() else {}
    if residual.numel():
        kept["residual"] = residual
    if rope is not None:
        kept["rope"] = rope
    given = (q_descale, k_descale, v_descale) + (() if o_descale is None else (o_descale,))
    with _in_full(chosen, q.device):
        descales = _of_backend(chosen, given)
        out, lse, operands = chosen.forward(q, k, v, descales, terms, words, accumulator, save, **kept)
    out, lse = out.contiguous(), lse.contiguous()
    layer = _calls.layer_of(label)
    _calls.count(layer, chosen.name, _backends.reason(backend, chosen.name, q.shape[3], q.is_cuda))
    _calls.saw(layer, q, k, v, lse, save, words is not None)
    saved = (x.contiguous().view(torch.uint8) if save else x.new_empty(0, dtype=torch.uint8) for x in operands)
    return (out, lse, *saved, row_max, residual)


def _row_max(q, wanted):
    """Room for the rows' largest P. The CPU computes them again, and q in E4M3 gets no gradient."""
    batch, length, heads, _ = q.shape
    wanted = wanted and not q.is_cpu and q.dtype != E4M3
    return q.new_empty((batch, heads, length) if wanted else (0,), dtype=torch.float32)


def _residual(q, v, wanted):
    """Room for what the rounding of the output takes. q in E4M3 gets no gradient."""
    return q.new_empty((*q.shape[:3], v.shape[3]) if wanted and q.dtype != E4M3 else (0,), dtype=torch.bfloat16)


def _forward_shapes(q, k, v, q_descale, k_descale, v_descale, o_descale, report, *how):
    out = q.new_empty((*q.shape[:3], v.shape[3]), dtype=torch.bfloat16)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    saved = (x.new_empty(x.shape if how[-1] else (0,), dtype=torch.uint8) for x in (q, k, v))
    kept = _row_max(q, how[-4] and how[-1]), _residual(q, v, how[-3] and how[-1])
    return (out, lse, *saved, *kept, _words(q, k, report))


def _backward(grad, q8, k8, v8, row_max, residual, q_descale, k_descale, v_descale, out, lse, *how):
    *terms, backend, accumulator, dq_fp8, stabilise, _ = how
    row_max, residual = row_max if dq_fp8 else None, residual if stabilise else None
    terms, operands = _terms(*terms), [x.view(E4M3) for x in (q8, k8, v8)]
    chosen = _backends.choose(backend, operands[0], operands[2], terms)
    with _in_full(chosen, grad.device):
        descales = _of_backend(chosen, (q_descale, k_descale, v_descale))
        _calls.saw_backward(lse, grad, operands, descales, out, terms, residual)
        kept = {"row_max": row_max, "residual": residual}
        *grads, d_sinks = _backends.backward(grad, operands, descales, out, lse, terms, chosen, accumulator, **kept)
    if d_sinks is None:
        d_sinks = grad.new_empty(0, dtype=torch.float32)
    return (*(g.to(torch.bfloat16).contiguous() for g in grads), d_sinks)


def _backward_shapes(grad, q8, k8, v8, row_max, residual, q_descale, k_descale, v_descale, out, lse, sinks, *_):
    grads = (x.new_empty(x.shape, dtype=torch.bfloat16) for x in (q8, k8, v8))
    return (*grads, grad.new_empty(0 if sinks is None else sinks.shape, dtype=torch.float32))


class _Differentiable(torch.autograd.Function):
    """``rest``: the arguments behind v, among which the sinks stand again."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, rest, direct, rope):
        if direct:
            result = _forward(q, k, v, *rest, rope=rope)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                result = attention(q, k, v, *rest)
        out, lse, *operands, row_max, residual = result[:7]
        if rest[-1]:
            # Sinks and places are tensors.
            row_max, residual = row_max if rest[-4] else None, residual if rest[-3] else None
            ctx.save_for_backward(*operands, row_max, residual, *rest[:3], out, lse, *rest[_SINKS : _SINKS + 5])
        ctx.how, ctx.direct, ctx.types = (*rest[_SINKS + 5 : -2], None), direct, (q.dtype, k.dtype, v.dtype)
        ctx.mark_non_differentiable(*result[1:])
        ctx.set_materialize_grads(False)
        return result

    # The casts are no functions that could be differentiated again.
    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_):
        if grad is None:
            return (None,) * 7
        # Read once: checkpoints compute them again each time.
        saved = ctx.saved_tensors
        if not saved:
            raise RuntimeError("sigmascale::attention with save=False keeps nothing for a backward: pass save=True")
        run = _backward if ctx.direct and plain(grad) else attention_backward
        *grads, d_sinks = run(grad, *saved, *ctx.how)
        sinks = saved[10]
        d_sinks = None if sinks is None else d_sinks.to(sinks.dtype)
        return (*(g.to(t) for g, t in zip(grads, ctx.types)), d_sinks, None, None, None)


def _differentiable(q, k, v, *rest):
    tensors = q, k, v, rest[_SINKS]
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return _Differentiable.apply(*tensors, rest, False, None)
    with torch._C._AutoDispatchBelowAutograd():
        return attention(q, k, v, *rest)


def plain(*tensors):
    """Whether nobody looks on: no compiler, exporter, checkpoint policy, transform or subclass."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and all(type(x) in _PLAIN for x in tensors)
    )


def run(q, k, v, *rest, rope=None):
    """The operator ``attention``, whose telemetry is taken into ``words``, the argument in place of ``report``. Where
    nobody looks on it goes without PyTorch's dispatcher, which costs more than the call. ``rope`` is for such calls of
    this package's kernels."""
    if not plain(q, k, v):
        words = rest[_WORDS]
        *result, reported = attention(q, k, v, *rest[:_WORDS], words is not None, *rest[_WORDS + 1 :])
        if words is not None:
            # Compiled code fuses what it sees.
            add = _results.add if torch.compiler.is_compiling() else torch.ops.sigmascale.report
            add(words, reported, q.shape[2])
        return result
    sinks = rest[_SINKS]
    if rest[-1]:
        return _Differentiable.apply(q, k, v, sinks, rest, True, rope)
    return _forward(q, k, v, *rest, rope=rope)


_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Where the words and the sinks stand among the arguments behind v.
_WORDS, _SINKS = 4, 5

_LIBRARY.impl("attention", _attention, "CompositeExplicitAutograd")
_LIBRARY.impl("attention", _differentiable, "Autograd")
_LIBRARY.impl("attention_backward", _backward, "CompositeExplicitAutograd")
_LIBRARY.impl("report", _report, "CompositeExplicitAutograd")
torch.library.register_fake("sigmascale::attention", _forward_shapes, lib=_LIBRARY)
torch.library.register_fake("sigmascale::attention_backward", _backward_shapes, lib=_LIBRARY)
torch.library.register_fake("sigmascale::report", lambda *_: None, lib=_LIBRARY)

attention = torch.ops.sigmascale.attention.default
attention_backward = torch.ops.sigmascale.attention_backward.default
