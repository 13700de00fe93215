"""TransformerEngine: scales of its fused FP8 attention from a runtime, through ``CustomRecipe``.

Written to the interface of ``CustomRecipe(qfactory=..., fp8_dpa=True)``, which TransformerEngine calls experimental. Tested
against the classes of its 2.20 (recipe, roles, quantizers, their making) on the CPU; **its kernels were never run with it**.
Its attention takes one scale for q, k and v together, so the largest descale of the three counts. P gets its fixed scale,
the output ``o_descale``; gradients and all other modules stay with delayed scaling.

>>> runtime = sigmascale.torch.attach(model, layers=[...])
>>> recipe = sigmascale.torch.te.recipe(runtime, {"layers.0.self_attention.core_attention": 0, ...})
>>> with transformer_engine.pytorch.autocast(enabled=True, recipe=recipe):
...     model(x)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .._arguments import whole
from .._errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from ._runtime import Runtime

# As in the other backends: P in [0, 1] becomes at most 256.
_P_SCALE = 256.0
_PLACES = {"qkv": 0, "s": 1, "o": 2}
# How a role of the output is named where no module after the attention claims it.
_OUTPUT = ".dpa_output"


class Scales:
    """Quantization scales f32 ``(layers, [qkv, s, o])``, one over the descale, that follow every ``refresh()`` in
    place."""

    scales: torch.Tensor
    amax: torch.Tensor

    # Written in place at each refresh, in whatever mode that is called.
    @torch.inference_mode(False)
    def __init__(self, runtime: Runtime) -> None:
        self.scales = torch.ones(len(runtime), 3, device=runtime.device, dtype=torch.float32)
        self.amax = torch.zeros(len(runtime), 3, device=runtime.device, dtype=torch.float32)
        runtime._serves_others = True
        runtime.after_refresh.append(self.update)
        self.update(runtime)

    def update(self, runtime: Runtime) -> None:
        """Puts the new scales on the current stream."""
        self.scales[:, 0] = runtime.descales[:, :3].amax(dim=(1, 2)).reciprocal()
        self.scales[:, 1] = _P_SCALE
        self.scales[:, 2] = runtime.descales[:, 3].amax(dim=1).reciprocal()


def quantizer_factory(
    runtime: Runtime,
    names: Mapping[str, int],
    fallback: Callable[[Any], Any],
    make: Callable[[torch.Tensor, torch.Tensor], Any],
    scales: Scales | None = None,
) -> Callable[[Any], Any]:
    """The ``qfactory``: ``make(scale, amax)`` for what a plan covers, ``fallback(role)`` for the rest."""
    for name, layer in names.items():
        if not 0 <= whole(f"the layer of {name}", layer) < len(runtime):
            raise ArgumentError(f"{name} is given layer {layer}, and the runtime has {len(runtime)}")
    scales = scales or Scales(runtime)

    def factory(role):
        # Slots at a boundary may have no role.
        module, tensor, name = (getattr(role, key, "") or "" for key in ("module_type", "tensor_type", "name"))
        if not module and name.endswith(_OUTPUT):
            module, tensor, name = "dpa", "o", name.removesuffix(_OUTPUT)
        if module != "dpa" or tensor not in _PLACES:
            return fallback(role)
        layer = names.get(name)
        if layer is None:
            raise ArgumentError(f"the attention module {name!r} has no layer: the names given are {', '.join(names)}")
        place = _PLACES[tensor]
        return make(scales.scales[layer, place : place + 1], scales.amax[layer, place : place + 1])

    return factory


def recipe(runtime: Runtime, names: Mapping[str, int], fallback: Callable[[Any], Any] | None = None) -> Any:
    """A ``CustomRecipe`` whose attention scales come from ``runtime``.

    ``names`` maps names of TransformerEngine's attention modules (their ``name=``) to layers of the runtime.
    ``fallback(role)`` gives the quantizers of everything else; by default delayed scaling. Raises
    :class:`UnsupportedError` if TransformerEngine is not there or too old, :class:`ArgumentError` for a layer that is not.
    """
    try:
        import transformer_engine_torch as tex
        from transformer_engine.common.recipe import CustomRecipe
        from transformer_engine.pytorch.quantization import DelayedScalingRequest
        from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer
    except ImportError as error:
        raise UnsupportedError("a TransformerEngine with CustomRecipe and DelayedScalingRequest is needed") from error
    make = lambda scale, amax: Float8Quantizer(scale, amax, tex.DType.kFloat8E4M3)
    factory = quantizer_factory(runtime, names, fallback or (lambda role: DelayedScalingRequest()), make)
    return CustomRecipe(qfactory=factory, fp8_dpa=True)
