"""Where descales come from: the worst-case bounds, this call's own maxima, or a native policy with memory on the device."""

import json
import math

import numpy as np
import torch

from .. import _native
from .._errors import MismatchError, SigmascaleError, UnsupportedError
from .._parameters import DEFAULTS
from . import _heads, _host
from ._heads import Target

POLICIES: tuple[str, ...] = tuple(policy["name"] for policy in DEFAULTS["policies"])
# Policies that plan from bounds.
FROM_BOUNDS = tuple(policy["name"] for policy in DEFAULTS["policies"] if policy["bound"])


class Geometry:
    """Descales are those of the engine's worst-case bounds; nothing is stored."""

    # Whether each call makes its own descales, the policy has a memory, and it has descales for logits.
    per_call, remembers, has_logits = False, False, False

    def bind(self, runtime, found):
        """Sets up over the tensors at their present addresses."""

    def targets(self, runtime):
        """Where an engine's results go: targets by the names of results."""
        return {"heads": [Target(runtime.descales)]}

    def observe(self, runtime, stream):
        """Takes in what the calls since the last refresh reported, while their bounds still stand."""

    def update(self, runtime, stream, layers=None):
        """Plans the next step, of these layers or of all."""

    def slack(self, layers):
        """Rows of each tensor: see ``Runtime.slack``."""
        raise UnsupportedError("slack is measured by policy='auto-c' alone, in its burn-in")

    def bounds(self):
        """Tensors with the bounds of the present plans, which the next ``observe`` reads."""
        return []

    def save(self):
        """What a resume needs, as plain values."""
        return None

    def load(self, state):
        """Goes on from it."""


class Current(Geometry):
    """Every call takes the amax of its own operands, one a tensor."""

    per_call = True

    def targets(self, runtime):
        return {}


class Native(Geometry):
    """A policy of the crate, with its memory on the device; where it plans from bounds, engines write them into it.

    Layers of as many heads have one native policy. Its parameters couple no layers, so several of them are one policy.
    """

    has_logits = True

    def __init__(self, name, config, tail):
        self._name, self._config, self._tail = name, config, tail
        self._parts, self._specs, self._fresh = [], None, True
        self.remembers = name != "geometry-c-star"

    def bind(self, runtime, found):
        groups = list(runtime._heads.groups().values())
        specs = [_native.attention_spec([found[index] for index in layers]) for layers in groups]
        # Memory depends on no address: it stays where it is when weights move, and so do graphs that reach it.
        if self._specs is None:
            self._parts = [self._part(runtime, spec, layers) for spec, layers in zip(specs, groups)]
            self._specs = specs
        elif self._specs != specs:
            raise SigmascaleError("norms, rotation or softmax scale are others than at attach(): attach again")

    def _part(self, runtime, spec, layers):
        bounded = self._name in FROM_BOUNDS
        if runtime.device.type == "cpu":
            native = _host.Policy(spec, self._config, self._tail, bounded)
        else:
            native = _native.DevicePolicy(runtime.device.index, spec, self._config, self._tail, bounded)
        return _Part(native, bounded, runtime, layers)

    def targets(self, runtime):
        targets = {}
        for part in self._parts:
            for name, tensor in part.bounds.items():
                targets.setdefault(name, []).append(Target(tensor, part.layers))
        return targets

    def observe(self, runtime, stream):
        if not self._fresh:
            for part in self._parts:
                part.observe(runtime, stream)

    def update(self, runtime, stream, layers=None):
        for part in self._parts:
            part.update(runtime, stream, layers)
        self._fresh = False

    def slack(self, layers):
        if self._name != "auto-c":
            return super().slack(layers)
        empty = {"min": math.nan, "mean": math.nan, "max": math.nan, "count": 0}
        rows = [[None] * 4] * layers
        for part in self._parts:
            for layer, row in zip(part.layers, json.loads(part.native.slack())):
                rows[layer] = row
        column = lambda tensor, key: np.array([(row[tensor] or empty)[key] for row in rows])
        names = enumerate(("logit", "q", "k", "v"))
        return {name: {key: column(tensor, key) for key in empty} for tensor, name in names}

    def bounds(self):
        return [tensor for part in self._parts for tensor in part.bounds.values()]

    def head_bounds(self, runtime):
        """Bounds of the logits of every layer, ``(layers, n_q, 4)``."""
        found = torch.zeros((len(runtime), runtime.n_q_heads, 4), dtype=torch.float32, device=runtime.device)
        for part in self._parts:
            for place, layer in enumerate(part.layers):
                own = part.bounds["bounds"][place, :, :4]
                found[layer, : own.shape[0]] = own
        return found

    def save(self):
        if not self.remembers:
            return None
        states = [json.loads(part.native.save()) for part in self._parts]
        return states[0] if len(states) == 1 else states

    def load(self, state):
        states = [state] if len(self._parts) == 1 else state
        if not isinstance(states, list) or len(states) != len(self._parts):
            raise MismatchError(f"the saved state is no list of the states of {len(self._parts)} kinds of layers")
        before = [part.native.save() for part in self._parts]
        try:
            for part, each in zip(self._parts, states):
                part.native.load(json.dumps(each))
        except BaseException:
            for part, each in zip(self._parts, before):
                part.native.load(each)
            raise


