"""FP8 attention by a plan, with gradients.

Forward: q, k, v are cast to E4M3 by the plan's descales and go through the chosen backend. Backward: from the same E4M3
operands, with the forward's log-sum-exp, so that ``exp(S - LSE)`` is the softmax that the forward had and its rows sum
to one; gradients pass through the casts unchanged (straight-through).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch.nn.attention.bias import CausalBias, CausalVariant

from .._arguments import positive
from .._errors import ArgumentError, MismatchError, UnsupportedError
from . import _backends, _calls, _centers, _fallback, _masks, _measured, _ops, _rope
from ._e4m3 import E4M3, dequantised
from ._plan import LayerPlan
from ._terms import FP8_DQ, NOTHING, OPERANDS, ROUNDED_DELTA, UNROUNDED_DELTA, Terms

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._typing import Backend, Centers, Fallback, Gradients, Options, Plan, Rotation

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# How P V is summed where gradients are needed, and where they are not.
_TRAINING, INFERENCE = "f16", "fp8-256"


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> torch.Tensor: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    *,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    backend: Backend | None = None,
    return_lse: bool = False,
    accumulator: str | None = None,
    fallback: Fallback = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    gradients: Gradients = None,
    rope: Rotation | None = None,
    centers: Centers | None = None,
    logits: Literal["e4m3"] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """FP8 attention of one layer: ``(batch, seq, heads, d_head)`` in and out, differentiable.

    ``q``, ``k``, ``v``: bfloat16, float16 or float32, of one type (autocast makes them so), any strides with contiguous
    channels; query heads a multiple of KV heads. float8_e4m3fn tensors must be divided by the descales already, and get
    no gradients. ``plan`` is a layer of a :class:`Runtime`, or three descales f32 ``(batch, n_kv_heads)`` or
    ``(n_kv_heads,)`` of q, k, v. Causal masks are aligned to the last query and the last key. ``softmax_scale``: by
    default the plan's, or ``d_head ** -0.5``. ``backend``: by default the runtime's.

    ``accumulator``: how this package's kernel sums P V: ``"f16"`` (unbiased, the default where gradients are needed, and
    without gradients while the plan's model is in training mode, since a checkpoint may compute the call again) or
    ``"fp8-N"``, promoted to f32 every N keys or more often (the default elsewhere is ``"fp8-256"``). ``fallback``: by default the runtime's; ``"bf16"`` uses PyTorch's attention for calls that no FP8 kernel
    supports, and ``None`` refuses or emulates them.

    ``window``: how many keys before its own and after it a query sees (-1: all). ``softcap``: logits become ``softcap *
    tanh(S / softcap)``. ``sinks``: a logit ``(n_q_heads,)`` that joins the row sum of its head, differentiable too. The
    heads of ``v`` may have another dimension than those of ``q`` and ``k``.

    ``rope``: ``(cosines, sines)`` or a :class:`Rope` by which q and k are rotated first. On a GPU this package's kernels
    do it in the cast, without a pass over q and k, and PyTorch rotates their gradients back. PyTorch rotates q and k
    under the policy ``current``, under ``torch.compile`` and on other backends.

    ``centers``: ``(c, m)``, f32 ``(n_kv_heads, d)`` or None for each: what is subtracted from k, after its rotation, and from v
    before their cast. The result is the same for any values (c is invisible to softmax, m is added to the output) but for
    rounding errors, which are those of ``k - c`` and ``v - m``. By default the plan's. The descales are those of what is cast:
    those of a plan with centers cover it. All parts of a sequence that share a cache need one c. Not with sinks, and c not with a
    soft-cap.

    ``gradients``: how the backward computes dQ. By default its delta is that of the output before the rounding to
    bfloat16, so that a row that sees one key has a dQ of zero and repeated row maxima bias nothing; the forward keeps what
    the rounding took, a byte per element of the output, until the backward. ``"rounded-delta"`` takes the stored output and
    keeps nothing, as other libraries, ``ring_attention`` and other accumulators than ``"f16"`` do in any case. ``"fp8-dq"``
    takes it too, and computes dQ by a product in FP8, for heads of at most 128 on a GPU: a step is about 3 % faster with
    heads of 128, and dQ has an error of 2 to 3 %, more where V's descale is far above what V needs.

    ``logits="e4m3"``: logits are rounded to E4M3 by the plan's logit descales on their way into the softmax, as in the
    spectral-bounds paper; gradients pass through unchanged. ``plan`` is that of a policy with logit bounds, or four descales, the
    fourth f32 ``(n_q_heads,)``. Overflow is counted in ``runtime.stats()``. On a GPU inference runs in this package's kernel,
    and calls with gradients in plain PyTorch, which is slow. By default the plan's ``logits``.

    Returns the output in bfloat16, and with ``return_lse`` also the log-sum-exp of each row's logits, f32 ``(batch,
    n_q_heads, seq)`` in nats, not differentiable. Raises :class:`ArgumentError` and :class:`MismatchError` for operands
    that do not fit, :class:`UnsupportedError` for what the backend does not offer.

    ``q`` is what the model multiplies with ``k``: rotated (or to be, with ``rope``), normalised, and with its factor
    where queries grow with the position (Llama 4, Ministral 3), which Hugging Face's modules apply ahead of their
    attention call. Such layers take as many keys as the config has positions.
    """
    out, lse = attend(
        q,
        k,
        v,
        plan,
        causal=bool(causal),
        softmax_scale=softmax_scale,
        window=pair("window", window),
        softcap=softcap,
        sinks=sinks,
        return_lse=return_lse,
        rope=rope,
        centers=centers,
        how=How(backend, accumulator, fallback, gradients, logits),
    )
    out = out.to(torch.bfloat16)
    return (out, lse) if return_lse else out


@dataclasses.dataclass(frozen=True)
class How:
    """What a caller chose of a call."""

    backend: str | None = None
    accumulator: str | None = None
    fallback: str | None = None
    gradients: str | None = None
    logits: str | None = None
    # Parts that keys are split into; 0: as is fastest.
    splits: int = 0

    def __post_init__(self):
        if isinstance(self.splits, bool) or not isinstance(self.splits, int) or self.splits < 0:
            raise ArgumentError(f"num_splits {self.splits!r} must be a whole number, 0 for as many as are fastest")
        if self.logits not in (None, "e4m3"):
            raise ArgumentError(f"logits {self.logits!r} must be 'e4m3' or None")
        if self.fallback not in (None, "bf16"):
            raise ArgumentError(f"fallback {self.fallback!r} must be 'bf16' or None")
        given = self.accumulator
        if self.gradients not in (None, FP8_DQ, ROUNDED_DELTA):
            raise ArgumentError(f"gradients {self.gradients!r} must be {FP8_DQ!r}, {ROUNDED_DELTA!r} or None")
        if self.gradients == FP8_DQ and given not in (None, "f16"):
            raise ArgumentError(
                f"gradients={self.gradients!r} is for the accumulator 'f16', not {given!r}: leave one of the two out"
            )
        if given is None or given == "f16":
            return
        keys = given[4:] if isinstance(given, str) and given.startswith("fp8-") else ""
        if not (keys.isdecimal() and int(keys) > 0 and int(keys) % 64 == 0):
            raise ArgumentError(f"accumulator {given!r} must be 'f16' or 'fp8-N', N keys in multiples of 64")


@dataclasses.dataclass(frozen=True)
class _Resolved:
    """A plan as a call takes it."""

    # Of one sequence or of each; None: from the call's own maxima.
    descales: tuple | None
    words: torch.Tensor | None
    scale: float
    backend: str
    fallback: str | None
    # Whose call it is, and whether it may run in BF16 where that is faster: not where statistics are planned from.
    label: torch.Tensor | None = None
    may_be_bf16: bool = False
    # Descales of E4M3 logits, or None.
    logit_descale: torch.Tensor | None = None

    def rows(self, batch):
        """Descales ``(batch, n_kv)``."""
        return tuple(d.expand(batch, -1) for d in self.descales)


def attend(
    q,
    k,
    v,
    plan,
    *,
    causal,
    softmax_scale=None,
    mask=None,
    sequences=None,
    window=(-1, -1),
    softcap=None,
    sinks=None,
    dropout=0.0,
    return_lse=False,
    rope=None,
    centers=None,
    how=How(),
    loaded=None,
):
    """Output and LSE of one call as models make them: in FP8 where a kernel takes it, else refused or sent to PyTorch's
    own, whose output has the operands' type and which may have no LSE.

    ``mask`` is what ``F.scaled_dot_product_attention`` takes, and says all that ``causal`` and ``window`` would.
    ``window``: the keys that a query sees before its own and after it (-1: all). ``sequences``: :class:`Sequences` in
    place of ``mask``. ``loaded``: gives k and v once every check has passed; those given before have their shapes and types alone.
    """
    q, k, v = lowered(q, k, v)
    check(q, k, v, sequences)
    if how.splits > 1:
        raise UnsupportedError(
            f"num_splits={how.splits} is offered on pages in E4M3; elsewhere give 1 for no split, or 0 for as many as are fastest"
        )
    if 0 in q.shape[:2]:
        # No query: nothing to attend from. Gradients are zeros.
        if loaded is not None:
            loaded()
        out = torch.zeros((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device) + sum(x[:0].sum() for x in (q, k, v) if x.dtype != E4M3)
        return out, torch.zeros((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
    lengths = (q.shape[1], k.shape[1]) if sequences is None else (sequences.max_len_q, sequences.max_len_k)
    call = resolve(q, k, v, plan, softmax_scale, how, min(k.shape[1], lengths[1]))
    sinks, (left, right) = sinks_of(sinks, q), window_of(window, causal, *lengths)
    saves = _saves(q, k, v, sinks)
    accumulator = how.accumulator or (_TRAINING if saves or _is_checkpoint(q, plan, call) else INFERENCE)
    keeps = _kept(q, call, how, accumulator) if saves else NOTHING
    k_center, v_center = centers_of(centers, q, k, v, plan, softcap or call.logit_descale is not None, sinks)
    terms = Terms(
        causal=causal,
        scale=call.scale,
        window_left=left,
        window_right=right,
        soft_cap=_softcap(softcap),
        sinks=sinks,
        k_center=k_center,
        v_center=v_center,
        accumulator=accumulator,
        keeps=keeps,
        splits=how.splits,
        sequences=sequences,
        logit_descale=call.logit_descale,
    )
    calls, reason = [terms], f"dropout {dropout} is not supported in FP8" if dropout else None
    if reason is None and mask is not None:
        found = _masks.recognise(mask, q.shape[0], q.shape[1], k.shape[1])
        if isinstance(found, str):
            reason = found
        else:
            calls = [terms.masked(*each) for each in found]
    if reason is None:
        reason = _refusal(q, v, calls[0], call)
    learns = isinstance(plan, LayerPlan) and plan.learns_centers
    if rope is not None:
        rope = _rope.checked(rope, q, k)
        if reason is not None or learns or not _turns_in_cast(q, k, v, terms, call, return_lse):
            (q, k), rope = _rope.turned(rope, q, k), None
    refused = reason is not None
    if refused and call.logit_descale is not None:
        raise UnsupportedError(
            f"logits='e4m3' is for this package's attention, and this call is not for it: {reason}. Leave it out"
        )
    if loaded is not None and not (refused and call.fallback is None):
        _, k, v = lowered(q, *loaded())
    # PyTorch's own gives a log-sum-exp by a slow way alone.
    if not refused and call.may_be_bf16 and len(calls) == 1 and how.accumulator is None and not return_lse:
        reason = _measured.slower(q, k, v, calls[0])
        if reason is not None and rope is not None:
            (q, k), rope = _rope.turned(rope, q, k), None
    if reason is None:
        if learns:
            for each in calls:
                plan.kept.observe(plan.index, k, v, each.sequences)
        parts = [_call(q, k, v, each, call, rope, return_lse) for each in calls]
        if len(parts) == 1:
            return parts[0]
        # Calls of one mask share no rows, and those of the others are zero.
        outs, lses = zip(*parts)
        return sum(outs[1:], outs[0]), functools.reduce(torch.maximum, lses)
    if refused and call.fallback is None:
        raise UnsupportedError(
            f"{reason}: pass fallback='bf16' for PyTorch's own attention, or keep this layer in BF16"
        )
    _calls.count_plain(call.label, reason, say=refused)
    if q.dtype == E4M3:
        q, k, v = (dequantised(x, d) for x, d in zip((q, k, v), call.rows(q.shape[0])))
        k, v = _centers.restored(k, v, terms)
    return _fallback.attend(q, k, v, terms, mask=mask, dropout=dropout, return_lse=return_lse)


def pair(name, window):
    """A window as two whole numbers."""
    try:
        left, right = (int(side) for side in window)
    except (TypeError, ValueError):
        raise ArgumentError(f"{name} {window!r} must be two whole numbers, (left, right), -1 for no limit") from None
    return left, right


def _short(value):
    """What was given, for a message."""
    shown = " ".join(repr(value).split())
    if len(shown) <= 60:
        return shown
    return f"{type(value).__name__} of {len(value)}" if hasattr(value, "__len__") else type(value).__name__


def window_of(window, causal, queries, keys):
    """A window without the sides that hide nothing."""
    left, right = window
    hides = lambda width, most: width is not None and 0 <= width < most - 1
    return left if hides(left, keys) else None, right if not causal and hides(right, max(queries, keys)) else None


def _softcap(softcap):
    return None if not softcap else positive("softcap", softcap)


def sinks_of(sinks, q):
    if sinks is None:
        return None
    if not isinstance(sinks, torch.Tensor):
        raise TypeError(f"sinks must be a tensor, a logit for each query head, not {type(sinks).__name__}")
    if sinks.shape != (q.shape[2],):
        raise MismatchError(f"sinks have shape {tuple(sinks.shape)}: ({q.shape[2]},) is needed, one for each query head")
    if sinks.device != q.device:
        raise ArgumentError(f"sinks are on {sinks.device} and q on {q.device}: move them to one device")
    return sinks.float().contiguous()


def _refusal(q, v, terms, call):
    """Why no FP8 kernel takes the call, or None."""
    if call.backend in _backends.LIBRARIES and not (terms.dense and q.shape[3] == v.shape[3]):
        return f"backend {call.backend!r} is called here for dense attention without windows, soft-caps, sinks, centers and padding"
    may_leave = call.fallback is not None and call.logit_descale is None
    if may_leave and call.backend == "auto" and q.is_cuda and not _backends.offered(q, v, terms):
        return f"no FP8 kernel takes d_head {q.shape[3]} here"
    return None


def _saves(*tensors):
    """Whether a backward follows."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _kept(q, call, how, accumulator):
    """What a forward keeps for its backward."""
    # Operands that are E4M3 already have no dQ.
    if q.dtype == E4M3 or how.gradients == ROUNDED_DELTA:
        return OPERANDS
    if how.gradients == FP8_DQ:
        return FP8_DQ
    # Other libraries keep their output, and a backward of other sums computes it again.
    return UNROUNDED_DELTA if accumulator == _TRAINING and call.backend not in _backends.LIBRARIES else OPERANDS


