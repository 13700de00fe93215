"""Scales of weights that arrive on a device, computed there: what :class:`sigmascale.ScaleStream` does with CUDA tensors.

A tensor is copied when it comes, so that the sync may use its memory again. A layer that is complete takes one launch of the scale
engine and one copy of its descales to the host. Copies and engines are kept: layers of one kind share them, one after the other.
"""

import contextlib
import dataclasses
import json
import math
import types

import torch

from .. import _native
from .._errors import ArgumentError, NonFiniteError
from .._offline import _SAFETENSORS
from .._parameters import Tail
from . import _host, _layers, _results


class DeviceStream:
    """The layers of one model on one device. ``native`` keeps count of the tensors."""

    def __init__(self, native, config, file, device):
        self.device = device
        self._native = native
        layout = json.loads(_native.layout(config, file))
        places = json.loads(native.places())
        self._spec, self._names, self._prefixes = layout["spec"], layout["layers"], places["prefixes"]
        # The layers that read a tensor: each with its place among those of the layer, and the name by which it is looked up.
        self._readers = {}
        for index, layer in enumerate(places["layers"]):
            for place, names in enumerate(layer["needs"]):
                for name in names:
                    self._readers.setdefault(name, []).append((index, place, names[0]))
        self._kinds = [self._kind(index) for index in range(len(self._names))]
        self._open, self._free = {}, {}

    @property
    def held_bytes(self):
        """Bytes of the layers that are not complete."""
        return sum(slot.tensors[place].nbytes for slot in self._open.values() for place in slot.here.values())

    def begin(self):
        """Drops what is left of a pass that was not finished."""
        for index in list(self._open):
            self._release(index)

    def push(self, name, tensor):
        """Takes a tensor that attention reads; gives the layers that it completes."""
        if tensor.dtype not in _layers._DTYPES:
            raise ArgumentError(
                f"{name} has type {tensor.dtype}: bfloat16, float16 and float32 are read on a device; pass host=True for others"
            )
        kind = _SAFETENSORS[_layers._DTYPES[tensor.dtype]]
        due = self._native.note(name, kind, list(tensor.shape))
        prefix = next((x for x in self._prefixes if name.startswith(x) and name[len(x) :] in self._readers), "")
        with torch.inference_mode(False), torch.no_grad():
            for index, place, own in self._readers.get(name[len(prefix) :], ()):
                if index not in self._open:
                    free = self._free.setdefault(self._kinds[index], [])
                    self._open[index] = free.pop() if free else _Slot(self.device)
                self._open[index].take(place, own, tensor.detach())
            return [self._compute(index) for index in due]

    def _kind(self, index):
        """What layers must share to be computed by one engine: all that is no tensor and no name."""
        own = dict(self._names[index])
        for key in "qkv":
            own[key] = own[key] | {"name": None}
        own |= {"number": None, "norm": own["norm"] is None, "qk_norm": own["qk_norm"] is None}
        each = [(self._spec.get(key) or {index: None})[index] for key in ("rope", "temperature", "softmax_scale")]
        return json.dumps([own, each])

    def _release(self, index):
        slot = self._open.pop(index)
        slot.here.clear()
        self._free.setdefault(self._kinds[index], []).append(slot)

    def _compute(self, index):
        slot = self._open[index]
        try:
            if slot.engine is None:
                # Layers of one kind differ in nothing else, so those that come later find it.
                layer = _layers._layer(self._spec, self._names[index], index, "", slot.parameters(), {}, _As)
                _layers.check([layer])
                with self._on_device():
                    slot.engine = _Engine(layer, self.device)
            with self._on_device():
                q, k, v = slot.engine.run(self._names[index]["number"])
        finally:
            self._release(index)
        return json.loads(self._native.computed(index, q, k, v))

    def _on_device(self):
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()


class _As:
    """Tensors as they are: no process holds a part of one."""

    def __new__(cls, owner, name, tensor):
        return tensor

    @staticmethod
    def origin(_):
        return types.SimpleNamespace(ranks=1)


class _Slot:
    """Copies of one layer's tensors, at addresses that stay, and the engine over them."""

    def __init__(self, device):
        self._device, self.engine = device, None
        # By place; and the names of those that belong to the layer that is being held.
        self.tensors, self.here = {}, {}

    def take(self, place, name, tensor):
        """Copies a tensor over that of the layer before."""
        # Vectors of a layer are read in one type, and none loses a digit in float32.
        dtype = tensor.dtype if tensor.dim() == 2 else torch.float32
        kept = self.tensors.get(place)
        if kept is None or kept.shape != tensor.shape or kept.dtype != dtype:
            self.engine = None
            self.tensors[place] = kept = torch.empty(tensor.shape, dtype=dtype, device=self._device)
        kept.copy_(tensor)
        self.here[name] = place

    def parameters(self):
        """The tensors by name, as modules hold them."""
        return {
            name: (types.SimpleNamespace(_parameters={(key := name.rpartition(".")[2]): self.tensors[place]}), key)
            for name, place in self.here.items()
        }


class _Engine:
    """The scale engine over one layer's tensors."""

    def __init__(self, layer, device):
        rows = _layers.entries(layer)
        self._parts, self._n_kv_heads, self._has_v = len(rows), layer.n_kv_heads, layer.norm is not None
        self._device = device
        if device.type == "cpu":
            self._native = _host.ScaleEngine(rows, False, dataclasses.asdict(Tail()), layer.n_q_heads)
        else:
            self._native = _native.ScaleEngine(device.index, rows, False, Tail().eta)
        results = self._native.results()
        of = lambda place, kind: (
            place
            if isinstance(place, torch.Tensor)
            else torch.as_tensor(_results.Memory(self._native, *place, kind), device=device)
        )
        self._heads, self._status = of(results["heads"], "<f4"), of(results["status"], "<i4")

    def run(self, number):
        """Rows of q, k and v, one descale a KV head; v is None without a bound. Waits for the device."""
        self._native.launch(torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else 0)
        # One copy to the host for both.
        values = torch.cat([self._heads, self._status.view(torch.float32)]).cpu()
        rows = values[:-1].view(self._parts, 4, -1).transpose(0, 1).reshape(4, self._n_kv_heads).tolist()
        if int(values[-1:].view(torch.int32)) & 3 or not all(math.isfinite(value) for row in rows for value in row):
            raise NonFiniteError(f"layer {number}: weights or bounds are not finite")
        q, k, v, _ = rows
        return q, k, v if self._has_v else None
