"""The types of results name the keys and the values that results have: neither can drift from the command's JSON."""

import ast
import dataclasses
import json
import pathlib
import subprocess
import sys
import types
import typing

import pytest

import sigmascale
from sigmascale import _native, _parameters, _types

if sys.version_info >= (3, 11):
    from typing import get_type_hints
else:
    from typing_extensions import get_type_hints

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = str(ROOT / "data" / "tiny-llama")


def declared():
    """The keys of every result class with their types, read from the overloads of ``__getitem__``."""
    source = pathlib.Path(sigmascale.__file__).with_name("_results.py").read_text()
    names = {"types": _types, "Any": typing.Any, "Literal": typing.Literal, "list": list, "Audit": sigmascale.Audit}
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            overloads = [inner for inner in ast.walk(node) if getattr(inner, "name", None) == "__getitem__"]
            overloads = [one for one in overloads if one.decorator_list]
            pairs = ((ast.unparse(one.args.args[1].annotation), ast.unparse(one.returns)) for one in overloads)
            found[node.name] = {typing.get_args(eval(key, names))[0]: eval(value, names) for key, value in pairs}
    return found


KEYS = declared()


def check(value, kind, place, seen):
    """The value is of this type, and a TypedDict has its keys and no others; ``seen`` collects the keys met."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        assert value in arguments, (place, value)
    elif origin is list:
        assert isinstance(value, list), place
        for number, item in enumerate(value):
            check(item, arguments[0], f"{place}[{number}]", seen)
    elif origin in (types.UnionType, typing.Union):
        fitting = [one for one in arguments if (value is None) == (one is types.NoneType)]
        fitting = [one for one in fitting if (typing.get_origin(one) is list) == isinstance(value, list)]
        assert len(fitting) == 1, (place, value)
        if value is not None:
            check(value, fitting[0], place, seen)
    elif hasattr(kind, "__required_keys__"):
        assert kind.__required_keys__ <= value.keys() <= kind.__required_keys__ | kind.__optional_keys__, (
            place,
            value.keys() ^ kind.__annotations__.keys(),
        )
        hints = get_type_hints(kind)
        for key, item in value.items():
            seen.add((kind.__name__, key))
            check(item, hints[key], f"{place}.{key}", seen)
    elif isinstance(kind, type) and issubclass(kind, dict):
        whole(value, kind.__name__, seen, {"others", "observed"})
    else:
        assert isinstance(value, kind | int if kind is float else kind), (place, kind, value)
        assert kind is bool or not isinstance(value, bool), place


def whole(result, name, seen, absent=()):
    assert result.keys() == KEYS[name].keys() - set(absent), name
    for key, value in result.items():
        seen.add((name, key))
        check(value, KEYS[name][key], f"{name}.{key}", seen)


def test_results_have_the_keys_and_values_of_their_types(tmp_path):
    seen = set()
    whole(sigmascale.calibrate("gpt2-xl"), "Profile", seen, {"chosen_c", "method", "layers"})
    whole(sigmascale.calibrate(MODEL), "Profile", seen, {"chosen_c"})
    whole(sigmascale.calibrate(MODEL, estimator="power", bound="rank-aware"), "Profile", seen, {"chosen_c"})
    whole(sigmascale.calibrate(MODEL, as_paper=True, c=0.1), "Profile", seen)
    whole(sigmascale.inspect(MODEL), "Inspection", seen)
    text = str(ROOT / "data" / "sample.py")
    whole(sigmascale.stress("checkpoint-load", MODEL, layers=1, seq_len=16, tokens=text), "StressRun", seen, {"training"})
    whole(sigmascale.stress("weight-spike", MODEL, layers=1, seq_len=8, steps=12, mode="operands"), "StressRun", seen, {"training"})
    trace = str(ROOT / "data" / "traces" / "tiny-llama.json")
    whole(sigmascale.stress("replay", trace=trace, policies="delayed"), "StressRun", seen, {"training"})
    whole(sigmascale.export(MODEL, tmp_path / "out", "vllm"), "Export", seen)
    audit = sigmascale.verify(tmp_path / "out", tokens=text, seq_len=16)
    for one in [audit, *audit["others"]]:
        whole(one, "Audit", seen, set() if one is audit else {"others", "observed"})
    run = [tmp_path / f"checkpoint-{step}" for step in (100, 200)]
    for checkpoint in run:
        checkpoint.symlink_to(MODEL, target_is_directory=True)
    whole(sigmascale.diagnose(run, lr=1e-3), "Diagnosis", seen)
    whole(sigmascale.diagnose(ROOT / "data" / "runs" / "low-precision.jsonl"), "Diagnosis", seen)
    # No type lists a key that no result has; those of other models are named.
    kinds = {name: kind for name, kind in vars(_types).items() if hasattr(kind, "__required_keys__")}
    listed = {(name, key) for name, kind in kinds.items() for key in get_type_hints(kind)}
    other_models = {("Model", key) for key in ("mla", "bounded_positions", "fp8_inputs")}
    other_models |= {("Method", "layer_norm_mean_limit"), ("Method", "soft_cap"), ("LayerInspection", "mla")}
    other_models |= {("LayerProfile", "mla"), ("LayerProfile", "center")}
    other_models |= {one for one in listed if one[0] in ("CenterProfile", "Latent", "MlaProfile", "Unavailable", "UnionBound", "Unjudged")}
    unseen = listed - seen - other_models
    assert not unseen, unseen


def test_the_command_prints_the_same_keys():
    printed = subprocess.run(
        [sys.executable, "-m", "sigmascale", "inspect", MODEL, "--format", "json"], capture_output=True, text=True
    )
    whole(json.loads(printed.stdout), "Inspection", set())


USE = """
import sigmascale
profile: sigmascale.Profile = sigmascale.calibrate("x")
k: list[float] | None = profile["layers"][0]["k_descale"]
gamma: float = profile["c_star"]["gamma"]
rank = sigmascale.inspect("x")["layers"][0]["stable_rank"]
mean: float = rank["mean"] if rank else 0.0
first: int | None = sigmascale.stress("refit", "x")["policies"][0]["first_bad_step"]
page: str = sigmascale.verify("x").to_html()
lead: int | None = sigmascale.diagnose(["x", "y"], lr=1e-3)["lead"]
last = [head["w_q"]["last"] for head in sigmascale.diagnose("x")["heads"] if head["w_q"]]
safe: bool = sigmascale.export("x", "y", "vllm")["layers"][0]["q"]["safe"]
"""
WRONG = [
    'profile["layer"]',
    'profile["layers"][0]["k_descales"]',
    'wrong: str = profile["c_star"]["gamma"]',
    'sigmascale.verify("x")["saved"]',
    'sigmascale.diagnose("x")["head"]',
]


def test_a_strict_checker_knows_the_keys():
    api = pytest.importorskip("mypy.api", reason="mypy is not installed")
    printed, _, status = api.run(["--strict", "--cache-dir", "/dev/null", "-c", USE + "\n".join(WRONG)])
    first = USE.count("\n") + 1
    lines = {int(line.split(":")[1]) for line in printed.splitlines() if ": error:" in line}
    assert status == 1 and lines == set(range(first, first + len(WRONG))), printed


def test_literals_are_the_names_of_the_native_half():
    names = [policy["name"] for policy in _parameters.DEFAULTS["policies"]]
    assert list(typing.get_args(_types.Policy)) == names
    tail = dataclasses.asdict(sigmascale.Tail())
    choices = {"auto-c": ("pooling", _types.Pooling), "delayed-te": ("algorithm", _types.AmaxAlgorithm)}
    choices |= {name: choices.get(name, ("granularity", _types.Granularity)) for name in names}
    for name, (parameter, literal) in choices.items():
        for value in typing.get_args(literal):
            assert json.loads(_native.policy(name, json.dumps({parameter: value}), tail))[parameter] == value
        # Serde names all that it knows.
        with pytest.raises(sigmascale.ArgumentError) as refused:
            _native.policy(name, json.dumps({parameter: "none"}), tail)
        assert all(f"`{value}`" in str(refused.value) for value in typing.get_args(literal))
        assert str(refused.value).count("`") == 2 * (1 + len(typing.get_args(literal)))


def test_parameters_of_policies_are_by_default_those_of_the_native_half():
    defaults = {policy["name"]: policy["parameters"] for policy in _parameters.DEFAULTS["policies"]}
    for policy in (sigmascale.AutoC(), sigmascale.DelayedPaper(), sigmascale.DelayedTe()):
        name, parameters = _parameters.named(policy)
        assert json.loads(parameters).items() <= defaults[name].items()
