import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from . import rl as rl
from . import torch as torch
from ._results import Audit as Audit
from ._results import Diagnosis as Diagnosis
from ._results import Export as Export
from ._results import Inspection as Inspection
from ._results import Profile as Profile
from ._results import StressRun as StressRun

__all__ = [
    "ArgumentError",
    "Audit",
    "AutoC",
    "CudaError",
    "Diagnosis",
    "DelayedPaper",
    "DelayedTe",
    "Export",
    "FormatError",
    "Inspection",
    "MismatchError",
    "NonFiniteError",
    "ProbeReport",
    "Profile",
    "ScaleStream",
    "SigmascaleError",
    "StressRun",
    "Tail",
    "UnsupportedError",
    "__version__",
    "calibrate",
    "descales",
    "diagnose",
    "export",
    "export_scales",
    "inspect",
    "presets",
    "probe",
    "stress",
    "verify",
]

__version__: str

class SigmascaleError(Exception): ...
class ArgumentError(SigmascaleError, ValueError): ...
class UnsupportedError(SigmascaleError, ValueError): ...
class FormatError(SigmascaleError, ValueError): ...
class NonFiniteError(SigmascaleError, ValueError): ...
class MismatchError(SigmascaleError, ValueError): ...
class CudaError(SigmascaleError, RuntimeError): ...

@dataclass(frozen=True)
class Tail:
    delta: float = 1e-6
    seq_len: int = 1024
    batch: int = 1
    steps: int = 1
    eta: float = 0.8

@dataclass(frozen=True)
class AutoC:
    burn_in: int = 100
    quantile: float = 0.9999
    kappa: float = 1.5
    pooling: Literal["model", "layer", "head"] = "layer"

@dataclass(frozen=True)
class DelayedPaper:
    history: int = 16
    margin: float = 0.9

@dataclass(frozen=True)
class DelayedTe:
    history: int = 1024
    algorithm: Literal["max", "most-recent"] = "max"
    margin: int = 0

_Path = str | os.PathLike[str]

class _Config(Protocol):
    def to_json_string(self, use_diff: bool = ...) -> str: ...

# A path or preset, a config as a dict, or one of Hugging Face transformers.
_Model = _Path | Mapping[str, Any] | _Config
# NumPy arrays or PyTorch tensors.
_Weights = Mapping[str, Any] | None
_Bound = Literal["worst-case", "rank-aware", "spectrum", "certain"]

def calibrate(
    model: _Model,
    *,
    weights: _Weights = None,
    delta: float = 1e-6,
    seq_len: int = 1024,
    batch: int = 1,
    steps: int = 1,
    eta: float = 0.8,
    bound: _Bound = "worst-case",
    granularity: Literal["head", "layer"] = "head",
    estimator: Literal["gram", "power"] = "gram",
    as_paper: bool = False,
    c: float | None = None,
) -> Profile: ...
def inspect(model: _Model, *, weights: _Weights = None) -> Inspection: ...
def export_scales(
    model: _Model,
    file: _Path,
    *,
    weights: _Weights = None,
    delta: float = 1e-6,
    seq_len: int = 1024,
    batch: int = 1,
    steps: int = 1,
    eta: float = 0.8,
    bound: _Bound = "worst-case",
    granularity: Literal["head", "layer"] = "head",
    estimator: Literal["gram", "power"] = "gram",
    as_paper: bool = False,
    c: float | None = None,
) -> None: ...
def stress(
    scenario: Literal["checkpoint-load", "weight-spike", "refit", "replay"],
    model: _Path | None = None,
    *,
    mode: Literal["logit", "operands"] = "logit",
    policies: str | AutoC | DelayedPaper | DelayedTe | Iterable[str | AutoC | DelayedPaper | DelayedTe] | None = None,
    layers: int | None = None,
    seq_len: int | None = None,
    tokens: _Path | None = None,
    path: _Path | Iterable[_Path] = (),
    steps: int | None = None,
    seed: int = 0,
    device: Literal["cpu", "cuda"] = "cpu",
    trace: _Path | None = None,
) -> StressRun: ...
def diagnose(
    run: _Path | Iterable[_Path],
    *,
    lr: float | None = None,
    logit_limit: float = 1000.0,
    window: int = 24,
    hold: int = 3,
    growth: float = 0.3,
    repeated: float = 0.1,
    bias: float = 1e-4,
    false_alarms: float = 1e-6,
    entropy: float = 0.02,
    saturated: float = 1e-3,
    loss_scale: int = 100,
    skipped: float = 0.1,
    loss: float = 0.1,
) -> Diagnosis: ...
def descales(profile: Mapping[str, Any]) -> dict[str, NDArray[np.float32] | None]: ...
def presets() -> list[str]: ...

_Engine = Literal["vllm", "sglang", "trtllm", "mistralrs"]

def export(
    model: _Path, to: _Path, engine: _Engine, *, per_head: bool = False, copy: bool = False
) -> Export: ...
def verify(folder: _Path, engine: _Engine | None = None) -> Audit: ...

class ScaleStream:
    layers: dict[int, dict[str, Any]]
    def __init__(
        self, config: _Model, *, names: Iterable[str] = (), ranks: int = 1, host: bool = False
    ) -> None: ...
    def push(self, name: str, tensor: Any) -> list[dict[str, Any]]: ...
    def through(
        self, weights: Iterable[tuple[str, Any]], *, part: bool = False
    ) -> Iterator[tuple[str, Any]]: ...
    def finish(self, *, part: bool = False) -> dict[int, dict[str, Any]]: ...
    @property
    def held_bytes(self) -> int: ...

@dataclass(frozen=True)
class ProbeReport:
    q: str
    k: str
    v: str
    worst_error: float
    details: tuple[str, ...] = ...
    output_bias: float | None = ...
    bias_seq_len: int | None = ...
    @property
    def ok(self) -> bool: ...

def probe(
    call: Callable[..., Any],
    *,
    batch: int = 2,
    seq_len: int = 128,
    n_q_heads: int = 4,
    n_kv_heads: int = 2,
    d_head: int = 64,
    softmax_scale: float | None = None,
    per_tensor: bool = False,
    framework: Literal["torch", "numpy"] = "torch",
    device: Any = "cuda",
    bias_seq_len: int | None = None,
) -> ProbeReport: ...
