"""Scales of a model that a serving engine has loaded: its fused and sharded modules, read by the names of the checkpoint.

vLLM and SGLang build models of the same kind of modules: one linear layer with the rows of q, k and v of a rank's heads, norms
under the names of the checkpoint, an attention module inside the one that holds them. A quantized layer is read as it was loaded,
before the engine repacks it: :meth:`Loaded.hold` keeps a copy on the host until its scales are computed.
"""

import json
import os
import struct

import torch

from . import _native
from ._errors import ArgumentError, SigmascaleError, UnsupportedError
from ._serving import ScaleStream
from .rl import must_flush

_FP8 = torch.float8_e4m3fn
_PARTS = ("weight", "bias", "weight_scale_inv", "weight_scale")


class Loaded:
    """The attention layers of a model, and where their weights are.

    ``config`` is that of Hugging Face transformers; ``attention`` are the engine's attention modules by their names in ``model``.
    An :class:`UnsupportedError` says why a model cannot be read.
    """

    def __init__(self, model, config, attention):
        self._modules = dict(model.named_modules())
        self._config = json.loads(config.to_json_string(use_diff=False))
        for key in ("quantization_config", "compression_config"):
            for holder in (self._config, self._config.get("text_config") or {}):
                holder.pop(key, None)
        for holder in (self._config, self._config.get("text_config") or {}):
            _restore_rotation(holder)
        places = json.loads(ScaleStream(self._config)._native.places())
        self._prefix = places["prefixes"][0]
        # Attention modules with the layer of each; the prefix of the checkpoint's names here, and other names of modules.
        self.layers, self.indices, self._paths, bases = {}, {}, {}, set()
        for name, module in attention.items():
            found = _layer_of(name, places["layers"])
            if found is None:
                raise UnsupportedError(f"attention module {name} is no layer of the config's")
            layer, base, path = found
            self.layers[module], self.indices[module] = layer, places["layers"].index(layer)
            self._paths[layer["module"]] = path
            bases.add(base)
        if len(bases) != 1:
            raise UnsupportedError("attention modules are in more than one model")
        (self._base,) = bases
        self._roles = {}
        for layer in places["layers"]:
            for role in ("v", "k", "q", "k_pe"):
                if layer[role] is not None:
                    self._roles[layer[role]["name"]] = role, layer
        # By linear layer: what was held, and what a pass has read.
        self._held, self._now, self._found = {}, {}, {}
        self.ranks = self._find_ranks()
        # Made by the first pass: what scales are computed by, and the layers as it has them.
        self._stream, self._needs = None, ()

    def _find_ranks(self):
        found = set()
        for layer in self.layers.values():
            linear = self._linear(layer["q"]["name"])
            if hasattr(linear, "total_num_heads"):
                found.add(linear.total_num_heads // linear.num_heads)
            else:
                rows = getattr(linear, "output_size_per_partition", None)
                found.add(linear.output_size // rows if rows else 1)
        if len(found) != 1:
            raise UnsupportedError(f"layers are shared out over {sorted(found)} ranks: expected one number")
        return found.pop()

    def _linear(self, stem):
        """The linear layer that holds a projection."""
        if stem not in self._found:
            self._found[stem] = self._find_linear(stem)
        return self._found[stem]

    def _find_linear(self, stem):
        own = self._module(stem)
        if own is not None:
            return own
        if self._roles[stem][0] == "k_pe":
            fused = [self._module(f"{stem.rpartition('.')[0]}.fused_qkv_a_proj")]
        else:
            parent = self._modules.get(self._path(stem).rpartition(".")[0])
            children = [] if parent is None else list(parent.children())
            fused = [child for child in children if hasattr(child, "quant_method") and _sizes(child)]
        if len(fused) != 1 or fused[0] is None:
            raise UnsupportedError(f"the engine has no module for {stem}")
        return fused[0]

    def _path(self, stem):
        """A module of the engine's model by its name in the checkpoint, without prefix."""
        parent, _, name = stem.rpartition(".")
        path = self._paths.get(parent, parent)
        return self._base + (f"{path}.{name}" if path else name)

    def _module(self, stem):
        return self._modules.get(self._path(stem))

    def linears(self):
        """The linear layers whose weights are read."""
        stems = {layer[role]["name"] for layer in self.layers.values() for role in ("q", "k", "v", "k_pe") if layer[role]}
        return list({id(linear): linear for linear in map(self._linear, sorted(stems))}.values())

    def hold(self, linear):
        """Keeps what was loaded into a linear layer until it is read. Returns a function that is called after the engine has brought
        the layer into its own form: unquantized weights that it left as they were need no copy.
        """
        parts = _parts(linear)
        if not _is_whole(linear, parts.get("weight")):
            return lambda: None
        if not _is_plain(linear):
            self._held[linear] = {name: tensor.detach().to("cpu", copy=True) for name, tensor in parts.items()}
            return lambda: None

        def settle():
            if not _is_whole(linear, _parts(linear).get("weight")):
                self._held[linear] = {name: tensor.detach().cpu() for name, tensor in parts.items()}

        return settle

    def kv_heads(self, module):
        """KV heads of a layer on this rank."""
        linear, layer = self._linear(self.layers[module]["k"]["name"]), self.layers[module]
        return getattr(linear, "num_kv_heads", None) or layer["n_kv"] // self.ranks

    def has_key_bias(self):
        """Whether a layer here adds a constant to its keys."""
        return any(role == "k" and self._has(stem, "bias") for stem, (role, _) in self._roles.items())

    def scales(self, touched=None, *, centers=None):
        """The scales of each attention module's layer, as :class:`ScaleStream` has them. Left out are layers
        whose weights the engine repacked before a copy was held. ``touched``, if given, keeps only layers with one
        of these numbers in their tensors' names.

        ``centers``: those to keep, as the JSON of the native module has them. With an empty list layers say what centers their
        weights give; with None they need not.
        """
        self._now.clear()
        fp8, block = self._stored()
        kinds = ("weight", "bias")
        names = [f"{self._prefix}{stem}.{kind}" for stem in self._roles for kind in kinds if self._has(stem, kind)]
        # Centers are computed on the host.
        options = fp8, block, names, centers is not None
        if self._stream is None or self._stream[1:] != options:
            stored = {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}}
            config = self._config | stored if fp8 else self._config
            stream = ScaleStream(config, names=names, ranks=self.ranks, host=centers is not None)
            stream._in_place = True
            self._stream, self._needs = (stream, *options), json.loads(stream._native.places())["layers"]
        stream = self._stream[0]
        try:
            return self._pass(stream, touched, centers or [])
        except Exception:
            # The next pass begins anew.
            self._stream = None
            raise
        finally:
            self._now.clear()

    def _pass(self, stream, touched, centers):
        stream._native.keep_centers(json.dumps(centers))
        stream._layers.clear()
        due = lambda layer: touched is None or not touched.isdisjoint(_numbers(layer))
        here = {layer["number"] for layer in self.layers.values() if due(layer)}
        sent = set()
        for layer in (layer for layer in self._needs if layer["number"] in here):
            try:
                tensors = [pair for names in layer["needs"] if sent.isdisjoint(names) for pair in self._find(names, layer)]
            except _Repacked:
                continue
            sent.update(name for names in layer["needs"] for name in names)
            for name, tensor in tensors:
                stream.push(self._prefix + name, tensor)
        found = stream.layers
        # Layers whose weights are not here may wait for some that are: there is no end of the pass to ask for.
        stream._restart()
        return {module: found[layer["number"]] for module, layer in self.layers.items() if layer["number"] in found}

    def release(self):
        """Lets go of the copies that are held."""
        self._held.clear()

    def _stored(self):
        """Whether some weights are E4M3, and the block that shares a scale."""
        fp8, blocks = False, set()
        for linear in self.linears():
            weight = self._read(linear).get("weight")
            if weight is None:
                continue
            if not _is_plain(linear) and weight.dtype != _FP8:
                # How the engine rounds what such a layer reads is not known here.
                method = type(linear.quant_method).__name__
                raise UnsupportedError(f"its projections are loaded as {weight.dtype} and quantized by {method}")
            if weight.dtype == _FP8:
                fp8 = True
                config = getattr(linear.quant_method, "quant_config", None)
                block = getattr(linear, "weight_block_size", None) or getattr(config, "weight_block_size", None)
                blocks.add(None if block is None else tuple(block))
        if len(blocks) > 1:
            raise UnsupportedError("projections are stored in FP8 with different blocks")
        block = blocks.pop() if blocks else None
        return fp8, None if block is None else list(block)

    def _read(self, linear):
        """What was loaded into a linear layer; nothing where the engine has it in a form of its own."""
        if linear not in self._now:
            parts = self._held.get(linear)
            if parts is None:
                parts = _parts(linear)
                parts = parts if _is_plain(linear) and _is_whole(linear, parts.get("weight")) else {}
            self._now[linear] = parts
        return self._now[linear]

    def _has(self, stem, kind):
        try:
            return isinstance(getattr(self._linear(stem), kind, None), torch.Tensor)
        except UnsupportedError:
            return False  # Of a layer on another pipeline stage.

    def _find(self, names, layer):
        """The first of these names that is in the model, with its scales where it is E4M3."""
        stem, _, kind = names[0].rpartition(".")
        if stem in self._roles:
            return self._projection(stem, kind, layer)
        for name in names:
            stem, _, kind = name.rpartition(".")
            tensor = getattr(self._module(stem), kind, None)
            if isinstance(tensor, torch.Tensor):
                return [(name, tensor)]
        raise UnsupportedError(f"the engine's model has no {names[0]}")

    def _projection(self, stem, kind, layer):
        linear = self._linear(stem)
        parts = self._read(linear)
        if not parts:
            raise _Repacked
        if kind not in parts:
            raise UnsupportedError(f"the engine's model has no {stem}.{kind}")
        sizes = _sizes(linear)
        fused = layer["q"]["name"] == layer["k"]["name"] == layer["v"]["name"]
        role, _ = self._roles[stem]
        if fused or sizes is None:
            rows = None
            if role == "k_pe":
                # Behind the query latent's rows where both are in one.
                rows = slice(parts["weight"].shape[0] - layer["k_pe"]["channels"], None)
        else:
            first = sum(sizes[: "qkv".index(role)])
            rows = slice(first, first + sizes["qkv".index(role)])
        tensors = _cut(stem, parts, sizes, rows, kind, linear)
        if not (fused and sizes is not None):
            return tensors
        heads = [layer[role]["heads"] for role in "qkv"]
        r = layer["d_head"]
        order = [row for starts in heads for start in starts for row in range(start, start + r)]
        if order != list(range(len(order))):
            if len(tensors) > 1:
                raise UnsupportedError(f"{stem} is stored in FP8 with the heads of q, k and v interleaved")
            ((name, tensor),) = tensors
            tensors = [(name, torch.empty_like(tensor).index_copy_(0, torch.tensor(order, dtype=torch.int64, device=tensor.device), tensor))]
        if layer["q"]["conv1d"] and kind == "weight":
            tensors = [(name, tensor.t()) for name, tensor in tensors]
        return tensors


def _restore_rotation(config):
    """Puts back the name of YaRN, which vLLM replaces in the configs of models with latent attention."""
    for rope in (config.get("rope_parameters"), config.get("rope_scaling")):
        for key in ("rope_type", "type"):
            if isinstance(rope, dict) and rope.get(key) in ("deepseek_yarn", "deepseek_llama_scaling"):
                rope[key] = "yarn"


def _numbers(layer):
    return {part for names in layer["needs"] for name in names for part in name.split(".") if part.isdigit()}


def _layer_of(name, layers):
    """The layer of an attention module: with the prefix of its name, and the name of the module that holds its projections."""
    above = [name[:end] for end, sign in enumerate(name) if sign == "."]
    # Some models call the module that holds a layer's attention otherwise, or have none.
    for renamed in (str, lambda module: module.replace("self_attn", "attn"), lambda module: module.removesuffix(".self_attn")):
        found = [
            (layer, path.removesuffix(own), own)
            for path in above
            for layer in layers
            if f".{path}".endswith(f".{(own := renamed(layer['module']))}")
        ]
        if len(found) == 1:
            return found[0]
    return None


class _Repacked(Exception):
    """The engine has the weight in a form of its own."""


def _parts(linear):
    return {name: value for name in _PARTS if isinstance(value := getattr(linear, name, None), torch.Tensor)}


def _is_plain(linear):
    return type(getattr(linear, "quant_method", None)).__name__ in ("NoneType", "UnquantizedLinearMethod")


def _is_whole(linear, weight):
    """Whether a weight has the rows and columns that were loaded."""
    if weight is None or weight.is_meta or weight.dim() != 2:
        return False

    def size(side, features):
        names = (f"{side}_size_per_partition", f"{side}_size", features)
        return next((getattr(linear, name) for name in names if getattr(linear, name, None)), None)

    return tuple(weight.shape) == (size("output", "out_features"), size("input", "in_features"))


def _sizes(linear):
    """Rows of q, k and v in a linear layer that holds all three."""
    if not hasattr(linear, "total_num_kv_heads"):
        return None
    value = getattr(linear, "v_head_size", linear.head_size)
    return linear.num_heads * linear.head_size, linear.num_kv_heads * linear.head_size, linear.num_kv_heads * value


def _cut(stem, parts, sizes, rows, kind, linear):
    """Rows of a weight or bias, with their scales where the weight is E4M3."""
    tensor = parts[kind]
    whole = tensor.shape[0]
    out = [(f"{stem}.{kind}", tensor if rows is None else tensor[rows])]
    if kind != "weight" or tensor.dtype not in (_FP8, torch.float8_e5m2):
        if tensor.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise UnsupportedError(
                f"{stem}.{kind} has type {tensor.dtype}: bfloat16, float16, float32 and scaled E4M3 are read"
            )
        return out
    name = next((name for name in ("weight_scale_inv", "weight_scale") if name in parts), None)
    if tensor.dtype != _FP8 or name is None:
        raise UnsupportedError(f"{stem}.weight has type {tensor.dtype}" + (" and no scale" if name is None else ""))
    scale = parts[name].float()
    first, last, _ = (rows or slice(None)).indices(whole)
    if scale.dim() == 2 and (scale.shape[1] > 1 or scale.shape[0] not in (1, whole)):
        # A value for each tile.
        tile = _tile(linear)
        if first % tile or (last % tile and last != whole):
            raise UnsupportedError(f"the rows of {stem} do not begin and end with blocks of FP8 scales")
        scale = scale[first // tile : -(-last // tile)]
    elif scale.numel() == whole:
        scale = scale.reshape(whole, 1)[first:last]
    elif scale.numel() == 1:
        scale = scale.reshape(1)
    elif sizes is not None and scale.numel() == 3:
        # One for each of q, k and v.
        scale = scale.flatten().repeat_interleave(torch.tensor(sizes, dtype=torch.int64, device=scale.device))
        scale = scale.reshape(whole, 1)[first:last]
    else:
        raise UnsupportedError(f"{stem}.{name} has shape {tuple(scale.shape)}")
    return [*out, (f"{stem}.{name}", scale)]


def _tile(linear):
    config = getattr(linear.quant_method, "quant_config", None)
    return (getattr(linear, "weight_block_size", None) or config.weight_block_size)[0]


def up_to_bf16(value):
    """The least BF16 number that is not below a positive float32."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return struct.unpack("<f", struct.pack("<I", (bits + 0xFFFF) & 0xFFFF0000))[0]


def _around(layer):
    """A layer with the scale of its centered keys in place of that of its keys."""
    own = layer.get("centered")
    if own is None:
        return layer | {"center": None}
    descales = own["k_descale"]
    return layer | {"k": descales, "scale": layer["scale"] | {"k": up_to_bf16(max(descales))}, "center": own["center"]["k"]}


def describe(scales):
    """The ranges of scales, for a log."""
    rows = {operand: [layer["scale"][operand] for layer in scales if operand in layer["scale"]] for operand in "qkv"}
    return ", ".join(f"{operand} {min(row):.4g} to {max(row):.4g}" for operand, row in rows.items() if row)


# Where the largest constant of a rotation pair has less of the bound of k than this, its center gains nothing.
_LEAST_BIAS = 0.1
_CENTERS = ("auto", "off", "weights")


def center_mode():
    """What ``SIGMASCALE_CENTER`` asks for: ``"off"``, ``"weights"``, or ``"auto"``, which centers keys where a bias is large."""
    value = os.environ.get("SIGMASCALE_CENTER", "").lower() or "auto"
    if value not in _CENTERS:
        raise ArgumentError(f"SIGMASCALE_CENTER is {value!r}: expected auto, off or weights")
    return value


_MODES = {"0": "off", "off": "off", "false": "off", "": "on", "1": "on", "on": "on", "true": "on", "strict": "strict"}


def mode():
    """What ``SIGMASCALE_PLUGIN`` asks for: ``"off"``, ``"on"``, or ``"strict"``, where a model without scales stops the engine."""
    value = os.environ.get("SIGMASCALE_PLUGIN", "1")
    if value.lower() not in _MODES:
        raise ArgumentError(f"SIGMASCALE_PLUGIN is {value!r}: expected 0, 1 or strict")
    return _MODES[value.lower()]


def register(hook, log):
    """Hooks an engine by ``hook``, where the plugin is not turned off. An engine whose modules are elsewhere goes on without."""
    if mode() == "off":
        return
    try:
        hook()
    except Exception as error:
        give_up(f"FP8 attention is served with scales of 1.0: this version of the engine has no place for the plugin: {_of(error)}", log)


def give_up(message, log):
    """Says that an engine serves other scales than those of its weights; stops it under ``SIGMASCALE_PLUGIN=strict``."""
    log.error("Sigmascale: %s", message)
    if mode() == "strict":
        raise SigmascaleError(f"{message} (SIGMASCALE_PLUGIN=strict stops the engine)")


def _of(error):
    return str(error) if isinstance(error, SigmascaleError) else f"{type(error).__name__}: {error}"


class Followed:
    """A model of an engine whose scales follow its weights. ``fill`` sets those of attention modules, by module; ``log`` has ``info`` and
    ``error``. With ``kept`` the first scales stay, since captured graphs hold copies of them.

    ``center`` is how keys may be centered: ``"off"``; ``"auto"`` or ``"weights"``, as :func:`center_mode` has them; or why they
    must not be. ``fill`` then finds ``center`` in a layer, a row for each KV head or None, and its scales are those of what is left. The
    first centers stay for the life of the engine, whatever weights come: entries of its cache have them, and ``center_hash`` names
    those of all heads. ``context``: the longest sequence, which their bounds must cover. ``gather`` gives the objects of all ranks
    that share out the heads, in order, for one of this rank's: which layers are centered is one decision.
    """

    def __init__(self, model, config, attention, fill, log, kept, center="off", context=0, gather=None):
        self.name, self.modules = type(model).__name__, list(attention.values())
        self._fill, self._log, self._kept, self._said = fill, log, kept, set()
        self.values = {}
        # By module: None until the first weights are there.
        self._center, self._context, self.centers = center, context, {} if center == "off" else None
        self.center_hash, self._gather, self._ranks = None, gather, 1
        try:
            self._loaded = Loaded(model, config, attention)
            self._ranks = self._loaded.ranks
            if not self._loaded.has_key_bias():
                self.centers = {}
            for linear in self._loaded.linears():
                self._hook(linear)
        except Exception as error:
            self.leave(_of(error))

    def leave(self, reason):
        """Leaves the model alone from now on."""
        self._loaded = None
        served = "those of its weights before" if self.values else "1.0, unless its checkpoint has others"
        self._give_up(f"FP8 attention scales of {self.name} are not computed, it is served with {served}: {reason}")

    def _give_up(self, message):
        # Once, but where it stops the engine.
        if message not in self._said or mode() == "strict":
            self._said.add(message)
            give_up(message, self._log)

    def _hook(self, linear):
        method = getattr(linear, "quant_method", None)
        if method is None:
            return
        process = method.process_weights_after_loading

        def processed(layer, *args, **kwargs):
            settle = self._loaded.hold(layer) if layer is linear and self._loaded else lambda: None
            result = process(layer, *args, **kwargs)
            settle()
            return result

        method.process_weights_after_loading = processed

    def follow_loading(self, model, later):
        """Follows `load_weights` where no processing comes after it, as some weight syncs call it; ``later`` tells where it does."""
        load = model.load_weights

        def loaded(weights, *args, **kwargs):
            touched = set()

            def passing():
                for pair in weights:
                    touched.update(part for part in pair[0].split(".") if part.isdigit())
                    yield pair

            result = load(passing(), *args, **kwargs)
            if self.values and not later():
                self.refresh(touched)
            return result

        model.__dict__["load_weights"] = loaded

    def restore(self, *modules):
        """Sets the known scales again."""
        try:
            known = {module: self.values[module] for module in modules if module in self.values}
            if known:
                self._fill(known)
        except Exception as error:
            self.leave(_of(error))

    def refresh(self, touched=None):
        """Computes the scales of the weights that are loaded now, and sets them; ``touched`` as in :meth:`Loaded.scales`."""
        scales, reason = self._scales(touched)
        if self.centers is None:
            # Ranks that have no scales, too: the others wait for them.
            self.centers = self._choose({} if reason else scales)
            if any(center["k"] is not None and "centered" not in scales[module] for module, center in self.centers.items()):
                # Heads of other ranks are centered in a layer where none of this rank's is.
                scales, reason = self._scales(touched)
        if self._loaded is None:
            return
        self._loaded.release()
        if reason:
            self.leave(reason)
            return
        if self.centers:
            scales = {module: _around(layer) for module, layer in scales.items()}
        changed = {module: layer for module, layer in scales.items() if layer != self.values.get(module)}
        if not self.values:
            what = f"of {len(self.modules)} layers from the weights"
        elif not scales:
            if touched is None or touched:
                self._give_up(
                    f"weights of {self.name} are in a form that is not read: its scales are those of the weights before"
                )
            return
        elif self._kept:
            grown = sum(must_flush({0: self.values[module]}, {0: layer}) for module, layer in changed.items())
            if grown:
                self._give_up(
                    f"the new weights of {self.name} need larger scales in {grown} layers, but captured graphs hold the old "
                    "ones: restart it"
                )
            return
        else:
            what = f"of {len(changed)} layers changed with the weights"
        self.values.update(changed)
        # Those that did not change, too: others may have set them since.
        self.restore(*scales)
        if changed and self._loaded is not None:
            ranges = describe(list(self.values.values()))
            self._log.info("Sigmascale: FP8 attention scales of %s, %s: %s", self.name, what, ranges)

    def _scales(self, touched):
        """Those of the weights that are loaded, and why there are none."""
        if self._loaded is None:
            return {}, None
        try:
            with torch.no_grad():
                kept = None if self.centers == {} else list((self.centers or {}).values())
                scales = self._loaded.scales(touched, centers=kept)
        except Exception as error:
            return {}, _of(error)
        if any(layer["v"] is None for layer in scales.values()):
            return {}, "its values have no bound: no norm precedes their projection"
        missing = 0 if self.values else len(self.modules) - len(scales)
        return scales, f"{missing} layers have weights in a form that is not read" if missing else None

    def _choose(self, scales):
        """The centers of a model's first weights, by module; none where they gain nothing, or must not be."""
        found = {self._loaded.indices[module]: layer["centered"] for module, layer in scales.items() if "centered" in layer}
        everyone = [found] if self._ranks == 1 or self._gather is None else self._gather(found)
        layers = sorted({index for rank in everyone for index in rank})
        every = [own for rank in everyone for own in rank.values()]
        share = max((share for own in every for share in own["bias_share"]), default=0.0)
        if not every or (self._center != "weights" and share < _LEAST_BIAS):
            return {}
        positions = min((own["positions"] for own in every if own["positions"] is not None), default=self._context)
        reason = None if self._center in _CENTERS else self._center
        if positions < self._context:
            reason = f"their bounds hold up to position {positions}, and the engine takes sequences of {self._context}"
        elif len(everyone) not in (1, self._ranks):
            reason = f"their heads are shared out over {self._ranks} of {len(everyone)} ranks"
        if reason:
            self._log.info("Sigmascale: keys of %s are not centered: %s", self.name, reason)
            return {}
        if not scales:
            return {}
        whole = [self._of_all(everyone, index) for index in layers]
        self.center_hash = _native.center_hash(json.dumps(whole))
        self._log.info(
            "Sigmascale: %s caches keys without the constant part that their biases give, in %d of %d layers: it has up to %.0f %% of the "
            "bound of k (centers %s; SIGMASCALE_CENTER=off leaves it there)",
            self.name,
            len(layers),
            len(self.modules),
            100 * share,
            self.center_hash,
        )
        centers = {}
        for module in self.modules:
            index = self._loaded.indices[module]
            own = found[index]["center"] if index in found else {"layer": index, "k": None, "v": None}
            if index in layers and own["k"] is None:
                own = own | {"k": [[0.0] * self._loaded.layers[module]["d_head"]] * self._loaded.kv_heads(module)}
            centers[module] = own
        return centers

    def _of_all(self, everyone, index):
        """The center of a layer with the heads of all ranks."""
        module = next(module for module, own in self._loaded.indices.items() if own == index)
        own, total = self._loaded.kv_heads(module), self._loaded.layers[module]["n_kv"]
        zeros = [[0.0] * self._loaded.layers[module]["d_head"]] * own
        # Where there are more ranks than heads, ranks next to each other have the same.
        step = max(1, own * len(everyone) // total)
        rows = [rank[index]["center"]["k"] if index in rank else zeros for rank in everyone[::step]]
        return {"layer": index, "k": [row for rank in rows for row in rank], "v": None}


def centered(key, center):
    """Keys without their center, in the engine's type. In f32, so that the difference is rounded once."""
    if key.dtype.itemsize == 1:
        raise UnsupportedError("keys come to attention in FP8, so that no center can be subtracted: set SIGMASCALE_CENTER=off")
    return (key.view(-1, *center.shape) - center).to(key.dtype)
