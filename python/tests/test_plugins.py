"""Plugins without their engines: a model of fused and sharded modules as vLLM and SGLang build them, whose scales follow its weights."""

import json
import logging
import pathlib
import types

import pytest

torch = pytest.importorskip("torch")

from test_serving import MODEL, tensors  # noqa: E402

import sigmascale  # noqa: E402
from sigmascale._loaded import Followed, up_to_bf16  # noqa: E402


class UnquantizedLinearMethod:
    """Processes a weight as an engine does: leaves it, or packs it away."""

    def __init__(self, packs):
        self.packs = packs

    def process_weights_after_loading(self, layer):
        if self.packs:
            layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)


class Fused(torch.nn.Module):
    """The rows of q, k and v of one rank."""

    def __init__(self, heads, kv_heads, d_head, d_model, ranks, packs):
        super().__init__()
        self.total_num_heads, self.total_num_kv_heads, self.head_size, self.input_size = heads, kv_heads, d_head, d_model
        self.num_heads, self.num_kv_heads = heads // ranks, max(1, kv_heads // ranks)
        self.output_size_per_partition = (self.num_heads + 2 * self.num_kv_heads) * d_head
        self.quant_method = UnquantizedLinearMethod(packs)
        self.make()

    def make(self, bias=False):
        shape = self.output_size_per_partition, self.input_size
        self.weight = torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(shape[:1], dtype=torch.bfloat16), requires_grad=False)


class Norm(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=torch.bfloat16), requires_grad=False)


class Engine(torch.nn.Module):
    """`data/tiny-llama` in an engine, as one of its ranks has it."""

    def __init__(self, rank=0, ranks=1, packs=False):
        super().__init__()
        self.rank, self.config = rank, json.loads((MODEL / "config.json").read_text())
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(6))
        for layer in self.model.layers:
            layer.input_layernorm, layer.self_attn = Norm(256), torch.nn.Module()
            layer.self_attn.qkv_proj = Fused(4, 2, 64, 256, ranks, packs)
            layer.self_attn.attn = torch.nn.Module()

    def load_weights(self, weights):
        for name, tensor in weights:
            parts = name.split(".")
            if "input_layernorm" in name:
                self.get_parameter(name).data.copy_(tensor)
            elif parts[-2] in ("q_proj", "k_proj", "v_proj"):
                linear, role = self.model.layers[int(parts[2])].self_attn.qkv_proj, "qkv".index(parts[-2][0])
                sizes = [linear.num_heads * 64, linear.num_kv_heads * 64, linear.num_kv_heads * 64]
                first, rows = sum(sizes[:role]), sizes[role]
                getattr(linear, parts[-1]).data[first : first + rows] = tensor[self.rank * rows : (self.rank + 1) * rows]

    def process(self):
        for layer in self.model.layers:
            linear = layer.self_attn.qkv_proj
            linear.quant_method.process_weights_after_loading(linear)

    def attention(self):
        return {f"model.layers.{i}.self_attn.attn": layer.self_attn.attn for i, layer in enumerate(self.model.layers)}


def weights(factor=1.0, part="k_proj"):
    """The checkpoint's tensors, some multiplied."""
    for name, array in tensors():
        tensor = torch.tensor(array.astype("float32")).bfloat16()
        yield name, tensor * factor if part in name else tensor


def config_of(content):
    return types.SimpleNamespace(to_json_string=lambda use_diff: json.dumps(content))


class Log:
    def __init__(self):
        self.lines = []

    def info(self, message, *values):
        self.lines.append((logging.INFO, message % values))

    error = lambda self, message, *values: self.lines.append((logging.ERROR, message % values))


def follow(engine, *, kept=False, config=None, **options):
    """An engine with its scales, as ``fill`` sets them, and its log."""
    filled, log = {}, Log()
    fill = lambda layers: filled.update({module: {o: up_to_bf16(max(layer[o])) for o in "qkv"} for module, layer in layers.items()})
    followed = Followed(engine, config_of(config or engine.config), engine.attention(), fill, log, kept, **options)
    return followed, filled, log


def expected(factor=1.0, part="k_proj", heads=slice(None)):
    profile = sigmascale.calibrate(json.loads((MODEL / "config.json").read_text()), weights=dict(weights(factor, part)))
    return [{o: up_to_bf16(max(layer[f"{o}_descale"][heads])) for o in "qkv"} for layer in profile["layers"]]


