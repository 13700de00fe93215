"""Weights that are spread over processes: what of them this process multiplies, and when they are whole.

Tensor parallelism keeps a process's own rows where they are: a DTensor is read through its local tensor. FSDP keeps slices
and makes a unit's parameters whole for its forward: those layers are read in a hook on the unit, where their tensors are what
the projections multiply. Nothing here communicates.
"""

import contextlib
import functools
import sys
import typing
import weakref

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .._errors import UnsupportedError


def _loaded(module, name):
    """A class of a part of PyTorch, if anything has imported that part."""
    return getattr(sys.modules.get(module), name, ())


def is_dtensor(tensor):
    """Whether a tensor is one rank's part of a larger one, with its place in it."""
    return isinstance(tensor, _loaded("torch.distributed.tensor", "DTensor"))


def local(tensor):
    """The local part of a tensor."""
    return tensor.detach().to_local() if is_dtensor(tensor) else tensor


def is_unit(module):
    """Whether a module is sharded by ``fully_shard`` or wrapped in FullyShardedDataParallel."""
    return isinstance(module, _loaded("torch.distributed.fsdp", "FSDPModule")) or _is_wrapper(module)


def _is_leaf(module):
    """Whether ZeRO-3 gathers the parameters of a module and of all below it together."""
    return getattr(module, "_z3_leaf", False)


def is_partitioned(tensor):
    """Whether ZeRO-3 keeps a slice of a parameter, in another place, and the parameter itself empty."""
    return hasattr(tensor, "ds_shape")


def _is_gathered(module):
    """Whether ZeRO-3 gathers parameters for the forward of this module."""
    return any(map(is_partitioned, module.parameters(recurse=_is_leaf(module))))


def _is_wrapper(module):
    return isinstance(module, _loaded("torch.distributed.fsdp", "FullyShardedDataParallel"))


def unwrapped(model):
    """The model inside what torch.compile, DistributedDataParallel and deepspeed.initialize return."""
    wrappers = ("torch.nn.parallel", "DistributedDataParallel"), ("deepspeed.runtime.engine", "DeepSpeedEngine")
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif any(isinstance(model, _loaded(*wrapper)) for wrapper in wrappers):
            model = model.module
        else:
            return model


def inner(unit):
    """The module whose forward has the unit's parameters whole."""
    return unit._fsdp_wrapped_module if _is_wrapper(unit) else unit


def recomputing():
    """Whether this thread is in a backward: a forward there is that of a checkpoint, and has its scales."""
    return torch._C._current_graph_task_id() != -1


class Units:
    """The units of a model, each of which makes its parameters whole for its forward (FSDP, ZeRO-3): above each module, from
    the nearest outwards, and what FullyShardedDataParallel flattened."""

    def __init__(self, model):
        self._above, self._flat = {}, {}
        self._walk(model, ())

    def _walk(self, module, above):
        if module in self._above:
            return
        if is_unit(module) or (_is_gathered(module) and not any(map(_is_leaf, above))):
            above = (module, *above)
            handle = getattr(module, "_handle", None) if _is_wrapper(module) else None
            if handle is not None:
                flat = handle.flat_param
                for info, shape in zip(flat._param_infos, flat._shapes):
                    self._flat[info.module, info.param_name] = shape, flat.dtype
        self._above[module] = above
        for child in module.children():
            self._walk(child, above)

    def __bool__(self):
        return any(self._above.values())

    def above(self, module):
        """The units that a module lies in, the nearest first."""
        return self._above.get(module, ())

    def shard(self, module, name):
        """The part of a sliced parameter that stays here between forwards, or None where that is not known."""
        parameter = module._parameters.get(name)
        if is_dtensor(parameter):
            return local(parameter)
        if parameter is not None and is_partitioned(parameter):
            return getattr(parameter, "ds_tensor", None)
        wrapper = next(filter(_is_wrapper, self.above(module)), None)
        handle = getattr(wrapper, "_handle", None)
        # Before the first forward the flat parameter is the shard.
        return None if handle is None else getattr(handle.flat_param, "_local_shard", handle.flat_param.data)

    def flattened(self, module):
        """Names, shapes and types of the module's parameters that were flattened."""
        return {name: place for (owner, name), place in self._flat.items() if owner is module}

    def device(self):
        """Where units compute."""
        for above in self._above.values():
            for unit in above:
                if _is_wrapper(unit):
                    return torch.device(unit.compute_device)
                for parameter in unit.parameters():
                    if is_dtensor(parameter):
                        return _compute_device(parameter)
                    if is_partitioned(parameter):
                        return parameter.device
        return None


def _compute_device(dtensor):
    kind = dtensor.device_mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


