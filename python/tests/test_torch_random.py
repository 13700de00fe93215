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


# What a call may be taken for, and of which calls.
WRONG = {
    "a window that is one key wider": (
        lambda call: call.window[0] in (0, 1),
        lambda call: {"window": (call.window[0] + 1, call.window[1])},
    ),
    "no sinks": (lambda call: call.sinks is not None, lambda call: {"sinks": None}),
    "a causal mask": (lambda call: not call.causal and call.window == (-1, -1), lambda call: {"causal": True}),
    "no soft-cap": (lambda call: call.softcap == 1.0, lambda call: {"softcap": 0.0}),
    "a softmax scale that is a fifth larger": (
        lambda call: len(call.parts[0][1]) > 1,
        lambda call: {"scale": 1.2 * call.scale},
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_comparison_finds_calls_of_other_terms(name):
    """Otherwise the test above could not fail. Short sequences see the same keys with or without a window: not every
    call tells."""
    applies, changed = WRONG[name]
    told = tried = 0
    for number in range(200):
        call = drawn(number, "cpu")
        if call.interface != "dense" or call.spoiled or not applies(call):
            continue
        call.wants_gradients = False
        results = call.run()
        assert not faults(call)
        for field, value in changed(call).items():
            setattr(call, field, value)
        call.run = lambda: results
        told, tried = told + bool(faults(call)), tried + 1
        if tried == 4:
            break
    assert told >= 3, (told, tried)
