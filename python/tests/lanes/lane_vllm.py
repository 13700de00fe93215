"""Exports through vLLM's own loader, on the CPU: every scale that its attention layers would be given.

    pytest python/tests/lanes/lane_vllm.py

needs vLLM 0.32 (its CPU build is enough), transformers and this package. No forward pass is made: a kernel that does not read a
scale is not found here. One engine per process: run the lanes of two engines apart.
"""

import json
import socket

import pytest

vllm = pytest.importorskip("vllm", reason="vLLM is not installed")

import models  # noqa: E402
import torch  # noqa: E402

import sigmascale  # noqa: E402


@pytest.fixture(scope="module")
def ready():
    """The process groups that a model is loaded under."""
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    def prepare():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        init_distributed_environment(1, 0, address, 0, backend="gloo")
        initialize_model_parallel(1, 1)

    done = []

    def once():
        if not done:
            prepare()
            done.append(True)

    return once


def loaded(folder, ready, dtype="bfloat16"):
    """``{layer: {operand: [scales]}}`` of a folder, as the engine resolves it."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.model_loader import get_model_loader

    arguments = {"skip_tokenizer_init": True, "dtype": dtype, "enforce_eager": True, "max_model_len": 128}
    config = EngineArgs(model=str(folder), tokenizer=str(folder), kv_cache_dtype="fp8", **arguments).create_engine_config()
    found = {}
    with set_current_vllm_config(config), torch.no_grad():
        ready()
        model = get_model_loader(config.load_config).load_model(vllm_config=config, model_config=config.model_config)
        layers = list(config.compilation_config.static_forward_context.values())
        for layer in [layer for layer in layers if isinstance(layer, Attention)]:
            number = next(int(part) for part in layer.layer_name.split(".") if part.isdigit())
            assert layer.kv_cache_dtype == "fp8"
            scales = {operand: getattr(layer, f"_{operand}_scale").float().flatten().tolist() for operand in "qkv"}
            for operand, values in scales.items():
                assert getattr(layer, f"_{operand}_scale_float") == max(values), "the host's copy differs"
            found[number] = scales
        del model
    return found


def check(folder, ready, said):
    found = loaded(folder, ready)
    assert sorted(found) == [layer["layer"] for layer in said["layers"]]
    audit = sigmascale.verify(folder, "vllm")
    assert audit["safe"]
    for layer in audit["layers"]:
        for operand in "qkv":
            needed = [entry["needed"] for entry in layer[operand]]
            place = f"layer {layer['layer']} {operand}"
            models.within(found[layer["layer"]][operand], needed, place)
            # The audit says what the loader does.
            assert found[layer["layer"]][operand] == [pytest.approx(entry["scale"], rel=0) for entry in layer[operand]]


@pytest.mark.parametrize("family", models.CONFIGS)
def test_every_scale_arrives(family, tmp_path, ready):
    model = models.write(family, tmp_path / family)
    check(tmp_path / "out", ready, sigmascale.export(model, tmp_path / "out", "vllm"))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_per_head_scales_arrive(family, tmp_path, ready):
    model = models.write(family, tmp_path / family)
    check(tmp_path / "out", ready, sigmascale.export(model, tmp_path / "out", "vllm", per_head=True))


def quantized(folder, method):
    """The weights of the projections in E4M3, with the config that says so."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        if method == "fp8":
            rows, columns = weights[name].shape
            weights[name + "_scale_inv"] = torch.full((-(-rows // 128), -(-columns // 128)), 0.01)
        else:
            weights[name + "_scale"] = torch.full((weights[name].shape[0], 1), 0.01)
        weights[name] = (weights[name].float() / 0.01).clamp(-448, 448).to(torch.float8_e4m3fn)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    arguments = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": arguments | {"strategy": "channel", "dynamic": False},
        "input_activations": arguments | {"strategy": "token", "dynamic": True},
    }
    said = {
        "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"},
        "compressed-tensors": {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        },
    }[method]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return folder


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
def test_scales_beside_fp8_weights_arrive(method, tmp_path, ready, monkeypatch):
    monkeypatch.setitem(models.SIZES, "hidden_size", 256)
    monkeypatch.setitem(models.SIZES, "intermediate_size", 256)
    model = quantized(models.write("llama", tmp_path / "model"), method)
    check(tmp_path / "out", ready, sigmascale.export(model, tmp_path / "out", "vllm"))
