"""Constants that are subtracted from keys and values before their cast, one vector per KV head.

Softmax does not see c, which takes ``tau q . c`` from all logits of a row, and m comes back with the output: ``O = O' + m``. Both
are exact for any values. Operators return the log-sum-exp of centered keys, which parts with one center merge by and which a
backward takes; :func:`model_lse` gives the model's. A backward has centered operands and takes delta of ``O - m``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .._errors import ArgumentError, MismatchError, UnsupportedError
from .._serving import ScaleStream
from . import _distributed, _layers
from ._e4m3 import E4M3, MAX, cast, spread
from ._terms import within

# Where a runtime's centers come from, beside those that are given.
SOURCES = ("none", "weights", "mean")
# Tokens that a mean is taken over before it is used.
BURN_IN = 512


def checked(centers, q, k, v, absolute, sinks):
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
    refuse(c, m, absolute, sinks)
    return c, m


def refuse(c, m, absolute, sinks):
    """Raises an exception where a center would not be exact; ``absolute``: logits have to be those of the model."""
    if sinks is not None and (c is not None or m is not None):
        raise UnsupportedError(
            "centers are not offered with sinks, whose share of each row depends on it: leave centers out for this layer"
        )
    if absolute and c is not None:
        raise UnsupportedError(
            "a center of keys is not offered with a soft-cap or logits in E4M3, which need the logits of the model: leave c out for this layer"
        )


def subtracted(k, v, centers):
    """Keys and values ``(batch, seq, n_kv_heads, d)`` without their centers, in f32 where there are some."""
    c, m = centers
    return k if c is None else k.float() - c, v if m is None else v.float() - m


def centered(q, k, v, terms):
    """The operands with centers subtracted; those in E4M3 are centered already."""
    if q.dtype == E4M3:
        return q, k, v
    k, v = subtracted(k, v, (terms.k_center, terms.v_center))
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


class Kept:
    """Centers of a runtime's layers, in tensors that keep their addresses.

    Those of weights are what an export of the model has; those of means are taken over the first :data:`BURN_IN` tokens, or more,
    that the layer's calls see until the next refresh. Neither changes afterwards: any center is exact, and a cache needs one.
    """

    def __init__(self, source: str | Mapping[str, Any] | None, runtime: Any, model: Any, layers: Any) -> None:
        source = "none" if source is None else source
        if not isinstance(source, Mapping) and source not in SOURCES:
            raise ArgumentError(
                f"center {source!r} must be {', '.join(map(repr, SOURCES))}, or what sigmascale.centers() returned"
            )
        self.source = "given" if isinstance(source, Mapping) else source
        # Not the layers, which hold their modules.
        self._layers = [
            (layer.name, place, layer.d_head, _d_v(layer), layer.latent is None)
            for layer, place in zip(layers.at_rest, runtime._places)
        ]
        self._device, count, n_kv = runtime.device, len(self._layers), runtime.n_kv_heads
        make = lambda *shape, dtype=torch.float32: torch.zeros(*shape, dtype=dtype, device=self._device)
        # What descales grow by, so that they cover keys and values with centers and without.
        self._wider = make(count, 4, n_kv)
        self._known = [False] * count
        self.of = [(None, None)] * count
        self._sums: list[Any] = [None] * count
        self._rows = [0] * count
        if self.source == "mean":
            for index, (_, (_, _, heads, _), d_head, d_v, has_keys) in enumerate(self._layers):
                if has_keys:
                    shapes = (heads, d_head), (heads, d_v)
                    self.of[index] = tuple(make(*shape) for shape in shapes)
                    self._sums[index] = [make(*shape, dtype=torch.float64) for shape in shapes] + [make(1, dtype=torch.int64)]
        elif self.source == "weights":
            self._take(_of_weights(model, layers))
        elif self.source == "given":
            self._take(_given(source))

    @property
    def shared(self) -> bool:
        """Whether processes that have the same weights have the same centers."""
        return self.source != "mean"

    def learns(self, index: int) -> bool:
        """Whether the calls of a layer are to be observed."""
        return self._sums[index] is not None and not self._known[index]

    @torch.no_grad()
    def observe(self, index, k, v, sequences):
        """Takes the keys and values of a call into the means of its layer."""
        if k.dtype == E4M3:
            return
        *sums, rows = self._sums[index]
        if sequences is None:
            rows += k.shape[0] * k.shape[1]
        else:
            starts, ends = sequences.k_starts, sequences.k_ends
            k, v = within(k, starts, ends), within(v, starts, ends)
            rows += (ends - starts).clamp_min(0).sum()
        for total, x in zip(sums, (k, v)):
            total += x.detach().sum(dim=(0, 1), dtype=torch.float64)
        self._rows[index] += k.shape[0] * k.shape[1]

    def refresh(self, group):
        """Makes centers of means that are complete. Reads the host's count first: the device is waited for in the burn-in alone."""
        capturing = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        for index, sums in enumerate(self._sums):
            if sums is None or self._known[index] or capturing or self._rows[index] < BURN_IN:
                continue
            *totals, rows = (x.clone() for x in sums)
            if group is not None:
                for x in (*totals, rows):
                    torch.distributed.all_reduce(x, group=group)
            if int(rows) >= BURN_IN:
                for to, total in zip(self.of[index], totals):
                    # As engines subtract it.
                    to.copy_((total / rows).to(torch.bfloat16))
                self._widen(index)

    def widen(self, descales, rows):
        """Adds what centers take to the descales of these layers."""
        if self.source != "none":
            descales[rows] += self._wider[rows]

    def _widen(self, index):
        """What k and v may grow by, rounded up."""
        self._known[index] = True
        for row, center in zip((1, 2), self.of[index]):
            if center is not None:
                largest = center.abs().amax(dim=1) / MAX * (1 + 2**-20)
                self._wider[index, row, : center.shape[0]] = largest

    def _take(self, centers):
        """c and m by layer and head, where there are any."""
        for index, (name, (number, first, n_kv, _), d_head, d_v, _) in enumerate(self._layers):
            rows = [centers.get((number, head)) for head in range(first, first + n_kv)]
            if all(row is None for row in rows):
                continue
            if any(row is None for row in rows):
                raise MismatchError(f"{name}: centers of some KV heads are missing")
            c, m = (None if any(x is None for x in own) else torch.stack(own).to(self._device) for own in zip(*rows))
            for letter, x, d in (("c", c, d_head), ("m", m, d_v)):
                if x is not None and x.shape[1] != d:
                    raise MismatchError(f"{name}: {letter} has {x.shape[1]} channels, expected {d}")
            if self.of[index][0] is not None and c is not None:
                # Where calls know the tensors already.
                for to, x in zip(self.of[index], (c, m)):
                    if x is not None:
                        to.copy_(x)
            else:
                self.of[index] = c, m
            self._widen(index)

    def state(self):
        """What a resume needs: rows by the model's number of the layer and head; None without centers."""
        if self.source == "none":
            return None
        rows = {}
        for index, (_, (number, first, n_kv, _), *_) in enumerate(self._layers):
            if self._known[index]:
                own = [None if x is None else x.detach().cpu().clone() for x in self.of[index]]
                rows |= {(number, first + head): tuple(None if x is None else x[head] for x in own) for head in range(n_kv)}
        return {"source": self.source, "rows": rows}

    def load(self, state, descales):
        """Goes on with saved centers, which descales are to cover."""
        if state is None:
            return
        before = self._wider.clone()
        self._take(state["rows"])
        descales += self._wider - before


