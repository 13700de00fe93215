"""Plans of a model's attention layers, kept in device tensors that never move."""

import contextlib
import dataclasses
import threading
import warnings
import weakref
from collections.abc import Mapping

import numpy as np
import torch

from .. import _native
from .._errors import ArgumentError, CudaError, MismatchError, NonFiniteError, SigmascaleError, UnsupportedError
from .._parameters import Tail, named
from . import _backends, _calls, _distributed, _host, _layers, _results, _state
from ._policies import FROM_BOUNDS, POLICIES, make_policy

STATE_VERSION = 3
# Engines that are kept for the places at which a sliced layer has been whole.
_ENGINES_A_LAYER = 2


class LayerPlan:
    """The scales of one layer: views into the runtime's tensors, whose addresses stay the same."""

    def __init__(self, runtime, index, layer):
        # Weak: a model whose modules know their plan must not keep itself alive through it.
        self._runtime = weakref.ref(runtime)
        self.index, self.name = index, layer.name
        self.n_q_heads, self.n_kv_heads, self.d_head = layer.n_q_heads, layer.n_kv_heads, layer.d_head
        self.per_call = runtime._policy.per_call
        self.softmax_scale = self.d_head**-0.5 if layer.softmax_scale is None else layer.softmax_scale
        # Keys up to which the descales are bounds; None: any number, or a policy without bounds.
        self.positions = layer.positions if runtime.policy in FROM_BOUNDS else None
        # Whether the weights have changed since these scales: a layer sharded by FSDP, between a refresh and its forward.
        self.stale = False
        self._rows = runtime.descales[index, :, : self.n_kv_heads]
        self.words = runtime.words[index, : 2 * (self.n_q_heads + self.n_kv_heads)]
        logits = runtime.logit_descales
        self.logit_descale = None if logits is None else logits[index, : self.n_q_heads]

    @property
    def _descales(self):
        if self.stale:
            raise SigmascaleError(
                f"the scales of {self.name} are not those of its weights yet: they are computed in the forward of its FSDP unit, so "
                "call the module that was given to fully_shard, or refresh(now=True) on all ranks"
            )
        return self._rows

    q_descale = property(lambda self: self._descales[0], doc="Descales of q, (n_kv_heads).")
    k_descale = property(lambda self: self._descales[1], doc="Descales of k, (n_kv_heads).")
    v_descale = property(lambda self: self._descales[2], doc="Descales of v, (n_kv_heads).")
    o_descale = property(lambda self: self._descales[3], doc="Descales of an FP8 output, (n_kv_heads).")

    @property
    def runtime(self):
        """The runtime, or an exception if it is gone."""
        runtime = self._runtime()
        if runtime is None:
            raise SigmascaleError(
                "the runtime of this plan is gone: keep what attach() returned for as long as it is used"
            )
        return runtime

    def descales(self, batch):
        """q, k and v descales as FlashAttention-3 takes them: ``(batch, n_kv_heads)``, batch stride 0, no copy."""
        return tuple(self._descales[i].expand(batch, -1) for i in range(3))

    def __repr__(self):
        return (
            f"<sigmascale plan of {self.name}: {self.n_q_heads} query and {self.n_kv_heads} KV heads of {self.d_head}>"
        )

    def __reduce_ex__(self, _):
        _refuse_copies("LayerPlan")


