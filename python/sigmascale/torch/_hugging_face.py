"""Hugging Face transformers: the attention function, and masks as sequences."""

from __future__ import annotations

from typing import Literal

import torch

from .._errors import ArgumentError, UnsupportedError
from ._attention import attend
from ._cache import cast_heads
from ._e4m3 import E4M3
from ._flash import packed
from ._plan import plan_of_module
from ._terms import Sequences, readable


def hugging_face(module, query, key, value, attention_mask, scaling=None, dropout=0.0, is_causal=None, **kwargs):
    """The function behind ``attn_implementation="sigmascale_fp8"``."""
    plan = plan_of_module(module)
    for setting in ("position_bias", "cache"):
        if kwargs.get(setting) is not None:
            raise UnsupportedError(
                f"{setting} is not supported in FP8: load the model with another attn_implementation"
            )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    given, window = query.dtype, kwargs.get("sliding_window")
    sinks, sequences = kwargs.get("s_aux"), None
    if kwargs.get("cu_seq_lens_q") is not None and query.shape[0] == 1:
        longest = kwargs.get("max_length_q") or query.shape[2], kwargs.get("max_length_k") or key.shape[2]
        sequences, attention_mask = packed(kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"], *longest), None
    elif attention_mask is not None and attention_mask.dtype == torch.int32:
        query, key, value, sequences = _placed(query, key, value, attention_mask)
        attention_mask = None
    if key.dtype == E4M3:
        query = cast_heads(query, plan, "q")
    if attention_mask is not None:
        # It has the window in it.
        causal = window = None
    side = window - 1 if window else -1
    out, _ = attend(
        *(x.transpose(1, 2) for x in (query, key, value)),
        plan,
        causal=bool(causal),
        softmax_scale=scaling,
        mask=attention_mask,
        sequences=sequences,
        window=(side, side),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("sinks") if sinks is None else sinks,
        dropout=dropout,
    )
    return out.to(given), None


def continuous(module, query, key, value, attention_mask=None, cache=None, **kwargs):
    """The function behind ``attn_implementation="paged|sigmascale_fp8"``, which ``generate_batch`` sets: new keys and
    values go into its cache, and those of each sequence come back packed."""
    if cache is None:
        raise ArgumentError(
            "this attn_implementation is for generate_batch: call set_attn_implementation(sigmascale.torch.register()) for "
            "other calls"
        )
    places = {name: kwargs[name] for name in ("read_index", "write_index")}
    key, value = (x.transpose(0, 1)[None] for x in cache.update(key, value, module.layer_idx, **places))
    kind = "sliding_attention" if kwargs.get("sliding_window") else "full_attention"
    of_layer = lambda x: x[kind] if isinstance(x, dict) else x
    lengths = {
        "cu_seq_lens_q": kwargs["cu_seq_lens_q"],
        "cu_seq_lens_k": of_layer(kwargs["cu_seq_lens_k"]),
        "max_length_q": kwargs["max_seqlen_q"],
        "max_length_k": of_layer(kwargs["max_seqlen_k"]),
    }
    return hugging_face(module, query, key, value, None, **(kwargs | lengths))


def _placed(query, key, value, mask):
    """The operands, and their sequences from a mask that :func:`_mask` made."""
    *places, sound = mask[:, :, 0, 0]
    longest = getattr(mask, _LONGEST, None) or (query.shape[2], key.shape[2])
    if not readable(query):
        # What the mask does not describe cannot be refused here.
        query = torch.where(sound.bool().view(-1, 1, 1, 1), query, torch.nan)
    if not places:
        return query, key, value, None
    order = getattr(mask, _ORDER, None)
    if order is not None:
        # Of E4M3 as bytes. A static cache has places after the mask, which hold nothing yet.
        taken = lambda x: x.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
        key, value = (taken(x.view(torch.uint8)).view(E4M3) if x.dtype == E4M3 else taken(x) for x in (key, value))
    return query, key, value, Sequences(*places, *longest)


def register(name: str = "sigmascale_fp8", *, padding: Literal["right"] | None = None) -> str:
    """Makes ``attn_implementation=name`` known to Hugging Face transformers, and returns the name.

    Then ``model.set_attn_implementation(name)`` sends every attention layer of an attached model through FP8: training
    with padding on either side, packed sequences, sliding windows, soft-caps and sinks, generation with growing and
    static caches, encoders and cross-attention. Padding and lengths stay on the device. Calls that no FP8 kernel
    supports (dropout, other masks) are refused, or run in PyTorch's attention after ``attach(..., fallback="bf16")``.
    ``generate_batch`` takes ``"paged|" + name``; given ``name`` alone it prefers FlashAttention where that is installed.
    Of a model with a vision or audio part, ``set_attn_implementation({"text_config": name})`` leaves that part as it is.

    Padding rows are zero. Under ``torch.compile`` and CUDA graph capture the values of a mask cannot be read: padding
    must then be on one side of each sequence, and a sequence with interior padding becomes NaN. So does a compiled
    batch of packed sequences that come without ``cu_seq_lens_q`` and the like (``DataCollatorWithFlattening`` with
    ``return_flash_attn_kwargs=True``).

    ``padding="right"`` states that batches of full sequences are padded on the right, if at all, and never packed.
    Their masks are then not read. Padding rows attend like other rows, but no other row reads their results.

    Raises :class:`UnsupportedError` if transformers is missing or too old.
    """
    if padding not in (None, "right"):
        raise ArgumentError(f"padding {padding!r} must be 'right' or None")
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    except ImportError as error:
        raise UnsupportedError("transformers 4.53 or later is needed for its AttentionInterface") from error

    def mask(**kwargs):
        known, places = _mask(padding == "right", **kwargs)
        return places if known else sdpa_mask(**kwargs)

    AttentionInterface.register(name, hugging_face)
    AttentionInterface.register(f"paged|{name}", continuous)
    AttentionMaskInterface.register(name, mask)
    return name


# Where a mask keeps the lengths of the longest of packed sequences, and the order of keys whose padding lies between.
_LONGEST, _ORDER = "_sigmascale_longest", "_sigmascale_order"


def _mask(
    right,
    batch_size,
    q_length,
    kv_length,
    q_offset=0,
    kv_offset=0,
    mask_function=None,
    attention_mask=None,
    local_size=None,
    use_vmap=False,
    config=None,
    device=None,
    **others,
):
    """Whether a mask of transformers is one of sequences that are causal, windowed or whole, and then what represents
    it: None for a call without padding, else int32 ``(5, sequences, 1, 1)``, starts and ends of queries, starts and
    ends of keys, and whether a text has no padding inside; transformers hands on what has four dimensions. Where
    only the device knows whether sequences are packed, int32 ``(1, sequences, 1, 1)``: whether none are. ``right``:
    padding is on the right, and nothing is packed.

    ``local_size`` is a window's width, or a chunk's. Packed sequences and functions of a model's own are composed by
    ``and_masks``.
    """
    other, named = (False, None), getattr(mask_function, "__name__", None)
    # transformers says of masks without causality alone that they may be left out.
    causal = "allow_is_bidirectional_skip" not in others
    windowed = local_size is not None
    if use_vmap or named not in ("causal_mask_function", "bidirectional_mask_function", "and_mask"):
        return other
    if windowed and (getattr(config, "attention_chunk_size", None) or getattr(config, "sliding_window", None) != local_size):
        return other
    whole = isinstance(q_offset, int) and q_offset == 0 == kv_offset and q_length == kv_length
    if right and causal and whole:
        return True, None
    if named == "and_mask" and causal and whole and attention_mask is None and q_length > 1:
        if torch.compiler.is_compiling():
            # transformers assumes packed sequences here. Nothing is packed if each token sees the one before it.
            row = torch.arange(batch_size, dtype=torch.int64, device=device)[:, None]
            token = torch.arange(1, q_length, dtype=torch.int64, device=device)
            together = mask_function(row, row.new_zeros((), dtype=torch.int64), token, token - 1)
            # Without one row for each text there is no packing in it: a window alone, of calls with a cache.
            if together.dim() == 2:
                return True, together.all(dim=1).to(torch.int32)[None, :, None, None]
        else:
            documents = _documents(mask_function)
            if documents is not None:
                return (True, _packed(documents)) if readable(documents) else other
    if named == "and_mask" and not windowed:
        return other
    end = q_offset + q_length - kv_offset
    if attention_mask is None:
        if not causal or (isinstance(end, int) and end == kv_length):
            return True, None
        starts, ends = torch.zeros(batch_size, dtype=torch.int32, device=device), end
        sound = torch.ones_like(starts)
    else:
        kept = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
        count = kept.sum(dim=1)
        starts = kept.int().argmax(dim=1)
        ends = torch.where(count > 0, kept.shape[1] - kept.flip(1).int().argmax(dim=1), 0)
        sound = ends - starts == count
        if causal:
            ends = ends.clamp_max(end)
        if readable(kept):
            sound_all, nothing_hidden = torch.stack([sound.all(), (count == kv_length).all()]).tolist()
            if not sound_all:
                return other if windowed or not causal else _gathered(kept, q_length, end)
            if nothing_hidden:
                return True, None
    # Queries that stand at padding see nothing; those of another text, of cross-attention, are all seen.
    first, last = torch.zeros_like(starts), q_length
    if attention_mask is not None and (causal or windowed):
        first, last = ((x + kv_offset - q_offset).clamp(0, q_length) for x in (starts, ends))
    row = torch.arange(batch_size, dtype=torch.int64, device=starts.device)
    rows = (row * q_length + first, row * q_length + last, row * kv_length + starts, row * kv_length + ends, sound)
    return True, torch.stack([x.to(torch.int32) for x in rows])[..., None, None]


def _gathered(kept, q_length, end):
    """Keys with padding between, as after a prompt that is padded on the right: those that count are gathered in
    front."""
    if not isinstance(end, int):
        end = end.item()
    if not bool(kept[:, end - q_length : end].all()):
        return False, None
    row, count = torch.arange(kept.shape[0], dtype=torch.int64, device=kept.device), kept.sum(dim=1)
    q, k = row * q_length, row * kept.shape[1]
    mask = torch.stack([q, q + q_length, k, k + count, torch.ones_like(q)]).to(torch.int32)[..., None, None]
    setattr(mask, _ORDER, torch.argsort(~kept, dim=1, stable=True))
    return True, mask


def _documents(function):
    """Which of several packed sequences each token is of, ``(batch, seq)``, if ``function`` was composed for packed
    sequences."""
    for cell in function.__closure__ or ():
        for part in cell.cell_contents if isinstance(cell.cell_contents, tuple) else ():
            if getattr(part, "__qualname__", "").startswith("packed_sequence_mask_function."):
                return part.__closure__[0].cell_contents
    return None


def _packed(documents):
    """Packed sequences as a mask; waits for the device, since their number is a shape."""
    batch, length = documents.shape
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    ends = [*begins.flatten().nonzero().flatten().tolist(), batch * length]
    spans = torch.tensor([ends[:-1], ends[1:]] * 2 + [[1] * (len(ends) - 1)], dtype=torch.int32, device=documents.device)
    spans, longest = spans[..., None, None], max(b - a for a, b in zip(ends, ends[1:]))
    setattr(spans, _LONGEST, (longest, longest))
    return spans
