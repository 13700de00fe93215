"""Calibrate, inspect, stress and export: what the command line gives, and exceptions of a fitting class."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import sigmascale

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = ROOT / "data" / "tiny-llama"
BINARY = pathlib.Path(os.environ.get("SIGMASCALE_BIN", ROOT / "target" / "debug" / "sigmascale")).resolve()


def stored(folder):
    """All tensors of a folder of BF16 safetensors, as float32."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        for name, info in header.items():
            if name != "__metadata__":
                assert info["dtype"] == "BF16"
                start, end = (8 + length + offset for offset in info["data_offsets"])
                words = np.frombuffer(data[start:end], np.uint16).astype(np.uint32) << 16
                tensors[name] = words.view(np.float32).reshape(info["shape"])
    return tensors


@pytest.mark.skipif(not BINARY.exists(), reason=f"the command is not built at {BINARY}")
@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        (["calibrate", MODEL], lambda: sigmascale.calibrate(MODEL)),
        (["calibrate", "mistral-7b", "--steps", "3000"], lambda: sigmascale.calibrate("mistral-7b", steps=3000)),
        (["calibrate", MODEL, "--as-paper", "--c", "0.1"], lambda: sigmascale.calibrate(MODEL, as_paper=True, c=0.1)),
        (["inspect", MODEL], lambda: sigmascale.inspect(MODEL)),
        (
            ["stress", "checkpoint-load", "--model", MODEL, "--tokens", ROOT / "README.md", "--seq-len", "64"],
            lambda: sigmascale.stress("checkpoint-load", MODEL, tokens=ROOT / "README.md", seq_len=64),
        ),
        (
            [
                "stress",
                "refit",
                "--model",
                MODEL,
                "--layers",
                "1",
                "--steps",
                "2",
                "--seq-len",
                "32",
                "--policies",
                "delayed",
            ],
            lambda: sigmascale.stress(
                "refit", MODEL, layers=1, steps=2, seq_len=32, policies=["delayed-paper", "delayed-te"]
            ),
        ),
    ],
)
def test_results_are_those_of_the_command(arguments, result):
    printed = subprocess.run([BINARY, *map(str, arguments), "--format", "json"], capture_output=True, check=True)
    assert result() == json.loads(printed.stdout)


def test_weights_in_memory_give_what_their_files_give():
    config = json.loads((MODEL / "config.json").read_text())
    # The same values in more than BF16: a rounding more is counted, and nothing else differs.
    counted = ("descale", "rounded", "logit_bound")
    for given in (config, MODEL / "config.json"):
        pairs = zip(sigmascale.calibrate(MODEL)["layers"], sigmascale.calibrate(given, weights=stored(MODEL))["layers"])
        for of_files, of_memory in pairs:
            for key, value in of_files.items():
                if key == "heads":
                    for file, memory in zip(value, of_memory[key]):
                        assert all(memory[k] == x for k, x in file.items() if not any(word in k for word in counted))
                elif any(word in key for word in counted):
                    assert np.all(np.asarray(of_memory[key]) >= np.asarray(value))
                    assert np.all(np.asarray(of_memory[key]) <= 1.05 * np.asarray(value))
                else:
                    assert of_memory[key] == value


def test_numbers_and_arrays_of_numpy_are_taken_as_they_are():
    plain = sigmascale.calibrate("gpt2-xl", seq_len=64, eta=0.5, as_paper=True)
    assert plain == sigmascale.calibrate("gpt2-xl", seq_len=np.int32(64), eta=np.float64(0.5), as_paper=np.bool_(True))
    config, weights = json.loads((MODEL / "config.json").read_text()), stored(MODEL)
    swapped = {name: value.astype(">f4") for name, value in weights.items()}
    apart = {name: value.copy(order="F") for name, value in weights.items()}
    layers = sigmascale.calibrate(MODEL, weights=weights)["layers"]
    assert sigmascale.calibrate(config, weights=swapped)["layers"] == layers
    assert sigmascale.calibrate(config, weights=apart)["layers"] == layers