@pytest.mark.parametrize("packs", [False, True])
def test_scales_are_those_of_calibrate(packs):
    engine = Engine(packs=packs)
    followed, filled, log = follow(engine)
    engine.load_weights(weights())
    assert not filled
    engine.process()
    followed.refresh()
    assert list(filled.values()) == expected()
    assert [level for level, _ in log.lines] == [logging.INFO] and "6 layers from the weights" in log.lines[0][1]
    # Other weights, loaded as an engine loads them again.
    if packs:
        [layer.self_attn.qkv_proj.make() for layer in engine.model.layers]
    engine.load_weights(weights(2.0))
    engine.process()
    followed.refresh()
    assert list(filled.values()) == expected(2.0) and "6 layers changed" in log.lines[-1][1]
    # What the engine resets is set again.
    filled.clear()
    followed.restore(*followed.modules)
    assert list(filled.values()) == expected(2.0)
    # The same weights: scales that others overwrote are set again. Weights that were packed away are not read a second time.
    filled.clear()
    followed.refresh()
    assert list(filled.values()) == ([] if packs else expected(2.0))
    assert any("in a form that is not read" in line for _, line in log.lines) == packs


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_the_scales_of_its_heads(rank):
    engine = Engine(rank=rank, ranks=2)
    followed, filled, _ = follow(engine)
    engine.load_weights(weights())
    engine.process()
    followed.refresh()
    assert list(filled.values()) == expected(heads=slice(rank, rank + 1))
    assert expected(heads=slice(0, 1)) != expected(heads=slice(1, 2))


def test_weights_that_are_only_loaded_are_followed():
    engine = Engine()
    followed, filled, log = follow(engine)
    followed.follow_loading(engine, lambda: False)
    engine.load_weights(weights())
    assert not filled, "before the first processing"
    followed.refresh()
    filled.clear()
    engine.load_weights((name, tensor) for name, tensor in weights(2.0) if ".layers.3." in name)
    assert list(filled.values()) == [expected(2.0)[3]], "the layer that was touched alone"
    # While processing comes later, nothing is computed.
    later = Engine()
    followed, filled, _ = follow(later)
    followed.follow_loading(later, lambda: True)
    followed.refresh()
    filled.clear()
    later.load_weights(weights(2.0))
    assert not filled


def test_captured_graphs_keep_their_scales():
    engine = Engine()
    followed, filled, log = follow(engine, kept=True)
    engine.load_weights(weights())
    followed.refresh()
    first = dict(filled)
    filled.clear()
    engine.load_weights(weights(0.5))
    followed.refresh()
    assert not filled and len(log.lines) == 1
    for _ in range(2):
        engine.load_weights(weights(2.0))
        followed.refresh()
    assert not filled and followed.values.keys() == first.keys()
    assert [line for level, line in log.lines if level == logging.ERROR] == [log.lines[1][1]] and "restart" in log.lines[1][1]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model_type": "bloom"}, "ALiBi"),
        ({"model_type": "unheard-of"}, "unknown model type"),
        ({"model_type": "gpt2", "n_embd": 256, "n_head": 4, "n_layer": 6}, "no layer of the config"),
        ({"attention_bias": True}, "bias"),
        ({"hidden_size": 128, "head_dim": 64}, "shape"),
    ],
)
def test_a_model_that_cannot_be_bounded_is_left_alone(change, why):
    engine = Engine()
    followed, filled, log = follow(engine, config=engine.config | change)
    engine.load_weights(weights())
    for _ in range(3):
        engine.process()
        followed.refresh()
    ((level, line),) = log.lines
    assert level == logging.ERROR and why in line and "Engine" in line and not filled


def test_the_error_says_what_is_served():
    engine = Engine()
    followed, _, log = follow(engine)
    engine.load_weights(weights())
    followed.refresh()
    followed.leave("a reason")
    *_, (level, line) = log.lines
    assert level == logging.ERROR and "served with those of its weights before: a reason" in line
    _, _, log = follow(Engine(), config=engine.config | {"model_type": "bloom"})
    assert "served with 1.0, unless its checkpoint has others: " in log.lines[0][1]


