"""Hugging Face transformers: the attention function and its masks."""

import torch

from .._errors import ArgumentError, UnsupportedError
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


def register(name="sigmascale_fp8", *, padding=None):
    """Makes ``attn_implementation=name`` known to Hugging Face transformers, and returns the name.

    Then ``model.set_attn_implementation(name)`` sends every attention layer of an attached model through FP8: training with
    right padding, generation with left padding and with a static cache, packed sequences. What no FP8 kernel takes (windows
    shorter than the sequence, soft-caps, sinks, dropout, masks inside compiled code) is refused, or goes to PyTorch's own
    attention after ``attach(..., fallback="bf16")``.

    In a causal call on a batch that is padded on the right, rows of padding attend as if they were text; no row of text reads
    what they give. ``padding="right"`` says that all batches of whole sequences are such and that none is packed: then nothing is
    read off their masks, and models under ``torch.compile``, where it cannot be, train in FP8.

    Raises :class:`UnsupportedError` if transformers is not there or too old.
    """
    if padding not in (None, "right"):
        raise ArgumentError(f"padding {padding!r} must be 'right' or None")
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    except ImportError as error:
        raise UnsupportedError("transformers 4.53 or later is needed for its AttentionInterface") from error

    def mask(*args, **kwargs):
        if _whole_and_causal(**kwargs) and (padding == "right" or _padded_right(**kwargs)):
            return None
        return sdpa_mask(*args, **kwargs)

    AttentionInterface.register(name, hugging_face)
    # No mask where a causal flag says the same.
    AttentionMaskInterface.register(name, mask)
    return name


def _whole_and_causal(
    mask_function=None, q_length=0, kv_length=0, q_offset=0, local_size=None, use_vmap=False, **others
):
    """Whether a mask is that of whole sequences, causal but for padding or packing. transformers composes the latter with
    ``and_masks``, as it does windows, which have a ``local_size``, and functions of the model's own, which need ``vmap``."""
    named = getattr(mask_function, "__name__", None)
    if named not in ("causal_mask_function", "and_mask") or use_vmap or "allow_is_bidirectional_skip" in others:
        return False
    return q_length == kv_length > 1 and local_size is None and isinstance(q_offset, int) and q_offset == 0


def _padded_right(attention_mask=None, mask_function=None, **_):
    """Whether padding stands behind the text of every sequence, which is read off the mask, and nothing is packed."""
    if attention_mask is None or mask_function.__name__ == "and_mask" or torch.compiler.is_compiling():
        return False
    if attention_mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    kept = attention_mask.bool()
    return bool((kept[:, :-1] | ~kept[:, 1:]).all() & kept[:, 0].all())
