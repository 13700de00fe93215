"""The package under a caller's defaults: another default type or device, inference mode. Results are the same bits.

Serving engines build and load models under ``torch.set_default_dtype(bfloat16)``. What each source line allocates is read by
`test_allocations.py`; this finds what arithmetic makes of the defaults, and tensors of one mode that are written in another.
"""

import contextlib
import sys
import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from recorded import batch, model  # noqa: E402
from test_plugins import MODEL, Engine, expected, follow, weights  # noqa: E402

import sigmascale  # noqa: E402
import sigmascale.torch as fp8  # noqa: E402
from sigmascale import _serving, rl, sglang, vllm  # noqa: E402
from sigmascale.torch import _policies, _samples, _terms, te  # noqa: E402


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


DEFAULTS = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: default_device("meta"),
    "in torch.device": lambda: torch.device("meta"),
}
MODES = DEFAULTS | {"inference mode": torch.inference_mode}
under_defaults = pytest.mark.parametrize("within", DEFAULTS.values(), ids=DEFAULTS)
in_every_mode = pytest.mark.parametrize("within", MODES.values(), ids=MODES)


def same(one, other):
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape)
        # As bytes: NaN is equal to itself.
        assert torch.equal(*(x.detach().contiguous().view(torch.uint8) for x in (one, other)))
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        [same(one[key], other[key]) for key in one]
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        [same(*pair) for pair in zip(one, other)]
    else:
        assert repr(one) == repr(other)


def operands(batch=2, length=40, heads=(4, 2), d=16):
    generator = torch.Generator("cpu").manual_seed(3)
    make = lambda n: torch.randn(batch, length, n, d, generator=generator, dtype=torch.float32, device="cpu").bfloat16()
    return make(heads[0]), make(heads[1]), make(heads[1])


# -- Streams and plugins


@pytest.mark.parametrize("on", ["cpu", "host"])
@in_every_mode
def test_a_stream_has_its_scales(on, within, monkeypatch):
    monkeypatch.setattr(_serving, "_DEVICES", (on,))
    read = lambda: list(weights())
    plain, stream = sigmascale.ScaleStream(MODEL), None
    list(plain.through(read()))
    tensors = read()
    with within():
        stream = sigmascale.ScaleStream(MODEL)
        passed = list(stream.through(tensors))
    assert len(passed) == len(tensors) and (stream._device is not None) == (on == "cpu")
    assert stream.layers == plain.layers
    # A later sync, outside.
    list(stream.through(read()))
    assert stream.layers == plain.layers


@pytest.mark.parametrize("first", ["cpu", "meta"])
def test_tensors_without_values_are_refused(first, monkeypatch):
    monkeypatch.setattr(_serving, "_DEVICES", ("cpu",))
    stream, pairs = sigmascale.ScaleStream(MODEL), [(n, x) for n, x in weights() if n.startswith("model.layers.0.self_attn.")]
    if first == "cpu":
        stream.push(*pairs.pop())
    with pytest.raises(sigmascale.ArgumentError, match="on the meta device and has no values"):
        stream.push(pairs[0][0], pairs[0][1].to("meta"))


@in_every_mode
def test_a_plugin_has_the_scales_of_calibrate(within, monkeypatch):
    monkeypatch.setattr(_serving, "_DEVICES", ("cpu",))
    engine, tensors, want = Engine(), list(weights()), expected()
    # Scales in a device's stream may be the next float above those of the host.
    near = lambda rows: all(1 <= row[o] / least[o] <= 1.008 for row, least in zip(rows, want) for o in "qkv")
    with within():
        followed, filled, log = follow(engine)
        engine.load_weights(tensors)
        engine.process()
        followed.refresh()
    assert len(filled) == 6 and near(filled.values()), log.lines
    filled.clear()
    with within():
        followed.restore(*followed.modules)
    assert near(filled.values())


LAYER = {"layer": 0, "q": [0.3, 0.7], "k": [0.1, 0.2], "v": [0.5, 0.4]}


def vllm_attention(per_head=False):
    """The scales of an attention module of vLLM."""
    module, count = torch.nn.Module(), 2 if per_head else 1
    for operand in "qkv":
        module.register_buffer(f"_{operand}_scale", torch.ones(count, dtype=torch.float32, device="cpu"))
        setattr(module, f"_{operand}_scale_float", 1.0)
        setattr(module, f"_{operand}_scale_cpu", torch.ones((), dtype=torch.float32, device="cpu"))
    module.impl = types.SimpleNamespace(bmm1_scale=0.3)
    return module


