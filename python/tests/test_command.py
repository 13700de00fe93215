"""The command that the wheel brings, and the pages of results."""

import copy
import json
import pathlib
import subprocess
import sys

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