def _is_checkpoint(q, plan, call):
    """Whether a call without gradients can be that of a reentrant checkpoint, whose recompute must give the same bits."""
    # With logits in E4M3 the kernel has sums in FP8 alone.
    return q.dtype != E4M3 and call.logit_descale is None and isinstance(plan, LayerPlan) and plan.training


def _turns_in_cast(q, k, v, terms, call, return_lse):
    """Whether the kernels' cast can rotate q and k: nothing else computes with them before it."""
    if return_lse and terms.k_center is not None:
        return False
    if not q.is_cuda or call.descales is None or not _ops.plain(q, k, v):
        return False
    return _backends.choose(call.backend, q, v, terms)[0].name == "native"


def centers_of(centers, q, k, v, plan, absolute, sinks):
    """c and m of a call: those that are given, else those of the plan where they are exact. Its descales cover both ways; of operands
    in E4M3, which are centered already, nothing can be left out."""
    if centers is not None or not isinstance(plan, LayerPlan):
        return _centers.checked(centers, q, k, v, absolute, sinks)
    c, m = plan.centers
    if q.dtype == E4M3:
        _centers.refuse(c, m, absolute, sinks)
    return None if absolute or sinks is not None else c, None if sinks is not None else m


def _call(q, k, v, terms, call, rope=None, return_lse=False):
    """One call of the operator. ``rope``: the cast turns q and k."""
    if call.descales is None:
        descales = _current(q, *_centers.subtracted(k, v, (terms.k_center, terms.v_center)))
    else:
        descales = call.rows(q.shape[0])
    if len(descales) == 3:
        descales = (*descales, None)
    if rope is not None and terms.keeps != NOTHING:
        q, k = _rope.turned_back(rope, q, k)
    out, lse, *_ = _ops.run(q, k, v, descales, terms, call.backend, call.label, call.words, rope)
    return out, _centers.model_lse(lse, q, descales[0], terms) if return_lse else lse