class View:
    """How parameters are seen while layers are read, and which of a layer's tensors came from where.

    ``view(owner, name, tensor)`` is what represents a parameter: the local tensor of a DTensor; a tensor without values, of the
    local shape, where FSDP has sliced it (``at_rest``); ``kept`` where a copy was kept.
    """

    def __init__(self, units, at_rest, kept=None):
        self._units, self._at_rest, self._kept = units, at_rest, kept or {}
        # By the storage of what was seen; it is held, so that no other takes its place.
        self._seen = {}

    def __call__(self, owner, name, tensor):
        seen, ranks, rank, sliced = self._of(owner, name, tensor)
        self._seen[seen.untyped_storage()._cdata] = Origin(owner, name, ranks, rank, sliced), seen
        return seen

    def _of(self, owner, name, tensor):
        if (owner, name) in self._kept:
            return self._kept[owner, name], 1, 0, True
        if isinstance(getattr(type(owner), name, None), property):
            raise UnsupportedError(
                f"{type(owner).__name__}.{name} is a property that gathers its parameter at every read: use fully_shard, or take "
                "the scales inside the model's own forward"
            )
        if getattr(owner, "_is_fsdp_managed_module", False) and not self._units.above(owner):
            raise UnsupportedError(
                f"{type(owner).__name__}.{name} is sharded by FSDP in a unit above the given module: attach to the model that "
                "was given to fully_shard or FullyShardedDataParallel"
            )
        if self._at_rest and (flat := self._units.flattened(owner).get(name)):
            shape, dtype = flat
            return torch.empty(shape, dtype=dtype, device="meta"), 1, 0, True
        if self._at_rest and is_partitioned(tensor):
            return torch.empty(tensor.ds_shape, dtype=tensor.dtype, device="meta"), 1, 0, True
        if not is_dtensor(tensor):
            return tensor, 1, 0, False
        sliced = self._at_rest and bool(self._units.above(owner))
        ranks, rank = _place(tensor, _of_heads(tensor, sliced))
        rows = tensor.shape[0] if tensor.dim() else 1
        if rows % ranks or not (sliced or all(map(_by_rows, tensor.placements))):
            # Refused if a layer has it: see `plain`.
            return tensor, 1, 0, False
        if sliced:
            shape = (rows // ranks, *tensor.shape[1:])
            return torch.empty(shape, dtype=tensor.dtype, device="meta"), ranks, rank, True
        return local(tensor), ranks, rank, False

    def origin(self, tensor):
        """The :class:`Origin` of the parameter that a tensor is or is a view of; None for any other."""
        place = self._seen.get(tensor.untyped_storage()._cdata)
        return None if place is None else place[0]


class Origin(typing.NamedTuple):
    """A parameter: which, how many ranks share its rows and which of them this is, and whether FSDP has it sliced."""

    owner: torch.nn.Module
    name: str
    ranks: int
    rank: int
    sliced: bool


def _of_heads(tensor, sliced):
    """Which dimensions of a DTensor's mesh share out heads, where FSDP may have ``sliced`` the rest."""
    if not sliced:
        return [True] * len(tensor.placements)
    # FSDP strides what it cuts of rows that tensor parallelism has sharded before; the other shards are those ranks.
    strided = [hasattr(placement, "split_factor") for placement in tensor.placements]
    return [any(strided) and not own for own in strided]


def head_group(origin):
    """The process group of the ranks that share the heads of a parameter."""
    tensor = getattr(origin.owner, origin.name)
    which = _of_heads(tensor, origin.sliced)
    (dimension, *others) = [at for at, placement in enumerate(tensor.placements) if which[at] and hasattr(placement, "dim")]
    if others:
        raise UnsupportedError(
            f"{origin.name} is sharded over several dimensions of its mesh, whose ranks have no process group of their own: take "
            "estimator='power'"
        )
    return tensor.device_mesh.get_group(dimension)


def _place(tensor, which):
    """How many ranks share rows in these dimensions of a DTensor's mesh, and which of them this is."""
    ranks, rank = 1, 0
    mesh = tensor.device_mesh
    for size, at, placement, counted in zip(mesh.shape, mesh.get_coordinate(), tensor.placements, which):
        # Only shards have a dimension.
        if counted and hasattr(placement, "dim"):
            ranks, rank = ranks * size, rank * size + at
    return ranks, rank


def _by_rows(placement):
    """Whether a rank has rows, or everything."""
    return not placement.is_partial() and getattr(placement, "dim", 0) == 0


def plain(name, tensor):
    """Raises an exception for a tensor whose values are not all here, or not its own."""
    if is_dtensor(tensor):
        ranks = tensor.device_mesh.size()
        raise UnsupportedError(
            f"{name} has shape {tuple(tensor.shape)} and is placed {tensor.placements} on {ranks} ranks: it is read where all ranks "
            "have as many rows (ColwiseParallel) or all of them"
        )
    if is_traceable_wrapper_subclass(tensor):
        raise UnsupportedError(
            f"{name} is a {type(tensor).__name__}: bfloat16, float16 and float32 are read; leave the q, k and v projections out of "
            "float8 training"
        )


@contextlib.contextmanager
def seen_as(modules, view, units):
    """Reads of the modules' parameters in this block get what the view makes of them."""
    before = []
    try:
        for owner in modules:
            names = dict.fromkeys([*owner._parameters, *units.flattened(owner)])
            for name in names:
                held = owner._parameters.get(name)
                tensor = getattr(owner, name, None) if held is None else held
                if tensor is None and name not in units.flattened(owner):
                    continue
                seen = view(owner, name, tensor)
                if seen is not tensor:
                    # FullyShardedDataParallel leaves its views as plain attributes.
                    place = owner.__dict__ if name in owner.__dict__ else owner._parameters
                    before.append((place, name, name in place, place.get(name)))
                    place[name] = seen
        yield
    finally:
        for place, name, there, held in before:
            if there:
                place[name] = held
            else:
                del place[name]


def hooked(layers, compute):
    """Hooks on the units of sliced layers. ``compute`` is a weak reference to a function of the layers, the numbers of those that
    are whole, and kept copies."""
    computing, keeping, kept = {}, {}, {}
    for index in sorted(layers.sliced):
        unit, others = layers.unit(index)
        computing.setdefault(unit, []).append(index)
        for other, places in others.items():
            keeping.setdefault(other, []).extend(places)
    handles = [_hook(unit, functools.partial(_keep, places, kept)) for unit, places in keeping.items()]
    for unit, indices in computing.items():
        handles.append(_hook(unit, functools.partial(_run, layers, indices, kept, compute)))
    return handles


def _hook(unit, work):
    """Runs ``work`` before every forward of a unit that is not a recompute. A copy of the unit keeps the hook, which does
    nothing there."""
    module = inner(unit)
    own = weakref.ref(module)

    # FSDP's own hook comes first, whichever was registered before the other.
    @torch.compiler.disable
    def hook(called, *_):
        if called is own() and not recomputing():
            work()

    return module.register_forward_pre_hook(hook)


def _run(layers, indices, kept, compute):
    function = compute()
    if function is not None:
        function(layers, indices, kept)


def _keep(places, kept):
    """Copies vectors while they are whole: their unit is sharded again before the weights that they go with are whole."""
    for owner, name in places:
        kept[owner, name] = local(getattr(owner, name)).detach().clone()


def compute_now(layers, compute):
    """Makes the units of one layer after the other whole, and computes it."""
    for index in sorted(layers.sliced):
        with contextlib.ExitStack() as whole:
            # In a forward the units above are whole already.
            for unit in layers.holders(index):
                whole.enter_context(_whole(unit))
            compute(layers, [index], {}, always=True)


@contextlib.contextmanager
def _whole(unit):
    """Makes a unit whole for a block; a collective."""
    if isinstance(unit, _loaded("torch.distributed.fsdp", "FSDPModule")):
        # One that a forward has left whole has the weights of that forward.
        unit.reshard()
        unit.unshard()
        try:
            yield
        finally:
            unit.reshard()
    elif _is_gathered(unit):
        parameters = list(unit.parameters(recurse=_is_leaf(unit)))
        with _loaded("deepspeed.runtime.zero.partition_parameters", "GatheredParameters")(parameters):
            yield
    else:
        raise UnsupportedError(
            "refresh(now=True) is for fully_shard and ZeRO-3: elsewhere scales are computed in the next forward"
        )


def start_maxima(words, group):
    """Starts to reduce to the largest of each word of all ranks: maxima, and of counts that of the rank that has most.
    Returns a function that waits for it and writes it. Words are unsigned, so their order as int32 is that with the
    first bit flipped."""
    sent = words ^ -(2**31)
    work = torch.distributed.all_reduce(sent, op=torch.distributed.ReduceOp.MAX, group=group, async_op=True)

    def finish():
        work.wait()
        words.copy_(sent ^ -(2**31))

    return finish


# Where PyTorch keeps what `context_parallel` replaces; older releases have no folder of it.
_REPLACING = (
    "torch.distributed.tensor.experimental._context_parallel._attention",
    "torch.distributed.tensor.experimental._attention",
)


def refuse_context_parallel():
    """Raises an exception inside of PyTorch's ``context_parallel``, which gives each rank a part of the sequence and
    makes only PyTorch's own attention exchange keys."""
    function = torch.nn.functional.scaled_dot_product_attention
    if any(function in _loaded(module, "_replaced_functions") for module in _REPLACING):
        raise UnsupportedError(
            "torch.distributed.tensor.experimental.context_parallel shares the sequence out and replaces PyTorch's "
            "attention alone, so this call would see the keys of its own rank only: call "
            "sigmascale.torch.ring_attention or ulysses_attention, outside of context_parallel"
        )
