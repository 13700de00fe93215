"""A checkpoint of the training example is there whole, whenever a process is killed while it saves."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest
from test_train import SMALL, command, losses

torch = pytest.importorskip("torch")

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import sharding  # noqa: E402

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir")
dying = {}


def die(event, _):
    """Ends the process by SIGKILL before its n-th change to a folder."""
    if dying and event in CHANGES:
        dying["after"] -= 1
        if dying["after"] < 0:
            os.kill(os.getpid(), signal.SIGKILL)


sys.addaudithook(die)


def made(step):
    model = torch.nn.Linear(3, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def save(folder, step, after):
    """In a process that is killed before change number `after`; returns whether it was."""
    child = os.fork()
    if child == 0:
        try:
            dying["after"] = after
            sharding.Ranks("cpu", 1, 1).save(folder, step, *made(step), None)
        except BaseException as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def loaded(folder):
    """Step of the checkpoint, whose weights are all of that step."""
    model, optimizer = made(-1)
    step = sharding.Ranks("cpu", 1, 1).load(folder, model, optimizer, None)
    assert all((parameter == step).all() for parameter in model.parameters())
    return step


def test_a_process_killed_at_any_moment_of_a_save(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    folder, moment, found = tmp_path / "end", 0, []
    assert not save(folder, 0, 1000)
    while save(folder, moment + 1, moment):
        found.append(loaded(folder))
        assert found[-1] in (0, moment + 1)
        # What was left behind is no obstacle to the next save.
        assert not save(folder, 0, 1000) and loaded(folder) == 0
        assert [path.name for path in tmp_path.iterdir()] == ["end"]
        moment += 1
    assert loaded(folder) == moment + 1
    # The draft, its metadata, two renames, and what is removed of the one before; from the second rename on it is the new one.
    new = next(at for at, step in enumerate(found) if step)
    assert moment >= 6 and found == [0] * new + list(range(new + 1, moment + 1)) and 3 < new < moment


KILLED = """
import os, runpy, signal, sys
import torch.distributed.checkpoint as dcp
original = dcp.FileSystemWriter.write_data
def write_data(self, plan, planner):
    done = original(self, plan, planner)
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return done
dcp.FileSystemWriter.write_data = write_data
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_rank_that_is_killed_while_it_saves(tmp_path):
    """The launcher names it, the others end with an error, and the checkpoint before is the one that is there."""
    killed, end = tmp_path / "killed.py", tmp_path / "end"
    killed.write_text(KILLED)
    options = ["--policy", "delayed-te", "--steps", 4, "--save", end]
    losses(1, *options, "--stop", 1)
    line = command(2, *options, "--stop", 2)
    place = line.index("--") + 1
    done = subprocess.run([*line[:place], str(killed), *line[place:]], capture_output=True, text=True, timeout=240)
    assert done.returncode != 0 and SMALL
    assert "rank      : 1 (local_rank: 1)" in done.stderr and "Signal 9 (SIGKILL)" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["end", "end.part", "killed.py"]
    assert not (tmp_path / "end.part" / ".metadata").exists()
    assert min(losses(1, *options, "--load", end).keys() - {"held out"}) == 1