@pytest.fixture
def platform(monkeypatch):
    current = types.SimpleNamespace(is_fp8_fnuz=lambda: False)
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", types.SimpleNamespace(current_platform=current))


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("made", MODES.values(), ids=MODES)
@in_every_mode
def test_vllm_has_its_scales_in_place(within, made, per_head, platform):
    with made():
        module = vllm_attention(per_head)
    address = module._k_scale.data_ptr()
    with within():
        vllm._fill({module: LAYER})
    up = [sigmascale._loaded.up_to_bf16(x) for x in LAYER["k"]]
    assert module._k_scale.tolist() == (up if per_head else [max(up)]) and module._k_scale.data_ptr() == address
    assert module._k_scale_cpu.item() == module._k_scale_float == max(up) and module._k_scale.dtype == torch.float32


@in_every_mode
def test_scales_that_are_parameters_are_written(within, platform):
    """As vLLM has those of a checkpoint with a `kv_cache_scheme`."""
    module = vllm_attention()
    for operand in "qkv":
        name = f"_{operand}_scale"
        delattr(module, name)
        setattr(module, name, torch.nn.Parameter(torch.ones(1, dtype=torch.float32, device="cpu")))
    with within():
        vllm._fill({module: LAYER})
    assert module._k_scale.item() == module._k_scale_float == sigmascale._loaded.up_to_bf16(max(LAYER["k"]))


@pytest.mark.parametrize("made", MODES.values(), ids=MODES)
@in_every_mode
def test_vllm_subtracts_centers_in_their_place(within, made, monkeypatch):
    class Attention(torch.nn.Module):
        _sigmascale_center, head_size, num_kv_heads = None, 2, 2
        forward = lambda self, query, key, value: key

    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.layers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.attention", types.SimpleNamespace(Attention=Attention))
    monkeypatch.setattr(vllm, "_forward", None)
    config = types.SimpleNamespace(additional_config={})
    with made():
        module, other = Attention(), Attention()
        module.register_buffer("_k_scale", torch.ones(1, dtype=torch.float32, device="cpu"))
    with within():
        vllm._center(module, [[1.0, -2.0], [0.5, 256.0]], config)
    place = module._sigmascale_center
    assert place.dtype == torch.float32 and place.device.type == "cpu" and config.additional_config
    keys = torch.tensor([[1.0, 2.0, 3.0, 255.0]] * 3).bfloat16()
    assert module(None, keys, None).flatten(1).tolist() == [[0.0, 4.0, 2.5, -1.0]] * 3
    assert other(None, keys, None) is keys and module(None, None, None) is None
    with pytest.raises(sigmascale.UnsupportedError, match="SIGMASCALE_CENTER=off"):
        module(None, keys.to(torch.float8_e4m3fn), None)
    for rows, left in [([[1.0, 0.0], [0.0, 0.0]], [0.0, 2.0, 3.0, 255.0]), (None, [1.0, 2.0, 3.0, 255.0])]:
        with within():
            vllm._center(module, rows, config)
        assert module._sigmascale_center is place and module(None, keys, None).flatten(1).tolist() == [left] * 3


@pytest.mark.parametrize("made", MODES.values(), ids=MODES)
@in_every_mode
def test_scales_of_a_sync_are_filled_in(within, made):
    with made():
        model = torch.nn.Module()
        model.add_module("layers", torch.nn.ModuleList([vllm_attention()]))
        model.layers[0].layer_name = "model.layers.0.attn"
    layers = {0: {"scale": {"q": 0.75, "k": 0.3125, "v": 0.5}}}
    with within():
        rl.fill_vllm(model, layers)
    assert model.layers[0]._k_scale.item() == model.layers[0]._k_scale_cpu.item() == 0.3125


