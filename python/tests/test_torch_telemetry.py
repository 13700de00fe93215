"""Telemetry of every step, of every n-th, and none."""

import pytest

torch = pytest.importorskip("torch")

import sigmascale  # noqa: E402
import sigmascale.torch as fp8  # noqa: E402
from sigmascale.torch import _calls  # noqa: E402


@pytest.fixture
def model():
    generator = torch.Generator().manual_seed(0)
    make = lambda rows: torch.nn.Parameter(0.1 * torch.randn(rows, 64, generator=generator))
    made = torch.nn.Module()
    made.q, made.k, made.v = make(128), make(64), make(64)
    return made


def attached(model, **options):
    one = fp8.Layer(q=model.q, k=model.k, v=model.v, n_q_heads=4, n_kv_heads=2)
    return fp8.attach(model, layers=[one], **options)


def call(runtime, run=fp8.attention):
    make = lambda heads: torch.randn(1, 9, heads, 32, generator=torch.Generator().manual_seed(heads))
    return run(make(4), make(2), make(2), runtime.layers[0])


@pytest.mark.parametrize(
    ("telemetry", "steps"),
    [("full", [1, 1, 1, 1, 1]), ("off", [0] * 5), (1, [1] * 5), (2, [1, 0, 1, 0, 1]), (4, [1, 0, 0, 0, 1])],
)
def test_statistics_are_those_of_every_nth_step(model, telemetry, steps):
    runtime = attached(model, telemetry=telemetry)
    plain = attached(model)
    outs = []
    for reports in steps:
        outs.append(call(runtime))
        stats, expected = runtime.stats(), (call(plain), plain.stats())[1]
        assert stats["reported"] == bool(reports)
        assert (stats["amax"] == expected["amax"] * reports).all() and (stats["amax"] > 0).any() == bool(reports)
        # Calls are counted in any case.
        assert stats["calls"]["native"].tolist() == [1]
        assert stats["why"]["native"] == {"on the CPU the crate's own attention runs": [1]}
        for one in (runtime, plain):
            one.refresh()
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_it_may_be_set_between_steps(model):
    runtime = attached(model, telemetry="off")
    assert not runtime.reporting and runtime.layers[0].reported is None
    runtime.telemetry = "full"
    call(runtime)
    assert runtime.telemetry == "full" and runtime.stats()["amax"].any()
    for wrong in ("none", 0, -1, 1.5, True, None):
        with pytest.raises(sigmascale.ArgumentError, match="telemetry"):
            runtime.telemetry = wrong
    assert runtime.telemetry == "full"


@pytest.mark.parametrize("policy", ["delayed-te", "delayed-paper", "auto-c"])
def test_policies_that_plan_from_it_need_all_of_it(model, policy):
    with pytest.raises(sigmascale.UnsupportedError, match=f"'{policy}'.*every step"):
        attached(model, policy=policy, telemetry=10)
    runtime = attached(model, policy=policy)
    with pytest.raises(sigmascale.UnsupportedError, match="every step"):
        runtime.telemetry = "off"


def test_a_monitor_needs_some_of_it(model):
    with pytest.raises(sigmascale.ArgumentError, match="telemetry='off'"):
        fp8.Monitor(attached(model, telemetry="off"), None)
    fp8.Monitor(attached(model, telemetry=10), None).close()


def test_compiled_code_has_a_version_with_and_one_without(model):
    runtime = attached(model, telemetry=2)
    torch._dynamo.reset()
    compiled = torch.compile(fp8.attention, fullgraph=True, backend="aot_eager")
    expected = call(runtime)
    runtime.refresh()
    runtime.refresh()
    for reports in (True, False, True, False):
        assert torch.equal(call(runtime, compiled), expected)
        stats = runtime.stats()
        # A call is counted by its layer, not by where its words lie, of which compiled code may hold a copy.
        assert stats["amax"].any() == reports and stats["calls"]["native"].tolist() == [1]
        runtime.refresh()
    torch._dynamo.reset()


def test_observers_of_a_layer_see_compiled_calls(model):
    runtime, seen = attached(model), []
    _calls.observe(runtime.layers[0].key, lambda *given: seen.append(given[-1]))
    torch._dynamo.reset()
    call(runtime, torch.compile(fp8.attention, fullgraph=True, backend="aot_eager"))
    runtime.telemetry = "off"
    call(runtime)
    assert seen == [True, False]
    torch._dynamo.reset()


def test_counters_go_with_their_plans(model):
    import gc

    runtime = attached(model)
    key = runtime.layers[0].key
    assert key in _calls._COUNTERS
    del runtime
    gc.collect()
    assert key not in _calls._COUNTERS and key not in _calls._REASONS
