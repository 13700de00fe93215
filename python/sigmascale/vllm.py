"""vLLM plugin: FP8 attention scales from the loaded weights, without a file.

vLLM loads it by itself (entry point ``vllm.general_plugins``). Where a model runs with ``--kv-cache-dtype fp8``, the
scales of q, k and v are computed from the weights of each rank after every load, reload and weight update, and set in
place (device tensors and host-side copies). A model whose scales cannot be computed is served with 1.0, and an error is logged;
``SIGMASCALE_PLUGIN=strict`` stops the engine instead, and ``SIGMASCALE_PLUGIN=0`` turns the plugin off.

Where keys have a large bias (Qwen2 and 2.5), its mean over positions is subtracted from them before they are cached: softmax does
not see it, and FP8 rounds what is left. ``SIGMASCALE_CENTER=off`` leaves keys as they are.

"""

import hashlib
import logging
import sys
import weakref

from . import _loaded
from ._loaded import Followed, up_to_bf16
from .rl import write

_FP8 = ("fp8", "fp8_e4m3")
_MODELS = weakref.WeakSet()
# Of the centers in the caches of this process's models, or of its workers' models.
_HASHES: set[str] = set()
# Connectors that compare keys which have them, or whose entries are named by such keys.
_SALTED = ("NixlConnector", "NixlPullConnector", "NixlPushConnector", "OffloadingConnector")


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
    for kind in (Attention, MLAAttention):
        kind.process_weights_after_loading = _after_processing(kind.process_weights_after_loading)
    Attention._sigmascale_center = None
    _salt_blocks()


def _salt(key):
    """A key of cache entries that holds for these centers alone."""
    return key if not _HASHES else hashlib.sha256("/".join([key, *sorted(_HASHES)]).encode()).hexdigest()


def _salt_blocks():
    """Puts the centers into the seed of block hashes, which name the entries of shared stores and which peers compare."""
    try:
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.engine.core import EngineCore

        seed, initialize = kv_cache_utils.resolve_none_hash_seed, EngineCore._initialize_kv_caches
    except (ImportError, AttributeError):
        # A version without such a seed: transfers are not salted.
        return

    def salted(*args):
        return _salt(seed(*args))

    salted._sigmascale = True
    kv_cache_utils.resolve_none_hash_seed = salted

    def initialized(self, config, *args, **kwargs):
        result = initialize(self, config, *args, **kwargs)
        if config.kv_transfer_config is not None:
            # Workers have processes of their own.
            _HASHES.update(*self.model_executor.collective_rpc(_hashes))
        return result

    EngineCore._initialize_kv_caches = initialized


def _hashes(worker):
    return sorted(_HASHES)


def _salt_transfers(connector):
    """Puts the centers into what a connector compares before it reads the cache of another engine. Whether it does."""
    from vllm.v1.core import kv_cache_utils

    if connector == "OffloadingConnector":
        return hasattr(getattr(kv_cache_utils, "resolve_none_hash_seed", None), "_sigmascale")
    if connector not in _SALTED:
        return False
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
    except ImportError:
        return False
    compute = base_worker.compute_nixl_compatibility_hash
    if not hasattr(compute, "_sigmascale"):

        def salted(*args, **kwargs):
            return _salt(compute(*args, **kwargs))

        salted._sigmascale = True
        base_worker.compute_nixl_compatibility_hash = salted
    return True


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

    def fill(layers):
        _fill(layers)
        for module, layer in layers.items():
            if "center" in layer:
                _HASHES.add(followed.center_hash)
                _center(module, layer["center"], config)

    may, context = _may_center(config, attention), config.model_config.max_model_len
    followed = Followed(model, config.model_config.hf_config, attention, fill, log, kept, may, context, _gather)
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


def _gather(own):
    """What each tensor-parallel rank passes, in order."""
    import torch
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    found = [None] * group.world_size
    torch.distributed.all_gather_object(found, own, group=group.cpu_group)
    return found


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


def _may_center(config, attention):
    """How keys may be centered: what ``SIGMASCALE_CENTER`` asks for, or why they must not be."""
    from vllm.model_executor.layers.attention import Attention

    asked = _loaded.center_mode()
    if asked == "off":
        return asked
    modules = attention.values()
    if any(type(module).forward not in (Attention.forward, _centered) for module in modules):
        return "its attention modules have a forward of their own"
    if any(getattr(module, "kv_sharing_target_layer_name", None) for module in modules):
        return "layers share caches"
    if any(getattr(module.impl, "sinks", None) is not None for module in modules):
        return "its softmax has sinks"
    if not isinstance(config.additional_config, dict):
        return "additional_config is no dict, so that the key of compiled code cannot name them"
    transfer = config.kv_transfer_config
    if transfer is not None and not _salt_transfers(transfer.kv_connector) and asked != "weights":
        return (
            f"engines that share a cache need the same centers, which {transfer.kv_connector} does not check. SIGMASCALE_CENTER=weights "
            "centers them: set it where all engines serve the same checkpoint"
        )
    return asked


def _center(module, rows, config):
    """Sets what is subtracted from keys in place, so that captured graphs read it. A layer that has none subtracts zeros: compiled
    code is the same for all weights.
    """
    import torch
    from vllm.model_executor.layers.attention import Attention

    global _forward
    rows = rows or [[0.0] * module.head_size] * module.num_kv_heads
    if module._sigmascale_center is not None:
        write([(module._sigmascale_center, [value for row in rows for value in row])])
        return
    if _forward is None:
        _forward, Attention.forward = Attention.forward, _centered
    # Code that was compiled without them must not be found for this model.
    config.additional_config["sigmascale"] = "centered keys"
    # Written again after a reload, in whatever mode that is.
    with torch.inference_mode(False):
        module._sigmascale_center = torch.tensor(rows, dtype=torch.float32, device=module._k_scale.device)


_forward = None


def _centered(self, query, key, value, *args, **kwargs):
    center = self._sigmascale_center
    if center is not None and key is not None:
        key = _loaded.centered(key, center)
    return _forward(self, query, key, value, *args, **kwargs)


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


def _fill(layers):
    """Sets the scales of attention modules in place; addresses stay, so that captured graphs read them."""
    from vllm.platforms import current_platform

    # E4M3 without negative zero ends at 240: vLLM doubles what it reads, too.
    factor, pairs = 2.0 if current_platform.is_fp8_fnuz() else 1.0, []
    for module, layer in layers.items():
        for operand in "qkv":
            buffer, row = getattr(module, f"_{operand}_scale"), [up_to_bf16(value) * factor for value in layer[operand]]
            value = max(row)
            pairs.append((buffer, value if buffer.numel() == 1 else row))
            setattr(module, f"_{operand}_scale_float", value)
            host = getattr(module, f"_{operand}_scale_cpu", None)
            if host is not None:
                pairs.append((host, value))
        for product in ("bmm1_scale", "bmm2_scale"):
            if getattr(module.impl, product, None) is not None:
                # Multiplied again at the next call.
                setattr(module.impl, product, None)
    write(pairs)
