"""The model of scales on many GPUs: its arithmetic by hand, and its committed output."""

import csv
import io
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORD = ROOT / "benches" / "records" / "2026-11-24-scale-out-model.csv"
sys.path.insert(0, str(ROOT / "benches"))

import scale_out  # noqa: E402


def test_an_all_reduce_goes_up_a_tree_and_down():
    us = lambda *call: 1e6 * scale_out.all_reduce(*call)
    assert us(1000, 1, 1) == 0
    # 6.8 to start; 7 hops over NVLink and none over the network, twice.
    assert us(0, 8, 1) == pytest.approx(6.8 + 2 * 7 * 0.6)
    # One GPU of each of 128 nodes: 7 levels of 5 us, twice.
    assert us(0, 128, 128) == pytest.approx(6.8 + 2 * 7 * 5.0)
    assert us(0, 64, 8) == pytest.approx(6.8 + 2 * (7 * 0.6 + 3 * 5.0))
    # What NCCL itself printed for 16 GPUs on two nodes: NVIDIA/nccl issue 1453.
    assert us(128, 16, 2) == pytest.approx(25.214764, rel=1e-3)
    assert us(4096, 16, 2) == pytest.approx(25.874907, rel=0.02) and us(32768, 16, 2) == pytest.approx(
        30.599243, rel=0.1
    )
    # 50 GB/s, twice the bytes for flags, there and back.
    assert us(25_000, 8, 1) - us(0, 8, 1) == pytest.approx(2.0)


def test_figures_are_single_rows_of_records():
    assert scale_out.DESCALES == pytest.approx(38.60e-6) and scale_out.PLAN == pytest.approx(56.31e-6)
    assert pytest.approx(40.934 - 12.193, abs=0.05) == scale_out.ALONE_US
    assert pytest.approx((2.715 - 2.511) * 1e-3 / 16384) == scale_out.AMAX_PER_TOKEN
    with pytest.raises(LookupError, match="2 rows"):
        scale_out.measured("2026-11-21-attention-end-to-end-h200.csv", "keys", keys="8192")
    with pytest.raises(LookupError, match="0 rows"):
        scale_out.measured("2026-11-24-scale-pass-h200.csv", "us", model="none")


def test_a_step_by_hand():
    layout = scale_out.Layout(64, tp=8, pp=1, cp=1, sequences=512, seq_len=8192)
    assert (layout.dp, layout.microbatches, layout.layers) == (8, 64, 80)
    operations = (6 * 70e9 + 6 * 80 * 64 * 128 * 8192) * 512 * 8192
    assert layout.step(0.4) == pytest.approx(operations / (64 * 989.5e12 * 0.4))
    with pytest.raises(AssertionError):
        scale_out.Layout(60, tp=8, pp=1, cp=1, sequences=512, seq_len=8192)


def test_costs_by_hand():
    layout = scale_out.Layout(4096, tp=8, pp=4, cp=1, sequences=2048, seq_len=8192)
    by_name = {cost.policy: cost for cost in scale_out.costs(layout, 10e-6)}
    plain, sharded = by_name["geometry"], by_name["geometry, FSDP"]
    assert plain.calls == sharded.calls == plain.checkpoint == 0 and plain.network == 0
    assert plain.kernels == pytest.approx(20 * 38.60e-6 / 8)
    assert sharded.kernels - plain.kernels == pytest.approx(20 * 10e-6) and sharded.memory == plain.memory / 20
    # 8 query heads and one KV head a rank: 10 heads of 128 channels.
    tables = 1280 * 32 + 3 * (96 + 128) + 10 * 8 + 68 + 4 * (4 + 4 + 3)
    assert plain.memory == 20 * tables
    delayed = by_name["delayed-te"]
    assert (delayed.calls, delayed.call_bytes) == (1, 20 * 2 * 9 * 16)
    assert delayed.network == pytest.approx(scale_out.all_reduce(5760, 128, 128))
    engine = by_name["DelayedScaling"]
    assert (engine.calls, engine.call_bytes) == (2 * 16, 20 * 9 * 4)
    both = scale_out.all_reduce(720, 1024, 128) + scale_out.all_reduce(480, 1024, 128)
    assert engine.network == pytest.approx(16 * both)
    assert by_name["current"].kernels == pytest.approx(20 * 16 * 8192 * 0.204e-3 / 16384 / 8)
    assert by_name["current"].calls == 0


def test_current_scaling_communicates_where_ranks_share_a_sequence():
    layout = scale_out.Layout(512, tp=8, pp=1, cp=8, sequences=64, seq_len=65536)
    cost = scale_out.current(layout)
    assert cost.calls == 2 * 80 * 8 and cost.network == pytest.approx(cost.calls * scale_out.all_reduce(4, 8, 8))
    # Each rank takes the amax of an eighth of the tokens.
    assert cost.kernels == pytest.approx(80 * 8 * 8192 * scale_out.AMAX_PER_TOKEN / 8)


def test_the_record_is_what_the_script_prints():
    done = subprocess.run(
        [sys.executable, ROOT / "benches" / "scale_out.py"], capture_output=True, text=True, check=True
    )
    kept = "".join(line for line in RECORD.read_text().splitlines(keepends=True) if not line.startswith("#"))
    assert kept == done.stdout
    rows = list(csv.DictReader(io.StringIO(kept)))
    assert {int(row["gpus"]) for row in rows} == {64, 512, 4096}


def test_options_that_make_no_sense_are_refused():
    for option in (("--mfu", "0"), ("--mfu", "1.5"), ("--alone-us", "-1")):
        done = subprocess.run(
            [sys.executable, ROOT / "benches" / "scale_out.py", *option], capture_output=True, text=True
        )
        assert done.returncode == 2 and "--mfu must be" in done.stderr
