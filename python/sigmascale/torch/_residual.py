"""What the rounding of an output to bfloat16 took, as a signed byte for each element.

A code counts steps of 2^-15 of the power of two below the rounded value, so that half a step of bfloat16 is 128 of them, which
becomes 127: output and residual are together the output before its rounding up to 2^-15 of it, and mostly up to 2^-16. The
kernels' arithmetic (``residual_codes`` in ``kernels/ptx/convert.cuh``).
"""

import torch

# Exponents of f32 below this count as it, so that steps are normal numbers.
_LEAST = 16


def code(wide, out):
    """Codes, int8, of ``wide``, f32, which was rounded to ``out``."""
    steps = (wide - out.float()) / _steps(out)
    # A value that is not finite has none.
    return torch.nan_to_num(steps, 0.0).round().clamp(-128, 127).to(torch.int8)


def value(out, codes):
    """The output before its rounding, f32."""
    return out.float() + codes.float() * _steps(out)


def _steps(out):
    exponent = (out.float().contiguous().view(torch.int32) & 0x7F800000).clamp_min(_LEAST << 23)
    return (exponent - (15 << 23)).view(torch.float32)
