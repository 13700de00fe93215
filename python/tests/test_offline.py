"""Calibrate, inspect, stress and export: what the command line gives, and exceptions of a fitting class."""

import json
import os
import pathlib
import subprocess
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
    from_files = sigmascale.calibrate(MODEL)
    from_memory = sigmascale.calibrate(config, weights=stored(MODEL))
    assert from_memory["layers"] == from_files["layers"]
    assert sigmascale.calibrate(MODEL / "config.json", weights=stored(MODEL))["layers"] == from_files["layers"]


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


def test_exported_scales_are_the_largest_of_the_heads(tmp_path):
    file = tmp_path / "scales.safetensors"
    sigmascale.export_scales(MODEL, file)
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    info = header["model.layers.2.self_attn.k_scale"]
    value = np.frombuffer(data[8 + length :][slice(*info["data_offsets"])], np.float32)[0]
    assert value == sigmascale.descales(sigmascale.calibrate(MODEL))["k"][2].max()


@pytest.mark.parametrize(
    ("kind", "message", "work"),
    [
        (FileNotFoundError, "the presets are", lambda: sigmascale.calibrate("no-such-model")),
        (sigmascale.ArgumentError, "eta 2", lambda: sigmascale.calibrate("gpt2-xl", eta=2.0)),
        (ValueError, "not one of certain", lambda: sigmascale.calibrate("gpt2-xl", bound="safe")),
        (TypeError, "unknown option 'etta'", lambda: sigmascale.calibrate("gpt2-xl", etta=0.5)),
        (sigmascale.UnsupportedError, "bloom", lambda: sigmascale.calibrate({"model_type": "bloom"})),
        (sigmascale.FormatError, "num_hidden_layers", lambda: sigmascale.calibrate({"model_type": "llama"})),
        (sigmascale.ArgumentError, "needs weights", lambda: sigmascale.inspect("gpt2-xl")),
        (sigmascale.ArgumentError, "scenario", lambda: sigmascale.stress("rain", MODEL)),
        (sigmascale.ArgumentError, "needs a model", lambda: sigmascale.stress("refit")),
        (sigmascale.ArgumentError, "int64", lambda: sigmascale.calibrate({}, weights={"x": np.zeros(3, np.int64)})),
        (OSError, "folder", lambda: sigmascale.export_scales(MODEL, "/no/such/folder/scales.safetensors")),
    ],
)
def test_errors_have_a_fitting_class_and_say_the_rule(kind, message, work):
    with pytest.raises(kind, match=message):
        work()


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
    assert ticks > 20
