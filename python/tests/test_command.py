"""The command that the wheel brings, and the pages of results."""

import contextlib
import copy
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import sigmascale

MODEL = str(pathlib.Path(__file__).resolve().parents[2] / "data" / "tiny-llama")


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "sigmascale", *arguments], capture_output=True, text=True, timeout=120)


def test_the_command_prints_what_python_returns():
    done = run("calibrate", MODEL, "--format", "json")
    assert done.returncode == 0 and json.loads(done.stdout) == sigmascale.calibrate(MODEL), done.stderr
    assert run("--version").stdout == f"sigmascale {sigmascale.__version__}\n"


def test_the_installed_script_is_the_same_command():
    script = pathlib.Path(sys.executable).with_name("sigmascale")
    if not script.exists():
        pytest.skip("the package is not installed beside this interpreter")
    assert subprocess.run([script, "families"], capture_output=True, text=True).stdout == run("families").stdout


def test_exit_codes_are_the_commands():
    for code, arguments in [(2, ["calibrate", "--no-such-option"]), (1, ["calibrate", "/no/such/model"]), (2, [])]:
        done = run(*arguments)
        assert done.returncode == code and done.stderr and not done.stdout, done


def test_doctor_finds_the_libraries_of_its_own_environment():
    """Of a virtual environment that is not activated: only the path of its interpreter says where it is."""
    python = pathlib.Path(MODEL).parents[1] / "target" / "cuda-compiler" / "bin" / "python"
    version = f"import sys; print(sys.version_info[:2] == {tuple(sys.version_info[:2])})"
    if not python.exists() or "True" not in subprocess.run([python, "-c", version], capture_output=True, text=True).stdout:
        pytest.skip("needs NVRTC in an environment of its own for this version of Python, as .ci/run makes it")
    paths = {str(pathlib.Path(module.__file__).parents[1]) for module in (sigmascale, np)}
    given = {"PATH": "/nowhere", "HOME": os.environ.get("HOME", "/"), "PYTHONPATH": os.pathsep.join(paths)}
    command = [python, "-m", "sigmascale", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=given)
    assert done.returncode == 0, done.stderr
    (nvrtc,) = (fact for fact in json.loads(done.stdout)["gpu"]["facts"] if fact["name"] == "nvrtc")
    assert nvrtc["found"] and str(python.parents[1]) in nvrtc["value"], nvrtc


def test_a_long_call_shows_how_far_it_is():
    if not hasattr(os, "openpty"):
        pytest.skip("needs a pseudo-terminal")
    code = f"import sigmascale; sigmascale.stress('weight-spike', {MODEL!r}, layers=1, steps=200, policies='geometry')"
    terminal, device = os.openpty()
    seen = b""
    with subprocess.Popen([sys.executable, "-c", code], stdout=device, stderr=device) as process:
        os.close(device)
        # Read all the time: a terminal that nobody reads stops its writers. Its end is an error.
        with contextlib.suppress(OSError):
            while part := os.read(terminal, 4096):
                seen += part
        os.close(terminal)
    assert process.returncode == 0 and b"stress: " in seen and b"/200" in seen, seen


def test_doctor_reports_the_plugins(tmp_path):
    for name, parts in ENGINES.items():
        for part, text in parts.items():
            file = tmp_path / name / part
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    point = tmp_path / "plugged-1.0.dist-info"
    point.mkdir()
    (point / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    (point / "entry_points.txt").write_text("[vllm.general_plugins]\nsigmascale = sigmascale.vllm:register\n")

    def said(**environment):
        path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
        given = os.environ | {"PYTHONPATH": path} | environment
        done = subprocess.run(
            [sys.executable, "-m", "sigmascale", "doctor", "--format", "json"], capture_output=True, text=True, env=given
        )
        assert done.returncode == 0, done.stderr
        rows = {row["name"]: (row["found"], row["value"]) for row in json.loads(done.stdout)["plugins"]}
        assert rows.keys() == {"vllm", "sglang"} and rows["sglang"] == (False, rows["sglang"][1])
        return rows["vllm"]

    pytest.importorskip("torch")
    assert said() == (True, "9.8.7, the plugin loads; a model without scales is served with 1.0")
    assert said(SIGMASCALE_PLUGIN="strict") == (True, "9.8.7, the plugin loads; a model without scales stops the engine")
    assert said(SIGMASCALE_PLUGIN="0") == (False, "9.8.7, but SIGMASCALE_PLUGIN=0 turns the plugin off")
    assert said(VLLM_PLUGINS="others")[1].startswith("9.8.7, but VLLM_PLUGINS is 'others'")
    assert "expected 0, 1 or strict" in said(SIGMASCALE_PLUGIN="stric")[1]
    (tmp_path / "vllm" / "model_executor" / "layers" / "attention" / "__init__.py").write_text("")
    assert "the plugin does not load: ImportError: cannot import name 'Attention'" in said()[1]


# The modules of an engine that the plugin hooks.
ENGINES = {
    "vllm-9.8.7.dist-info": {"METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 9.8.7\n"},
    "vllm": {
        "__init__.py": "",
        "model_executor/__init__.py": "",
        "model_executor/layers/__init__.py": "",
        "model_executor/layers/attention/__init__.py": (
            "class Attention:\n    def process_weights_after_loading(self): ...\nclass MLAAttention(Attention): ...\n"
        ),
        "model_executor/model_loader/__init__.py": "",
        "model_executor/model_loader/utils.py": "def record_metadata_for_reloading(model): ...\n",
        "v1/__init__.py": "",
        "v1/core/__init__.py": "",
        "v1/core/kv_cache_utils.py": "",
        "v1/engine/__init__.py": "",
        "v1/engine/core.py": "class EngineCore:\n    def _initialize_kv_caches(self, config): ...\n",
    },
}


def body(page):
    """A page without the line that says how and when it was made."""
    lines = page.splitlines()
    made = [line for line in lines if line.startswith('<p class="made">')]
    assert len(made) == 1 and f"sigmascale {sigmascale.__version__}, " in made[0]
    return [line for line in lines if line not in made]


def test_results_show_the_commands_pages(tmp_path):
    page = tmp_path / "page.html"
    assert run("inspect", MODEL, "--html", str(page)).returncode == 0
    inspection = sigmascale.inspect(MODEL)
    assert body(inspection.to_html()) == body(page.read_text(encoding="utf-8"))
    shown = inspection._repr_html_()
    assert shown.startswith("<iframe srcdoc=") and "<script" not in shown and inspection["model"]["name"] in shown
    run("stress", "checkpoint-load", "--model", MODEL, "--layers", "1", "--html", str(page))
    assert body(sigmascale.stress("checkpoint-load", MODEL, layers=1).to_html()) == body(
        page.read_text(encoding="utf-8")
    )
    bare = type(inspection)(inspection)
    assert bare == inspection and bare._repr_html_() is None and copy.deepcopy(inspection).to_html()
    with pytest.raises(ValueError, match="has no page"):
        bare.to_html()
