"""Plans of a model's attention layers, kept in device tensors that never move."""

import math
import threading
import weakref

import numpy as np
import torch

from .. import _native
from .._errors import ArgumentError, CudaError, MismatchError, NonFiniteError, SigmascaleError, UnsupportedError
from . import _layers
from ._policies import FROM_BOUNDS, POLICIES, make_policy

STATE_VERSION = 1
_MAX = 448.0
# The share of the rounding errors of projection, norm and rotation that a certain operand bound carries.
_ROUNDING = 1.0 + 1.0 / 32.0


class LayerPlan:
    """The scales of one layer: views into the runtime's tensors, whose addresses stay the same."""

    def __init__(self, runtime, index, layer):
        # Weak: a model whose modules know their plan must not keep itself alive through it.
        self._runtime = weakref.ref(runtime)
        self.index, self.name = index, layer.name
        self.n_q_heads, self.n_kv_heads, self.d_head = layer.n_q_heads, layer.n_kv_heads, layer.d_head
        self.per_call = runtime._policy.per_call
        self.softmax_scale = self.d_head**-0.5 if layer.softmax_scale is None else layer.softmax_scale
        self._descales = runtime.descales[index]
        self.words = runtime.words[index]
        self.logit_descale = None if runtime.logits is None else runtime.logits[index, :, 3]

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


