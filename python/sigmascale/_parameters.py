"""Policies with their parameters, and what the failure probability of ``geometry-c-star`` counts."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal

from ._arguments import count, one_of, positive, probability, share, whole
from ._errors import ArgumentError


class _Checked:
    """Fields as plain numbers, each by its own check; ranges that depend on more are the native half's."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = field.metadata["check"](field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)


def _field(default: Any, check: Any) -> Any:
    return dataclasses.field(default=default, metadata={"check": check})


def _factor(name, value):
    number = positive(name, value)
    if number < 1:
        raise ArgumentError(f"{name} {number} must be finite and at least 1")
    return number


@dataclasses.dataclass(frozen=True)
class Tail(_Checked):
    """What the logit bound of ``geometry-c-star`` holds for: all logits of ``batch`` sequences of ``seq_len`` tokens over
    ``steps`` steps, in every layer of the runtime at once, but for the probability ``delta``.

    ``eta`` is the share of the E4M3 range that a logit bound is mapped onto, of whatever policy.
    """

    delta: float = _field(1e-6, probability)
    seq_len: int = _field(1024, count)
    batch: int = _field(1, count)
    steps: int = _field(1, count)
    eta: float = _field(0.8, share)


@dataclasses.dataclass(frozen=True)
class AutoC(_Checked):
    """``auto-c``: worst-case bounds for ``burn_in`` steps, then ``kappa`` times the ``quantile`` of amax / bound seen there, times
    the bound. ``pooling``: one such constant for each ``layer`` or ``head``, or one for the whole ``model``."""

    burn_in: int = _field(100, count)
    quantile: float = _field(0.9999, share)
    kappa: float = _field(1.5, _factor)
    pooling: Literal["model", "layer", "head"] = _field("layer", one_of("model", "layer", "head"))


@dataclasses.dataclass(frozen=True)
class DelayedPaper(_Checked):
    """``delayed-paper``: the largest amax of the last ``history`` steps is mapped onto ``margin`` times 448."""

    history: int = _field(16, count)
    margin: float = _field(0.9, share)


@dataclasses.dataclass(frozen=True)
class DelayedTe(_Checked):
    """``delayed-te``, TransformerEngine's: the largest amax of the last ``history`` steps, or with
    ``algorithm="most-recent"`` the last one, is mapped onto 448 / 2^``margin``."""

    history: int = _field(1024, count)
    algorithm: Literal["max", "most-recent"] = _field("max", one_of("max", "most-recent"))
    margin: int = _field(0, lambda name, value: whole(name, value, least=-32, most=32))


_NAMES = {AutoC: "auto-c", DelayedPaper: "delayed-paper", DelayedTe: "delayed-te"}


def named(policy):
    """Name and parameters of a policy, as the native half takes them: a name alone stands for the defaults."""
    if isinstance(policy, str):
        return policy, None
    if type(policy) in _NAMES:
        return _NAMES[type(policy)], json.dumps(dataclasses.asdict(policy))
    raise TypeError(f"a policy must be a name or AutoC, DelayedPaper or DelayedTe with parameters, not {policy!r}")
