"""Exports, audits and streamed scales: what the command gives, and the forms that weight syncs take."""

import json
import pathlib
import types

import numpy as np
import pytest

import sigmascale
from sigmascale import rl

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = ROOT / "data" / "tiny-llama"
OLMO2 = {"model_type": "olmo2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "rope_theta": 10000.0}


ADAPTER = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def tensors(folder=MODEL):
    """Every tensor of a folder: names, and bfloat16 arrays."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for file in sorted(pathlib.Path(folder).glob("model-0*.safetensors")):
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, info in header.items():
            assert info["dtype"] == "BF16"
            start, end = (8 + length + offset for offset in info["data_offsets"])
            yield name, np.frombuffer(data[start:end], ml_dtypes.bfloat16).reshape(info["shape"])


def test_an_export_is_safe_by_its_audit(tmp_path):
    said = sigmascale.export(MODEL, tmp_path / "out", "vllm")
    assert said["safe"] and "for vllm: 6 layers, safe" in repr(said)
    audit = sigmascale.verify(tmp_path / "out")
    assert audit["engine"] == "vllm" and audit["safe"] and len(audit["others"]) == 3
    assert "vllm: safe" in repr(audit)
    only = sigmascale.verify(tmp_path / "out", "sglang")
    assert only["engine"] == "sglang" and "others" not in only
    # Read again, it gives the same.
    assert sigmascale.calibrate(tmp_path / "out")["layers"] == sigmascale.calibrate(MODEL)["layers"]
    (tmp_path / "out" / "model-attention-scales.safetensors").unlink()
    with pytest.raises(sigmascale.FormatError, match="missing"):
        sigmascale.verify(tmp_path / "out")


def _small(kind):
    """A small model with weights that make its layers differ."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = dict(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
        vocab_size=256, max_position_embeddings=256,
    )
    experts = dict(num_experts_per_tok=2, num_local_experts=4)
    configs = {
        "qwen3": lambda t: t.Qwen3Config(**sizes, head_dim=16),
        "qwen3_moe": lambda t: t.Qwen3MoeConfig(
            **sizes, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, mlp_only_layers=[1]
        ),
        "mixtral": lambda t: t.MixtralConfig(**sizes, **experts),
        "gemma2": lambda t: t.Gemma2Config(**sizes, head_dim=16, query_pre_attn_scalar=16),
        "gemma3_text": lambda t: t.Gemma3TextConfig(**sizes, head_dim=16, query_pre_attn_scalar=16, sliding_window=8),
        # Small q and k: what their norms add to the mean square counts.
        "olmo2": lambda t: t.Olmo2Config(**sizes, rms_norm_eps=1e-3),
    }
    torch.manual_seed(0)
    config = configs[kind](transformers)
    config.dtype = torch.float32
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, std=0.2) if weight.ndim > 1 else torch.nn.init.normal_(weight, 0.2, 0.1)
    return model


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "mixtral", "gemma2", "gemma3_text", "olmo2"])
def test_a_text_reaches_what_it_reaches_in_transformers(kind, tmp_path, monkeypatch):
    model = _small(kind)
    import torch

    model.save_pretrained(tmp_path / "model")
    ids = [(7 * at * at + 3) % 256 for at in range(48)]
    (tmp_path / "ids.json").write_text(json.dumps(ids))
    seen = []
    module = __import__("sys").modules[type(model).__module__]
    eager = module.eager_attention_forward

    def spy(layer, q, k, v, *arguments, **named):
        seen.append([float(x.abs().max()) for x in (q, k, v)])
        return eager(layer, q, k, v, *arguments, **named)

    monkeypatch.setattr(module, "eager_attention_forward", spy)
    with torch.no_grad():
        model(torch.tensor([ids]))
    audit = sigmascale.verify(tmp_path / "model", "vllm", tokens=tmp_path / "ids.json", seq_len=len(ids))
    observed = audit["observed"]
    assert (observed["sequences"], observed["seq_len"], observed["tokens"]["tokens"]) == (1, 48, 48)
    reached = [[layer[letter] for letter in "qkv"] for layer in observed["layers"]]
    np.testing.assert_allclose(reached, seen, rtol=1e-4)
    for layer, row in zip(audit["layers"], reached):
        for letter, value in zip("qkv", row):
            needed = layer[letter][0]["needed"]
            assert needed is None or value <= needed * 448, (layer["layer"], letter)
    with pytest.raises(sigmascale.ArgumentError, match="seq_len"):
        sigmascale.verify(tmp_path / "model", seq_len=4)


