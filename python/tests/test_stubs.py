"""The typed stubs name what is there, with the parameters that it takes."""

import ast
import importlib
import inspect
import pathlib

import pytest


@pytest.mark.parametrize("name", ["sigmascale", "sigmascale._native", "sigmascale.torch"])
def test_stubs_agree_with_the_package(name):
    if name.endswith("torch"):
        pytest.importorskip("torch")
    module = importlib.import_module(name)
    file = pathlib.Path(importlib.import_module("sigmascale").__file__).parent
    file = file / "_native.pyi" if name.endswith("_native") else file.joinpath(*name.split(".")[1:], "__init__.pyi")
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
