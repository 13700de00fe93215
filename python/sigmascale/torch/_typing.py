"""Types of arguments, for annotations alone: nothing imports this module at run time."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

import torch

from .. import _types
from .._parameters import AutoC, DelayedPaper, DelayedTe
from ._layers import Layer
from ._plan import LayerPlan
from ._rope import Rope

PolicyName: TypeAlias = _types.Policy
# A policy by its name, or with parameters.
Policy: TypeAlias = PolicyName | AutoC | DelayedPaper | DelayedTe
Bound: TypeAlias = Literal["worst-case"]
# Where the norms of logit bounds come from.
Estimator: TypeAlias = Literal["gram", "power", "power-summed"]
Backend: TypeAlias = Literal["auto", "native", "fa3", "cudnn", "torch", "emulated"]
Fallback: TypeAlias = Literal["bf16"] | None
# How the backward computes dQ, where not as usual.
Gradients: TypeAlias = Literal["fp8-dq", "rounded-delta"] | None
Telemetry: TypeAlias = Literal["full", "off"] | int
Layers: TypeAlias = Sequence[Layer | Callable[[], Layer]]
Group: TypeAlias = torch.distributed.ProcessGroup | None
# A plan, or the descales of q, k and v.
Plan: TypeAlias = LayerPlan | Sequence[torch.Tensor]
# Forward and backward of the attention on one block.
Kernels: TypeAlias = tuple[Callable[..., tuple[torch.Tensor, torch.Tensor]], Callable[..., tuple[torch.Tensor, ...]]]
# Cosines and sines of a rotation.
Rotation: TypeAlias = Rope | tuple[torch.Tensor, torch.Tensor]
# What is subtracted from keys and values of each KV head.
Centers: TypeAlias = tuple[torch.Tensor | None, torch.Tensor | None]


class Options(TypedDict, total=False):
    """Of ``attention``, all but what decides what it returns."""

    causal: bool
    softmax_scale: float | None
    backend: Backend | None
    accumulator: str | None
    fallback: Fallback
    window: tuple[int, int]
    softcap: float | None
    sinks: torch.Tensor | None
    gradients: Gradients
    rope: Rotation | None
    centers: Centers | None
    logits: Literal["e4m3"] | None


# Where centers of a runtime come from: a name, or what `sigmascale.centers` returned.
Center: TypeAlias = Literal["none", "weights", "mean"] | Mapping[str, Any] | None
# What a training loop measures.
Number: TypeAlias = float | torch.Tensor
Event: TypeAlias = Mapping[str, Any]
