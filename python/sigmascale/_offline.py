"""Calibrate, inspect, stress and export, as the command line does them."""

import json
import os
from collections.abc import Mapping

import numpy as np

from . import _native
from ._errors import ArgumentError

_SAFETENSORS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3"}


def _options(keywords):
    options = {
        "delta": 1e-6,
        "seq_len": 1024,
        "batch": 1,
        "steps": 1,
        "eta": 0.8,
        "bound": "certain",
        "granularity": "head",
        "estimator": "gram",
        "as_paper": False,
        "c": None,
    }
    unknown = sorted(keywords.keys() - options.keys())
    if unknown:
        raise TypeError(f"unknown option {unknown[0]!r}: the options are {', '.join(options)}")
    return options | keywords


def _safetensors(weights):
    """The arrays as the bytes of one safetensors file."""
    header, chunks, offset = {}, [], 0
    for name, value in weights.items():
        array = np.ascontiguousarray(value)
        dtype = _SAFETENSORS.get(array.dtype.name)
        if dtype is None:
            raise ArgumentError(f"{name} has type {array.dtype}: {', '.join(_SAFETENSORS)} are read")
        header[str(name)] = {
            "dtype": dtype,
            "shape": list(np.shape(value)),
            "data_offsets": [offset, offset + array.nbytes],
        }
        chunks.append(array.reshape(-1).view(np.uint8).data)
        offset += array.nbytes
    text = json.dumps(header).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *chunks])


def _source(model, weights):
    if isinstance(model, Mapping):
        name = str(model.get("_name_or_path") or "model")
        return (json.dumps(dict(model)), None if weights is None else _safetensors(weights), name)
    if weights is not None:
        with open(os.fspath(model), encoding="utf-8") as file:
            return (file.read(), _safetensors(weights), os.fspath(model))
    return os.fspath(model)


def calibrate(model, *, weights=None, **options):
    """Constants, norms, bounds and descales of a model: the JSON of ``sigmascale calibrate`` as a dict.

    ``model`` is a preset name, a ``config.json``, a ``.safetensors`` file, a checkpoint folder, or a config as a dict.
    ``weights`` maps tensor names to NumPy arrays and then stands in for the files. Options: ``delta``, ``seq_len``,
    ``batch``, ``steps``, ``eta``, ``bound`` (certain, rank-aware, spectrum), ``granularity`` (head, layer),
    ``estimator`` (gram, power), ``as_paper``, ``c``.
    """
    return json.loads(_native.calibrate(_source(model, weights), _options(options)))


def inspect(model, *, weights=None):
    """The spectral profile of every layer and head: the JSON of ``sigmascale inspect`` as a dict."""
    return json.loads(_native.inspect(_source(model, weights)))


def export_scales(model, file, *, weights=None, **options):
    """Writes q, k and v scales as vLLM and mistral.rs read them; the file appears whole or not at all."""
    _native.export_scales(_source(model, weights), os.fspath(file), _options(options))


def stress(
    scenario,
    model=None,
    *,
    mode="logit",
    policies=None,
    layers=None,
    seq_len=None,
    tokens=None,
    path=(),
    steps=None,
    seed=0,
    device="cpu",
    trace=None,
):
    """What every scaling policy does when the weights move: the JSON of ``sigmascale stress`` as a dict.

    ``scenario`` is checkpoint-load, weight-spike, refit, or replay (which takes ``trace``, a file, and no model). ``tokens``
    is a file that is run through the model's own forward, ``path`` the checkpoints that a refit goes through. The scenarios
    that train a model are the command's alone.
    """
    if policies is not None and not isinstance(policies, str):
        policies = ",".join(policies)
    arguments = {
        "model": None if model is None else os.fspath(model),
        "mode": mode,
        "policies": policies,
        "layers": layers,
        "seq_len": seq_len,
        "tokens": None if tokens is None else os.fspath(tokens),
        "path": [os.fspath(file) for file in path],
        "steps": steps,
        "seed": seed,
        "device": device,
        "trace": None if trace is None else os.fspath(trace),
    }
    return json.loads(_native.stress(scenario, arguments))


def descales(profile):
    """The descales of a profile as float32 arrays: q, k, v, o ``(layers, n_kv)`` and logit ``(layers, n_q)``.

    Divide a tensor by its descale before the cast; the kernel multiplies it back.
    """
    if "layers" not in profile:
        raise ArgumentError("the profile has no layers: calibrate a checkpoint, not a config alone")
    rows = {}
    for name, key in [
        ("q", "q_descale"),
        ("k", "k_descale"),
        ("v", "v_descale"),
        ("o", "o_descale"),
        ("logit", "logit_descales"),
    ]:
        values = [layer.get(key) for layer in profile["layers"]]
        rows[name] = None if any(value is None for value in values) else np.asarray(values, dtype=np.float32)
    return rows


def presets():
    """Names of the models whose configs are built in."""
    return _native.presets()
