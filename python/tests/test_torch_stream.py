"""Scales of tensors that arrive on a device, and the forms of weight syncs over PyTorch tensors.

The device is the CPU here: its scale engine has the interface of the CUDA engine. `test_gpu_stream.py` runs the same on a GPU.
"""

import dataclasses
import importlib.util
import pathlib
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import sigmascale  # noqa: E402
from sigmascale import _serving, rl  # noqa: E402
from sigmascale.torch import _host, _stream  # noqa: E402

SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 32}
# Plain, biased, normed q and k, gains of 1 + g, LayerNorm with fused and transposed projections, interleaved heads, and
# layers of equal shapes of which some grow their queries and others rotate.
MODELS = {
    "llama": lambda t: t.LlamaConfig(**SIZES, num_key_value_heads=2),
    "qwen2": lambda t: t.Qwen2Config(**SIZES, num_key_value_heads=2),
    "qwen3": lambda t: t.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16),
    "gemma3_text": lambda t: t.Gemma3TextConfig(**SIZES, num_key_value_heads=2, head_dim=16),
    "olmo2": lambda t: t.Olmo2Config(**SIZES, num_key_value_heads=2),
    "gpt2": lambda t: t.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=32, n_positions=64),
    "gpt_neox": lambda t: t.GPTNeoXConfig(**SIZES),
    "llama4_text": lambda t: t.Llama4TextConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        intermediate_size_mlp=64,
        moe_layers=[],
        use_qk_norm=False,
        no_rope_layer_interval=2,
        attn_temperature_tuning=True,
        attn_scale=0.5,
        floor_scale=13,
        pad_token_id=0,
    ),
}


def written(family, folder, seed=0):
    torch.manual_seed(seed)
    config = MODELS[family](transformers)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, 0.0 if weight.ndim > 1 else 1.0, 0.2)
    model.save_pretrained(folder)
    from safetensors.torch import load_file

    return list(load_file(folder / "model.safetensors").items())


@pytest.fixture
def on_device(monkeypatch):
    monkeypatch.setattr(_serving, "_DEVICES", ("cpu",))


def check(stream, folder):
    for layer in sigmascale.calibrate(folder)["layers"]:
        found = stream.layers[layer["layer"]]
        for operand in "qkv":
            expected = layer[f"{operand}_descale"]
            if expected is None:
                assert found[operand] is None
                continue
            assert len(found[operand]) == len(expected)
            assert all(1 <= one / least <= 1 + 1e-5 for one, least in zip(found[operand], expected))


@pytest.mark.parametrize("family", MODELS)
def test_a_device_has_the_scales_of_calibrate(family, tmp_path, on_device):
    weights = written(family, tmp_path)
    stream = sigmascale.ScaleStream(tmp_path)
    for seed in range(2):
        order = torch.randperm(len(weights), generator=torch.Generator().manual_seed(seed)).tolist()
        passed = list(stream.through(weights[place] for place in order))
        assert len(passed) == len(weights) and stream._device is not None and stream.held_bytes == 0
        check(stream, tmp_path)
    on_host = sigmascale.ScaleStream(tmp_path, host=True)
    list(on_host.through(weights))
    assert on_host._device is None
    for number, layer in on_host.layers.items():
        # Centers are computed on the host alone.
        assert stream.layers[number].keys() == layer.keys() - {"centered"}
        assert stream.layers[number]["names"] == layer["names"]


def test_layers_in_order_share_one_copy_and_one_engine(tmp_path, on_device):
    weights = sorted(written("llama", tmp_path))
    stream, most = sigmascale.ScaleStream(tmp_path), 0
    for _ in range(2):
        for name, tensor in weights:
            sent = tensor.clone()
            stream.push(name, sent)
            # The sync uses its memory again.
            sent.fill_(100.0)
            most = max(most, stream.held_bytes)
        stream.finish()
        check(stream, tmp_path)
    ((slot,),) = stream._device._free.values()
    assert slot.engine is not None
    # Projections of one layer, and its gain in float32.
    assert most <= (64 + 32 + 32) * 64 * 2 + 64 * 4


