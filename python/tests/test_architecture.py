"""No two modules of the package import each other in a circle, annotations included."""

import ast
import graphlib
import pathlib

import sigmascale


def imports():
    """The modules of the package that each of them names in an import; packages themselves only gather names."""
    root = pathlib.Path(sigmascale.__file__).parent
    names = {path: ".".join([root.name, *path.relative_to(root).with_suffix("").parts]) for path in root.rglob("*.py")}
    found = {name: set() for path, name in names.items() if path.name != "__init__.py"}
    for path, name in names.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if name in found and isinstance(node, ast.ImportFrom):
                above = name.split(".")[: -node.level] if node.level else []
                module = ".".join([*above, *([node.module] if node.module else [])])
                found[name] |= {module, *(f"{module}.{alias.name}" for alias in node.names)} & found.keys()
    return found


def test_modules_import_each_other_in_no_circle():
    found = imports()
    assert found["sigmascale.torch._attention"] >= {"sigmascale.torch._ops", "sigmascale._errors"}
    graphlib.TopologicalSorter(found).prepare()
