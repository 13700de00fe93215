"""SGLang's own loader on the CPU, each model in a process of its own."""

import json
import os
import subprocess
import sys

LOAD = """
import json, logging, os, socket, sys

out = os.dup(1)
os.dup2(2, 1)
log = logging.getLogger("sglang.plugins.sigmascale")
log.setLevel(logging.INFO)
log.addHandler(logging.StreamHandler())
from sglang.srt.plugins import load_plugins

load_plugins()  # As each process of a server does.
import torch
from sglang.kernels.ops.quantization import fp8_kernel


def quantize(weight, out, scale, is_static):
    # One kernel that requantizes weights while they are loaded.
    assert is_static
    out.copy_((weight.float() / scale).clamp(-448, 448))


# What layers of FP8 weights ask of a GPU before they can be built; no attention scale depends on it.
torch.cuda.get_device_capability = lambda *device: (9, 0)
fp8_kernel.sgl_per_tensor_quant_fp8 = quantize
from sglang.srt import runtime_context
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_loader import get_model
from sglang.srt.server_args import ServerArgs

arguments = ServerArgs(model_path=sys.argv[1], device="cpu", kv_cache_dtype="fp8_e4m3", skip_tokenizer_init=True,
                       dtype="bfloat16", context_length=128, attention_backend=os.environ["BACKEND"],
                       disable_cuda_graph=True)
arguments.resolve_once()
runtime_context.publish(arguments, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=0))
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
init_distributed_environment(world_size=1, rank=0, local_rank=0, distributed_init_method=address, backend="gloo")
initialize_model_parallel(backend="gloo")
model = get_model(model_config=ModelConfig.from_server_args(arguments), load_config=LoadConfig(),
                  device_config=DeviceConfig("cpu"))


def scales():
    found = {}
    for module in model.modules():
        if isinstance(module, RadixAttention):
            own = found[module.layer_id] = {}
            for operand in "kv":
                scale, value = getattr(module, f"{operand}_scale"), getattr(module, f"{operand}_scale_float")
                assert value is None if scale is None else float(scale) == value
                own[operand] = value
    return found


"""
SCALES = """
results = [scales()]
if len(sys.argv) > 2:
    from safetensors.torch import load_file

    # As `update_weights_from_tensor` does: nothing follows.
    model.load_weights(list(load_file(os.path.join(sys.argv[2], "model.safetensors")).items()))
    results.append(scales())
os.write(out, json.dumps(results).encode())
os._exit(0)
"""
KEYS = """
from sglang.srt.layers import radix_attention


class Backend:
    def __init__(self):
        self.seen = {}

    def forward(self, q, k, v, layer, *rest, **named):
        self.seen[layer.layer_id] = k.float().tolist()
        return q


backend = Backend()
radix_attention.get_attn_backend = lambda: backend
radix_attention.padded_extend_real_tokens = lambda *given: None
for module in model.modules():
    if isinstance(module, RadixAttention):
        q, k = (torch.zeros(1, heads * module.head_dim, dtype=torch.bfloat16) for heads in (module.tp_q_head_num, module.tp_k_head_num))
        module(q, k, k, None)
os.write(out, json.dumps([scales(), backend.seen]).encode())
os._exit(0)
"""


def load(folder, update=None, *, plugin=True, backend="torch_native"):
    """``{layer: {"k", "v"}}`` of a folder, after the weights of another were loaded too, and what was logged."""
    environment = {"SIGMASCALE_PLUGIN": "1" if plugin else "0", "BACKEND": backend}
    results, log = _run(SCALES, [folder, *([update] if update else [])], environment)
    return (results if update else results[0]), log


def keys(folder, center="auto"):
    """``{layer: {"k", "v"}}``, what attention passes to its backend for keys of zeros by layer, and what was logged."""
    (scales, seen), log = _run(KEYS, [folder], {"SIGMASCALE_PLUGIN": "strict", "SIGMASCALE_CENTER": center, "BACKEND": "torch_native"})
    return scales, seen, log


def _run(script, folders, environment):
    done = subprocess.run(
        [sys.executable, "-c", LOAD + script, *map(str, folders)], capture_output=True, text=True, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [{int(number): row for number, row in found.items()} for found in json.loads(done.stdout)], done.stderr