class Runtime:
    """See :func:`attach`."""

    def __init__(self, model, policy, bound, layers, backend):
        if policy not in POLICIES:
            raise ArgumentError(f"policy {policy!r} is not one of {', '.join(POLICIES)}")
        if bound not in (None, "certain"):
            raise ArgumentError(f"bound {bound!r}: the GPU computes the certain logit bound ('certain') or none (None)")
        self.policy, self.bound, self.backend = policy, bound, backend
        self._given = layers is not None
        self._model = weakref.ref(model)
        self._lock = threading.Lock()
        # Called with the runtime at the end of every refresh, on its stream.
        self.after_refresh = []
        found = list(layers) if self._given else _layers.find(model)
        self.device = _layers.check(found)
        shapes = {(layer.n_q_heads, layer.n_kv_heads, layer.d_head) for layer in found}
        if len(shapes) > 1:
            raise UnsupportedError(
                f"layers of different head counts or dimensions {sorted(shapes)}: attach one runtime for each"
            )
        if policy in FROM_BOUNDS and any(layer.norm is None for layer in found):
            raise UnsupportedError(
                "there is no norm in front of the projections, so v has no bound: take policy='delayed-te' or 'current'"
            )
        n_q, n_kv, _ = next(iter(shapes))
        make = lambda *shape, **options: torch.zeros(*shape, device=self.device, **options)
        with torch.cuda.device(self.device):
            # q, k, v, o by layer and KV head; addresses never change.
            self.descales = torch.ones(len(found), 4, n_kv, device=self.device)
            # What attention calls report: rows of four words for logits and q by query head, k and v by KV head.
            self.words = make(len(found), 2 * (n_q + n_kv), 4, dtype=torch.int32)
            # sigma, certain bound, rounded bound and logit descale by layer and query head.
            self.logits = make(len(found), n_q, 4) if bound else None
        self.n_q_heads, self.n_kv_heads = n_q, n_kv
        self._policy = make_policy(policy)
        self._bind(found)
        self.layers = [LayerPlan(self, index, layer) for index, layer in enumerate(found)]
        self._register(found)
        weakref.finalize(model, _release, weakref.ref(self))
        self.refresh()

    def __len__(self):
        return len(self.layers)

    def __repr__(self):
        return f"<sigmascale Runtime: {len(self.layers)} layers, policy {self.policy}, {self.device}>"

    def _register(self, found):
        self._modules = weakref.WeakKeyDictionary()
        for plan, layer in zip(self.layers, found):
            if layer.module is not None:
                self._modules[layer.module] = plan
                PLANS[layer.module] = plan

    def plan_of(self, module):
        """The plan of an attention module."""
        plan = self._modules.get(module)
        if plan is None:
            raise ArgumentError(f"{type(module).__name__} is no attention module of this runtime")
        return plan

    def _bind(self, found):
        """Sets engines up over the tensors where they lie now."""
        self._tensors, self._sources, self._engines = found, [], []
        owners = _storages(self._model()) if self._given else {}
        for layer in found:
            places = [(module._parameters, key) for module, key in layer.sources]
            for tensor in layer.tensors().values() if self._given else ():
                owner = owners.get(tensor.untyped_storage().data_ptr())
                places += [owner] if owner else []
                self._sources.append((None, None, tensor, tensor.data_ptr()))
            self._sources += [(held, key, held[key], held[key].data_ptr()) for held, key in places]
        available, missing = _native.gpu()
        if not available:
            raise CudaError(f"kernels cannot be compiled and launched here: {missing}")
        self._policy.bind(self, found)
        if not self._policy.needs_geometry and self.logits is None:
            return
        # An engine takes layers of one kind; models that rotate only some layers need several.
        kinds = {}
        for index, layer in enumerate(found):
            rows = _layers.entries(layer)
            key = (
                len(rows),
                *(
                    rows[0][k]
                    for k in ("rotary", "interleaved", "rope_factor", "mean_removed", "vector_dtype", "d_model")
                ),
            )
            kinds.setdefault(key, []).append((index, rows))
        for members in kinds.values():
            rows = [row for _, entries in members for row in entries]
            logits = self.logits is not None and all(row["fixed_bounds"] is None for row in rows)
            engine = _native.ScaleEngine(self.device.index, rows, logits)
            self._engines.append(_Engine(engine, [index for index, _ in members], len(members[0][1]), self))

    def _check(self):
        if self._model() is None or self._tensors is None:
            raise SigmascaleError("the model was deleted: attach to the model that is in use")
        moved = False
        for parameters, key, tensor, pointer in self._sources:
            if tensor.data_ptr() != pointer or (parameters is not None and parameters.get(key) is not tensor):
                moved = True
                break
        if not moved:
            return
        if torch.cuda.is_current_stream_capturing():
            raise SigmascaleError("weights have moved since the last refresh(): call refresh() once before the capture")
        found = self._tensors if self._given else _layers.find(self._model())
        if self._given:
            current = _storages(self._model())
            # Copies that never were the model's own are the caller's to keep.
            owned = any(held is not None for held, *_ in self._sources)
            tensors = [tensor for layer in found for tensor in layer.tensors().values()]
            if owned and any(tensor.untyped_storage().data_ptr() not in current for tensor in tensors):
                raise SigmascaleError(
                    "weights were replaced by others since attach(): attach again, with layers that name them"
                )
        if _layers.check(found) != self.device:
            raise ArgumentError(f"the model has left {self.device}: attach again on its new device")
        self._bind(found)

    def refresh(self):
        """Recomputes every plan from the weights as they are, on the current stream.

        Call it after an optimizer step or a weight refit. No host synchronisation and no allocation on the device once
        the first call is done, so it can be captured in a CUDA graph and replayed.
        """
        if not self._lock.acquire(blocking=False):
            raise SigmascaleError("refresh() is running in another thread: call it from one thread at a time")
        try:
            self._check()
            with torch.cuda.device(self.device), torch.no_grad():
                stream = torch.cuda.current_stream(self.device).cuda_stream
                for engine in self._engines:
                    engine.run(stream, self)
                self._normalised()
                self._policy.update(self, stream)
                self.words.zero_()
                for work in self.after_refresh:
                    work(self)
        finally:
            self._lock.release()

    def _normalised(self):
        """Bounds of q and k that are normalised after the projection, from the gains alone."""
        if not self._policy.needs_geometry:
            return
        for index, layer in enumerate(self._tensors):
            if layer.q_norm is None:
                continue
            for row, (gain, heads) in enumerate([(layer.q_norm, layer.n_q_heads), (layer.k_norm, layer.n_kv_heads)]):
                r = layer.d_head
                gain = (gain.float() + layer.qk_norm_offset).abs().reshape(-1, r)
                if layer.rope_factor != 1.0:
                    gain = torch.cat([gain[:, : layer.rotary] * layer.rope_factor, gain[:, layer.rotary :]], dim=1)
                largest = gain.amax(dim=1).expand(heads).reshape(layer.n_kv_heads, -1).amax(dim=1)
                radius = math.sqrt(heads * r if layer.qk_norm_joint else r)
                descale = largest * (radius * _ROUNDING / _MAX)
                self.descales[index, row].copy_(torch.where(descale == 0, 1.0, descale))

    def observed(self):
        """The same as :meth:`stats` without waiting, as device tensors: amax ``(layers, 3, n_kv)`` of q, k and v, and
        counts ``(layers, 3, n_kv, [overflow, beyond, non_finite])``."""
        return folded(self.words, self.n_q_heads, self.n_kv_heads)

    def stats(self):
        """What attention calls reported since the last refresh, as NumPy arrays; waits for the device.

        ``amax`` ``(layers, 3, n_kv)`` of q, k and v; ``overflow`` (values past 448 descales), ``beyond`` (past 464) and
        ``non_finite`` likewise; ``peak``: the largest |x / descale| (NaN under ``current``, whose descales are gone);
        ``logit_max`` and ``logit_min`` ``(layers, n_q)`` where the kernel reports them, else NaN.
        """
        n_q, n_kv = self.n_q_heads, self.n_kv_heads
        words = self.words.cpu()
        amax, counts = folded(words, n_q, n_kv)
        descales = self.descales[:, :3].cpu()
        ordered = words[:, :n_q, :2].long() & 0xFFFFFFFF
        empty = ordered == 0
        low = ordered.clone()
        low[..., 1] ^= 0xFFFFFFFF
        bits = torch.where(low & 0x80000000 != 0, low & 0x7FFFFFFF, ~low & 0xFFFFFFFF)
        extremes = torch.where(empty, math.nan, bits.to(torch.int64).to(torch.uint32).view(torch.float32).double())
        return {
            "amax": amax.numpy(),
            "overflow": counts[..., 0].numpy(),
            "beyond": counts[..., 1].numpy(),
            "non_finite": counts[..., 2].numpy(),
            "peak": (amax / descales).numpy() if not self._policy.per_call else np.full(amax.shape, np.nan, np.float32),
            "logit_max": extremes[..., 0].numpy(),
            "logit_min": extremes[..., 1].numpy(),
        }

    def check(self):
        """Raises :class:`NonFiniteError` if the last refresh met weights or bounds that are not finite. Waits."""
        status = sum(engine.status() & 3 for engine in self._engines)
        bad = (~torch.isfinite(self.descales)).any(dim=2).any(dim=1).nonzero().flatten().tolist()
        if status or bad:
            raise NonFiniteError(
                f"weights or bounds are not finite in layers {bad or 'unknown'}: the plan is not usable"
            )

    def state_dict(self):
        """All that later plans depend on, apart from the weights."""
        return {
            "version": STATE_VERSION,
            "policy": self.policy,
            "shape": list(self.descales.shape),
            "descales": self.descales.clone(),
            "state": self._policy.save(),
        }

    def load_state_dict(self, state):
        """Goes on from a saved state; one of another policy, version or shape is refused by name."""
        mine = {"version": STATE_VERSION, "policy": self.policy, "shape": list(self.descales.shape)}
        for key, value in mine.items():
            if key not in state:
                raise MismatchError(f"the saved state has no {key!r}: it is no state of a sigmascale runtime")
            if state[key] != value:
                raise MismatchError(f"the saved state has {key} {state[key]}, this runtime {value}")
        with torch.no_grad():
            self._policy.load(state["state"])
            self.descales.copy_(state["descales"])

    def memory(self, owner, place, kind):
        """Device memory that ``owner`` holds, as a tensor that keeps it alive."""
        return torch.as_tensor(_Memory(owner, *place, kind), device=self.device)