def test_a_strict_plugin_stops_the_engine(monkeypatch):
    monkeypatch.setenv("SIGMASCALE_PLUGIN", "strict")
    with pytest.raises(sigmascale.SigmascaleError, match="ALiBi.*SIGMASCALE_PLUGIN=strict stops the engine"):
        follow(Engine(), config=Engine().config | {"model_type": "bloom"})
    # New weights whose scales cannot be computed, and those that captured graphs do not follow.
    for kept, planted, why in [(False, torch.nan, "has a NaN"), (True, 2.0, "captured graphs")]:
        engine = Engine()
        followed, filled, _ = follow(engine, kept=kept)
        engine.load_weights(weights())
        followed.refresh()
        assert list(filled.values()) == expected()
        engine.load_weights(weights(planted))
        with pytest.raises(sigmascale.SigmascaleError, match=why):
            followed.refresh()


@pytest.mark.parametrize("module", ["vllm", "sglang"])
def test_an_engine_without_a_place_for_the_plugin_goes_on(module, monkeypatch, caplog):
    import importlib

    plugin = importlib.import_module(f"sigmascale.{module}")

    def missing():
        raise ImportError("cannot import name 'Attention'")

    monkeypatch.setattr(plugin, "_hook", missing)
    plugin.register()
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and record.name == f"{module}.plugins.sigmascale"
    assert "served with scales of 1.0" in record.message and "cannot import name 'Attention'" in record.message
    monkeypatch.setenv("SIGMASCALE_PLUGIN", "strict")
    with pytest.raises(sigmascale.SigmascaleError, match="cannot import name"):
        plugin.register()
    monkeypatch.setenv("SIGMASCALE_PLUGIN", "0")
    plugin.register()
    monkeypatch.setenv("SIGMASCALE_PLUGIN", "stric")
    with pytest.raises(sigmascale.ArgumentError, match="expected 0, 1 or strict"):
        plugin.register()


@pytest.mark.parametrize("named", ["deepseek_yarn", "deepseek_llama_scaling"])
def test_a_rotation_that_vllm_renamed_is_yarn(named):
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    config = json.loads((MODEL / "config.json").read_text()) | {"rope_parameters": rope}
    rows = sigmascale.calibrate(config, weights=dict(weights(1.0)))["layers"]
    engine = Engine()
    followed, filled, log = follow(engine, config=config | {"rope_parameters": rope | {"rope_type": named}})
    engine.load_weights(weights())
    engine.process()
    followed.refresh()
    wanted = [{operand: up_to_bf16(max(row[f"{operand}_descale"])) for operand in "qkv"} for row in rows]
    assert list(filled.values()) == wanted != expected(), log.lines


class QuantizesOnline:
    """Keeps a BF16 weight until it has quantized it; how it rounds its inputs is not known."""

    def process_weights_after_loading(self, layer):
        layer.weight = torch.nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)


class Fp8LinearMethod:
    """Has the weight in a form of its own after processing."""

    def process_weights_after_loading(self, layer):
        layer.weight = torch.nn.Parameter(layer.weight.t(), requires_grad=False)


def test_weights_that_are_quantized_while_loading_are_left_alone():
    engine = Engine()
    for layer in engine.model.layers:
        layer.self_attn.qkv_proj.quant_method = QuantizesOnline()
    followed, filled, log = follow(engine)
    engine.load_weights(weights())
    engine.process()
    followed.refresh()
    ((level, line),) = log.lines
    assert level == logging.ERROR and "QuantizesOnline" in line and not filled


