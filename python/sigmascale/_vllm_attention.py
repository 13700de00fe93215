"""vLLM's attention on this package's kernels: the backend ``CUSTOM`` (``--attention-backend CUSTOM``).

It is vLLM's FlashAttention backend, with the same cache, metadata and update of the cache, but for the attention of layers that the
kernels take: prefills and decodes of a step in one launch over E4M3 pages, whose lengths and block tables stay on the device, so
that full CUDA graphs serve every batch. Other layers run in vLLM's own implementation, with one line in the log that says why.
"""

import torch
from vllm import envs
from vllm.config import get_current_vllm_config_or_none, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from .torch._backends import backend
from .torch._e4m3 import E4M3
from .torch._hopper import _aligned
from .torch._paged import HEAD_DIMS, PAGE_SIZES, Pages
from .torch._terms import Call, Terms

_log = init_logger("vllm.plugins.sigmascale")


class SigmascaleBackend(FlashAttentionBackend):
    """The backend, as vLLM asks for it by class."""

    @staticmethod
    def get_name():
        # What vLLM calls the backend that a plugin registers.
        return "CUSTOM"

    @staticmethod
    def get_impl_cls():
        return SigmascaleImpl

    @staticmethod
    def get_builder_cls():
        return SigmascaleMetadataBuilder

    @classmethod
    def supports_batch_invariance(cls):
        return True


class SigmascaleMetadataBuilder(FlashAttentionMetadataBuilder):
    """FlashAttention's metadata, without what its kernels alone read where no layer runs them."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names).values()
        self._alone = bool(layers) and all(getattr(layer.impl, "left", "no reason") is None for layer in layers)
        if self._alone:
            self.aot_schedule = False

    @classmethod
    def get_cudagraph_support(cls, vllm_config, kv_cache_spec):
        support = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        # The kernels read lengths on the device; layers that are left have what vLLM's have.
        return support if _left_of_cache(vllm_config, kv_cache_spec) else AttentionCGSupport.ALWAYS

    def use_cascade_attention(self, *args, **kwargs):
        """Never: a call of the kernels reads a prefix that many sequences share from the L2 cache."""
        return False


class SigmascaleImpl(FlashAttentionImpl):
    """One layer's attention. ``left``: why vLLM's own implementation runs it, or None."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.left = _left(self)
        if self.left is not None:
            _log.info_once("attention is left to vLLM's FlashAttention backend where %s", self.left)
            return
        # The kernels cast queries themselves, in the launch in front of the attention.
        self.supports_quant_query_input = False
        left, right = self.sliding_window
        self._terms = Terms(
            True,
            self.scale,
            window_left=left if left >= 0 else None,
            window_right=right if right > 0 else None,
            sinks=None if self.sinks is None else self.sinks.float().contiguous(),
            # One part: a row's sums are taken in one order, whatever else is in the batch and however it was cut into chunks.
            splits=1 if envs.VLLM_BATCH_INVARIANT else 0,
        )

    def forward(
        self,
        layer,
        query,
        key,
        value,
        kv_cache,
        attn_metadata,
        output,
        output_scale=None,
        output_block_scale=None,
    ):
        if self.left is not None or attn_metadata is None:
            rest = (output, output_scale, output_block_scale)
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, *rest)
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("an output in FP8 is not offered by this backend: turn the fusion of attention and quantization off")
        if attn_metadata.causal is not True:
            raise NotImplementedError("queries that see keys behind them are not offered by this backend: choose FLASH_ATTN")
        self._attend(layer, query, kv_cache, attn_metadata, output)
        return output

    def _attend(self, layer, query, kv_cache, metadata, output):
        tokens, starts = metadata.num_actual_tokens, metadata.query_start_loc
        if tokens == 0:
            return
        k, v = caches(kv_cache, self.head_size)
        sequences = starts.shape[0] - 1
        table, lengths = metadata.block_table[:sequences], metadata.seq_lens[:sequences]
        q = _aligned(query[:tokens].view(1, tokens, self.num_heads, self.head_size))
        out = output[:tokens].view(1, tokens, self.num_heads, self.head_size)
        longest = max(1, min(metadata.max_query_len, tokens))
        scales = (layer._q_scale, layer._k_scale, layer._v_scale)
        call = Call(
            q=q,
            pages=Pages(k, v, table, lengths, starts, longest),
            descales=tuple(scale.expand(sequences, self.num_kv_heads) for scale in scales),
            terms=self._terms,
            out=out,
            lse=torch.empty((1, self.num_heads, tokens), device=q.device, dtype=torch.float32),
        )
        backend("native").launch("forward", call, ("pages", q.shape, q.dtype, k.shape, table.shape, longest, self._terms.splits))


def caches(kv_cache, head_size):
    """Keys and values of a cache of vLLM's, ``(pages, page_size, heads, d_head)`` in E4M3."""
    # Both in a row: (pages, heads, page_size, 2 d_head); or one behind the other: (2, pages, page_size, heads, d_head).
    k, v = kv_cache.unbind(0) if kv_cache.dim() == 5 else kv_cache.transpose(1, 2).split(head_size, dim=-1)
    return k.view(E4M3), v.view(E4M3)


def _left(impl):
    """Why the kernels do not take a layer, or None."""
    config = get_current_vllm_config_or_none()
    if impl.attn_type != AttentionType.DECODER:
        return f"it is of the kind {impl.attn_type}"
    if impl.kv_cache_dtype not in ("fp8", "fp8_e4m3"):
        return f"the cache is {impl.kv_cache_dtype}, not fp8 (--kv-cache-dtype fp8)"
    if impl.head_size not in HEAD_DIMS:
        return f"heads have {impl.head_size} channels, not 64 or 128"
    if impl.logits_soft_cap:
        return "logits have a soft-cap"
    if impl.alibi_slopes is not None:
        return "logits have ALiBi slopes"
    if config is None:
        return None
    if config.model_config is not None and config.model_config.dtype != torch.bfloat16:
        return f"the model computes in {config.model_config.dtype}, not bfloat16"
    if config.parallel_config.decode_context_parallel_size > 1:
        return "the context of decodes is spread over devices"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        return "the device is not a Hopper GPU"
    return None


def _left_of_cache(vllm_config, spec):
    """Why the kernels do not read a cache, or None: before there are layers."""
    size = getattr(spec, "head_size", None)
    page = getattr(spec, "block_size", None)
    if size not in HEAD_DIMS or page not in PAGE_SIZES:
        return f"pages of {page} tokens of {size} channels"
    return None if vllm_config.cache_config.cache_dtype in ("fp8", "fp8_e4m3") else "the cache is not fp8"
