"""``F.scaled_dot_product_attention`` of a runtime's modules, sent through FP8."""

import warnings

import torch
import torch.nn.functional as F

from .._errors import ArgumentError
from ._attention import scaled_dot_product_attention
from ._runtime import Runtime


class patched:
    """``with patched(runtime):`` sends ``F.scaled_dot_product_attention`` of the runtime's modules through FP8.

    For plain modules that call it by that name: while one of the runtime's attention modules runs, its calls use its plan;
    all others are left alone. A module that runs without such a call (``nn.MultiheadAttention`` with ``need_weights=True`` or
    under ``torch.compile``) is named by a warning. It replaces a function of the whole process and turns the fast path of ``nn.MultiheadAttention``
    off, which makes no such call, so one thread at a time.
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
            self._hooks.append(module.register_forward_pre_hook(lambda *_, plan=plan: self._stack.append([plan, 0])))
            self._hooks.append(module.register_forward_hook(self._left, always_call=True))
        self._original = original = F.scaled_dot_product_attention
        self._fast_path = torch.backends.mha.get_fastpath_enabled()

        def replaced(query, key, value, *args, **kwargs):
            if not self._stack:
                return original(query, key, value, *args, **kwargs)
            self._stack[-1][1] += 1
            return scaled_dot_product_attention(query, key, value, *args, **kwargs, plan=self._stack[-1][0])

        F.scaled_dot_product_attention = replaced
        torch.backends.mha.set_fastpath_enabled(False)
        return self._runtime

    def _left(self, module, _, out):
        _, calls = self._stack.pop()
        if calls == 0 and out is not None:
            _say(type(module).__name__)

    def __exit__(self, *_: object) -> None:
        F.scaled_dot_product_attention = self._original
        torch.backends.mha.set_fastpath_enabled(self._fast_path)
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._stack = [], []


# Compiled code runs this while it is compiled.
@torch.compiler.assume_constant_result
def _say(name):
    warnings.warn(
        f"{name} ran without a call of F.scaled_dot_product_attention, so not in FP8 (nn.MultiheadAttention calls it with "
        "need_weights=False, and not under torch.compile)",
        RuntimeWarning,
        stacklevel=3,
    )
