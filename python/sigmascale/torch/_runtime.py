"""Plans of a model's attention layers, kept in device tensors that never move."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

from .. import _native
from .._errors import ArgumentError, CudaError, NonFiniteError, SigmascaleError, UnsupportedError
from .._parameters import Tail, named
from . import (
    _backends,
    _calls,
    _centers,
    _distributed,
    _engine,
    _estimates,
    _following,
    _heads,
    _layers,
    _saved,
    _telemetry,
    _weights,
)
from ._plan import LayerPlan, give_plan, plans_of, refuse_copies
from ._policies import FROM_BOUNDS, POLICIES, check_layers, make_policy

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ._typing import Backend, Bound, Center, Estimator, Fallback, Group, Layers, Policy, PolicyName, Telemetry


class Runtime:
    """Plans of a model's attention layers. Created by :func:`attach`.

    Attributes, whose tensors keep their addresses:

    - ``layers``: a :class:`LayerPlan` per layer.
    - ``descales``: f32 ``(layers, [q, k, v, o], n_kv_heads)``. A value is divided by its descale before the cast. Plans
      hold views of this tensor.
    - ``logits``: f32 ``(layers, n_q_heads, [sigma, exact bound, worst-case bound, descale])``, or None without
      ``bound``.
    - ``logit_descales``: f32 ``(layers, n_q_heads)``, which map the policy's logit bound onto ``tail.eta`` of E4M3, or
      None if the policy has no logit bound.
    - ``tail``: the :class:`sigmascale.Tail` in use.
    - ``centers``: what is subtracted from keys and values of each layer (``plan.centers``).
    - ``before_refresh``, ``after_refresh``: lists of functions that are called with the runtime, before each refresh,
      while the statistics of its calls are still there, and at its end, on its stream.

    If layers have different numbers of heads, the tensors have the largest ``n_q_heads`` and ``n_kv_heads``. Entries
    past a layer's heads are the smallest normal float, which changes no maximum; the views of a plan end at its layer's
    heads.
    """

    policy: PolicyName
    bound: Literal["worst-case"] | None
    estimator: Estimator
    backend: Backend
    fallback: Fallback
    tail: Tail
    n_q_heads: int
    n_kv_heads: int
    device: torch.device
    descales: torch.Tensor
    words: torch.Tensor
    logits: torch.Tensor | None
    logit_descales: torch.Tensor | None
    layers: list[LayerPlan]
    before_refresh: list[Callable[[Runtime], None]]
    after_refresh: list[Callable[[Runtime], None]]

    # Tensors that a runtime writes in place must not be inference tensors, which may not be.
    @torch.inference_mode(False)
    def __init__(
        self,
        model: torch.nn.Module,
        policy: Policy,
        bound: Bound | None,
        layers: Layers | None,
        backend: Backend,
        tail: Tail | None,
        fallback: Fallback = None,
        group: Group = None,
        telemetry: Telemetry = "full",
        estimator: Estimator = "gram",
        logits: Literal["e4m3"] | None = None,
        center: Center = "none",
        iterations: tuple[int, int] = (5, 1),
        *,
        optimizer: Any = None,
        strict: bool = False,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        policy, parameters = named(policy)
        if policy not in POLICIES:
            raise ArgumentError(f"policy {policy!r} is not one of {', '.join(POLICIES)}")
        tail = Tail() if tail is None else tail
        if not isinstance(tail, Tail):
            raise TypeError(f"tail must be a sigmascale.Tail, not {tail!r}")
        counted = dataclasses.asdict(tail)
        config = _native.policy(policy, parameters, counted)
        if bound not in (None, "worst-case"):
            raise ArgumentError(f"bound {bound!r}: expected 'worst-case' or None")
        _estimates.checked(estimator)
        if logits not in (None, "e4m3"):
            raise ArgumentError(f"logits {logits!r} must be 'e4m3' or None")
        if logits is not None and policy == "current":
            raise UnsupportedError(
                "policy 'current' measures q, k and v in each call and has no scales of logits: take another for logits='e4m3'"
            )
        # Without bounds on logits there is nothing that norms are needed for.
        estimating = estimator != "gram" and (bound is not None or policy in FROM_BOUNDS)
        if policy == "geometry" and (logits is not None or estimating):
            bound = "worst-case"
        if backend != "auto":
            _backends.backend(backend)
        if fallback not in (None, "bf16"):
            raise ArgumentError(f"fallback {fallback!r} must be 'bf16' or None")
        # What torch.compile returns may be gone while the model that it wraps is in use.
        model = _distributed.unwrapped(model)
        optimizers = _following.checked(optimizer, model)
        self.policy, self.bound, self.backend, self.tail, self.fallback = policy, bound, backend, tail, fallback
        self.estimator = estimator
        # Nothing is reduced before the first call: attach() communicates nothing.
        self._given, self._group = None if layers is None else list(layers), None
        self._model = weakref.ref(model)
        self._lock = threading.Lock()
        # What finishes the reduction that is under way.
        self._reduction = None
        # Engines whose launches are in somebody's CUDA graph, with the weights that they read: a replay reaches both.
        self._captured = []
        self.before_refresh, self.after_refresh = [], []
        self._warned_of_dropout, self._strict = False, strict
        known = _layers.Layers(model, self._given)
        found = known.at_rest
        self.device, self._q_heads = known.device(), known.q_heads
        self._shape, self._heads = _shape(found), _heads.Heads(found)
        check_layers(policy, found)
        self._estimates = _estimates.Estimates(self, known, estimator, iterations) if estimating else None
        count, n_q, n_kv = len(found), self._heads.n_q, self._heads.n_kv
        # Types are named: the default one may be another.
        make = lambda *shape, dtype=torch.float32: torch.zeros(*shape, device=self.device, dtype=dtype)
        with self._on_device():
            self.descales = self._heads.pad(make(count, 4, n_kv) + 1, 1)
            # What attention calls report: rows of four words for logits and q by query head, k and v by KV head.
            self.words = make(count, 2 * (n_q + n_kv), 4, dtype=torch.int32)
            self.logits = make(count, n_q, 4) if bound else None
            if self.logits is not None:
                self._heads.pad(self.logits[..., 3], 0)
            # A policy counts the query heads that it is told of.
            share = sum(layer.n_q_heads for layer in found) / self._q_heads
            self._policy = make_policy(policy, config, counted | {"delta": counted["delta"] * share})
            self._steps, self.telemetry = 0, telemetry
            has_logits = bound or self._policy.has_logits
            self.logit_descales = self._heads.pad(make(count, n_q) + 1, 0) if has_logits else None
        self.n_q_heads, self.n_kv_heads = n_q, n_kv
        self.layers = [LayerPlan(self, index, layer) for index, layer in enumerate(found)]
        for plan in self.layers:
            plan.logits = logits
        # Handles of hooks on FSDP units, which go with the runtime.
        self._hooks = []
        weakref.finalize(self, _remove, self._hooks)
        self._bind(known)
        self.centers = _centers.Kept(center, self, model, known)
        self._center()
        self._register(found)
        weakref.finalize(model, _release, weakref.ref(self))
        # What is to be said once: of layers that run elsewhere, and of weights that are not those of the scales.
        self._unsaid = {"elsewhere", "weights"}
        # Whether its scales are for another library's attention.
        self._serves_others = False
        self._ran = _following.Ran(weakref.WeakMethod(self._say_elsewhere))
        _calls.follow(self.layers[0].key, _following.Detached(weakref.WeakMethod(self._look_at_weights)))
        self._hooks_for_good = [model.register_forward_hook(self._ran).remove]
        self._following = _following.Following(self, model, optimizers)
        self._hooks_for_good.append(self._following.close)
        weakref.finalize(self, _undo, self._hooks_for_good)
        self._refresh(ends_step=True)
        # That was no step.
        self._count(0)
        self._group = group

    def __len__(self) -> int:
        return len(self.layers)

    def __reduce_ex__(self, _: object) -> Any:
        refuse_copies("Runtime")

    def __repr__(self) -> str:
        return f"<sigmascale Runtime: {len(self.layers)} layers, policy {self.policy}, {self.device}>"

    def _register(self, found):
        self._modules = weakref.WeakKeyDictionary()
        for plan, layer in zip(self.layers, found):
            if layer.module is not None:
                self._modules[layer.module] = plan
                give_plan(layer.module, plan)

    @property
    def telemetry(self) -> Telemetry:
        """Whose statistics are kept: ``"full"``, of every step, ``n``, of every n-th step from the first on, or
        ``"off"``. Steps are counted by ``refresh()`` where Python calls it, which a replay of a CUDA graph does not.
        Compiled code has a version with and one without telemetry. May be set."""
        return self._telemetry

    @telemetry.setter
    def telemetry(self, telemetry: Telemetry) -> None:
        every = {"full": 1, "off": 0}.get(telemetry) if isinstance(telemetry, str) else telemetry
        if isinstance(every, bool) or not isinstance(every, int) or (every < 1 and telemetry != "off"):
            raise ArgumentError(
                f"telemetry {telemetry!r} must be 'full', 'off' or a number n >= 1, for every n-th step"
            )
        if every != 1 and self._policy.remembers:
            raise UnsupportedError(
                f"policy {self.policy!r} plans from the statistics of every step: leave telemetry at 'full', or take "
                "policy='geometry'"
            )
        self._telemetry, self._every = telemetry, every
        self._count(self._steps)

    def _count(self, steps):
        """Sets the number of the step. Calls read ``reporting`` alone: compiled code would be compiled anew for every value
        of a number that it reads."""
        self._steps = steps
        self.reporting = self._every > 0 and steps % self._every == 0

    def plan_of(self, module: torch.nn.Module) -> LayerPlan:
        """The plan of an attention module."""
        plan = self._modules.get(module)
        if plan is None:
            raise ArgumentError(f"{type(module).__name__} is no attention module of this runtime")
        return plan

    def _on_device(self):
        """Makes the device current for a block."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def _stream(self):
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0

    def _capturing(self):
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _center(self):
        """Tells the plans of layers their centers."""
        for plan in self.layers:
            plan.kept, plan.centers = self.centers, self.centers.of[plan.index]

    def _bind(self, layers):
        """Sets engines up over the tensors at their present addresses, and hooks where FSDP makes them whole."""
        # Unbound until all is done: what fails here is tried again at the next refresh.
        self._engine = self._sources = None
        _remove(self._hooks)
        if self.device.type == "cuda":
            available, missing = _native.gpu()
            if not available:
                raise CudaError(f"kernels cannot be compiled and launched here: {missing}")
        self._policy.bind(self, layers.at_rest)
        self._targets = self._policy.targets(self)
        if self.logits is not None:
            self._targets["bounds"] = [*self._targets.get("bounds", []), _heads.Target(self.logits)]
        resident = [layers.at_rest[index] for index in layers.resident]
        if self._targets and resident:
            self._engine = _engine.Engine(resident, self._targets, self, layers.resident)
        # Sliced layers whose scales are of earlier weights, and engines, one for each shape that these layers have had.
        self._due, self._shape_engines = set(), []
        if self._targets:
            self._hooks += _distributed.hooked(layers, weakref.WeakMethod(self._compute))
        # The hooks hold what reads the model, and go with it.
        self._layers, self._tensors = weakref.ref(layers), resident
        self._places, self._resident, self._sliced = layers.places(), layers.resident, layers.sliced
        self._sources = _engine.Sources(resident, None if self._given is None else self._model())
        self._owned = self._sources.owned
        # Where calls make their own scales, those of the weights are no concern.
        named = [(layer.name, tensor) for layer in resident for tensor in layer.tensors().values()]
        named += [(layers.at_rest[index].name, shard) for index in self._sliced for shard in layers.shards(index)]
        self._weights = None if self._policy.per_call else _weights.Weights(named, self._sources.moved, self.device)
        self._marked = False
        self._dropouts = [(layer.name, layer.dropout) for layer in layers.at_rest if layer.dropout is not None]

    def _compute(self, layers, indices, kept, always=False):
        """Scales of sliced layers whose tensors are whole, on the current stream."""
        # A replay repeats what was captured, whatever was due then.
        capturing = self._capturing()
        indices = [index for index in indices if capturing or always or index in self._due]
        if not indices:
            return
        with torch.inference_mode(False), torch.no_grad(), self._on_device(), _unnoticed(self._written()):
            for index in indices:
                layer = layers.whole(index, kept)
                engine = next((engine for engine in self._shape_engines if engine.fits(layer)), None)
                if engine is None:
                    engine = _engine.ShapeEngine(layer, self._targets, self)
                    self._shape_engines.append(engine)
                if capturing and all(engine is not held for held, _ in self._captured):
                    self._captured.append((engine, []))
                engine.run(self._stream(), layer, index)
                if self.logits is not None:
                    self.logit_descales[index].copy_(self.logits[index, :, 3])
                self._policy.update(self, self._stream(), [index])
                self.centers.widen(self.descales, [index])
                self._due.discard(index)
                self.layers[index].stale = False

    def _warn_of_dropout(self):
        """Says once that a dropout after a norm is active: what it keeps is larger than anything the norm gives."""
        if self._warned_of_dropout or (self.policy not in FROM_BOUNDS and self.logits is None):
            return
        for name, dropout in self._dropouts:
            if dropout.training and dropout.p > 0:
                self._warned_of_dropout = True
                warnings.warn(
                    f"{name}: a dropout of {dropout.p} is active between the norm and the q, k and v projections, so "
                    "values can exceed the worst-case bounds: set it to 0 in the model's config, or call model.eval()",
                    RuntimeWarning,
                    stacklevel=4,
                )
                return

    def _elsewhere(self):
        """Names of the layers without a call, once the model has run. Calls by another runtime's plan of a module count."""
        if not self._ran.ran or self._serves_others:
            return []
        called = {plan for module, plan in self._modules.items() if any(_calls.reached(x.key) for x in plans_of(module))}
        return [plan.name for plan in self.layers if plan not in called and not _calls.reached(plan.key)]

    def _say_elsewhere(self):
        """After the first forward, where layers ran without this package."""
        if self._ran.ran and "elsewhere" in self._unsaid:
            self._unsaid.discard("elsewhere")
            if names := self._elsewhere():
                self._say(self._of_elsewhere(names))

    def _of_elsewhere(self, names):
        return (
            f"{_listed(names)} of {len(self.layers)} made no attention call through sigmascale in the forward, and ran without "
            "FP8: call model.set_attn_implementation(sigmascale.torch.register()) for a Hugging Face model, use "
            "sigmascale.torch.patched(runtime) for modules that call F.scaled_dot_product_attention, or call "
            "sigmascale.torch.attention with runtime.layers[i] there"
        )

    def _look_at_weights(self):
        """Follows the first layer's calls: whether the weights are those that the scales were computed from."""
        weights = self._weights
        if weights is None or "weights" not in self._unsaid or _distributed.recomputing():
            return
        if self._marked and not weights.due():
            return
        with torch.inference_mode(False), torch.no_grad(), self._on_device():
            if not self._marked:
                # FSDP has made whole by now what the scales of this forward are computed from.
                self._mark()
            elif weights.look():
                if not self._strict:
                    self._unsaid.discard("weights")
                self._say(self._of_weights())

    def _mark(self):
        if self._weights is not None:
            self._weights.mark()
            self._marked = True

    def _of_weights(self):
        remedy = "give the optimizer, as in attach(model, optimizer=optimizer), or call runtime.refresh() after every optimizer.step()"
        if self._following:
            remedy = "call runtime.refresh() after every write to them other than optimizer.step() and load_state_dict()"
        return (
            f"the weights of {_listed(self._weights.names())} have changed since their FP8 scales were computed, so values can be "
            f"out of range: {remedy}"
        )

    def _say(self, message):
        if self._strict:
            raise SigmascaleError(message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)

    def _written(self):
        """The tensors that plans are made in."""
        return [x for x in (self.descales, self.logits, self.logit_descales) if x is not None]

    def _keep_for_replays(self):
        """Holds the engine that is being captured, and aliases of its weights, which may be given other memory."""
        if self._engine is None or any(engine is self._engine for engine, _ in self._captured):
            return
        self._captured.append((self._engine, [x.detach() for layer in self._tensors for x in layer.tensors().values()]))

    def _replaced(self):
        layers = self._layers()
        return layers is not None and any(map(layers.replaced, self._sliced))

    def _check(self):
        if self._model() is None or self._tensors is None:
            raise SigmascaleError("the model was deleted: attach to the model that is in use")
        if self._sources is not None and self._sources.unchanged() and not self._replaced():
            return
        if self._capturing():
            raise SigmascaleError("weights have moved since the last refresh(): call refresh() once before the capture")
        layers = _layers.Layers(self._model(), self._given)
        found = layers.at_rest
        # Copies that never were the model's own are the caller's to keep.
        if self._given is not None and self._owned:
            current = _engine.storages(self._model())
            tensors = [tensor for index in layers.resident for tensor in found[index].tensors().values()]
            if any(tensor.untyped_storage().data_ptr() not in current for tensor in tensors):
                raise SigmascaleError(
                    "weights were replaced by others since attach(): attach again, with layers that name them"
                )
        if layers.device() != self.device:
            raise ArgumentError(f"the model has left {self.device}: attach again on its new device")
        if _shape(found) != self._shape:
            raise SigmascaleError("the model has other layers or heads than at attach(): attach again")
        if any(engine is self._engine for engine, _ in self._captured):
            warnings.warn(
                "weights have moved since refresh() was captured in a CUDA graph, whose replays read the memory from before: "
                "capture again",
                RuntimeWarning,
                stacklevel=4,
            )
        self._bind(layers)

    def refresh(self, now: bool = False) -> None:
        """Recomputes every plan from the weights as they are, on the current stream.

        Layers sharded by FSDP are marked stale, and each computes its scales in its next forward, when its weights are
        gathered; no rank waits for another. ``now=True`` unshards them here (``fully_shard`` only): all ranks must call
        it.

        Call it after an optimizer step or a weight sync, not between a forward and its backward. Where :func:`attach` was
        given the optimizer, its steps do it, and each ends a step of the statistics; a call then only computes the scales
        of weights that were written by other means. After the first call
        it neither synchronizes the host nor allocates device memory, so it can be captured in a CUDA graph and
        replayed. Weights that have moved are found again. Graphs captured earlier keep using the old weights, which
        stay allocated for them, and a RuntimeWarning says so. Raises :class:`SigmascaleError` if the model is gone, its
        weights were replaced, or another thread is in here; :class:`ArgumentError` if they have left the device.
        """
        self._refresh(ends_step=not self._following, now=now)

    def _refresh(self, ends_step, now=False):
        """``ends_step``: what calls reported is planned from and dropped."""
        if not self._lock.acquire(blocking=False):
            raise SigmascaleError("refresh() is running in another thread: call it from one thread at a time")
        try:
            with torch.inference_mode(False), torch.no_grad(), self._on_device():
                self._check()
                self._warn_of_dropout()
                self._say_elsewhere()
                if ends_step:
                    for work in self.before_refresh:
                        work(self)
                stream = self._stream()
                if self._capturing():
                    self._keep_for_replays()
                if ends_step:
                    self.start_reduction()
                    self._finish_reduction()
                    self._policy.observe(self, stream)
                if self._engine is not None:
                    self._engine.run(stream)
                if self.logits is not None and self.logit_descales is not None:
                    self.logit_descales.copy_(self.logits[..., 3])
                from_weights = self.policy in FROM_BOUNDS
                self._policy.update(self, stream, self._resident if from_weights else None)
                self.centers.refresh(self._group)
                if not self._policy.per_call:
                    self.centers.widen(self.descales, self._resident if from_weights else slice(None))
                if ends_step:
                    self.words.zero_()
                    for plan in self.layers:
                        _calls.clear(plan.key)
                    self._count(self._steps + 1)
                self._marked = False
                if not (self._targets and self._sliced):
                    self._mark()
                if self._targets and self._sliced:
                    self._due |= self._sliced
                    for index in self._sliced:
                        self.layers[index].stale = from_weights
                    # A backward that still needs the scales from before is refused by autograd.
                    torch.autograd.graph.increment_version(self.descales)
                    if now:
                        _distributed.compute_now(self._layers(), self._compute)
                        self._mark()
                for work in self.after_refresh:
                    work(self)
        finally:
            self._lock.release()

    def start_reduction(self) -> None:
        """Starts the all-reduce of a policy that observes, for which :meth:`refresh` waits; without this call it starts
        there. Called after the last backward of a step and before ``optimizer.step()``, it runs concurrently with the optimizer.
        Does nothing without a group, under the policies that observe nothing, and while a reduction is under way. What
        calls report between this and :meth:`refresh` is not planned from."""
        if self._group is None or not self._policy.remembers or self._reduction is not None:
            return
        with torch.inference_mode(False), torch.no_grad(), self._on_device():
            self._reduction = _distributed.start_maxima(self.words, self._group)

    def _finish_reduction(self):
        """Waits for the reduction that is under way, if there is one, and puts its result in ``words``."""
        if self._reduction is None:
            return
        finish, self._reduction = self._reduction, None
        with torch.inference_mode(False), torch.no_grad(), self._on_device():
            finish()

    def observed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same as :meth:`stats` without waiting, as device tensors: amax ``(layers, 3, n_kv)`` of q, k and v, and
        counts ``(layers, 3, n_kv, [overflow, beyond, non_finite])``."""
        return _telemetry.observed(self.words, self._heads)

    def stats(self) -> dict[str, Any]:
        """What attention calls reported since the last refresh, as NumPy arrays; waits for the device.

        ``amax`` ``(layers, 3, n_kv)`` of q, k and v; ``overflow`` (values past 448 descales), ``beyond`` (past 464) and
        ``non_finite`` likewise; ``peak``: the largest |x / descale| (NaN under ``current``, whose descales are gone);
        ``logit_max`` and ``logit_min`` ``(layers, n_q)`` where the kernel reports them, else NaN; ``logit_overflow`` likewise,
        logits past 448 descales where they are cast. Past a layer's own heads there is nothing: zeros, and NaN for logits. ``calls``: a dict of counts ``(layers,)`` by what ran them: a
        backend, or ``bf16`` for PyTorch's own attention. ``why``: of each of these a dict of counts ``(layers,)`` by
        the reason. Counted where Python launches them: a replay of a CUDA graph is not, nor is a fallback in compiled
        code. ``reported``: whether this step's calls report; without, all but ``calls`` and ``why`` is zero.
        """
        counted = [_calls.counted(plan.key) for plan in self.layers]
        descales = None if self._policy.per_call else self.descales.cpu()
        return _telemetry.stats(self.words.cpu(), self._heads, descales, counted, self.reporting)

    def slack(self) -> dict[str, dict[str, NDArray[np.generic]]]:
        """Worst-case bound / observed maximum in the burn-in of ``auto-c``: for ``logit``, ``q``, ``k`` and ``v`` a
        dict of NumPy arrays ``(layers,)``, the ``min``, ``mean`` and ``max`` over the layer's heads and steps, and
        their ``count``. NaN if nothing was observed: only the native kernel reports logits. Waits for the device; reset
        by ``load_state_dict``. Raises :class:`UnsupportedError` under another policy."""
        return self._policy.slack(len(self))

    def estimates(self) -> dict[str, Any]:
        """Where norms are estimated, how far the power iteration has come, as NumPy arrays: ``sigma`` ``(layers, n_q)``, estimates
        from below (of the sum over the heads, for each, with ``power-summed``); ``upper``, what the norm does not exceed but
        with the probability ``tail.delta`` in all, known from a cold start to the next refresh where nothing rotates, else NaN;
        ``residual`` ``(layers, n_q)``: some singular value lies within it of the length that the vectors for the next iteration are
        mapped to, which is at least ``sigma`` as long as the weights stay; NaN for layers that FSDP shards, and of sums over ranks;
        ``steps`` ``(layers,)``, iterations since the vectors were drawn. ``guarantee`` is ``"none"``: logits can exceed bounds
        from estimates. Waits for the device. Raises :class:`UnsupportedError` with exact norms."""
        if self._estimates is None:
            raise UnsupportedError("norms are exact here: estimates are those of estimator='power' and 'power-summed'")
        logits = self.logits if self.logits is not None else self._policy.head_bounds(self)
        with torch.no_grad():
            return self._estimates.report(logits, zip(self._resident, self._tensors or ()))

    def check(self) -> None:
        """Raises an exception if the scales are not to be relied on; waits for the device. :class:`NonFiniteError`: the last
        refresh met weights or bounds that are not finite. :class:`SigmascaleError`: the weights are not those of the last
        refresh, or the model has run and layers made no call through this package."""
        status = 0 if self._engine is None else self._engine.status() & 3
        bad = (~torch.isfinite(self.descales)).any(dim=2).any(dim=1).nonzero().flatten().tolist()
        if status or bad:
            raise NonFiniteError(
                f"weights or bounds are not finite in layers {bad or 'unknown'}: the plan is not usable"
            )
        if self._weights is not None and self._marked and self._weights.differ():
            raise SigmascaleError(self._of_weights())
        if names := self._elsewhere():
            raise SigmascaleError(self._of_elsewhere(names))

    def state_dict(self) -> dict[str, Any]:
        """All that later plans depend on, apart from the weights: a dict of plain values and one tensor.

        It has neither for the policies without state (``geometry``, ``geometry-c-star``, ``current``). Waits for the
        device.
        """
        return _saved.state(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a saved state. Raises :class:`MismatchError`, and changes nothing, if it is damaged or of
        another policy, version or shape. Descales of policies without state stay those of the current weights.

        Load weights first, call :meth:`refresh`, then this: a refresh before any attention call is a step with maxima
        of zero, which ``delayed-paper`` and ``delayed-te`` put in their histories.

        Of a state with more layers or heads (:func:`merge_states`) it takes those that this process has."""
        part, vectors = _saved.part(self, state), _saved.estimates(self, state)
        centers = _saved.centers(self, state)
        with torch.inference_mode(False), torch.no_grad(), self._on_device():
            if part is not None:
                self._policy.load(part["state"])
            if vectors is not None and self._estimates is not None:
                self._estimates.load(vectors)
                if self._engine is not None:
                    self._engine.run(self._stream())
                if self.logits is not None and self.logit_descales is not None:
                    self.logit_descales.copy_(self.logits[..., 3])
                self._due |= self._sliced
            if part is not None or vectors is not None:
                self._policy.update(self, self._stream(), self._resident if vectors is not None else None)
            self.centers.load(centers, self.descales)
            self._center()
            if part is not None:
                self.descales.copy_(part["descales"])


def _shape(found):
    """Query heads, KV heads and head dimension of each layer."""
    return [(layer.n_q_heads, layer.n_kv_heads, layer.d_head) for layer in found]


def _release(reference):
    runtime = reference()
    if runtime is not None:
        runtime._tensors = runtime._sources = runtime._engine = runtime._weights = None
        _remove(runtime._hooks)
        _undo(runtime._hooks_for_good)


def _listed(names):
    """A few of them, for a message."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} other layers"


def _undo(steps):
    while steps:
        steps.pop()()


def _remove(hooks):
    while hooks:
        hooks.pop().remove()


@contextlib.contextmanager
def _unnoticed(tensors):
    """Writes to these tensors in a block that autograd does not see: plans of other layers lie in them, which backwards
    need."""
    with contextlib.ExitStack() as stack:
        for tensor in tensors:
            stack.enter_context(torch.autograd._unsafe_preserve_version_counter(tensor))
        yield
