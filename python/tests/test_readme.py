"""The snippets of both READMEs and of the guides run as they stand: NumPy and command lines anywhere, PyTorch on a GPU.

Without a GPU those of PyTorch run on the CPU, by the change that the README names: `.cuda()` is left out.
"""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = pathlib.Path(os.environ.get("SIGMASCALE_BIN", ROOT / "target" / "debug" / "sigmascale")).resolve()


# Python of sharded.md needs a process group: the tests in `distributed` have it. Blocks without a language start engines.
PAGES = [ROOT / "README.md", ROOT / "python" / "README.md", ROOT / "docs" / "evidence" / "README.md"]
PAGES += sorted(page for page in (ROOT / "docs").glob("*.md") if page.name != "sharded.md")


def blocks(kind):
    text = "\n".join(page.read_text() for page in PAGES if page.exists())
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder with the repository's data, so that what snippets write stays away from it."""
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def snippets(*kinds):
    """Python snippets that need NumPy alone, PyTorch on the CPU, or a GPU."""
    needs = lambda code: "gpu" if "cuda" in code or "runtime" in code else "torch" if "torch" in code else "numpy"
    return [code for code in blocks("python") if needs(code) in kinds]


def run(codes):
    names = {}
    for code in codes:
        exec(compile(code, "README.md", "exec"), names)
    return names


def test_numpy_snippets(folder):
    run(snippets("numpy"))
    assert len(snippets("numpy")) >= 7 and (folder / "spectra.html").exists() and (folder / "served").is_dir()


def test_snippets_of_pytorch_on_the_cpu(folder):
    pytest.importorskip("transformers")
    codes = snippets("numpy", "torch", "gpu")
    names = run(code.replace(".cuda()", "").replace('device="cuda"', 'device="cpu"') for code in codes)
    assert len(codes) >= 14 and names["out"].shape == (2, 512, 4, 64)


def test_gpu_snippets(folder):
    torch = pytest.importorskip("torch")
    if not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)):
        pytest.skip("needs a GPU of compute capability 9.0")
    names = run(snippets("gpu"))
    assert len(snippets("gpu")) >= 2 and names["out"].shape == (2, 512, 4, 64)


# What starts a command, with `$ ` or in a block without a language.
PROGRAMS = "sigmascale cargo python python3 pip pipx torchrun vllm trtllm-serve mistralrs docker .ci/".split()


