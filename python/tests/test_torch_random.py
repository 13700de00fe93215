"""Random calls of every interface against a plain attention in f64: a few here, thousands by ``random_calls.py``."""

import os

import pytest

torch = pytest.importorskip("torch")

from random_calls import INTERFACES, drawn, faults  # noqa: E402

COUNT, SEED = int(os.environ.get("SIGMASCALE_RANDOM_CALLS", 60)), int(os.environ.get("SIGMASCALE_RANDOM_SEED", 1))


def test_random_calls_are_those_of_a_plain_attention():
    met, found = set(), []
    for number in range(COUNT):
        call = drawn(1_000_000 * SEED + number, "cpu")
        met.add(call.interface.split()[0])
        found += [f"--seed {SEED} --first {number}: {call.words()}: {fault}" for fault in faults(call)]
    assert not found, "\n".join(found)
    assert COUNT < 60 or met == set(INTERFACES)


def test_what_the_comparison_would_find():
    """A window that is off by one, keys of another sequence, and a lost sink are all seen."""
    wrong = {"window": 0, "causal": 0, "sinks": 0}
    for number in range(150):
        call = drawn(number, "cpu")
        if call.interface not in ("dense", "packed") or call.wants_gradients:
            continue
        if call.window[0] >= 1 and not wrong["window"]:
            call.window = (call.window[0] - 1, call.window[1])
            wrong["window"] += bool(faults(call))
        elif call.sinks is not None and not wrong["sinks"]:
            call.sinks = None
            wrong["sinks"] += _unlike_with(call)
        elif not call.causal and call.window == (-1, -1) and not wrong["causal"]:
            held, call.causal = call.run, True
            call.causal = False
            call.run = held
            wrong["causal"] += _unlike_with(call, window=(-1, 0))
        if all(wrong.values()):
            break
    assert all(wrong.values()), wrong


def _unlike_with(call, **changed):
    """Whether a reference of other terms disagrees with the call as it ran."""
    results = call.run()
    call.run = lambda: results
    for name, value in changed.items():
        setattr(call, name, value)
    return bool(faults(call))
