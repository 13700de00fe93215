"""Policies with their parameters, and what the failure probability of ``geometry-c-star`` counts."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, get_args

from . import _native
from ._arguments import count, one_of, positive, probability, share, whole
from ._errors import ArgumentError
from ._types import AmaxAlgorithm, Pooling

# Every policy with the bound that it plans from and its parameters, and the tail: the defaults of the native half.
DEFAULTS = json.loads(_native.defaults())
_PARAMETERS = {policy["name"]: policy["parameters"] for policy in DEFAULTS["policies"]} | {"tail": DEFAULTS["tail"]}


class _Checked:
    """Fields as plain numbers, each by its own check; ranges that depend on more are the native half's."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # classes below are dataclasses
            value = field.metadata["check"](field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)


def _default(of: str, parameter: str, check: Any) -> Any:
    return dataclasses.field(default=_PARAMETERS[of][parameter], metadata={"check": check})


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

    delta: float = _default("tail", "delta", probability)
    seq_len: int = _default("tail", "seq_len", count)
    batch: int = _default("tail", "batch", count)
    steps: int = _default("tail", "steps", count)
    eta: float = _default("tail", "eta", share)


@dataclasses.dataclass(frozen=True)
class AutoC(_Checked):
    """``auto-c``: worst-case bounds for ``burn_in`` steps, then ``kappa`` times the ``quantile`` of amax / bound seen there, times
    the bound. ``pooling``: one such constant for each ``layer`` or ``head``, or one for the whole ``model``."""

    burn_in: int = _default("auto-c", "burn_in", count)
    quantile: float = _default("auto-c", "quantile", share)
    kappa: float = _default("auto-c", "kappa", _factor)
    pooling: Pooling = _default("auto-c", "pooling", one_of(*get_args(Pooling)))


@dataclasses.dataclass(frozen=True)
class DelayedPaper(_Checked):
    """``delayed-paper``: the largest amax of the last ``history`` steps is mapped onto ``margin`` times 448."""

    history: int = _default("delayed-paper", "history", count)
    margin: float = _default("delayed-paper", "margin", share)


@dataclasses.dataclass(frozen=True)
class DelayedTe(_Checked):
    """``delayed-te``, TransformerEngine's: the largest amax of the last ``history`` steps, or with
    ``algorithm="most-recent"`` the last one, is mapped onto 448 / 2^``margin``."""

    history: int = _default("delayed-te", "history", count)
    algorithm: AmaxAlgorithm = _default("delayed-te", "algorithm", one_of(*get_args(AmaxAlgorithm)))
    margin: int = _default("delayed-te", "margin", lambda name, value: whole(name, value, least=-32, most=32))


_NAMES = {AutoC: "auto-c", DelayedPaper: "delayed-paper", DelayedTe: "delayed-te"}


def named(policy):
    """Name and parameters of a policy, as the native half takes them: a name alone means the defaults."""
    if isinstance(policy, str):
        return policy, None
    if type(policy) in _NAMES:
        return _NAMES[type(policy)], json.dumps(dataclasses.asdict(policy))
    raise TypeError(f"a policy must be a name or AutoC, DelayedPaper or DelayedTe with parameters, not {policy!r}")
