"""Scales with every weight sync of reinforcement learning, from the weights that the sync sends anyway.

| framework | where its weights pass | form here |
|---|---|---|
| NeMo-RL | ``_iter_params_with_optional_kv_scales(kv_scales)`` | :func:`nemo_rl`: what replaces ``calibrate_qkv_fp8_scales`` |
| SkyRL | ``extract_weights`` into vLLM's layerwise update | :func:`with_scales`: the weights, then the scales |
| verl | ``model.load_weights`` by buckets, which ignores scales | :func:`with_scales` is of no use: :func:`fill_vllm` in the engine |
| slime, miles | chunks of ``(name, tensor)`` into SGLang | :func:`chunks_with_scales`, then :func:`fill_sglang` |

No forward runs over data, and no rank has to agree with another: equal weights give equal scales. Shards are gathered first, as
the sync does; a tensor-parallel rank that has its own heads only needs the largest of all ranks where a scale is one a tensor.
"""

from . import _native
from ._serving import ScaleStream

__all__ = ["chunks_with_scales", "fill_sglang", "fill_vllm", "must_flush", "nemo_rl", "with_scales"]


def nemo_rl(weights, config, *, include_q=True):
    """The result of NeMo-RL's ``calibrate_qkv_fp8_scales`` without its forward: ``{"layers": {name: float}}``, by vLLM's names.

    ``weights`` are pairs of a name and a full tensor, as the policy worker exports them (``export_hf_weights``, or a ``state_dict()``
    of DTensors). It works on every worker that can list its weights, DTensor workers too.
    """
    stream = ScaleStream(config)
    for name, tensor in weights:
        stream.push(name, tensor)
    scales = {}
    for layer in stream.finish().values():
        module, scale = layer["module"], layer["scale"]
        if include_q:
            # Its workers look for q one module further in.
            scales[f"{module}.attn.q_scale"] = scale["q"]
        scales[f"{module}.k_scale"] = scale["k"]
        scales[f"{module}.v_scale"] = scale["v"]
    return {"format": "fp8", "layers": scales}


def _tensors(layer, engine, like):
    """Names and f32 tensors of one element, of the kind of ``like``."""
    operands = "kv" if engine == "sglang" else "qkv"
    pairs = [(layer["names"][engine][operand], layer["scale"][operand]) for operand in operands if operand in layer["scale"]]
    if hasattr(like, "untyped_storage"):
        import torch

        return [(name, torch.tensor([value], dtype=torch.float32, device=like.device)) for name, value in pairs]
    import numpy

    return [(name, numpy.array([value], numpy.float32)) for name, value in pairs]


def with_scales(weights, config, *, engine="vllm"):
    """The weights of a sync, and behind each layer's last tensor its scales: for updates that load scales (vLLM's
    ``start_weight_update`` to ``finish_weight_update``, which SkyRL uses). All layers' scales have to be in an update: vLLM sets those
    that are not to 1.0.
    """
    stream = ScaleStream(config)
    for name, tensor in weights:
        yield name, tensor
        for layer in stream.push(name, tensor):
            yield from _tensors(layer, engine, tensor)
    stream.finish()


def chunks_with_scales(chunks, config, *, engine="sglang"):
    """The same of an iterator of chunks, each a list of pairs: slime's ``get_hf_weight_chunks``, miles' buckets."""
    stream = ScaleStream(config)
    for chunk in chunks:
        chunk = list(chunk)
        added = [pair for name, tensor in chunk for layer in stream.push(name, tensor) for pair in _tensors(layer, engine, tensor)]
        yield chunk + added
    stream.finish()


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


def fill_vllm(model, layers):
    """Sets the scales of a loaded vLLM model in place, the host's copies too: after ``process_weights_after_loading``.

    ``layers`` is what :meth:`ScaleStream.finish` gives. Addresses stay, so that captured graphs read the new values. Where graphs
    hold the host's floats (FlashInfer), capture them again.
    """
    for module, scale in _modules(model, layers, "_k_scale"):
        for operand, value in scale.items():
            buffer = getattr(module, f"_{operand}_scale")
            buffer.fill_(value)
            setattr(module, f"_{operand}_scale_float", value)
            copy = getattr(module, f"_{operand}_scale_cpu", None)
            if copy is not None:
                copy.fill_(value)


def fill_sglang(model, layers):
    """Sets the scales of k and v of a loaded SGLang model in place, and the floats that it keeps beside them: an update of weights
    alone leaves those at their old values. q is cast at 1.0 there.
    """
    for module, scale in _modules(model, layers, "k_scale_float"):
        for operand in ("k", "v"):
            getattr(module, f"{operand}_scale").data.fill_(scale[operand])
            setattr(module, f"{operand}_scale_float", scale[operand])


def must_flush(in_use, new):
    """Whether a cache that is kept across a sync has to go: a bound of ``new`` is larger than the scale in ``in_use``.

    Both are what :meth:`ScaleStream.finish` gives. While it is False, keep casting with the scales ``in_use`` of k and v: a smaller one
    would misread what is cached. The scale of q may change at any time, since queries are not cached.
    """

    def rows(layers, exact):
        of = lambda layer, operand: max(layer[operand]) if exact else layer["scale"][operand]
        return [
            (number, of(layer, "q"), of(layer, "k"), None if layer["v"] is None else of(layer, "v"))
            for number, layer in sorted(layers.items())
        ]

    return bool(_native.refit(rows(in_use, False), rows(new, True)))
