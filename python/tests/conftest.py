"""Makes the `fa3-fwd` wheel known to PyTorch under the name that it looks for, to test its quantized SDPA."""

import importlib.machinery
import importlib.util
import sys
import types

import pytest


def _lend_fa3_to_torch():
    import torch
    from torch import library

    if not torch.cuda.is_available() or importlib.util.find_spec("flash_attn_interface") is not None:
        return
    import fa3_fwd_interface  # noqa: F401

    schema = str(torch.ops.fa3_fwd.fwd.default._schema).split("fa3_fwd::", 1)[1]
    operators = library.Library("flash_attn_3", "DEF")
    operators.define(schema)
    operators.define("bwd(Tensor x) -> Tensor")
    operators.impl("fwd", lambda *arguments: torch.ops.fa3_fwd.fwd(*arguments), "CUDA")
    module = types.ModuleType("flash_attn_interface")
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn_interface", None)
    module.flash_attn_func, module.operators = fa3_fwd_interface.flash_attn_func, operators
    sys.modules["flash_attn_interface"] = module


try:
    _lend_fa3_to_torch()
except ImportError:
    pass


@pytest.fixture
def llama():
    """A small Llama with random weights on the GPU."""
    from gpu import random_model

    return random_model("llama")


@pytest.fixture
def alone():
    """A process group of this process, on its GPU."""
    import torch

    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