def commands():
    """Each command of the guides, with its page: lines behind `$ `, and lines of blocks without a language that start with a
    program. Blocks of `sh` are scripts, which are not run."""
    found = []
    for page in sorted({*PAGES, *ROOT.glob("*.md"), ROOT / "docs" / "sharded.md", *(ROOT / "calibration").rglob("*.md")}):
        if page.name == "CHANGELOG.md":
            continue
        for kind, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```", page.read_text(), re.MULTILINE | re.DOTALL):
            lines = [line.strip().partition(" # ")[0].strip() for line in block.splitlines()]
            if kind == "console":
                found += [(page, line.removeprefix("$ ")) for line in lines if line.startswith("$ ")]
            elif not kind:
                found += [(page, line) for line in lines if line.startswith(tuple(PROGRAMS))]
    return found


# Benchmarks, GPUs and training: listed in tests/README.md, or their arguments are parsed below.
LONG = re.compile("bench|cuda|tiny-.*-train|^for ")


def run_here():
    """The commands that `test_command_lines` runs."""
    lines = dict.fromkeys(line for _, line in commands() if line.startswith("sigmascale "))
    return [line.removeprefix("sigmascale ") for line in lines if not LONG.search(line)]


@pytest.mark.skipif(not BINARY.exists(), reason=f"the command is not built at {BINARY}")
def test_command_lines(folder):
    lines = run_here()
    (folder / "runs").mkdir()
    for command in lines:
        # What takes a minute in a build for tests is made small; what the arguments mean is tested with the command.
        small = command.replace("--model mistral-7b --layers 2", "--model data/tiny-llama --layers 1 --steps 2")
        small = small.replace("weight-spike --model data/tiny-llama --tokens", "weight-spike --layers 1 --steps 2 --model data/tiny-llama --tokens")
        small = small.replace("stress ablate", "stress ablate --parameters eta --layers 1 --steps 2")
        small = small.replace("stress low-precision", "stress low-precision --remedies none --steps 2")
        small = small.replace("calibrate NAME", "calibrate mistral-7b").replace("calibration/profiles/NAME.json", "NAME.json")
        arguments = shlex.split(small.replace("stress all", "stress refit --steps 2 --layers 1").split(" --trace")[0])
        done = subprocess.run([BINARY, *arguments], capture_output=True, text=True)
        # The record of the run that fails raises alarms.
        assert done.returncode == ("diagnose data/runs/low-precision.jsonl" in command), (command, done.stderr)
    assert len(lines) >= 20


def test_every_command_is_run_or_listed_with_its_last_run():
    """A command of a guide is run by a test above, by `.ci/run`, or is a row of the list in tests/README.md."""
    table = (ROOT / "tests" / "README.md").read_text().partition("## Commands that no test runs")[2]
    rows = re.findall(r"^\| `(.*?)` \| (.+?) \|$", table, re.MULTILINE)
    listed = dict(rows)
    assert len(listed) == len(rows) >= 10, "a command is listed twice, or the list is gone"
    # cargo test and its filters are .ci/run; so is the wheel. A lane is a command by itself. `runs` is a folder for output.
    elsewhere = re.compile(r"cargo test$|cargo test --test (?!gpu)|\.ci/\S+$|\.ci/wheel |mkdir runs$")
    here = {"sigmascale " + line for line in run_here()}
    seen = set()
    for page, line in commands():
        if line in here or elsewhere.match(line):
            continue
        assert line in listed, f"{page.relative_to(ROOT)}: `{line}` is run by no test and not listed in tests/README.md"
        seen.add(line)
    assert not set(listed) - seen, f"listed in tests/README.md and on no page: {set(listed) - seen}"
    for command, last in listed.items():
        for record in re.findall(r"\]\(([^)\s]+)\)", last):
            assert (ROOT / "tests" / record).exists(), f"{command}: {record} does not exist"


def test_other_command_lines_name_what_exists():
    checked = 0
    for _, line in commands():
        for pattern, folder in ((r"--example (\w+)", "examples"), (r"--test (\w+)", "tests")):
            for name in re.findall(pattern, line):
                crates = [ROOT / crate / folder for crate in (".", "lab", "cli")]
                places = [place for crate in crates for place in (crate / f"{name}.rs", crate / name / "main.rs")]
                assert any(place.exists() for place in places), f"{line}: no such target in {folder}"
                checked += 1
        for script in re.findall(r"^(?:python|torchrun .* --) (\S+\.py)", line):
            assert (ROOT / script).exists(), f"{line}: no such file"
            checked += 1
    assert checked >= 14


@pytest.mark.skipif(not BINARY.exists(), reason=f"the command is not built at {BINARY}")
def test_command_lines_of_training_have_arguments_that_parse():
    lines = [line for _, line in commands() if re.search("^sigmascale .*tiny-.*-train", line)]
    for line in lines:
        # `--help` comes after every other argument has been read, and nothing is trained.
        done = subprocess.run([BINARY, *shlex.split(line)[1:], "--help"], capture_output=True, text=True)
        assert done.returncode == 0, (line, done.stderr)
    assert len(lines) >= 3


@pytest.mark.skipif(not BINARY.exists(), reason=f"the command is not built at {BINARY}")
def test_sample_of_verify_is_what_it_prints(folder):
    export = [BINARY, "export", "data/tiny-llama", "--to", "audited", "--for", "vllm"]
    subprocess.run(export, capture_output=True, check=True)
    printed = subprocess.run([BINARY, "verify", "audited"], capture_output=True, text=True, check=True).stdout
    (sample,) = (block for block in blocks("text") if block.startswith("audited, "))
    assert set(sample.splitlines()) - {"..."} <= set(printed.splitlines())


@pytest.mark.skipif(not BINARY.exists(), reason=f"the command is not built at {BINARY}")
def test_sample_of_stress_is_what_it_prints(folder):
    run = [BINARY, *"stress weight-spike --model data/tiny-llama --tokens data/sample.py --mode operands".split()]
    printed = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    (sample,) = (block for block in blocks("text") if block.startswith("weight-spike"))
    assert sample.splitlines() == printed.splitlines()[: len(sample.splitlines())]


def test_pictures_are_those_of_their_records(tmp_path):
    drawn = {path: path.read_bytes() for path in (ROOT / "docs" / "figures").glob("*.svg")}
    for script in (ROOT / "docs" / "figures").glob("*.py"):
        subprocess.run([sys.executable, script, "--to", tmp_path / f"{script.stem}.svg"], check=True)
    assert drawn and all((tmp_path / path.name).read_bytes() == text for path, text in drawn.items())


def test_tables_are_those_of_their_records():
    done = subprocess.run([sys.executable, ROOT / "benches" / "tables.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def anchors(page):
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    folders = ["benches", "calibration", "data", "docs", "examples", "kernels", "python/examples", "tests"]
    pages = {*PAGES, *ROOT.glob("*.md"), *(page for name in folders for page in (ROOT / name).rglob("*.md"))}
    assert ROOT / "docs" / "evidence" / "README.md" in pages
    for page in sorted(pages):
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", page.read_text()):
            if "://" in target:
                continue
            file = page.parent / target if target else page
            assert file.exists(), f"{page.name} links to {target}, which does not exist"
            if anchor and file.suffix == ".md":
                assert anchor in anchors(file), f"{page.name} links to {target}#{anchor}, which is no heading"


def test_the_tables_of_the_cache_study_are_those_of_its_record():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    study = ROOT / "calibration" / "fp8-cache"
    (record,) = study.glob("*.csv")
    command = [sys.executable, study / "study.py", "--tables", record]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line for line in printed.splitlines() if line.startswith("| ")]
    page = (study / "README.md").read_text().splitlines()
    assert len(lines) >= 46 and [line for line in lines if line not in page] == []
