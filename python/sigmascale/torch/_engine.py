"""An engine over layers in memory: what it reads, whether that still lies there, and where its results go."""

import dataclasses

import torch

from .. import _native
from .._errors import UnsupportedError
from . import _distributed, _host, _layers, _results


class Engine:
    """The native engine over a model's layers, and where its results go."""

    def __init__(self, found, targets, runtime, indices):
        latent = [layer.latent is not None for layer in found]
        if any(latent) and not all(latent):
            raise UnsupportedError(
                "some layers have latent attention (MLA) and some have not: attach a runtime for each kind"
            )
        entries = [[None] if any(latent) else _layers.entries(layer) for layer in found]
        rows = [row for each in entries for row in each]
        if any(latent):
            self._engine = _host.LatentEngine(found, "bounds" in targets, runtime.tail.eta, runtime.device)
        elif runtime.device.type == "cpu":
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

    def unchanged(self):
        """Whether all of it is where it was."""
        return all(
            (holder is None or holder.get(key) is held) and (place is None or where(held) == place)
            for holder, key, held, place in self._held
        )