class Runtime:
    """Plans of a model's attention layers; made by :func:`attach`, which see.

    ``layers``: a :class:`LayerPlan` for each layer. ``descales`` f32 ``(layers, [q, k, v, o], n_kv_heads)``: what a plan's
    rows are views of; a value is divided by its descale before the cast. ``logits`` f32 ``(layers, n_q_heads, [sigma,
    certain bound, bound with rounding, descale])`` or None. ``logit_descales`` f32 ``(layers, n_q_heads)``: what maps the
    policy's logit bound onto ``tail.eta`` of E4M3, or None where there is none. ``tail``: the :class:`sigmascale.Tail` in
    force. ``before_refresh`` and ``after_refresh``: functions that are called with the runtime before every refresh, while the
    statistics of its calls are there, and at its end, on its stream. All tensors keep their addresses.

    Layers may have unequal heads. Then the tensors have room for the most, ``n_q_heads`` and ``n_kv_heads``, and what lies
    past a layer's own heads is the smallest normal float, which no maximum takes; a plan's views end at its own heads.
    """

    # Tensors that a runtime writes in place must not be inference tensors, which may not be.
    @torch.inference_mode(False)
    def __init__(self, model, policy, bound, layers, backend, tail, fallback=None, group=None):
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
        if bound not in (None, "certain"):
            raise ArgumentError(
                f"bound {bound!r}: a runtime computes the certain logit bound ('certain') or none (None)"
            )
        if backend != "auto":
            _backends.backend(backend)
        if fallback not in (None, "bf16"):
            raise ArgumentError(f"fallback {fallback!r} must be 'bf16' or None")
        # What torch.compile returns may be gone while the model that it wraps is in use.
        model = _distributed.unwrapped(model)
        self.policy, self.bound, self.backend, self.tail, self.fallback = policy, bound, backend, tail, fallback
        self._given, self._group = None if layers is None else list(layers), group
        self._model = weakref.ref(model)
        self._lock = threading.Lock()
        # Engines whose launches are in somebody's CUDA graph, with the weights that they read: a replay reaches both.
        self._captured = []
        # How often a sliced layer was whole at addresses that no engine knew.
        self.misses = 0
        self.before_refresh, self.after_refresh = [], []
        layers = _layers.Layers(model, self._given)
        found = layers.at_rest
        self.device, self._q_heads = layers.device(), layers.q_heads
        self._shape, self._heads = _shape(found), _results.Heads(found)
        if policy in FROM_BOUNDS and any(layer.norm is None for layer in found):
            raise UnsupportedError(
                "there is no norm in front of the projections, so v has no bound: take policy='delayed-te' or 'current'"
            )
        if policy == "geometry-c-star" and any(layer.q_norm is not None for layer in found):
            raise UnsupportedError(
                "q and k are normalised after the projection, and c_star bounds the logits of projections: take "
                "policy='geometry', whose operand descales are the same"
            )
        if policy == "geometry-c-star" and not self._heads.equal:
            (n_q, n_kv), counts = self._heads.counts[0], self._heads.counts
            other = next(index for index, count in enumerate(counts) if count != counts[0])
            raise UnsupportedError(
                f"{found[other].name} has {counts[other][0]} query and {counts[other][1]} KV heads and {found[0].name} {n_q} and "
                f"{n_kv}: c_star is one constant of a model whose layers have as many; take policy='geometry', whose operand "
                "descales are the same"
            )
        count, n_q, n_kv = len(found), self._heads.n_q, self._heads.n_kv
        # Types are named: the default one may be another.
        make = lambda *shape, dtype=torch.float32: torch.zeros(*shape, device=self.device, dtype=dtype)
        with self._on_device():
            self.descales = self._heads.pad(make(count, 4, n_kv) + 1, 1)
            # What attention calls report: rows of four words for logits and q by query head, k and v by KV head.
            self.words = make(count, 2 * (n_q + n_kv), 4, dtype=torch.int32)
            self.logits = make(count, n_q, 4) if bound else None
            if bound:
                self._heads.pad(self.logits[..., 3], 0)
            # A policy counts the query heads that it is told of.
            share = sum(layer.n_q_heads for layer in found) / self._q_heads
            self._policy = make_policy(policy, config, counted | {"delta": counted["delta"] * share})
            has_logits = bound or self._policy.has_logits
            self.logit_descales = self._heads.pad(make(count, n_q) + 1, 0) if has_logits else None
        self.n_q_heads, self.n_kv_heads = n_q, n_kv
        self.layers = [LayerPlan(self, index, layer) for index, layer in enumerate(found)]
        # Handles of hooks on FSDP units, which go with the runtime.
        self._hooks = []
        weakref.finalize(self, _remove, self._hooks)
        self._bind(layers)
        self._calls = [_calls.watch(plan.words) for plan in self.layers]
        weakref.finalize(self, _calls.forget, [plan.words.data_ptr() for plan in self.layers])
        self._register(found)
        weakref.finalize(model, _release, weakref.ref(self))
        self.refresh()

    def __len__(self):
        return len(self.layers)

    def __reduce_ex__(self, _):
        _refuse_copies("Runtime")

    def __repr__(self):
        return f"<sigmascale Runtime: {len(self.layers)} layers, policy {self.policy}, {self.device}>"

    def _register(self, found):
        self._modules = weakref.WeakKeyDictionary()
        for plan, layer in zip(self.layers, found):
            if layer.module is not None:
                self._modules[layer.module] = plan
                give_plan(layer.module, plan)

    def plan_of(self, module):
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

    def _bind(self, layers):
        """Sets engines up over the tensors where they lie now, and hooks where FSDP makes them whole."""
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
            self._targets["bounds"] = [*self._targets.get("bounds", []), _results.Target(self.logits)]
        resident = [layers.at_rest[index] for index in layers.resident]
        if self._targets and resident:
            self._engine = _Engine(resident, self._targets, self, layers.resident)
        # Sliced layers whose scales are of earlier weights, and engines by index and addresses.
        self._due, self._unit_engines = set(), {}
        if self._targets:
            self._hooks += _distributed.hooked(layers, weakref.WeakMethod(self._compute))
        # The hooks hold what reads the model, and go with it.
        self._layers, self._tensors = weakref.ref(layers), resident
        self._places, self._resident, self._sliced = layers.places(), layers.resident, layers.sliced
        self._sources = _sources(resident, _storages(self._model()) if self._given is not None else {})
        self._owned = any(holder is not None for holder, *_ in self._sources)

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
                key = index, *(_where(tensor) for tensor in layer.tensors().values())
                engine = self._unit_engines.pop(key, None)
                if engine is None:
                    engine = _Engine([layer], self._targets, self, [index])
                    self.misses += 1
                self._unit_engines[key] = engine
                while len(self._unit_engines) > _ENGINES_A_LAYER * len(self._sliced):
                    self._unit_engines.pop(next(iter(self._unit_engines)))
                if capturing:
                    self._captured.append((engine, []))
                engine.run(self._stream())
                if self.logits is not None:
                    self.logit_descales[index].copy_(self.logits[index, :, 3])
                self._policy.update(self, self._stream(), [index])
                self._due.discard(index)
                self.layers[index].stale = False

    def _written(self):
        """The tensors that plans are made in."""
        return [x for x in (self.descales, self.logits, self.logit_descales) if x is not None]

    def _keep_for_replays(self):
        """Holds the engine that is being captured, and aliases of its weights, which may be given other memory."""
        if self._engine is None or any(engine is self._engine for engine, _ in self._captured):
            return
        self._captured.append((self._engine, [x.detach() for layer in self._tensors for x in layer.tensors().values()]))

    def _check(self):
        if self._model() is None or self._tensors is None:
            raise SigmascaleError("the model was deleted: attach to the model that is in use")
        if self._sources is not None and all(
            (holder is None or holder.get(key) is held) and (where is None or _where(held) == where)
            for holder, key, held, where in self._sources
        ):
            return
        if self._capturing():
            raise SigmascaleError("weights have moved since the last refresh(): call refresh() once before the capture")
        layers = _layers.Layers(self._model(), self._given)
        found = layers.at_rest
        # Copies that never were the model's own are the caller's to keep.
        if self._given is not None and self._owned:
            current = _storages(self._model())
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
                stacklevel=3,
            )
        self._bind(layers)

    def refresh(self, now=False):
        """Recomputes every plan from the weights as they are, on the current stream.

        Layers sharded by FSDP are marked stale, and each computes its scales in its next forward, when its weights are whole; no
        rank waits for another. ``now=True`` makes them whole here (``fully_shard`` alone): all ranks must call it.

        Call it after an optimizer step or a weight refit, not between a forward and its backward. No host synchronisation
        and no allocation by the driver once the first call is done, so it can be captured in a CUDA graph and replayed.
        Weights that have moved are found again; a graph from before goes on with the old ones, which are kept for it, and a
        RuntimeWarning says so. Raises :class:`SigmascaleError` if the model is gone, its weights were
        replaced, or another thread is in here; :class:`ArgumentError` if they have left the device.
        """
        if not self._lock.acquire(blocking=False):
            raise SigmascaleError("refresh() is running in another thread: call it from one thread at a time")
        try:
            with torch.inference_mode(False), torch.no_grad(), self._on_device():
                self._check()
                for work in self.before_refresh:
                    work(self)
                stream = self._stream()
                if self._capturing():
                    self._keep_for_replays()
                if self._group is not None and self._policy.remembers:
                    _distributed.reduce_maxima(self.words, self._group)
                self._policy.observe(self, stream)
                if self._engine is not None:
                    self._engine.run(stream)
                if self.logits is not None:
                    self.logit_descales.copy_(self.logits[..., 3])
                from_weights = self.policy in FROM_BOUNDS
                self._policy.update(self, stream, self._resident if from_weights else None)
                self.words.zero_()
                for counter in self._calls:
                    counter.clear()
                if self._targets and self._sliced:
                    self._due |= self._sliced
                    for index in self._sliced:
                        self.layers[index].stale = from_weights
                    # A backward that still needs the scales from before is refused by autograd.
                    torch.autograd.graph.increment_version(self.descales)
                    if now:
                        _distributed.compute_now(self._layers(), self._compute)
                for work in self.after_refresh:
                    work(self)
        finally:
            self._lock.release()

    def observed(self):
        """The same as :meth:`stats` without waiting, as device tensors: amax ``(layers, 3, n_kv)`` of q, k and v, and
        counts ``(layers, 3, n_kv, [overflow, beyond, non_finite])``."""
        return _results.observed(self.words, self._heads)

    def stats(self):
        """What attention calls reported since the last refresh, as NumPy arrays; waits for the device.

        ``amax`` ``(layers, 3, n_kv)`` of q, k and v; ``overflow`` (values past 448 descales), ``beyond`` (past 464) and
        ``non_finite`` likewise; ``peak``: the largest |x / descale| (NaN under ``current``, whose descales are gone);
        ``logit_max`` and ``logit_min`` ``(layers, n_q)`` where the kernel reports them, else NaN. Past a layer's own heads
        there is nothing: zeros, and NaN for logits. ``calls``: a dict of counts ``(layers,)`` by what ran them: a backend, or
        ``bf16`` for PyTorch's own attention. Counted where Python launches them: a replay of a CUDA graph is not, nor is a
        fallback in compiled code.
        """
        words = self.words.cpu()
        amax, counts = _results.observed(words, self._heads)
        descales = self.descales[:, :3].cpu()
        ordered = _results.unsigned(words[:, : self.n_q_heads, :2])
        for index, (n_q, _) in enumerate(self._heads.counts):
            ordered[index, n_q:] = 0
        extremes = _results.extremes(ordered)
        return {
            "amax": amax.numpy(),
            "overflow": counts[..., 0].numpy(),
            "beyond": counts[..., 1].numpy(),
            "non_finite": counts[..., 2].numpy(),
            "peak": (amax / descales).numpy() if not self._policy.per_call else np.full(amax.shape, np.nan, np.float32),
            "logit_max": extremes[..., 0].numpy(),
            "logit_min": extremes[..., 1].numpy(),
            "calls": {
                name: np.array([counter[name] for counter in self._calls]) for name in sorted(set().union(*self._calls))
            },
        }

    def slack(self):
        """How far the certain bounds lay above what ``auto-c`` has observed in its burn-in: for ``logit``, ``q``, ``k`` and
        ``v`` a dict of NumPy arrays ``(layers,)``, the ``min``, ``mean`` and ``max`` of bound over amax over the layer's heads
        and steps, and their ``count``. NaN where nothing was seen: logits are reported by the native kernel alone. Waits for the
        device; it begins anew with ``load_state_dict``. Raises :class:`UnsupportedError` under another policy."""
        return self._policy.slack(len(self))

    def check(self):
        """Raises :class:`NonFiniteError` if the last refresh met weights or bounds that are not finite. Waits."""
        status = 0 if self._engine is None else self._engine.status() & 3
        bad = (~torch.isfinite(self.descales)).any(dim=2).any(dim=1).nonzero().flatten().tolist()
        if status or bad:
            raise NonFiniteError(
                f"weights or bounds are not finite in layers {bad or 'unknown'}: the plan is not usable"
            )

    def state_dict(self):
        """All that later plans depend on, apart from the weights: a dict of plain values and one tensor.

        Empty of both for the policies that remember nothing (``geometry``, ``geometry-c-star``, ``current``). Waits for the
        device.
        """
        state = self._policy.save()
        descales = None if state is None else self.descales.clone()
        return {
            "version": STATE_VERSION,
            "policy": self.policy,
            "shape": self._state_shape(),
            "places": self._places,
            "descales": descales,
            "state": state,
        }

    def _state_shape(self):
        """Shape of the descales, and where layers have unequal heads those of each."""
        unequal = [] if self._heads.equal else [list(count) for count in self._heads.counts]
        return [*self.descales.shape, *unequal]

    def load_state_dict(self, state):
        """Goes on from a saved state. Raises :class:`MismatchError`, and changes nothing, if it is damaged or of another
        policy, version or shape. Descales of policies that remember nothing stay those of the present weights.

        Of a state with more layers or heads (:func:`merge_states`) it takes those that this process has."""
        if not isinstance(state, Mapping):
            raise TypeError(f"state: expected what state_dict() returned, got {type(state).__name__}")
        mine = {"version": STATE_VERSION, "policy": self.policy, "shape": self._state_shape()}
        for key in (*mine, "places", "descales", "state"):
            if key not in state:
                raise MismatchError(f"the saved state has no {key!r}: it is no state of a sigmascale runtime")
        for key in ("version", "policy"):
            if state[key] != mine[key]:
                raise MismatchError(f"the saved state has {key} {state[key]!r}, this runtime {mine[key]!r}")
        if not self._policy.remembers:
            return
        if state["places"] != self._places:
            state = _state.taken(state, self._places)
        for key, value in mine.items():
            saved = list(state[key]) if key == "shape" else state[key]
            if saved != value:
                raise MismatchError(f"the saved state has {key} {saved!r}, this runtime {value!r}")
        saved = state["descales"]
        shape = list(self.descales.shape)
        if not isinstance(saved, torch.Tensor) or list(saved.shape) != shape or saved.dtype != torch.float32:
            raise MismatchError(f"the descales of the saved state are no float32 tensor of shape {shape}")
        if not bool((torch.isfinite(saved) & (saved > 0)).all()):
            raise MismatchError("the saved state has descales that are not finite and above 0")
        with torch.inference_mode(False), torch.no_grad():
            self._policy.load(state["state"])
            self.descales.copy_(saved)

    def memory(self, owner, place, kind):
        """Memory that ``owner`` holds, as a tensor that keeps it alive; on the CPU it is one."""
        if isinstance(place, torch.Tensor):
            return place
        return torch.as_tensor(_results.Memory(owner, *place, kind), device=self.device)


