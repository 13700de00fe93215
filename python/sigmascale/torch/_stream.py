"""Scales of weights that arrive on a device, computed there: what :class:`sigmascale.ScaleStream` does with CUDA tensors.

A tensor is copied when it comes, so that the sync may use its memory again; weights of an engine, which stay until their scales are
read, are read where they are. A layer that is complete takes one launch of the scale
engine, whose results stay on the device until they are read: one wait for all layers whose scales are due. Copies and engines are
kept: layers of one kind share them, one after the other, in the order of the device's stream.
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
from . import _heads, _host, _layers

_KINDS = {dtype: _SAFETENSORS[name] for dtype, name in _layers._DTYPES.items()}
# Bits of a status that say that weights or bounds are not finite.
_NON_FINITE = 3


class DeviceStream:
    """The layers of one model on one device. ``native`` keeps count of the tensors. ``in_place``: weights stay as they are until
    scales are read, and only vectors are copied.
    """

    def __init__(self, native, config, file, device, in_place=False):
        self.device, self._in_place = device, in_place
        self._native = native
        layout = json.loads(_native.layout(config, file))
        places = json.loads(native.places())
        self._spec, self._names, self._prefixes = layout["spec"], layout["layers"], places["prefixes"]
        # The layers that read a tensor: each with its place among those of the layer, and the name by which it is looked up.
        self._readers, ends = {}, [0]
        for index, layer in enumerate(places["layers"]):
            for place, names in enumerate(layer["needs"]):
                for name in names:
                    self._readers.setdefault(name, []).append((index, place, names[0]))
            # Descales of q, k, v and o for each KV head, and the status.
            ends.append(ends[-1] + 4 * layer["n_kv"] + 1)
        self._kinds = [self._kind(index) for index in range(len(self._names))]
        self._open, self._free, self._engines = {}, {}, {}
        self._rows = [slice(*row) for row in zip(ends, ends[1:])]
        with torch.inference_mode(False):
            self._results = torch.zeros(ends[-1], dtype=torch.float32, device=device)
            self._targets = [self._results[row].split([row.stop - row.start - 1, 1]) for row in self._rows]
        # Layers that were launched and not read: place, engine, and the list that awaits the layer.
        self._unread = []
        # The stream of the last work, for which that of another one waits.
        self._last = None

    @property
    def held_bytes(self):
        """Bytes of the layers that are not complete."""
        return sum(slot.tensors[place].nbytes for slot in self._open.values() for place in slot.here.values())

    def begin(self):
        """Drops what is left of a pass that was not finished."""
        self._unread.clear()
        for index in list(self._open):
            self._release(index)

    def push(self, name, tensor):
        """Takes a tensor that attention reads, without waiting for the device. Gives the number of layers that it completes, and
        the list into which :meth:`read` puts them."""
        kind, done = _KINDS.get(tensor.dtype), []
        if kind is None:
            raise ArgumentError(
                f"{name} has type {tensor.dtype}: bfloat16, float16 and float32 are read on a device; pass host=True for others"
            )
        if tensor.is_meta:
            raise ArgumentError(f"{name} is on the meta device and has no values: load it first")
        due = self._native.note(name, kind, list(tensor.shape))
        if name not in self._readers:
            prefix = next((x for x in self._prefixes if name.startswith(x) and name[len(x) :] in self._readers), "")
            self._readers[name] = self._readers.get(name[len(prefix) :], [])
        self._order()
        for index, place, own in self._readers[name]:
            if index not in self._open:
                free = self._free.setdefault(self._owner(index), [])
                self._open[index] = free.pop() if free else _Slot(self.device, self._in_place)
            self._open[index].take(place, own, tensor.detach())
        for index in due:
            self._unread.append((index, self._compute(index), done))
        return len(due), done

    def read(self, layers):
        """Puts the layers that were completed since the last time into ``layers``, by number: one wait for the device, if there
        are any. A layer that is refused is refused again whenever it is read."""
        if not self._unread:
            return
        self._order()
        values, rows, refused = self._results.cpu(), [], None
        numbers, words = values.tolist(), values.view(torch.int32).tolist()
        for index, engine, _ in self._unread:
            row = self._rows[index]
            *descales, _ = numbers[row]
            if words[row.stop - 1] & _NON_FINITE or not all(map(math.isfinite, descales)):
                refused = self._names[index]["number"]
                break
            rows.append((index, *engine.by_operand(descales)))
        found = json.loads(self._native.computed(rows))
        for (_, _, done), layer in zip(self._unread, found):
            done.append(layer)
            layers[layer["layer"]] = layer
        del self._unread[: len(found)]
        if refused is not None:
            raise NonFiniteError(f"layer {refused}: weights or bounds are not finite")

    def _order(self):
        """Has the current stream wait for the one before, if that was another: copies and results are used again in order."""
        if self.device.type != "cuda":
            return
        current = torch.cuda.current_stream(self.device)
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)
            slots = [*self._open.values(), *(slot for free in self._free.values() for slot in free)]
            for tensor in [self._results, *(tensor for slot in slots for tensor in slot.tensors.values())]:
                tensor.record_stream(current)
        self._last = current

    def _kind(self, index):
        """What layers must share to be computed by one engine: all that is no tensor and no name."""
        own = dict(self._names[index])
        for key in "qkv":
            own[key] = own[key] | {"name": None}
        own |= {"number": None, "norm": own["norm"] is None, "qk_norm": own["qk_norm"] is None}
        each = [(self._spec.get(key) or {index: None})[index] for key in ("rope", "temperature", "softmax_scale")]
        return json.dumps([own, each])

    def _owner(self, index):
        """What shares a slot: the layers of one kind, or one layer whose weights are read where they are."""
        return index if self._in_place else self._kinds[index]

    def _release(self, index):
        slot = self._open.pop(index)
        slot.here.clear()
        slot.placed.clear()
        self._free.setdefault(self._owner(index), []).append(slot)

    def _compute(self, index):
        """Puts the scales of a complete layer on the stream, and gives the engine that computes them."""
        slot = self._open[index]
        try:
            addresses = slot.addresses()
            if slot.addressed != addresses:
                layer = _layers._layer(self._spec, self._names[index], index, "", slot.parameters(), {}, _As)
                _layers.check([layer])
                # Norms without gains have some that were made here.
                slot.entries, slot.norms = _layers.entries(layer), (layer.q_norm, layer.k_norm)
                slot.engine = self._engine(index, layer, slot.entries)
                slot.addressed = addresses
            # Layers of one kind differ in nothing else, so those that come later find it.
            slot.engine.launch(0 if self._last is None else self._last.cuda_stream, slot.entries, *self._targets[index])
            return slot.engine
        finally:
            # Those of the next layer are copied after the launch.
            self._release(index)

    def _engine(self, index, layer, entries):
        """The engine of the layers of one kind, in the types that they have now."""
        engine = self._engines.get(self._kinds[index])
        if engine is None or not engine.fits(entries):
            on_device = torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()
            with on_device, torch.inference_mode(False):
                engine = self._engines[self._kinds[index]] = _Engine(layer, entries, self.device)
        return engine


class _As:
    """Tensors as they are: no process holds a part of one."""

    def __new__(cls, owner, name, tensor):
        return tensor

    @staticmethod
    def origin(_):
        return types.SimpleNamespace(ranks=1)


class _Slot:
    """One layer's tensors: copies at addresses that stay, or weights where they are; and what the engine is told of them."""

    def __init__(self, device, in_place):
        self._device, self._in_place = device, in_place
        # By place: copies, and weights that are not copied; and the names of those that belong to the layer that is being held.
        self.copies, self.placed, self.here = {}, {}, {}
        self.addressed, self.entries, self.norms, self.engine = None, None, (), None

    @property
    def tensors(self):
        return self.copies | self.placed

    def take(self, place, name, tensor):
        """Copies a tensor over that of the layer before, or notes where it is."""
        self.here[name] = place
        if self._in_place and tensor.dim() == 2:
            self.placed[place] = tensor
            return
        # Vectors of a layer are read in one type, and none loses a digit in float32.
        dtype = tensor.dtype if tensor.dim() == 2 else torch.float32
        kept = self.copies.get(place)
        if kept is None or kept.shape != tensor.shape or kept.dtype != dtype:
            with torch.inference_mode(False):
                self.copies[place] = kept = torch.empty(tensor.shape, dtype=dtype, device=self._device)
        kept.copy_(tensor)

    def addresses(self):
        """What the engine's entries depend on, beside the shapes that were noted."""
        tensors = self.tensors
        return [(place, (x := tensors[place]).data_ptr(), x.stride(), x.dtype) for place in sorted(self.here.values())]

    def parameters(self):
        """The tensors by name, as modules hold them."""
        tensors = self.tensors
        return {
            name: (types.SimpleNamespace(_parameters={(key := name.rpartition(".")[2]): tensors[place]}), key)
            for name, place in self.here.items()
        }


