import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, overload

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import Self

from .. import AutoC, DelayedPaper, DelayedTe, Tail
from . import megatron as megatron
from . import te as te

__all__ = [
    "POLICIES",
    "Guard",
    "Layer",
    "LayerPlan",
    "Monitor",
    "Rope",
    "Runtime",
    "TrainerMonitor",
    "attach",
    "attention",
    "backend",
    "find_layers",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "fp8_cache",
    "gather_sequence",
    "max_logit_bound",
    "megatron",
    "merge_states",
    "patched",
    "register",
    "ring_attention",
    "scaled_dot_product_attention",
    "shard_sequence",
    "te",
    "ulysses_attention",
    "value_pages",
]

_Policy = Literal["geometry", "geometry-c-star", "auto-c", "delayed-paper", "delayed-te", "current"]
_Fallback = Literal["bf16"] | None
_Backend = Literal["auto", "native", "fa3", "cudnn", "torch", "emulated"]
_Telemetry = Literal["full", "off"] | int
POLICIES: tuple[str, ...]

class Layer:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    n_q_heads: int
    n_kv_heads: int
    norm: Literal["rms", "layer"] | None = "rms"
    gain: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    q_bias: torch.Tensor | None = None
    k_bias: torch.Tensor | None = None
    v_bias: torch.Tensor | None = None
    gain_offset: float = 0.0
    rotary: int = 0
    interleaved: bool = False
    rope_factor: float = 1.0
    softmax_scale: float | None = None
    query_factor: float = 1.0
    positions: int | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    qk_norm_offset: float = 0.0
    qk_norm_joint: bool = False
    module: torch.nn.Module | None = None
    name: str = "layer"
    heads: tuple[list[int], list[int], list[int]] | None = None
    fused_d_head: int = 0
    sources: list[tuple[dict[str, Any], str, Any]] = ...
    number: int | None = None
    model_q_heads: int | None = None
    first_kv_head: int = 0
    unit: torch.nn.Module | None = None
    dropout: torch.nn.Module | None = None
    latent: Any = None
    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        n_q_heads: int,
        n_kv_heads: int,
        norm: Literal["rms", "layer"] | None = "rms",
        gain: torch.Tensor | None = None,
        shift: torch.Tensor | None = None,
        q_bias: torch.Tensor | None = None,
        k_bias: torch.Tensor | None = None,
        v_bias: torch.Tensor | None = None,
        gain_offset: float = 0.0,
        rotary: int = 0,
        interleaved: bool = False,
        rope_factor: float = 1.0,
        softmax_scale: float | None = None,
        query_factor: float = 1.0,
        positions: int | None = None,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        qk_norm_offset: float = 0.0,
        qk_norm_joint: bool = False,
        module: torch.nn.Module | None = None,
        name: str = "layer",
        heads: tuple[list[int], list[int], list[int]] | None = None,
        fused_d_head: int = 0,
        sources: list[tuple[dict[str, Any], str, Any]] = ...,
        number: int | None = None,
        model_q_heads: int | None = None,
        first_kv_head: int = 0,
        unit: torch.nn.Module | None = None,
        dropout: torch.nn.Module | None = None,
        latent: Any = None,
    ) -> None: ...
    @property
    def d_head(self) -> int: ...
    def tensors(self) -> dict[str, torch.Tensor]: ...

class LayerPlan:
    def __init__(self, runtime: Runtime, index: int, layer: Layer) -> None: ...
    index: int
    name: str
    n_q_heads: int
    n_kv_heads: int
    d_head: int
    softmax_scale: float
    positions: int | None
    per_call: bool
    remembers: bool
    latent: bool
    stale: bool
    key: int
    logit_descale: torch.Tensor | None
    words: torch.Tensor
    @property
    def reported(self) -> torch.Tensor | None: ...
    @property
    def runtime(self) -> Runtime: ...
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
    policy: _Policy
    bound: Literal["worst-case"] | None
    backend: _Backend
    fallback: _Fallback
    tail: Tail
    n_q_heads: int
    n_kv_heads: int
    device: torch.device
    descales: torch.Tensor
    words: torch.Tensor
    logits: torch.Tensor | None
    logit_descales: torch.Tensor | None
    layers: list[LayerPlan]
    before_refresh: list[Callable[[Runtime], None]]
    after_refresh: list[Callable[[Runtime], None]]
    def __init__(
        self,
        model: torch.nn.Module,
        policy: _Policy | AutoC | DelayedPaper | DelayedTe,
        bound: Literal["worst-case", "certain"] | None,
        layers: Sequence[Layer | Callable[[], Layer]] | None,
        backend: _Backend,
        tail: Tail | None,
        fallback: _Fallback = None,
        group: torch.distributed.ProcessGroup | None = None,
        telemetry: _Telemetry = "full",
    ) -> None: ...
    @property
    def telemetry(self) -> _Telemetry: ...
    @telemetry.setter
    def telemetry(self, telemetry: _Telemetry) -> None: ...
    @property
    def reporting(self) -> bool: ...
    def __len__(self) -> int: ...
    def refresh(self, now: bool = False) -> None: ...
    def start_reduction(self) -> None: ...
    def check(self) -> None: ...
    def observed(self) -> tuple[torch.Tensor, torch.Tensor]: ...
    def stats(self) -> dict[str, Any]: ...
    def slack(self) -> dict[str, dict[str, NDArray[np.generic]]]: ...
    def plan_of(self, module: torch.nn.Module) -> LayerPlan: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def memory(self, owner: object, place: tuple[int, int] | torch.Tensor, kind: str) -> torch.Tensor: ...

_Plan = LayerPlan | Sequence[torch.Tensor]