def resolve(q, k, v, plan, softmax_scale, how, keys):
    """What a plan, or descales, say of a call whose longest sequence has that many ``keys``."""
    batch, n_kv = k.shape[0], k.shape[2]
    if isinstance(plan, LayerPlan):
        if (plan.n_q_heads, plan.n_kv_heads, plan.d_head) != (q.shape[2], n_kv, q.shape[3]):
            raise MismatchError(
                f"the plan of {plan.name} has {plan.n_q_heads} query and {plan.n_kv_heads} KV heads of {plan.d_head}; the call "
                f"has {q.shape[2]} and {n_kv} of {q.shape[3]}: pass the plan of this layer of this model"
            )
        if plan.positions is not None and keys > plan.positions:
            raise MismatchError(
                f"the call has {keys} keys, and queries of {plan.name} grow with the position: its descales are bounds for "
                f"{plan.positions}"
            )
        if q.device != plan.words.device:
            raise ArgumentError(
                f"q is on {q.device} and the plan of {plan.name} on {plan.words.device}: attach to the model again after it was "
                "moved, or move q, k and v there"
            )
        runtime = plan.runtime
        descales = None if plan.per_call else tuple(plan._descales)
        # An exported program has the descales as constants and no runtime that would read telemetry.
        exporting = getattr(torch.compiler, "_is_exporting_flag", False)
        words, scale = None if exporting else plan.reported, plan.softmax_scale
        label = None if exporting else plan.label
        backend, fallback = how.backend or runtime.backend, how.fallback or runtime.fallback
        logit_descale = plan.logit_descale if how.logits or plan.logits else None
        if logit_descale is None and (how.logits or plan.logits):
            raise UnsupportedError(
                f"the plan of {plan.name} has no descales of logits: attach with logits='e4m3', or with another policy than "
                f"{runtime.policy!r}"
            )
    else:
        logit_descale = None
        if how.logits and isinstance(plan, Sequence | torch.Tensor) and len(plan) == 4:
            *plan, logit_descale = plan
            logit_descale = _logit_row(logit_descale, q)
        elif how.logits:
            raise TypeError("logits='e4m3' needs a layer of a Runtime or four descales: of q, k, v and the logits")
        if not isinstance(plan, Sequence | torch.Tensor) or len(plan) != 3:
            raise TypeError(
                f"plan must be a layer of a Runtime (runtime.layers[i]) or the three descales of q, k and v, "
                f"not {_short(plan)}"
            )
        descales = tuple(row(d, key, batch, n_kv, q.device) for key, d in zip("qkv", plan))
        words, scale, label = None, q.shape[3] ** -0.5, None
        backend, fallback = how.backend or "auto", how.fallback
    if q.dtype == E4M3 and (descales is None or backend == "cudnn"):
        raise UnsupportedError(
            "operands in E4M3 have one descale a head: a plan that makes its own in each call, and cuDNN, do not"
        )
    if softmax_scale is not None:
        scale = positive("softmax_scale", softmax_scale)
    if backend not in _backends.NAMES:
        raise ArgumentError(f"backend {backend!r} is not one of {', '.join(_backends.NAMES)}")
    if how.splits and backend in ("fa3", "cudnn", "torch"):
        raise ArgumentError(f"backend {backend!r} splits keys as it likes: leave num_splits out")
    if how.accumulator is not None and backend in ("fa3", "cudnn", "torch"):
        raise ArgumentError(f"backend {backend!r} has an accumulator of its own: leave accumulator out")
    widest = max(q.shape[3], v.shape[3])
    if how.gradients == FP8_DQ and q.is_cuda and widest > 128:
        raise UnsupportedError(
            f"gradients='fp8-dq' is for heads of at most 128 on a GPU, not {widest}: leave it out for this layer"
        )
    # The descales of a plan alone say where the call would be counted.
    may_be_bf16 = backend == "auto" and label is not None and not plan.remembers and logit_descale is None
    return _Resolved(descales, words, float(scale), backend, fallback, label, may_be_bf16, logit_descale)


