"""Saved states of runtimes: what they hold, and what of a state fits a runtime."""

from collections.abc import Mapping

import torch

from .._errors import MismatchError
from . import _state

VERSION = 4


def state(runtime):
    """What ``Runtime.state_dict`` returns."""
    saved = runtime._policy.save()
    return {
        "version": VERSION,
        "policy": runtime.policy,
        "shape": _shape(runtime),
        "places": runtime._places,
        "descales": None if saved is None else runtime.descales.clone(),
        "state": saved,
        "centers": runtime.centers.state(),
        "estimates": None if runtime._estimates is None else runtime._estimates.state(runtime._due),
    }


def part(runtime, saved):
    """The part of a saved state that is this runtime's, checked; None for policies that remember nothing."""
    if not isinstance(saved, Mapping):
        raise TypeError(f"state: expected what state_dict() returned, got {type(saved).__name__}")
    mine = {"version": VERSION, "policy": runtime.policy, "shape": _shape(runtime)}
    for key in (*mine, "places", "descales", "state", "centers"):
        if key not in saved:
            raise MismatchError(f"the saved state has no {key!r}: it is not the state of a sigmascale runtime")
    for key in ("version", "policy"):
        if saved[key] != mine[key]:
            raise MismatchError(f"the saved state has {key} {saved[key]!r}, this runtime {mine[key]!r}")
    if not runtime._policy.remembers:
        return None
    if saved["places"] != runtime._places:
        saved = _state.taken(saved, runtime._places)
    for key, value in mine.items():
        found = list(saved[key]) if key == "shape" else saved[key]
        if found != value:
            raise MismatchError(f"the saved state has {key} {found!r}, this runtime {value!r}")
    descales, shape = saved["descales"], list(runtime.descales.shape)
    if not isinstance(descales, torch.Tensor) or list(descales.shape) != shape or descales.dtype != torch.float32:
        raise MismatchError(f"the descales of the saved state are no float32 tensor of shape {shape}")
    if not bool((torch.isfinite(descales) & (descales > 0)).all()):
        raise MismatchError("the saved state has descales that are not finite and above 0")
    return saved


def centers(runtime, saved):
    """The centers of a saved state, checked: of the layers and heads of this runtime, or of all that the state has."""
    given, own = saved["centers"], runtime.centers.source
    if (given or {"source": "none"})["source"] != own:
        raise MismatchError(f"the saved state has center {given and given['source']!r}, this runtime {own!r}")
    return given


def estimates(runtime, saved):
    """The vectors of a saved state, checked; None where norms are exact."""
    own, given = runtime._estimates, saved.get("estimates")
    if own is None:
        if given is not None:
            raise MismatchError(f"the saved state has estimator {given.get('estimator')!r}, this runtime 'gram'")
        return None
    if saved["places"] != runtime._places:
        raise MismatchError(
            "the saved vectors of the power iteration are those of other layers or heads: resume with the same pipeline and "
            "tensor-parallel degrees"
        )
    own.check(given)
    return given


def _shape(runtime):
    """Shape of the descales, and where layers have unequal heads those of each."""
    heads = runtime._heads
    return [*runtime.descales.shape, *([] if heads.equal else map(list, heads.counts))]
