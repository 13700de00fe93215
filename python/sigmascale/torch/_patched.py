"""``F.scaled_dot_product_attention`` of a runtime's modules, sent through FP8."""

import torch.nn.functional as F

from .._errors import ArgumentError
from ._attention import scaled_dot_product_attention
from ._runtime import Runtime


class patched:
    """``with patched(runtime):`` sends ``F.scaled_dot_product_attention`` of the runtime's modules through FP8.

    For plain modules that call it by that name: while one of the runtime's attention modules runs, its calls use its plan;
    all others are left alone. It replaces a function of the whole process, so one thread at a time.
    """

    def __init__(self, runtime: Runtime) -> None:
        if not isinstance(runtime, Runtime):
            raise TypeError(f"runtime must be what attach() returned, not {type(runtime).__name__}")
        self._runtime, self._stack, self._hooks = runtime, [], []

    def __enter__(self) -> Runtime:
        if self._hooks:
            raise ArgumentError("this patched() is in use: make another one")
        if not self._runtime._modules:
            raise ArgumentError("the layers of this runtime name no modules: give layers=[Layer(..., module=...)]")
        for module, plan in self._runtime._modules.items():
            self._hooks.append(module.register_forward_pre_hook(lambda *_, plan=plan: self._stack.append(plan)))
            self._hooks.append(module.register_forward_hook(lambda *_: self._stack.pop() and None, always_call=True))
        self._original = original = F.scaled_dot_product_attention

        def replaced(query, key, value, *args, **kwargs):
            if not self._stack:
                return original(query, key, value, *args, **kwargs)
            return scaled_dot_product_attention(query, key, value, *args, **kwargs, plan=self._stack[-1])

        F.scaled_dot_product_attention = replaced
        return self._runtime

    def __exit__(self, *_: object) -> None:
        F.scaled_dot_product_attention = self._original
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._stack = [], []
