"""Megatron-Core: the attention layers of a GPT model, and its core attention in FP8.

>>> runtime = sigmascale.torch.megatron.attach(model)   # a GPTModel, bare or as Megatron wraps it
>>> runtime.refresh()                                   # after every optimizer.step()

``linear_qkv`` interleaves by KV group: the query heads of the group, its gates if there are any, its key head, its
value head. Under tensor parallelism a rank holds whole groups. ``attach`` replaces each layer's ``core_attention``,
whose inputs are projected, normalised and rotated already; checkpoints are unchanged, since neither module has
parameters.

Tested with the GPTModel of Megatron-Core 0.16 on the CPU: its local layers, tensor, sequence and context parallelism
over gloo. Layers of TransformerEngine have the same names, which tests imitate. **It was never run with
TransformerEngine or on a GPU.**
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .._errors import ArgumentError, UnsupportedError
from ._attach import attach as _attach
from ._attention import attention
from ._context_parallel import ring_attention
from ._layers import Layer

if TYPE_CHECKING:
    from ._runtime import Runtime
    from ._typing import Bound, Group, Policy

_NORMS = {"RMSNorm": "rms", "LayerNorm": "layer"}
_MASKS = {"causal": True, "no_mask": False}


class CoreAttention(torch.nn.Module):
    """FP8 attention by a plan, in place of a ``core_attention``: ``(seq, batch, heads, d_head)`` in, ``(seq, batch,
    heads * d_head)`` out. With context parallelism it is a ring over ``group``, whose ranks hold two chunks of the
    sequence each, as Megatron cuts it."""

    mask: str
    group: Group
    # A LayerPlan, once attached.
    plan: Any

    def __init__(self, mask: str, group: Group = None) -> None:
        super().__init__()
        self.mask, self.group, self.plan = mask, group, None

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
    ) -> torch.Tensor:
        """Masks are known by their type: the tensor of a causal one is not read."""
        mask = getattr(attn_mask_type, "name", None) or self.mask
        if mask not in _MASKS:
            raise UnsupportedError(f"attn_mask_type {mask} is not read: causal and no_mask are")
        for name, given in (("attention_bias", attention_bias), ("packed_seq_params", packed_seq_params)):
            if given is not None:
                raise UnsupportedError(f"{name} is not taken by FP8 attention: leave it out")
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        if self.group is not None:
            out = ring_attention(q, k, v, self.plan, self.group, causal=_MASKS[mask])
        else:
            out = attention(q, k, v, self.plan, causal=_MASKS[mask])
        return out.transpose(0, 1).flatten(2).to(query.dtype)


def attach(model: torch.nn.Module, policy: Policy = "geometry", bound: Bound | None = None, **options: Any) -> Runtime:
    """As :func:`sigmascale.torch.attach`, for one model chunk: plans for its layers, which its ``core_attention`` then
    takes.

    Where Megatron's DistributedDataParallel overlaps the gather of parameters with the forward, they are gathered only
    in that layer's forward: scales are computed there, before its attention. Otherwise ``refresh()`` computes them.
    Raises :class:`UnsupportedError`, and leaves the model as it was, for what has no FP8 attention or no bound.
    """
    inner, overlapped = _unwrapped(model)
    cores = {layer: CoreAttention(layer.attn_mask_type.name, _context(layer)) for _, layer in _attentions(inner)}
    if not cores:
        raise ArgumentError(f"{type(inner).__name__} has no layer with linear_qkv and core_attention")
    runtime = _attach(inner, policy, bound, layers=layers(inner, cores if overlapped else {}), **options)
    for (layer, core), plan in zip(cores.items(), runtime.layers):
        core.plan = plan
        layer.core_attention = core
    return runtime


def layers(
    model: torch.nn.Module, units: Mapping[torch.nn.Module, torch.nn.Module] | None = None
) -> list[Callable[[], Layer]]:
    """Functions that return the :class:`Layer` of each attention layer of a chunk, for ``attach(model, layers=...)``.

    ``units``: by attention module, the module before whose forward its parameters are whole, where they are not always.
    """
    inner, units = _unwrapped(model)[0], units or {}
    rotary = _rotary(inner)
    return [
        functools.partial(_layer, parent, attention, rotary, units.get(attention))
        for parent, attention in _attentions(inner)
    ]


def _unwrapped(model):
    """The model inside Megatron's wrappers, and whether parameters are gathered in its forward."""
    overlapped = False
    while not hasattr(model, "decoder") and hasattr(model, "module"):
        config = getattr(model, "ddp_config", None)
        overlapped = overlapped or bool(getattr(config, "overlap_param_gather", False))
        model = model.module
    return model, overlapped


