"""FP8 attention on PyTorch models, with scales from their weights.

>>> runtime = sigmascale.torch.attach(model, optimizer=optimizer)  # scales follow the steps of the optimizer
>>> out = sigmascale.torch.attention(q, k, v, runtime.layers[0])
>>> runtime.refresh()                                              # after any other change of the weights

Hugging Face: ``model.set_attn_implementation(sigmascale.torch.register())``, and :func:`fp8_cache` for ``generate``.
Plain modules: :class:`patched`. Instead of ``flash_attn``: :func:`flash_attn_func`, :func:`flash_attn_varlen_func`,
:func:`flash_attn_with_kvcache`. Models of no known family: :class:`Layer`; :func:`find_layers` lists those that are found.
Context parallelism: :func:`ring_attention`, :func:`ulysses_attention`. TransformerEngine: :mod:`sigmascale.torch.te`.
Megatron-Core: :mod:`sigmascale.torch.megatron`. A run is recorded by :class:`Monitor` and guarded by :class:`Guard`.
"""

# ruff: noqa: E402
from .. import _arguments

_arguments.pytorch("sigmascale.torch")

from . import megatron, te
from ._attach import attach
from ._attention import attention, scaled_dot_product_attention
from ._backends import backend
from ._cache import fp8_cache
from ._callbacks import TrainerMonitor
from ._context_parallel import gather_sequence, ring_attention, shard_sequence, ulysses_attention
from ._flash import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from ._fold import fold_values
from ._guard import Guard
from ._hugging_face import register
from ._layers import Layer
from ._layers import find as find_layers
from ._monitor import Monitor, max_logit_bound
from ._paged import value_pages
from ._patched import patched
from ._plan import LayerPlan
from ._policies import POLICIES
from ._rope import Rope
from ._runtime import Runtime
from ._state import merge_states

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
    "fold_values",
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
