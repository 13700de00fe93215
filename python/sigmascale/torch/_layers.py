"""Finds the attention layers of a model and reads addresses, shapes and strides off their tensors."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from typing import Any, Literal

import torch

from .. import _native
from .._arguments import positive, real, whole
from .._errors import ArgumentError, SigmascaleError, UnsupportedError
from . import _distributed

_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
# Parts of names that wrappers (torch.compile, data parallelism, FSDP, activation checkpoints) put in.
_WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


@dataclasses.dataclass(eq=False)
class Latent:
    """What a layer with multi-head latent attention (MLA) also has: the model, which all of its layers share, the
    layer's place among those with attention, and the layer's tensors by their names in the model, its projections
    among them."""

    model: _native.MlaModel
    index: int
    tensors: dict


@dataclasses.dataclass(eq=False, repr=False)
class Layer:
    """One attention layer, for models that are not in the family table. Tensors are the model's, or views of them.

    ``q``, ``k``, ``v``: weights ``(n_heads * d_head, d_model)``, any strides (a slice or ``.t()`` of a fused one is
    fine). ``norm`` is the norm in front of the projections: ``"rms"``, ``"layer"`` or ``None``. Without one, q and k
    have a bound only if they are normalized themselves (``q_norm``, ``k_norm``: gains of RMS norms over ``d_head``
    values, per head).

    ``gain_offset`` is 1 for norms that multiply by ``1 + gain``. ``rotary`` is the number of rotated channels of a
    head. ``query_factor`` is the largest factor that the model multiplies q by after rotation and norms, if one grows
    with the position (Llama 4, Ministral 3), and ``positions`` how many positions that covers: bounds hold for as many
    keys. ``number`` is the layer's number in the model, by default its index in ``layers``. ``model_q_heads`` is the
    number of query heads of all layers of the model, if the process has only some of them (pipeline stages):
    ``geometry-c-star`` counts them.

    Head counts are those of the whole model if ``q``, ``k`` and ``v`` are DTensors sharded by rows (tensor
    parallelism). If they are a process's rows as plain tensors, head counts are those of the process, and
    ``first_kv_head`` is the number of its first KV head in the layer. ``unit`` is the module in whose forward the
    tensors are gathered, if a wrapper other than FSDP and ZeRO-3 gathers them: scales are computed before that forward.
    ``dropout`` is an ``nn.Dropout`` between the norm and the projections, if there is one: while it is active the
    layer's bounds do not hold, and a warning says so.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    n_q_heads: int
    n_kv_heads: int
    norm: Literal["rms", "layer"] | None = "rms"
    gain: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    q_bias: torch.Tensor | None = None
    k_bias: torch.Tensor | None = None
    v_bias: torch.Tensor | None = None
    gain_offset: float = 0.0
    rotary: int = 0
    interleaved: bool = False
    rope_factor: float = 1.0
    softmax_scale: float | None = None
    query_factor: float = 1.0
    positions: int | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    qk_norm_offset: float = 0.0
    qk_norm_joint: bool = False
    module: torch.nn.Module | None = None
    name: str = "layer"
    # For weights that hold more than one projection: first channels of the heads of q, k and v, and the head dimension.
    heads: tuple[list[int], list[int], list[int]] | None = None
    fused_d_head: int = 0
    # Where the tensors were read from, as (dict of a module, key, what was there): parameters, and the modules above them.
    sources: list[tuple[dict[str, Any], str, Any]] = dataclasses.field(default_factory=list)
    number: int | None = None
    model_q_heads: int | None = None
    first_kv_head: int = 0
    unit: torch.nn.Module | None = None
    dropout: torch.nn.Module | None = None
    # Of layers that the family table finds; q, k and v then are the projections from the latents.
    latent: Latent | None = None

    @property
    def d_head(self) -> int:
        """Channels of a head."""
        return self.fused_d_head if self.heads is not None else self.q.shape[0] // max(self.n_q_heads, 1)

    def __repr__(self) -> str:
        return f"<sigmascale Layer {self.name}: {self.n_q_heads} query and {self.n_kv_heads} KV heads of {self.d_head}>"

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that the scales depend on, by name."""
        fields = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        named = {f"{self.name}.{name}": value for name, value in fields if isinstance(value, torch.Tensor)}
        return named if self.latent is None else named | self.latent.tensors


def check(layers):
    """Raises an exception that says what to do if the layers' tensors cannot be read. Returns their device; None
    without layers."""
    device, where = None, None
    for layer in layers:
        _check_values(layer)
        for name, tensor in layer.tensors().items():
            if tensor.device.type == "meta":
                raise ArgumentError(f"{name} is on the meta device and has no values: load the weights first")
            if tensor.device.type not in ("cuda", "cpu"):
                raise ArgumentError(
                    f"{name} is on {tensor.device}: move the model to a CUDA device or to the CPU first"
                )
            if device is None:
                device, where = tensor.device, name
            elif tensor.device != device:
                raise ArgumentError(
                    f"{name} is on {tensor.device} and {where} on {device}: attach one runtime for each device, with the layers=[...] of find_layers(model) that lie there"
                )
        check_form(layer)
    return device


def check_form(layer):
    """The same of types and shapes only, which tensors without values have too."""
    _check_values(layer)
    for name, tensor in layer.tensors().items():
        if tensor.dtype not in _DTYPES:
            remedy = (
                "cast the model to one of them" if tensor.dtype == torch.float64 else "attach to the unquantized model"
            )
            raise UnsupportedError(f"{name} has type {tensor.dtype}: bfloat16, float16 and float32 are read; {remedy}")
    if layer.latent is not None:
        # The crate holds them against the config.
        return
    weights = {f"{layer.name}.{key}": getattr(layer, key) for key in "qkv"}
    if len({tensor.dtype for tensor in weights.values()}) > 1:
        kinds = ", ".join(f"{name} {tensor.dtype}" for name, tensor in weights.items())
        raise ArgumentError(f"mixed types ({kinds}): cast q, k and v of a layer to one type")
    vectors = _vectors(layer)
    if len({vector.dtype for vector in vectors.values()}) > 1:
        kinds = ", ".join(f"{name} {vector.dtype}" for name, vector in vectors.items())
        raise ArgumentError(f"{layer.name}: mixed types ({kinds}): cast norm and biases of a layer to one type")
    norms = {name: getattr(layer, name) for name in ("q_norm", "k_norm") if getattr(layer, name) is not None}
    if len({vector.dtype for vector in norms.values()}) > 1:
        raise ArgumentError(f"{layer.name}: cast q_norm and k_norm to one type")
    for name, vector in (vectors | norms).items():
        if vector.dim() != 1 or not vector.is_contiguous():
            raise ArgumentError(f"{layer.name}: {name} must be a contiguous vector, not {tuple(vector.shape)}")
    _check_shapes(layer)


def _check_values(layer):
    """Types and numbers, before anything is computed with them."""
    if not isinstance(layer, Layer):
        raise TypeError(f"layers must be sigmascale.torch.Layer objects, not {type(layer).__name__}")
    for key in "qkv":
        weight = getattr(layer, key)
        if not isinstance(weight, torch.Tensor):
            raise TypeError(f"{layer.name}.{key} must be the weight, a tensor, not {type(weight).__name__}")
        if weight.dim() != 2:
            raise ArgumentError(
                f"{layer.name}.{key} has shape {tuple(weight.shape)}: (n_heads * d_head, d_model) is needed"
            )
    for key in ("gain", "shift", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm"):
        vector = getattr(layer, key)
        if vector is not None and not isinstance(vector, torch.Tensor):
            raise TypeError(f"{layer.name}.{key} must be a tensor or None, not {type(vector).__name__}")
    if layer.dropout is not None and not isinstance(layer.dropout, torch.nn.Dropout):
        raise TypeError(f"{layer.name}.dropout must be an nn.Dropout or None, not {type(layer.dropout).__name__}")
    if (layer.q_norm is None) != (layer.k_norm is None):
        raise ArgumentError(f"{layer.name}: q_norm and k_norm are given together or not at all")
    for key in ("n_q_heads", "n_kv_heads"):
        whole(f"{layer.name}.{key}", getattr(layer, key), least=1)
    rotary = whole(f"{layer.name}.rotary", layer.rotary)
    if rotary % 2 or rotary > layer.d_head:
        raise ArgumentError(f"{layer.name}.rotary {rotary} must be even and at most the head dimension {layer.d_head}")
    for key in ("gain_offset", "qk_norm_offset"):
        if not math.isfinite(real(f"{layer.name}.{key}", getattr(layer, key))):
            raise ArgumentError(f"{layer.name}.{key} must be finite")
    positive(f"{layer.name}.rope_factor", layer.rope_factor)
    positive(f"{layer.name}.query_factor", layer.query_factor)
    if layer.positions is not None:
        whole(f"{layer.name}.positions", layer.positions, least=1)
    if layer.softmax_scale is not None:
        positive(f"{layer.name}.softmax_scale", layer.softmax_scale)


def _vectors(layer):
    named = {name: getattr(layer, name) for name in ("gain", "shift", "q_bias", "k_bias", "v_bias")}
    return {name: vector for name, vector in named.items() if vector is not None}


def _check_shapes(layer):
    if layer.norm not in ("rms", "layer", None):
        raise ArgumentError(f"{layer.name}: norm {layer.norm!r} is not 'rms', 'layer' or None")
    if layer.norm is None and layer.q_norm is None:
        raise UnsupportedError(
            f"{layer.name}: there is no norm before attention and none of q and k, so they have no bound"
        )
    if layer.n_q_heads % layer.n_kv_heads:
        raise ArgumentError(
            f"{layer.name}: {layer.n_q_heads} query heads are not a multiple of {layer.n_kv_heads} KV heads"
        )
    for key, heads in [("q", layer.n_q_heads), ("k", layer.n_kv_heads), ("v", layer.n_kv_heads)]:
        weight = getattr(layer, key)
        if weight.shape[1] != layer.q.shape[1]:
            raise ArgumentError(
                f"{layer.name}.{key} has shape {tuple(weight.shape)}: (n_heads * d_head, d_model) is needed, the same d_model "
                "for q, k and v; a weight stored [in, out] is given as weight.t()"
            )
        if layer.heads is None and weight.shape[0] != heads * layer.d_head:
            raise ArgumentError(
                f"{layer.name}.{key} has {weight.shape[0]} channels, which are not {heads} heads of {layer.d_head}"
            )
    for key, length in [("gain", layer.q.shape[1]), ("shift", layer.q.shape[1])]:
        vector = getattr(layer, key)
        if vector is not None and vector.shape != (length,):
            raise ArgumentError(f"{layer.name}.{key} has shape {tuple(vector.shape)}, expected ({length},)")
    for key in "qkv":
        bias, weight = getattr(layer, f"{key}_bias"), getattr(layer, key)
        if bias is not None and bias.shape[0] != weight.shape[0]:
            raise ArgumentError(f"{layer.name}.{key}_bias has {bias.shape[0]} values for {weight.shape[0]} channels")
    for key, heads in [("q_norm", layer.n_q_heads), ("k_norm", layer.n_kv_heads)]:
        gain = getattr(layer, key)
        if gain is not None and gain.shape not in ((layer.d_head,), (heads * layer.d_head,)):
            raise ArgumentError(
                f"{layer.name}.{key} has shape {tuple(gain.shape)}: ({layer.d_head},) or ({heads * layer.d_head},) is needed"
            )


def entries(layer):
    """The layer as the engine takes it: one entry, or one a KV head where heads are interleaved in a fused weight."""
    r, group = layer.d_head, layer.n_q_heads // layer.n_kv_heads

    def projection(key, first):
        weight, bias = getattr(layer, key), getattr(layer, f"{key}_bias")
        row, column = weight.stride()
        address = weight.data_ptr() + first * row * weight.element_size()
        offset = 0 if bias is None else bias.data_ptr() + first * bias.element_size()
        return _Projection(address, row, column, offset)

    vectors = list(_vectors(layer).values())
    common = {
        "dtype": _DTYPES[layer.q.dtype],
        "gain": 0 if layer.gain is None else layer.gain.data_ptr(),
        "shift": 0 if layer.shift is None else layer.shift.data_ptr(),
        "vector_dtype": _DTYPES[vectors[0].dtype] if vectors else "float32",
        "gain_offset": layer.gain_offset,
        "mean_removed": layer.norm == "layer",
        "d_model": layer.q.shape[1],
        "d_head": r,
        "rotary": layer.rotary,
        "interleaved": layer.interleaved,
        "rope_factor": layer.rope_factor,
        "softmax_scale": r**-0.5 if layer.softmax_scale is None else layer.softmax_scale,
        "query_factor": layer.query_factor,
    }
    one = lambda n_q, n_kv, starts, first=(0, 0): (
        common
        | {
            "qk_norm": None if layer.q_norm is None else _QkNorm(layer, first),
            "q": projection("q", starts[0]),
            "k": projection("k", starts[1]),
            "v": None if layer.norm is None else projection("v", starts[2]),
            "n_q": n_q,
            "n_kv": n_kv,
        }
    )
    if layer.heads is None:
        return [one(layer.n_q_heads, layer.n_kv_heads, (0, 0, 0))]
    steady = all(rows == list(range(rows[0], rows[0] + len(rows) * r, r)) for rows in layer.heads)
    if steady:
        return [one(layer.n_q_heads, layer.n_kv_heads, [rows[0] for rows in layer.heads])]
    q, k, v = layer.heads
    return [one(group, 1, (q[g * group], k[g], v[g]), (g * group, g)) for g in range(layer.n_kv_heads)]


class _QkNorm:
    """The norms of q and k from heads ``first`` on."""

    def __init__(self, layer, first):
        def side(gain, heads, head):
            per_head = gain.shape[0] != layer.d_head
            address = gain.data_ptr() + (head * layer.d_head * gain.element_size() if per_head else 0)
            return address, per_head, (heads if layer.qk_norm_joint else 1) * layer.d_head

        self.q = side(layer.q_norm, layer.n_q_heads, first[0])
        self.k = side(layer.k_norm, layer.n_kv_heads, first[1])
        self.dtype, self.offset = _DTYPES[layer.q_norm.dtype], layer.qk_norm_offset


class _Projection:
    def __init__(self, ptr, row_stride, col_stride, bias):
        self.ptr, self.row_stride, self.col_stride, self.bias = ptr, row_stride, col_stride, bias


class Layers:
    """The attention layers of a model, and how to read them again: at rest, or inside the forward of an FSDP unit.

    ``given``: what :func:`attach` takes as ``layers``, or None for those of the family table. ``at_rest`` are the
    layers as they lie now; those in ``sliced`` are cut up by FSDP, and their tensors have shapes and no values.
    """

    def __init__(self, model, given=None):
        self.units = _distributed.Units(model)
        self._readers = _table(model, self.units) if given is None else _given(model, self.units, given)
        if not self._readers:
            raise ArgumentError("there are no attention layers: give layers=[sigmascale.torch.Layer(...), ...]")
        self.at_rest, self.sliced, self._views, whole = [], set(), [], []
        for index, read in enumerate(self._readers):
            view = _distributed.View(self.units, at_rest=True)
            whole.append(read(view, None))
            layer = _share(whole[-1], view)
            places = [view.origin(tensor) for tensor in layer.tensors().values()]
            if layer.unit is not None or any(place is not None and place.sliced for place in places):
                self.sliced.add(index)
                check_form(layer)
            self.at_rest.append(layer)
            self._views.append(view)
        stated = {layer.model_q_heads for layer in whole} - {None}
        if len(stated) > 1:
            raise ArgumentError(
                f"layers state {sorted(stated)} model_q_heads: give the number of the whole model in each"
            )
        # Query heads of the whole model; this process may hold only some of them.
        self.q_heads = stated.pop() if stated else sum(layer.n_q_heads for layer in whole)
        self.resident = [index for index in range(len(whole)) if index not in self.sliced]

    def places(self):
        """Each layer's number in the model, its first KV head, and its KV and query heads here."""
        rows = []
        for index, layer in enumerate(self.at_rest):
            origin = self._views[index].origin(layer.k)
            first = layer.first_kv_head + layer.n_kv_heads * (origin.rank if origin else 0)
            rows.append([index if layer.number is None else layer.number, first, layer.n_kv_heads, layer.n_q_heads])
        return rows

    def head_ranks(self):
        """Of each layer: how many ranks share its heads, and which of them this is."""
        origins = (view.origin(layer.k) for view, layer in zip(self._views, self.at_rest))
        return [(1, 0) if origin is None else (origin.ranks, origin.rank) for origin in origins]

    def head_groups(self):
        """Of each layer: the process group of the ranks that share its heads, or None if all are here."""
        origins = (view.origin(layer.k) for view, layer in zip(self._views, self.at_rest))
        return [None if origin is None or origin.ranks == 1 else _distributed.head_group(origin) for origin in origins]

    def device(self):
        """Where everything is computed."""
        shapes = {index for index in self.sliced if any(x.is_meta for x in self.at_rest[index].tensors().values())}
        device = check([layer for index, layer in enumerate(self.at_rest) if index not in shapes])
        unit = self.units.device() if shapes else device
        if device is not None and unit != device:
            raise ArgumentError(
                f"some layers are on {device} and sharded ones compute on {unit}: attach a runtime for each"
            )
        return unit

    def _places(self, index):
        """Owner and name of the parameters that a layer's tensors are or are views of, by the field of the layer."""
        layer, places = self.at_rest[index], {}
        for name, tensor in layer.tensors().items():
            place = self._views[index].origin(tensor)
            if place is not None:
                places[name.removeprefix(f"{layer.name}.")] = place
        return places

    def shards(self, index):
        """What of a sliced layer's parameters stays here between forwards."""
        places = self._places(index).values()
        shards = (self.units.shard(place.owner, place.name) for place in places if place.sliced)
        return [shard for shard in shards if shard is not None]

    def unit(self, index):
        """The unit in whose forward a sliced layer's weights are whole, and units of other parameters that are cut up
        again by then, each with their owners and names."""
        layer, places = self.at_rest[index], self._places(index)
        if layer.unit is not None:
            return layer.unit, {}
        weights = [key for key in "qkv" if key in places and places[key].sliced]
        found = {self.units.above(places[key].owner) for key in weights or places if places[key].sliced}
        if len({above[0] for above in found}) != 1:
            raise UnsupportedError(
                f"{layer.name}: the q, k and v projections are in different FSDP units, so they are never whole together: shard "
                "their attention module or their block with fully_shard, not each projection; under ZeRO-3 make the attention module "
                "a leaf (set_z3_leaf_modules)"
            )
        above, others = found.pop(), {}
        for place in places.values():
            own = self.units.above(place.owner)
            if place.sliced and own[0] not in above:
                others.setdefault(own[0], []).append((place.owner, place.name))
        return above[0], others

    def holders(self, index):
        """All units that hold a sliced layer's parameters."""
        unit, _ = self.unit(index)
        own = (self.units.above(place.owner)[0] for place in self._places(index).values() if place.sliced)
        return list(dict.fromkeys([unit, *own]))

    def replaced(self, index):
        """Whether a module that a sliced layer was read from has been replaced by another, as adapters do."""
        return any(
            holder.get(key) is not held
            for holder, key, held in self.at_rest[index].sources
            if isinstance(held, torch.nn.Module)
        )

    def whole(self, index, kept):
        """A sliced layer as it is inside its unit's forward; ``kept``: copies by owner and name."""
        before = self.at_rest[index]
        if self.replaced(index):
            raise SigmascaleError(
                f"{before.name}: a projection or norm was replaced by another module since attach(): call refresh() before the "
                "forward"
            )
        view = _distributed.View(self.units, at_rest=False, kept=kept)
        owners = {place.owner for place in self._places(index).values()}
        layer = _share(self._readers[index](view, owners), view)
        for (name, tensor), expected in zip(layer.tensors().items(), before.tensors().values()):
            if tensor.shape != expected.shape or tensor.untyped_storage().nbytes() == 0:
                raise UnsupportedError(
                    f"{name} is still sharded in the forward of its FSDP unit: shape {tuple(tensor.shape)} in place of "
                    f"{tuple(expected.shape)}. Call the module that fully_shard was given, not a part of it; with DeepSpeed attach after "
                    "deepspeed.initialize()"
                )
        check([layer])
        return layer