def test_the_worst_case_bound_is_the_default():
    assert sigmascale.calibrate(MODEL) == sigmascale.calibrate(MODEL, bound="worst-case")
    assert sigmascale.calibrate(MODEL) != sigmascale.calibrate(MODEL, bound="rank-aware")


def test_descales_are_arrays():
    profile = sigmascale.calibrate(MODEL)
    rows = sigmascale.descales(profile)
    assert {name: row.shape for name, row in rows.items()} == {
        "q": (6, 2),
        "k": (6, 2),
        "v": (6, 2),
        "o": (6, 2),
        "logit": (6, 4),
    }
    assert all(row.dtype == np.float32 and (row > 0).all() for row in rows.values())
    assert rows["k"][3, 1] == np.float32(profile["layers"][3]["k_descale"][1])
    with pytest.raises(sigmascale.ArgumentError, match="no layers"):
        sigmascale.descales(sigmascale.calibrate("gpt2-xl"))


def test_as_the_paper_has_it_all_heads_share_a_layers_logit_descale():
    profile = sigmascale.calibrate(MODEL, as_paper=True)
    rows = sigmascale.descales(profile)
    assert all(rows[name] is None for name in "qkvo") and rows["logit"].shape == (6, 4)
    assert (rows["logit"] == np.float32([[layer["logit_descale"]] for layer in profile["layers"]])).all()


def test_results_have_short_reprs():
    of = lambda policies: repr(sigmascale.stress("checkpoint-load", MODEL, seq_len=32, policies=policies))
    assert of("geometry") == "<sigmascale stress checkpoint-load of tiny-llama: 6 layers, 1 step; no overflow>"
    assert of("geometry,delayed-paper").endswith("; layers overflowed: delayed-paper in 6>")
    assert repr(sigmascale.inspect(MODEL)) == "<sigmascale inspection of tiny-llama: 6 layers>"
    assert repr(sigmascale.calibrate("gpt2-xl")) == "<sigmascale calibration of gpt2-xl: 48 layers, c_star 0.07346>"
    for profile in (sigmascale.calibrate(MODEL), sigmascale.calibrate(MODEL, as_paper=True)):
        assert (
            repr(profile).startswith("<sigmascale calibration of tiny-llama: 6 layers, c_star 0.")
            and len(repr(profile)) < 120
        )
        # Plain dicts beside that.
        assert json.loads(json.dumps(profile)) == profile and isinstance(profile, dict)


TAIL = {"delta": 1e-6, "seq_len": 1024, "batch": 1, "steps": 1, "eta": 0.8}


@pytest.mark.parametrize(
    ("kind", "name"),
    [(sigmascale.AutoC, "auto-c"), (sigmascale.DelayedPaper, "delayed-paper"), (sigmascale.DelayedTe, "delayed-te")],
)
def test_defaults_of_policies_are_the_crates(kind, name):
    full = json.loads(sigmascale._native.policy(name, None, TAIL))
    given = dataclasses.asdict(kind())
    assert full["policy"] == name and {key: full[key] for key in given} == given
    assert dataclasses.asdict(sigmascale.Tail()) == TAIL
    # Every parameter reaches the policy.
    for key, value in given.items():
        other = {"pooling": "head", "algorithm": "most-recent"}.get(key, 1 if value != 1 else 2)
        changed = json.loads(sigmascale._native.policy(name, json.dumps(given | {key: other}), TAIL))
        assert changed == full | {key: other}


def test_policies_of_a_run_have_their_own_parameters():
    options = {"layers": 1, "steps": 6, "seq_len": 32, "mode": "operands"}
    own = [
        "geometry",
        sigmascale.AutoC(burn_in=2, quantile=1.0, kappa=8.0),
        sigmascale.DelayedPaper(history=1, margin=0.25),
        sigmascale.DelayedTe(history=4, algorithm="most-recent", margin=3),
    ]
    names = ["geometry", "auto-c", "delayed-paper", "delayed-te"]
    runs = [sigmascale.stress("weight-spike", MODEL, policies=policies, **options) for policies in (own, names)]
    assert [run["auto_c_burn_in"] for run in runs] == [2, 1]
    last = [{row["policy"]: row["q_descale"] for row in run["trace"] if row["step"] == 5} for run in runs]
    assert last[0]["geometry"] == last[1]["geometry"]
    assert all(last[0][name] > 1.5 * last[1][name] for name in names[1:])


