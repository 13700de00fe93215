"""The monitor as a callback of Hugging Face's Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ._monitor import Monitor
from ._policies import FROM_BOUNDS

if TYPE_CHECKING:
    from .._options import Path
    from ._runtime import Runtime


class TrainerMonitor:
    """A ``TrainerCallback`` that records a run of the Trainer, see :class:`Monitor`.

    >>> runtime = sigmascale.torch.attach(model, bound="worst-case")
    >>> trainer = transformers.Trainer(model, ..., callbacks=[sigmascale.torch.TrainerMonitor(runtime, "run.jsonl")])

    Every optimizer step is a step of the record, numbered as the Trainer numbers it. The Trainer hands out loss and
    gradient norm where it logs (``logging_steps``), the loss as the mean since the last log; other steps have a rate
    alone. ``refresh``: also calls ``runtime.refresh()`` after each step, unless :func:`attach` was given the optimizer,
    and after weights were loaded (``resume_from_checkpoint``, ``load_best_model_at_end``). ``options`` are those of
    :class:`Monitor`. Only the first process of a distributed run records.
    """

    monitor: Monitor | None

    def __init__(
        self,
        runtime: Runtime,
        path: Path | None = "run.jsonl",
        every: int = 10,
        *,
        refresh: bool = True,
        **options: Any,
    ) -> None:
        self.monitor: Monitor | None = None
        self._make = lambda step: Monitor(runtime, path, every, first_step=step, **options)
        self._runtime, self._refresh = runtime, refresh
        self._pending: dict[str, Any] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Opens the record. Scales become those of the checkpoint from which the run goes on, if it does."""
        if state.global_step > 0:
            self._loaded()
        if state.is_world_process_zero and self.monitor is None:
            # The Trainer counts a step when it is done.
            self.monitor = self._make(state.global_step + 1)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Keeps a step until its log, which comes later."""
        if self.monitor is not None:
            groups = getattr(optimizer, "param_groups", None)
            self._pending = {"lr": float(groups[0]["lr"])} if groups else {}
            self._pending["skipped"] = bool(getattr(optimizer, "step_was_skipped", False))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """New scales."""
        if self._refresh and not self._runtime._following:
            self._runtime.refresh()

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        """Takes what the Trainer reports of the step."""
        if self._pending is not None and logs:
            known = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr"}
            self._pending |= {name: logs[key] for key, name in known.items() if key in logs}

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Writes the step before."""
        self._write()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Writes the last step and closes the record. Scales become those of the best weights, if they are loaded."""
        self._write()
        if self.monitor is not None:
            self.monitor.close()
            self.monitor = None
        if getattr(args, "load_best_model_at_end", False):
            self._loaded()

    def _loaded(self):
        """New scales after weights were loaded. Policies that plan from calls alone have seen none of them."""
        if self._refresh and self._runtime.policy in FROM_BOUNDS:
            self._runtime.refresh()

    def _write(self):
        if self._pending is not None:
            self.monitor.step(**self._pending)
            self._pending = None

    def __getattr__(self, name: str) -> Any:
        # The Trainer calls every event of its base class, which is not imported here for those who have no transformers.
        if name.startswith("on_"):
            return lambda *_, **__: None
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
