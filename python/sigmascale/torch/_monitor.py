"""The record of a training run, written while it goes on, and the certified bound that QK-clip's users can log."""

from __future__ import annotations

import functools
import math
import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .. import _native
from .._arguments import count, real, whole
from .._errors import ArgumentError, SigmascaleError, UnsupportedError
from . import _alarms, _calls, _norms, _record, _samples, _sinks, _window
from ._runtime import Runtime

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Self

    from .._options import Path
    from ._typing import Event, Number

# Columns that are upper bounds, and stay so when they are written with fewer digits.
_CERTIFIED = ("sigma", "sigma_rope", "w_q", "bound")
_DIGITS = 7


class Monitor:
    """Writes what each layer's attention does over a training run to a file that ``sigmascale diagnose`` reads.

    >>> runtime = sigmascale.torch.attach(model, bound="worst-case")
    >>> monitor = sigmascale.torch.Monitor(runtime, "run.jsonl")
    >>> for batch in data:
    ...     ...                                     # forward, backward, optimizer.step(), runtime.refresh()
    ...     monitor.step(loss=loss, grad_norm=norm, lr=rate)

    Every step gives a ``step`` line, and every ``every``-th step a ``layer`` line for each layer, with one value a
    query head:

    - ``sigma``: the norm of W_Q^T W_K, without the softmax scale and without rotation, of the weights now.
      ``sigma_rope``, ``bound``: the certified norm over every rotation between two positions, and the certified bound on
      |logit|, with rounding, both of the weights of the last refresh. With ``attach(.., bound="worst-case")`` and exact norms.
    - ``w_q``: certified spectral norm of the head's own W_Q, at most 0.1 % too large, of the weights now. Left out for
      layers that FSDP shards.
    - ``logit_max``, ``utilization``, ``saturated``: the largest |logit|, the largest amax / (448 descale) of q, k and
      v, and the share of their values with |x / descale| > 448, of all calls since the last layer line.
    - ``repeated``, ``repeated_in_tile``, ``delta_bias``, ``error_sign``, ``entropy``: of ``rows`` queries of one entry of the batch, in
      the step of the line: the share whose largest logit occurs more than once (at all; within 128 keys), the bias of
      delta, the correlation of the sign of dO with that of the output's error, and the entropy of the attention weights in nats. Logits are those of the E4M3 operands. They are read in
      the backward of the layer's first call.

    What was not measured is left out: the last two groups need calls through this package, and steps that are replayed
    from a CUDA graph have neither sampled rows nor ``saturated``, nor has compiled code that copies its telemetry.
    ``rows=0`` samples nothing.

    What is on a device is read in every ``every``-th step, in one copy, which the next step waits for: layer lines, their
    alarms, and step lines with values on the device then reach the file and ``alarms``. On a CPU they do at once.
    ``sinks``: also a TensorBoard ``SummaryWriter``, a run of Weights & Biases, or ``"tensorboard"``,
    which makes a writer next to the file; they get the largest value over a layer's heads (of ``entropy`` the smallest).
    ``path=None`` writes no file.

    ``alarms``: those that are raised now, as the dicts of the file's ``event`` lines. ``on_alarm`` is called with each
    that is raised or cleared. ``thresholds``: a dict of the options of :func:`sigmascale.diagnose`, for others than its
    own. ``diagnosis()`` says what to do. ``resume=True`` appends to a file of the same layers, and ``first_step`` is
    the number of the first step.

    A process of a distributed run records the layers and heads that it has. Where ranks hold the same ones (data
    parallelism), let rank 0 alone make a monitor; under tensor or pipeline parallelism give each its own file.
    """

    runtime: Runtime
    path: Path | None
    every: int
    rows: int
    next_step: int
    alarms: list[Event]
    latest: dict[int, dict[str, Any]]
    on_alarm: Callable[[Event], object] | None

    def __init__(
        self,
        runtime: Runtime,
        path: Path | None = "run.jsonl",
        every: int = 10,
        *,
        rows: int = 16,
        sinks: object = (),
        name: str | None = None,
        on_alarm: Callable[[Event], object] | None = None,
        resume: bool = False,
        first_step: int = 0,
        thresholds: Mapping[str, float] | None = None,
    ) -> None:
        if not isinstance(runtime, Runtime):
            raise TypeError(f"runtime must be what sigmascale.torch.attach returned, not {type(runtime).__name__}")
        if on_alarm is not None and not callable(on_alarm):
            raise TypeError(f"on_alarm must be a function, not {type(on_alarm).__name__}")
        self.runtime, self.every = runtime, count("every", every)
        self.rows, self.next_step = whole("rows", rows), whole("first_step", first_step)
        self.path, self.on_alarm, self.alarms = path, on_alarm, []
        self.latest = {}
        widths = {index: {"width": layer.q.shape[1]} for index, layer in zip(runtime._resident, runtime._tensors)}
        layers = [
            {"layer": number, "heads": plan.n_q_heads, "kv_heads": plan.n_kv_heads, "head_dim": plan.d_head}
            | widths.get(plan.index, {})
            for (number, *_), plan in zip(runtime._places, runtime.layers)
        ]
        if runtime.logits is None:
            message = (
                "this runtime computes no logit bounds, so sigma and bound are left out: "
                "attach(model, bound='worst-case')"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        self._numbers = [layer["layer"] for layer in layers]
        run = {"kind": "run", "format": _record.FORMAT, "source": "monitor"}
        run |= {} if name is None else {"name": str(name)}
        run |= {"version": _native.__version__, "layers": layers}
        self._sinks = _sinks.opened(sinks, None if path is None else os.fspath(path))
        self._watch = _alarms.Alarms(run, thresholds)
        self._lines = _Lines(_record.Record(path, run, resume))
        self._window, self._awaited = _window.Window(runtime), set()
        # Of the step of the next layer lines: calls to be measured, what those show that were measured, and the rows of lengths.
        self._taken, self._measured, self._places, self._sampling = {}, [], {}, False
        watched = []
        if self.rows:
            reference = weakref.ref(self)
            watched = [(plan.key, functools.partial(_saw, reference, plan.index)) for plan in runtime.layers]
        for layer, observer in watched:
            _calls.observe(layer, observer)
        self._end = weakref.finalize(self, _close, self._lines, self._window, watched, self._sinks)
        self._prepare()

    def _prepare(self):
        """Begins to sample if the next step has layer lines."""
        self._taken, self._measured, self._places = {}, [], {}
        self._sampling = self.rows > 0 and self.next_step % self.every == 0
        if self._awaited:
            _calls.unobserve_backwards(self._awaited)
            self._awaited = set()

    def _call(self, index, lse, saves):
        """A call of a layer."""
        capturing = lse.is_cuda and torch.cuda.is_current_stream_capturing()
        if self._sampling and saves and not capturing and not self._has_sample(index):
            backward = functools.partial(_saw_backward, weakref.ref(self), index)
            self._awaited.add(backward)
            _calls.observe_backward(lse, backward)

    def _has_sample(self, index):
        return index in self._taken or any(index in indices for indices, _ in self._measured)

    def _backward(self, index, grad, operands, descales, out, terms, residual):
        if not self._sampling or self._has_sample(index):
            return
        turn, length = self.next_step // self.every, grad.shape[1]
        if length not in self._places:
            self._places[length] = _samples.places_of(length, self.rows, turn, grad.device)
        # Measured together with other layers, where there is room to keep it so long.
        self._taken[index] = _samples.take(grad, operands, descales, out, terms, self._places[length], turn, residual)
        if sum(taken.bytes for taken in self._taken.values()) > _samples.KEPT_BYTES:
            self._measure()

    def _measure(self):
        self._measured += _samples.measure(self._taken)
        self._taken = {}

    def step(
        self,
        loss: Number | None = None,
        grad_norm: Number | None = None,
        lr: Number | None = None,
        loss_scale: Number | None = None,
        skipped: bool = False,
    ) -> None:
        """Records a step; call it once per step, after the backward, before or after ``refresh()``.

        All arguments are numbers or tensors of one value and may be left out. ``skipped``: whether the optimizer left
        the weights as they were. Raises :class:`ArgumentError` for other values, :class:`SigmascaleError` after
        ``close()``.
        """
        self._check_open()
        self._finish()
        row = {"kind": "step", "step": self.next_step}
        values = {"loss": loss, "grad_norm": grad_norm, "lr": lr, "loss_scale": loss_scale}
        row |= {key: _value(key, value) for key, value in values.items() if value is not None}
        if skipped:
            row["skipped"] = True
        self._lines.pending.append(row)
        records = self.next_step % self.every == 0
        if records:
            self._lines.awaited = self._layers(row)
        elif not self._lines.tensors():
            self._lines.flush()
        self.next_step += 1
        self._prepare()
        if not records:
            self._tell(row, [])
        elif self.runtime.device.type == "cpu":
            self._finish()

    def _finish(self):
        """Writes and tells layer lines that were on their way from the device."""
        row, layers = self._lines.arrived()
        if layers:
            self.latest = {layer["layer"]: layer for layer in layers}
            self._tell(row, layers)

    def _layers(self, row):
        """Starts to read what the lines of all layers hold. Returns a function that waits for it: the lines, with the one of
        their step, and values of the lines that wait."""
        runtime = self.runtime
        if runtime._tensors is None:
            raise SigmascaleError("the model was deleted: make a runtime and a monitor of the model that is in use")
        norms = _norms.query_norms(runtime._tensors)
        certified = runtime.logits is not None and runtime._estimates is None
        bounds = [runtime.logits] if certified else []
        sigmas = _norms.interaction_norms(runtime._tensors) if certified else {}
        self._measure()
        samples, pending = [values for _, values in self._measured], self._lines.tensors()
        kind = torch.float64 if any(tensor.dtype == torch.float64 for tensor in pending) else torch.float32
        moved = [torch.stack([tensor.to(runtime.device, kind) for tensor in pending])] if pending else []
        finish = self._window.start(*bounds, *norms, *sigmas.values(), *samples, *moved)
        of_sample = {index: place for place, (indices, _) in enumerate(self._measured) for index in indices}
        orders = [list(indices) for indices, _ in self._measured]
        plans, numbers, resident = runtime.layers, self._numbers, list(runtime._resident)
        of_sigma = [resident[place] for place in sigmas]

        def lines():
            rows, values = finish()
            values = iter(values)
            (bound,) = [next(values) for _ in bounds] or [None]
            norm = dict(zip(resident, [next(values) for _ in norms]))
            sigma = dict(zip(of_sigma, [next(values) for _ in of_sigma]))
            sampled, layers = [next(values) for _ in samples], []
            for plan, number, found in zip(plans, numbers, rows):
                columns = {}
                if bound is not None:
                    rope, largest = bound[plan.index, : plan.n_q_heads, [0, 2]]
                    if plan.index in sigma:
                        columns["sigma"] = sigma[plan.index]
                    # Where q and k are normalised there is no sigma.
                    columns |= ({"sigma_rope": rope} if rope.any() else {}) | {"bound": largest}
                if plan.index in norm:
                    columns["w_q"] = norm[plan.index]
                if plan.index in of_sample:
                    place = of_sample[plan.index]
                    columns |= dict(zip(_samples.NAMES, sampled[place][orders[place].index(plan.index)]))
                layer = {"kind": "layer", "step": row["step"], "layer": number}
                layer |= {name: _written(name, values) for name, values in (columns | found).items()}
                layers.append(layer)
            return row, layers, [float(value) for value in (next(values) if moved else ())]

        return lines

    def _tell(self, row, layers):
        """Sinks and alarms."""
        for sink in self._sinks if layers else ():
            sink.write(row, layers)
        rows = [*self._lines.told(), *layers]
        for event in self._watch.add(rows) if rows else ():
            self._lines.record.write(event)
            self.alarms = self._watch.up()
            if self.on_alarm is not None:
                self.on_alarm(event)

    def diagnosis(self) -> dict[str, Any]:
        """The alarms so far, with those of layer lines that are on their way, which it waits for: a dict of ``up`` (those that are raised now), ``first`` (that of the head that was out of
        order first, or None) and ``advice`` (what to do), as :func:`sigmascale.diagnose` has them."""
        self._finish()
        return self._watch.state()

    def event(self, name: str, message: str = "", layer: int | None = None, head: int | None = None) -> None:
        """Writes an ``event`` line of the current step."""
        self._check_open()
        self._finish()
        row = {"kind": "event", "step": self.next_step, "name": str(name)}
        row |= {} if layer is None else {"layer": whole("layer", layer)}
        row |= {} if head is None else {"head": whole("head", head)}
        self._lines.record.write(row | {"message": str(message)})

    def _check_open(self):
        if not self._end.alive:
            raise SigmascaleError("the monitor is closed: make a new one, with resume=True to go on in its file")

    def close(self) -> None:
        """Writes what is pending and ends the recording. So does the end of the process."""
        if self._end.alive:
            self._finish()
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<sigmascale Monitor of {len(self._numbers)} layers, every {self.every} steps, to {self.path}>"


class _Lines:
    """Step lines that wait for values on a device, in front of the file."""

    def __init__(self, record):
        self.record, self.pending, self._told = record, [], []
        # What waits for layer lines that are on their way.
        self.awaited = None

    def arrived(self):
        """Writes these layer lines, and the step lines up to theirs; returns the line of their step, and them."""
        if self.awaited is None:
            return None, []
        lines, self.awaited = self.awaited, None
        row, layers, values = lines()
        self.flush(values)
        for layer in layers:
            self.record.write(layer)
        return row, layers

    def tensors(self):
        """Values that are still tensors."""
        return [value for row in self.pending for value in row.values() if isinstance(value, torch.Tensor)]

    def flush(self, values=None):
        """Writes all lines. ``values``: those of ``tensors()``, read here where they are not given."""
        values = iter([float(x) for x in self.tensors()] if values is None else values)
        for row in self.pending:
            for key, value in row.items():
                if isinstance(value, torch.Tensor):
                    row[key] = next(values)
            self.record.write(row)
        self._told += self.pending
        self.pending = []

    def told(self):
        """Lines that were written since this was asked."""
        told, self._told = self._told, []
        return told


def _saw(reference, index, q, k, v, lse, saves, reports):
    monitor = reference()
    if monitor is not None:
        monitor._call(index, lse, saves)


def _saw_backward(reference, index, *call):
    monitor = reference()
    if monitor is not None:
        monitor._backward(index, *call)


def _close(lines, window, watched, sinks):
    for layer, observer in watched:
        _calls.unobserve(layer, observer)
    window.close()
    try:
        lines.arrived()
        lines.flush()
    finally:
        lines.record.close()
        for sink in sinks:
            sink.close()


def _value(name, value):
    """A number, or a tensor of one on a device that is not read yet."""
    if not isinstance(value, torch.Tensor):
        return real(name, value)
    if value.numel() != 1:
        raise ArgumentError(f"{name} has shape {tuple(value.shape)}: one value is needed, such as its mean")
    value = value.detach().reshape(())
    return float(value) if value.device.type == "cpu" else value.clone()


def _written(name, values):
    """Seven digits, rounded up for upper bounds."""
    factor = 1 + 10.0 ** (1 - _DIGITS) if name in _CERTIFIED else 1.0
    return [float(f"{value * factor:.{_DIGITS}g}") if math.isfinite(value) else None for value in values.tolist()]


def max_logit_bound(runtime: Runtime) -> dict[int, NDArray[np.float64]]:
    """The certified bound on the largest |logit| of each query head, rounding included: a dict of NumPy arrays
    ``(n_q_heads,)`` by the layer's number in the model, of the weights of the last refresh. Waits for the device.

    QK-clip (Kimi K2, arXiv:2507.20534, section 2.1) rescales W_Q and W_K of a head after a step in which its largest
    logit S_max passed a threshold tau, by gamma^alpha and gamma^(1 - alpha) with gamma = min(1, tau / S_max). Kernels
    that keep logits on chip report no S_max. The bound is at least S_max for every normalized input: while it is below
    tau no head needs a clip, and tau / bound is at most the gamma of any batch. It is not S_max, and clipping by it
    clips heads that no batch has driven past tau.

    Raises :class:`UnsupportedError` for a runtime without ``bound="worst-case"``, and :class:`SigmascaleError` between a
    refresh and the next forward of a model sharded by FSDP, unless it was ``refresh(now=True)``.
    """
    if runtime.logits is None:
        raise UnsupportedError("this runtime computes no logit bounds: attach(model, bound='worst-case')")
    for plan in runtime.layers:
        plan.check_fresh()
    values = runtime.logits[..., 2].double().cpu().numpy()
    return {number: values[plan.index, : plan.n_q_heads] for (number, *_), plan in zip(runtime._places, runtime.layers)}
