"""The typed stubs name what is there, with the parameters that it takes."""

import ast
import importlib
import inspect
import pathlib

import pytest


@pytest.mark.parametrize("name", ["sigmascale", "sigmascale._native", "sigmascale.rl", "sigmascale.torch"])
def test_stubs_agree_with_the_package(name):
    if name.endswith("torch"):
        pytest.importorskip("torch")
    module = importlib.import_module(name)
    file = pathlib.Path(importlib.import_module("sigmascale").__file__).parent
    single = name.endswith(("_native", ".rl"))
    file = file / f"{name.split('.')[1]}.pyi" if single else file.joinpath(*name.split(".")[1:], "__init__.pyi")
    tree = ast.parse(file.read_text())
    declared = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    public = {key for key in getattr(module, "__all__", declared) if inspect.isroutine(getattr(module, key))}
    assert public <= declared.keys()
    # What begins with an underscore is the stubs' own.
    for key, node in {key: node for key, node in declared.items() if not key.startswith("_")}.items():
        assert hasattr(module, key), key
        if isinstance(node, ast.FunctionDef):
            given = list(inspect.signature(getattr(module, key)).parameters.values())
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            if not any(p.kind is p.VAR_KEYWORD for p in given):
                assert names == [p.name for p in given], key
        elif not issubclass(getattr(module, key), dict):
            own = {name for name, value in vars(getattr(module, key)).items() if inspect.isroutine(value)}
            told = {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)}
            # What the Trainer calls is no user's to call.
            assert {name for name in own if not name.startswith(("_", "on_"))} <= told, key


USE = """
import sigmascale
c: float = sigmascale.calibrate("gpt2-xl", steps=3)["c_star"]["c_star"]
rows = sigmascale.descales(sigmascale.calibrate({"model_type": "llama"}, bound="certain"))
run = sigmascale.stress("refit", "x", policies=["geometry", sigmascale.AutoC(burn_in=3), sigmascale.DelayedTe(margin=1)])
made = sigmascale.export("x", "y", "vllm", per_head=True)["safe"], sigmascale.verify("y", "sglang")
for name, tensor in sigmascale.ScaleStream({"model_type": "llama"}).through([("x", 1)]):
    ok: bool = sigmascale.rl.must_flush({}, {})
ok = sigmascale.probe(lambda *operands: operands[0], framework="numpy").ok
"""
WRONG = [
    'sigmascale.calibrate("x", bound="safe")',
    "sigmascale.calibrate(3)",
    'sigmascale.stress("rain")',
    'sigmascale.AutoC(pooling="tensor")',
    "sigmascale.Tail(tokens=3)",
    'sigmascale.probe("call")',
    "sigmascale.export_scales('x')",
    'sigmascale.export("x", "y", "tgi")',
]


def test_a_strict_checker_accepts_right_calls_and_no_others():
    api = pytest.importorskip("mypy.api", reason="mypy is not installed")
    printed, _, status = api.run(["--strict", "--cache-dir", "/dev/null", "-c", USE + "\n".join(WRONG)])
    first = USE.count("\n") + 1
    lines = {int(line.split(":")[1]) for line in printed.splitlines() if ": error:" in line}
    assert status == 1 and lines == set(range(first, first + len(WRONG))), printed
