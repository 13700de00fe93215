"""Which backend ran each layer's calls, counted on the host, who looks at these calls, and what is said once of those that left FP8."""

import collections
import warnings

import torch

# By the address of the telemetry words of a layer, which stays the same and tells calls apart inside operators.
_COUNTERS = {}
_SAID = set()
# Functions that are told of each call, by the same address; and of the backward of one call, by the address of its log-sum-exp.
_OBSERVERS, _BACKWARDS = {}, {}


def watch(words):
    """The counter of the layer with these words."""
    counter = _COUNTERS[words.data_ptr()] = collections.Counter()
    return counter


def forget(addresses):
    """Drops counters and observers."""
    for address in addresses:
        _COUNTERS.pop(address, None)
        _OBSERVERS.pop(address, None)


def observe(words, observer):
    """Tells ``observer`` of each call of the layer with these words: q, k and v, the log-sum-exp, and whether a backward follows."""
    _OBSERVERS.setdefault(words.data_ptr(), []).append(observer)


def unobserve(words, observer):
    """Ends that."""
    observers = _OBSERVERS.get(words.data_ptr(), [])
    if observer in observers:
        observers.remove(observer)


def observe_backward(lse, observer):
    """Tells ``observer`` of the backward of the call that returned ``lse``."""
    _BACKWARDS[lse.data_ptr()] = observer


def unobserve_backwards(observers):
    """Ends that, for backwards that never came."""
    for address in [address for address, observer in _BACKWARDS.items() if observer in observers]:
        del _BACKWARDS[address]


def saw(words, *call):
    """Tells who looks at the layer's calls of one."""
    if words is not None and _OBSERVERS:
        for observer in tuple(_OBSERVERS.get(words.data_ptr(), ())):
            observer(*call)


def saw_backward(lse, *call):
    """Tells who waits for this backward."""
    observer = _BACKWARDS.pop(lse.data_ptr(), None) if _BACKWARDS else None
    if observer is not None:
        observer(*call)


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
