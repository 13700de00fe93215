from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from .. import AutoC, DelayedPaper, DelayedTe
from . import Layer, LayerPlan, Runtime

class CoreAttention(torch.nn.Module):
    mask: str
    group: torch.distributed.ProcessGroup | None
    plan: LayerPlan | None
    def __init__(self, mask: str, group: torch.distributed.ProcessGroup | None = None) -> None: ...
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor: ...

def attach(
    model: torch.nn.Module,
    policy: str | AutoC | DelayedPaper | DelayedTe = "geometry",
    bound: Literal["worst-case", "certain"] | None = None,
    **options: Any,
) -> Runtime: ...
def layers(
    model: torch.nn.Module, units: Mapping[torch.nn.Module, torch.nn.Module] | None = None
) -> list[Callable[[], Layer]]: ...
