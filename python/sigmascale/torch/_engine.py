"""An engine over layers in memory: what it reads, whether that is still there, and where its results go."""

import contextlib
import dataclasses

import torch

from .. import _native
from .._errors import UnsupportedError
from . import _distributed, _heads, _host, _layers


class Engine:
    """The native engine over a model's layers, and where its results go."""

    def __init__(self, found, targets, runtime, indices):
        latent = [layer.latent is not None for layer in found]
        if any(latent) and not all(latent):
            raise UnsupportedError(
                "some layers have latent attention (MLA) and some have not: attach a runtime for each kind"
            )
        entries = [_entries(layer) for layer in found]
        rows = [row for each in entries for row in each]
        logits = "bounds" in targets
        if any(latent):
            self._engine = _latent(found, logits, runtime)
        elif runtime._estimates is not None:
            runtime._estimates.check_entries(entries)
            self._engine = _estimating(rows, runtime)
        elif runtime.device.type == "cpu":
            self._engine = _host.ScaleEngine(rows, logits, dataclasses.asdict(runtime.tail), runtime._q_heads)
        else:
            self._engine = _native.ScaleEngine(runtime.device.index, rows, logits, runtime.tail.eta)
        self._results = _Results(self._engine, targets, runtime)
        self._copies = self._results.copies([len(each) for each in entries], indices)
        self._estimates, self._indices = runtime._estimates, indices
        self._found = None if self._estimates is None else found

    def run(self, stream):
        if self._estimates is None:
            self._engine.launch(stream)
        else:
            self._estimates.launch(self._engine, self._results, stream, self._indices, self._found)
        for source, target in self._copies:
            target.copy_(source)

    def status(self):
        return int(self._results.word.item())


def _latent(found, logits, runtime):
    """The engine of latent attention: of the device for descales, and of the host for bounds of logits, for weights whose config
    says FP8, and for shapes that no kernel takes."""
    if runtime.device.type == "cuda" and not logits:
        with contextlib.suppress(UnsupportedError):
            return _DeviceMla(found, runtime.device)
    return _host.MlaEngine(found, logits, runtime.tail.eta, runtime.device)


def _estimating(rows, runtime):
    """The engine whose norms are those of a power iteration."""
    estimates = runtime._estimates
    if runtime.device.type == "cpu":
        return _host.EstimateEngine(rows, estimates, dataclasses.asdict(runtime.tail), runtime._q_heads)
    return _native.EstimateEngine(runtime.device.index, rows, estimates.estimator, runtime.tail.eta, estimates.cover)


class _DeviceMla:
    """The native engine of latent attention, with the interface of that of the host."""

    def __init__(self, found, device):
        self._native = _native.MlaEngine(device.index, self._places(found))
        self.results = self._native.results

    def fits(self, layers):
        with contextlib.suppress(UnsupportedError):
            return self._native.fits(self._places(layers))
        return False

    def launch(self, stream, layers=None):
        self._native.launch(stream, None if layers is None else self._places(layers))

    @staticmethod
    def _places(found):
        kind = lambda tensor: str(tensor.dtype).removeprefix("torch.")
        place = lambda name, x: (name, kind(x), list(x.shape), list(x.stride()), x.data_ptr())
        latent = [layer.latent for layer in found]
        return [(x.model, x.index, [place(*named) for named in x.tensors.items()]) for x in latent]


