"""Exports for serving engines, their audit, and scales of weights that arrive tensor by tensor."""

import json
import os

from . import _native
from ._arguments import flag, text, whole
from ._errors import ArgumentError
from ._offline import _SAFETENSORS, _path, _source, _stored
from ._results import Audit, Export


def export(model, to, engine, *, per_head=False, copy=False):
    """Writes a checkpoint folder that ``engine`` loads with these scales: the JSON of ``sigmascale export`` as a dict.

    ``model`` is a checkpoint folder, ``to`` a new or an empty one; ``engine`` is ``vllm``, ``sglang``, ``trtllm`` or
    ``mistralrs``. Weights are hard links (copies with ``copy``, and where links cannot be made), scales a file of their own, index
    and configs merged. ``per_head``: one scale a head, which vLLM alone reads, and which it cannot update. What the engine casts
    at 1.0 has a certificate in place of a scale; it is in ``sigmascale.json`` too. The folder appears whole or not at all.
    """
    arguments = (_path("model", model), _path("to", to), text("engine", engine))
    return Export(json.loads(_native.export(*arguments, flag("per_head", per_head), flag("copy", copy))))


def verify(folder, engine=None):
    """Which scales an engine would use, beside those that the weights need: the JSON of ``sigmascale verify`` as a dict.

    Without ``engine``: the one that the folder was exported for, else vLLM, and the others under ``others``.
    """
    engine = None if engine is None else text("engine", engine)
    first, *others = map(Audit._of, _native.verify(_path("folder", folder), engine))
    if others:
        first["others"] = others
    return first


class ScaleStream:
    """Scales of a model while its weights arrive, in any order: those of a layer as soon as it is complete.

    ``config`` is a ``config.json``, its folder, a dict or a config of Hugging Face transformers. ``names`` are those of all tensors
    to come; they are needed only where a bias is stored that the config does not tell of. ``ranks``: the tensors are those of one
    of so many tensor-parallel ranks, with its own heads. The scales are the bits of
    :func:`calibrate`, whatever the order; where tensors come layer by layer, those of one layer are held.

    A layer is a dict: ``layer`` (the model's own number), ``module``, ``q``, ``k`` and ``v`` (the descale of each KV head; v is None
    without a bound), ``scale`` (one a tensor, rounded up to BF16, as engines take it) and ``names`` of it by engine.
    """

    def __init__(self, config, *, names=(), ranks=1):
        source = _source(config, None)
        content, _, name = _read(source) if isinstance(source, str) else source
        self._native = _native.ScaleStream(content, name, [str(name) for name in names], whole("ranks", ranks, least=1))
        self.layers = {}

    def push(self, name, tensor):
        """Takes a NumPy array, a PyTorch tensor or a DTensor; gives the layers that it completes."""
        name = text("name", name)
        if not self._native.wants(name):
            return []
        if hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor()
        dtype, shape, data = _stored(name, tensor)
        if dtype not in _SAFETENSORS:
            raise ArgumentError(f"{name} has type {dtype}: {', '.join(_SAFETENSORS)} are read")
        done = json.loads(self._native.push(name, _SAFETENSORS[dtype], list(shape), data.data))
        self.layers.update((layer["layer"], layer) for layer in done)
        return done

    def through(self, weights):
        """The pairs of an iterator unchanged, each pushed on its way; the pass ends with them."""
        for name, tensor in weights:
            self.push(name, tensor)
            yield name, tensor
        self.finish()

    def finish(self):
        """Ends a pass and begins the next; gives the layers by number. A :class:`MismatchError` if tensors did not come."""
        self._native.finish()
        return dict(sorted(self.layers.items()))

    @property
    def held_bytes(self):
        """Bytes of tensors that are held until their layer is complete."""
        return self._native.held_bytes


def _read(path):
    file = os.path.join(path, "config.json") if os.path.isdir(path) else path
    with open(file, encoding="utf-8") as config:
        return config.read(), None, file