def _logit_row(descale, q):
    fits = isinstance(descale, torch.Tensor) and descale.dtype == torch.float32 and descale.device == q.device
    if not fits or descale.shape != (q.shape[2],):
        raise MismatchError(
            f"the descales of logits must be float32 ({q.shape[2]},) on {q.device}, one for each query head"
        )
    return descale.contiguous()


def typed(out, q):
    """The output in the type of ``q``; BF16 where that is E4M3, which has no room for it without a descale."""
    return out.to(torch.bfloat16 if q.dtype == E4M3 else q.dtype)


def lowered(*tensors):
    """Under autocast its type, as PyTorch's own attention takes it."""
    kinds = {x.device.type for x in tensors if isinstance(x, torch.Tensor)}
    # PyTorch knows no autocast of the meta device.
    if len(kinds) != 1 or "meta" in kinds or not torch.is_autocast_enabled(*kinds):
        return tensors
    dtype = torch.get_autocast_dtype(*kinds)
    lower = lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype in (*_DTYPES, dtype) else x
    return tuple(lower(x) for x in tensors)


def check(q, k, v, sequences=None):
    """Raises an exception for operands that no call takes."""
    for name, x in [("q", q), ("k", k), ("v", v)]:
        if not isinstance(x, torch.Tensor) or x.dim() != 4:
            shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise ArgumentError(f"{name} must be (batch, seq, heads, d_head), not {shape}")
        # A batch may be empty, or have no query.
        if 0 in x.shape[2:] or (x.shape[1] == 0 and name != "q" and q.shape[0] > 0 and q.shape[1] > 0):
            raise ArgumentError(f"{name} has shape {tuple(x.shape)}: there is nothing to attend to or from")
        if x.dtype not in (*_DTYPES, E4M3):
            raise ArgumentError(
                f"{name} has type {x.dtype}: give it as bfloat16, float16 or float32, or as float8_e4m3fn divided by its descale"
            )
        if x.stride(3) != 1:
            raise ArgumentError(f"{name} has stride {x.stride(3)} between channels of a head: call .contiguous() on it")
        if x.device != q.device:
            raise ArgumentError(f"{name} is on {x.device} and q on {q.device}: move them to one device")
        if x.dtype != q.dtype:
            raise ArgumentError(f"{name} has type {x.dtype} and q {q.dtype}: cast them to one type")
    shapes = [("batch", q, "q", k, "k", 0), ("batch", k, "k", v, "v", 0), ("length", k, "k", v, "v", 1)]
    shapes += [("number of heads", k, "k", v, "v", 2), ("d_head", q, "q", k, "k", 3)]
    for what, x, first, y, second, axis in shapes:
        if x.shape[axis] != y.shape[axis]:
            raise MismatchError(
                f"{first} and {second} must have the same {what}, not {x.shape[axis]} and {y.shape[axis]}: they are "
                f"(batch, seq, heads, d_head), here {tuple(x.shape)} and {tuple(y.shape)}"
            )
    if q.shape[2] % k.shape[2]:
        raise MismatchError(
            f"{q.shape[2]} query heads are not a multiple of {k.shape[2]} KV heads: every KV head serves the same number"
        )
    for x in () if sequences is None else sequences.places:
        if x.dtype != torch.int32 or x.device != q.device or x.dim() != 1 or x.shape != sequences.q_starts.shape:
            raise ArgumentError(
                f"where sequences lie is {x.dtype} {tuple(x.shape)} on {x.device}: int32, one entry per sequence, on {q.device} is needed"
            )


