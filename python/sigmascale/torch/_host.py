"""The scale engine and the policies of the native half on the CPU, over tensors: the interface of those on a device."""

import json

import torch

from .. import _native
from .._errors import UnsupportedError
from ._estimates import SUMMED

_WORDS = 8
_STORED = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def _zeros(count, dtype=torch.float32):
    return torch.zeros(count, dtype=dtype, device="cpu")


def _values(row):
    return torch.tensor(row, dtype=torch.float32, device="cpu")


def _rows(layers, key):
    return sum(layer[key] for layer in layers)


class ScaleEngine:
    """Certified bounds and descales of layers in host memory, which are read at each launch: those that it was made with, or
    others of their shape."""

    def __init__(self, layers, logits, tail, q_heads):
        self._layers, self._logits, self._tail, self._q_heads = layers, logits, tail, q_heads
        n_q, n_kv = _rows(layers, "n_q"), _rows(layers, "n_kv")
        self._results = {"heads": _zeros(4 * n_kv) + 1, "operands": _zeros(3 * n_kv)}
        if logits:
            self._results["bounds"] = _zeros(_WORDS * n_q)

    def results(self):
        """The tensors that a launch writes, by the names that a device's engine has; weights that are not finite
        raise there."""
        return self._results | {"status": _zeros(1, torch.int32)}

    def fits(self, layers):
        """Whether it can take these layers: results have room for their heads."""
        return [(x["n_q"], x["n_kv"]) for x in layers] == [(x["n_q"], x["n_kv"]) for x in self._layers]

    def launch(self, _, layers=None):
        """Computes everything."""
        layers = self._layers if layers is None else layers
        values = _native.host_scales(layers, self._logits, self._tail, self._q_heads)
        for tensor, row in zip(self._results.values(), values):
            tensor.copy_(_values(row))


class EstimateEngine:
    """The same with norms from power iteration; ``vectors`` are written in front of a launch and read behind it, or in place of
    iterations ``sigma``, the estimates of the layers' sums."""

    def __init__(self, layers, estimates, tail, q_heads):
        self._layers, self._estimates, self._tail, self._q_heads = layers, estimates, tail, q_heads
        n_q, n_kv = _rows(layers, "n_q"), _rows(layers, "n_kv")
        owner = "n_kv" if estimates.estimator == SUMMED else "n_q"
        self._vectors = _zeros(sum(layer[owner] * layer["d_head"] for layer in layers))
        self._sigma = _zeros(len(layers) if owner == "n_kv" else n_q)
        self._results = {"heads": _zeros(4 * n_kv) + 1, "operands": _zeros(3 * n_kv), "bounds": _zeros(_WORDS * n_q)}

    def results(self):
        """As :meth:`ScaleEngine.results`, and the vectors."""
        return self._results | {"vectors": self._vectors, "sigma": self._sigma, "status": _zeros(1, torch.int32)}

    def fits(self, layers):
        """As :meth:`ScaleEngine.fits`."""
        shape = lambda layers: [(x["n_q"], x["n_kv"], x["d_head"]) for x in layers]
        return shape(layers) == shape(self._layers)

    def launch(self, _, layers, count, cold):
        """Computes everything."""
        layers = self._layers if layers is None else layers
        cover = self._estimates.cover if cold else None
        sums = None if count else self._sigma.tolist()
        given = layers, self._estimates.estimator, self._tail, self._q_heads, self._vectors.tolist(), count, cover, sums
        *values, vectors = _native.host_estimates(*given)
        for tensor, row in zip((*self._results.values(), self._vectors), (*values, vectors)):
            tensor.copy_(_values(row))


class MlaEngine:
    """The same of layers with latent attention, which the crate computes on the host wherever they lie: a launch
    waits for their device, reads them, and cannot be captured in a CUDA graph."""

    def __init__(self, layers, logits, eta, device):
        self._layers, self._eta, self._device = layers, eta, device
        heads = sum(layer.n_q_heads for layer in layers)
        make = lambda count: torch.ones(count, dtype=torch.float32, device=device)
        self._results = {"heads": make(4 * heads), "operands": make(3 * heads)}
        if logits:
            self._results["bounds"] = make(_WORDS * heads)

    def results(self):
        """As :meth:`ScaleEngine.results`."""
        return self._results | {"status": _zeros(1, torch.int32)}

    def fits(self, layers):
        """As :meth:`ScaleEngine.fits`."""
        return [layer.n_q_heads for layer in layers] == [layer.n_q_heads for layer in self._layers]

    def launch(self, _, layers=None):
        """Computes everything."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "scales of latent attention (MLA) are computed on the host: call refresh() outside of the CUDA graph"
            )
        rows = [self._scales(layer) for layer in (self._layers if layers is None else layers)]
        for tensor, values in zip(self._results.values(), zip(*rows)):
            tensor.copy_(_values([value for row in values for value in row]))

    def _scales(self, layer):
        latent = layer.latent
        held = {name: tensor.detach().to("cpu").contiguous() for name, tensor in latent.tensors.items()}
        given = [
            (name, _STORED[x.dtype], list(x.shape), x.data_ptr(), x.numel() * x.element_size()) for name, x in held.items()
        ]
        return latent.model.scales(latent.index, given, "bounds" in self._results, self._eta)


class Policy:
    """A policy of the crate with its memory on the CPU."""

    def __init__(self, spec, config, tail, bounded):
        self._native = _native.HostPolicy(spec, config, tail, bounded)
        spec = json.loads(spec)
        self._layers, n_q, n_kv = spec["layers"], spec["n_q_heads"], spec["n_kv_heads"]
        self._results = {
            "stats": _zeros(self._layers * 8 * (n_q + n_kv), torch.int32),
            "descales": _zeros(self._layers * (n_q + 4 * n_kv)) + 1,
        }
        if bounded:
            self._results["bounds"] = _zeros(self._layers * _WORDS * n_q)
            self._results["operands"] = _zeros(self._layers * 3 * n_kv)

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
            rows[place] = _values(self._native.plan(place, *bounds))

    def slack(self):
        """As JSON."""
        return self._native.slack()

    def save(self):
        """As JSON."""
        return self._native.save()

    def load(self, state):
        """Goes on from a state."""
        self._native.load(state)