@pytest.mark.parametrize("scales", ["tensor", "parts", "channel", "block"])
def test_fp8_weights_are_read_as_they_were_loaded(scales):
    def stored():
        """The checkpoint in E4M3, a scale for each part of a projection."""
        for name, tensor in weights():
            if name.split(".")[-2] not in ("q_proj", "k_proj", "v_proj"):
                yield name, tensor
                continue
            rows, columns = tensor.shape
            shape = {"tensor": (1,), "parts": (1,), "channel": (rows, 1), "block": (rows // 64, columns // 128)}[scales]
            scale = torch.full(shape, 2.0**-9 if scales == "tensor" or "k_proj" not in name else 2.0**-8)
            yield name, (tensor.float() / scale.flatten()[0]).clamp(-448, 448).to(torch.float8_e4m3fn)
            yield f"{name}_scale" + "_inv" * (scales == "block"), scale

    held = dict(stored())
    block = [64, 128] if scales == "block" else None
    quantization = {"quant_method": "fp8", "weight_block_size": block}
    config = json.loads((MODEL / "config.json").read_text()) | {"quantization_config": quantization}
    rows = sigmascale.calibrate(config, weights=held)["layers"]
    engine = Engine()
    for number, layer in enumerate(engine.model.layers):
        linear = layer.self_attn.qkv_proj
        linear.quant_method, linear.weight_block_size = Fp8LinearMethod(), block
        parts = [held[f"model.layers.{number}.self_attn.{role}_proj.weight"] for role in "qkv"]
        linear.weight = torch.nn.Parameter(torch.cat(parts), requires_grad=False)
        suffix = "weight_scale_inv" if scales == "block" else "weight_scale"
        own = [held[f"model.layers.{number}.self_attn.{role}_proj.{suffix}"] for role in "qkv"]
        setattr(linear, suffix, own[0] if scales == "tensor" else torch.cat(own))
    followed, filled, log = follow(engine)
    engine.load_weights(pair for pair in stored() if "norm" in pair[0])
    engine.process()
    followed.refresh()
    assert list(filled.values()) == [{o: up_to_bf16(max(row[f"{o}_descale"])) for o in "qkv"} for row in rows], log.lines


def test_a_missing_norm_is_no_bound():
    engine = Engine()
    for layer in engine.model.layers:
        layer.input_layernorm = torch.nn.Identity()
    followed, filled, log = follow(engine)
    followed.refresh()
    assert not filled and "input_layernorm" in log.lines[0][1]


def biases(sign=1.0, size=100.0):
    """Of k, in its slow pairs, of all but the last layer; of q and v zeros."""
    draw = torch.Generator().manual_seed(0)
    for number in range(6):
        k = torch.zeros(2, 2, 32)
        k[:, :, 24:] = size * torch.randn(2, 2, 8, generator=draw) * (number < 5)
        rows = {"q": torch.zeros(256), "k": sign * k.flatten(), "v": torch.zeros(128)}
        yield from ((f"model.layers.{number}.self_attn.{role}_proj.bias", row.bfloat16()) for role, row in rows.items())


def biased(rank=0, ranks=1, **options):
    """An engine whose keys have a bias; its centers as ``fill`` gets them, by layer."""
    engine = Engine(rank, ranks)
    for layer in engine.model.layers:
        layer.self_attn.qkv_proj.make(bias=True)
    followed, filled, log = follow(engine, config=engine.config | {"attention_bias": True}, **options)
    centers = {}
    fill = followed._fill
    followed._fill = lambda layers: (fill(layers), centers.update({module: layer.get("center") for module, layer in layers.items()}))
    return engine, followed, filled, centers, log


def turned(rows, position):
    """Rotated to a position: of a head's rows of weights, or its bias."""
    theta = 10000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    one, two = rows.double().unflatten(0, (2, 32)).unbind()
    cos, sin = ((f(position * theta)).reshape(-1, *[1] * (one.dim() - 1)) for f in (torch.cos, torch.sin))
    return torch.cat([one * cos - two * sin, two * cos + one * sin])


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2)])
def test_keys_are_centered_where_a_bias_is_large(rank, ranks):
    context = Engine().config["max_position_embeddings"]
    engine, followed, filled, centers, log = biased(rank, ranks, center="auto", context=context)
    engine.load_weights([*weights(), *biases()])
    followed.refresh()
    assert [level for level, _ in log.lines] == [logging.INFO] * 2 and "in 5 of 6 layers" in log.lines[0][1]
    *rows, last = centers.values()
    assert last is None
    loaded, constants, scales = dict(weights()), dict(biases()), [row["k"] for row in filled.values()]
    for number, layer in enumerate(rows):
        stem = f"model.layers.{number}"
        gain = loaded[f"{stem}.input_layernorm.weight"].double()
        for head, center in zip([rank] if ranks == 2 else [0, 1], layer):
            own = slice(64 * head, 64 * head + 64)
            weight = loaded[f"{stem}.self_attn.k_proj.weight"][own].double() * gain
            bias = constants[f"{stem}.self_attn.k_proj.bias"][own]
            center = torch.tensor(center, dtype=torch.float64)
            if center.any():
                mean = sum(turned(bias, t) for t in range(min(2048, context))) / min(2048, context)
                assert torch.allclose(center, mean, rtol=2**-8, atol=1e-6)
            # Inputs that reach the bound, at a few positions.
            for position in (0, 1, 17, context - 1):
                reach = 16.0 * turned(weight, position).norm(dim=1) + (turned(bias, position) - center).abs()
                assert reach.max() <= 448 * scales[number]
    # What is left is smaller.
    _, plain, uncentered, _, _ = without = biased(rank, ranks)
    without[0].load_weights([*weights(), *biases()])
    plain.refresh()
    assert all(one["k"] < 0.7 * other["k"] for one, other in zip(filled.values(), list(uncentered.values())[:5]))
    assert [row["v"] for row in filled.values()] == [row["v"] for row in uncentered.values()]