def _attentions(model):
    """Layers and their attention, in order."""
    for module in model.modules():
        attention = getattr(module, "self_attention", None)
        if attention is None or not hasattr(attention, "core_attention"):
            continue
        if not hasattr(attention, "linear_qkv"):
            raise UnsupportedError(
                f"{type(attention).__name__} of layer {attention.layer_number - 1} has no linear_qkv: multi-head latent "
                "attention is not read here"
            )
        yield module, attention


def _context(attention):
    """The process group that shares the sequence."""
    if attention.config.context_parallel_size == 1:
        return None
    return attention.pg_collection.cp


def _rotary(model):
    """Rotated channels of a head."""
    kind = getattr(model, "position_embedding_type", "none")
    if kind in ("learned_absolute", "none"):
        return 0
    if kind != "rope":
        raise UnsupportedError(f"position_embedding_type {kind!r} is not read: rope, learned_absolute and none are")
    return int(model.config.kv_channels * model.rotary_percent)


def _layer(parent, attention, rotary, unit):
    config, r = attention.config, attention.hidden_size_per_attention_head
    name, number = f"layer {attention.layer_number - 1}", attention.layer_number - 1
    _refuse(config, attention, name)
    groups, n_q = attention.num_query_groups_per_partition, attention.num_attention_heads_per_partition
    per = n_q // groups
    # Query heads, gates of as many, k, v.
    width = (2 if config.attention_output_gate else 1) * per + 2
    starts = [[(group * width + head) * r for head in range(width)] for group in range(groups)]
    heads = sum((group[:per] for group in starts), []), [group[-2] for group in starts], [group[-1] for group in starts]
    linear = attention.linear_qkv
    weight, bias = linear.weight, getattr(linear, "bias", None)
    # Layers of TransformerEngine normalise in the projection.
    norm = linear if hasattr(linear, "layer_norm_weight") else parent.input_layernorm
    prefix = "layer_norm_" if norm is linear else ""
    gain, shift = (getattr(norm, prefix + key, None) for key in ("weight", "bias"))
    if gain is None:
        raise UnsupportedError(
            f"{name}: {type(norm).__name__} in front of linear_qkv has no weight: it is no norm that is read"
        )
    centred = 1.0 if config.layernorm_zero_centered_gamma else 0.0
    q_norm, k_norm, normalised = _qk_norms(attention, weight, name)
    if config.no_rope_freq and config.no_rope_freq[number]:
        rotary = 0
    return Layer(
        q=weight,
        k=weight,
        v=weight,
        q_bias=bias,
        k_bias=bias,
        v_bias=bias,
        n_q_heads=n_q,
        n_kv_heads=groups,
        norm=_NORMS[config.normalization],
        gain=gain,
        shift=shift if config.normalization == "LayerNorm" else None,
        gain_offset=centred,
        rotary=rotary,
        interleaved=config.rotary_interleaved,
        softmax_scale=config.softmax_scale,
        q_norm=q_norm,
        k_norm=k_norm,
        qk_norm_offset=centred if normalised else 0.0,
        module=attention,
        name=name,
        number=number,
        heads=heads,
        fused_d_head=r,
        first_kv_head=groups * torch.distributed.get_rank(attention.pg_collection.tp),
        model_q_heads=config.num_attention_heads * config.num_layers,
        unit=unit,
    )


def _refuse(config, attention, name):
    ranks = attention.world_size
    if config.num_query_groups < ranks:
        raise UnsupportedError(
            f"{name}: {ranks} tensor-parallel ranks do not share {config.num_query_groups} KV groups evenly: choose a degree that divides "
            "them"
        )
    if config.normalization not in _NORMS:
        raise UnsupportedError(f"{name}: normalization {config.normalization!r} is not read: RMSNorm and LayerNorm are")
    if config.window_size is not None or getattr(config, "softmax_type", "vanilla") != "vanilla":
        raise UnsupportedError(f"{name}: windows and softmax offsets are not taken by this attention: leave them out")
    if config.attention_dropout:
        raise UnsupportedError(
            f"{name}: attention_dropout is {config.attention_dropout}, and FP8 attention has none: set it to 0"
        )


def _qk_norms(attention, weight, name):
    """Gains of the norms of q and k, and whether these are the model's own."""
    found = [getattr(attention, key, None) for key in ("q_layernorm", "k_layernorm")]
    kinds = [type(norm).__name__ for norm in found]
    if all(kind in ("NoneType", "IdentityOp") for kind in kinds):
        return None, None, False
    if all(kind == "L2Norm" for kind in kinds):
        ones = torch.ones(attention.hidden_size_per_attention_head, dtype=weight.dtype, device=weight.device)
        return ones, ones.clone(), False
    gains = [getattr(norm, "weight", None) for norm in found]
    if any(gain is None for gain in gains) or any(getattr(norm, "bias", None) is not None for norm in found):
        raise UnsupportedError(
            f"{name}: norms of q and k ({', '.join(kinds)}) are read where they are RMS norms with gains alone"
        )
    return *gains, True