def test_layers_may_differ_in_their_heads():
    heads = [(4, 2), (6, 3), (3, 1)]
    config = {
        "model_type": "openelm",
        "model_dim": 48,
        "num_transformer_layers": 3,
        "head_dim": 16,
        "num_query_heads": [q for q, _ in heads],
        "num_kv_heads": [kv for _, kv in heads],
    }
    random = np.random.default_rng(0)
    weights = {}
    for i, (q, kv) in enumerate(heads):
        layer = f"transformer.layers.{i}."
        weights[layer + "attn_norm.weight"] = np.ones(48, np.float32)
        weights[layer + "attn.qkv_proj.weight"] = random.standard_normal(((q + 2 * kv) * 16, 48)).astype(np.float32)
    profile = sigmascale.calibrate(config, weights=weights)
    assert (profile["model"]["n_q_heads"], profile["model"]["d_head"]) == ([4, 6, 3], 16)
    rows, past = sigmascale.descales(profile), np.finfo(np.float32).tiny
    assert rows["k"].shape == (3, 3) and rows["logit"].shape == (3, 6)
    for i, (q, kv) in enumerate(heads):
        assert (rows["k"][i, :kv] > past).all() and (rows["k"][i, kv:] == past).all()
        assert (rows["logit"][i, :q] > past).all() and (rows["logit"][i, q:] == past).all()
        assert rows["v"][i, 0] == np.float32(profile["layers"][i]["v_descale"][0])


