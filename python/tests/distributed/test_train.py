"""The training example under torchrun: every mesh has the losses of one process, and checkpoints fit any number of ranks."""

import asyncio
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("torch")

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py"
SMALL = "--device cpu --width 64 --layers 2 --heads 4 --kv-heads 2 --seq-len 64 --batch 4 --every 1 --warmup 2"


def command(ranks, *options):
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--"] if ranks > 1 else []
    )
    text = str(pathlib.Path(asyncio.__file__).parent)
    return [sys.executable, *launcher, str(EXAMPLE), "--text", text, *SMALL.split(), *map(str, options)]


def losses(ranks, *options):
    """By step, and the one on held-out text as the last."""
    done = subprocess.run(command(ranks, *options), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {row.get("step", "held out"): row.get("loss", row.get("held_out_loss")) for row in rows[1:]}


def close(a, b):
    assert a.keys() == b.keys() and all(abs(a[step] - b[step]) < 2e-3 for step in a), (a, b)


@pytest.mark.parametrize("policy", ["geometry", "delayed-te"])
def test_a_run_goes_on_at_another_size(policy, tmp_path):
    options = ["--policy", policy, "--steps", 8]
    whole = losses(1, *options)
    first = losses(2, *options, "--cp", 2, "--stop", 4, "--save", tmp_path / "half")
    assert [path.name for path in tmp_path.iterdir()] == ["half"]
    close({step: first[step] for step in range(4)}, {step: whole[step] for step in range(4)})
    rest = {step: loss for step, loss in whole.items() if step not in range(4)}
    close(losses(1, *options, "--load", tmp_path / "half"), rest)
    tensor = [*options, "--tp", 2, "--load", tmp_path / "half"]
    if policy == "geometry":
        close(losses(4, *tensor), rest)
    else:
        # It has one scale for all heads of a layer.
        failed = subprocess.run(command(4, *tensor), capture_output=True, text=True, timeout=240)
        assert failed.returncode and "resume with the same tensor-parallel degree" in failed.stderr


def test_a_run_that_goes_on_has_the_same_bits(tmp_path):
    """The history of 16 steps reaches back across the end of the first part."""
    options = ["--policy", "delayed-paper", "--steps", 20]
    whole = losses(1, *options)
    losses(1, *options, "--stop", 12, "--save", tmp_path / "part")
    rest = losses(1, *options, "--load", tmp_path / "part")
    assert rest == {step: loss for step, loss in whole.items() if step not in range(12)}


def test_every_mesh_has_the_losses_of_one_process():
    close(losses(4, "--steps", 4, "--tp", 2, "--cp", 2), losses(1, "--steps", 4))


def test_a_rank_that_is_killed_ends_the_run_and_leaves_no_checkpoint(tmp_path):
    log = tmp_path / "log.jsonl"
    options = ["--steps", 100_000, "--save", tmp_path / "end", "--log", log]
    process = subprocess.Popen(command(2, *options), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 120
        while not (log.exists() and log.read_text().count("\n") > 4):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.2)
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        rank = {environment(child).get("RANK"): int(child) for child in children}
        os.kill(rank["1"], signal.SIGKILL)
        _, report = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode != 0 and "rank      : 1 (local_rank: 1)" in report and "Signal 9 (SIGKILL)" in report
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


def environment(process):
    entries = pathlib.Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return dict(entry.decode().partition("=")[::2] for entry in entries if entry)
