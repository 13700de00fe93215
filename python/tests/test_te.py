"""TransformerEngine's recipe, against its own Python classes.

Its compiled PyTorch half needs CUDA's compiler to be built. Where only the Python sources are there (the wheel
transformer-engine-cu13), a stand-in takes that half's place: an enumeration of types, and names that are never called. So
what is tested is how TransformerEngine asks for quantizers and what it makes of the answer, not a kernel.
"""

import enum
import importlib
import importlib.machinery
import importlib.util
import pathlib
import sys
import types
import warnings
from unittest.mock import MagicMock

import pytest

torch = pytest.importorskip("torch")

import sigmascale  # noqa: E402
from sigmascale.torch import te  # noqa: E402


class StandIn(types.ModuleType):
    """A module in which every name stands for something."""

    def __init__(self, name, **known):
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.__dict__.update(known)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__.setdefault(name, MagicMock(name=name))


def stand_in_for_the_compiled_half(monkeypatch, root):
    """Lets the Python sources under ``root`` be imported alone."""
    constants = (root / "pytorch" / "constants.py").read_text()
    types_of_it = [line.split()[0] for line in constants.splitlines() if "= int(tex.DType." in line]
    dtype = enum.IntEnum("DType", {name: value for value, name in enumerate(types_of_it)})
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", StandIn("transformer_engine_torch", DType=dtype))
    monkeypatch.setenv("NVTE_PROJECT_BUILDING", "1")
    for name, place in [("transformer_engine", root), ("transformer_engine.pytorch", root / "pytorch")]:
        package = types.ModuleType(name)
        package.__path__ = [str(place)]
        monkeypatch.setitem(sys.modules, name, package)


@pytest.fixture
def engine(monkeypatch):
    """TransformerEngine's ``quantization`` module."""
    found = importlib.util.find_spec("transformer_engine")
    if found is None:
        pytest.skip("TransformerEngine is not installed")
    if importlib.util.find_spec("transformer_engine_torch") is None:
        stand_in_for_the_compiled_half(monkeypatch, pathlib.Path(found.origin).parent)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("transformer_engine.pytorch.tensor")
            yield importlib.import_module("transformer_engine.pytorch.quantization")
    except ImportError as error:
        pytest.skip(f"TransformerEngine cannot be imported: {error}")
    finally:
        for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
            monkeypatch.delitem(sys.modules, name)


class Runtime:
    """What the recipe reads of a runtime."""

    def __init__(self, layers):
        self.descales = torch.rand(layers, 4, 2) + 0.1
        self.device, self.after_refresh = torch.device("cpu"), []

    def __len__(self):
        return len(self.descales)


NAMES = {"decoder.0.attention": 0, "decoder.1.attention": 2}


def roles(engine, name, forward):
    """The slots of TransformerEngine's attention, as its ``get_quantizer_roles`` gives them."""
    role, boundary = (
        engine.QuantizerRole,
        engine.QuantizerRole(name=f"{name}.{'dpa_output' if forward else 'dpa_grad_input'}"),
    )
    one = lambda tensor: role(module_type="dpa", tensor_type=tensor, name=name)
    if forward:
        return [*[one("qkv")] * 3, *[boundary] * 3, *[one("s")] * 3]
    return [*[boundary] * 2, *[one("do")] * 2, *[one("dp")] * 2]


def quantizers(engine, recipe, name, forward):
    slots = roles(engine, name, forward)
    state = engine.CustomRecipeState(
        recipe,
        mode="forward" if forward else "backward",
        num_quantizers=len(slots),
        device=torch.device("cpu"),
        roles=slots,
    )
    return state.make_quantizers()


def test_its_forward_gets_scales_that_follow_refresh(engine):
    runtime = Runtime(3)
    recipe = te.recipe(runtime, NAMES)
    assert recipe.custom() and recipe.fp8_dpa
    made = quantizers(engine, recipe, "decoder.1.attention", True)
    assert {type(one).__name__ for one in made} == {"Float8Quantizer"}
    assert {one.dtype.name for one in made} == {"kFloat8E4M3"}
    for _ in range(2):
        qkv, o = 1 / runtime.descales[2, :3].max(), 1 / runtime.descales[2, 3].max()
        assert [float(one.scale) for one in made] == [float(qkv)] * 3 + [float(o)] * 3 + [256.0] * 3
        runtime.descales *= 3
        for work in runtime.after_refresh:
            work(runtime)


def test_its_backward_and_other_modules_stay_with_delayed_scaling(engine):
    recipe = te.recipe(Runtime(3), NAMES)
    made = quantizers(engine, recipe, "decoder.0.attention", False)
    assert {type(one).__name__ for one in made} == {"Float8Quantizer"} and all(float(one.scale) == 1 for one in made)
    request = recipe.qfactory(engine.QuantizerRole(module_type="linear", tensor_type="input", name="fc1"))
    assert isinstance(request, engine.DelayedScalingRequest)
    assert isinstance(recipe.qfactory(None), engine.DelayedScalingRequest)
    assert isinstance(recipe.qfactory(engine.QuantizerRole()), engine.DelayedScalingRequest)


def test_attention_modules_without_a_layer_are_refused(engine):
    with pytest.raises(sigmascale.ArgumentError, match="'decoder.7' has no layer"):
        quantizers(engine, te.recipe(Runtime(3), NAMES), "decoder.7", True)
    with pytest.raises(sigmascale.ArgumentError, match="the runtime has 1"):
        te.recipe(Runtime(1), NAMES)


def test_the_factory_needs_no_transformer_engine():
    runtime = Runtime(3)
    factory = te.quantizer_factory(runtime, NAMES, lambda role: "other", lambda scale, amax: scale)
    role = lambda tensor, name="decoder.1.attention", module="dpa": types.SimpleNamespace(
        module_type=module, tensor_type=tensor, name=name
    )
    assert factory(None) == factory(role("input", module="linear")) == factory(role("do")) == "other"
    assert float(factory(role("qkv"))) == float(1 / runtime.descales[2, :3].max()) and float(factory(role("s"))) == 256
    o = factory(role("", "decoder.0.attention.dpa_output", ""))
    assert float(o) == float(1 / runtime.descales[0, 3].max())
    with pytest.raises(ValueError, match="has no layer"):
        factory(role("qkv", "c"))
