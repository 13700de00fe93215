"""Arguments as numbers, or an exception that names the argument and its rule."""

import math
import operator

from ._errors import ArgumentError

_U64 = 2**64 - 1


def whole(name, value, least=0, most=_U64):
    """``value`` as an int between ``least`` and ``most``; NumPy's integers count."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {value!r}") from None
    if not least <= number <= most:
        raise ArgumentError(
            f"{name} {number} must be at least {least}" + ("" if number < least else f" and at most {most}")
        )
    return number


def real(name, value):
    """``value`` as a float."""
    if isinstance(value, str | bytes):
        raise TypeError(f"{name} must be a number, not {value!r}")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, not {value!r}") from None


def positive(name, value):
    """``value`` as a float that is finite and above zero."""
    number = real(name, value)
    # A comparison: in compiled code this may be a symbol, which math.isfinite does not take.
    if not 0 < number < math.inf:
        raise ArgumentError(f"{name} {number} must be finite and above 0")
    return number


def count(name, value):
    """``value`` as an int of at least 1."""
    return whole(name, value, least=1)


def counts(name, value):
    """``value`` as a pair of such."""
    pair = tuple(value) if isinstance(value, list | tuple) else ()
    if len(pair) != 2:
        raise TypeError(f"{name} must be two integers, not {value!r}")
    return count(name, pair[0]), count(name, pair[1])


def share(name, value):
    """``value`` as a float above 0 and at most 1."""
    number = positive(name, value)
    if number > 1:
        raise ArgumentError(f"{name} {number} must be greater than 0 and at most 1")
    return number


def probability(name, value):
    """``value`` as a float between 0 and 1."""
    number = real(name, value)
    if not 0 < number < 1:
        raise ArgumentError(f"{name} {number} must be greater than 0 and less than 1")
    return number


def one_of(*words):
    """A check that the value is one of these words."""

    def check(name, value):
        if text(name, value) not in words:
            raise ArgumentError(f"{name} {value!r} is not one of {', '.join(words)}")
        return value

    return check


def flag(name, value):
    """``value`` as a bool; NumPy's count, other values do not."""
    if type(value).__name__ not in ("bool", "bool_"):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return bool(value)


def text(name, value):
    """``value``, which must be a str."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {value!r}")
    return value


def pytorch(who):
    """The module ``torch``, or an exception that says what needs it."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"{who} needs PyTorch, which is not installed: pip install torch", name="torch"
        ) from None
    return torch


def optional(check):
    """The check, with None let through."""
    return lambda name, value: None if value is None else check(name, value)
