"""Where descales come from: the certain bounds, this call's own maxima, or a native policy with memory on the device."""

import json

from .. import _native

POLICIES = ("geometry", "geometry-c-star", "auto-c", "delayed-paper", "delayed-te", "current")
# Policies that plan from bounds.
FROM_BOUNDS = ("geometry", "geometry-c-star", "auto-c")


class Geometry:
    """Descales are the engine's certain bounds; nothing is remembered."""

    # Whether each call makes its own descales, the policy has a memory, and it has descales for logits.
    per_call, remembers, has_logits = False, False, False

    def bind(self, runtime, found):
        """Sets up over the tensors where they lie now."""

    def targets(self, runtime):
        """Where an engine's results go, by their names."""
        return {"heads": [runtime.descales]}

    def observe(self, runtime, stream):
        """Takes in what the calls since the last refresh reported, while their bounds still stand."""

    def update(self, runtime, stream):
        """Plans the next step."""

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
    """A policy of the crate, with its memory on the device; where it plans from bounds, engines write them into it."""

    has_logits = True

    def __init__(self, name):
        self._name, self._native, self._fresh = name, None, True
        self.remembers = name != "geometry-c-star"

    def bind(self, runtime, found):
        state = None if self._native is None else self._native.save()
        bounded = self._name in FROM_BOUNDS
        self._native = _native.DevicePolicy(runtime.device.index, json.dumps(_spec(found)), self._name, bounded)
        self._fresh = state is None
        if state is not None:
            self._native.load(state)
        results = self._native.results()
        n_q, n_kv, count = runtime.n_q_heads, runtime.n_kv_heads, len(found)
        memory = lambda name, kind: runtime.memory(self._native, results[name], kind)
        self._stats = memory("stats", "<i4").view(count, 2 * (n_q + n_kv), 4)
        descales = memory("descales", "<f4").view(count, n_q + 4 * n_kv)
        self._logits, self._descales = descales[:, :n_q], descales[:, n_q:].view(count, 4, n_kv)
        self._targets = {}
        if bounded:
            self._targets = {
                "bounds": [memory("bounds", "<f4").view(count, n_q, -1)],
                "operands": [memory("operands", "<f4").view(count, 3, n_kv)],
            }

    def targets(self, runtime):
        return {name: list(places) for name, places in self._targets.items()}

    def observe(self, runtime, stream):
        if not self._fresh:
            self._stats.copy_(runtime.words)
            self._native.observe(stream)

    def update(self, runtime, stream):
        self._native.launch(stream)
        self._fresh = False
        runtime.descales.copy_(self._descales)
        runtime.logit_descales.copy_(self._logits)

    def save(self):
        return json.loads(self._native.save()) if self.remembers else None

    def load(self, state):
        self._native.load(json.dumps(state))


def make_policy(name):
    """A policy at its start."""
    if name == "geometry":
        return Geometry()
    return Current() if name == "current" else Native(name)


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
