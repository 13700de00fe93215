"""Entry point: attach a runtime to a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ._runtime import Runtime

if TYPE_CHECKING:
    import torch

    from .._parameters import Tail
    from ._typing import Backend, Bound, Center, Estimator, Fallback, Group, Layers, Policy, Telemetry


def attach(
    model: torch.nn.Module,
    policy: Policy = "geometry",
    bound: Bound | None = None,
    *,
    estimator: Estimator = "gram",
    iterations: tuple[int, int] = (5, 1),
    logits: Literal["e4m3"] | None = None,
    layers: Layers | None = None,
    backend: Backend = "auto",
    tail: Tail | None = None,
    fallback: Fallback = None,
    group: Group = None,
    telemetry: Telemetry = "full",
    center: Center = "none",
    optimizer: Any = None,
    strict: bool = False,
) -> Runtime:
    """Plans for every attention layer of a model.

    ``model`` is a Hugging Face model (its layers are found by the family table) or any ``nn.Module`` with ``layers``, a
    list of :class:`Layer`, or of functions that return one each. No weight is copied. The model may be sharded by
    ``fully_shard``, FullyShardedDataParallel or ``parallelize_module``, wrapped in DistributedDataParallel, or a
    pipeline stage; nothing here communicates unless ``group`` is given: the process group of data and context parallel
    ranks, over which ``refresh()`` reduces the maxima that ``auto-c``, ``delayed-te`` and ``delayed-paper`` observe.

    ``policy`` says where descales come from: ``geometry`` (the worst-case bounds, which no normalized input exceeds),
    ``geometry-c-star``, ``auto-c``, ``delayed-te``, ``delayed-paper`` or ``current``; or :class:`sigmascale.AutoC`,
    :class:`sigmascale.DelayedPaper` or :class:`sigmascale.DelayedTe` with their parameters. ``bound="worst-case"`` adds
    exact and worst-case logit bounds (``runtime.logits``). ``tail``, a :class:`sigmascale.Tail`, is what the failure
    probability of ``geometry-c-star`` counts, by default one sequence of 1024 tokens, and the share of E4M3 that logit
    descales map onto.

    ``estimator`` says where the norms of the logit bounds come from, under every policy that plans from them: ``gram`` (exact,
    certified), ``power`` (the paper's power iteration, a head at a time) or ``power-summed`` (of the sum over a layer's heads, as
    the paper has it). The last two keep their vectors from refresh to refresh: ``iterations`` says how many they do at first and at
    each ``refresh()``, which is what the paper calls a step. They promise nothing: see :meth:`Runtime.estimates`. Descales of q, k
    and v are the same under each. Where ranks share a layer's heads (``parallelize_module``), ``power-summed`` communicates: all
    of them must attach and refresh.

    ``logits="e4m3"`` also casts the logits of every call, by the plan's logit descales, as the paper does: see :func:`attention`.

    ``backend`` runs the attention calls: ``auto``, ``native``, ``fa3``, ``cudnn``, ``torch`` or ``emulated``. With
    ``fallback="bf16"`` PyTorch's attention runs the calls that no FP8 kernel supports (dropout, masks per head, and
    masks that are not causal, a window, padding or packing); a warning says so once, and ``stats()`` counts them. By
    default they are refused.

    ``telemetry``: ``"full"`` (every call reports maxima and overflows), ``n`` (those of every n-th step, counted by
    ``refresh()``) or ``"off"``. Policies that plan from statistics need ``"full"``. See :attr:`Runtime.telemetry`.

    ``center`` says what is subtracted from keys and values before their cast, which changes rounding errors alone: ``"none"``;
    ``"weights"``, from keys the mean of their rotated bias over positions, as an export has it (whole Hugging Face models);
    ``"mean"``, the means of keys and values over the first 512 tokens or more; or what :func:`sigmascale.centers` returned.
    Centers stay as they are from then on, and descales cover keys and values with them and without. Layers with sinks get none,
    and those with a soft-cap no center of keys, in each call that has them.

    Bounds do not cover a dropout between a norm and the projections (the first layer of BERT, RoBERTa and ModernBERT's
    decoder): a RuntimeWarning says so while one is active.

    ``optimizer``: the optimizer, or a list of them, after whose steps the scales are computed anew. Anything with a
    ``step()`` that updates the model is taken: a ``torch.optim.Optimizer``, a container or wrapper of some, a
    DeepSpeedEngine. Gradient accumulation, skipped steps and optimizers that step inside the backward need nothing else.
    Without it, call ``refresh()`` after every optimizer step. After ``model.load_state_dict()`` scales are computed anew
    in either case.

    A RuntimeWarning says once if a forward meets other weights than those of the scales, or if layers make no call
    through this package in the first forward of the model. ``strict=True`` raises :class:`SigmascaleError` in place of it.
    On a GPU, which is not waited for, weights are reported by a later forward.

    Returns a :class:`Runtime`.
    """
    return Runtime(
        model,
        policy,
        bound,
        layers,
        backend,
        tail,
        fallback,
        group,
        telemetry,
        estimator,
        logits,
        center,
        iterations,
        optimizer=optimizer,
        strict=strict,
    )
