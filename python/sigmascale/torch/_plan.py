"""The scales of one attention layer, as calls take them, and where a module finds its own."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .._errors import ArgumentError, SigmascaleError
from . import _calls
from ._policies import FROM_BOUNDS

if TYPE_CHECKING:
    from ._layers import Layer


class Plans(Protocol):
    """The runtime of a plan, as far as plans and calls need it."""

    _policy: Any

    @property
    def policy(self) -> str: ...
    @property
    def backend(self) -> str: ...
    @property
    def fallback(self) -> str | None: ...
    @property
    def reporting(self) -> bool: ...

    descales: torch.Tensor
    words: torch.Tensor
    logit_descales: torch.Tensor | None
    _model: weakref.ref[torch.nn.Module]


class LayerPlan:
    """The scales of one layer: views into the runtime's tensors, whose addresses stay the same."""

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
    # The centers of the runtime's layers.
    kept: Any = None
    # c and m, f32 (n_kv_heads, d), None where nothing is subtracted: what calls take unless they are given others. The descales
    # cover keys and values with them and without. Held here and not looked up by `index`, for which a compiler would compile each
    # layer anew.
    centers: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    # "e4m3": calls cast their logits (`attention`).
    logits: str | None = None
    key: int
    label: torch.Tensor
    logit_descale: torch.Tensor | None
    words: torch.Tensor

    def __init__(self, runtime: Plans, index: int, layer: Layer) -> None:
        # Weak: a model whose modules know their plan must not keep itself alive through it.
        self._runtime = weakref.ref(runtime)
        self.index, self.name = index, layer.name
        self.n_q_heads, self.n_kv_heads, self.d_head = layer.n_q_heads, layer.n_kv_heads, layer.d_head
        self.per_call, self.remembers = runtime._policy.per_call, runtime._policy.remembers
        self.softmax_scale = self.d_head**-0.5 if layer.softmax_scale is None else layer.softmax_scale
        # Whether k and v are made from a cached latent.
        self.latent = layer.latent is not None
        # Keys up to which the descales are bounds; None: any number, or a policy without bounds.
        self.positions = layer.positions if runtime.policy in FROM_BOUNDS else None
        # Whether the weights have changed since these scales: a layer sharded by FSDP, between a refresh and its forward.
        self.stale = False
        self._rows = runtime.descales[index, :, : self.n_kv_heads]
        self.words = runtime.words[index, : 2 * (self.n_q_heads + self.n_kv_heads)]
        # Whose calls these are, in counters and to those who look at calls.
        self.key = _calls.watch()
        self.label = _calls.label(self.key, self.words.device)
        weakref.finalize(self, _calls.forget, [self.key])
        logits = runtime.logit_descales
        self.logit_descale = None if logits is None else logits[index, : self.n_q_heads]
        for tensor in (runtime.descales, runtime.words, self._rows, self.words):
            _tell_compiler(tensor)

    @property
    def learns_centers(self) -> bool:
        """Whether calls take part in the means that centers come from."""
        return not torch.compiler.is_compiling() and self.kept is not None and self.kept.learns(self.index)

    @property
    def training(self) -> bool:
        """Whether the model is in training mode, where a forward without gradients can be that of a checkpoint."""
        model = self.runtime._model()
        return model is not None and model.training

    @property
    def reported(self) -> torch.Tensor | None:
        """What calls write their statistics into, or None in a step without telemetry."""
        return self.words if self.runtime.reporting else None

    def check_fresh(self) -> None:
        """Raises an exception where the weights have changed since these scales."""
        if self.stale:
            raise SigmascaleError(
                f"the scales of {self.name} are not those of its weights yet: they are computed in the forward of its FSDP unit, so "
                "call the module that was given to fully_shard, or refresh(now=True) on all ranks"
            )

    @property
    def _descales(self):
        self.check_fresh()
        return self._rows

    @property
    def q_descale(self) -> torch.Tensor:
        """Descales of q, (n_kv_heads)."""
        return self._descales[0]

    @property
    def k_descale(self) -> torch.Tensor:
        """Descales of k, (n_kv_heads)."""
        return self._descales[1]

    @property
    def v_descale(self) -> torch.Tensor:
        """Descales of v, (n_kv_heads)."""
        return self._descales[2]

    @property
    def o_descale(self) -> torch.Tensor:
        """Descales of an FP8 output, (n_kv_heads)."""
        return self._descales[3]

    @property
    def runtime(self) -> Any:
        """The runtime, or an exception if it is gone."""
        runtime = self._runtime()
        if runtime is None:
            raise SigmascaleError(
                "the runtime of this plan is gone: keep what attach() returned for as long as it is used"
            )
        return runtime

    def descales(self, batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v descales as FlashAttention-3 takes them: ``(batch, n_kv_heads)``, batch stride 0, no copy."""
        return tuple(self._descales[i].expand(batch, -1) for i in range(3))

    def __repr__(self) -> str:
        return (
            f"<sigmascale plan of {self.name}: {self.n_q_heads} query and {self.n_kv_heads} KV heads of {self.d_head}>"
        )

    def __reduce_ex__(self, _: object) -> Any:
        refuse_copies("LayerPlan")


def _tell_compiler(tensor):
    """That a tensor keeps its shape, so that no dimension becomes a symbol, and its address: CUDA graphs of compiled
    code copy other inputs, and are not used where code writes into them."""
    torch._dynamo.mark_static(tensor)
    torch._dynamo.mark_static_address(tensor)


class _Plans(list):
    """Plans of an attention module, the latest last, for the Hugging Face interface, which knows the module alone. They lie with
    the module, where compiled code finds them; a copy of the module has none."""

    name = "_sigmascale_plans"

    def __reduce_ex__(self, _: object) -> Any:
        return _Plans, ()


def give_plan(module, plan):
    """Adds a module's latest plan, and drops those whose runtime is gone."""
    alive = [old for old in getattr(module, _Plans.name, ()) if old._runtime() is not None]
    setattr(module, _Plans.name, _Plans([*alive, plan]))


def plans_of(module):
    """The plans of a module, the latest last."""
    return getattr(module, _Plans.name, ())


def plan_of_module(module):
    """The latest plan of a module whose runtime is alive."""
    for plan in reversed(plans_of(module)):
        if plan._runtime() is not None:
            return plan
    raise ArgumentError(
        f"{type(module).__name__} has no plan: call sigmascale.torch.attach(model) after the model is loaded, and keep what it "
        "returns. It covers text layers; for a model with a vision or audio part write "
        "model.set_attn_implementation({'text_config': sigmascale.torch.register()})"
    )


def refuse_copies(kind):
    raise TypeError(
        f"a {kind} belongs to its model and its device, so it cannot be copied or pickled: save state_dict() of the runtime, "
        "and attach() to the other model"
    )
