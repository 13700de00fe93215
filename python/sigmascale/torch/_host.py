"""The scale engine and the policies of the native half on the CPU, over tensors: the interface of those on a device."""

import json

import torch

from .. import _native

_WORDS = 8


def _rows(layers, key):
    return sum(layer[key] for layer in layers)


class ScaleEngine:
    """Certified bounds and descales of layers in host memory, which are read at each launch."""

    def __init__(self, layers, logits, tail, q_heads):
        self._layers, self._logits, self._tail, self._q_heads = layers, logits, tail, q_heads
        n_q, n_kv = _rows(layers, "n_q"), _rows(layers, "n_kv")
        self._results = {"heads": torch.ones(4 * n_kv), "operands": torch.zeros(3 * n_kv)}
        if logits:
            self._results["bounds"] = torch.zeros(_WORDS * n_q)

    def results(self):
        """The tensors that a launch writes, by the names that a device's engine has; weights that are not finite raise there."""
        return self._results | {"status": torch.zeros(1, dtype=torch.int32)}

    def launch(self, _):
        """Computes everything."""
        values = _native.host_scales(self._layers, self._logits, self._tail, self._q_heads)
        for tensor, row in zip(self._results.values(), values):
            tensor.copy_(torch.tensor(row))


class Policy:
    """A policy of the crate with its memory on the CPU."""

    def __init__(self, spec, config, tail, bounded):
        self._native = _native.HostPolicy(spec, config, tail, bounded)
        spec = json.loads(spec)
        self._layers, n_q, n_kv = spec["layers"], spec["n_q_heads"], spec["n_kv_heads"]
        self._results = {
            "stats": torch.zeros(self._layers * 8 * (n_q + n_kv), dtype=torch.int32),
            "descales": torch.ones(self._layers * (n_q + 4 * n_kv)),
        }
        if bounded:
            self._results["bounds"] = torch.zeros(self._layers * _WORDS * n_q)
            self._results["operands"] = torch.zeros(self._layers * 3 * n_kv)

    def results(self):
        """The tensors that it reads and writes, by the names that a device's policy has."""
        return self._results

    def _bounds(self):
        return [self._results[name].tolist() if name in self._results else [] for name in ("bounds", "operands")]

    def observe(self, _):
        """Takes in the statistics of the calls since the last plan."""
        words = (self._results["stats"].long() & 0xFFFFFFFF).tolist()
        self._native.observe(words, *self._bounds())

    def launch(self, _, layer=None):
        """Plans one layer, or all."""
        bounds = self._bounds()
        rows = self._results["descales"].view(self._layers, -1)
        for place in range(self._layers) if layer is None else [layer]:
            rows[place] = torch.tensor(self._native.plan(place, *bounds))

    def slack(self):
        """As JSON."""
        return self._native.slack()

    def save(self):
        """As JSON."""
        return self._native.save()

    def load(self, state):
        """Goes on from a state."""
        self._native.load(state)