def row(descale, key, batch, n_kv, device):
    if not isinstance(descale, torch.Tensor):
        raise TypeError(f"the {key} descale must be a tensor, not {type(descale).__name__}")
    if descale.shape not in ((n_kv,), (batch, n_kv)):
        raise MismatchError(
            f"the {key} descale has shape {tuple(descale.shape)}: ({n_kv},) or ({batch}, {n_kv}) is needed"
        )
    if descale.dtype != torch.float32 or descale.device != device:
        raise ArgumentError(f"the {key} descale is {descale.dtype} on {descale.device}: float32 on {device} is needed")
    return descale


def _current(q, k, v):
    """Descales from this call's own maxima, one a tensor."""
    # One ulp up, else the division can put the maximum itself past 448.
    one = lambda x: (x.detach().abs().amax().float() * ((1 + 2**-22) / 448.0)).clamp_min(
        torch.finfo(torch.float32).tiny
    )
    rows = [one(x).expand(k.shape[0], k.shape[2]) for x in (q, k, v)]
    return (*rows, 2 * rows[2])


def _once_each(name, x, plan):
    """The KV heads of a layer whose module repeats them for its query heads, without the repetitions."""
    group = plan.n_q_heads // plan.n_kv_heads
    heads = x[:, ::group]
    if not (_masks.readable(x) and torch.equal(heads.repeat_interleave(group, dim=1), x)):
        raise MismatchError(
            f"{name} has {x.shape[1]} heads, and {plan.name} has {plan.n_kv_heads} KV heads: give each once, with enable_gqa=True"
        )
    return heads