def test_centers_stay_when_weights_change():
    engine, followed, filled, centers, log = biased(center="auto", context=64)
    engine.load_weights([*weights(), *biases()])
    followed.refresh()
    first, before = dict(centers), [row["k"] for row in filled.values()]
    engine.load_weights(biases(-1.0))
    followed.refresh()
    assert list(centers.values()) == list(first.values()) and len(log.lines) == 3
    # The old center and the new bias lie apart.
    _, plain, uncentered, _, _ = without = biased()
    without[0].load_weights([*weights(), *biases(-1.0)])
    plain.refresh()
    after = [row["k"] for row in filled.values()]
    assert all(new > 1.3 * bound["k"] and new > old for new, old, bound in zip(after[:5], before, uncentered.values()))
    engine.load_weights(biases())
    followed.refresh()
    assert [row["k"] for row in filled.values()] == before


@pytest.mark.parametrize(
    ("options", "size", "why"),
    [
        ({"center": "off"}, 100.0, None),
        ({"center": "auto"}, 0.001, None),
        ({"center": "auto"}, 0.0, None),
        ({"center": "its softmax has sinks"}, 100.0, "not centered: its softmax has sinks"),
        ({"center": "auto", "context": 1 << 20}, 100.0, "and the engine takes sequences of 1048576"),
    ],
)
def test_keys_that_are_left_as_they_are(options, size, why):
    engine, followed, filled, centers, log = biased(**options)
    engine.load_weights([*weights(), *biases(size=size)])
    followed.refresh()
    rows = sigmascale.calibrate(engine.config | {"attention_bias": True}, weights=dict([*weights(), *biases(size=size)]))["layers"]
    assert list(filled.values()) == [{o: up_to_bf16(max(row[f"{o}_descale"])) for o in "qkv"} for row in rows]
    assert set(centers.values()) == {None}
    assert [why in line for _, line in log.lines[:-1]] == [True] * (why is not None)


@pytest.mark.parametrize("center", ["auto", "weights"])
def test_a_bias_below_the_least_is_centered_when_asked(center, monkeypatch):
    # This one has 45 % of the bound of k.
    monkeypatch.setattr("sigmascale._loaded._LEAST_BIAS", 0.5)
    engine, followed, _, centers, _ = biased(center=center)
    engine.load_weights([*weights(), *biases(size=2.0)])
    followed.refresh()
    assert any(row is not None for row in centers.values()) == (center == "weights")


def test_the_word_for_centers(monkeypatch):
    from sigmascale._loaded import center_mode

    for value, mode in [("", "auto"), ("auto", "auto"), ("OFF", "off"), ("weights", "weights")]:
        monkeypatch.setenv("SIGMASCALE_CENTER", value)
        assert center_mode() == mode
    monkeypatch.setenv("SIGMASCALE_CENTER", "data")
    with pytest.raises(sigmascale.ArgumentError, match="SIGMASCALE_CENTER is 'data': expected auto, off or weights"):
        center_mode()


@pytest.mark.parametrize("value", [1.0, 0.1, 3.0e-4, 447.9, 1.5])
def test_scales_are_rounded_up(value):
    up = up_to_bf16(value)
    assert up == torch.tensor(up).bfloat16().item() and value <= up <= value * (1 + 2**-7)
    assert up_to_bf16(up) == up


def test_the_entry_points_are_declared():
    import tomllib

    project = tomllib.loads((pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    for group, module in [("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")]:
        assert project["entry-points"][group] == {"sigmascale": f"sigmascale.{module}:register"}
        assert module in project["optional-dependencies"]