def test_a_later_pass_in_another_type_has_an_engine_of_its_own(tmp_path, on_device):
    weights = sorted(written("llama", tmp_path))
    stream = sigmascale.ScaleStream(tmp_path)
    list(stream.through(weights))
    (first,) = stream._device._engines.values()
    # What rounds keys is part of their bounds, so that these have others.
    wide = [(name, tensor.float()) for name, tensor in weights]
    on_host = sigmascale.ScaleStream(tmp_path, host=True)
    list(stream.through(wide)), list(on_host.through(wide))
    (second,) = stream._device._engines.values()
    assert second is not first
    for number, layer in on_host.layers.items():
        for operand in "qkv":
            assert all(1 <= one / least <= 1 + 1e-5 for one, least in zip(stream.layers[number][operand], layer[operand]))


@pytest.fixture
def waits(monkeypatch):
    """How often results were read from the device, each with the number of layers."""
    counted, read = [], _stream.DeviceStream.read

    def counting(self, layers):
        if self._unread:
            counted.append(len(self._unread))
        read(self, layers)

    monkeypatch.setattr(_stream.DeviceStream, "read", counting)
    return counted


def test_a_pass_waits_once(tmp_path, on_device, waits):
    weights = sorted(written("llama", tmp_path))
    stream = sigmascale.ScaleStream(tmp_path)
    for step in range(1, 3):
        done = [layers for pair in weights if (layers := stream.push(*pair))]
        assert [len(layers) for layers in done] == [1, 1, 1] and len(waits) == step - 1
        assert stream.finish() == {layer["layer"]: layer for layers in done for layer in layers} == stream.layers
        assert waits == [3] * step
        check(stream, tmp_path)


def test_a_layer_that_is_looked_at_is_read_with_all_that_are_complete(tmp_path, on_device, waits):
    weights = sorted(written("llama", tmp_path))
    stream, done = sigmascale.ScaleStream(tmp_path), []
    for name, tensor in weights:
        done += [layers] if (layers := stream.push(name, tensor)) else []
        if len(done) == 2 and not waits:
            first, second = done
            assert [layer["layer"] for layer in first] == [0] and waits == [2]
            assert second[0]["layer"] == second[:1][0]["layer"] == 1 and waits == [2]
    assert list(stream.layers) == [0, 1, 2] and waits == [2, 1]
    stream.finish()
    # Scales of a chunk are sent with it, and looked at when all of it was taken.
    waits.clear()
    chunks = list(rl.chunks_with_scales([weights[:15], weights[15:]], tmp_path))
    sent = {name: tensor for chunk in chunks for name, tensor in chunk if name.endswith("_scale")}
    assert len(sent) == 6 and all(tensor.shape == (1,) for tensor in sent.values()) and len(waits) == 2
    for layer in stream.layers.values():
        assert all(sent[layer["names"]["sglang"][x]].item() == np.float32(layer["scale"][x]) for x in "kv")


def test_layers_of_a_pass_before_stay_as_they_were(tmp_path, on_device):
    weights = written("llama", tmp_path)
    for host in (False, True):
        stream = sigmascale.ScaleStream(tmp_path, host=host)
        list(stream.through(weights))
        in_use = stream.layers
        list(stream.through((name, tensor * 2 if "1.self_attn.k_proj" in name else tensor) for name, tensor in weights))
        assert rl.must_flush(in_use, stream.layers) and not rl.must_flush(stream.layers, in_use)