@in_every_mode
def test_sglang_has_its_scales(within, monkeypatch):
    model = torch.nn.Linear(2, 2)
    module = torch.nn.Module()
    module.k_scale = module.v_scale = None
    monkeypatch.setitem(sglang._MODELS, model, types.SimpleNamespace(modules=[module]))
    with within():
        sglang._fill({module: LAYER})
    assert module.k_scale.device.type == "cpu" and module.k_scale.dtype == torch.float32
    assert module.k_scale.item() == module.k_scale_float == sigmascale._loaded.up_to_bf16(0.2)
    # Those that are there stay, whatever mode they come from.
    place = module.k_scale
    sglang._fill({module: LAYER | {"k": [0.25]}})
    assert module.k_scale is place and place.item() == 0.25


@in_every_mode
def test_a_sync_sends_scales(within):
    tensors = list(weights())
    plain = [pair for pair in rl.with_scales(tensors, MODEL) if pair[0].endswith("_scale")]
    with within():
        sent = [pair for pair in rl.with_scales(tensors, MODEL) if pair[0].endswith("_scale")]
        chunks = [pair for chunk in rl.chunks_with_scales([tensors], MODEL, engine="vllm") for pair in chunk]
    assert len(plain) == 18
    for (name, value), (other, own) in zip(plain, sent):
        assert name == other and own.device.type == "cpu" and own.dtype == torch.float32 and own.item() == value.item()
    assert sorted(name for name, _ in sent) == sorted(name for name, _ in chunks if name.endswith("_scale"))


# -- Plans


def loop(policy, within=contextlib.nullcontext, attached=contextlib.nullcontext, refreshed=contextlib.nullcontext):
    """What a runtime has after a few steps: attached, called and refreshed in these modes."""
    made, (q, k, v) = model(), operands()
    with within(), torch.no_grad():
        with attached():
            runtime = fp8.attach(made, policy=policy, bound=None if policy == "current" else "worst-case")
            scales = te.Scales(runtime) if policy == "geometry" else None
        found = []
        for step in range(3):
            outs = [fp8.attention(q * (step + 1), k, v, plan) for plan in runtime.layers]
            found += [*outs, runtime.descales.clone(), runtime.words.clone(), runtime.stats()]
            for parameter in made.parameters():
                parameter.data.mul_(1.25)
            with refreshed():
                runtime.refresh()
        state = fp8.merge_states([runtime.state_dict()])
        found += [state["descales"], repr(state["state"])] if state["state"] is not None else []
        found += [] if runtime.logits is None else [runtime.logits]
        found += [] if scales is None else [scales.scales]
    return found


@pytest.mark.parametrize("policy", _policies.POLICIES)
@in_every_mode
def test_plans_are_the_same(policy, within):
    same(loop(policy, within), loop(policy))


@pytest.mark.parametrize("policy", ["geometry", "auto-c", "delayed-te"])
def test_a_runtime_of_one_mode_is_refreshed_in_another(policy):
    plain = loop(policy)
    same(loop(policy, attached=torch.inference_mode), plain)
    same(loop(policy, refreshed=torch.inference_mode), plain)
    same(loop(policy, within=torch.inference_mode, refreshed=lambda: torch.inference_mode(False)), plain)


# -- Calls


def calls(grown):
    """Outputs and log-sum-exps of calls of every kind; gradients, too, if ``grown``."""
    q, k, v = operands()
    rows = [torch.full((2,), x, dtype=torch.float32, device="cpu") for x in (0.01, 0.02, 0.03)]
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float32, device="cpu")
    ints = lambda *x: torch.tensor(x, dtype=torch.int32, device="cpu")
    found = []
    for how in ({}, {"causal": False}, {"window": (7, 3), "causal": False}, {"softcap": 5.0}, {"sinks": sinks}, {"gradients": "rounded-delta"}):
        own = [x.clone() for x in (q, k, v)]
        if grown:
            own = [x.requires_grad_(True) for x in own]
            how = {key: x.clone().requires_grad_(True) if isinstance(x, torch.Tensor) else x for key, x in how.items()}
        out, lse = fp8.attention(*own, rows, return_lse=True, **how)
        found += [out, lse]
        if grown:
            own += [x for x in how.values() if isinstance(x, torch.Tensor)]
            found += torch.autograd.grad(out.float().square().sum(), own)
    ends = ints(0, 30, 50, 80)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    found.append(fp8.flash_attn_varlen_func(*flat, ends, ends, 30, 30, causal=True, plan=rows))
    cache = [torch.zeros(6, 16, 2, 16, dtype=torch.bfloat16, device="cpu") for _ in range(2)]
    angle = torch.linspace(0, 3, 48 * 8, dtype=torch.float32, device="cpu").view(48, 8)
    found.append(
        fp8.flash_attn_with_kvcache(
            q[:, :2],
            *cache,
            k[:, :2],
            v[:, :2],
            rotary_cos=angle.cos(),
            rotary_sin=angle.sin(),
            cache_seqlens=ints(9, 15),
            block_table=ints(0, 2, 4, 1, 3, 5).view(2, 3),
            causal=True,
            plan=rows,
        )
    )
    visible = torch.ones(2, 1, 40, 40, dtype=torch.bool, device="cpu").tril()
    visible[1, :, :, 11:] = False
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    for mask in (visible, visible[:1]):
        found.append(fp8.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True, plan=rows))
    return [*found, *cache]


