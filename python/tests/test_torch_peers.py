"""``benches/peers.py`` without a GPU: its cases, and the rows and the table that are made of contenders' times."""

import contextlib
import importlib.util
import pathlib
import sys
import types

import pytest

torch = pytest.importorskip("torch")

BENCHES = pathlib.Path(__file__).parents[2] / "benches"
OPTIONS = {"causal": [False, True], "seqlens": [2048, 16384], "tokens": 16384}


def script(name, monkeypatch):
    if not BENCHES.is_dir():
        pytest.skip("the benchmarks are not installed")
    spec = importlib.util.spec_from_file_location(name, BENCHES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_calls_have_the_tokens_and_operations_of_their_kind(monkeypatch):
    peers = script("peers", monkeypatch)
    cases = list(peers.calls(types.SimpleNamespace(**OPTIONS)))
    assert len({case.row for case in cases}) == len(cases) == 36
    for case in cases:
        assert case.batch * case.seqlen == (32768 if case.window else 16384)
        assert not case.lengths or sum(case.lengths) == case.seqlen
        # Pairs of a query and a key, counted; a whole diagonal counts half.
        if case.heads_q == 32:
            pairs = 0
            for length in case.lengths or (case.seqlen,) * case.batch:
                keys = torch.full((length,), length, dtype=torch.float64)
                if case.causal:
                    keys = torch.arange(length, dtype=torch.float64) + 0.5
                pairs += float(keys.clamp(max=case.window or length).sum())
            dims = case.dim + (case.dim_v or case.dim)
            assert case.flops() == pytest.approx(2 * case.heads_q * dims * pairs, rel=1e-5)
    full = peers.Case(64, 8, 128, 4096, 4, False)
    assert full.flops() == 4 * 4 * 64 * 128 * 4096**2 and full.row == "64,8,128,4096,4,0"


def test_casts_of_peers_turn_as_rope_does(monkeypatch):
    peers, rope = script("peers", monkeypatch), pytest.importorskip("sigmascale.torch._rope")
    monkeypatch.setattr(torch, "compile", lambda f, dynamic: f)
    casts, x, one = peers._e4m3(), torch.randn(2, 5, 3, 16), torch.ones(())
    cosine, sine = (f(torch.arange(40).reshape(5, 8) * 0.3) for f in (torch.cos, torch.sin))
    tables = cosine[None, :, None], sine[None, :, None]
    turned = rope.turn(x, cosine, sine, False)
    assert torch.allclose(casts[None](x, one, *tables), turned, atol=1e-6) and casts[None](x, one) is x
    # Values at the edge of two codes may fall to either side.
    differ = casts["cast"](x, 4 * one, *tables).float() != (4 * turned).to(peers.E4M3).float()
    assert differ.float().mean() < 0.01
    codes, amax = casts["current"](x, one, *tables)
    assert torch.isclose(amax, turned.abs().amax()) and codes.float().abs().amax() == 448


class Smi:
    of = staticmethod(lambda name: contextlib.nullcontext())
    medians = staticmethod(lambda name: ["600", "1800"])


def test_a_record_becomes_the_table_of_calls(monkeypatch, capsys, tmp_path):
    """A contender that refuses a call is a row with its reason, and a dash in the table."""
    peers, tables = script("peers", monkeypatch), script("tables", monkeypatch)
    milliseconds = {"sigmascale": 2.0, "sigmascale+reorder": 2.5, "fa3": 3.0, "fa3-vllm": 4.0, "fa3-bf16": 5.0}
    assert list(peers.contenders("calls")) == list(milliseconds)

    refusing = {"fa3", "fa3-bf16"}

    def maker(name):
        def launch(case):
            if case.window and name in refusing:
                raise RuntimeError("no windows, in this build\nat line 1")
            return name

        return lambda case, sets: lambda i: launch(case)

    monkeypatch.setattr(peers, "contenders", lambda table, rotated: {name: maker(name) for name in milliseconds})
    monkeypatch.setattr(peers, "capture", lambda launch, sets: (launch(0), launch))
    monkeypatch.setattr(peers, "replay_ms", lambda name, sets, ms: milliseconds[name])
    options = types.SimpleNamespace(kernels=None, rope=False, sets=1, rounds=2, milliseconds=1.0, **OPTIONS)
    cases = [case for case in peers.calls(options) if case.heads_q == 64 and case.dim == 128 or case.dim_v == 128]
    for case in cases:
        peers.compare("calls", case, options, Smi)
    printed = capsys.readouterr().out
    refused = "fa3,window-1024,64,8,128,32768,1,1,,,,,,,  # RuntimeError: no windows, in this build"
    assert refused in printed.splitlines()

    monkeypatch.setattr(tables, "RECORDS", tmp_path)
    (tmp_path / "2026-01-01-peers-calls-h200.csv").write_text(f"# a card\n{peers.header('calls')}\n{printed}")
    made = tables.calls().splitlines()
    assert len(made) == 2 + len(cases)
    faster, slower = "1.50 (1.50 to 1.50) | 1.20 (1.20 to 1.20)", "2.00 (2.00 to 2.00) | 1.60 (1.60 to 1.60)"
    ms, bf16 = "2.00 (2.00 to 2.00)", "2.50 (2.50 to 2.50)"
    assert f"| packed-8x2048 | 64, 8 | 1 x 16384, full | {ms} | {faster} | {bf16} | 600, 1800 |" in made
    assert f"| window-4096 | 64, 8 | 1 x 32768, causal | {ms} | {slower} | – | 600, 1800 |" in made