def _storages(model):
    """Where each memory block that a model's parameters lie in is held: (dict, name) by address."""
    return {
        _distributed.local(parameter).untyped_storage().data_ptr(): (module._parameters, key)
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None and parameter.device.type != "meta"
    }


def _shape(found):
    """Query heads, KV heads and head dimension of each layer."""
    return [(layer.n_q_heads, layer.n_kv_heads, layer.d_head) for layer in found]


def _where(tensor):
    """What an engine was told of a tensor."""
    tensor = _distributed.local(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _sources(found, owners):
    """What must be as it is for the engines to hold: (dict, key, what is in it, where that lies).

    ``owners``: the parameters by the address of their memory, for layers that name tensors and not modules.
    """
    sources = []
    for layer in found:
        for holder, key, held in layer.sources:
            sources.append((holder, key, held, _where(held) if isinstance(held, torch.Tensor) else None))
        if layer.sources:
            continue
        for tensor in layer.tensors().values():
            sources.append((None, None, tensor, _where(tensor)))
            if owner := owners.get(tensor.untyped_storage().data_ptr()):
                holder, key = owner
                sources.append((holder, key, holder[key], _where(holder[key])))
    return sources


def _refuse_copies(kind):
    raise TypeError(
        f"a {kind} belongs to its model and its device, and is neither copied nor pickled: save state_dict() of the runtime, "
        "and attach() to the other model"
    )


class _Engine:
    """The native engine over a model's layers, and where its results go."""

    def __init__(self, found, targets, runtime, indices):
        entries = [_layers.entries(layer) for layer in found]
        rows = [row for each in entries for row in each]
        if runtime.device.type == "cpu":
            tail = dataclasses.asdict(runtime.tail)
            self._engine = _host.ScaleEngine(rows, "bounds" in targets, tail, runtime._q_heads)
        else:
            self._engine = _native.ScaleEngine(runtime.device.index, rows, "bounds" in targets, runtime.tail.eta)
        results = self._engine.results()
        self._word = runtime.memory(self._engine, results.pop("status"), "<i4")
        values = {name: runtime.memory(self._engine, place, "<f4") for name, place in results.items()}
        counts = [runtime._heads.counts[index] for index in indices]
        every = _results.runs(counts, [len(each) for each in entries], indices)
        self._copies = _results.copies(values, targets, every)

    def run(self, stream):
        self._engine.launch(stream)
        for source, target in self._copies:
            target.copy_(source)

    def status(self):
        return int(self._word.item())


class _Plans(list):
    """Plans of an attention module, the latest last, for the Hugging Face interface, which knows the module alone. They lie with
    the module, where compiled code finds them; a copy of the module has none."""

    name = "_sigmascale_plans"

    def __reduce_ex__(self, _):
        return _Plans, ()


def give_plan(module, plan):
    """Adds a module's latest plan, and drops those whose runtime is gone."""
    alive = [old for old in getattr(module, _Plans.name, ()) if old._runtime() is not None]
    setattr(module, _Plans.name, _Plans([*alive, plan]))


def plan_of_module(module):
    """The latest plan of a module whose runtime is alive."""
    for plan in reversed(getattr(module, _Plans.name, ())):
        if plan._runtime() is not None:
            return plan
    raise ArgumentError(
        f"{type(module).__name__} has no plan: call sigmascale.torch.attach(model) after the model is loaded, and keep what it "
        "returns"
    )


def _release(reference):
    runtime = reference()
    if runtime is not None:
        runtime._tensors, runtime._sources, runtime._engine = None, [], None
        _remove(runtime._hooks)


def _remove(hooks):
    while hooks:
        hooks.pop().remove()


@contextlib.contextmanager
def _unnoticed(tensors):
    """Writes to these tensors in a block that autograd does not see: plans of other layers lie in them, which backwards need."""
    with contextlib.ExitStack() as stack:
        for tensor in tensors:
            stack.enter_context(torch.autograd._unsafe_preserve_version_counter(tensor))
        yield


def attach(model, policy="geometry", bound=None, *, layers=None, backend="auto", tail=None, fallback=None, group=None):
    """Plans for every attention layer of a model.

    ``model`` is a Hugging Face model (its layers are found by the family table) or any ``nn.Module`` with ``layers``, a
    list of :class:`Layer`, or of functions that return one each. No weight is copied. The model may be sharded by
    ``fully_shard``, FullyShardedDataParallel or ``parallelize_module``, wrapped in DistributedDataParallel, or a pipeline stage;
    nothing here communicates, but where ``group`` is given: the process group of data and context parallel ranks, over which
    ``refresh()`` reduces the maxima that ``auto-c``, ``delayed-te`` and ``delayed-paper`` observe.

    ``policy`` says where descales come from: ``geometry`` (the certain bounds: no token can overflow them),
    ``geometry-c-star``, ``auto-c``, ``delayed-te``, ``delayed-paper`` or ``current``; or :class:`sigmascale.AutoC`, :class:`sigmascale.DelayedPaper` or :class:`sigmascale.DelayedTe` with their parameters.
    ``bound="certain"`` adds certified logit bounds (``runtime.logits``). ``tail``, a :class:`sigmascale.Tail`, is what the
    failure probability of ``geometry-c-star`` counts, by default one sequence of 1024 tokens, and the share of E4M3 that
    logit descales map onto. ``backend`` is the attention call behind the wrappers: ``auto``, ``native``, ``fa3``, ``cudnn``,
    ``torch`` or ``emulated``. ``fallback="bf16"`` sends the calls that no FP8 kernel takes (masks of other kinds than causal and
    padding, windows, soft-caps, sinks, dropout) to PyTorch's own attention, says so once, and counts them in ``stats()``; by
    default they are refused.

    Returns a :class:`Runtime`: call ``refresh()`` after every optimizer step or weight refit.
    """
    return Runtime(model, policy, bound, layers, backend, tail, fallback, group)
