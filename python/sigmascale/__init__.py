"""FP8 attention scales from the weights of a model.

Offline, with NumPy: :func:`calibrate`, :func:`descales`, :func:`inspect`, :func:`stress`, :func:`presets`.
A training run, from its record or its checkpoints: :func:`diagnose`.
For serving engines: :func:`export`, :func:`verify`, :func:`centers`, and for reinforcement learning :class:`ScaleStream` and :mod:`sigmascale.rl`.
Around any FP8 attention call: :func:`probe` says whether it applies its descales.
On a PyTorch model: :mod:`sigmascale.torch` (imported when it is first used).
Parameters of policies: :class:`AutoC`, :class:`DelayedPaper`, :class:`DelayedTe`, and :class:`Tail` for ``geometry-c-star``.
Results: :class:`Profile`, :class:`Inspection`, :class:`StressRun`, :class:`Export`, :class:`Audit`, :class:`Diagnosis`.
"""

import importlib
from typing import TYPE_CHECKING

from ._diagnose import diagnose
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
from ._offline import calibrate, descales, inspect, presets, stress
from ._parameters import AutoC, DelayedPaper, DelayedTe, Tail
from ._probe import ProbeReport, probe
from ._results import Audit, Diagnosis, Export, Inspection, Profile, StressRun
from ._serving import ScaleStream, centers, export, verify

if TYPE_CHECKING:
    from . import rl as rl
    from . import torch as torch

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
    "centers",
    "descales",
    "diagnose",
    "export",
    "inspect",
    "presets",
    "probe",
    "stress",
    "verify",
]


if not TYPE_CHECKING:  # Or every name would be an attribute.

    def __getattr__(name):
        if name in ("rl", "torch"):
            return importlib.import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