def find_layers(model: torch.nn.Module) -> list[Layer]: ...
def attach(
    model: torch.nn.Module,
    policy: _Policy | AutoC | DelayedPaper | DelayedTe = "geometry",
    bound: Literal["worst-case", "certain"] | None = None,
    *,
    layers: Sequence[Layer | Callable[[], Layer]] | None = None,
    backend: _Backend = "auto",
    tail: Tail | None = None,
    fallback: _Fallback = None,
    group: torch.distributed.ProcessGroup | None = None,
    telemetry: _Telemetry = "full",
) -> Runtime: ...
def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]: ...

_Number = float | torch.Tensor
_Event = Mapping[str, Any]

class Monitor:
    runtime: Runtime
    path: str | os.PathLike[str] | None
    every: int
    rows: int
    next_step: int
    alarms: list[_Event]
    latest: dict[int, dict[str, Any]]
    on_alarm: Callable[[_Event], object] | None
    def __init__(
        self,
        runtime: Runtime,
        path: str | os.PathLike[str] | None = "run.jsonl",
        every: int = 10,
        *,
        rows: int = 16,
        sinks: object = (),
        name: str | None = None,
        on_alarm: Callable[[_Event], object] | None = None,
        resume: bool = False,
        first_step: int = 0,
        thresholds: Mapping[str, float] | None = None,
    ) -> None: ...
    def diagnosis(self) -> dict[str, Any]: ...
    def step(
        self,
        loss: _Number | None = None,
        grad_norm: _Number | None = None,
        lr: _Number | None = None,
        loss_scale: _Number | None = None,
        skipped: bool = False,
    ) -> None: ...
    def event(self, name: str, message: str = "", layer: int | None = None, head: int | None = None) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...

class TrainerMonitor:
    monitor: Monitor | None
    def __init__(
        self,
        runtime: Runtime,
        path: str | os.PathLike[str] | None = "run.jsonl",
        every: int = 10,
        *,
        refresh: bool = True,
        **options: Any,
    ) -> None: ...

class Guard:
    runtime: Runtime
    optimizer: torch.optim.Optimizer
    rate: float
    skipped: bool
    steps: int
    restored: int
    def __init__(
        self,
        runtime: Runtime,
        optimizer: torch.optim.Optimizer,
        *,
        scaler: torch.amp.GradScaler | None = None,
        monitor: Monitor | None = None,
        every: int = 100,
        patience: int = 3,
        points: int = 2,
        spike: float | None = 7.0,
        cooldown: int = 100,
        restores: int = 5,
        saturation: float = 1e-3,
        store: tuple[Callable[[], Any], Callable[[Any], object]] | None = None,
        group: torch.distributed.ProcessGroup | None = None,
        on_event: Callable[[str, str], object] | None = None,
    ) -> None: ...
    def step(self, loss: _Number, grad_norm: _Number | None = None) -> bool: ...
    def keep(self) -> None: ...
    def restore(self) -> None: ...
    def close(self) -> None: ...

def max_logit_bound(runtime: Runtime) -> dict[int, NDArray[np.float64]]: ...

_Group = torch.distributed.ProcessGroup | None
_Kernels = tuple[Callable[..., tuple[torch.Tensor, torch.Tensor]], Callable[..., tuple[torch.Tensor, ...]]]

def shard_sequence(x: torch.Tensor, group: _Group, dim: int = 1, zigzag: bool = False) -> torch.Tensor: ...
def gather_sequence(x: torch.Tensor, group: _Group, dim: int = 1, zigzag: bool = False) -> torch.Tensor: ...
def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: LayerPlan | Sequence[torch.Tensor],
    group: _Group,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    kernels: _Kernels | None = None,
) -> torch.Tensor: ...
def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: LayerPlan | Sequence[torch.Tensor],
    group: _Group,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    kernels: _Kernels | None = None,
) -> torch.Tensor: ...
@dataclass(frozen=True)
class Rope:
    cosine: torch.Tensor
    sine: torch.Tensor
    interleaved: bool = False
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: _Plan,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    backend: _Backend | None = None,
    return_lse: Literal[False] = False,
    accumulator: str | None = None,
    fallback: _Fallback = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dq_fp8: bool = False,
    rope: Rope | tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: _Plan,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    backend: _Backend | None = None,
    return_lse: Literal[True],
    accumulator: str | None = None,
    fallback: _Fallback = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dq_fp8: bool = False,
    rope: Rope | tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    plan: _Plan,
    backend: _Backend | None = None,
    accumulator: str | None = None,
    fallback: _Fallback = None,
) -> torch.Tensor: ...
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    plan: _Plan,
    sinks: torch.Tensor | None = None,
    backend: _Backend | None = None,
    accumulator: str | None = None,
    fallback: _Fallback = None,
    **others: Any,
) -> Any: ...
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: None = None,
    *,
    plan: _Plan,
    seqused_k: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    backend: _Backend | None = None,
    accumulator: str | None = None,
    fallback: _Fallback = None,
    **others: Any,
) -> Any: ...
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    plan: _Plan,
    sinks: torch.Tensor | None = None,
    backend: _Backend | None = None,
    accumulator: str | None = None,
    fallback: _Fallback = None,
    **others: Any,
) -> Any: ...
def value_pages(
    pages: int, page_size: int, n_kv_heads: int, d_head: int, device: torch.device | str | int | None = None
) -> torch.Tensor: ...

class patched:
    def __init__(self, runtime: Runtime) -> None: ...
    def __enter__(self) -> Runtime: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...

def fp8_cache(runtime: Runtime, max_cache_len: int | None = None) -> Any: ...
def register(name: str = "sigmascale_fp8", *, padding: Literal["right"] | None = None) -> str: ...
def backend(name: str) -> Any: ...
