"""The scripts of `docs/evidence` on the CPU, in sizes of seconds."""

import argparse
import json
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "python" / "examples"


def run(script, *words):
    done = subprocess.run([sys.executable, EXAMPLES / script, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_scenarios_branch_from_one_calm_run(tmp_path):
    (tmp_path / "text").mkdir()
    source = (ROOT / "README.md").read_text()
    (tmp_path / "text" / "a.md").write_text(source * (1 + 120_000 // len(source)))
    small = "--device cpu --size 5m --width 32 --layers 1 --heads 2 --kv-heads 1 --batch 1 --seq-len 16 --warmup 2"
    asked = "--steps 8 --branch 4 --policies bf16,geometry,delayed-te".split()
    run("evidence.py", "--text", tmp_path / "text", "--to", tmp_path / "logs", *small.split(), *asked)
    logs = sorted((tmp_path / "logs").iterdir())
    rows = {log.name.split("-")[2]: [json.loads(line) for line in log.read_text().splitlines()] for log in logs}
    assert sorted(rows) == ["bf16", "delayed", "geometry"]
    of = lambda policy, scenario: [row for row in rows[policy][1:] if row["scenario"] == scenario]
    for policy in ("geometry", "delayed"):
        for scenario in ("spike", "resume", "nan", "swap", "blown"):
            assert [row.get("step") for row in of(policy, scenario)] == [4, 5, 6, 7, None]
    # A policy without state has the calm run's bits in every scenario that changes only states, and never overflows.
    calm = of("geometry", "calm")[4:8]
    for scenario in ("resume", "nan", "swap", "blown"):
        assert [row["loss"] for row in of("geometry", scenario)[:4]] == [row["loss"] for row in calm]
    assert of("geometry", "spike")[1]["loss"] != calm[1]["loss"]
    assert not any(row.get("overflow") for row in rows["geometry"][1:])
    # The rate rises from the first step on, so a history of maxima is too small.
    assert sum(row["skipped"] for row in of("delayed", "nan")[:4]) == sum(
        row["overflow"] > 0 for row in of("delayed", "nan")[:4]
    )
    table = run("evidence.py", "--table", *logs)
    assert table.count("\n") == 2 + 3 + 3 + 4 * 2 and "| nan | geometry | 1 |" in table


@pytest.mark.parametrize("policy", ["geometry", "delayed-te", "delayed-paper", "auto-c"])
def test_a_branch_begins_where_the_calm_run_was(policy, monkeypatch):
    """Also after the held-out loss, whose calls a policy that observes would take in."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import evidence

    args = argparse.Namespace(device="cpu", style="llama", size="5m", biases=0.0, batch=1, seq_len=16, lr=1e-3)
    args.steps, args.dimensions = 40, {"width": 32, "layers": 1, "heads": 2, "kv_heads": 1}
    tokens = torch.randint(0, 256, (4096,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    run = evidence.Run(args, policy, 0)

    def taken(first, last):
        stream = evidence.train_gpt.batches(tokens, 1, 16, first, torch.device("cpu"))
        rows = evidence.steps(run, stream, first, last, lambda step: 1e-2)
        return rows, run.runtime.state_dict()["state"], run.runtime.descales.clone()

    taken(0, 12)
    kept = run.keep()
    *calm, descales = taken(12, 20)
    run.held_out(tokens)
    run.put_back(kept)
    *again, others = taken(12, 20)
    assert calm == again and torch.equal(descales, others)


def test_a_checkpoint_is_fine_tuned(tmp_path):
    words = "--device cpu --steps 4 --branch 2 --batch 1 --seq-len 16 --policies bf16,auto-c --lr 1e-5".split()
    given = "--text", ROOT / "docs", "--to", tmp_path, "--finetune", ROOT / "data" / "tiny-llama"
    run("evidence.py", *given, *words)
    for log in tmp_path.iterdir():
        head, *rows, end = [json.loads(line) for line in log.read_text().splitlines()]
        assert len(rows) == 4 and end["held_out_loss"] < 4 and head["bytes"][0] > 1e5
        assert ("slack" in end) == (head["policy"] == "auto-c")
    # Of all steps: nothing branches from a fine-tune.
    assert run("evidence.py", "--table", *tmp_path.iterdir()).count(" of 4 ") == 2
