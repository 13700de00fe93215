from collections.abc import Callable, Mapping
from typing import Any

import torch

from . import Runtime

class Scales:
    scales: torch.Tensor
    amax: torch.Tensor
    def __init__(self, runtime: Runtime) -> None: ...
    def update(self, runtime: Runtime) -> None: ...

def quantizer_factory(
    runtime: Runtime,
    names: Mapping[str, int],
    fallback: Callable[[Any], Any],
    make: Callable[[torch.Tensor, torch.Tensor], Any],
    scales: Scales | None = None,
) -> Callable[[Any], Any]: ...
def recipe(runtime: Runtime, names: Mapping[str, int], fallback: Callable[[Any], Any] | None = None) -> Any: ...
