"""Hugging Face transformers: the attention function and its masks."""

import torch

from .._errors import UnsupportedError
from ._attention import attend
from ._flash import packed
from ._runtime import plan_of_module


def hugging_face(module, query, key, value, attention_mask, scaling=None, dropout=0.0, is_causal=None, **kwargs):
    """The function behind ``attn_implementation="sigmascale_fp8"``."""
    plan = plan_of_module(module)
    for setting in ("position_bias", "cache"):
        if kwargs.get(setting) is not None:
            raise UnsupportedError(f"{setting} is not offered in FP8: load the model with another attn_implementation")
    decoder = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    causal = bool(decoder and query.shape[2] > 1 and attention_mask is None)
    if causal and key.shape[2] > query.shape[2]:
        # Without a mask the cache is empty but for these keys: a static one has room for more.
        key, value = (x[:, :, : query.shape[2]] for x in (key, value))
    window = kwargs.get("sliding_window")
    sinks = kwargs.get("s_aux")
    where = {"mask": attention_mask}
    if kwargs.get("cu_seq_lens_q") is not None and query.shape[0] == 1 and not window:
        ends = [kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]]
        where = packed(*ends, query.shape[2], key.shape[2], decoder)
    out, _ = attend(
        *(x.transpose(1, 2) for x in (query, key, value)),
        plan,
        causal=causal,
        softmax_scale=scaling,
        window=(window - 1, -1) if window and attention_mask is None else (-1, -1),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("sinks") if sinks is None else sinks,
        dropout=dropout,
        **where,
    )
    return out.to(query.dtype), None


def register(name="sigmascale_fp8"):
    """Makes ``attn_implementation=name`` known to Hugging Face transformers, and returns the name.

    Then ``model.set_attn_implementation(name)`` sends every attention layer of an attached model through FP8: training with
    right padding, generation with left padding and with a static cache, packed sequences. What no FP8 kernel takes (windows
    shorter than the sequence, soft-caps, sinks, dropout, masks inside compiled code) is refused, or goes to PyTorch's own
    attention after ``attach(..., fallback="bf16")``.

    In a causal call on a right-padded batch, rows of padding attend as if it were text; what they give is read by no other
    row. Raises :class:`UnsupportedError` if transformers is not there or too old.
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask
    except ImportError as error:
        raise UnsupportedError("transformers 4.53 or later is needed for its AttentionInterface") from error

    def mask(*args, **kwargs):
        if kwargs.get("mask_function") is causal_mask_function and _only_padded_right(**kwargs):
            return None
        return sdpa_mask(*args, **kwargs)

    AttentionInterface.register(name, hugging_face)
    # No mask where a causal flag says the same.
    AttentionMaskInterface.register(name, mask)
    return name


def _only_padded_right(attention_mask=None, q_length=None, kv_length=None, q_offset=0, allow_is_causal_skip=True, **_):
    """Whether all that a plain causal mask of a whole sequence adds is padding behind every text."""
    if attention_mask is None or not allow_is_causal_skip or torch.compiler.is_compiling():
        return False
    if attention_mask.shape[1:] != (kv_length,) or q_length != kv_length or isinstance(q_offset, torch.Tensor) or q_offset:
        return False
    if attention_mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    kept = attention_mask.bool()
    return bool((kept[:, :-1] | ~kept[:, 1:]).all() & kept[:, 0].all())
