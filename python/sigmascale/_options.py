"""Types of arguments, for annotations alone: nothing imports this module at run time."""

import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol, TypedDict

from ._types import EngineName, ExportEngineName

Path = str | os.PathLike[str]


class Config(Protocol):
    """A config of Hugging Face transformers."""

    def to_json_string(self, use_diff: bool = ...) -> str: ...


# A path or preset, a config as a dict, or one of Hugging Face transformers.
Model = Path | Mapping[str, Any] | Config
# NumPy arrays or PyTorch tensors.
Weights = Mapping[str, Any] | None
# Names and tensors as they pass in a weight sync.
Pairs = Iterable[tuple[str, Any]]
# Scales by the number of their layer.
Layers = Mapping[int, Mapping[str, Any]]
Engine = EngineName
ExportEngine = ExportEngineName


class Calibration(TypedDict, total=False):
    """Options of ``calibrate``."""

    delta: float
    seq_len: int
    batch: int
    steps: int
    eta: float
    bound: Literal["worst-case", "rank-aware", "spectrum"]
    granularity: Literal["head", "layer"]
    estimator: Literal["gram", "power", "power-summed"]
    iterations: int
    as_paper: bool
    soft_cap: bool
    c: float | None


class Thresholds(TypedDict, total=False):
    """Thresholds of the alarms of ``diagnose``."""

    logit_limit: float
    window: int
    hold: int
    growth: float
    repeated: float
    bias: float
    false_alarms: float
    entropy: float
    saturated: float
    loss_scale: int
    skipped: float
    loss: float
