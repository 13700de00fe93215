"""Copies of a run's state in host memory, from which it goes on with the same bits."""

import copy

import torch

from .._errors import MismatchError, SigmascaleError
from ._distributed import local


class Point:
    """Weights, buffers, optimizer state and the runtime's own state as they are now.

    ``store``: two functions that keep weights, buffers and optimizer state elsewhere: the first saves them and returns what the second
    takes to load them. The runtime's state, a few values a head, is in host memory in any case.
    """

    @torch.no_grad()
    def __init__(self, step, runtime, optimizer, store=None):
        self.step, self._store = step, store
        self._runtime = [_saved(tensor) for tensor in _runtime_tensors(runtime)]
        self._policy = runtime._policy.save()
        if store is not None:
            self._token = store[0]()
            return
        self._weights = {name: _saved(tensor) for name, tensor in _weights(runtime, optimizer).items()}
        self._groups = [_saved(_options(group)) for group in optimizer.param_groups]
        self._states = [_saved(optimizer.state.get(parameter)) for parameter in _parameters(optimizer)]

    @torch.no_grad()
    def restore(self, runtime, optimizer):
        """Puts everything back, in place. Checked before anything is written; may be called again after an exception in between."""
        self.check(runtime, optimizer)
        tensors = _runtime_tensors(runtime)
        if self._store is None:
            weights, parameters = _weights(runtime, optimizer), _parameters(optimizer)
        if self._policy is not None:
            runtime._policy.load(self._policy)
        with torch.inference_mode(False):
            # A reduction of the step that failed would end in the words that are put back.
            runtime._finish_reduction()
            for tensor, saved in zip(tensors, self._runtime):
                _put(tensor, saved)
        if self._store is not None:
            self._store[1](self._token)
            runtime._mark()
            return
        for name, saved in self._weights.items():
            _put(weights[name], saved)
        for group, saved in zip(optimizer.param_groups, self._groups):
            for key in [key for key in _options(group) if key not in saved]:
                del group[key]
            for key, value in saved.items():
                group[key] = _put(group.get(key), value)
        for parameter, saved in zip(parameters, self._states):
            if saved is None:
                optimizer.state.pop(parameter, None)
            else:
                optimizer.state[parameter] = _put(optimizer.state.get(parameter), saved)
        runtime._mark()

    def check(self, runtime, optimizer):
        """Raises an exception where model or optimizer are not those of the point."""
        if self._store is not None:
            return
        weights, groups = _weights(runtime, optimizer), optimizer.param_groups
        if (len(_parameters(optimizer)), len(groups)) != (len(self._states), len(self._groups)):
            raise MismatchError("the optimizer has other parameters than at the restore point: nothing was restored")
        for name, saved in self._weights.items():
            tensor = weights.get(name)
            here = "gone" if tensor is None else f"{tuple(local(tensor).shape)} {tensor.dtype}"
            if here != f"{tuple(saved.value.shape)} {saved.value.dtype}":
                raise MismatchError(
                    f"{name} was {tuple(saved.value.shape)} {saved.value.dtype} at the restore point and is {here}: nothing was restored"
                )


class _Saved:
    """A copy of a tensor on the host, and where the tensor is."""

    def __init__(self, tensor):
        tensor = local(tensor.detach())
        self.device, self.value = tensor.device, tensor.to("cpu", copy=True)


def _saved(value):
    """A copy of nested values."""
    if isinstance(value, torch.Tensor):
        return _Saved(value)
    if isinstance(value, dict):
        return {key: _saved(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_saved(each) for each in value)
    return copy.deepcopy(value)


def _put(present, saved):
    """What was saved: in the present tensors where there are such, so that their addresses stay."""
    if isinstance(saved, _Saved):
        value = saved.value
        if isinstance(present, torch.Tensor):
            here = local(present.detach())
            if (here.shape, here.dtype) == (value.shape, value.dtype):
                here.copy_(value)
                return present
        return value.to(saved.device, copy=True)
    if isinstance(saved, dict):
        present = present if isinstance(present, dict) else {}
        for key in [key for key in present if key not in saved]:
            del present[key]
        for key, value in saved.items():
            present[key] = _put(present.get(key), value)
        return present
    if isinstance(saved, list | tuple):
        old = present if isinstance(present, list | tuple) and len(present) == len(saved) else [None] * len(saved)
        return type(saved)(_put(one, value) for one, value in zip(old, saved))
    return copy.deepcopy(saved)


def _runtime_tensors(runtime):
    """What of a runtime later plans depend on, apart from its policy's memory."""
    own = [runtime.words, runtime.descales, runtime.logits, runtime.logit_descales, *runtime._policy.bounds()]
    if runtime._estimates is not None:
        own += [runtime._estimates.vectors, runtime._estimates.before]
    return [tensor for tensor in own if tensor is not None]


def _weights(runtime, optimizer):
    """Parameters and buffers by name, with those that the optimizer has beside them."""
    model = runtime._model()
    if model is None:
        raise SigmascaleError("the model was deleted: make a guard of the model that is in use")
    named = {name: tensor for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    known = {id(tensor) for tensor in named.values()}
    others = (parameter for parameter in _parameters(optimizer) if id(parameter) not in known)
    return named | {f"parameter {index} of the optimizer": parameter for index, parameter in enumerate(others)}


def _parameters(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _options(group):
    """What a group holds, without its rate: schedules go on, and some compute the next rate from the last."""
    return {key: value for key, value in group.items() if key not in ("params", "lr", "initial_lr")}
