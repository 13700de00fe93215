"""A watchdog over an optimizer: skip, restore, lower the rate, warn."""

from __future__ import annotations

import collections
import contextlib
import math
import statistics
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .._arguments import count, positive, share
from .._errors import ArgumentError, MismatchError, SigmascaleError
from . import _window
from ._distributed import is_dtensor
from ._points import Point
from ._runtime import Runtime

if TYPE_CHECKING:
    from ._monitor import Monitor
    from ._typing import Group, Number

# Losses that are needed before one can be a spike.
_LEAST_LOSSES = 100
# What losses in BF16 are apart, as a part of them: where all are equal, the next value is no spike.
_RESOLUTION = 2.0**-7
# Below this a loss scale no longer helps, and falling for this many steps it is a warning.
_LEAST_SCALE, _FALLING_STEPS = 2.0**7, 100


class Guard:
    """Decides before each optimizer step whether it is taken, and brings a run back that has failed.

    >>> guard = sigmascale.torch.Guard(runtime, optimizer)
    >>> for batch in data:
    ...     loss = model(batch)
    ...     loss.backward()
    ...     norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    ...     if guard.step(loss, norm):
    ...         optimizer.step()
    ...     optimizer.zero_grad()
    ...     runtime.refresh()                       # unless attach() was given the optimizer

    The rules:

    - **Skip.** A step whose loss or gradient norm is not finite is not taken, and its gradients are dropped: they hold
      no information, and a norm of NaN cannot be clipped (*Mixed Precision Training*, arXiv:1710.03740, section 3.2).
    - **Restore point.** Every ``every`` steps, in a step with a finite loss that is no spike, weights, buffers,
      optimizer state and the runtime's state are copied to host memory; the last ``points`` are kept. ``store=(save,
      load)`` keeps weights, buffers and optimizer state through two functions of yours: ``save()`` returns what
      ``load(saved)`` takes.
    - **Restore.** After ``patience`` steps in a row that were skipped or had a spike, the oldest point is put back:
      weights, optimizer momentum and the runtime, in place and bit for bit. Data, schedules and random numbers
      are not rewound, so that the batches of the failure are not seen again (Chowdhery et al., *PaLM*,
      arXiv:2204.02311, section 5.1, restarted about 100 steps before a spike and skipped 200 to 500 batches).
    - **Spike.** A loss more than ``spike`` standard deviations, and more than 2^-7 of it, above the mean of the last 1000
      healthy ones, at least 100 of them (the criterion of the spike score in *2 OLMo 2 Furious*, arXiv:2501.00656, where it is 7).
      ``spike=None`` disables it.
    - **Rate.** After a restore the optimizer steps with half the rate for ``cooldown`` healthy steps; after each
      further restore in that time, with half of it again. The rate is lowered only inside ``optimizer.step()``, so
      schedulers and loops may set it as before; ``guard.rate`` is the factor. A step that is replayed from a CUDA graph
      does not see it.
    - **Loss scale.** ``scaler``, a ``torch.amp.GradScaler``, is halved after a restore, unless its own rule does so in
      this step. A scale that has fallen over 100 steps without rising, or is below 2^7, is a warning.
    - **Saturation.** More than ``saturation`` of the values of q, k and v of a head outside the range of E4M3 are a
      warning: the scale is wrong. It is looked at every ``every`` steps.

    With a scaler::

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if guard.step(loss, norm):
            scaler.step(optimizer)
        scaler.update()

    Events go to ``monitor`` (names ``skip``, ``spike``, ``restore``, ``lower-rate``, ``raise-rate``, ``saturation``,
    ``loss-scale``) and to ``on_event(name, message)``; warnings are a RuntimeWarning too.

    Of a distributed run every rank makes a guard, and all must decide alike: pass the loss reduced over ranks, or
    ``group``, over which the guard averages loss and norm in one small all-reduce per step. Each rank copies what it
    holds.
    """

    runtime: Runtime
    optimizer: torch.optim.Optimizer
    rate: float
    skipped: bool
    steps: int
    restored: int

    def __init__(
        self,
        runtime: Runtime,
        optimizer: torch.optim.Optimizer,
        *,
        scaler: torch.amp.GradScaler | None = None,
        monitor: Monitor | None = None,
        every: int = 100,
        patience: int = 3,
        points: int = 2,
        spike: float | None = 7.0,
        cooldown: int = 100,
        restores: int = 5,
        saturation: float = 1e-3,
        store: tuple[Callable[[], Any], Callable[[Any], object]] | None = None,
        group: Group = None,
        on_event: Callable[[str, str], object] | None = None,
    ) -> None:
        if not isinstance(runtime, Runtime):
            raise TypeError(f"runtime must be what sigmascale.torch.attach returned, not {type(runtime).__name__}")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
        if store is not None and not (
            isinstance(store, tuple | list) and len(store) == 2 and all(map(callable, store))
        ):
            raise TypeError("store must be two functions: one that saves, and one that loads what it returned")
        self.runtime, self.optimizer, self.scaler, self.monitor = runtime, optimizer, scaler, monitor
        self.every, self.patience, self.cooldown = (
            count("every", every),
            count("patience", patience),
            count("cooldown", cooldown),
        )
        self.spike = None if spike is None else positive("spike", spike)
        self.saturation, self.most_restores = share("saturation", saturation), count("restores", restores)
        self._store, self._group, self._on_event = store, group, on_event
        # Factor of the rate, whether the last step was refused, steps and restores so far.
        self.rate, self.skipped, self.steps, self.restored = 1.0, False, 0, 0
        self._points = collections.deque(maxlen=count("points", points))
        self._losses = collections.deque(maxlen=1000)
        self._scales = collections.deque(maxlen=_FALLING_STEPS + 1)
        # Failures in a row, restores since the last new point, and healthy steps at the lowered rate.
        self._failures = self._tries = self._calm = 0
        # Step of the last point or restore.
        self._since = 0
        # A point whose restore was interrupted, and rates while a step is in progress.
        self._unfinished = self._rates = None
        self._raised = set()
        self._window = _window.Window(runtime)
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._lower()),
            optimizer.register_step_post_hook(lambda *_: self._put_back()),
        ]

    def step(self, loss: Number, grad_norm: Number | None = None) -> bool:
        """Whether the optimizer shall step; call it after the backward. ``loss``, ``grad_norm``: numbers or tensors of
        one value, the norm unscaled and before or after clipping. Without ``grad_norm`` the gradients of the optimizer
        are looked at. Waits for the device.

        Raises :class:`SigmascaleError` if the run fails again after ``restores`` restores without a new restore point
        between: the weights are then those of the point.
        """
        self._put_back()
        number, self.steps = self.steps, self.steps + 1
        if self._unfinished is not None:
            self._restore(self._unfinished, "an interrupted restore is completed")
            return self._refuse()
        loss, norm = self._agreed(loss, grad_norm)
        finite = math.isfinite(loss) and math.isfinite(norm)
        spike = finite and self._is_spike(loss)
        self._watch_scale()
        if not finite:
            self._failures += 1
            self._event(
                "skip", f"loss {loss:.6g} and gradient norm {norm:.6g} are not finite: step {number} is skipped"
            )
        elif spike:
            self._failures += 1
            self._event(
                "spike",
                f"loss {loss:.6g} is {self.spike:g} standard deviations above the mean of the last {len(self._losses)}",
            )
        else:
            self._healthy(loss, number)
        if self._failures >= self.patience and self._points:
            self._recover(norm)
            return self._refuse()
        if not finite and self._failures >= self.patience * self.most_restores:
            raise SigmascaleError(
                f"{self._failures} steps in a row were not finite, and there is no restore point yet: the run fails from its start, so "
                "lower the learning rate or look for the first tensor that is not finite"
            )
        return self._refuse() if not finite else self._accept()

    def _accept(self):
        self.skipped = False
        return True

    def _refuse(self):
        """Drops the gradients. A scaler has to see them first: its ``update()`` asks what it found."""
        if self.scaler is not None:
            with contextlib.suppress(RuntimeError):
                self.scaler.unscale_(self.optimizer)
        self.optimizer.zero_grad()
        if self.runtime._following:
            # No step of the optimizer ends this one.
            self.runtime._refresh(ends_step=True)
        self.skipped = True
        return False

    def _agreed(self, loss, norm):
        """Loss and norm as numbers, the same on all ranks."""
        if norm is None:
            norm = _gradient_norm(self.optimizer)
        values = [
            value.detach()
            if isinstance(value, torch.Tensor)
            else torch.tensor(float(value), dtype=torch.float32, device=self.runtime.device)
            for value in (loss, norm)
        ]
        for name, value in zip(("loss", "grad_norm"), values):
            if value.numel() != 1:
                raise ArgumentError(f"{name} has shape {tuple(value.shape)}: one value is needed, such as its mean")
        full = lambda value: value.full_tensor() if hasattr(value, "full_tensor") else value
        values = torch.stack([full(value).reshape(()).to(self.runtime.device, torch.float32) for value in values])
        if self._group is not None:
            torch.distributed.all_reduce(values, group=self._group)
            values /= torch.distributed.get_world_size(self._group)
        return values.tolist()

    def _is_spike(self, loss):
        if self.spike is None or len(self._losses) < _LEAST_LOSSES:
            return False
        mean = statistics.fmean(self._losses)
        return loss > mean + max(self.spike * statistics.pstdev(self._losses, mean), _RESOLUTION * abs(mean))

    def _healthy(self, loss, number):
        self._failures = 0
        self._losses.append(loss)
        if self.rate < 1.0:
            self._calm += 1
            if self._calm >= self.cooldown:
                self.rate = 1.0
                self._event(
                    "raise-rate",
                    f"{self.cooldown} healthy steps since the restore: the learning rate is the schedule's again",
                )
        if not self._points or number - self._since >= self.every:
            self._keep(number)
            self._tries = 0
            self._watch_saturation()

    def keep(self) -> None:
        """Takes a restore point now. What goes wrong here leaves the earlier ones as they are."""
        self._keep(self.steps)

    def _keep(self, number):
        self._points.append(Point(number, self.runtime, self.optimizer, self._store))
        self._since = number

    def restore(self) -> None:
        """Puts the oldest restore point back, as after a failure. Raises :class:`SigmascaleError` if there is none."""
        if not self._points:
            raise SigmascaleError("there is no restore point yet: the first is taken in the first healthy step")
        self._restore(self._oldest(), "asked for")

    def _oldest(self):
        """The oldest point that still fits, and drops those before it: parameters may have been added since. The last
        one, which says what does not fit, where none does."""
        while len(self._points) > 1:
            try:
                self._points[0].check(self.runtime, self.optimizer)
                break
            except MismatchError:
                self._points.popleft()
        return self._points[0]

    def _recover(self, norm):
        self._tries += 1
        point = self._oldest()
        self._restore(point, f"{self._failures} failures in a row")
        if self._tries > self.most_restores:
            raise SigmascaleError(
                f"the run failed again after {self.most_restores} restores of step {point.step}, at {self.rate:g} times the learning "
                "rate: the weights are those of that step; look at the data, or at the first layer with an alarm"
            )
        if self.scaler is not None and self.scaler.is_enabled() and math.isfinite(norm):
            state = self.scaler.state_dict()
            self.scaler.load_state_dict(state | {"scale": state["scale"] / 2})

    def _restore(self, point, why):
        self._put_back()
        # What does not fit is not begun.
        point.check(self.runtime, self.optimizer)
        self._unfinished = point
        point.restore(self.runtime, self.optimizer)
        # Later points may hold what failed.
        self._points = collections.deque([point], self._points.maxlen)
        self._unfinished = None
        self.restored += 1
        self._failures = self._calm = 0
        self._since = self.steps
        self._losses.clear()
        self._event("restore", f"{why}: weights, optimizer and scales are those before step {point.step}")
        self.rate /= 2
        self._event(
            "lower-rate", f"the learning rate is {self.rate:g} of the schedule's for {self.cooldown} healthy steps"
        )

    def _lower(self):
        self._put_back()
        if self.rate != 1.0:
            self._rates = [float(group["lr"]) for group in self.optimizer.param_groups]
            for group, rate in zip(self.optimizer.param_groups, self._rates):
                _set_rate(group, rate * self.rate)

    def _put_back(self):
        """The schedule's rates, also after a step that ended in an exception."""
        if self._rates is not None:
            for group, rate in zip(self.optimizer.param_groups, self._rates):
                _set_rate(group, rate)
            self._rates = None

    def _watch_scale(self):
        if self.scaler is None or not self.scaler.is_enabled():
            return
        self._scales.append(scale := self.scaler.get_scale())
        scales = list(self._scales)
        falls = len(scales) > _FALLING_STEPS and scale < scales[0] and all(b <= a for a, b in zip(scales, scales[1:]))
        self._warn(
            "loss-scale",
            falls,
            scale >= scales[0],
            f"the loss scale has fallen from {scales[0]:g} to {scale:g} in {len(scales) - 1} steps",
        )
        low = f"the loss scale {scale:g} is below {_LEAST_SCALE:g}: small gradients are lost"
        self._warn("loss-scale", scale < _LEAST_SCALE, scale >= 2 * _LEAST_SCALE, low, key="low")

    def _watch_saturation(self):
        rows, _ = self._window.take()
        shares = {index: row["saturated"].max() for index, row in enumerate(rows) if "saturated" in row}
        if shares:
            index = max(shares, key=shares.get)
            message = f"{shares[index]:.3g} of the values of a head of {self.runtime.layers[index].name} are outside the range of E4M3"
            self._warn("saturation", shares[index] > self.saturation, shares[index] < self.saturation / 2, message)

    def _warn(self, name, bad, good, message, key=None):
        """Once, until it has been good."""
        key = key or name
        if bad and key not in self._raised:
            self._raised.add(key)
            self._event(name, message)
            warnings.warn(message, RuntimeWarning, stacklevel=4)
        elif good:
            self._raised.discard(key)

    def _event(self, name, message):
        if self.monitor is not None:
            self.monitor.event(name, message)
        if self._on_event is not None:
            self._on_event(name, message)

    def close(self) -> None:
        """Takes the guard off the optimizer and the runtime."""
        self._put_back()
        for hook in self._hooks:
            hook.remove()
        self._window.close()

    def __repr__(self) -> str:
        return f"<sigmascale Guard: {self.steps} steps, {len(self._points)} restore points, {self.restored} restores, rate {self.rate:g}>"


def _gradient_norm(optimizer):
    """Of all gradients that the optimizer has here; zero without any."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    # PyTorch takes neither those of several meshes together nor DTensors with others.
    meshes = {}
    for grad in grads:
        meshes.setdefault(grad.device_mesh if is_dtensor(grad) else None, []).append(grad)
    norms = [torch.nn.utils.get_total_norm(each) for each in meshes.values()]
    norms = [norm.full_tensor() if is_dtensor(norm) else norm for norm in norms]
    return torch.stack(norms).norm() if norms else 0.0


def _set_rate(group, rate):
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