def _d_v(layer):
    return layer.d_head if layer.heads is not None else layer.v.shape[0] // layer.n_kv_heads


def _given(centers):
    """Rows of what :func:`sigmascale.centers` returned, by layer and head."""
    rows = {}
    for layer in centers["layers"]:
        own = [None if x is None else torch.tensor(x, dtype=torch.float32, device="cpu") for x in (layer["k"], layer["v"])]
        heads = next((len(x) for x in own if x is not None), 0)
        rows |= {(layer["layer"], head): tuple(None if x is None else x[head] for x in own) for head in range(heads)}
    return rows


def _of_weights(model, layers):
    """The same of a model's weights as they are, by the rule of exports."""
    config = getattr(model, "config", None)
    named = {_layers._plain(name): x for name, x in model.named_parameters()}
    cut = layers.sliced or any(_distributed.is_dtensor(x) or _distributed.is_partitioned(x) for x in named.values())
    if cut or config is None or not hasattr(config, "to_json_string"):
        what = "the model is sharded" if cut else f"{type(model).__name__} has no Hugging Face config"
        raise UnsupportedError(
            f"center='weights' reads the weights of a whole Hugging Face model, but {what}: pass center=sigmascale.centers(folder)"
        )
    stream = ScaleStream(config, names=list(named), host=True)
    for name, x in named.items():
        stream.push(name, x)
    found = [layer["centered"]["center"] | {"layer": number} for number, layer in stream.finish(part=True).items() if layer.get("centered")]
    return _given({"layers": found})

