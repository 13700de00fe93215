"""`benches/sharded.py`, which is for two GPUs, over gloo: that it runs, and that what it compares is equal."""

import json
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("torch")

SCRIPT = pathlib.Path(__file__).resolve().parents[3] / "benches" / "sharded.py"


def test_the_bench_of_sharded_models():
    tests = "scales", "addresses", "collectives", "ring"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--"]
    done = subprocess.run([*launcher, str(SCRIPT), *tests], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = {row["test"]: row["found"] for row in rows}
    assert tuple(found) == tests
    assert found["scales"]["fsdp"]["equal"] and found["scales"]["tp"]["equal"]
    # On the CPU weights are gathered at other addresses every time.
    assert found["addresses"]["computations"] == 100
    calls = {policy: sum(one["calls"].values()) for policy, one in found["collectives"].items()}
    assert calls["geometry"] == calls["None"] == calls["delayed-te"] - 1
    assert found["ring"]["e4m3"]["error"] < 0.05
