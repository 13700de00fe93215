"""The plugin in vLLM's own loader, on the CPU: the scales of `calibrate` for checkpoints that have none, and again after reloads.

    pytest python/tests/lanes/lane_vllm_plugin.py

needs vLLM 0.32 and this package installed, since vLLM finds the plugin by its entry point.
"""

import json
import logging
import os
import shutil
import subprocess
import sys
import types

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
if __name__ != "__main__":
    os.environ.pop("SIGMASCALE_PLUGIN", None)

import engine_vllm  # noqa: E402
import models  # noqa: E402
import torch  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402

import sigmascale  # noqa: E402
from sigmascale._loaded import up_to_bf16  # noqa: E402

# vLLM builds Falcon's attention without the type of the cache.
FAMILIES = [family for family in models.CONFIGS if family != "falcon"] + list(models.LATENT)


def expected(folder, heads=slice(None)):
    """One row a layer: the largest descales of these KV heads, rounded up."""
    rows = []
    for layer in sigmascale.calibrate(folder)["layers"]:
        row = {operand: layer[f"{operand}_descale"][heads] for operand in "qkv"}
        if "mla" in layer:
            cache = [layer["mla"]["cache_descale"]]
            row = {"q": layer["mla"]["absorbed_q_descale"][heads], "k": cache, "v": cache}
        rows.append({operand: [up_to_bf16(max(values))] for operand, values in row.items()})
    return rows


def found(model):
    rows = []
    for layer in engine_vllm.attention(model):
        scales = engine_vllm.scales(layer)
        for operand, (value,) in scales.items():
            assert getattr(layer, f"_{operand}_scale_float") == value
            assert operand == "q" or layer.__dict__[f"_{operand}_scale_cpu"].item() == value
        rows.append(scales)
    return rows


@pytest.fixture
def log(monkeypatch):
    """What the plugin says."""
    import vllm.logger

    lines, original = [], vllm.logger.init_logger
    note = lambda level: lambda message, *values: lines.append((level, message % values))
    own = types.SimpleNamespace(info=note(logging.INFO), error=note(logging.ERROR))
    monkeypatch.setattr(vllm.logger, "init_logger", lambda name: own if "sigmascale" in name else original(name))
    return lines


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bare_checkpoint_has_the_scales_of_calibrate(family, tmp_path, log):
    model = models.write(family, tmp_path / family)
    _, loaded = engine_vllm.load(model)
    assert found(loaded) == expected(model)
    ((level, line),) = log
    assert level == logging.INFO and f"of {len(found(loaded))} layers from the weights" in line


def test_a_multimodal_model(tmp_path):
    model = models.write_multimodal(tmp_path / "model")
    _, loaded = engine_vllm.load(model)
    assert found(loaded) == expected(model)


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
def test_fp8_weights(method, tmp_path, monkeypatch):
    models.skip_without_kernel(method)
    monkeypatch.setitem(models.SIZES, "hidden_size", 256)
    monkeypatch.setitem(models.SIZES, "intermediate_size", 256)
    model = models.quantized(models.write("llama", tmp_path / "model"), method)
    _, loaded = engine_vllm.load(model)
    assert found(loaded) == expected(model)


def other(model):
    """The same model with keys and values twice as large, beside it."""
    from safetensors.torch import load_file, save_file

    folder = model.with_name("other")
    shutil.copytree(model, folder)
    twice = ("k_proj.weight", "v_proj.weight", "c_attn.weight")
    weights = {name: tensor * 2 if name.endswith(twice) else tensor for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "gemma3_text", "phi3"])
