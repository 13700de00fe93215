from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

_Policy = Literal["geometry", "geometry-c-star", "auto-c", "delayed-paper", "delayed-te", "current"]
_Backend = Literal["auto", "native", "fa3", "cudnn", "torch", "emulated"]
POLICIES: tuple[str, ...]

class Layer:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    n_q_heads: int
    n_kv_heads: int
    norm: Literal["rms", "layer"] | None
    gain: torch.Tensor | None
    shift: torch.Tensor | None
    q_bias: torch.Tensor | None
    k_bias: torch.Tensor | None
    v_bias: torch.Tensor | None
    gain_offset: float
    rotary: int
    interleaved: bool
    rope_factor: float
    softmax_scale: float | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    qk_norm_offset: float
    qk_norm_joint: bool
    module: torch.nn.Module | None
    name: str
    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, n_q_heads: int, n_kv_heads: int, **options: Any
    ) -> None: ...
    @property
    def d_head(self) -> int: ...

class LayerPlan:
    index: int
    name: str
    n_q_heads: int
    n_kv_heads: int
    d_head: int
    softmax_scale: float
    logit_descale: torch.Tensor | None
    words: torch.Tensor
    @property
    def q_descale(self) -> torch.Tensor: ...
    @property
    def k_descale(self) -> torch.Tensor: ...
    @property
    def v_descale(self) -> torch.Tensor: ...
    @property
    def o_descale(self) -> torch.Tensor: ...
    def descales(self, batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...

class Runtime:
    policy: str
    device: torch.device
    descales: torch.Tensor
    logits: torch.Tensor | None
    layers: list[LayerPlan]
    after_refresh: list[Callable[[Runtime], None]]
    def __len__(self) -> int: ...
    def refresh(self) -> None: ...
    def check(self) -> None: ...
    def observed(self) -> tuple[torch.Tensor, torch.Tensor]: ...
    def stats(self) -> dict[str, NDArray[np.generic]]: ...
    def plan_of(self, module: torch.nn.Module) -> LayerPlan: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

def find_layers(model: torch.nn.Module) -> list[Layer]: ...
def attach(
    model: torch.nn.Module,
    policy: _Policy = "geometry",
    bound: Literal["certain"] | None = None,
    *,
    layers: Sequence[Layer] | None = None,
    backend: _Backend = "auto",
) -> Runtime: ...
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: LayerPlan | Sequence[torch.Tensor],
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    backend: _Backend | None = None,
    return_lse: bool = False,
) -> Any: ...
def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    plan: LayerPlan | Sequence[torch.Tensor],
    backend: _Backend | None = None,
) -> torch.Tensor: ...

class patched:
    def __init__(self, runtime: Runtime) -> None: ...
    def __enter__(self) -> Runtime: ...
    def __exit__(self, *exception: Any) -> None: ...

def register(name: str = "sigmascale_fp8") -> str: ...
def backend(name: str) -> Any: ...
