"""Scales with every weight sync of reinforcement learning, from the weights that the sync sends anyway.

| framework | where its weights pass | form here |
|---|---|---|
| NeMo-RL, Megatron workers | ``_iter_params_with_optional_kv_scales(kv_scales)`` | :func:`nemo_rl`: what replaces ``calibrate_qkv_fp8_scales`` |
| SkyRL | ``extract_weights`` and ``get_weight_metadata`` of a weight extractor | :func:`skyrl`: an extractor that sends scales, too |
| verl; NeMo-RL, DTensor workers | ``load_weights`` by buckets, which ignores scales | none: the plugin in the engine |
| slime, miles | chunks of ``(name, tensor)`` into SGLang | :func:`chunks_with_scales`, or the plugin |
| others, into vLLM's layerwise update | an iterator of pairs | :func:`with_scales` |

No forward runs over data, and no rank has to agree with another: equal weights give equal scales. Shards are gathered
first, as the sync does; a tensor-parallel rank that has its own heads only needs the largest of all ranks where a scale
is one a tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from . import _native
from ._errors import NonFiniteError, UnsupportedError
from ._serving import ScaleStream

if TYPE_CHECKING:
    from ._options import Engine, Layers, Model, Pairs

__all__ = ["chunks_with_scales", "fill_sglang", "fill_vllm", "must_flush", "nemo_rl", "skyrl", "with_scales"]


def nemo_rl(weights: Pairs, config: Model, *, include_q: bool = True) -> dict[str, Any]:
    """The result of NeMo-RL's ``calibrate_qkv_fp8_scales`` without its forward: ``{"layers": {name: float}}``, by
    vLLM's names.

    ``weights`` are pairs of a name and a full tensor, as ``megatron_bridge.export_hf_weights`` of a policy worker gives
    them; all ranks iterate, since that gathers. NeMo-RL looks for ``model.layers.N.self_attn`` whatever the model is
    and sends 1.0 for a name that is missing, so models with other names are an :class:`UnsupportedError`.
    """
    stream = ScaleStream(config)
    for name, tensor in weights:
        stream.push(name, tensor)
    scales = {}
    for number, layer in stream.finish().items():
        module, scale = layer["module"], layer["scale"]
        if module != f"model.layers.{number}.self_attn":
            raise UnsupportedError(
                f"NeMo-RL looks for scales of model.layers.{number}.self_attn, and would send 1.0 for {module}: use the vLLM plugin"
            )
        if include_q:
            # Its workers look for q one module further in.
            scales[f"{module}.attn.q_scale"] = scale["q"]
        scales[f"{module}.k_scale"] = scale["k"]
        scales[f"{module}.v_scale"] = scale["v"]
    return {"format": "fp8", "layers": scales}


class skyrl:
    """A SkyRL weight extractor that also sends the scales, in one more chunk after the weights.

    SkyRL announces names, types and shapes before it sends, and packs a chunk in the type of the model. So the scales
    are announced after the weights, in the order of layers, and sent in the same type. As values of BF16 they lose no
    digit in ``bfloat16`` and ``float32``; a sync in ``float16`` that would round one raises :class:`NonFiniteError`.
    """

    def __init__(self, extractor: Any, config: Model) -> None:
        self._extractor, self._stream = extractor, ScaleStream(config)
        places = json.loads(self._stream._native.places())
        if any(layer["mla"] for layer in places["layers"]):
            raise UnsupportedError("vLLM loads no scales for latent attention (MLA): use the vLLM plugin")
        self._places = places

    def __getattr__(self, name: str) -> Any:
        return getattr(self._extractor, name)

    def get_weight_metadata(self, dtype: Any) -> dict[str, list[Any]]:
        """That of the weights, then that of the scales."""
        about = self._extractor.get_weight_metadata(dtype)
        first = self._places["layers"][0]["q"]["name"] + ".weight"
        prefix = next((prefix for prefix in self._places["prefixes"] if prefix + first in about["names"]), None)
        if prefix is None:
            raise UnsupportedError(f"the weights have no {first}, as the config says: pass the config of this model")
        names = [prefix + name for layer in self._places["layers"] for name in layer["vllm"]]
        kind = str(dtype).removeprefix("torch.")
        return about | {
            "names": [*about["names"], *names],
            "dtype_names": [*about["dtype_names"], *[kind] * len(names)],
            "shapes": [*about["shapes"], *[[1]] * len(names)],
        }

    def extract_weights(self, dtype: Any) -> Iterator[Any]:
        """The chunks of the weights, and one of the scales. All ranks iterate, as with SkyRL's own."""
        kind: Any = None
        like: Any = None
        for chunk in self._extractor.extract_weights(dtype):
            yield chunk
            kind, like = type(chunk), chunk.tensors[0]
            for name, tensor in zip(chunk.names, chunk.tensors):
                self._stream.push(name, tensor)
        pairs = [pair for layer in self._stream.finish().values() for pair in _tensors(layer, "vllm", like)]
        cast = [tensor.to(dtype) for _, tensor in pairs]
        for (name, tensor), sent in zip(pairs, cast):
            if sent.float().item() != tensor.item():
                raise NonFiniteError(f"{name} {tensor.item()} is no {dtype} value: sync in bfloat16")
        yield kind(
            names=[name for name, _ in pairs],
            dtypes=[str(dtype)] * len(pairs),
            shapes=[[1]] * len(pairs),
            tensors=cast,
        )