def _share(layer, view):
    """The heads of a layer that are this process's, where tensor parallelism shares them out."""
    if not isinstance(layer, Layer):
        raise TypeError(f"layers must be sigmascale.torch.Layer objects, not {type(layer).__name__}")
    for name, tensor in layer.tensors().items():
        _distributed.plain(name, tensor)
    ranks = {}
    for key in "qkv":
        weight = getattr(layer, key)
        place = view.origin(weight) if isinstance(weight, torch.Tensor) else None
        ranks[key] = 1 if place is None else place.ranks
    (q, k, v) = ranks.values()
    if q == k == v == 1:
        return layer
    if not q == k == v:
        raise UnsupportedError(
            f"{layer.name}: q, k and v are sharded over {q}, {k} and {v} ranks: use the same tensor-parallel plan for all three"
        )
    if layer.n_kv_heads % q or layer.n_q_heads % q:
        raise UnsupportedError(
            f"{layer.name}: {q} tensor-parallel ranks do not share {layer.n_q_heads} query and {layer.n_kv_heads} KV heads evenly: "
            "choose a degree that divides the KV heads"
        )
    if layer.heads is not None or layer.qk_norm_joint:
        what = "one weight for q, k and v" if layer.heads is not None else "a norm over all heads of q or k"
        what = what if layer.latent is None else "latent attention (MLA)"
        raise UnsupportedError(f"{layer.name}: {what} is not read under tensor parallelism")
    return dataclasses.replace(layer, n_q_heads=layer.n_q_heads // q, n_kv_heads=layer.n_kv_heads // q)


def _given(model, units, entries):
    """Readers of the layers that :func:`attach` was given: layers, or functions that return one."""
    owners = {
        id(parameter): (owner, name) for owner in model.modules() for name, parameter in owner._parameters.items()
    }

    def fixed(layer):
        def read(view, _):
            if not isinstance(layer, Layer):
                raise TypeError(f"layers must be sigmascale.torch.Layer objects, not {type(layer).__name__}")
            changed = {}
            for field in dataclasses.fields(layer):
                tensor = getattr(layer, field.name)
                partitioned = _distributed.is_partitioned(tensor)
                if not (partitioned or _distributed.is_dtensor(tensor)):
                    continue
                owner, name = owners.get(id(tensor), (None, field.name))
                if partitioned or units.above(owner) or (owner is None and units):
                    raise UnsupportedError(
                        f"{layer.name}.{field.name} is sharded by {'ZeRO-3' if partitioned else 'FSDP'} and is whole in a "
                        "forward alone: give a function that returns the Layer in place of the Layer"
                    )
                changed[field.name] = view(owner, name, tensor)
            return dataclasses.replace(layer, **changed) if changed else layer

        return read

    def called(function):
        def read(view, owners):
            with _distributed.seen_as(model.modules() if owners is None else owners, view, units):
                return function()

        return read

    is_function = lambda entry: callable(entry) and not isinstance(entry, torch.nn.Module)
    return [called(entry) if is_function(entry) else fixed(entry) for entry in entries]


def find(model: torch.nn.Module) -> list[Layer]:
    """The layers of a Hugging Face model, by the family table: what ``attach`` takes where it is given none.

    Returns a list of :class:`Layer`, one for each attention layer in order; of a pipeline stage, those that it has.
    Raises :class:`UnsupportedError` if the model or one of its tensors is not supported.
    """
    layers = Layers(_distributed.unwrapped(model))
    if layers.sliced:
        raise UnsupportedError("the model is sharded by FSDP: attach() reads its layers when they are whole")
    return layers.at_rest


def _table(model, units):
    """Readers of the layers of a Hugging Face model."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_json_string"):
        raise UnsupportedError(
            f"{type(model).__name__} has no Hugging Face config: describe its attention layers with "
            "layers=[sigmascale.torch.Layer(...), ...]"
        )
    text = config.to_json_string(use_diff=False)
    try:
        layout = json.loads(_native.layout(text, type(model).__name__))
    except UnsupportedError:
        inner = _text_model(model)
        if inner is None:
            raise
        return _table(inner, units)
    spec = layout["spec"]
    modules = {_plain(name): module for name, module in model.named_modules(remove_duplicate=False)}
    parameters = {}
    for path, module in modules.items():
        held = [name for name, parameter in module._parameters.items() if parameter is not None]
        for name in dict.fromkeys([*held, *units.flattened(module)]):
            parameters[f"{path}.{name}" if path else name] = module, name
    if any(".lora_" in name for name in parameters):
        raise UnsupportedError("the model has LoRA adapters that are not merged: merge them first (merge_and_unload)")
    probes = [names["q"]["name"] + ".weight" for names in layout["layers"]]
    prefix = next((p for p in layout["prefixes"] if any(p + probe in parameters for probe in probes)), None)
    if prefix is None:
        found = {name[: -len(probe)] for probe in probes for name in parameters if name.endswith("." + probe)}
        if len(found) != 1:
            raise UnsupportedError(
                f"no parameter of {type(model).__name__} is named {probes[0]}, which family {spec['family']} needs. "
                "Pass the attention layers with layers=[sigmascale.torch.Layer(...), ...]"
            )
        (prefix,) = found
    if spec.get("multipliers") or spec.get("v_norm"):
        raise UnsupportedError(f"family {spec['family']} multiplies its projections by factors, which is not supported")
    has_latent = any(names["latent"] is not None for names in layout["layers"])
    mla_model = _native.MlaModel(text, type(model).__name__, list(parameters)) if has_latent else None
    heads = sum(names["n_q_heads"] for names in layout["layers"])
    # A pipeline stage has some of the layers; one that has any tensor of a layer has them all.
    own = [f"{names[key]['name']}.weight" for names in layout["layers"] for key in "qkv"]
    here = {name for name in own if prefix + name in parameters}

    def reader(index, names):
        def read(view, _):
            one = _layer if names["latent"] is None else functools.partial(_latent, mla_model)
            layer = one(spec, names, index, prefix, parameters, modules, view)
            return dataclasses.replace(layer, model_q_heads=heads)

        return read

    return [
        reader(index, names)
        for index, names in enumerate(layout["layers"])
        if any(f"{names[key]['name']}.weight" in here for key in "qkv")
    ]


def _text_model(model):
    """The text model inside a model that the table does not have (LLaVA and the like), or None. Its layers are those of
    its own class, whatever is around them."""
    config = getattr(model.config, "text_config", None)
    kind = getattr(config, "model_type", None)
    if kind is None or kind == model.config.model_type:
        return None
    inside = (module for module in model.modules() if module is not model)
    return next((module for module in inside if getattr(module, "config", None).__class__ is config.__class__), None)


def _largest_factor(growth):
    """Of a factor ``1 + strength ln(1 + floor((position + shift) / period))``: that of the last position."""
    last = growth["positions"] - 1
    return 1.0 + growth["strength"] * math.log(1 + (last + growth["shift"]) // growth["period"])


def _plain(name):
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _getter(prefix, parameters, modules, view, sources):
    """What reads a parameter by its name, and notes where it was read in ``sources``."""

    def get(name, wanted=True):
        owner, attribute = parameters.get(prefix + name, (None, None))
        if owner is None:
            if wanted:
                raise UnsupportedError(f"parameter {prefix + name} is missing, and the config of the model needs it")
            return None
        held = owner._parameters.get(attribute)
        sources.append((owner._parameters, attribute, held))
        above, _, place = (prefix + name).rpartition(".")[0].rpartition(".")
        if above in modules and place in modules[above]._modules:
            sources.append((modules[above]._modules, place, modules[above]._modules[place]))
        return view(owner, attribute, getattr(owner, attribute, None) if held is None else held)

    return get


def _latent(mla_model, spec, names, index, prefix, parameters, modules, view):
    """A layer with latent attention: the tensors that its scales depend on, by name."""
    sources, tensors = [], {}
    get = _getter(prefix, parameters, modules, view, sources)
    for alternatives in names["latent"]:
        name = next((name for name in alternatives if prefix + name in parameters), alternatives[0])
        tensors[prefix + name] = get(name)
    growth = (spec.get("temperature") or {index: None})[index]
    return Layer(
        **{key: tensors[f"{prefix}{names[key]['name']}.weight"] for key in "qkv"},
        n_q_heads=names["n_q_heads"],
        n_kv_heads=names["n_q_heads"],
        softmax_scale=spec["softmax_scale"][index],
        query_factor=_largest_factor(growth) if growth else 1.0,
        positions=growth["positions"] if growth else None,
        module=modules.get((prefix + names["q"]["name"]).rpartition(".")[0]),
        name=f"layer {names['number']}",
        number=names["number"],
        heads=tuple(names[key]["heads"] for key in "qkv"),
        fused_d_head=names["d_head"],
        sources=sources,
        latent=Latent(mla_model, index, tensors),
    )


def _layer(spec, names, index, prefix, parameters, modules, view):
    sources = []
    get = _getter(prefix, parameters, modules, view, sources)
    norm = spec["norm"]
    kind = {"layer-norm": "layer", "rms-norm": "rms", "none": None}[norm["kind"]]
    weights, biases, heads = {}, {}, {}
    for key in "qkv":
        place = names[key]
        weight, bias = get(place["name"] + ".weight"), get(place["name"] + ".bias", wanted=False)
        ranks = view.origin(weight).ranks
        if ranks > 1 and place["conv1d"]:
            raise UnsupportedError(f"{prefix + place['name']}.weight is stored [in, out] and sharded by its inputs")
        weight = weight.t() if place["conv1d"] else weight
        shape = (place["channels"] // ranks, spec["d_model"])
        if tuple(weight.shape) != shape:
            raise UnsupportedError(
                f"{prefix + place['name']}.weight has shape {tuple(weight.shape)}, but the config needs {shape}"
            )
        weights[key], biases[key], heads[key] = weight, bias, place["heads"]
    growth = (spec.get("temperature") or {index: None})[index]
    qk_norm = spec["qk_norm"]
    if qk_norm and qk_norm["rotated_only"] and spec["rope"][index] is None:
        qk_norm = None
    # In front of a norm of q and k a rotation changes none of their bounds.
    rope = None if qk_norm and qk_norm["behind_rotation"] else spec["rope"][index]
    q_norm = k_norm = None
    if names["qk_norm"] is not None:
        apart = any("{h}" in name for name in names["qk_norm"])
        if apart or qk_norm["shift"]:
            raise UnsupportedError(
                f"family {spec['family']} has norms of q and k with {'a tensor for each head' if apart else 'a shift'}, which "
                "attach() does not support: take its descales from sigmascale.calibrate(), and pass them to "
                "sigmascale.torch.attention() in place of a plan"
            )
        q_norm, k_norm = (get(name + ".weight") for name in names["qk_norm"])
    elif qk_norm is not None:
        # A norm without gains.
        q_norm = k_norm = torch.ones(names["d_head"], device=weights["q"].device, dtype=weights["q"].dtype)
    fused = names["q"]["channels"] != names["n_q_heads"] * names["d_head"]
    has_gain = norm["gain"] != "unit" and names["norm"] is not None
    return Layer(
        **weights,
        n_q_heads=names["n_q_heads"],
        n_kv_heads=names["n_kv_heads"],
        norm=kind,
        gain=get(names["norm"] + ".weight") if has_gain else None,
        shift=get(names["norm"] + ".bias") if norm["shift"] else None,
        q_bias=biases["q"],
        k_bias=biases["k"],
        v_bias=biases["v"],
        gain_offset=1.0 if norm["gain"] == "one-plus" else 0.0,
        rotary=rope["rotary_dim"] if rope else 0,
        interleaved=bool(rope) and rope["layout"] == "interleaved",
        rope_factor=rope["attention_factor"] if rope else 1.0,
        softmax_scale=spec["softmax_scale"][index],
        query_factor=_largest_factor(growth) if growth else 1.0,
        positions=growth["positions"] if growth else None,
        q_norm=q_norm,
        k_norm=k_norm,
        qk_norm_offset=1.0 if qk_norm and qk_norm["gain"] == "one-plus" else 0.0,
        qk_norm_joint=bool(qk_norm) and qk_norm["scope"] == "joint",
        module=modules.get((prefix + names["q"]["name"]).rpartition(".")[0]),
        name=f"layer {names['number']}",
        number=names["number"],
        heads=(heads["q"], heads["k"], heads["v"]) if fused else None,
        fused_d_head=names["d_head"],
        sources=sources,
        dropout=_embedding_dropout(prefix, names, modules),
    )


def _embedding_dropout(prefix, names, modules):
    """The dropout after the norm of the embeddings, where the first layer reads that norm (BERT, ModernBERT)."""
    parent, _, _ = (prefix + (names["norm"] or "")).rpartition(".")
    if not parent.endswith("embeddings") or parent not in modules:
        return None
    return next((child for child in modules[parent].children() if isinstance(child, torch.nn.Dropout)), None)
