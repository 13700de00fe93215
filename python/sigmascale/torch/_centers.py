"""Constants that are subtracted from keys and values before their cast, one vector per KV head.

Softmax does not see c, which takes ``tau q . c`` from all logits of a row, and m comes back with the output: ``O = O' + m``. Both
are exact for any values. Operators return the log-sum-exp of centered keys, which parts with one center merge by and which a
backward takes; :func:`model_lse` gives the model's. A backward has centered operands and takes delta of ``O - m``.
"""

import torch

from .._errors import ArgumentError, MismatchError, UnsupportedError
from ._e4m3 import E4M3, cast, spread


def checked(centers, q, k, v, softcap, sinks):
    """What a caller gives as centers: c and m, f32 ``(n_kv_heads, d)`` each, or None for either."""
    if centers is None:
        return None, None
    if not isinstance(centers, tuple | list) or len(centers) != 2:
        raise TypeError(f"centers must be (c, m), a tensor or None for each, not {type(centers).__name__}")
    for name, center, x in zip("km", centers, (k, v)):
        if center is None:
            continue
        letter = "c" if name == "k" else "m"
        if not isinstance(center, torch.Tensor):
            raise TypeError(f"{letter} of centers must be a tensor or None, not {type(center).__name__}")
        if center.shape != x.shape[2:]:
            raise MismatchError(
                f"{letter} of centers has shape {tuple(center.shape)}: {tuple(x.shape[2:])} is needed, a row for each KV head"
            )
        if center.dtype != torch.float32 or center.device != q.device:
            raise ArgumentError(
                f"{letter} of centers is {center.dtype} on {center.device}: float32 on {q.device} is needed"
            )
    c, m = (None if x is None else x.detach().contiguous() for x in centers)
    refuse(c, m, softcap, sinks)
    return c, m


def refuse(c, m, softcap, sinks):
    """Raises an exception where a center would not be exact."""
    if sinks is not None and (c is not None or m is not None):
        raise UnsupportedError(
            "centers are not offered with sinks, whose share of each row depends on it: leave centers out for this layer"
        )
    if softcap and c is not None:
        raise UnsupportedError(
            "a center of keys is not offered with a soft-cap, which needs the logits of the model: leave c out for this layer"
        )


def centered(q, k, v, terms):
    """The operands with centers subtracted in f32; those in E4M3 are centered already."""
    if q.dtype == E4M3:
        return q, k, v
    k = k if terms.k_center is None else k.float() - terms.k_center
    v = v if terms.v_center is None else v.float() - terms.v_center
    # One type for all.
    return (q.float(), k.float(), v.float()) if torch.float32 in (k.dtype, v.dtype) else (q, k, v)


def joined(out, lse, terms, sign=1):
    """The output ``(batch, seq, heads, d)`` with m in the rows that see a key, or without it."""
    if terms.v_center is None:
        return out
    m = terms.v_center.repeat_interleave(out.shape[2] // terms.v_center.shape[0], dim=0)
    return out + sign * m * (lse != -torch.inf).transpose(1, 2)[..., None]


def restored(k, v, terms):
    """Keys and values of centered codes, for a call without centers."""
    k = k if terms.k_center is None else (k.float() + terms.k_center).to(k.dtype)
    v = v if terms.v_center is None else (v.float() + terms.v_center).to(v.dtype)
    return k, v


def model_lse(lse, q, q_descale, terms):
    """The log-sum-exp of the model's logits, by the queries that the products saw; ``q_descale`` ``(batch, n_kv_heads)``."""
    if terms.k_center is None:
        return lse
    seen = cast(q.detach(), q_descale).float() * spread(q_descale, q.shape[2])
    c = terms.k_center.repeat_interleave(q.shape[2] // terms.k_center.shape[0], dim=0)
    return lse + terms.scale * torch.einsum("bshd,hd->bhs", seen, c)
