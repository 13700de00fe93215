"""What an engine's attention layers hold after its own loader has read a folder: `{"layers": {number: {"q", "k", "v"}}}`, or
`{"error"}` where it does not start.

    python truth.py vllm|sglang PLACE [COUNT]

writes folders of `folders.py` into PLACE and a line a folder to `PLACE/ENGINE.jsonl`, until COUNT (600) of them tell something:
their family starts in this engine, at least without scales. The engine is imported once, and one process loads all folders. A
folder that ends the process is counted as one that does not load when the next one begins.
"""

import gc
import hashlib
import json
import os
import pathlib
import signal
import sys

SECONDS = 300


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
    from sglang.srt.distributed.parallel_state import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )
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
            mamba_radix_cache_strategy="no_buffer",  # The other needs a GPU.
        )
        arguments.resolve_once()
        destroy_model_parallel()
        destroy_distributed_environment()
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


def guarded(load, folder):
    """The result of a load; whatever ends it, an exit or a wait without end too, is one."""

    def late(*_):
        raise TimeoutError(f"not loaded after {SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        return {"layers": {str(number): scales for number, scales in load(folder).items()}}
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return {"error": f"{type(error).__name__}: {error}"[:400]}
    finally:
        signal.alarm(0)


def main(engine, place, count="600"):
    import folders

    place = pathlib.Path(place)
    place.mkdir(parents=True, exist_ok=True)
    load = {"vllm": vllm, "sglang": sglang}[engine]()
    out, begun = place / f"{engine}.jsonl", place / f"{engine}.begun"
    results = {one["name"]: one for one in map(json.loads, out.read_text().splitlines())} if out.exists() else {}

    def record(name, result):
        results[name] = {"name": name} | result
        with out.open("a") as lines:
            lines.write(json.dumps(results[name]) + "\n")

    def dead(family):
        """Why a family does not start, whatever scales there are."""
        result = results.get(folders.control(family).name, {})
        return result.get("error") or result.get("not_built")

    def tells(result):
        return "not_built" not in result and not ("error" in result and dead(result["name"].split("-")[0]))

    if begun.exists() and (name := begun.read_text()) not in results:
        record(name, {"error": "the loader ended its process"})
    # In an order that mixes kinds, so that any number of them has some of each.
    due = sorted(folders.folders(), key=lambda one: hashlib.sha256(one.name.encode()).hexdigest())
    due = [folders.control(one["name"].split("-")[0]) for one in results.values() if "error" in one] + due
    while due and sum(map(tells, results.values())) < int(count):
        one = due.pop(0)
        if one.name in results:
            continue
        begun.write_text(one.name)
        try:
            folder = folders.write(one, place)
        except Exception as error:  # A family that this transformers does not have.
            result = {"not_built": f"{type(error).__name__}: {error}"[:400]}
        else:
            why = dead(one.family)
            result = {"not_built": f"without scales: {why}"} if why else guarded(load, folder)
            if "error" in result:
                due.insert(0, folders.control(one.family))
        record(one.name, result)
        if not gc.get_freeze_count():
            # Engines collect several times a load, and what they imported is most of what there is to look through.
            gc.collect()
            gc.freeze()


if __name__ == "__main__":
    os.environ.setdefault("SIGMASCALE_PLUGIN", "0")
    main(*sys.argv[1:])
