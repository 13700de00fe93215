"""Faults that were seen in serving engines, planted into the package: the tests that ought to see them do, without a GPU."""

import sys
import types

import pytest

torch = pytest.importorskip("torch")

import test_plugins  # noqa: E402

import sigmascale  # noqa: E402
from sigmascale import _loaded, _serving, vllm  # noqa: E402
from sigmascale.torch import _stream  # noqa: E402


def scales_of_calibrate(monkeypatch):
    test_plugins.test_scales_are_those_of_calibrate(packs=False)


def scales_of_a_device(monkeypatch):
    """As an engine on a GPU has them, under its default type and on a default device that is not the weights'."""
    monkeypatch.setattr(_serving, "_DEVICES", ("cpu",))
    engine, tensors, want = test_plugins.Engine(), list(test_plugins.weights()), test_plugins.expected()
    followed, filled, log = test_plugins.follow(engine)
    engine.load_weights(tensors)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            followed.refresh()
    finally:
        torch.set_default_dtype(before)
    assert len(filled) == 6, log.lines
    assert all(1 <= row[o] / least[o] <= 1.008 for row, least in zip(filled.values(), want) for o in "qkv")


def scales_of_weights_in_place(monkeypatch):
    """Weights of an engine are read where they are, also after it has them elsewhere."""
    monkeypatch.setattr(_serving, "_DEVICES", ("cpu",))
    engine = test_plugins.Engine()
    followed, filled, log = test_plugins.follow(engine)
    engine.load_weights(test_plugins.weights())
    followed.refresh()
    device = followed._loaded._stream[0]._device
    for factor in (2.0, 0.5):
        for layer in engine.model.layers:
            layer.self_attn.qkv_proj.make()
        engine.load_weights(test_plugins.weights(factor))
        followed.refresh()
        want = test_plugins.expected(factor)
        assert len(filled) == 6, log.lines
        assert all(1 <= row[o] / least[o] <= 1.008 for row, least in zip(filled.values(), want) for o in "qkv")
    # What the first pass made is there, and holds no weights.
    assert followed._loaded._stream[0]._device is device and len(device._engines) == 1
    assert not any(slot.placed for slots in device._free.values() for slot in slots)


class Stream:
    """A stream of a device, and the streams that it waits for."""

    def __init__(self):
        self.cuda_stream, self.waits = id(self), []

    def wait_stream(self, other):
        self.waits.append(other)


def order_of_streams(monkeypatch):
    """A pass that goes on in another stream: that one waits, launches are in it, and memory is kept until it is done."""
    monkeypatch.setattr(_serving, "_DEVICES", ("cpu",))
    streams, used, launched = [Stream(), Stream()], [], []
    device = types.SimpleNamespace(type="cuda")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda asked: streams[-1] if asked is device else None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: used.append((tensor.data_ptr(), stream)))
    launch = _stream._Engine.launch

    def noted(self, stream, *targets):
        launched.append(stream)
        launch(self, stream, *targets)

    monkeypatch.setattr(_stream._Engine, "launch", noted)
    order = _stream.DeviceStream._order

    def as_on_a_device(self):
        own, self.device = self.device, device
        try:
            order(self)
        finally:
            self.device = own

    monkeypatch.setattr(_stream.DeviceStream, "_order", as_on_a_device)
    tensors = list(test_plugins.weights())
    stream = sigmascale.ScaleStream(test_plugins.MODEL)
    half = len(tensors) // 2
    for name, tensor in tensors[:half]:
        stream.push(name, tensor)
    first = streams.pop()
    assert set(launched) == {first.cuda_stream}
    count = len(launched)
    for name, tensor in tensors[half:]:
        stream.push(name, tensor)
    assert streams[0].waits == [first] and not first.waits
    assert len(launched) == 6 and set(launched[count:]) == {streams[0].cuda_stream}
    assert (stream._device._results.data_ptr(), streams[0]) in used
    stream.finish()


def scales_in_vllm(monkeypatch):
    """vLLM's floats on the host and its tensors on the device say the same."""
    from test_torch_defaults import LAYER, vllm_attention

    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    current = types.SimpleNamespace(is_fp8_fnuz=lambda: False)
    monkeypatch.setitem(sys.modules, "vllm.platforms", types.SimpleNamespace(current_platform=current))
    module = vllm_attention()
    vllm._fill({module: LAYER})
    for operand in "qkv":
        want = _loaded.up_to_bf16(max(LAYER[operand]))
        held = getattr(module, f"_{operand}_scale").item(), getattr(module, f"_{operand}_scale_float"), getattr(module, f"_{operand}_scale_cpu").item()
        assert held == (want, want, want)


def ignored(function, *names):
    """A function of torch that does not look at some of its arguments."""
    return lambda *args, **kwargs: function(*args, **{key: value for key, value in kwargs.items() if key not in names})


class Torch:
    """The package's view of torch, with a function that leaves something to the caller's defaults."""

    def __init__(self, **changed):
        self.__dict__.update(changed)

    def __getattr__(self, name):
        return getattr(torch, name)


def all_but_one(self, *modules, _restore=_loaded.Followed.restore):
    _restore(self, *(module for module in modules if module is not self.modules[3]))


def only_once(self, touched=None, _refresh=_loaded.Followed.refresh):
    if not self.values:
        _refresh(self, touched)


def tensors_only(layers, _fill=vllm._fill):
    floats = {module: {name: value for name, value in vars(module).items() if name.endswith("_scale_float")} for module in layers}
    _fill(layers)
    for module, values in floats.items():
        vars(module).update(values)


FAULTS = {
    "results in the default type": (scales_of_a_device, _stream, "torch", Torch(zeros=ignored(torch.zeros, "dtype"))),
    "results on the default device": (scales_of_a_device, _stream, "torch", Torch(zeros=ignored(torch.zeros, "device"))),
    "copies on the default device": (scales_of_a_device, _stream, "torch", Torch(empty=ignored(torch.empty, "device"))),
    "weights where they were before": (scales_of_weights_in_place, _stream._Slot, "addresses", lambda self: sorted(self.here)),
    "no order of streams": (order_of_streams, _stream.DeviceStream, "_order", lambda self: None),
    "a layer left out": (scales_of_calibrate, _loaded.Followed, "restore", all_but_one),
    "new weights that are not followed": (scales_of_calibrate, _loaded.Followed, "refresh", only_once),
    "floats of the host that are not set": (scales_in_vllm, vllm, "_fill", tensors_only),
}


@pytest.mark.parametrize("check", dict.fromkeys(check for check, *_ in FAULTS.values()), ids=lambda check: check.__name__)
def test_without_a_fault(check, monkeypatch):
    check(monkeypatch)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault, monkeypatch):
    check, owner, name, planted = FAULTS[fault]
    monkeypatch.setattr(owner, name, planted)
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
        check(monkeypatch)
