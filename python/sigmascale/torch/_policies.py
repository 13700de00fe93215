"""Where descales come from: the certain bounds, this call's own maxima, or a native policy with memory on the device."""

import json


from .. import _native
from .._errors import UnsupportedError
from . import _layers

POLICIES = ("geometry", "geometry-c-star", "auto-c", "delayed-paper", "delayed-te", "current")
# Policies that plan from bounds.
FROM_BOUNDS = ("geometry", "geometry-c-star", "auto-c")


class Geometry:
    """Descales are the engine's certain bounds; nothing is remembered."""

    needs_geometry, per_call = True, False

    def bind(self, runtime, found):
        """Sets up over the tensors where they lie now."""

    def update(self, runtime, stream):
        """Goes from one step to the next."""

    def save(self):
        """What a resume needs, as plain values."""
        return None

    def load(self, state):
        """Goes on from it."""


class Current(Geometry):
    """Every call takes the amax of its own operands, one a tensor."""

    needs_geometry, per_call = False, True


class Observing(Geometry):
    """A policy of the crate, with its memory on the device."""

    needs_geometry, per_call = False, False

    def __init__(self, name):
        self._name, self._native, self._fresh = name, None, True

    def bind(self, runtime, found):
        state = None if self._native is None else self._native.save()
        rows = None
        if self._name in FROM_BOUNDS:
            entries = [_layers.entries(layer) for layer in found]
            if any(len(parts) > 1 for parts in entries) or any(layer.q_norm is not None for layer in found):
                raise UnsupportedError(
                    f"policy {self._name!r} reads logit bounds on the GPU, which are not there for interleaved fused weights "
                    "and for normalised q and k: take policy='geometry'"
                )
            rows = [parts[0] for parts in entries]
        self._native = _native.DevicePolicy(runtime.device.index, json.dumps(_spec(found)), self._name, rows)
        self._fresh = state is None
        if state is not None:
            self._native.load(state)
        results = self._native.results()
        n_q, n_kv, count = runtime.n_q_heads, runtime.n_kv_heads, len(found)
        memory = runtime.memory
        self._stats = memory(self._native, results["stats"], "<i4").view(count, 2 * (n_q + n_kv), 4)
        descales = memory(self._native, results["descales"], "<f4").view(count, n_q + 4 * n_kv)
        self._descales = descales[:, n_q:].view(count, 4, n_kv)

    def update(self, runtime, stream):
        self._stats.copy_(runtime.words)
        self._native.launch(stream, not self._fresh)
        self._fresh = False
        runtime.descales.copy_(self._descales)

    def save(self):
        return json.loads(self._native.save())

    def load(self, state):
        self._native.load(json.dumps(state))


def make_policy(name):
    """A policy at its start."""
    if name == "geometry":
        return Geometry()
    return Current() if name == "current" else Observing(name)


def _spec(found):
    """The layers as the crate's attention spec."""
    first = found[0]
    rope = lambda layer: (
        layer.rotary
        and {
            "rotary_dim": layer.rotary,
            "layout": "interleaved" if layer.interleaved else "half-split",
            "attention_factor": layer.rope_factor,
            "inv_freq": None,
        }
    )
    return {
        "name": "model",
        "family": "torch",
        "causal": True,
        "layers": len(found),
        "d_model": first.q.shape[1],
        "n_q_heads": first.n_q_heads,
        "n_kv_heads": first.n_kv_heads,
        "d_head": first.d_head,
        "norm": {
            "kind": {"rms": "rms-norm", "layer": "layer-norm", None: "none"}[first.norm],
            "gain": "plain" if first.gain is not None else "unit",
            "shift": first.shift is not None,
        },
        "bias": {key: getattr(first, f"{key}_bias") is not None for key in "qkv"},
        "rope": [rope(layer) or None for layer in found],
        "qk_norm": None,
        "softmax_scale": [
            layer.d_head**-0.5 if layer.softmax_scale is None else layer.softmax_scale for layer in found
        ],
        "soft_cap": None,
        "max_positions": None,
    }
