"""Which backend ran each layer's calls and why, counted on the host, who looks at these calls, and what is said once
of those that left FP8.

Layers are told apart by a number. Operators take it as the length of an empty tensor (:func:`label`): inside compiled
code a layer's tensors may be copies, and blocks of a model that are compiled one by one share their code, which is
compiled anew for every value of an int but not for other lengths of a dimension that is marked as dynamic.
"""

import collections
import itertools
import warnings

import torch

# No layer: descales that were given, and exported programs.
NONE = -1
_NUMBERS = itertools.count()
# By layer: calls by what ran them, and by that and why.
_COUNTERS, _REASONS = {}, {}
# Layers that have had a call, and functions that are told of each call of a layer, without its operands.
_REACHED, _FOLLOWERS = set(), {}
_SAID = set()
# Functions that are told of each call, by layer; and of the backward of one call, by the address of its log-sum-exp.
_OBSERVERS, _BACKWARDS = {}, {}


def watch():
    """A number for a layer, whose calls are counted from now on."""
    number = next(_NUMBERS)
    _COUNTERS[number], _REASONS[number] = collections.Counter(), collections.Counter()
    return number


def label(layer, device):
    """A layer's number as operators take it. The lengths 0 and 1 are always compiled apart."""
    made = torch.empty((layer + 2, 0), dtype=torch.uint8, device=device)
    # Also under dynamic=False, and no symbol of another length that happens to be the same.
    torch._dynamo.maybe_mark_dynamic(made, 0)
    return made


def layer_of(label):
    """The number of a label, :data:`NONE` without one."""
    return NONE if label is None else label.shape[0] - 2


def counted(layer):
    """The calls of a layer since its last :func:`clear`: counters by what ran them, and by that and why."""
    return _COUNTERS[layer], _REASONS[layer]


def clear(layer):
    """Counts anew."""
    for counter in counted(layer):
        counter.clear()


def forget(layers):
    """Drops counters and observers."""
    for layer in layers:
        for held in (_COUNTERS, _REASONS, _OBSERVERS, _FOLLOWERS):
            held.pop(layer, None)
        _REACHED.discard(layer)


def reached(layer):
    """Whether any call of a layer has come here."""
    return layer in _REACHED


def follow(layer, function):
    """Calls ``function`` after each call of a layer."""
    _FOLLOWERS[layer] = function


def observe(layer, observer):
    """Tells ``observer`` of each call of a layer: q, k and v, which the cast may rotate later, the log-sum-exp, whether a
    backward follows, and whether the call reports its statistics."""
    _OBSERVERS.setdefault(layer, []).append(observer)


def unobserve(layer, observer):
    """Ends that."""
    observers = _OBSERVERS.get(layer, [])
    if observer in observers:
        observers.remove(observer)


def observe_backward(lse, observer):
    """Tells ``observer`` of the backward of the call that returned ``lse``."""
    _BACKWARDS[lse.data_ptr()] = observer


def unobserve_backwards(observers):
    """Ends that, for backwards that never came."""
    for address in [address for address, observer in _BACKWARDS.items() if observer in observers]:
        del _BACKWARDS[address]


def ran(label, name, reason, *call):
    """Counts a call that ``name`` ran, and notifies observers of the layer's calls."""
    layer = layer_of(label)
    _count(layer, name, reason)
    if call and _OBSERVERS:
        for observer in tuple(_OBSERVERS.get(layer, ())):
            observer(*call)
    if layer in _FOLLOWERS:
        _FOLLOWERS[layer]()


def saw_backward(lse, grad, operands, descales, out, terms, residual=None):
    """Tells who waits for this backward."""
    observer = _BACKWARDS.pop(lse.data_ptr(), None) if _BACKWARDS else None
    if observer is not None:
        observer(grad, operands, descales, out, terms, residual)


def _count(layer, name, reason):
    """Adds a call that ``name`` ran, where the layer is watched."""
    counter = _COUNTERS.get(layer)
    if counter is not None:
        _REACHED.add(layer)
        counter[name] += 1
        _REASONS[layer][name, reason] += 1


def count_plain(label, reason, say=True):
    """Adds a call that PyTorch's own attention takes, and says why once."""
    if say:
        _say(reason)
    if not torch.compiler.is_compiling():
        _count(layer_of(label), "bf16", reason)


# Compiled code runs this while it is compiled.
@torch.compiler.assume_constant_result
def _say(reason):
    if reason not in _SAID:
        _SAID.add(reason)
        warnings.warn(f"attention runs in PyTorch's own kernels, not in FP8: {reason}", RuntimeWarning, stacklevel=5)
