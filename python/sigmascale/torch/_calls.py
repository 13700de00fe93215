"""Which backend ran each layer's calls, counted on the host, and what is said once of those that left FP8."""

import collections
import warnings

import torch

# By the address of the telemetry words of a layer, which stays the same and tells calls apart inside operators.
_COUNTERS = {}
_SAID = set()


def watch(words):
    """The counter of the layer with these words."""
    counter = _COUNTERS[words.data_ptr()] = collections.Counter()
    return counter


def forget(addresses):
    """Drops counters."""
    for address in addresses:
        _COUNTERS.pop(address, None)


def count(words, name):
    """Adds a call, where the layer is watched."""
    counter = None if words is None else _COUNTERS.get(words.data_ptr())
    if counter is not None:
        counter[name] += 1


def count_fallback(words, reason):
    """Adds a call that PyTorch's own attention takes, and says why once."""
    _say(reason)
    if words is not None and not torch.compiler.is_compiling():
        count(words, "bf16")


# Compiled code runs this while it is compiled.
@torch.compiler.assume_constant_result
def _say(reason):
    if reason not in _SAID:
        _SAID.add(reason)
        warnings.warn(f"attention runs in PyTorch's own kernels, not in FP8: {reason}", RuntimeWarning, stacklevel=5)