class ShapeEngine:
    """The native engine of one shape of layers, which takes the addresses of a layer's tensors at each launch, and where the
    results of each layer go. Layers that share it are computed one after another."""

    def __init__(self, layer, targets, runtime):
        self._latent = layer.latent is not None
        entries, logits = _entries(layer), "bounds" in targets
        if self._latent:
            self._engine = _latent([layer], logits, runtime)
        elif runtime._estimates is not None:
            runtime._estimates.check_entries([entries])
            self._engine = _estimating(entries, runtime)
        elif runtime.device.type == "cpu":
            self._engine = _host.ScaleEngine(entries, logits, dataclasses.asdict(runtime.tail), runtime._q_heads)
        else:
            self._engine = _native.ShapeEngine(runtime.device.index, entries, logits, runtime.tail.eta)
        self._device, self._results, self._copies = runtime.device, _Results(self._engine, targets, runtime), {}
        self._estimates = runtime._estimates
        # The stream of the last launch, whose results the next one overwrites.
        self._last = None

    def fits(self, layer):
        """Whether the layer has the shape."""
        return self._latent == (layer.latent is not None) and self._engine.fits(self._given(layer))

    def run(self, stream, layer, index):
        """Computes the layer with this number."""
        if self._device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            current = torch.cuda.current_stream(self._device)
            if self._last is not None and self._last != current:
                current.wait_stream(self._last)
            self._last = current
        given = self._given(layer)
        if self._estimates is None:
            self._engine.launch(stream, given)
        else:
            self._estimates.launch(self._engine, self._results, stream, [index], [layer], given)
        if index not in self._copies:
            self._copies[index] = self._results.copies([len(given)], [index])
        for source, target in self._copies[index]:
            target.copy_(source)

    def _given(self, layer):
        return [layer] if self._latent else _layers.entries(layer)


class _Results:
    """What a native engine writes, as tensors, and what of it is copied to a runtime's targets."""

    def __init__(self, engine, targets, runtime):
        results = engine.results()
        self.word = _heads.memory(engine, results.pop("status"), torch.int32, runtime.device)
        of_estimates = [results.pop(name, None) for name in ("vectors", "sigma")]
        self.vectors, self.sigma = (
            None if place is None else _heads.memory(engine, place, torch.float32, runtime.device) for place in of_estimates
        )
        self._values = {
            name: _heads.memory(engine, place, torch.float32, runtime.device) for name, place in results.items()
        }
        self._targets, self._counts = targets, runtime._heads.counts

    def copies(self, parts, indices):
        """Sources and targets, for layers of these numbers with so many entries each."""
        runs = _heads.runs([self._counts[index] for index in indices], parts, indices)
        return _heads.copies(self._values, self._targets, runs)


def _entries(layer):
    """A layer as native engines take it."""
    return [None] if layer.latent is not None else _layers.entries(layer)


def storages(model):
    """Where each memory block that a model's parameters lie in is held: (dict, name) by address."""
    return {
        _distributed.local(parameter).untyped_storage().data_ptr(): (module._parameters, key)
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None and parameter.device.type != "meta"
    }


def where(tensor):
    """What an engine was told of a tensor."""
    tensor = _distributed.local(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


class Sources:
    """What must be as it is for an engine over these layers to hold.

    ``model`` is searched for the parameters that tensors are views of, where layers name tensors and not modules; else it is None.
    """

    def __init__(self, found, model=None):
        owners = {} if model is None else storages(model)
        # (dict, key, what is in it, where that lies)
        self._held = []
        for layer in found:
            for holder, key, held in layer.sources:
                self._held.append((holder, key, held, where(held) if isinstance(held, torch.Tensor) else None))
            if layer.sources:
                continue
            for tensor in layer.tensors().values():
                self._held.append((None, None, tensor, where(tensor)))
                if owner := owners.get(tensor.untyped_storage().data_ptr()):
                    holder, key = owner
                    self._held.append((holder, key, holder[key], where(holder[key])))

    @property
    def owned(self):
        """Whether any of it is a module's own."""
        return any(holder is not None for holder, *_ in self._held)

    def moved(self):
        """Whether a tensor was replaced by another or given other memory: what of :meth:`unchanged` is cheap enough to be
        asked in every forward."""
        return any(
            (holder is not None and holder.get(key) is not held)
            or (place is not None and not _distributed.is_dtensor(held) and held.data_ptr() != place[0])
            for holder, key, held, place in self._held
        )

    def unchanged(self):
        """Whether all of it is where it was."""
        return all(
            (holder is None or holder.get(key) is held) and (place is None or where(held) == place)
            for holder, key, held, place in self._held
        )
