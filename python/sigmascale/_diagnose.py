"""The diagnosis of a training run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from . import _native
from ._arguments import count, optional, real
from ._offline import _path
from ._results import Diagnosis

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._options import Path, Thresholds

_WHOLE = ("window", "hold", "loss_scale")
_REAL = ("logit_limit", "growth", "repeated", "bias", "false_alarms", "entropy", "saturated", "skipped", "loss")


def thresholds(given):
    """The thresholds of alarms as the native half takes them."""
    known = dict.fromkeys(_WHOLE, count) | dict.fromkeys(_REAL, real)
    for name in given:
        if name not in known:
            raise TypeError(f"diagnose has no threshold {name!r}: {', '.join(known)}")
    return json.dumps({name: known[name](name, value) for name, value in given.items()})


def diagnose(run: Path | Iterable[Path], *, lr: float | None = None, **options: Unpack[Thresholds]) -> Diagnosis:
    """The head of a training run that goes wrong first, and what to do: the JSON of ``sigmascale diagnose`` as a dict.

    ``run`` is the record that :class:`sigmascale.torch.Monitor` writes, or an iterable of two or more checkpoints of
    one run (folders or ``.safetensors`` files, ordered by the number at the end of their names), or the output folder of a
    trainer, which has one of both. ``lr``: the learning rate between the checkpoints, without which their growth is not judged; it needs these numbers.

    ``options`` are thresholds of the alarms: ``logit_limit`` (1000), ``growth`` (0.3), ``window`` (24 records),
    ``hold`` (3 records), ``repeated`` (0.1), ``bias`` (1e-4), ``false_alarms`` (1e-6), ``entropy`` (0.02 nats),
    ``saturated`` (1e-3), ``loss_scale`` (100 steps), ``skipped`` (0.1), ``loss`` (0.1). ``docs/diagnose.md`` says what
    they are.

    Raises :class:`FormatError` for a file that is no record, :class:`MismatchError` for checkpoints of different
    models, :class:`ArgumentError` for options, ``OSError`` for files.
    """
    given = thresholds(options)
    rate = optional(real)("lr", lr)
    if isinstance(run, str | bytes | os.PathLike):
        return Diagnosis._of(_native.diagnose(_path("run", run), [], rate, given))
    checkpoints = [_path("run", checkpoint) for checkpoint in run]
    return Diagnosis._of(_native.diagnose(None, checkpoints, rate, given))
