"""The BF16 attention of the examples, with and without the shifted softmax."""

import json
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import bf16_attention

    return bf16_attention


def operands(copies=1):
    """q, k and v in BF16's values, every key so many times."""
    made = torch.Generator().manual_seed(0)
    draw = lambda heads, count: torch.randn(2, heads, count, 16, generator=made).bfloat16().float()
    q, k, v = 3 * draw(4, 24), draw(2, 24 // copies).repeat_interleave(copies, dim=2), -draw(2, 24).abs() - 1
    return [x.requires_grad_(True) for x in (q, k, v)]


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("copies", [1, 3])
def test_it_is_attention_whatever_the_shift(example, copies, shifted):
    given = operands(copies)
    made = torch.Generator().manual_seed(1)
    direction = torch.randn(2, 4, 24, 16, generator=made)
    out = example.flash(*given, shifted=shifted)
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(x.double() for x in given), is_causal=True, enable_gqa=True
    )
    error = lambda a, b: float((a.double() - b).detach().norm() / b.detach().norm())
    assert error(out, exact) < 4e-3
    ours = torch.autograd.grad(out, given, direction.bfloat16())
    theirs = torch.autograd.grad(exact, given, direction.double())
    assert all(error(a, b.double()) < 0.05 for a, b in zip(ours, theirs))


def test_the_shift_keeps_weights_of_repeated_maxima_below_one(example):
    logits = torch.tensor([[3.0, 3.0, 1.0], [3.0, 2.0, 1.0], [-5.0, -5.0, -6.0], [70.0, 70.0, 0.0]])
    plain, repeats = example.shift(logits, shifted=False)
    assert plain.flatten().tolist() == [3.0, 3.0, -5.0, 70.0] and repeats.flatten().tolist() == [True, False, True, True]
    moved, _ = example.shift(logits, shifted=True)
    # 70 would move by 70 nats, which empties the row: 20 + 70 mod 20.
    assert moved.flatten().tolist() == [6.0, 3.0, 0.0, 100.0]
    p = torch.exp(logits - moved).bfloat16()
    assert bool((p[[0, 2, 3]] < 1).all()) and p[1, 0] == 1


@pytest.mark.parametrize("options", ["--attention flash", "--attention shifted", "--attention shifted --only-layer 1"])
def test_a_model_trains_with_it(options, tmp_path):
    (tmp_path / "a.txt").write_text("one layer in flash attention, the others standard. " * 3000)
    small = "--device cpu --width 32 --layers 2 --heads 2 --kv-heads 1 --seq-len 16 --batch 4 --steps 12 --warmup 2 --every 1"
    words = [sys.executable, EXAMPLES / "train_gpt.py", "--text", tmp_path, *small.split(), *options.split()]
    done = subprocess.run([*map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.25
