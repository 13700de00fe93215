"""Types of arguments, for annotations alone: nothing imports this module at run time."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from .. import _types
from .._parameters import AutoC, DelayedPaper, DelayedTe
from ._layers import Layer
from ._plan import LayerPlan
from ._rope import Rope

PolicyName = _types.Policy
# A policy by its name, or with parameters.
Policy = PolicyName | AutoC | DelayedPaper | DelayedTe
Bound = Literal["worst-case"]
# Where the norms of logit bounds come from.
Estimator = Literal["gram", "power", "power-summed"]
Backend = Literal["auto", "native", "fa3", "cudnn", "torch", "emulated"]
Fallback = Literal["bf16"] | None
# How the backward computes dQ, where not as usual.
Gradients = Literal["fp8-dq", "unrounded-delta"] | None
Telemetry = Literal["full", "off"] | int
Layers = Sequence[Layer | Callable[[], Layer]]
Group = torch.distributed.ProcessGroup | None
# A plan, or the descales of q, k and v.
Plan = LayerPlan | Sequence[torch.Tensor]
# Forward and backward of the attention on one block.
Kernels = tuple[Callable[..., tuple[torch.Tensor, torch.Tensor]], Callable[..., tuple[torch.Tensor, ...]]]
# Cosines and sines of a rotation.
Rotation = Rope | tuple[torch.Tensor, torch.Tensor]
# What is subtracted from keys and values of each KV head.
Centers = tuple[torch.Tensor | None, torch.Tensor | None]
# Where centers of a runtime come from: a name, or what `sigmascale.centers` returned.
Center = Literal["none", "weights", "mean"] | Mapping[str, Any] | None
# What a training loop measures.
Number = float | torch.Tensor
Event = Mapping[str, Any]
