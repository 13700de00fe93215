"""TensorBoard and Weights & Biases, by what their objects can do."""

import os

from .._errors import UnsupportedError
from ._record import finite


def opened(sinks, path):
    """Sinks by the objects that users have."""
    if isinstance(sinks, str) or not hasattr(sinks, "__iter__"):
        sinks = (sinks,)
    return [_opened(sink, path) for sink in sinks]


def _opened(sink, path):
    if isinstance(sink, str):
        if sink != "tensorboard":
            raise TypeError(
                f"unknown sink {sink!r}: expected a SummaryWriter, a run of Weights & Biases, or 'tensorboard'"
            )
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UnsupportedError("sinks='tensorboard' needs its package: pip install tensorboard") from error
        return _TensorBoard(SummaryWriter(None if path is None else os.path.splitext(path)[0]), own=True)
    if callable(getattr(sink, "add_scalar", None)):
        return _TensorBoard(sink)
    if callable(getattr(sink, "log", None)):
        return _Wandb(sink)
    raise TypeError(
        f"a sink must be a SummaryWriter (add_scalar) or a run of Weights & Biases (log), not {type(sink).__name__}"
    )


def scalars(row, layers):
    """A record as numbers by name: of a layer's heads the largest value, and the smallest entropy. What is not finite is left out."""
    found = {name: value for name, value in row.items() if name not in ("kind", "step")}
    found["skipped"] = float(row.get("skipped", False))
    for layer in layers:
        for name, values in layer.items():
            known = [value for value in values if value is not None] if isinstance(values, list) else []
            if known:
                value = min(known) if name == "entropy" else max(known, key=abs)
                found[f"{name}/layer {layer['layer']}"] = value
    return {f"sigmascale/{name}": value for name, value in found.items() if finite(value) is not None}


class _TensorBoard:
    def __init__(self, writer, own=False):
        self._writer, self._own = writer, own

    def write(self, row, layers):
        for name, value in scalars(row, layers).items():
            self._writer.add_scalar(name, value, row["step"])

    def close(self):
        if self._own:
            self._writer.close()


class _Wandb:
    """The step is a value of its own: that of the run counts calls of ``log``, and drops those that come late."""

    def __init__(self, run):
        self._run = run
        if callable(getattr(run, "define_metric", None)):
            run.define_metric("sigmascale/step")
            run.define_metric("sigmascale/*", step_metric="sigmascale/step")

    def write(self, row, layers):
        self._run.log(scalars(row, layers) | {"sigmascale/step": row["step"]})

    def close(self):
        pass
