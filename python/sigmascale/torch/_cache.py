"""A cache of Hugging Face's ``generate`` that holds keys and values in E4M3, cast once by the plan of their layer."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from .._errors import ArgumentError, UnsupportedError
from ._e4m3 import E4M3, cast, plain_cast

if TYPE_CHECKING:
    from ._runtime import Runtime


def fp8_cache(runtime: Runtime, max_cache_len: int | None = None) -> Any:
    """A cache for ``model.generate(..., past_key_values=fp8_cache(runtime))``, half the size of BF16's.

    New keys and values are cast by the plan of their layer as they come, and old ones are not cast again; so weights, and the
    centers of plans that have them, must stay as they are while it is in use. It grows with the text; with ``max_cache_len`` it is a static one, for ``torch.compile``. Layers
    with a sliding window keep the window.

    Raises :class:`UnsupportedError` under ``policy="current"``, whose descales are those of one call, and without transformers.
    """
    try:
        from transformers import DynamicCache, StaticCache
    except ImportError as error:
        raise UnsupportedError("transformers is needed for a cache of its generate()") from error
    model = runtime._model()
    plans = {getattr(module, "layer_idx", None): plan for module, plan in runtime._modules.items()}
    plans.pop(None, None)
    if model is None or not plans:
        raise ArgumentError("the runtime is not that of a Hugging Face decoder: its attention modules have no layer_idx")
    if any(plan.latent for plan in plans.values()):
        raise UnsupportedError(
            "latent attention (MLA) caches latents instead of keys and values: leave past_key_values out, and the "
            "cache is BF16"
        )
    if any(plan.per_call for plan in plans.values()):
        raise UnsupportedError("policy='current' has no descales that an E4M3 cache could keep: take another policy")
    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config) if max_cache_len is None else StaticCache(config=config, max_cache_len=max_cache_len)
    for index, layer in enumerate(cache.layers):
        if index in plans:
            layer.__class__ = _in_e4m3(type(layer))  # type: ignore[arg-type]  # a class is hashable
            layer.plan = plans[index]
    return cache


@functools.cache
def _in_e4m3(kind):
    """A layer of a cache, holding bytes."""

    class Fp8Layer(kind):
        def update(self, key_states, value_states, *args, **kwargs):
            names = zip("kv", (key_states, value_states))
            held = super().update(*(cast_heads(x, self.plan, name).view(torch.uint8) for name, x in names), *args, **kwargs)
            return tuple(x.view(E4M3) for x in held)

    Fp8Layer.__name__ = Fp8Layer.__qualname__ = f"Fp8{kind.__name__}"
    return Fp8Layer


def cast_heads(x, plan, name):
    """``(batch, heads, seq, d_head)`` of q, k or v in E4M3 by a plan, with its telemetry."""
    n_q, n_kv = plan.n_q_heads, plan.n_kv_heads
    words = plan.reported
    rows = {} if words is None else dict(zip("qkv", words[n_q:].split([n_q, n_kv, n_kv])))
    descale = plan.descales(x.shape[0])["qkv".index(name)]
    x, center = x.transpose(1, 2), (None, *plan.centers)["qkv".index(name)]
    x = x if center is None else x.float() - center
    # Compiled code fuses the plain one.
    one = plain_cast if torch.compiler.is_compiling() else cast
    return one(x, descale, rows.get(name)).transpose(1, 2)
