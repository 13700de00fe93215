"""vLLM's own loader on the CPU, in one process."""

import socket

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.model_loader import get_model_loader


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def load(folder, *, rank=0, ranks=1, port=None, **arguments):
    """Config and model of a folder."""
    arguments = {"kv_cache_dtype": "fp8", "dtype": "bfloat16", "enforce_eager": True, "max_model_len": 128} | arguments
    if ranks > 1:
        arguments |= {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"}
    config = EngineArgs(model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, **arguments).create_engine_config()
    with set_current_vllm_config(config), torch.no_grad():
        # Which groups there are depends on the model.
        destroy_model_parallel()
        destroy_distributed_environment()
        init_distributed_environment(ranks, rank, f"tcp://127.0.0.1:{port or free_port()}", rank, backend="gloo")
        initialize_model_parallel(ranks, 1)
        loader = get_model_loader(config.load_config)
        return config, loader.load_model(vllm_config=config, model_config=config.model_config)


def attention(model):
    """The attention modules, by the number of their layers."""
    return sorted((module for module in model.modules() if isinstance(module, Attention | MLAAttention)), key=number)


def number(layer):
    """The model's own number of a layer."""
    return next(int(part) for part in layer.layer_name.split(".") if part.isdigit())


def scales(layer):
    """What kernels are given: lists of q, k and v. Beside a cache in the model's type nothing is cast."""
    if "fp8" not in layer.kv_cache_dtype:
        return {operand: [1.0] for operand in "qkv"}
    return {operand: getattr(layer, f"_{operand}_scale").float().flatten().tolist() for operand in "qkv"}
