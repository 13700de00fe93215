"""Exports for serving engines, their audit, and scales of weights that arrive tensor by tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from . import _native
from ._arguments import flag, text, whole
from ._errors import ArgumentError, MismatchError, SigmascaleError
from ._offline import _SAFETENSORS, _path, _source, _stored
from ._results import Audit, Export

if TYPE_CHECKING:
    from ._options import Engine, ExportEngine, Model, Pairs, Path

# Where the scale engine reads tensors; elsewhere they are copied to the host.
_DEVICES = ("cuda",)


def export(
    model: Path,
    to: Path,
    engine: ExportEngine,
    *,
    per_head: bool = False,
    copy: bool = False,
    context: int | None = None,
    skip_layers: Iterable[int | str] = (),
) -> Export:
    """Writes a checkpoint folder that ``engine`` loads with these scales: the JSON of ``sigmascale export`` as a dict.

    ``model`` is a checkpoint folder, ``to`` a new or an empty one; ``engine`` is ``vllm``, ``sglang`` or ``mistralrs``
    (TensorRT-LLM reads no scales for an FP8 cache: :func:`verify`). Weights are hard links (copies with ``copy``, and where links cannot be made), scales a file of their
    own, index and configs merged. ``per_head``: one scale per head, which only vLLM reads, and which it cannot update.
    Operands that the engine casts at 1.0 are checked against their bounds; ``sigmascale.json`` has the result. The
    folder is written completely or not at all. ``context`` and ``skip_layers`` as in :func:`verify`: layers that are
    skipped get no scale.
    """
    arguments = (_path("model", model), _path("to", to), text("engine", engine))
    serving = _options(context, skip_layers)
    return Export(json.loads(_native.export(*arguments, flag("per_head", per_head), flag("copy", copy), *serving)))


def _options(context: int | None, skip_layers: Iterable[int | str]) -> tuple[int | None, list[str]]:
    context = None if context is None else whole("context", context, least=1)
    if isinstance(skip_layers, str):
        raise ArgumentError(f"skip_layers is {skip_layers!r}: expected a list of numbers of layers, or sliding_window")
    return context, [str(layer) for layer in skip_layers]


def verify(
    folder: Path,
    engine: Engine | None = None,
    *,
    context: int | None = None,
    skip_layers: Iterable[int | str] = (),
    kv: Literal["fp8", "nvfp4", "nvfp4_4over6"] = "fp8",
    tokens: Path | None = None,
    seq_len: int | None = None,
) -> Audit:
    r"""Which scales an engine would use, compared with those that the weights need: the JSON of ``sigmascale verify`` as
    a dict.

    Without ``engine``: the one that the folder was exported for, else vLLM, and the others under ``others``.
    ``context`` is the longest sequence of the server, else that of the config. ``skip_layers`` are kept out of the FP8
    cache, as vLLM's ``--kv-cache-dtype-skip-layers`` takes them: numbers of layers, or ``sliding_window``. ``kv`` is the
    type of the cache: NVFP4, which vLLM alone has, holds 6 or 4 times as much under the same scale.

    ``tokens``: a file whose text (or token ids, in a file that ends in ``.json``) runs through the model's own forward on
    the CPU, in sequences of ``seq_len`` tokens (256, or what the text has). ``observed`` then holds the largest |q|,
    |k| and |v| of each layer, which show how far below the bounds this text stays. For families that
    :func:`stress` runs text through.
    """
    engine = None if engine is None else text("engine", engine)
    options = (*_options(context, skip_layers), text("kv", kv))
    if tokens is None and seq_len is not None:
        raise ArgumentError("seq_len is the length of a sequence of tokens: pass tokens, a file")
    text_of = (
        None if tokens is None else _path("tokens", tokens),
        None if seq_len is None else whole("seq_len", seq_len, least=1),
    )
    first, *others = map(Audit._of, _native.verify(_path("folder", folder), engine, *options, *text_of))
    if others:
        first["others"] = others
    return first


def centers(
    model: Path,
    *,
    keys: Literal["none", "weights", "minimax"] = "weights",
    values: Literal["none", "weights", "minimax"] = "none",
    positions: int | None = None,
) -> dict[str, Any] | None:
    """The constants that may be subtracted from keys and values before an FP8 cast, from the weights of a checkpoint folder.

    ``keys`` and ``values``: where they come from. ``weights``: the mean of the rotated bias over ``positions`` (2048) for keys,
    the bias for values; ``minimax``: the least worst-case bound. None where nothing is to be subtracted: no bias, no rotation,
    a soft-cap or sinks.

    A dict: ``hash``, which two engines must share to share a cache, ``policy``, and ``layers``, each with ``layer`` (the model's
    own number), ``module``, ``k`` and ``v`` (a row for each KV head of bfloat16 values, or None), ``k_scale`` and ``v_scale``
    (what covers ``k - c`` and ``v - m``, one for each KV head) and ``positions`` (below which they hold; None: at all).
    """
    most = None if positions is None else whole("positions", positions, least=1)
    return json.loads(_native.centers(_path("model", model), text("keys", keys), text("values", values), most))


class _Completed(Sequence[dict[str, Any]]):
    """The layers that a tensor completed on a device: read, with all others that are due, when one of them is looked at."""

    def __init__(self, count: int, layers: list[dict[str, Any]], read: Callable[[], None]) -> None:
        self._count, self._layers, self._read = count, layers, read

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | Sequence[dict[str, Any]]:
        if len(self._layers) < self._count:
            self._read()
        return self._layers[index]


class ScaleStream:
    """Scales of a model while its weights arrive, in any order: those of a layer as soon as it is complete.

    ``config`` is a ``config.json``, its folder, a dict or a config of Hugging Face transformers. ``names`` are those of
    all tensors to come; they are needed only for biases that the config does not mention. ``ranks``: the tensors are
    those of one of so many tensor-parallel ranks, with its own heads. Where tensors come layer by layer, those of one
    layer are held.

    The first tensor of a pass decides where its scales are computed. On the host they are the bits of
    :func:`calibrate`, whatever the order. CUDA tensors are copied and computed on their device, on its current stream:
    scales are then at least those of :func:`calibrate` and at most 1e-5 above. :meth:`push` then does not wait for the
    device: the first look at a layer, at :attr:`layers` or :meth:`finish` waits once, for all layers that are complete,
    and raises the :class:`NonFiniteError` of one whose weights are not finite. ``host=True`` computes on the host wherever
    tensors are; what a device does not compute (latent attention, FP8 weights, one rank of several) is computed there
    anyway.

    A layer is a dict: ``layer`` (the model's own number), ``module``, ``q``, ``k`` and ``v`` (the descale of each KV
    head; v is None without a bound), ``scale`` (one per tensor, rounded up to BF16, as engines take it) and ``names`` of
    it by engine.
    """

    def __init__(self, config: Model, *, names: Iterable[str] = (), ranks: int = 1, host: bool = False) -> None:
        source = _source(config, None)
        self._config, _, self._file = _read(source) if isinstance(source, str) else source
        ranks = whole("ranks", ranks, least=1)
        self._native = _native.ScaleStream(self._config, self._file, [str(name) for name in names], ranks)
        self._host = flag("host", host) or ranks > 1
        self._device, self._started = None, False
        # Whether weights stay until their scales are read, as those of a serving engine do.
        self._in_place = False
        self._layers: dict[int, dict[str, Any]] = {}

    @property
    def layers(self) -> dict[int, dict[str, Any]]:
        """The layers by number, as they are now: those of the pass before until a pass completes them again."""
        self._read()
        return dict(sorted(self._layers.items()))

    def _read(self) -> None:
        if self._device is not None:
            self._device.read(self._layers)

    def push(self, name: str, tensor: Any) -> Sequence[dict[str, Any]]:
        """Takes a NumPy array, a PyTorch tensor or a DTensor; gives the layers that it completes."""
        name = text("name", name)
        if not self._native.wants(name):
            return []
        if hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor()
        if not self._started:
            self._begin(tensor)
        if self._device is not None:
            count, layers = self._device.push(name, tensor)
            return _Completed(count, layers, self._read) if count else []
        dtype, shape, data = _stored(name, tensor)
        if dtype not in _SAFETENSORS:
            raise ArgumentError(f"{name} has type {dtype}: {', '.join(_SAFETENSORS)} are read")
        done = json.loads(self._native.push(name, _SAFETENSORS[dtype], list(shape), data.ctypes.data, data.nbytes))
        self._layers.update((layer["layer"], layer) for layer in done)
        return done

    def _begin(self, tensor):
        """Decides where the scales of a pass are computed."""
        self._started = True
        on_device = getattr(getattr(tensor, "device", None), "type", None) in _DEVICES
        if self._host or not on_device or self._native.not_on_device() is not None:
            self._device = None
        elif self._device is None or self._device.device != tensor.device:
            from .torch._stream import DeviceStream

            self._device = DeviceStream(self._native, self._config, self._file, tensor.device, self._in_place)
        if self._device is not None:
            self._device.begin()

    def through(self, weights: Pairs, *, part: bool = False) -> Iterator[tuple[str, Any]]:
        """The pairs of an iterator unchanged, each pushed on its way; the pass ends with them."""
        for name, tensor in weights:
            self.push(name, tensor)
            yield name, tensor
        self.finish(part=part)

    def finish(self, *, part: bool = False) -> dict[int, dict[str, Any]]:
        """Ends a pass and begins the next; gives the layers by number. A :class:`MismatchError` if tensors did not
        come, and the pass goes on. With ``part``, whole layers may be missing: those of other pipeline stages.
        """
        part = flag("part", part)
        try:
            layers = self.layers
            self._native.finish(part)
        except SigmascaleError as error:
            if not isinstance(error, MismatchError):
                # Scales that cannot be computed: the next pass brings other weights.
                self._restart()
            raise
        self._started = False
        return layers

    def _restart(self) -> None:
        self._native.restart()
        self._started = False
        if self._device is not None:
            self._device.begin()

    @property
    def held_bytes(self) -> int:
        """Bytes of tensors that are held until their layer is complete, on the host or on the device."""
        return self._native.held_bytes + (0 if self._device is None else self._device.held_bytes)


def _read(path):
    file = os.path.join(path, "config.json") if os.path.isdir(path) else path
    return _native.config_text(file), None, file