def _tensors(layer, engine, like):
    """Names and f32 tensors of one element, of the kind of ``like``."""
    operands = "kv" if engine == "sglang" else "qkv"
    pairs = [(layer["names"][engine][operand], layer["scale"][operand]) for operand in operands if operand in layer["scale"]]
    if hasattr(like, "untyped_storage"):
        import torch

        # One transfer for all.
        values = torch.tensor([value for _, value in pairs], dtype=torch.float32, device=like.device)
        return [(name, value) for (name, _), value in zip(pairs, values.split(1))]
    import numpy

    return [(name, numpy.array([value], numpy.float32)) for name, value in pairs]


def with_scales(weights: Pairs, config: Model, *, engine: Engine = "vllm") -> Iterator[tuple[str, Any]]:
    """The weights of a weight sync, and after each layer's last tensor its scales: for updates that load scales (vLLM's
    ``start_weight_update`` to ``finish_weight_update``) and take names as they come. All layers' scales have to be in
    an update: vLLM sets those that are not to 1.0. With CUDA tensors the host waits once per layer, since it sends a
    layer's scales before the next one's weights.
    """
    stream = ScaleStream(config)
    for name, tensor in weights:
        yield name, tensor
        for layer in stream.push(name, tensor):
            yield from _tensors(layer, engine, tensor)
    stream.finish()


def chunks_with_scales(
    chunks: Iterable[Pairs], config: Model, *, engine: Engine = "sglang", part: bool = False
) -> Iterator[list[tuple[str, Any]]]:
    """The same of an iterator of chunks, each a list of pairs: slime's and miles' ``get_hf_weight_chunks``. With
    ``part`` the chunks are those of one pipeline stage, as their distributed updates send them.
    """
    stream = ScaleStream(config)
    for chunk in chunks:
        chunk = list(chunk)
        # All of a chunk are pushed before scales are looked at: a device is waited for once a chunk.
        done = [(stream.push(name, tensor), tensor) for name, tensor in chunk]
        yield chunk + [pair for layers, tensor in done for layer in layers for pair in _tensors(layer, engine, tensor)]
    stream.finish(part=part)


