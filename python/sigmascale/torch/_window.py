"""What attention calls reported over many refreshes, kept on the device until it is read."""

import functools
import math
import weakref

import numpy as np
import torch

from .._errors import ArgumentError
from . import _calls, _telemetry
from ._e4m3 import MAX


class Window:
    """Maxima and counts of the calls since the last :meth:`take`, over any number of refreshes. Nothing is read by the
    host before that."""

    # Written in place at each refresh, in whatever mode that is called.
    @torch.inference_mode(False)
    def __init__(self, runtime):
        if runtime.telemetry == "off":
            raise ArgumentError(
                "statistics of calls are needed, and the runtime has telemetry='off': attach with 'full' or a number"
            )
        self._runtime = weakref.ref(runtime)
        words = runtime.words
        make = lambda dtype: torch.zeros(words.shape, device=words.device, dtype=dtype)
        # Of every word: the largest, the sum of refreshes, and what of the present words that sum has already.
        self._largest, self._total, self._counted = (make(torch.int64) for _ in range(3))
        self._peaks = torch.zeros(words.shape[:2], dtype=torch.float32, device=words.device)
        self._rows = _descale_rows(runtime.layers, words.shape[1], runtime.n_kv_heads).to(words.device)
        self._kept = [self._largest, self._total, self._counted, self._peaks, self._rows]
        # Values of a head of q, k and v that were cast, by layer.
        self._values = [[0, 0, 0] for _ in runtime.layers]
        fold = weakref.WeakMethod(self._refreshed)
        self._hook = lambda runtime: fold()(runtime) if fold() else None
        runtime.before_refresh.append(self._hook)
        watched = [(plan.key, _observer(self._values[plan.index])) for plan in runtime.layers]
        for layer, observer in watched:
            _calls.observe(layer, observer)
        self.close = weakref.finalize(self, _close, self._runtime, self._hook, watched)

    def _refreshed(self, runtime):
        if runtime._capturing():
            # A replay writes these tensors, whether the window is still there or not.
            runtime._captured.append((self._kept, []))
        self._fold(runtime)
        self._counted.zero_()

    def _fold(self, runtime):
        """Takes the present words in."""
        words = _telemetry.unsigned(runtime.words)
        # Words stay until a refresh: what has been taken is not of the next window.
        new = words != self._counted
        torch.maximum(self._largest, words * new, out=self._largest)
        # Words that were put back from a restore point may be below those that were counted.
        self._total += (words - self._counted).clamp_min(0)
        if not runtime._policy.per_call:
            amax = runtime.words[..., 0].contiguous().view(torch.float32)
            descales = runtime.descales.flatten(1).gather(1, self._rows)
            peaks = torch.where(new[..., 0], amax / (MAX * descales), 0.0)
            torch.maximum(self._peaks, peaks, out=self._peaks)

    def take(self, *others):
        """What :meth:`start` gives; waits for the device."""
        return self.start(*others)()

    @torch.no_grad()
    def start(self, *others):
        """Empties the window, and returns a function that waits for its values: a dict of NumPy arrays ``(n_q_heads,)`` for
        each layer, and the values of ``others``, device tensors, all in one copy to the host.

        ``logit_max``: the largest |logit|. ``utilization``: the largest amax / (448 descale) of q, k and v.
        ``saturated``: the share of their values with |x / descale| > 448. What was not reported is left out.
        """
        runtime = self._runtime()
        with torch.inference_mode(False):
            self._fold(runtime)
            self._counted.copy_(_telemetry.unsigned(runtime.words))
            wait = reading(self._largest, self._total, self._peaks, *others)
            for tensor in (self._largest, self._total, self._peaks):
                tensor.zero_()
        values = [sum(counts) for counts in self._values]
        for counts in self._values:
            counts[:] = 0, 0, 0
        plans, has_descales = runtime.layers, not runtime._policy.per_call

        def finish():
            largest, total, peaks, *rest = wait()
            return _columns(plans, values, has_descales, largest, total, peaks), rest

        return finish


def _columns(plans, values, has_descales, largest, total, peaks):
    """Columns of each layer; ``values``: how many values of a head were cast."""
    logits = _telemetry.extremes(torch.from_numpy(largest[..., :2]).long()).numpy()
    rows = []
    for plan, count in zip(plans, values):
        i, n_q = plan.index, plan.n_q_heads
        heads = lambda x: _by_query_head(x[i], n_q, plan.n_kv_heads)
        row = {}
        extreme = np.abs(logits[i, :n_q]).max(axis=1)
        if not np.isnan(extreme).all():
            row["logit_max"] = extreme
        # Of a call whose operands were in E4M3 already nothing is known.
        if largest[i, n_q:, 0].any() or total[i, n_q:, 1:].any():
            if has_descales:
                row["utilization"] = heads(peaks).max(axis=0)
            if count:
                row["saturated"] = heads(total[..., 1]).sum(axis=0) / count
        rows.append(row)
    return rows


def reading(*tensors):
    """Starts to read tensors of one device in one copy, and returns a function that waits for them as NumPy arrays of f64."""
    flat = torch.cat([x.detach().double().flatten() for x in tensors])
    shapes, arrived = [x.shape for x in tensors], None
    if flat.is_cuda:
        flat = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True).copy_(flat, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()

    def wait():
        if arrived is not None:
            arrived.synchronize()
        ends = np.cumsum([math.prod(shape) for shape in shapes])
        return [part.reshape(shape) for part, shape in zip(np.split(flat.numpy(), ends[:-1]), shapes)]

    return wait


def _by_query_head(rows, n_q, n_kv):
    """Rows of q, k and v of a layer as ``(3, n_q)``."""
    q, k, v = np.split(rows[n_q : 2 * (n_q + n_kv)], [n_q, n_q + n_kv])
    return np.stack([q, np.repeat(k, n_q // n_kv), np.repeat(v, n_q // n_kv)])


def _descale_rows(plans, rows, width):
    """Where the descale of each row of words lies in its layer's ``(4, width)``; those of logits have none."""
    table = torch.zeros(len(plans), rows, dtype=torch.int64, device="cpu")
    for plan in plans:
        n_q, n_kv = plan.n_q_heads, plan.n_kv_heads
        own = torch.arange(n_kv, dtype=torch.int64, device="cpu")
        heads = own.repeat_interleave(n_q // n_kv), width + own, 2 * width + own
        table[plan.index, n_q : 2 * (n_q + n_kv)] = torch.cat(heads)
    return table


def _observer(values):
    return functools.partial(_count, values)


def _count(values, q, k, v, lse, saves, reports):
    for place, x in enumerate((q, k, v) if reports else ()):
        values[place] += x.numel() // x.shape[2]


def _close(runtime, hook, watched):
    runtime = runtime()
    if runtime is not None and hook in runtime.before_refresh:
        runtime.before_refresh.remove(hook)
    for layer, observer in watched:
        _calls.unobserve(layer, observer)