def _by_channels(x):
    """With the channels of a head side by side, as kernels read them."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    plan: Plan,
    backend: Backend | None = None,
    accumulator: str | None = None,
    fallback: Fallback = None,
) -> torch.Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` in FP8: its arguments and layout ``(batch, heads, seq,
    d_head)``, also without a batch or with several dimensions of it, and a ``plan`` and options as for :func:`attention`. The output has the type of ``query``. As in PyTorch,
    ``is_causal`` aligns to the first query and the first key, and ``attn_mask`` may be a bias of
    ``torch.nn.attention.bias``.

    Masks that are causal, windows, padding, or packed sequences are recognised as such. For that the values of a mask
    are read once, which waits for the device. Other masks and dropout are refused by an :class:`UnsupportedError`, or
    go to PyTorch's own attention by ``fallback="bf16"``.
    """
    for name, x in [("query", query), ("key", key), ("value", value)]:
        if not isinstance(x, torch.Tensor) or x.dim() < 3:
            shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise ArgumentError(f"{name} must be (.., heads, seq, d_head), not {shape}")
        if x.shape[:-3] != query.shape[:-3]:
            raise MismatchError(
                f"{name} has shape {tuple(x.shape)} and query {tuple(query.shape)}: all dimensions in front of the heads must agree"
            )
    if query.dim() != 4:
        # Without a batch, or with several dimensions of it.
        lead = query.shape[:-3]
        if isinstance(attn_mask, torch.Tensor) and not isinstance(attn_mask, CausalBias) and attn_mask.dim() > 3:
            attn_mask = attn_mask.expand(*lead, *attn_mask.shape[-3:]).reshape(-1, *attn_mask.shape[-3:])
        flat = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
        how = {"scale": scale, "enable_gqa": enable_gqa, "plan": plan, "backend": backend, "accumulator": accumulator}
        out = scaled_dot_product_attention(*flat, attn_mask, dropout_p, is_causal, **how, fallback=fallback)  # type: ignore[call-arg, arg-type]
        return out.reshape(*lead, *out.shape[1:])
    # PyTorch spreads a single head over the queries' without being told.
    if key.shape[1] not in (1, query.shape[1]) and not enable_gqa:
        raise ArgumentError(f"{query.shape[1]} query and {key.shape[1]} key heads: set enable_gqa=True")
    if isinstance(plan, LayerPlan) and plan.n_kv_heads < key.shape[1] == query.shape[1] == plan.n_q_heads:
        key, value = (_once_each(name, x, plan) for name, x in (("key", key), ("value", value)))
    if attn_mask is not None and not isinstance(attn_mask, torch.Tensor):
        raise TypeError(f"attn_mask must be a tensor, (batch, heads, queries, keys), not {type(attn_mask).__name__}")
    if is_causal and attn_mask is not None:
        raise ArgumentError("give attn_mask or is_causal, not both")
    queries, keys, to_first_key = query.shape[2], key.shape[2], is_causal
    if isinstance(attn_mask, CausalBias):
        # PyTorch's own description of a causal mask, a tensor without values.
        if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != (queries, keys):
            raise MismatchError(
                f"attn_mask is a causal bias of {attn_mask.seq_len_q} queries and {attn_mask.seq_len_kv} keys, and the call has "
                f"{queries} and {keys}: make it for these lengths"
            )
        to_first_key = attn_mask.variant == CausalVariant.UPPER_LEFT
        attn_mask, is_causal = None, True
    if to_first_key and queries < keys:
        # Keys after the last query are not seen.
        key, value = key[:, :, :queries], value[:, :, :queries]
    elif to_first_key and queries > keys:
        # Queries after the last key see all.
        attn_mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
        is_causal = False
    q, k, v = (_by_channels(x).transpose(1, 2) for x in (query, key, value))
    out, _ = attend(
        q,
        k,
        v,
        plan,
        causal=bool(is_causal),
        softmax_scale=scale,
        mask=attn_mask,
        dropout=dropout_p,
        how=How(backend, accumulator, fallback),
    )
    return typed(out.transpose(1, 2), query)
