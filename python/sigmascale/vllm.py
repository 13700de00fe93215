"""vLLM plugin: FP8 attention scales from the loaded weights, without a file.

vLLM loads it by itself (entry point ``vllm.general_plugins``). Where a model runs with ``--kv-cache-dtype fp8``, the
scales of q, k and v are computed from the weights of each rank after every load, reload and weight update, and set in
place (device tensors and host-side copies). A model whose scales cannot be computed is served with 1.0, and an error is logged;
``SIGMASCALE_PLUGIN=strict`` stops the engine instead, and ``SIGMASCALE_PLUGIN=0`` turns the plugin off.

With ``--attention-backend CUSTOM`` attention over such a cache runs on this package's kernels (Hopper).
"""

import logging
import sys
import weakref

from . import _loaded
from ._loaded import Followed, up_to_bf16
from .rl import write

_FP8 = ("fp8", "fp8_e4m3")
_MODELS = weakref.WeakSet()


def register():
    """Hooks vLLM; does nothing the second time."""
    _loaded.register(_hook, logging.getLogger("vllm.plugins.sigmascale"))


def _hook():
    from vllm.model_executor.layers.attention import Attention, MLAAttention
    from vllm.model_executor.model_loader import utils

    if hasattr(utils.record_metadata_for_reloading, "_sigmascale"):
        return
    record = utils.record_metadata_for_reloading

    def recorded(model):
        record(model)
        _follow(model)

    recorded._sigmascale = True
    utils.record_metadata_for_reloading = recorded
    _offer_backend()
    for kind in (Attention, MLAAttention):
        kind.process_weights_after_loading = _after_processing(kind.process_weights_after_loading)


def _offer_backend():
    """Registers the attention backend under the name that vLLM keeps for plugins, unless another has it."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if AttentionBackendEnum.CUSTOM.is_overridden():
        logging.getLogger("vllm.plugins.sigmascale").warning(
            "the attention backend CUSTOM is %s already: sigmascale's is not registered", AttentionBackendEnum.CUSTOM.get_path()
        )
        return
    register_backend(AttentionBackendEnum.CUSTOM, "sigmascale._vllm_attention.SigmascaleBackend")


def refresh(model):
    """Computes and sets the scales of a model whose weights were changed by other ways than vLLM's: for
    ``LLM.apply_model``."""
    for followed in {id(x): x for x in map(_of, model.modules()) if x is not None}.values():
        followed.refresh()


def _of(module):
    return module.__dict__.get("_sigmascale")


def _after_processing(process):
    def processed(self, *args, **kwargs):
        followed = _of(self)
        # All projections are loaded by now, and some are released below.
        if followed is not None and self is followed.modules[0]:
            followed.refresh()
        result = process(self, *args, **kwargs)
        if followed is not None:
            # vLLM may have set 1.0 here.
            followed.restore(self)
        return result

    return processed


def _follow(model):
    """Watches a model that was just built."""
    from vllm.config import get_current_vllm_config
    from vllm.logger import init_logger
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    kinds = (Attention, MLAAttention)
    attention = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, kinds)
        and module.kv_cache_dtype in _FP8
        and getattr(module, "attn_type", "decoder") == "decoder"
        # One inside, built first, has a config that says more of it.
        and _of(module) is None
    }
    if not attention:
        return
    config = get_current_vllm_config()
    # FlashInfer multiplies the host's scales once, and its graphs hold the product.
    copies = any(word in module.attn_backend.get_name() for module in attention.values() for word in ("FLASHINFER", "TOKENSPEED"))
    kept = copies and not config.model_config.enforce_eager
    log = init_logger("vllm.plugins.sigmascale")
    followed = Followed(model, config.model_config.hf_config, attention, _fill, log, kept)
    reason = _reason(config, attention)
    if reason:
        followed.leave(reason)
    for module in attention.values():
        module.__dict__["_sigmascale"] = followed
    _MODELS.add(followed)
    if hasattr(model, "load_weights"):
        # In a reload layer by layer, processing comes later.
        followed.follow_loading(model, lambda: any(module._k_scale.is_meta for module in followed.modules))
    _hook_waking()


def _reason(config, attention):
    """Why scales must not be set, whatever the weights are."""
    from vllm.model_executor.layers.attention import MLAAttention

    if config.lora_config is not None:
        return "LoRA adapters add to q, k and v, which no bound of the weights covers"
    latent = [module for module in attention.values() if isinstance(module, MLAAttention)]
    if latent and getattr(config.attention_config, "use_prefill_query_quantization", False):
        return "FP8 prefill of latent attention reads the cache without its scale"
    if any("CUTLASS_MLA" in module.attn_backend.get_name() for module in latent):
        return "the CUTLASS backend of latent attention takes scales of 1.0 only"
    return None


def _hook_waking():
    """Versions of vLLM that set scales to 1.0 when they wake from sleep."""
    for place, kind, name in [
        ("vllm.v1.worker.gpu_worker", "Worker", "wake_up"),
        ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "init_fp8_kv_scales"),
    ]:
        owner = getattr(sys.modules.get(place), kind, None)
        wake = getattr(owner, name, None)
        if wake is None or hasattr(wake, "_sigmascale"):
            continue

        def woken(*args, _wake=wake, **kwargs):
            result = _wake(*args, **kwargs)
            for followed in list(_MODELS):
                followed.restore(*followed.modules)
            return result

        woken._sigmascale = True
        setattr(owner, name, woken)


def _fill(module, layer):
    """Sets the scales of one attention module in place; addresses stay, so that captured graphs read them."""
    from vllm.platforms import current_platform

    # E4M3 without negative zero ends at 240: vLLM doubles what it reads, too.
    factor = 2.0 if current_platform.is_fp8_fnuz() else 1.0
    for operand in "qkv":
        buffer, row = getattr(module, f"_{operand}_scale"), [up_to_bf16(value) * factor for value in layer[operand]]
        value = max(row)
        write(buffer, value if buffer.numel() == 1 else row)
        setattr(module, f"_{operand}_scale_float", value)
        host = getattr(module, f"_{operand}_scale_cpu", None)
        if host is not None:
            write(host, value)
    for product in ("bmm1_scale", "bmm2_scale"):
        if getattr(module.impl, product, None) is not None:
            # Multiplied again at the next call.
            setattr(module.impl, product, None)
