"""Every tensor that the package makes states its type and its device.

The default of both belongs to the caller: serving engines build models under ``torch.set_default_dtype(bfloat16)``, libraries that
initialize large models under ``torch.device("meta")``. This reads the sources alone; `test_torch_defaults.py` calls them.
"""

import ast
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / "sigmascale"
# Functions of torch that fill a new tensor from a shape or from Python numbers, and what each takes from the caller's defaults.
MAKERS = dict.fromkeys(
    "arange as_tensor asarray empty empty_permuted empty_strided eye full linspace logspace ones rand randint randn randperm "
    "scalar_tensor tensor tril_indices triu_indices zeros".split(),
    ("dtype", "device"),
)
# Those of a tensor have its device.
METHODS = dict.fromkeys(["new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros"], ("dtype",))
LEGACY = ("Tensor", "BFloat16Tensor", "DoubleTensor", "FloatTensor", "HalfTensor", "IntTensor", "LongTensor")


def violations(source):
    """Lines of a source where a tensor's type or device is left to the caller's defaults, each with what is missing."""
    tree = ast.parse(source)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {name.asname or name.name for node in imports if isinstance(node, ast.Import) for name in node.names if name.name == "torch"}
    found = [
        (node.lineno, f"from torch import {name.name}: call it as torch.{name.name}")
        for node in imports
        if isinstance(node, ast.ImportFrom) and node.module == "torch"
        for name in node.names
        if name.name in MAKERS
    ]
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        of_torch = isinstance(call.func.value, ast.Name) and call.func.value.id in names
        name, given = call.func.attr, {keyword.arg for keyword in call.keywords}
        needs = (MAKERS if of_torch else METHODS).get(name, ())
        missing = [key for key in needs if key not in given]
        if missing:
            found.append((call.lineno, f"{name} without {' and '.join(f'{key}=' for key in missing)}"))
        if of_torch and name in LEGACY:
            found.append((call.lineno, f"torch.{name} has the default type: use torch.tensor or torch.empty"))
        if of_torch and name == "finfo" and not call.args:
            found.append((call.lineno, "torch.finfo of the default type"))
        if of_torch and name == "where" and sum(_is_number(x) for x in call.args[1:]) == 2:
            found.append((call.lineno, "torch.where of two numbers has the default type"))
    return sorted(found)


def _is_number(node):
    node = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Attribute) and node.attr in ("inf", "nan"))


def test_allocations_state_type_and_device():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 40, PACKAGE
    found = [f"{file.relative_to(PACKAGE)}:{line}: {what}" for file in files for line, what in violations(file.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("torch.zeros(4, device=device)", "zeros without dtype="),
        ("torch.tensor([1.0], dtype=torch.float32)", "tensor without device="),
        ("torch.arange(4)", "arange without dtype= and device="),
        ("pytorch.ones(4, **options)", "ones without dtype= and device="),
        ("x.new_full((4,), 1.0)", "new_full without dtype="),
        ("torch.FloatTensor([1.0])", "torch.FloatTensor"),
        ("torch.finfo().tiny", "torch.finfo"),
        ("torch.where(mask, 0.0, -math.inf)", "torch.where"),
        ("from torch import zeros", "from torch import zeros"),
    ],
)
def test_a_planted_allocation_is_found(line, what):
    source = f"import torch\nimport torch as pytorch\n\ndef made(x, mask, device, options):\n    {line}\n"
    ((number, said),) = violations(source)
    assert number == 5 and said.startswith(what)


@pytest.mark.parametrize(
    "line",
    [
        "torch.zeros(4, device=device, dtype=torch.float32)",
        "x.new_full((4,), 1.0, dtype=torch.float32)",
        "torch.zeros_like(x)",
        "torch.where(mask, x, 0.0)",
        "torch.finfo(torch.float32).tiny",
        "numpy.zeros(4)",
        "graph.tensor(dim=4)",
    ],
)
def test_what_states_both_or_has_them_of_a_tensor_is_not(line):
    assert violations(f"import torch\n\ndef made(x, mask, device, graph):\n    {line}\n") == []
