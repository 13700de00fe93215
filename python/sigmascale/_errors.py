"""Exceptions. Files that cannot be opened raise Python's own OSError classes."""


class SigmascaleError(Exception):
    """Base of everything that this package raises by itself."""


class ArgumentError(SigmascaleError, ValueError):
    """An argument breaks its rule; the message names both."""


class UnsupportedError(SigmascaleError, ValueError):
    """Well formed, and outside what can be bounded or run; the message says why."""


class FormatError(SigmascaleError, ValueError):
    """A file's content breaks a rule of its format."""


class NonFiniteError(SigmascaleError, ValueError):
    """A NaN or an infinity where a finite number is required."""


class MismatchError(SigmascaleError, ValueError):
    """Two things that must agree (a saved state and a model, two shapes) do not."""


class CudaError(SigmascaleError, RuntimeError):
    """A CUDA library, device, compilation or launch failed or is absent."""
