"""Moves the biases of values behind attention, where every engine adds them without rounding them in its cache."""

import torch

from .._errors import UnsupportedError
from . import _distributed, _layers

# Attention whose rows of P sum to 1 and whose output goes into this projection as it is, with nothing between.
_OUT = {
    "gpt2": "c_proj",
    "gpt_neox": "dense",
    "granite": "o_proj",
    "llama": "o_proj",
    "phi": "dense",
    "starcoder2": "o_proj",
}


def fold_values(model: torch.nn.Module) -> int:
    """Takes the bias off the values of each attention layer, and adds what it contributes to the bias of the output projection.
    Gives the number of layers that changed.

    The model computes the same: rows of softmax sum to 1, so ``o_proj(P (V + m)) = o_proj(P V) + W_O m``. Values without their
    bias are what an FP8 cache then rounds, and sums of P V in FP8 lose less of them. Save the model and :func:`sigmascale.export`
    it: engines need nothing. The new bias is computed in float64 and rounded once to the model's type. With dropout of P in
    training, rows do not sum to 1.

    An :class:`UnsupportedError`, with the model unchanged: a family that is not among GPT-2, GPT-NeoX, Granite, Llama, Phi and
    StarCoder2; values without a bias; an output projection without one (Qwen2), since engines build it so; weights that are
    sharded or quantized.
    """
    family = getattr(getattr(model, "config", None), "model_type", None)
    if family not in _OUT:
        raise UnsupportedError(f"fold_values knows {', '.join(_OUT)}, and the model is {family}: leave its values as they are")
    changes = [change for layer in _layers.find(model) if (change := _change(layer, _OUT[family])) is not None]
    if not changes:
        raise UnsupportedError("the values of the model have no bias, so there is nothing to fold")
    with torch.no_grad():
        for bias, place, out, added in changes:
            bias[place] = 0
            out.copy_((out.double() + added).to(out.dtype))
    return len(changes)


def _change(layer, name):
    """The bias of the values, where it is in its tensor, the bias of the output, and what is added to that one."""
    bias = layer.v_bias
    if bias is None:
        return None
    out = getattr(layer.module, name, None)
    held = [layer.v, bias, getattr(out, "weight", None), getattr(out, "bias", None)]
    if held[3] is None:
        raise UnsupportedError(f"{layer.name}: {name} has no bias, so the bias of the values has no place to go: leave it where it is")
    for tensor in held:
        if _distributed.is_dtensor(tensor) or not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2 or tensor.is_meta:
            raise UnsupportedError(f"{layer.name}: fold_values takes whole weights in 16 bits or more: fold before they are sharded or quantized")
    d, starts = layer.d_head, range(0, bias.shape[0], layer.d_head)
    if layer.heads is not None:
        starts = layer.heads[2]
    place = torch.tensor([row for start in starts for row in range(start, start + d)], dtype=torch.int64, device=bias.device)
    rows = bias.detach()[place].double().view(layer.n_kv_heads, d)
    if not rows.any():
        return None
    constant = rows.repeat_interleave(layer.n_q_heads // layer.n_kv_heads, dim=0).flatten()
    # GPT-2 stores it [in, out].
    weight = out.weight.detach() if name != "c_proj" else out.weight.detach().t()
    return bias, place, out.bias, weight.double() @ constant