def test_a_reload_has_the_scales_of_its_weights(family, tmp_path):
    from vllm.model_executor.model_loader.reload.inplace import reload_weights
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    model = models.write(family, tmp_path / family)
    again = other(model)
    assert expected(again) != expected(model) or family == "phi3"
    config, loaded = engine_vllm.load(model)
    places = [layer._k_scale.data_ptr() for layer in engine_vllm.attention(loaded)]
    with set_current_vllm_config(config), torch.no_grad():
        reload_weights(config, loaded, None, str(again), True)
        assert found(loaded) == expected(again)
        # verl and NeMo-RL process a second time: vLLM alone sets 1.0 then.
        process_weights_after_loading(loaded, config.model_config, torch.device("cpu"))
    assert found(loaded) == expected(again)
    assert [layer._k_scale.data_ptr() for layer in engine_vllm.attention(loaded)] == places


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
def test_the_calls_of_a_refit_of_nemo_rl(family, tmp_path, monkeypatch):
    """As its vLLM workers make them: `load_weights` with views of a buffer that is used again, then the model is processed, and processed
    once more where its cache is in FP8.
    """
    from safetensors.torch import load_file
    from vllm.model_executor.layers import utils as layer_utils
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    model = models.write(family, tmp_path / family)
    again = other(model)
    # The CPU build packs weights away when they are loaded; a GPU keeps them.
    monkeypatch.setattr(layer_utils, "dispatch_cpu_unquantized_gemm", lambda *arguments, **more: None)
    config, loaded = engine_vllm.load(model)
    assert found(loaded) == expected(model) != expected(again)
    weights = list(load_file(again / "model.safetensors").items())
    buffer = torch.empty(max(tensor.nbytes for _, tensor in weights) * 4, dtype=torch.uint8)
    with set_current_vllm_config(config), torch.no_grad():
        for at in range(0, len(weights), 3):
            bucket, start = [], 0
            for name, tensor in weights[at : at + 3]:
                view = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                view.copy_(tensor)
                bucket.append((name, view))
                start += -(-tensor.nbytes // 512) * 512
            loaded.load_weights(bucket)
            buffer.fill_(0xFF)
        for _ in range(2):
            process_weights_after_loading(loaded, config.model_config, torch.device("cpu"))
            assert found(loaded) == expected(again)


def test_waking_restores_the_scales(tmp_path, monkeypatch):
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales

    class Worker:
        """vLLM 0.26 sets scales to 1.0 when it wakes."""

        def wake_up(self, tags=None):
            for layer in engine_vllm.attention(self.model):
                set_default_quant_scales(layer)
            return "awake"

    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_worker", types.SimpleNamespace(Worker=Worker))
    model = models.write("llama", tmp_path / "llama")
    worker = Worker()
    _, worker.model = engine_vllm.load(model)
    assert worker.wake_up(tags=["weights"]) == "awake"
    assert found(worker.model) == expected(model)


def test_the_plugin_replaces_scales_of_a_file(tmp_path):
    model = models.write("llama", tmp_path / "llama")
    sigmascale.export(model, tmp_path / "out", "vllm", per_head=True)
    _, loaded = engine_vllm.load(tmp_path / "out")
    rows = [[[up_to_bf16(x) for x in layer[f"{o}_descale"]] for o in "qkv"] for layer in sigmascale.calibrate(model)["layers"]]
    assert [list(engine_vllm.scales(layer).values()) for layer in engine_vllm.attention(loaded)] == rows


@pytest.mark.parametrize(
    ("family", "arguments", "why"),
    [
        ("olmo2", {}, "values have no bound"),
        ("llama", {"enable_lora": True}, "LoRA"),
    ],
)
def test_what_cannot_be_bounded_is_left_alone(family, arguments, why, tmp_path, log, monkeypatch):
    monkeypatch.setitem(models.CONFIGS, "olmo2", lambda t: t.Olmo2Config(**models.SIZES))
    model = models.write(family, tmp_path / family)
    _, loaded = engine_vllm.load(model, **arguments)
    assert all(engine_vllm.scales(layer) == {operand: [1.0] for operand in "qkv"} for layer in engine_vllm.attention(loaded))
    ((level, line),) = log
    assert level == logging.ERROR and why in line


def test_without_an_fp8_cache_nothing_is_done(tmp_path, log):
    _, loaded = engine_vllm.load(models.write("llama", tmp_path / "llama"), kv_cache_dtype="auto")
    assert all(engine_vllm.scales(layer)["k"] == [1.0] for layer in engine_vllm.attention(loaded)) and not log


def in_processes(folder, ranks, **environment):
    """The scales of each rank."""
    port = str(engine_vllm.free_port())
    environment = os.environ | {"VLLM_DIST_IDENT": f"sigmascale{port}"} | environment
    command = lambda rank: [sys.executable, __file__, str(folder), str(rank), str(ranks), port]
    running = [subprocess.Popen(command(rank), env=environment, stdout=subprocess.PIPE, text=True) for rank in range(ranks)]
    return [json.loads(process.communicate()[0].splitlines()[-1]) for process in running]


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "phi3", "deepseek_v3"])
def test_a_rank_has_the_scales_of_its_heads(family, tmp_path):
    model = models.write(family, tmp_path / family)
    heads = len(sigmascale.calibrate(model)["layers"][0]["k_descale"]) // 2
    ranks = in_processes(model, 2)
    assert ranks == [expected(model, slice(0, heads)), expected(model, slice(heads, None))]


def test_it_can_be_turned_off(tmp_path):
    (rows,) = in_processes(models.write("llama", tmp_path / "llama"), 1, SIGMASCALE_PLUGIN="0")
    assert rows == [{operand: [1.0] for operand in "qkv"}] * 2


if __name__ == "__main__":
    folder, rank, ranks, port = sys.argv[1], *map(int, sys.argv[2:])
    _, loaded = engine_vllm.load(folder, rank=rank, ranks=ranks, port=port)
    print("\n" + json.dumps([engine_vllm.scales(layer) for layer in engine_vllm.attention(loaded)]), flush=True)
    os._exit(0)