def test_what_a_device_does_not_compute_is_computed_on_the_host(tmp_path, on_device):
    latent = {"model_type": "deepseek_v3", "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2}
    stream = sigmascale.ScaleStream(latent)
    stream.push("model.layers.0.self_attn.q_a_layernorm.weight", torch.ones(1536))
    assert stream._device is None and stream.held_bytes == 4 * 1536
    streams = {"model_type": "qwen4_exp_text", "hidden_size": 64, "hc_count": 3, "layer_types": ["qwen_sparse_attention"]}
    stream = sigmascale.ScaleStream(streams | {"num_attention_heads": 4})
    stream.push("model.layers.0.attn_hyper_connection.hc_norm.weight", torch.zeros(192))
    assert stream._device is None and stream.held_bytes == 4 * 192
    weights = written("llama", tmp_path)
    stream = sigmascale.ScaleStream(tmp_path)
    list(stream.through(weights))
    with pytest.raises(sigmascale.ArgumentError, match="host=True"):
        stream.push("model.layers.0.self_attn.q_proj.weight", weights[0][1].double())


def test_a_tensor_that_comes_twice_is_refused_and_a_new_pass_begins_clean(tmp_path, on_device):
    weights = written("llama", tmp_path)
    stream = sigmascale.ScaleStream(tmp_path)
    first = next(pair for pair in weights if pair[0].endswith("q_proj.weight"))
    stream.push(*first)
    with pytest.raises(sigmascale.FormatError, match="was already passed"):
        stream.push(*first)
    with pytest.raises(sigmascale.MismatchError, match="are missing"):
        stream.finish()


def test_weights_that_are_not_finite_are_refused(tmp_path, on_device):
    weights = dict(written("llama", tmp_path))
    weights["model.layers.1.self_attn.k_proj.weight"][3, 3] = float("nan")
    with pytest.raises(sigmascale.NonFiniteError):
        list(sigmascale.ScaleStream(tmp_path).through(weights.items()))


def test_a_device_reports_weights_that_are_not_finite_when_scales_are_read(tmp_path, on_device, monkeypatch):
    """As a CUDA engine does: a bit in its status, and no exception."""
    made, launch = _host.ScaleEngine.__init__, _host.ScaleEngine.launch

    def with_status(self, *args):
        made(self, *args)
        self.status = torch.zeros(1, dtype=torch.int32)

    def launched(self, *args):
        self.status.zero_()
        try:
            launch(self, *args)
        except sigmascale.NonFiniteError:
            self.status.fill_(1)

    monkeypatch.setattr(_host.ScaleEngine, "__init__", with_status)
    monkeypatch.setattr(_host.ScaleEngine, "launch", launched)
    monkeypatch.setattr(_host.ScaleEngine, "results", lambda self: self._results | {"status": self.status})
    weights = sorted(written("llama", tmp_path))
    broken = {name: tensor.clone() for name, tensor in weights}
    broken["model.layers.1.self_attn.k_proj.weight"][3, 3] = float("nan")
    stream = sigmascale.ScaleStream(tmp_path)
    for pair in broken.items():
        stream.push(*pair)
    # Whenever scales are looked at, until the pass ends.
    for look in (lambda: stream.layers, lambda: stream.layers, stream.finish):
        with pytest.raises(sigmascale.NonFiniteError, match="layer 1: .*finite"):
            look()
    list(stream.through(weights))
    check(stream, tmp_path)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_parameters_are_taken_in_every_grad_mode(mode, tmp_path, on_device):
    weights = written("llama", tmp_path)
    stream = sigmascale.ScaleStream(tmp_path)
    with mode():
        list(stream.through((name, torch.nn.Parameter(tensor.clone())) for name, tensor in weights))
    # What is kept of a pass in one mode is written in another.
    with torch.inference_mode():
        weights = [(name, tensor.clone()) for name, tensor in weights]
    list(stream.through(weights))
    check(stream, tmp_path)


@pytest.mark.parametrize("on", ["cpu", "host"])
def test_a_pipeline_stage_has_its_own_layers(on, tmp_path, monkeypatch):
    monkeypatch.setattr(_serving, "_DEVICES", (on,))
    weights = written("llama", tmp_path)
    stage = [pair for pair in weights if "layers.2." in pair[0]]
    stream = sigmascale.ScaleStream(tmp_path)
    list(stream.through(stage, part=True))
    assert list(stream.layers) == [2]
    for pair in stage:
        if "q_proj" not in pair[0]:
            stream.push(*pair)
    with pytest.raises(sigmascale.MismatchError, match="q_proj"):
        stream.finish(part=True)
    with pytest.raises(sigmascale.MismatchError, match="no tensor"):
        sigmascale.ScaleStream(tmp_path).finish(part=True)
    sent = [pair for chunk in rl.chunks_with_scales([stage], tmp_path, part=True) for pair in chunk]
    assert [name for name, _ in sent if name.endswith("_scale")] == [f"model.layers.2.self_attn.{x}_scale" for x in "kv"]


@dataclasses.dataclass
class WeightChunk:
    """The fields of SkyRL's."""

    names: list
    dtypes: list
    shapes: list
    tensors: list


class Extractor:
    """What SkyRL's extractors do: a chunk a parameter, announced before."""

    chunk = WeightChunk

    def __init__(self, weights):
        self.weights, self.model = weights, "policy"

    def get_weight_metadata(self, dtype):
        names = [name for name, _ in self.weights]
        kind = str(dtype).split(".")[-1]
        return {"names": names, "dtype_names": [kind] * len(names), "shapes": [list(x.shape) for _, x in self.weights]}

    def extract_weights(self, dtype):
        for name, tensor in self.weights:
            yield self.chunk(names=[name], dtypes=[str(dtype)], shapes=[list(tensor.shape)], tensors=[tensor.to(dtype)])


def skyrl_chunk():
    """SkyRL's own, where its package is installed: its file alone, since the package imports much more."""
    package = importlib.util.find_spec("skyrl")
    if package is None:
        pytest.skip("SkyRL is not installed")
    file = pathlib.Path(package.origin).parent / "backends" / "skyrl_train" / "weight_sync" / "base.py"
    spec = importlib.util.spec_from_file_location("skyrl_weight_sync_base", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.WeightChunk


@pytest.mark.parametrize("chunk", [lambda: WeightChunk, skyrl_chunk], ids=["stand-in", "skyrl"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_skyrl_announces_what_it_sends(chunk, family, tmp_path):
    Extractor.chunk = chunk()
    weights = written(family, tmp_path)
    extractor = rl.skyrl(Extractor(weights), tmp_path)
    assert extractor.model == "policy"
    for _ in range(2):
        about = extractor.get_weight_metadata(torch.bfloat16)
        chunks = list(extractor.extract_weights(torch.bfloat16))
        sent = [(name, list(x.shape), x) for chunk in chunks for name, x in zip(chunk.names, chunk.tensors)]
        assert [name for name, *_ in sent] == about["names"] and [shape for _, shape, _ in sent] == about["shapes"]
        assert len(about["dtype_names"]) == len(sent) and all(x.dtype == torch.bfloat16 for *_, x in sent)
        scales = {name: x.item() for name, _, x in sent if name.endswith("_scale")}
        assert len(scales) == 9
        host = sigmascale.ScaleStream(tmp_path)
        list(host.through(weights))
        for layer in host.layers.values():
            for operand in "qkv":
                assert scales[layer["names"]["vllm"][operand]] == np.float32(layer["scale"][operand])


def test_skyrl_in_float16_is_refused_where_a_scale_would_be_rounded(tmp_path):
    weights = [(name, tensor * 1e-5 if "v_proj" in name else tensor) for name, tensor in written("llama", tmp_path)]
    weights = [(name, tensor.float()) for name, tensor in weights]
    with pytest.raises(sigmascale.NonFiniteError, match="sync in bfloat16"):
        list(rl.skyrl(Extractor(weights), tmp_path).extract_weights(torch.float16))


def test_nemo_rl_refuses_names_for_which_it_would_send_one(tmp_path):
    with pytest.raises(sigmascale.UnsupportedError, match="would send 1.0"):
        rl.nemo_rl(written("gpt2", tmp_path), tmp_path)