def _modules(model, layers, attribute):
    """The attention modules of an engine's model with the scales of their layers."""
    from re import findall

    found = []
    for name, module in model.named_modules():
        if hasattr(module, attribute):
            numbers = [int(number) for number in findall(r"\.(\d+)(?=\.)", f".{getattr(module, 'layer_name', None) or name}.")]
            scales = [layers[number]["scale"] for number in numbers if number in layers]
            if len(scales) != 1:
                raise KeyError(f"{name}: no layer of these scales, or more than one")
            found.append((module, scales[0]))
    if len(found) != len(layers):
        raise KeyError(f"the engine has {len(found)} attention modules, and there are scales of {len(layers)} layers")
    return found


def write(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Sets tensors in place, each to a number or to a list of numbers for its elements: numbers without a copy to the device, and
    with two launches for all of its tensors."""
    groups: dict[tuple[Any, bool], list[tuple[Any, Any]]] = {}
    for tensor, value in pairs:
        if not hasattr(tensor, "untyped_storage"):
            tensor.fill_(value)
        elif not tensor.is_meta:
            # One that was made in inference mode can be written there alone.
            groups.setdefault((tensor.device, tensor.is_inference()), []).append((tensor, value))
    if not groups:
        return
    import torch

    for (_, inference), group in groups.items():
        numbers = [pair for pair in group if not isinstance(pair[1], list)]
        # Scales that a checkpoint has are parameters in some engines, and require gradients.
        with torch.inference_mode() if inference else torch.no_grad():
            if numbers:
                tensors, values = zip(*numbers)
                torch._foreach_zero_(tensors)
                torch._foreach_add_(tensors, values)
            for tensor, value in group:
                if isinstance(value, list):
                    tensor.copy_(tensor.new_tensor(value, dtype=tensor.dtype).reshape(tensor.shape))


def fill_vllm(model: Any, layers: Layers) -> None:
    """Sets the scales of a loaded vLLM model in place, the host's copies too: after ``process_weights_after_loading``.

    ``layers`` is what :meth:`ScaleStream.finish` gives. Addresses stay, so that captured graphs read the new values.
    Where graphs hold the host's floats (FlashInfer), capture them again.
    """
    pairs = []
    for module, scale in _modules(model, layers, "_k_scale"):
        for operand, value in scale.items():
            pairs.append((getattr(module, f"_{operand}_scale"), value))
            setattr(module, f"_{operand}_scale_float", value)
            copy = getattr(module, f"_{operand}_scale_cpu", None)
            if copy is not None:
                pairs.append((copy, value))
    write(pairs)


def fill_sglang(model: Any, layers: Layers) -> None:
    """Sets the scales of k and v of a loaded SGLang model in place, and the float copies that it keeps: an update of
    the weights does not change those. q is cast at 1.0 there.
    """
    pairs = []
    for module, scale in _modules(model, layers, "k_scale_float"):
        for operand in "kv":
            pairs.append((getattr(module, f"{operand}_scale").data, scale[operand]))
            setattr(module, f"{operand}_scale_float", scale[operand])
    write(pairs)


def must_flush(in_use: Layers, new: Layers) -> bool:
    """Whether a cache that is kept across a weight sync must be flushed: a bound of ``new`` is larger than the scale in
    ``in_use``.

    Both are what :meth:`ScaleStream.finish` gives. While it is False, keep casting with the scales ``in_use`` of k and
    v: a smaller one would misread what is cached. The scale of q may change at any time, since queries are not cached.
    """

    for name, layers in (("in_use", in_use), ("new", new)):
        if not isinstance(layers, Mapping):
            raise TypeError(f"{name}: expected layers by number, as ScaleStream.finish gives them, not {layers!r}")

    def rows(layers, exact):
        of = lambda layer, operand: max(layer[operand]) if exact else layer["scale"][operand]
        return [
            (number, of(layer, "q"), of(layer, "k"), None if layer["v"] is None else of(layer, "v"))
            for number, layer in sorted(layers.items())
        ]

    return bool(_native.refit(rows(in_use, False), rows(new, True)))
