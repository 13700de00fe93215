"""SGLang plugin: FP8 attention scales from the loaded weights, without a file.

SGLang loads it by itself (entry point ``sglang.srt.plugins``). Where a server runs with ``--kv-cache-dtype fp8_e4m3``,
the scales of k and v are computed from the weights of each rank after every load and weight update, for families whose
attention SGLang builds without scales, too. q is cast at 1.0: a warning names layers whose bound exceeds 448. Latent
attention is not changed: its cache is written without a scale. A model whose scales cannot be computed is served with 1.0, and an
error is logged; ``SIGMASCALE_PLUGIN=strict`` stops the engine instead, and ``SIGMASCALE_PLUGIN=0`` turns the plugin off.

Keys with a large bias are cached without its mean over positions, as in vLLM; ``SIGMASCALE_CENTER=off`` leaves keys as they are.
"""

import logging
import weakref

from . import _loaded
from ._errors import UnsupportedError
from ._loaded import Followed, up_to_bf16
from .rl import write

_MODELS = weakref.WeakKeyDictionary()
_LOG = logging.getLogger("sglang.plugins.sigmascale")


def register():
    """Hooks SGLang; does nothing the second time."""
    _loaded.register(_hook, _LOG)


def _hook():
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_loader import loader

    initialize = loader._initialize_model
    if hasattr(initialize, "_sigmascale"):
        return

    def initialized(model_config, *args, **kwargs):
        model = initialize(model_config, *args, **kwargs)
        _follow(model, model_config)
        return model

    initialized._sigmascale = True
    loader._initialize_model = initialized
    post = loader.DefaultModelLoader.postprocess_weights

    def processed(model, *args, **kwargs):
        result = post(model, *args, **kwargs)
        refresh(model)
        return result

    loader.DefaultModelLoader.postprocess_weights = staticmethod(processed)
    RadixAttention._sigmascale_center = None


def refresh(model):
    """Computes and sets the scales of a model whose weights were changed by other ways than SGLang's."""
    followed = _MODELS.get(model)
    if followed is not None:
        followed.refresh()


def _follow(model, model_config):
    """Watches a model that was just built."""
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
    from sglang.srt.runtime_context import get_server_args

    arguments = get_server_args()
    if arguments.kv_cache_dtype != "fp8_e4m3":
        return
    attention = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, RadixAttention) and module.attn_type == AttentionType.DECODER and not module.is_cross_attention
    }
    if not attention:
        return
    # All but FlashAttention-3 read the host's floats, and a captured graph keeps a copy of them.
    kept = not arguments.disable_cuda_graph and arguments.attention_backend != "fa3"

    def fill(layers):
        _fill(layers)
        for module, layer in layers.items():
            if "center" in layer:
                _center(module, layer["center"])

    may = _may_center(arguments, attention)
    followed = Followed(model, model_config.hf_config, attention, fill, _LOG, kept, may, model_config.context_len, _gather)
    if any(name.rpartition(".")[2] in ("attn_mqa", "attn_mha") for name in attention):
        followed.leave("SGLang writes the cache of latent attention without a scale")
    elif arguments.enable_lora:
        followed.leave("LoRA adapters add to q, k and v, which no bound of the weights covers")
    _MODELS[model] = followed
    followed.follow_loading(model, lambda: False)


def _gather(own):
    """What each rank that has a part of the heads passes, in order."""
    import torch
    from sglang.srt.distributed import parallel_state

    # With data-parallel attention a part of the tensor-parallel ranks.
    group = getattr(parallel_state, "get_attn_tp_group", parallel_state.get_tp_group)()
    found = [None] * group.world_size
    torch.distributed.all_gather_object(found, own, group=group.cpu_group)
    return found


def _may_center(arguments, attention):
    """How keys may be centered: what ``SIGMASCALE_CENTER`` asks for, or why they must not be."""
    from sglang.srt.layers.radix_attention import RadixAttention

    asked = _loaded.center_mode()
    modules = attention.values()
    if asked == "off":
        return asked
    if any(type(module).forward not in (RadixAttention.forward, _centered) for module in modules):
        return "its attention modules have a forward of their own"
    if len({module.layer_id for module in modules}) < len(attention):
        return "layers share caches"
    shared = {"disaggregation_mode": "null", "hicache_storage_backend": None, "enable_lmcache": False}
    used = [name for name, unused in shared.items() if getattr(arguments, name, unused) not in (unused, None)]
    if used and asked != "weights":
        return (
            f"engines that share a cache need the same centers, which SGLang does not compare ({used[0]} is set). "
            "SIGMASCALE_CENTER=weights centers them: set it where all engines serve the same checkpoint"
        )
    return asked


def _center(module, rows):
    """Sets what is subtracted from keys in place, so that captured graphs read it. A layer that has none subtracts zeros."""
    import torch
    from sglang.srt.layers.radix_attention import RadixAttention

    global _forward
    rows = rows or [[0.0] * module.qk_head_dim] * module.tp_k_head_num
    if module._sigmascale_center is not None:
        write([(module._sigmascale_center, [value for row in rows for value in row])])
        return
    if _forward is None:
        _forward, RadixAttention.forward = RadixAttention.forward, _centered
    # Written again after a reload, in whatever mode that is.
    with torch.inference_mode(False):
        module._sigmascale_center = torch.tensor(rows, dtype=torch.float32, device=_device(module))


_forward = None


def _centered(self, q, k, v, forward_batch, save_kv_cache=True, *args, **kwargs):
    center = self._sigmascale_center
    if center is not None and k is not None:
        if not save_kv_cache:
            raise UnsupportedError("keys are cached before attention, with no center subtracted: set SIGMASCALE_CENTER=off")
        k = _loaded.centered(k, center)
    return _forward(self, q, k, v, forward_batch, save_kv_cache, *args, **kwargs)


def _fill(layers):
    """Sets the scales of k and v of attention modules, and the floats next to them."""
    import torch

    pairs = []
    for module, layer in layers.items():
        for operand in "kv":
            value = up_to_bf16(max(layer[operand]))
            scale = getattr(module, f"{operand}_scale")
            if isinstance(scale, torch.Tensor):
                pairs.append((scale.data, value))
            else:
                # Written again after a reload, in whatever mode that is.
                with torch.inference_mode(False):
                    setattr(module, f"{operand}_scale", torch.tensor(value, dtype=torch.float32, device=_device(module)))
            setattr(module, f"{operand}_scale_float", value)
        if max(layer["q"]) > 1.0:
            _LOG.warning(
                "Sigmascale: layer %d: SGLang casts q at 1.0 where a backend computes in FP8, and it can overflow by %.3f",
                layer["layer"],
                max(layer["q"]),
            )
    write(pairs)


def _device(module):
    """Where the model's weights are: an attention module without scales has no tensor of its own."""
    (model,) = [model for model, followed in _MODELS.items() if any(module is own for own in followed.modules)]
    return next(model.parameters()).device