class _Engine:
    """The scale engine of one shape of layers."""

    def __init__(self, layer, entries, device):
        self._parts, self._n_kv_heads, self._has_v = len(entries), layer.n_kv_heads, layer.norm is not None
        self._device, self._types = device, [entry["dtype"] for entry in entries]
        if device.type == "cpu":
            self._native = _host.ScaleEngine(entries, False, dataclasses.asdict(Tail()), layer.n_q_heads)
        else:
            self._native = _native.ShapeEngine(device.index, entries, False, Tail().eta)
        results = self._native.results()
        of = lambda name, dtype: _heads.memory(self._native, results[name], dtype, device)
        # Words in one type, so that copies keep their bits.
        self._heads, self._status = of("heads", torch.float32), of("status", torch.int32).view(torch.float32)

    def fits(self, entries):
        """Whether it computes layers of this shape and of these types."""
        return self._types == [entry["dtype"] for entry in entries] and self._native.fits(entries)

    def launch(self, stream, entries, heads, status):
        """Puts a layer's scales on a stream, and copies of its results."""
        self._native.launch(stream, entries)
        heads.copy_(self._heads)
        status.copy_(self._status)

    def by_operand(self, values):
        """Rows of q, k and v, one descale a KV head, of a launch's values; v is None without a bound."""
        size = self._n_kv_heads // self._parts
        starts = range(0, len(values), 4 * size)
        q, k, v = ([x for at in starts for x in values[at + i * size : at + (i + 1) * size]] for i in range(3))
        return q, k, v if self._has_v else None
