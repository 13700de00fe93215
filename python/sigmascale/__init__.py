"""FP8 attention scales from the weights alone.

Offline, with NumPy: :func:`calibrate`, :func:`inspect`, :func:`stress`, :func:`export_scales`, :func:`descales`.
Around any FP8 attention call: :func:`probe` says whether its descales are really applied.
On a PyTorch model: :mod:`sigmascale.torch` (imported when it is first used).
"""

import importlib

from ._errors import (
    ArgumentError,
    CudaError,
    FormatError,
    MismatchError,
    NonFiniteError,
    SigmascaleError,
    UnsupportedError,
)
from ._native import __version__
from ._offline import calibrate, descales, export_scales, inspect, presets, stress
from ._parameters import AutoC, DelayedPaper, DelayedTe, Tail
from ._probe import ProbeReport, probe

__all__ = [
    "ArgumentError",
    "AutoC",
    "CudaError",
    "DelayedPaper",
    "DelayedTe",
    "FormatError",
    "MismatchError",
    "NonFiniteError",
    "ProbeReport",
    "SigmascaleError",
    "Tail",
    "UnsupportedError",
    "__version__",
    "calibrate",
    "descales",
    "export_scales",
    "inspect",
    "presets",
    "probe",
    "stress",
]


def __getattr__(name):
    if name == "torch":
        return importlib.import_module(".torch", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
