"""Exports through SGLang's own loader, on the CPU: every scale of k and v that its attention layers would be given.

    pytest python/tests/lanes/lane_sglang.py

needs SGLang 0.5.23 (without its kernels), transformers and this package. Each model is loaded in a process of its own.
"""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)

import models  # noqa: E402

import sigmascale  # noqa: E402

FAMILIES = ["llama", "gpt2", "qwen2", "gemma3_text", "mixtral", "phi3"]
LOAD = """
import json, os, socket, sys

out = os.dup(1)
os.dup2(2, 1)
from sglang.srt import runtime_context
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_loader import get_model
from sglang.srt.server_args import ServerArgs

arguments = ServerArgs(model_path=sys.argv[1], device="cpu", kv_cache_dtype="fp8_e4m3", skip_tokenizer_init=True,
                       dtype="bfloat16", context_length=128, attention_backend="torch_native", disable_cuda_graph=True)
arguments.resolve_once()
runtime_context.publish(arguments, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=0))
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
init_distributed_environment(world_size=1, rank=0, local_rank=0, distributed_init_method=address, backend="gloo")
initialize_model_parallel(backend="gloo")
model = get_model(model_config=ModelConfig.from_server_args(arguments), load_config=LoadConfig(),
                  device_config=DeviceConfig("cpu"))
found = {}
for module in model.modules():
    if isinstance(module, RadixAttention):
        assert float(module.k_scale) == module.k_scale_float and float(module.v_scale) == module.v_scale_float
        found[module.layer_id] = {"k": module.k_scale_float, "v": module.v_scale_float}
os.write(out, json.dumps(found).encode())
os._exit(0)
"""


@pytest.mark.parametrize("family", FAMILIES)
def test_every_scale_arrives(family, tmp_path):
    model = models.write(family, tmp_path / family)
    sigmascale.export(model, tmp_path / "out", "sglang")
    done = subprocess.run([sys.executable, "-c", LOAD, str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {int(number): scales for number, scales in json.loads(done.stdout).items()}
    audit = sigmascale.verify(pathlib.Path(tmp_path / "out"), "sglang")
    assert audit["safe"] and sorted(found) == [layer["layer"] for layer in audit["layers"]]
    for layer in audit["layers"]:
        for operand in "kv":
            (entry,) = layer[operand]
            models.within([found[layer["layer"]][operand]], [entry["needed"]], f"layer {layer['layer']} {operand}")
