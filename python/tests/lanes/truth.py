"""What an engine's attention layers hold after its own loader has read a folder: `{"layers": {number: {"q", "k", "v"}}}`, or
`{"error"}` where it does not start.

    python truth.py vllm|sglang PLACE [PART/PARTS]

writes the folders of `folders.py` into PLACE and a line a folder to `PLACE/ENGINE.jsonl`. The engine is imported once; each
folder is loaded in a child of its own.
"""

import hashlib
import json
import os
import pathlib
import sys
import time

SECONDS = 180


def vllm():
    import engine_vllm

    def load(folder):
        _, model = engine_vllm.load(folder)
        return {engine_vllm.number(layer): engine_vllm.scales(layer) for layer in engine_vllm.attention(model)}

    return load


def sglang():
    import socket

    import torch
    from sglang.srt import runtime_context
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_loader import get_model
    from sglang.srt.server_args import ServerArgs

    # What layers of FP8 weights ask of a GPU before they can be built; no attention scale depends on it.
    torch.cuda.get_device_capability = lambda *device: (9, 0)

    def load(folder):
        sinks = json.loads((pathlib.Path(folder) / "config.json").read_text())["model_type"] == "gpt_oss"
        arguments = ServerArgs(
            model_path=str(folder), device="cpu", kv_cache_dtype="fp8_e4m3", skip_tokenizer_init=True, dtype="bfloat16",
            context_length=128, attention_backend="triton" if sinks else "torch_native", disable_cuda_graph=True,
        )
        arguments.resolve_once()
        runtime_context.publish(arguments, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=0))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        init_distributed_environment(
            world_size=1, rank=0, local_rank=0, distributed_init_method=address, backend="gloo"
        )
        initialize_model_parallel(backend="gloo")
        model = get_model(
            model_config=ModelConfig.from_server_args(arguments), load_config=LoadConfig(), device_config=DeviceConfig("cpu")
        )
        found = {}
        for name, module in model.named_modules():
            if isinstance(module, RadixAttention) and not name.endswith("attn_mha"):
                scale = lambda operand: getattr(module, f"{operand}_scale_float")
                found[module.layer_id] = {operand: [1.0 if scale(operand) is None else scale(operand)] for operand in "kv"}
        return found

    return load


def in_child(load, folder):
    """The result of a load in a child of this process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        try:
            result = {"layers": {str(number): scales for number, scales in load(folder).items()}}
        except BaseException as error:  # Whatever ends it, an exit too, is the result.
            result = {"error": f"{type(error).__name__}: {error}"[:400]}
        with os.fdopen(write, "wb") as pipe:
            pipe.write(json.dumps(result).encode())
        os._exit(0)
    os.close(write)
    data, end = b"", time.monotonic() + SECONDS
    import select

    while time.monotonic() < end:
        if select.select([read], [], [], 1.0)[0]:
            part = os.read(read, 1 << 16)
            if not part:
                break
            data += part
    else:
        os.kill(child, 9)
    os.close(read)
    os.waitpid(child, 0)
    return json.loads(data) if data else {"error": "the loader ended without a result"}


def main(engine, place, part="1/1"):
    import folders

    number, parts = map(int, part.split("/"))
    place = pathlib.Path(place)
    place.mkdir(parents=True, exist_ok=True)
    load = {"vllm": vllm, "sglang": sglang}[engine]()
    out = place / f"{engine}.jsonl"
    seen = {json.loads(line)["name"] for line in out.read_text().splitlines()} if out.exists() else set()
    # In an order that mixes kinds, so that a run that is cut short has some of each.
    mixed = sorted(folders.folders(), key=lambda one: hashlib.sha256(one.name.encode()).hexdigest())
    due = mixed[number - 1 :: parts]
    while due:
        one = due.pop(0)
        if one.name in seen:
            continue
        seen.add(one.name)
        try:
            folder = folders.write(one, place)
        except Exception as error:  # A family that this transformers does not have.
            result = {"not_built": f"{type(error).__name__}: {error}"[:400]}
        else:
            result = in_child(load, folder)
            if "error" in result:
                due.insert(0, folders.control(one.family))
        with out.open("a") as lines:
            lines.write(json.dumps({"name": one.name} | result) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("SIGMASCALE_PLUGIN", "0")
    main(*sys.argv[1:])