def folded(words, n_q, n_kv):
    """amax ``(layers, 3, n_kv)`` and counts ``(layers, 3, n_kv, 3)`` from a runtime's words."""
    rows = words[:, n_q:].reshape(words.shape[0], -1, 4)
    q, k, v = rows.split([n_q, n_kv, n_kv], dim=1)
    q = q.reshape(words.shape[0], n_kv, -1, 4)
    # Bits of numbers that are not negative keep their order as integers.
    amax = torch.stack([q[..., 0].amax(dim=2), k[..., 0], v[..., 0]], dim=1).view(torch.float32)
    counts = torch.stack([q[..., 1:].sum(dim=2).to(torch.int32), k[..., 1:], v[..., 1:]], dim=1)
    return amax, counts


def _storages(model):
    """Where each memory block that a model's parameters lie in is held: (dict, name) by address."""
    return {
        parameter.untyped_storage().data_ptr(): (module._parameters, key)
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None and parameter.device.type == "cuda"
    }


class _Engine:
    """One native engine and where its results go."""

    def __init__(self, engine, layers, parts, runtime):
        self._engine = engine
        count, device = len(layers), runtime.device
        results = engine.results()
        n_q, n_kv = runtime.n_q_heads, runtime.n_kv_heads
        # (layer, part, q k v o, head of the part) -> (layer, q k v o, head)
        heads = runtime.memory(engine, results["heads"], "<f4").view(count, parts, 4, n_kv // parts)
        self._heads = heads.transpose(1, 2).reshape(count, 4, n_kv) if parts == 1 else heads.transpose(1, 2)
        self._bounds = None
        if "bounds" in results:
            self._bounds = runtime.memory(engine, results["bounds"], "<f4").view(count, n_q, -1)[..., :4]
        self._word = runtime.memory(engine, results["status"], "<i4")
        consecutive = layers == list(range(layers[0], layers[0] + count))
        self._places = slice(layers[0], layers[0] + count) if consecutive else None
        self._index = None if consecutive else torch.tensor(layers, device=device)
        self._writes = runtime._policy.needs_geometry

    def run(self, stream, runtime):
        self._engine.launch(stream)
        if self._writes:
            self._store(runtime.descales, self._heads)
        if self._bounds is not None:
            self._store(runtime.logits, self._bounds)

    def _store(self, target, values):
        shape = (values.shape[0], *target.shape[1:])
        if self._index is not None:
            target.index_copy_(0, self._index, values.reshape(shape))
        elif values.dim() == 4:
            target[self._places].view(values.shape[0], 4, values.shape[2], -1).copy_(values)
        else:
            target[self._places].copy_(values)

    def status(self):
        return int(self._word.item())


class _Memory:
    """Device memory of the engine, in the form that ``torch.as_tensor`` takes; keeps the engine alive."""

    def __init__(self, engine, pointer, length, kind):
        self._engine = engine
        self.__cuda_array_interface__ = {"shape": (length,), "typestr": kind, "data": (pointer, False), "version": 2}


# Plans by attention module, for the Hugging Face interface, which knows the module alone.
PLANS = weakref.WeakKeyDictionary()


def _release(reference):
    runtime = reference()
    if runtime is not None:
        runtime._tensors, runtime._sources, runtime._engines = None, [], []


def attach(model, policy="geometry", bound=None, *, layers=None, backend="auto"):
    """Plans for every attention layer of a model on a GPU.

    ``model`` is a Hugging Face model (its layers are found by the family table) or any ``nn.Module`` with ``layers``, a
    list of :class:`Layer`. No weight is copied. ``policy`` says where descales come from: ``geometry`` (the certain
    bounds: no token can overflow them), ``geometry-c-star``, ``auto-c``, ``delayed-te``, ``delayed-paper`` or
    ``current``. ``bound="certain"`` adds
    certified logit bounds (``runtime.logits``). ``backend`` is the attention call behind the wrappers: ``auto``,
    ``native``, ``fa3``, ``cudnn``, ``torch`` or ``emulated``.

    Returns a :class:`Runtime`: call ``refresh()`` after every optimizer step or weight refit.
    """
    return Runtime(model, policy, bound, layers, backend)