@in_every_mode
def test_calls_are_the_same(within):
    grown = within is not torch.inference_mode
    plain = calls(grown)
    with within():
        found = calls(grown)
    same(found, plain)


@under_defaults
def test_what_a_call_sees_is_the_same(within):
    sequences = _terms.Sequences(*torch.tensor([[0, 9], [9, 20], [0, 9], [9, 20]], dtype=torch.int32), 11, 11)

    def seen():
        found = [_terms.Terms(True, 1.0, window_left=4).visible(2, 10, 10, torch.device("cpu"))]
        rows = torch.tensor([3, 7], dtype=torch.int64, device="cpu")
        for terms in (_terms.Terms(True, 1.0, window_left=4), _terms.Terms(True, 1.0, sequences=sequences)):
            found.append(terms.visible_to(rows, 0, 10, 10))
        return [*found, _terms.within(operands(2, 10)[0], *sequences.places[:2])]

    plain = seen()
    with within():
        same(seen(), plain)


# -- What is watched


def watched(folder, within=contextlib.nullcontext, made_in=contextlib.nullcontext):
    """The lines of a monitor beside a guard, and what both leave of a training step."""
    made, tokens = model(), [batch(step) for step in range(3)]
    runtime = fp8.attach(made, bound="worst-case", backend="emulated")
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    with made_in():
        monitor = fp8.Monitor(runtime, folder / "run.jsonl", every=1)
        guard = fp8.Guard(runtime, optimizer, every=2, on_event=lambda *_: None)
    agreed = []
    for step in range(3):
        loss = made(tokens[step], labels=tokens[step]).loss
        loss.backward()
        with within():
            agreed.append(guard._agreed(1.0 + 2.0**-12, loss))
            if guard.step(float(loss), 1.0):
                optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss=float(loss))
            runtime.refresh()
    monitor.close()
    return agreed, (folder / "run.jsonl").read_text()


@under_defaults
def test_a_monitor_and_a_guard_say_the_same(within, tmp_path):
    folders = [tmp_path / name for name in ("plain", "within")]
    [folder.mkdir() for folder in folders]
    plain, found = watched(folders[0]), watched(folders[1], within)
    same(found, plain)
    assert plain[0][0][0] == 1.0 + 2.0**-12, "of more digits than BF16 has"


def test_a_monitor_made_in_inference_mode_goes_on_outside(tmp_path):
    folders = [tmp_path / name for name in ("plain", "within")]
    [folder.mkdir() for folder in folders]
    same(watched(folders[1], made_in=torch.inference_mode), watched(folders[0]))


@under_defaults
def test_samples_are_of_the_same_rows(within):
    q, k, v = (x.float().to(torch.float8_e4m3fn) for x in operands(length=700))
    grad, out = (torch.randn(2, 700, 4, 16, generator=torch.Generator().manual_seed(5), dtype=torch.float32) for _ in range(2))
    rows = [torch.ones(2, 2, dtype=torch.float32)] * 3
    def sample():
        places = _samples.places_of(700, 61, 3, grad.device)
        taken = _samples.take(grad.bfloat16(), (q, k, v), rows, out.bfloat16(), _terms.Terms(True, 0.25), places, 3)
        ((_, found),) = _samples.measure({0: taken})
        return found

    plain = sample()
    with within():
        same(sample(), plain)


def test_pages_of_inference_mode_are_written_outside():
    with torch.inference_mode():
        pages = fp8.value_pages(2, 16, 1, 16, device="cpu")
    pages.view(torch.uint8).fill_(1)
    assert not pages.is_inference()
