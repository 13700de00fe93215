"""Types: the sources name those of everything public, and the stub of the native half names what is there."""

import ast
import importlib
import inspect
import pathlib

import pytest

import sigmascale
from sigmascale import _native


def test_the_native_stub_agrees_with_the_module():
    tree = ast.parse(pathlib.Path(sigmascale.__file__).with_name("_native.pyi").read_text())
    declared = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert {key for key, value in vars(_native).items() if inspect.isroutine(value)} <= declared.keys()
    for key, node in declared.items():
        assert hasattr(_native, key), key
        if isinstance(node, ast.FunctionDef):
            given = [p.name for p in inspect.signature(getattr(_native, key)).parameters.values()]
            assert [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)] == given, key
        else:
            own = {name for name, value in vars(getattr(_native, key)).items() if inspect.isroutine(value)}
            told = {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
            assert {name for name in own if not name.startswith("_")} <= told, key


def untyped(function):
    """Parameters that have no annotation, and ``return`` where the result has none."""
    signature = inspect.signature(function)
    given = {name: p.annotation for name, p in signature.parameters.items() if name not in ("self", "cls")}
    return [name for name, kind in (given | {"return": signature.return_annotation}).items() if kind is signature.empty]


def functions(kind):
    """Names and functions of the methods and properties that a class has in its source, but for private ones."""
    source = importlib.import_module(kind.__module__).__file__
    for name, value in [pair for base in kind.__mro__ for pair in vars(base).items()]:
        for part in (value.fget, value.fset) if isinstance(value, property) else (getattr(value, "__func__", value),):
            # What a dataclass makes has no source.
            if not inspect.isfunction(part) or inspect.unwrap(part).__code__.co_filename != source:
                continue
            if not name.startswith("_") or name.startswith("__"):
                yield f"{kind.__name__}.{name}", part


def test_the_pytorch_part_shows_what_it_offers_and_nothing_else():
    pytest.importorskip("torch")
    module = importlib.import_module("sigmascale.torch")
    assert {name for name in dir(module) if not name.startswith("_")} == set(module.__all__)


@pytest.mark.parametrize(
    "name", ["sigmascale", "sigmascale.rl", "sigmascale.torch", "sigmascale.torch.megatron", "sigmascale.torch.te"]
)
def test_everything_public_has_types_in_its_source(name):
    if "torch" in name:
        pytest.importorskip("torch")
    module = importlib.import_module(name)
    own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == name]
    found = []
    for key in getattr(module, "__all__", [key for key in own if not key.startswith("_")]):
        value = getattr(module, key)
        found += functions(value) if inspect.isclass(value) else [(key, value)] if callable(value) else []
    assert found
    assert {key: missing for key, value in found if (missing := untyped(value))} == {}


def test_the_stub_of_the_native_half_is_the_only_one():
    folder = pathlib.Path(sigmascale.__file__).parent
    assert [file.name for file in folder.rglob("*.pyi")] == ["_native.pyi"]
    assert (folder / "py.typed").exists()


# PyTorch need not be installed: its objects are of any type here.
USE = """
from typing import Any
import sigmascale
from sigmascale.torch import Guard, Layer, Monitor, Rope, TrainerMonitor, megatron, te
c: float = sigmascale.calibrate("gpt2-xl", steps=3)["c_star"]["c_star"]
rows = sigmascale.descales(sigmascale.calibrate({"model_type": "llama"}, bound="worst-case"))
run = sigmascale.stress("refit", "x", policies=["geometry", sigmascale.AutoC(burn_in=3), sigmascale.DelayedTe(margin=1)])
made = sigmascale.export("x", "y", "vllm", per_head=True)["safe"], sigmascale.verify("y", "sglang")
for name, tensor in sigmascale.ScaleStream({"model_type": "llama"}).through([("x", 1)]):
    ok: bool = sigmascale.rl.must_flush({}, {})
ok = sigmascale.probe(lambda *operands: operands[0], framework="numpy").ok
x: Any = None
runtime = sigmascale.torch.attach(x, sigmascale.AutoC(), bound="worst-case", telemetry=4)
plan = runtime.plan_of(x)
out = sigmascale.torch.attention(x, x, x, plan, window=(8, 0)), sigmascale.torch.ring_attention(x, x, x, plan, None)
pair: tuple[Any, Any] = sigmascale.torch.attention(x, x, x, [x, x, x], return_lse=True, rope=(plan.q_descale, x))
out = sigmascale.torch.flash_attn_func(x, x, x, plan=plan, causal=True)
heads: int = Layer(x, x, x, 4, 2, norm="layer").n_q_heads + sigmascale.torch.find_layers(x)[0].d_head
with Monitor(runtime) as monitor, sigmascale.torch.patched(runtime) as same:
    monitor.step(loss=1.0, lr=x)
    ok = Guard(same, x, monitor=monitor).step(1.0)
state = sigmascale.torch.merge_states([runtime.state_dict()])
runtime.telemetry = "off"
runtime.after_refresh.append(lambda runtime: te.Scales(runtime).update(runtime))
chunk = megatron.attach(x, "current", backend="native"), megatron.CoreAttention("causal"), TrainerMonitor(runtime)
word: str = sigmascale.torch.register(padding="right") + sigmascale.torch.POLICIES[0]
"""
WRONG = [
    'sigmascale.calibrate("x", bound="safe")',
    "sigmascale.calibrate(3)",
    'sigmascale.stress("rain")',
    'sigmascale.AutoC(pooling="tensor")',
    "sigmascale.Tail(tokens=3)",
    'sigmascale.probe("call")',
    'sigmascale.export("x", "y", "trtllm")',
    'sigmascale.export("x", "y", "tgi")',
    'sigmascale.diagnose("x", limit=3)',
    "sigmascale.rl.must_flush({})",
    "sigmascale.nothing",
    'sigmascale.torch.attach(x, "best")',
    'sigmascale.torch.attach(x, backend="cuda")',
    "sigmascale.torch.attention(x, x, x)",
    "heads = sigmascale.torch.attention(x, x, x, plan, return_lse=True)",
    'Layer(x, x, x, 4, 2, norm="batch")',
    "Rope(x)",
    'runtime.telemetry = "some"',
    "runtime.stop()",
    "plan.missing",
    'sigmascale.torch.register(padding="left")',
    'sigmascale.torch.value_pages("a", 1, 1, 1)',
    "sigmascale.torch.flash_attn_func(x, x, x)",
    "sigmascale.torch.nothing",
    "te.recipe(runtime)",
    "Monitor()",
]


def test_a_strict_checker_accepts_right_calls_and_no_others():
    api = pytest.importorskip("mypy.api", reason="mypy is not installed")
    printed, _, status = api.run(["--strict", "--cache-dir", "/dev/null", "-c", USE + "\n".join(WRONG)])
    first = USE.count("\n") + 1
    lines = {int(line.split(":")[1]) for line in printed.splitlines() if ": error:" in line}
    assert status == 1 and lines == set(range(first, first + len(WRONG))), printed