@pytest.mark.parametrize(
    ("kind", "message", "work"),
    [
        (FileNotFoundError, "the presets are", lambda: sigmascale.calibrate("no-such-model")),
        (sigmascale.ArgumentError, "eta 2", lambda: sigmascale.calibrate("gpt2-xl", eta=2.0)),
        (ValueError, "expected one of worst-case", lambda: sigmascale.calibrate("gpt2-xl", bound="safe")),
        (TypeError, "unknown option 'etta'", lambda: sigmascale.calibrate("gpt2-xl", etta=0.5)),
        (sigmascale.UnsupportedError, "bloom", lambda: sigmascale.calibrate({"model_type": "bloom"})),
        (sigmascale.FormatError, "num_hidden_layers", lambda: sigmascale.calibrate({"model_type": "llama"})),
        (sigmascale.ArgumentError, "needs weights", lambda: sigmascale.inspect("gpt2-xl")),
        (sigmascale.ArgumentError, "scenario", lambda: sigmascale.stress("rain", MODEL)),
        (sigmascale.ArgumentError, "needs a model", lambda: sigmascale.stress("refit")),
        (
            sigmascale.ArgumentError,
            "x has type complex64",
            lambda: sigmascale.calibrate({}, weights={"x": np.zeros(3, np.complex64)}),
        ),
        (TypeError, "seq_len must be an integer, not 1.5", lambda: sigmascale.calibrate("gpt2-xl", seq_len=1.5)),
        (sigmascale.ArgumentError, "steps -1 must be at least 1", lambda: sigmascale.calibrate("gpt2-xl", steps=-1)),
        (sigmascale.ArgumentError, "batch 2361183", lambda: sigmascale.calibrate("gpt2-xl", batch=2**71)),
        (TypeError, "delta must be a number", lambda: sigmascale.calibrate("gpt2-xl", delta="1e-6")),
        (TypeError, "as_paper must be True or False", lambda: sigmascale.calibrate("gpt2-xl", as_paper=1)),
        (TypeError, "bound must be a str", lambda: sigmascale.calibrate("gpt2-xl", bound=None)),
        (TypeError, "model must be a preset's name, a path or a config, not 3", lambda: sigmascale.calibrate(3)),
        (TypeError, "a path or a config, not None", lambda: sigmascale.calibrate(None)),
        (sigmascale.ArgumentError, "weights: x is None", lambda: sigmascale.calibrate({}, weights={"x": None})),
        (sigmascale.ArgumentError, "seq_len 0 must be at least 1", lambda: sigmascale.calibrate(MODEL, seq_len=0)),
        (sigmascale.ArgumentError, "layers 0 must be at least 1", lambda: sigmascale.stress("refit", MODEL, layers=0)),
        (sigmascale.ArgumentError, "unknown training model", lambda: sigmascale.stress("lr-spike", MODEL)),
        (
            TypeError,
            "pass the model itself, not <sigmascale calibration of",
            lambda: sigmascale.inspect(sigmascale.calibrate(MODEL)),
        ),
        (
            TypeError,
            "expected what calibrate.. returned, not <sigmascale inspection",
            lambda: sigmascale.descales(sigmascale.inspect(MODEL)),
        ),
        (sigmascale.ArgumentError, "UTF-8", lambda: sigmascale.calibrate("\udc80")),
        (TypeError, "weights: expected a mapping", lambda: sigmascale.calibrate(MODEL, weights=[1])),
        (
            sigmascale.ArgumentError,
            "go with a config",
            lambda: sigmascale.calibrate("gpt2-xl", weights={"x": np.zeros(3, np.float32)}),
        ),
        (
            sigmascale.ArgumentError,
            "weights is empty: give a state_dict",
            lambda: sigmascale.calibrate(MODEL, weights={}),
        ),
        (TypeError, "seed must be an integer", lambda: sigmascale.stress("refit", MODEL, seed="1")),
        (TypeError, "a policy must be a name or AutoC", lambda: sigmascale.stress("refit", MODEL, policies=[1])),
        (sigmascale.ArgumentError, "unknown policy magic", lambda: sigmascale.stress("refit", MODEL, policies="magic")),
        (
            sigmascale.ArgumentError,
            "duplicate policy auto-c",
            lambda: sigmascale.stress("refit", MODEL, policies=["auto-c", sigmascale.AutoC(kappa=2.0)]),
        ),
        (
            sigmascale.ArgumentError,
            "pooling 'tensor' is not one of model, layer, head",
            lambda: sigmascale.AutoC(pooling="tensor"),
        ),
        (
            sigmascale.ArgumentError,
            "kappa 0.5 must be",
            lambda: sigmascale.AutoC(kappa=0.5),
        ),
        (sigmascale.ArgumentError, "burn_in 0 must be at least 1", lambda: sigmascale.AutoC(burn_in=0)),
        (sigmascale.ArgumentError, "quantile nan must be finite", lambda: sigmascale.AutoC(quantile=float("nan"))),
        (sigmascale.ArgumentError, "quantile 2.0 must be", lambda: sigmascale.AutoC(quantile=2)),
        (sigmascale.ArgumentError, "algorithm 'foo' is not", lambda: sigmascale.DelayedTe(algorithm="foo")),
        (sigmascale.ArgumentError, "margin 1.5 must be", lambda: sigmascale.DelayedPaper(margin=1.5)),
        (sigmascale.ArgumentError, "delta 2.0 must be greater than 0 and less than 1", lambda: sigmascale.Tail(delta=2)),
        (sigmascale.ArgumentError, "eta 1.5 must be", lambda: sigmascale.Tail(eta=1.5)),
        (sigmascale.ArgumentError, "margin 33 must be", lambda: sigmascale.DelayedTe(margin=33)),
        (TypeError, "history must be an integer", lambda: sigmascale.DelayedPaper(history=1.5)),
        (TypeError, "seq_len must be an integer", lambda: sigmascale.Tail(seq_len="1024")),
        (TypeError, "profile: expected what calibrate", lambda: sigmascale.descales(None)),
    ],
)
def test_errors_have_a_fitting_class_and_say_the_rule(kind, message, work):
    with pytest.raises(kind, match=message):
        work()


