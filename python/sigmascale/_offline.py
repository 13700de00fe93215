"""Calibrate, inspect, stress and export, as the command line does them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from . import _native
from ._arguments import count, counts, flag, optional, real, text, whole
from ._errors import ArgumentError
from ._parameters import AutoC, DelayedPaper, DelayedTe, named
from ._results import Inspection, Profile, StressRun

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from ._options import Calibration, Model, Path, Weights

# The types that safetensors files hold; those of tensors that are not read do not matter.
_SAFETENSORS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3"}
_SAFETENSORS |= {"float8_e5m2": "F8_E5M2", "bool": "BOOL"}
_SAFETENSORS |= {f"{kind}int{bits}": f"{kind.upper() or 'I'}{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)}
# Defaults and checks of the options of `calibrate`.
_OPTIONS = {
    "delta": (1e-6, real),
    "seq_len": (1024, count),
    "batch": (1, count),
    "steps": (1, count),
    "eta": (0.8, real),
    "bound": ("worst-case", text),
    "granularity": ("head", text),
    "estimator": ("gram", text),
    "iterations": (5, count),
    "as_paper": (False, flag),
    "soft_cap": (False, flag),
    "c": (None, optional(real)),
}


def _options(keywords):
    unknown = sorted(keywords.keys() - _OPTIONS.keys())
    if unknown:
        raise TypeError(f"unknown option {unknown[0]!r}: the options are {', '.join(_OPTIONS)}")
    return {name: check(name, keywords.get(name, default)) for name, (default, check) in _OPTIONS.items()}


def _stored(name, value):
    """Type name, shape and little-endian bytes of a NumPy array or a PyTorch tensor."""
    if hasattr(value, "untyped_storage"):
        import torch

        if value.is_meta:
            raise ArgumentError(f"weights: {name} is on the meta device and has no values: load it first")
        tensor = value.detach().cpu().contiguous()
        return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.view(-1).view(torch.uint8).numpy()
    if value is None:
        raise ArgumentError(f"weights: {name} is None: expected an array or a tensor")
    array = np.asarray(value)
    shape = array.shape
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return array.dtype.name, shape, np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _safetensors(weights):
    """The arrays as the bytes of one safetensors file."""
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights: expected a mapping of tensor names to arrays, got {type(weights).__name__}")
    if not weights:
        raise ArgumentError(
            "weights is empty: give a state_dict(), or leave weights out for the constants of the config alone"
        )
    header, chunks, offset = {}, [], 0
    for name, value in weights.items():
        dtype, shape, data = _stored(name, value)
        if dtype not in _SAFETENSORS:
            raise ArgumentError(f"weights: {name} has type {dtype}: {', '.join(_SAFETENSORS)} are taken")
        header[str(name)] = {
            "dtype": _SAFETENSORS[dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + data.nbytes],
        }
        chunks.append(data.data)
        offset += data.nbytes
    head = json.dumps(header).encode()
    return b"".join([len(head).to_bytes(8, "little"), head, *chunks])


def _path(name, value):
    """A path as a str that the native half takes."""
    path = os.fsdecode(value)
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ArgumentError(f"{name} {path!r} is not valid UTF-8") from None
    return path


def _source(model, weights):
    if isinstance(model, Profile | Inspection | StressRun):
        raise TypeError(f"model: pass the model itself, not {model!r}, which is a result")
    if hasattr(model, "state_dict"):
        raise TypeError(f"model is a {type(model).__name__}: pass model.config, and weights=model.state_dict()")
    if not hasattr(model, "to_json_string") and not isinstance(model, Mapping | str | bytes | os.PathLike):
        raise TypeError(f"model must be a preset's name, a path or a config, not {model!r}")
    held = None if weights is None else _safetensors(weights)
    if hasattr(model, "to_json_string"):
        # A config of Hugging Face transformers.
        return model.to_json_string(use_diff=False), held, type(model).__name__
    if isinstance(model, Mapping):
        return json.dumps(dict(model)), held, str(model.get("_name_or_path") or "model")
    path = _path("model", model)
    if held is None:
        return path
    file = os.path.join(path, "config.json") if os.path.isdir(path) else path
    if not os.path.exists(file):
        raise ArgumentError(f"weights go with a config: {path!r} is no config.json, and no folder that has one")
    return _native.config_text(file), held, path


def calibrate(model: Model, *, weights: Weights = None, **options: Unpack[Calibration]) -> Profile:
    """Compute the scales of a model: norms, bounds and descales. Returns the JSON of ``sigmascale calibrate`` as a dict.

    ``model`` is a preset name, a ``config.json``, a ``.safetensors`` file, a checkpoint folder, or a config as a dict or
    as a Hugging Face config object. ``weights`` maps tensor names to NumPy arrays or PyTorch tensors (a ``state_dict()``)
    and then replaces the files. Options, keyword only:

    - ``delta`` (1e-6), ``seq_len`` (1024), ``batch`` (1), ``steps`` (1): parameters of the paper's c_star, which are its failure
      probability and the tokens per sequence, sequences per step and steps that it covers.
    - ``bound``: ``worst-case``, ``rank-aware`` or ``spectrum``; the logit descale is bound / (eta 448).
    - ``eta`` (0.8): share of the E4M3 range that the logit bound is mapped onto.
    - ``granularity``: a scale per ``head``, or one per ``layer``. ``estimator``: ``gram`` (exact), ``power`` (power iteration
      of each head) or ``power-summed`` (of the sum over a layer's heads). ``iterations`` (5): those of the last two.
    - ``as_paper``: compute everything as the paper does; ``c`` then replaces c_star.
    - ``soft_cap``: count the model's soft-cap of the logits, for an attention that applies it. transformers' default (SDPA) does not,
      so without this the logit bounds hold either way.

    Operand descales always cover the worst-case bound, whatever ``bound`` says, in units of the tensor that is
    cast; see :func:`descales` for them as arrays. Raises :class:`FormatError`, :class:`UnsupportedError` and
    :class:`NonFiniteError` for what the model is, :class:`ArgumentError` for options, ``OSError`` for files.
    """
    return Profile(json.loads(_native.calibrate(_source(model, weights), _options(options))))


def inspect(model: Model, *, weights: Weights = None) -> Inspection:
    """Compute the spectral profile of every layer and head. Returns the JSON of ``sigmascale inspect`` as a dict.

    ``model`` and ``weights`` as for :func:`calibrate`; a config without weights is an :class:`ArgumentError`.
    """
    return Inspection._of(_native.inspect(_source(model, weights)))


def stress(
    scenario: Literal["checkpoint-load", "weight-spike", "refit", "replay", "resume", "lr-spike"],
    model: Path | None = None,
    *,
    mode: Literal["logit", "operands"] = "operands",
    policies: str | AutoC | DelayedPaper | DelayedTe | Iterable[str | AutoC | DelayedPaper | DelayedTe] | None = None,
    layers: int | None = None,
    seq_len: int | None = None,
    tokens: Path | None = None,
    path: Path | Iterable[Path] = (),
    steps: int | None = None,
    seed: int = 0,
    device: Literal["cpu", "cuda"] = "cpu",
    trace: Path | None = None,
    estimator: Literal["gram", "power", "power-summed"] = "gram",
    iterations: tuple[int, int] = (5, 1),
) -> StressRun:
    """Run scaling policies side by side through a change of the weights. Returns the JSON of ``sigmascale stress`` as a dict.

    ``scenario`` is checkpoint-load, weight-spike, refit, or replay (which takes ``trace``, a file, and no model). ``tokens``
    is a file that is run through the model's own forward, ``path`` the checkpoints that a refit goes through. ``mode`` is what is
    cast to E4M3: ``logit`` as in the paper, or ``operands`` as in fused kernels. ``resume`` and ``lr-spike`` train their model,
    ``tiny-llama-train`` or ``tiny-gpt2-train``; the other scenarios train it first and load its weights. ``estimator`` says where
    norms come from, for the policies that plan from bounds: see :func:`calibrate`. ``iterations``: of a power iteration, in the
    first step and in each later one.

    ``policies``: names (one str may list several, with commas), and :class:`AutoC`, :class:`DelayedPaper` or
    :class:`DelayedTe` for other parameters than the defaults; by default all six. ``auto-c`` with the default burn-in ends it
    after a quarter of the steps where the run is shorter.
    """
    if policies is not None:
        several = [policies] if isinstance(policies, str) or not isinstance(policies, Iterable) else policies
        policies = [named(policy) for policy in several]
    some, file = optional(count), optional(_path)
    arguments = {
        "model": file("model", model),
        "mode": text("mode", mode),
        "policies": policies,
        "layers": some("layers", layers),
        "seq_len": some("seq_len", seq_len),
        "tokens": file("tokens", tokens),
        "path": [_path("path", place) for place in ([path] if isinstance(path, str | os.PathLike) else path)],
        "steps": some("steps", steps),
        "seed": whole("seed", seed),
        "device": text("device", device),
        "trace": file("trace", trace),
        "estimator": text("estimator", estimator),
        "iterations": counts("iterations", iterations),
    }
    return StressRun._of(_native.stress(text("scenario", scenario), arguments))


def descales(profile: Mapping[str, Any]) -> dict[str, NDArray[np.float32] | None]:
    """Return the descales of a profile as float32 arrays: q, k, v, o ``(layers, n_kv)`` and logit ``(layers, n_q)``.

    ``profile`` is what :func:`calibrate` returned. Divide a tensor by its descale before the cast; the kernel multiplies
    it back. An entry is None if the profile has no such descales: v and o without a norm in front of them, and all but logit
    with ``as_paper``, which has one logit descale per layer.
    Where layers differ in their heads, arrays are as wide as the largest layer, and filled up with the smallest normal float.
    """
    if not isinstance(profile, Mapping):
        raise TypeError(f"profile: expected what calibrate() returned, got {type(profile).__name__}")
    if isinstance(profile, Inspection | StressRun):
        raise TypeError(f"profile: expected what calibrate() returned, not {profile!r}")
    if not profile.get("layers"):
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
        rows[name] = None if any(value is None for value in values) else _rows(values)
    if rows["logit"] is None:
        heads = profile["model"]["n_q_heads"]
        counts = heads if isinstance(heads, list) else [heads] * len(profile["layers"])
        rows["logit"] = _rows([[layer["logit_descale"]] * count for layer, count in zip(profile["layers"], counts)])
    return rows


def _rows(values):
    rows = np.full((len(values), max(map(len, values))), np.finfo(np.float32).tiny, np.float32)
    for row, value in zip(rows, values):
        row[: len(value)] = value
    return rows


def presets() -> list[str]:
    """Names of the models whose configs are built in."""
    return _native.presets()
