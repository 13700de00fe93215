"""Plans on the CPU: what ``attach`` makes on a GPU, with descales from the model's own operands in place of bounds."""

import types

import torch

import sigmascale.torch as fp8
from sigmascale.torch import _calls, _layers
from sigmascale.torch._plan import LayerPlan, give_plan


class Planned:
    """A runtime's tensors and plans, without its engines."""

    def __init__(self, layers, descale=0.02, fallback=None):
        n_q, n_kv = max(x.n_q_heads for x in layers), max(x.n_kv_heads for x in layers)
        self.policy, self._policy = "geometry", types.SimpleNamespace(per_call=False, remembers=False)
        self.descales = torch.full((len(layers), 4, n_kv), descale)
        self.words = torch.zeros(len(layers), 2 * (n_q + n_kv), 4, dtype=torch.int32)
        self.reporting, self.device, self._model = True, torch.device("cpu"), lambda: None
        self.backend, self.fallback, self.logit_descales = "auto", fallback, None
        self.layers = [LayerPlan(self, index, layer) for index, layer in enumerate(layers)]
        self.calls = [_calls.counted(plan.key)[0] for plan in self.layers]


def planned(model, **options):
    """Plans for a Hugging Face model, which then finds them by its modules."""
    found = _layers.find(model)
    runtime = Planned(found, **options)
    for plan, layer in zip(runtime.layers, found):
        give_plan(layer.module, plan)
    model.set_attn_implementation(fp8.register())
    return runtime


def layer(heads=(4, 2), d=32):
    """A layer of these heads, for its plan alone."""
    q, kv = torch.zeros(heads[0] * d, 64), torch.zeros(heads[1] * d, 64)
    return fp8.Layer(q=q, k=kv, v=kv, n_q_heads=heads[0], n_kv_heads=heads[1])
