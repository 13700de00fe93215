"""Refreshes that nobody has to call: after the steps of optimizers, and after weights were loaded."""

import functools
import warnings
import weakref

import torch

from .._errors import ArgumentError, SigmascaleError
from . import _distributed


class Following:
    """Hooks on a model and its optimizers that refresh a runtime, until :meth:`close`.

    Several optimizers share a step: the first that steps, and one that steps again, ends it. The others change weights
    within it.
    """

    def __init__(self, runtime, model, optimizers):
        self._runtime, self._number = weakref.ref(runtime), len(optimizers)
        # Optimizers that have stepped since a step ended, and whether a refresh waits for the end of a backward.
        self._stepped, self._waits = set(), False
        loaded = model.register_load_state_dict_post_hook(Detached(weakref.WeakMethod(self._loaded)))
        self._undo = [loaded.remove]
        for number, optimizer in enumerate(optimizers):
            work = functools.partial(_call, weakref.WeakMethod(self._step), number)
            self._undo.append(_after_step(optimizer, work))

    def __bool__(self):
        """Whether optimizers are followed."""
        return self._number > 0

    def close(self):
        while self._undo:
            self._undo.pop()()

    def _step(self, number):
        runtime = self._runtime()
        if runtime is None:
            return
        if _distributed.recomputing():
            # Optimizers that step inside of the backward: layers whose backward comes later need the scales of the forward.
            if not self._waits:
                self._waits = True
                torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)
            return
        ends = not self._stepped or number in self._stepped
        self._stepped = {number} if ends else self._stepped | {number}
        runtime._refresh(ends_step=ends)

    def _after_backward(self):
        self._waits, runtime = False, self._runtime()
        if runtime is not None:
            runtime._refresh(ends_step=True)

    def _loaded(self, *_):
        runtime = self._runtime()
        if runtime is None:
            return
        try:
            runtime._refresh(ends_step=False)
        except SigmascaleError as error:
            # The weights are loaded, whatever becomes of the runtime.
            warnings.warn(f"the FP8 scales are not those of the loaded weights: {error}", RuntimeWarning, stacklevel=4)


class Ran:
    """Whether a model has run, as a hook of its forward. Compiled code sets it too, and does nothing else."""

    def __init__(self, reference):
        self.ran, self._reference = False, reference

    def __call__(self, *_):
        self.ran = True
        if not torch.compiler.is_compiling():
            _call(self._reference)

    def __reduce_ex__(self, _):
        return _nothing, ()


class Detached:
    """A hook that calls what ``reference`` refers to, if that is alive. Copies of it, and so of the module that has it, do
    nothing."""

    def __init__(self, reference):
        self._reference = reference

    def __call__(self, *args):
        _call(self._reference, *args)

    def __reduce_ex__(self, _):
        return _nothing, ()


def _nothing():
    return Detached(lambda: None)


def _call(reference, *args):
    function = reference()
    if function is not None:
        function(*args)


def checked(optimizer, model):
    """The optimizers that :func:`attach` was given, as a list. Raises an exception for what does not step, and where none has a
    parameter of the model: one that steps copies in another precision, or parameters from before the model was sharded."""
    # A container of optimizers that steps as one is one.
    several = isinstance(optimizer, list | tuple)
    optimizers = [] if optimizer is None else list(optimizer) if several else [optimizer]
    for each in optimizers:
        if not callable(getattr(each, "step", None)):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer, an object with step(), or a list of them, not {type(each).__name__}"
            )
    if not optimizers or not all(map(_has_hooks, optimizers)):
        return optimizers
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(p) in own for each in optimizers for group in each.param_groups for p in group["params"]):
        raise ArgumentError(
            "optimizer has none of the model's parameters: give the one that was made from model.parameters(), after the model "
            "was moved and sharded, or the object whose step() updates the model from copies of its parameters"
        )
    return optimizers


def _has_hooks(optimizer):
    # Wrappers that are Optimizers by class alone (Accelerate's) have not run its __init__.
    return isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer, "_optimizer_step_post_hooks")


def _after_step(optimizer, work):
    """Calls ``work`` after each step of an optimizer, or of what steps one. Returns what ends that."""
    work = torch.compiler.disable(work)
    if _has_hooks(optimizer):
        return optimizer.register_step_post_hook(lambda *_: work()).remove
    step = optimizer.step

    @functools.wraps(step)
    def followed(*args, **kwargs):
        result = step(*args, **kwargs)
        work()
        return result

    before = vars(optimizer).get("step")
    optimizer.step = followed
    return functools.partial(_put_back, weakref.ref(optimizer), followed, before)


def _put_back(reference, followed, before):
    optimizer = reference()
    if optimizer is None or vars(optimizer).get("step") is not followed:
        # It was wrapped again.
        return
    if before is None:
        del optimizer.step
    else:
        optimizer.step = before
