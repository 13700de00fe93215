"""`benches/sharded.py`, which is for two GPUs, over gloo: that it runs, and that what it compares is equal."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("torch")

BENCHES = pathlib.Path(__file__).resolve().parents[3] / "benches"


LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--"]
# `scales` fails on one rank, with nothing for the other to wait for.
FAILING = """
import os, sharded
def wrong():
    if os.environ["RANK"] == "1":
        raise ValueError("the scales of rank 1")
sharded.TESTS["scales"] = wrong
sharded.main()
"""


def test_the_bench_of_sharded_models():
    tests = "scales", "addresses", "collectives", "ring"
    done = subprocess.run([*LAUNCHER, str(BENCHES / "sharded.py"), *tests], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = _rows(done)
    found = {row["test"]: row["found"] for row in rows}
    assert tuple(found) == tests
    assert set(found["scales"]) == {f"{kind}, bound={bound}" for kind in ("fsdp", "tp") for bound in (None, "worst-case")}
    assert all(one["equal"] for one in found["scales"].values())
    # On the CPU weights are gathered at other addresses every time.
    assert found["addresses"]["computations"] == 100
    calls = {policy: sum(one["calls"].values()) for policy, one in found["collectives"].items()}
    assert calls["geometry"] == calls["None"] == calls["delayed-te"] - 1
    assert found["ring"]["e4m3"]["error"] < 0.05


def test_a_failing_test_of_the_bench_leaves_the_others_to_run(tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    paths = f"{BENCHES}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [*LAUNCHER, str(script), "scales", "ring"],
        capture_output=True, text=True, timeout=600, env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    rows = {row["test"]: row for row in _rows(done)}
    assert done.returncode and rows["scales"]["failed"] == "ValueError: the scales of rank 1"
    assert rows["ring"]["found"]["ranks"] == 2 and "rank 1: scales: ValueError" in done.stderr


def _rows(done):
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