class _Part:
    """The native policy of the layers with as many heads."""

    def __init__(self, native, bounded, runtime, layers):
        self.native, self.layers, count = native, layers, len(layers)
        # Rows of the runtime's tensors.
        self._rows = slice(None) if runtime._heads.equal else torch.tensor(layers, dtype=torch.int64, device=runtime.device)
        self._n_q, self._n_kv = n_q, n_kv = runtime._heads.counts[layers[0]]
        results = self.native.results()
        memory = lambda name, dtype=torch.float32: _heads.memory(self.native, results[name], dtype, runtime.device)
        self._stats = memory("stats", torch.int32).view(count, 2 * (n_q + n_kv), 4)
        descales = memory("descales").view(count, n_q + 4 * n_kv)
        self._logits, self._descales = descales[:, :n_q], descales[:, n_q:].view(count, 4, n_kv)
        self.bounds = {}
        if bounded:
            self.bounds = {
                "bounds": memory("bounds").view(count, n_q, -1),
                "operands": memory("operands").view(count, 3, n_kv),
            }

    def observe(self, runtime, stream):
        self._stats.copy_(runtime.words[self._rows, : 2 * (self._n_q + self._n_kv)])
        self.native.observe(stream)

    def update(self, runtime, stream, layers):
        if layers is None or set(self.layers) <= set(layers):
            self.native.launch(stream)
            runtime.descales[self._rows, :, : self._n_kv] = self._descales
            runtime.logit_descales[self._rows, : self._n_q] = self._logits
            return
        for place, layer in enumerate(self.layers):
            if layer in layers:
                self.native.launch(stream, place)
                runtime.descales[layer, :, : self._n_kv] = self._descales[place]
                runtime.logit_descales[layer, : self._n_q] = self._logits[place]


def check_layers(policy, found):
    """Raises an exception if the policy cannot plan for these layers."""
    if policy in FROM_BOUNDS and any(layer.norm is None for layer in found):
        raise UnsupportedError(
            "there is no norm in front of the projections, so v has no bound: take policy='delayed-te' or 'current'"
        )
    if policy in ("geometry-c-star", "auto-c") and any(layer.latent is not None for layer in found):
        raise UnsupportedError(
            f"policy={policy!r} bounds the logits of projections from one input, and latent attention (MLA) has two: take "
            "policy='geometry', whose operand descales are the same"
        )
    if policy != "geometry-c-star":
        return
    if any(layer.q_norm is not None for layer in found):
        raise UnsupportedError(
            "q and k are normalized after the projection, and c_star bounds the logits of projections: take "
            "policy='geometry', whose operand descales are the same"
        )
    counts = [(layer.n_q_heads, layer.n_kv_heads) for layer in found]
    other = next((index for index, count in enumerate(counts) if count != counts[0]), None)
    if other is not None:
        raise UnsupportedError(
            f"{found[other].name} has {counts[other][0]} query and {counts[other][1]} KV heads and {found[0].name} "
            f"{counts[0][0]} and {counts[0][1]}: c_star is one constant of a model whose layers have as many; take "
            "policy='geometry', whose operand descales are the same"
        )


def make_policy(name, config, tail):
    """A policy at its start; ``config`` and ``tail`` are for the native ones."""
    if name == "geometry":
        return Geometry()
    return Current() if name == "current" else Native(name, config, tail)