def test_types_of_tensors_that_are_not_read_do_not_matter():
    weights = stored(MODEL)
    config = json.loads((MODEL / "config.json").read_text())
    plain = sigmascale.calibrate(config, weights=weights)
    others = {f"x.{dtype}": np.ones(3, dtype) for dtype in ("int64", "uint8", "bool", "int32")}
    assert sigmascale.calibrate(config, weights=weights | others)["layers"] == plain["layers"]
    name = "model.layers.4.self_attn.k_proj.weight"
    weights[name] = weights[name].astype(np.int64)
    with pytest.raises(sigmascale.FormatError, match="k_proj.weight` has type I64"):
        sigmascale.calibrate(config, weights=weights)


def test_weights_that_are_not_finite_are_refused():
    weights = stored(MODEL)
    name = "model.layers.4.self_attn.k_proj.weight"
    weights[name] = weights[name].copy()
    weights[name][3, 5] = np.nan
    with pytest.raises(sigmascale.NonFiniteError, match="layers.4.self_attn.k_proj"):
        sigmascale.calibrate(json.loads((MODEL / "config.json").read_text()), weights=weights)


def test_the_interpreter_lock_is_released():
    ticks = 0
    worker = threading.Thread(target=lambda: sigmascale.stress("refit", MODEL, layers=2, steps=3, seq_len=64))
    worker.start()
    while worker.is_alive():
        ticks += 1
        time.sleep(0.001)
    # With the lock held throughout, this loop would run once or twice.
    assert ticks > 5


def run(code):
    """What a fresh interpreter prints; it must end by itself."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


# What uses threads of the native module, in a parent and in its child.
THREADED = {
    "calibrate": f"sigmascale.calibrate({str(MODEL)!r})",
    "stream": "[stream.push(name, weights[name]) for name in weights] and stream.finish()",
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("before", THREADED)
@pytest.mark.parametrize("behind", THREADED)
def test_a_child_of_fork_does_not_wait_for_its_parents_threads(before, behind):
    code = f"""
import os, sigmascale, warnings
import numpy
# Python 3.12 warns of threads; they are what this is about.
warnings.simplefilter("ignore")
config = dict(model_type="llama", hidden_size=256, num_hidden_layers=1, num_attention_heads=4, rope_theta=1e4)
stream = sigmascale.ScaleStream(config)
names = [f"model.layers.0.self_attn.{{name}}_proj.weight" for name in "qkv"]
weights = {{name: numpy.random.default_rng(3).standard_normal((256, 256), numpy.float32) for name in names}}
weights["model.layers.0.input_layernorm.weight"] = numpy.ones(256, numpy.float32)
{THREADED[before]}
first = {THREADED[behind]}
child = os.fork()
if child == 0:
    same = ({THREADED[behind]}) == first
    print("same" if same else "other", flush=True)
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""
    assert run(code).split() == ["same", "0"]


def test_an_interrupt_ends_the_wait():
    code = """
import os, signal, sigmascale, threading, time
# Shells start what is in the background with the signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
start = time.monotonic()
try:
    sigmascale.stress("weight-spike", "mistral-7b", layers=1, steps=100_000)
except KeyboardInterrupt:
    # The work itself would take days.
    print("interrupted", flush=True)
os._exit(0)
"""
    assert hasattr(signal, "SIGINT") and run(code).split() == ["interrupted"]


def test_without_pytorch_the_error_names_the_command_that_installs_it():
    for work in (
        "import sigmascale.torch",
        "import sigmascale; sigmascale.torch",
        "import sigmascale; sigmascale.probe(print)",
    ):
        printed = run(f"import sys; sys.modules['torch'] = None; {work}")
        last = printed.strip().splitlines()[-1]
        assert last.startswith("ModuleNotFoundError: ") and "needs PyTorch" in last and "pip install torch" in last, (
            printed
        )


def test_pytorch_is_not_imported_before_it_is_used():
    code = "import sigmascale, sys; sigmascale.calibrate('gpt2-xl'); print('torch' in sys.modules); sigmascale.nothing"
    printed = run(code)
    assert printed.startswith("False") and "has no attribute 'nothing'" in printed