def test_layers_can_be_kept_out_of_the_cache(tmp_path):
    said = sigmascale.export(MODEL, tmp_path / "out", "vllm", skip_layers=[1, 4], context=4096)
    assert said["command"].endswith("--max-model-len 4096 --kv-cache-dtype-skip-layers 1 4")
    assert [layer["layer"] for layer in said["layers"] if layer["kept"]] == [1, 4]
    assert not sigmascale.verify(tmp_path / "out", "vllm")["safe"]
    audit = sigmascale.verify(tmp_path / "out", "vllm", skip_layers=[1, 4])
    assert audit["safe"] and audit["outcome"] == "safe" and audit["unjudged"] == []
    assert audit["layers"][4]["k"][0]["scale"] is None and audit["serving"]["skip"]["numbers"] == [1, 4]


@pytest.mark.parametrize(
    ("kind", "message", "work"),
    [
        (sigmascale.ArgumentError, "expected one of vllm", lambda to: sigmascale.export(MODEL, to, "llama.cpp")),
        (sigmascale.ArgumentError, "only vLLM reads", lambda to: sigmascale.export(MODEL, to, "sglang", per_head=True)),
        (sigmascale.ArgumentError, "has none", lambda to: sigmascale.export("mistral-7b", to, "vllm")),
        (sigmascale.ArgumentError, "already exists", lambda to: sigmascale.export(MODEL, ROOT / "docs", "vllm")),
        (TypeError, "per_head", lambda to: sigmascale.export(MODEL, to, "vllm", per_head=1)),
        (sigmascale.ArgumentError, "TensorRT-LLM reads no scales", lambda to: sigmascale.export(MODEL, to, "trtllm")),
        (sigmascale.ArgumentError, "sliding_window", lambda to: sigmascale.export(MODEL, to, "vllm", skip_layers=["x"])),
        (sigmascale.ArgumentError, "no layer", lambda to: sigmascale.verify(MODEL, "vllm", skip_layers=[6])),
        (sigmascale.ArgumentError, "only vLLM", lambda to: sigmascale.verify(MODEL, "sglang", skip_layers=[1])),
        (sigmascale.ArgumentError, "expected a list", lambda to: sigmascale.verify(MODEL, skip_layers="1")),
        (sigmascale.ArgumentError, "context", lambda to: sigmascale.verify(MODEL, context=0)),
        (FileNotFoundError, "no-such", lambda to: sigmascale.verify("no-such-folder")),
        (sigmascale.UnsupportedError, "bloom", lambda to: sigmascale.ScaleStream({"model_type": "bloom"})),
        (TypeError, "name must be a str", lambda to: sigmascale.ScaleStream(MODEL).push(3, np.zeros(2))),
        (sigmascale.ArgumentError, "3 ranks cannot share 4 query", lambda to: sigmascale.ScaleStream(MODEL, ranks=3)),
        (sigmascale.ArgumentError, "ranks 0", lambda to: sigmascale.ScaleStream(MODEL, ranks=0)),
        (sigmascale.UnsupportedError, "merge it", lambda to: sigmascale.ScaleStream(MODEL).push(ADAPTER, np.zeros((4, 4)))),
        (TypeError, "in_use", lambda to: rl.must_flush(None, {})),
        (sigmascale.ArgumentError, "NVFP4", lambda to: sigmascale.verify(MODEL, "sglang", kv="nvfp4")),
        (sigmascale.ArgumentError, "cache type", lambda to: sigmascale.verify(MODEL, kv="int8")),
        (sigmascale.FormatError, "regular file", lambda to: sigmascale.ScaleStream("/dev/zero")),
        (sigmascale.UnsupportedError, "over all heads together", lambda to: sigmascale.ScaleStream(OLMO2, ranks=2)),
    ],
)
def test_what_is_refused(kind, message, work, tmp_path):
    with pytest.raises(kind, match=message):
        work(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_stream_is_a_calibration():
    weights = list(tensors())
    expected = sigmascale.calibrate(MODEL)["layers"]
    stream = sigmascale.ScaleStream(MODEL)
    for seed in range(3):
        np.random.default_rng(seed).shuffle(weights)
        passed = list(stream.through(iter(weights)))
        assert [name for name, _ in passed] == [name for name, _ in weights] and stream.held_bytes == 0
        for layer in expected:
            found = stream.layers[layer["layer"]]
            for operand in "qkv":
                assert found[operand] == layer[f"{operand}_descale"]
                scale = found["scale"][operand]
                assert max(found[operand]) <= scale <= max(found[operand]) * 1.01
    with pytest.raises(sigmascale.MismatchError, match="are missing"):
        stream.push(*weights[0])
        stream.finish()


def test_a_sync_layer_by_layer_holds_one_layer():
    weights = sorted(tensors())
    stream = sigmascale.ScaleStream(MODEL)
    most = 0
    for name, tensor in weights:
        stream.push(name, tensor)
        most = max(most, stream.held_bytes)
    names = [f"model.layers.0.{name}.weight" for name in ("input_layernorm", *(f"self_attn.{x}_proj" for x in "qkv"))]
    assert most <= sum(tensor.nbytes for name, tensor in weights if name in names)


def test_the_form_of_nemo_rl():
    found = rl.nemo_rl(tensors(), MODEL)["layers"]
    assert len(found) == 18
    said = {layer["layer"]: layer for layer in sigmascale.calibrate(MODEL)["layers"]}
    for i in range(6):
        # The keys under which its workers look.
        for name, key in [("attn.q_scale", "q"), ("k_scale", "k"), ("v_scale", "v")]:
            value = found[f"model.layers.{i}.self_attn.{name}"]
            least = max(said[i][f"{key}_descale"])
            assert least <= value <= least * 1.01
    assert len(rl.nemo_rl(tensors(), MODEL, include_q=False)["layers"]) == 12


def test_scales_ride_with_the_weights():
    weights = list(tensors())
    sent = list(rl.with_scales(iter(weights), MODEL))
    scales = {name: tensor for name, tensor in sent if name.endswith("_scale")}
    assert [name for name, _ in sent if not name.endswith("_scale")] == [name for name, _ in weights]
    assert len(scales) == 18 and all(tensor.shape == (1,) and tensor.dtype == np.float32 for tensor in scales.values())
    # Chunks of three, as buckets come; SGLang has no q.
    chunks = [weights[at : at + 3] for at in range(0, len(weights), 3)]
    sent = list(rl.chunks_with_scales(iter(chunks), MODEL))
    assert len(sent) == len(chunks)
    inside = dict(pair for chunk in sent for pair in chunk if pair[0].endswith("_scale"))
    assert len(inside) == 12 and inside.keys() < scales.keys()
    assert all(inside[name] == scales[name] for name in inside)


class Buffer:
    """One value in place, as a tensor has it."""

    def __init__(self):
        self.value = 1.0
        self.data = self

    def fill_(self, value):
        self.value = value


class Engine:
    """The modules of an engine's model."""

    def __init__(self, count, make):
        self.modules = [(f"model.layers.{i}.self_attn.attn", make()) for i in range(count)]

    def named_modules(self):
        return iter([("model", types.SimpleNamespace()), *self.modules])


def test_scales_are_set_in_a_loaded_engine():
    stream = sigmascale.ScaleStream(MODEL)
    list(stream.through(tensors()))
    names = [f"_{operand}_scale" for operand in "qkv"] + ["_k_scale_cpu", "_v_scale_cpu"]
    vllm = Engine(6, lambda: types.SimpleNamespace(**{name: Buffer() for name in names}))
    before = [module._k_scale for _, module in vllm.modules]
    rl.fill_vllm(vllm, stream.layers)
    for (_, module), buffer, layer in zip(vllm.modules, before, stream.layers.values()):
        scale = layer["scale"]
        assert module._k_scale is buffer and buffer.value == module._k_scale_float == module._k_scale_cpu.value == scale["k"]
        assert module._q_scale.value == scale["q"] and module._v_scale_cpu.value == scale["v"]
    sglang = Engine(6, lambda: types.SimpleNamespace(k_scale=Buffer(), v_scale=Buffer(), k_scale_float=1.0, v_scale_float=1.0))
    rl.fill_sglang(sglang, stream.layers)
    assert sglang.modules[3][1].v_scale_float == sglang.modules[3][1].v_scale.value == stream.layers[3]["scale"]["v"]
    with pytest.raises(KeyError, match="5 attention modules"):
        rl.fill_vllm(Engine(5, lambda: types.SimpleNamespace(**{name: Buffer() for name in names})), stream.layers)


def test_a_cache_is_kept_while_no_bound_grows():
    def scales(factor):
        stream = sigmascale.ScaleStream(MODEL)
        grown = lambda name, x: (x.astype(np.float32) * factor).astype(x.dtype) if "layers.2.self_attn.k_proj" in name else x
        list(stream.through((name, grown(name, tensor)) for name, tensor in tensors()))
        return stream.layers

    start = scales(1.0)
    assert not rl.must_flush(start, scales(1.0))
    assert not rl.must_flush(start, scales(0.5))
    assert rl.must_flush(start, scales(2.0))


@pytest.mark.parametrize("name", ["sync_nemo_rl", "sync_engines"])
def test_examples_run(name, tmp_path, monkeypatch):
    pytest.importorskip("ml_dtypes")
    monkeypatch.chdir(ROOT)
    code = (ROOT / "python" / "examples" / f"{name}.py").read_text()
    exec(compile(code, name, "exec"), {"__name__": "__main__"})
